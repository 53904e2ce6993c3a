"""Matrices that are hard to factorise, and easy ones; and how large an error may be."""

from __future__ import annotations

import numpy as np
import scipy.linalg

__all__ = ["general", "hard", "is_small", "lapacks", "positive", "right_sides", "singular"]


def random(shape, dtype, seed):
    rng = np.random.default_rng(seed)
    real = rng.standard_normal(shape)
    whole = real + 1j * rng.standard_normal(shape) if np.dtype(dtype).kind == "c" else real
    return whole.astype(dtype)


def general(n, dtype, seed=0):
    return random((n, n), dtype, seed)


def positive(n, dtype, seed=0):
    """A positive definite matrix, of condition about 10."""
    whole = general(n, dtype, seed)
    made = whole @ whole.conj().T / max(n, 1) + 0.5 * np.eye(n)
    return ((made + made.conj().T) / 2).astype(dtype)


def right_sides(n, columns, dtype, seed=1):
    return random((n,) if columns is None else (n, columns), dtype, seed)


def graded(n):
    """Rows and columns whose sizes fall from 1 to 1e-12."""
    scale = np.logspace(0, -6, n)
    return scale[:, None] * positive(n, "float64") * scale


def wilkinson(n):
    """The matrix in whose last column elimination with partial pivots doubles: by 2^(n-1)."""
    made = np.eye(n) - np.tril(np.ones((n, n)), -1)
    made[:, -1] = 1
    return made


def hard():
    """(what it is, matrix, whether it is positive definite)."""
    return [
        ("Hilbert 8", scipy.linalg.hilbert(8), True),
        ("Hilbert 12", scipy.linalg.hilbert(12) + 1e-14 * np.eye(12), True),
        ("graded", graded(60), True),
        ("second differences", 2 * np.eye(90) - np.eye(90, k=1) - np.eye(90, k=-1), True),
        ("Wilkinson 24", wilkinson(24), False),
        ("Vandermonde", np.vander(np.linspace(-1, 1, 20)), False),
        ("scaled rows", np.logspace(0, 80, 50)[:, None] * general(50, "float64"), False),
        ("a circle of rows", np.roll(np.eye(70), 1, axis=0), False),
    ]


def lapacks(n):
    """(what it is, matrix, whether it is positive definite): those with which LAPACK's dchkge and
    dchkpo test, as dlatb4 describes them: of singular values that fall evenly, in powers, from
    `norm` to its quotient by `cond`.
    """
    eps, least = np.finfo("float64").eps / 2, np.finfo("float64").tiny
    small = 0.25 * least / eps
    left, right = (np.linalg.qr(general(n, "float64", seed))[0] for seed in (5, 6))

    def made(cond, norm, other):
        return norm * (left * cond ** (-np.arange(n) / max(n - 1, 1))) @ other

    kinds = [
        (2.0, 1.0),
        (np.sqrt(0.1 / eps), 1.0),
        (0.1 / eps, 1.0),
        (2.0, small),
        (2.0, 1 / small),
    ]
    found = [
        (f"cond {cond:.0e} norm {norm:.0e}", made(cond, norm, other), other is not right)
        for cond, norm in kinds
        for other in (right, left.T)
        if cond < 0.1 / eps or other is right  # else rounded to a matrix that is not definite
    ]
    easy, diagonal = made(2.0, 1.0, right), np.diag(np.linspace(0.5, 1, n))
    found += [("diagonal", diagonal, True), ("upper", np.triu(easy), False)]
    found += [("lower", np.tril(easy), False)]
    for name, columns in (
        ("first", slice(1)),
        ("last", slice(n - 1, n)),
        ("half", slice(n // 2, n)),
    ):
        found.append((f"{name} column 0", easy.copy(), False))
        found[-1][1][:, columns] = 0
    return found


def singular(n):
    """A matrix of rank 1 less, in whose elimination the last pivot is exactly 0."""
    made = np.eye(n)
    made[-1] = made[0]
    return made


def is_small(residual, *scales, n, dtype, growth=10.0):
    """Whether a residual is within growth n eps times the product of these norms."""
    bound = growth * max(n, 1) * np.finfo(dtype).eps
    for scale in scales:
        bound = bound * np.linalg.norm(scale)
    return np.linalg.norm(residual) <= bound
