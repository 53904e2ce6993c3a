"""Read handwritten digits by kernel ridge regression on arrays that are split over the ranks.

python -m shardmath run -n 4 examples/kernel_ridge.py

The weights W of the training images solve (K + c I) W = Y, by the Cholesky factor of K + c I. For
every two images K has a number that says how similar they are. A test image gets the label with the
largest sum of weights, each times the similarity to its training image.
"""

from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import shardmath
from shardmath.distribution import Slab
from shardmath.linalg import solve

TRAINING, GAMMA, PENALTY = 1347, 1e-3, 1e-2


def kernel(x: Any, y: Any) -> Any:
    """exp(-gamma |x_i - y_j|^2) for all rows of both."""
    squares = (x * x).sum(axis=1)[:, None] + (y * y).sum(axis=1)
    return np.exp(-GAMMA * (squares - 2 * x @ y.T))


def main() -> None:
    """Compare guesses with the labels, and both sides of the equations."""
    context = shardmath.initialize("cpu")
    images, labels = load_digits(return_X_y=True)
    x = shardmath.from_global(images[:TRAINING], Slab.X)
    y = shardmath.from_global(np.eye(10)[labels[:TRAINING]], Slab.X)  # 1 in the column of the digit
    test = shardmath.from_global(images[TRAINING:], Slab.X)

    k = kernel(x, x) + PENALTY * np.eye(TRAINING)
    weights = solve(k, y, assume_a="pos")
    guesses = (kernel(test, x) @ weights).argmax(axis=1)
    right = (guesses == labels[TRAINING:]).sum().item()

    assert abs(k @ weights - y).max().item() < 1e-9
    assert right > 0.96 * len(guesses)
    if context.rank == 0:
        print(f"{right} of {len(guesses)} labels right on {context.size} rank(s)")
    shardmath.finalize()


if __name__ == "__main__":
    main()
