"""The tables of pipelines, which a kernel reads: sizes that no test can allocate, and limits."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shardmath.arrays import ArraySpec
from shardmath.geometry import Slab
from shardmath.operators.fft.gpus import cluster_size, push_blocks
from shardmath.operators.fft.lowering import GPUPlan, Results, UserArrays, lowered
from shardmath.operators.fft.options import FFTDirection, FFTOptions
from shardmath.operators.fft.problem import check, describe
from shardmath.operators.fft.pushes import Rows, tables
from shardmath.operators.fft.stages import chunking_for, stages
from shardmath.operators.fft.strategy import ON_GPUS, choose
from shardmath.program.rank_program import packed

LARGE = {"512^3": (512,) * 3, "1024^3": (1024,) * 3, "uneven": (2047, 1032, 1024)}


@pytest.mark.parametrize("size", [2, 4, 7, 8])
@pytest.mark.parametrize("name", LARGE)
def test_tables_of_large_arrays(name, size):
    """Offsets beyond 2^32 bytes: every receive buffer and result is written once, and no more."""
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
    plan = GPUPlan(problem, choose(problem, ON_GPUS), (0,) * size)
    found = stages(plan.strategy)
    chunking = chunking_for(problem, two_exchanges=True)
    written = np.zeros((2, size), np.int64)
    for rank in range(size):
        operand, out = (packed(name, locals_[rank], "complex128") for name in ("operand", "out"))
        program = lowered(plan, rank, UserArrays(operand, out), Results(True, True), chunking)
        start = program.steps[0].plan
        chunks, rows = tables(start, 1 << 14)
        sizes = {name: memory.nbytes for name, memory in program.memories.items()}
        for chunk in chunks.tolist():
            nbytes = sizes[start.sources[chunk[4]]]
            for row in rows[chunk[0] : chunk[0] + chunk[1]].tolist():
                source, target, source_pitch, target_pitch, width, count, copies, peer = row
                exchange, peer = divmod(peer, size)
                there = (found[1], found[3])[exchange].result.local_shape(peer)
                assert source + (count - 1) * source_pitch + width <= nbytes
                assert target + (count - 1) * target_pitch + width <= math.prod(there) * 16
                assert (copies - 1) << 14 < width <= copies << 14
                written[exchange, peer] += width * count
    for exchange, stage in enumerate((found[1], found[3])):
        wanted = [math.prod(stage.result.local_shape(peer)) * 16 for peer in range(size)]
        assert written[exchange].tolist() == wanted


@pytest.mark.parametrize(
    ("width", "fits"), [(496, 0), (512, 1), (520, 0), ((1 << 32) - 16, 1), (1 << 32, 0)]
)
def test_rows_that_the_kernel_takes(width, fits):
    assert Rows(0, width, 2, 0, 2 * width, 1 << 40, 2 * width).fits == fits


@pytest.mark.parametrize(
    ("blocks", "held", "size"),
    [(32, 16, 16), (16, 16, 16), (30, 16, 1), (24, 16, 8), (17, 16, 1), (1, 16, 1), (32, 8, 8),
     (32, 15, 8), (32, 1, 1), (24, 4, 1)],
)  # fmt: skip
def test_cluster_size(blocks, held, size):
    asked = []

    def holds(count, each):
        asked.append((count, each))
        return each <= held

    assert cluster_size(blocks, holds) == size
    assert all(count * each == blocks for count, each in asked)


@pytest.mark.parametrize("two_exchanges", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7, 8, 16, 40, 72])
def test_each_peer_has_as_many_blocks(size, two_exchanges):
    blocks = push_blocks(size, two_exchanges=two_exchanges)
    assert blocks % size == 0 and size <= blocks <= max(32, size)
    assert (blocks == 16) == (size in (4, 8, 16) and not two_exchanges)
