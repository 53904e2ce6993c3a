"""A program of a user's, whose types `mypy --strict` follows: arrays of a kind give that kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_type

import numpy as np
from numpy.typing import NDArray

import shardmath
from shardmath import autograd, fft, nn
from shardmath.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    reduce_scatter,
)
from shardmath.distributed import DistributedArray
from shardmath.distribution import Box, Redistribute, Replicated, Slab, redistribute
from shardmath.linalg.advanced import MatmulEpilog, matmul
from shardmath.reshape import reshape

Matrix = NDArray[np.float64]


def norm(x: Matrix) -> np.float64:
    own: np.float64 = (x * x).sum()
    return all_reduce(own) ** 0.5


def product(x: Matrix, w: Matrix) -> Matrix:
    """Results are returned as they come: no type is lost on the way."""
    return matmul(x, w, distributions=[Slab.X, Replicated(), Slab.X])


def masked(x: Matrix, w: Matrix) -> tuple[Matrix, dict[str, Matrix]]:
    split = [Slab.X, Replicated(), Slab.X]
    return matmul(x, w, distributions=split, epilog=MatmulEpilog.GELU_AUX)


def whole(x: Matrix) -> Matrix:
    with Redistribute(x, Slab.X, Replicated()) as redistribution:
        redistribution.plan()
        return redistribution.execute()


def spectrum(x: NDArray[np.complex128]) -> NDArray[np.complex128]:
    with fft.FFT(x, distribution=Slab.X) as transform:
        transform.plan()
        return transform.execute()


def of_arrays(x: DistributedArray) -> DistributedArray:
    return matmul(x, fft.dct(redistribute(x, Slab.Y)))


def main() -> None:
    context = shardmath.initialize("cpu")
    rank, size = context.rank, context.size
    x: Matrix = np.ones((3, 4 * size))
    assert_type(all_gather(x), Matrix)
    assert_type(reduce_scatter(x, axis=1), Matrix)
    assert_type(all_to_all(x, axis=1), Matrix)
    assert_type(broadcast(x if rank == 0 else None), Matrix)
    assert_type(all_gather(x, async_op=True).wait(), Matrix)
    assert_type(redistribute(x, Slab.X, Slab.Y), Matrix)
    box = Box((3 * rank, 0), (3 * rank + 3, 4 * size))
    assert_type(reshape(x, box, box), Matrix)
    assert_type(fft.dctn(x, axes=[1], distribution=Slab.X), Matrix)
    split = [Slab(0), Replicated(), Slab(0)]
    q, k = nn.linear(x, [x, x], distributions=split, activation="relu")
    assert_type((q, k), tuple[Matrix, Matrix])
    assert_type(nn.linear(x, x, distributions=split), Matrix)
    values: Matrix = x.reshape(3, size, 4)
    assert_type(nn.tokens_to_heads(values, token_axis=0, head_axis=1), Matrix)
    if TYPE_CHECKING:  # it takes tensors of torch
        assert_type(autograd.copies(x), Matrix)
    found = [product(x, x.T), masked(x, x.T)[0], whole(x), q, k]
    assert all(isinstance(y, np.ndarray) for y in found)
    assert spectrum(x.astype(np.complex128)).shape == x.shape
    assert norm(x) == (12 * size * size) ** 0.5
    y = of_arrays(shardmath.ones((4, 4), distribution=Slab.X))
    print(type(y).__name__)
    shardmath.finalize()


if __name__ == "__main__":
    main()
