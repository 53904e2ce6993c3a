"""What a matrix is to be that is decomposed, and what is said of another, in all functions. Pure.

Each function raises what is wrong with one operand, which it names, as one rank sees it.
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
    """Raise TypeError for elements of a type that LAPACK has not."""
    if dtype not in lapack.DTYPES:
        raise TypeError(
            f"{operation} is of {', '.join(lapack.DTYPES)}, and {name} has {dtype}: convert it"
        )


def require_matrix(name: str, shape: Shape) -> None:
    """Raise LinAlgError for what is no matrix."""
    if len(shape) != 2:
        raise LinAlgError(f"{name} is a matrix, not an array of shape {tuple(shape)}")


def require_matrices(name: str, shape: Shape) -> None:
    """Raise LinAlgError for what is neither a matrix nor a stack of matrices."""
    if len(shape) < 2:
        raise LinAlgError(
            f"{name} is a matrix or a stack of matrices, not an array of shape {tuple(shape)}"
        )


def require_right_sides(name: str, shape: Shape) -> None:
    """Raise LinAlgError for what is neither a vector nor a matrix."""
    if len(shape) not in (1, 2):
        raise LinAlgError(f"{name} is a vector or a matrix, not an array of shape {tuple(shape)}")


def require_square(name: str, shape: Shape) -> None:
    """Raise LinAlgError for matrices, of the last two axes, that are not square."""
    rows, columns = shape[-2:]
    if rows != columns:
        raise LinAlgError(f"{name} is {rows} x {columns}, and not square")


def require_equations(a: Shape, b: Shape) -> None:
    """Raise LinAlgError unless "a" is a matrix, and "b" right-hand sides of as many rows."""
    require_matrix("a", a)
    require_right_sides("b", b)
    if a[0] != b[0]:
        raise LinAlgError(f"a is {a[0]} x {a[1]}, and b has {b[0]} rows")


def not_finite(name: str) -> ValueError:
    """What is raised where an element is NaN or infinite."""
    return ValueError(f"{name} has NaN or infinite elements")
