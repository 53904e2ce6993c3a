"""Read handwritten digits with all ranks together: nearest neighbours, from one matrix product.

    python -m shardmath run -n 4 examples/digits.py     (or mpiexec, torchrun, or plain python)

The squared distance of a test image x and a training image y is |x|^2 + |y|^2 - 2 x.y. For all
pairs that is D = C - 2 X @ Y.T, where C[i, j] = |x_i|^2 + |y_j|^2:

                  r0   r1   r2   r3  |  Images are rows, and rows are split over the ranks: Slab.X.
             Y.T +----+----+----+--+ |  The transpose of row slabs is column slabs, Slab.Y: a view.
    X  r0 +----+ +-----------------+ |
       r1 +----+ +-----------------+ |  Each rank gets the distances of its own test images to all
       r2 +----+ +-------  D  -----+ |  training images. So it labels them alone.
       r3 +----+ +-----------------+ |
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

import shardmath
from shardmath.collectives import all_gather, all_reduce, broadcast
from shardmath.distribution import Replicated, Slab, redistribute
from shardmath.linalg.advanced import Matmul

TRAINING = 1347  # three quarters of 1797 images; neither part divides by 4, and none has to
NEIGHBOURS = 5


def main() -> None:
    """Label the test images; rank 0 tells how it went, and compares with plain NumPy."""
    context = shardmath.initialize("cpu")
    images, labels = read_digits(context.rank)
    training, test = np.split(images, [TRAINING])
    training_labels, test_labels = np.split(labels, [TRAINING])

    # From here on each rank works on its own rows alone.
    y, y_labels = own_rows(training), own_rows(training_labels)
    x, x_labels = own_rows(test), own_rows(test_labels)

    context.barrier()
    start = time.perf_counter()
    distances, explained = squared_distances(x, y)
    guesses = nearest_labels(distances, all_gather(y_labels))
    correct = all_reduce(np.array([np.sum(guesses == x_labels)]))
    seconds = time.perf_counter() - start

    whole = redistribute(distances, Slab.X, Replicated())  # for the comparison alone
    if context.rank == 0:
        print(f"{len(images)} digits of 8 x 8 pixels, rows split over {context.size} rank(s)")
        show_rows("training", len(training), context.size)
        show_rows("test", len(test), context.size)
        print(f"\n{explained}\n")
        took = f"{seconds * 1e3:.0f} ms on {context.size} rank(s)"
        print(f"shardmath    {score(correct[0], len(test))}, in {took}")
        compare(whole, training, training_labels, test, test_labels)
    shardmath.finalize()


def read_digits(rank: int) -> tuple[Any, Any]:
    """The images, one per row, and their labels: rank 0 reads them and tells the others."""
    if rank != 0:
        return broadcast(None), broadcast(None)
    try:
        from sklearn.datasets import load_digits  # a large library: only the reader loads it
    except ImportError:
        sys.exit("this example needs scikit-learn: pip install 'shardmath[demo]'")

    digits = load_digits()
    return broadcast(digits.data), broadcast(digits.target)


def own_rows(array: Any) -> Any:
    """The part of an array that this rank owns, when its rows are split over the ranks."""
    return redistribute(array, Replicated(), Slab.X)


def squared_distances(x: Any, y: Any) -> tuple[Any, str]:
    """D of this rank's rows of X and Y, and the strategy that was chosen for the product."""
    y_norms = all_gather((y * y).sum(axis=1))
    c = (x * x).sum(axis=1)[:, None] + y_norms
    slabs = [Slab.X, Slab.Y, Slab.X]  # of X, Y.T and D; C is split as D is
    with Matmul(x, y.T, c, alpha=-2.0, beta=1.0, distributions=slabs) as product:
        product.plan()
        return product.execute(), product.explain()


def nearest_labels(distances: Any, labels: Any) -> Any:
    """For each row of distances, the most frequent label among the nearest neighbours."""
    nearest = np.argsort(distances, axis=1, kind="stable")[:, :NEIGHBOURS]
    votes = labels[nearest][:, :, None] == np.arange(10)
    return votes.sum(axis=1).argmax(axis=1)


def show_rows(name: str, count: int, size: int) -> None:
    """Print how many rows each rank owns."""
    rows = [Slab.X.shape(rank, (count,))[0] for rank in range(size)]
    print(f"  {name:8} {count:5} = {' + '.join(map(str, rows))}")


def compare(
    distances: Any, training: Any, training_labels: Any, test: Any, test_labels: Any
) -> None:
    """Print the same figure from plain NumPy, which sums the squares of all differences."""
    plain = np.stack([((training - image) ** 2).sum(axis=1) for image in test])
    correct = np.sum(nearest_labels(plain, training_labels) == test_labels)
    print(f"plain NumPy  {score(correct, len(test))}")
    print(
        f"largest difference between the two distance matrices: {np.abs(distances - plain).max()}"
    )


def score(correct: int, count: int) -> str:
    """How many labels are right, in words."""
    return f"{correct} of {count} labels right, {correct / count:.2%}"


if __name__ == "__main__":
    main()
