"""Data x tensor: a grid of ranks, and a context for each of its rows and columns.

python -m shardmath run -n 4 examples/grid.py

              tensor 0   tensor 1
data 0      |  rank 0  |  rank 1  |   a row shares one batch, and splits the weights
data 1      |  rank 2  |  rank 3  |   a column holds the same weights, and averages gradients
"""

from __future__ import annotations

import numpy as np

import shardmath
from shardmath.collectives import all_reduce
from shardmath.distribution import Replicated, Slab, redistribute
from shardmath.linalg.advanced import matmul

BATCH, IN, OUT = 6, 5, 7


def main() -> None:
    """One step of least squares, y = x @ w, with the batch and the weights both split."""
    context = shardmath.initialize("cpu")
    tensor = 2 if context.size % 2 == 0 else 1  # ranks that split the weights
    row, column = divmod(context.rank, tensor)
    along_tensor = context.split(color=row)  # ranks with the same batch
    along_data = context.split(color=column)  # ranks with the same part of the weights

    x = np.random.default_rng(row).standard_normal((BATCH, IN))  # this row's batch
    w = np.random.default_rng(9).standard_normal((IN, OUT))  # weights, the same everywhere

    with along_tensor:  # operators now mean the ranks of this row
        w_part = redistribute(w, Replicated(), Slab.Y)  # columns of w
        y = matmul(x, w_part, distributions=[Replicated(), Slab.Y, Slab.Y])
    gradient = all_reduce(x.T @ (y - 1.0), op="mean", context=along_data)

    batches = [
        np.random.default_rng(r).standard_normal((BATCH, IN)) for r in range(along_data.size)
    ]
    expected = np.mean([b.T @ (b @ w - 1.0) for b in batches], axis=0)
    with along_tensor:
        whole = redistribute(gradient, Slab.Y, Replicated())
    print(f"rank {context.rank}: data {row}, tensor {column}, holds w{list(w_part.shape)}")
    assert np.allclose(whole, expected)
    shardmath.finalize()


if __name__ == "__main__":
    main()
