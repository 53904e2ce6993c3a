"""The tables of pipelines, which a kernel reads: sizes that no test can allocate, and limits."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shardmath.arrays import ArraySpec
from shardmath.geometry import Slab
from shardmath.operators.fft.chunking import chunking_for
from shardmath.operators.fft.local_steps import packed
from shardmath.operators.fft.options import FFTDirection, FFTOptions
from shardmath.operators.fft.pipeline import Rows, pipelined
from shardmath.operators.fft.problem import check, describe
from shardmath.operators.fft.program import UserArrays
from shardmath.operators.fft.push_stream import cluster_size, push_blocks
from shardmath.operators.fft.search import choose
from shardmath.operators.fft.stages import stages
from shardmath.operators.fft.strategy import GPUS

LARGE = {"512^3": (512,) * 3, "1024^3": (1024,) * 3, "uneven": (2047, 1032, 1024)}


@pytest.mark.parametrize("size", [2, 4, 7, 8])
@pytest.mark.parametrize("name", LARGE)
def test_tables_of_large_arrays(name, size):
    """Offsets beyond 2^32 bytes: all of every rank's landing and result is written, and no more."""
    slab, shape = Slab.X, LARGE[name]
    options = FFTOptions(redistribute=True)
    owned = [slab.index_ranges(rank, shape, size=size) for rank in range(size)]
    locals_ = [tuple(sum(hi - lo for lo, hi in axis) for axis in ranges) for ranges in owned]
    specs = [
        ArraySpec("torch", "complex128", local, (local[1] * local[2], local[2], 1), "cuda:0", 16)
        for local in locals_
    ]
    problem = check(
        [describe(s, slab, None, None, "C2C", FFTDirection.FORWARD, options, None) for s in specs]
    )
    found = stages(choose(problem, GPUS), reachable=True)
    written = np.zeros((2, size), np.int64)
    for rank in range(size):
        operand, result = (
            packed(place, locals_[rank], "complex128") for place in ("operand", "result")
        )
        chunking = chunking_for(problem, two_exchanges=True)
        pipeline = pipelined(found, rank, UserArrays(operand, result), chunking, order="C")
        chunks, rows = pipeline.tables(1 << 14)
        sides = pipeline.buffers | {"result": result.size * 16}
        for chunk in chunks.tolist():
            source = sides[pipeline.sources[chunk[4]]]
            for row in rows[chunk[0] : chunk[0] + chunk[1]].tolist():
                begin, to, step, to_step, unit, count, pieces, target = row
                exchange, peer = divmod(target, size)
                there = (found[1], found[3])[exchange].result.local_shape(peer)
                assert begin + (count - 1) * step + unit <= source
                assert to + (count - 1) * to_step + unit <= math.prod(there) * 16
                assert (pieces - 1) << 14 < unit <= pieces << 14
                written[exchange, peer] += unit * count
    for exchange, stage in enumerate((found[1], found[3])):
        wanted = [math.prod(stage.result.local_shape(peer)) * 16 for peer in range(size)]
        assert written[exchange].tolist() == wanted


@pytest.mark.parametrize(
    ("unit", "fits"), [(496, 0), (512, 1), (520, 0), ((1 << 32) - 16, 1), (1 << 32, 0)]
)
def test_rows_that_the_kernel_takes(unit, fits):
    assert Rows(0, unit, 2, 0, 2 * unit, 1 << 40, 2 * unit).fits == fits


@pytest.mark.parametrize(
    ("blocks", "most", "wide"),
    [(32, 16, 16), (16, 16, 16), (30, 16, 1), (24, 16, 8), (17, 16, 1), (1, 16, 1), (32, 8, 8),
     (32, 15, 8), (32, 1, 1), (24, 4, 1)],
)  # fmt: skip
def test_blocks_that_push_are_neighbours(blocks, most, wide):
    asked = []

    def holds(count, size):
        asked.append((count, size))
        return size <= most

    assert cluster_size(blocks, holds) == wide
    assert all(count * size == blocks for count, size in asked)


@pytest.mark.parametrize("two_exchanges", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7, 8, 16, 40, 72])
def test_each_peer_has_as_many_blocks(size, two_exchanges):
    blocks = push_blocks(size, two_exchanges=two_exchanges)
    assert blocks % size == 0 and size <= blocks <= max(32, size)
    assert (blocks == 16) == (size in (4, 8, 16) and not two_exchanges)
