"""Requirements on the operands of decompositions, with the same messages for all functions. Pure.

Each function raises an error about one operand of one rank, and names it.
"""

from __future__ import annotations

from collections.abc import Sequence

from numpy.linalg import LinAlgError

from shardmath.errors import ShardmathError
from shardmath.local import lapack

Shape = Sequence[int]


class SingularMatrix(ShardmathError, LinAlgError, RuntimeError):
    """A pivot of a matrix is 0, which the message names.

    A LinAlgError, as NumPy raises, and so a ValueError; a RuntimeError, as nvmath.distributed
    raises.
    """


def require_type(operation: str, name: str, dtype: str) -> None:
    """Raise TypeError for elements of a type that LAPACK does not have."""
    if dtype not in lapack.DTYPES:
        raise TypeError(
            f"{operation} takes {', '.join(lapack.DTYPES)}, and {name} has {dtype}: convert it"
        )


def require_matrix(name: str, shape: Shape) -> None:
    """Raise LinAlgError unless the shape is that of a matrix."""
    if len(shape) != 2:
        raise LinAlgError(f"{name} must be a matrix, not an array of shape {tuple(shape)}")


def require_matrices(name: str, shape: Shape) -> None:
    """Raise LinAlgError unless the shape is that of a matrix or a stack of matrices."""
    if len(shape) < 2:
        raise LinAlgError(
            f"{name} must be a matrix or a stack of matrices, not an array of shape {tuple(shape)}"
        )


def require_right_sides(name: str, shape: Shape) -> None:
    """Raise LinAlgError unless the shape is that of a vector or a matrix."""
    if len(shape) not in (1, 2):
        raise LinAlgError(f"{name} must be a vector or a matrix, not of shape {tuple(shape)}")


def require_square(name: str, shape: Shape) -> None:
    """Raise LinAlgError unless matrices, of the last two axes, are square."""
    rows, columns = shape[-2:]
    if rows != columns:
        raise LinAlgError(f"{name} is {rows} x {columns}; it must be square")


def require_equations(a: Shape, b: Shape) -> None:
    """Raise LinAlgError unless "a" is a matrix, and "b" right-hand sides of as many rows."""
    require_matrix("a", a)
    require_right_sides("b", b)
    if a[0] != b[0]:
        raise LinAlgError(f"a is {a[0]} x {a[1]}, and b has {b[0]} rows: they must be as many")


def not_finite(name: str) -> ValueError:
    """The error for an operand with NaN or infinite elements."""
    return ValueError(f"{name} has NaN or infinite elements")
