"""The largest eigenvalue of a matrix whose rows are split over the ranks, by power iteration.

python -m shardmath run -n 4 examples/power_iteration.py

Every rank makes its rows; the rest reads as it would with NumPy alone.
"""

from __future__ import annotations

import numpy as np

import shardmath
from shardmath.distribution import Slab

N = 300


def main() -> None:
    """Compare with NumPy's eigenvalues of the whole matrix."""
    context = shardmath.initialize("cpu")
    noise = shardmath.random((N, N), seed=1, distribution=Slab.X)
    matrix = noise + noise.T  # the columns of the one come to the rows of the other

    x = shardmath.ones(N, distribution=Slab.X)
    value = np.inf
    while True:
        y = matrix @ x
        last, value = value, float(np.vecdot(x, y))
        x = y / np.sqrt((y * y).sum())
        if abs(value - last) < 1e-12 * abs(value):
            break

    expected = np.linalg.eigvalsh(matrix.numpy())[-1]
    assert np.isclose(value, expected)
    if context.rank == 0:
        print(f"{N} x {N} on {context.size} rank(s): {value:.6f}, by NumPy {expected:.6f}")
    shardmath.finalize()


if __name__ == "__main__":
    main()
