"""When a product and what follows it are one kernel: never for small ones."""

from __future__ import annotations

from itertools import pairwise

import pytest

from shardmath.operators.matmul.gpu.choice import choose_all_reduce, choose_reduce_scatter
from shardmath.operators.matmul.gpu.sharded import Factor, ShardedProduct


def product(m: int, n: int, k: int, size: int = 8) -> ShardedProduct:
    rows = tuple((rank + 1) * m // size - rank * m // size for rank in range(size))
    return ShardedProduct(rows, n, k // size, "bfloat16", Factor("C", k), Factor("C", n))


@pytest.mark.parametrize(
    ("m", "n", "k", "scatters", "reduces"),
    [
        (8192, 8192, 28672, True, True),
        (16384, 16384, 53248, True, True),
        (4096, 12288, 49152, True, True),
        (2048, 8192, 28672, True, True),
        (256, 8192, 28672, False, False),
        (64, 64, 64, False, False),
    ],
)
def test_large_products_are_fused(m: int, n: int, k: int, scatters: bool, reduces: bool) -> None:
    scatter, reduce = choose_reduce_scatter(product(m, n, k)), choose_all_reduce(product(m, n, k))
    assert (scatter.fused, reduce.fused) == (scatters, reduces)
    for choice in (scatter, reduce):
        assert choice.fused == (choice.fused_seconds < choice.separate_seconds)
        assert str(choice).startswith("fused" if choice.fused else "cuBLAS")


def test_predictions_grow_with_the_work() -> None:
    times = [choose_reduce_scatter(product(m, 8192, 28672)) for m in (1024, 2048, 4096, 8192)]
    for less, more in pairwise(times):
        assert less.fused_seconds < more.fused_seconds
        assert less.separate_seconds < more.separate_seconds
