"""When a product and what follows it are one kernel: never for small ones."""

from __future__ import annotations

from itertools import pairwise

import pytest

from shardmath.machine import h200
from shardmath.operators.matmul.gpu.local_product import OperandLayout, SplitKProduct
from shardmath.operators.matmul.gpu.reduction_choice import (
    adds_in_half_precision,
    choose,
    choose_schedule,
    choose_shared_schedule,
)
from shardmath.operators.matmul.gpu.tile_order import TileOrder


def product(m: int, n: int, k: int, size: int = 8) -> SplitKProduct:
    rows = tuple((rank + 1) * m // size - rank * m // size for rank in range(size))
    return SplitKProduct(
        rows, n, k // size, "bfloat16", OperandLayout("C", k), OperandLayout("C", n)
    )


@pytest.mark.parametrize(
    ("size", "m", "n", "k", "scatters", "reduces"),
    [
        (8, 8192, 8192, 28672, True, True),
        (8, 16384, 16384, 53248, True, True),
        (8, 4096, 12288, 49152, True, True),
        (8, 2048, 8192, 28672, True, True),
        (8, 1024, 8192, 28672, True, True),
        (8, 512, 8192, 28672, False, False),
        (8, 256, 8192, 28672, False, False),
        (8, 64, 64, 64, False, False),
        (4, 8192, 8192, 28672, True, True),
        (4, 1024, 8192, 28672, True, True),  # 4 x H200: 195 and 225 us, apart 203 and 245 us
        (4, 512, 8192, 28672, False, False),
        (2, 8192, 8192, 28672, True, True),
        (2, 16384, 16384, 53248, True, True),  # 2 x H200: 21.3 ms, apart 22.1
        (2, 4096, 12288, 49152, True, True),  # 2 x H200: 3.66 ms, apart 3.85
        (2, 1024, 8192, 28672, False, True),  # 2 x H200: 371 and 391 us, apart 367 and 397 us
        (2, 512, 8192, 28672, False, False),
    ],
)
def test_large_products_are_fused(
    size: int, m: int, n: int, k: int, scatters: bool, reduces: bool
) -> None:
    part = product(m, n, k, size)
    scatter, reduce = choose("reduce-scatter", part), choose("all-reduce", part)
    assert (scatter.fused, reduce.fused) == (scatters, reduces)
    for choice in (scatter, reduce):
        assert choice.fused == (choice.fused_seconds < choice.separate_seconds)
        assert str(choice).startswith("one kernel" if choice.fused else "cuBLAS")


def test_predictions_grow_with_the_work() -> None:
    times = [choose("reduce-scatter", product(m, 8192, 28672)) for m in (1024, 2048, 4096, 8192)]
    for less, more in pairwise(times):
        assert less.fused_seconds < more.fused_seconds
        assert less.separate_seconds < more.separate_seconds


def test_two_steps_take_no_less_than_their_bytes() -> None:
    """A collective sends what it must, and a product reads its factors, however small both are."""
    for m in (1, 16, 200, 3000):
        part = product(m, 8192, 28672)
        sent = 2 * m * 8192 * 7 / 8
        read = 2 * part.depth * (m + 8192)
        for choice, wire in (
            (choose("reduce-scatter", part), sent / h200.SCATTERED),
            (choose("all-reduce", part), 2 * sent / h200.SHARED),
        ):
            least = wire + max(read / h200.READING, part.flops / h200.HALF_PRODUCT)
            assert least < choice.separate_seconds < 2 * least + 40e-6


def test_small_results_are_sums_of_float32() -> None:
    assert [adds_in_half_precision(elements) for elements in (0, 1, 1 << 18, (1 << 18) + 1)] == [
        *(False, False, False),
        True,
    ]


SHAPES = [
    # ranks, m, n, k, and then chunks, of these aside each other
    (8, 8192, 8192, 28672, 32, 4),
    (4, 8192, 8192, 28672, 32, 4),
    (4, 1024, 8192, 28672, 4, 4),
    (4, 512, 8192, 28672, 2, 2),
    (4, 4096, 12288, 49152, 24, 6),
    (8, 16384, 16384, 53248, 64, 4),
    (8, 64, 64, 64, 1, 1),
    (4, 100000, 64, 64, 16, 1),
]


@pytest.mark.parametrize(("size", "m", "n", "k", "chunks", "chunk_columns"), SHAPES)
def test_chunks_are_what_is_multiplied_at_once(
    size: int, m: int, n: int, k: int, chunks: int, chunk_columns: int
) -> None:
    part = product(m, n, k, size)
    shape = choose_shared_schedule(part)
    assert (shape.chunks, shape.chunk_columns) == (chunks, chunk_columns)
    tile_order = TileOrder(part.rows, n, chunks, chunk_columns)
    for owner in range(size):
        tiles = [chunk.tiles for chunk in tile_order.parts(owner)]
        assert len(tiles) == chunks and sum(tiles) == tile_order.tiles(owner)


def test_blocks_begin_apart_where_each_has_several_tiles() -> None:
    """The last begins when the first would have sent its tile, or multiplied it."""
    for size in (2, 4, 8):
        once, twice, flat = (
            product(*shape, size)
            for shape in ((1024, 4096, 28672), (1024, 8192, 28672), (1024, 8192, 512))
        )
        assert (
            choose_schedule(once).stagger_cycles == choose_shared_schedule(once).stagger_cycles == 0
        )
        stagger_cycles = choose_schedule(twice).stagger_cycles
        sending = 128 * 128 * 256 * 2 * (1 - 1 / size) / h200.BURST
        assert stagger_cycles * 64 == pytest.approx(sending * h200.CLOCK, rel=0.01)
        assert 0 < choose_shared_schedule(flat).stagger_cycles < stagger_cycles
