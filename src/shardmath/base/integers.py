"""Checks of integers that users pass: ranks, extents, shapes, of Python's or a library's types.

The functions return plain `int`, and nothing beyond them has to check again.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise


def index(value: object, name: str) -> int:
    """`value` as an int. Raises TypeError when it is not one, or a bool."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise TypeError(f"{name} is an integer, not {value!r}")


def integer(value: object, name: str, *, least: int | None = None) -> int:
    """`value` as an int. Raises ValueError when it is not one, a bool, or less than `least`."""
    if type(value) is not int:
        try:
            value = index(value, name)
        except TypeError:
            raise ValueError(f"{name} must be an integer, not {value!r}") from None
    if least is not None and value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")
    return value


def integers(values: object, name: str, *, least: int | None = None) -> tuple[int, ...]:
    """`values`, an iterable of integers, as a tuple of int. Raises ValueError where one is not."""
    if not isinstance(values, (str, bytes)) and isinstance(values, Iterable):
        try:
            return tuple([integer(value, name, least=least) for value in values])
        except ValueError:
            pass  # the error below shows all of them
    bound = "" if least is None else f" of at least {least}"
    raise ValueError(f"{name} must be a sequence of integers{bound}, not {values!r}")


def index_within(values: object, shape: Sequence[int]) -> tuple[int, ...]:
    """The index of an element of an array of `shape`. Raises IndexError when it is outside."""
    place = integers(values, "index")
    if len(place) != len(shape) or not all(0 <= i < n for i, n in zip(place, shape, strict=True)):
        raise IndexError(f"index {place} of an array of shape {tuple(shape)}")
    return place


def up(extent: int, multiple: int) -> int:
    """`extent` rounded up to a multiple of `multiple`."""
    return -(-extent // multiple) * multiple


def bounds(extent: int, parts: int) -> list[int]:
    """The bounds of `parts` nearly equal parts of range(extent): 0, ..., `extent`."""
    return [extent * part // (parts or 1) for part in range(parts + 1)]


def slices(extent: int, most: int) -> list[slice]:
    """Slices of nearly equal length, `most` at most, that cover range(extent)."""
    return [slice(lo, hi) for lo, hi in pairwise(bounds(extent, -(-extent // most)))]


def tiles(rows: int, columns: int, high: int, wide: int) -> Iterator[tuple[slice, slice]]:
    """Pairs of slices: tiles of `high` x `wide`, smaller at the ends, that cover a matrix."""
    for top in range(0, rows, high):
        for left in range(0, columns, wide):
            yield slice(top, min(top + high, rows)), slice(left, min(left + wide, columns))
