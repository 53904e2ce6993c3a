"""Fit a cubic to noisy points by least squares; the points are split over the ranks.

python -m shardmath run -n 4 examples/least_squares.py

Each rank makes its own points. The ranks exchange only a 4 x 4 triangle, however many points.
"""

import numpy as np

import shardmath
from shardmath.distribution import Slab
from shardmath.linalg import lstsq

POINTS, TRUE = 100_000, np.array([0.5, -2.0, 0.25, 1.0])


def main() -> None:
    """Compare with the polynomial that NumPy fits to all points."""
    context = shardmath.initialize("cpu")
    x = shardmath.linspace(-1, 1, POINTS, distribution=Slab.X)
    powers = np.stack([x**0, x, x**2, x**3], axis=1)
    noise = shardmath.standard_normal(POINTS, seed=1, distribution=Slab.X)
    y = powers @ TRUE + 0.1 * noise

    found = lstsq(powers, y)
    coefficients, spread = found.x.numpy(), np.sqrt(found.residuals.item() / POINTS)
    expected = np.polynomial.polynomial.polyfit(x.numpy(), y.numpy(), 3)
    assert np.allclose(coefficients, expected)
    if context.rank == 0:
        terms = " ".join(f"{c:+.3f} x^{k}" for k, c in enumerate(coefficients))
        print(f"{POINTS} points on {context.size} rank(s): y = {terms}, noise {spread:.3f}")
    shardmath.finalize()


if __name__ == "__main__":
    main()
