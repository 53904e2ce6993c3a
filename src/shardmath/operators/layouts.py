"""What all ranks' descriptions say of layouts: those of operands, and of results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from shardmath import geometry
from shardmath.geometry import Layout

__all__ = ["bound", "inferred", "result_order"]


def inferred(what: str, encoded: Sequence[Any], shapes: Sequence[Sequence[int]]) -> Layout:
    """The layout that the ranks' distributions make of local `shapes`, and its global shape.

    `encoded` are the distributions by rank, as `Distribution.encode` gives them. Raises ValueError,
    of `what`, where there is none.
    """
    distributions = [geometry.decode(each) for each in encoded]
    with _said_of(what):
        return Layout.bind(distributions, geometry.infer_global_shape(distributions, shapes))


def bound(what: str, encoded: Sequence[Any], global_shape: Sequence[int]) -> Layout:
    """The layout that the ranks' distributions make of a global shape. See `inferred`."""
    with _said_of(what):
        return Layout.bind([geometry.decode(each) for each in encoded], global_shape)


def result_order(orders: Sequence[str]) -> Literal["C", "F"]:
    """The memory order of results: F where some operand is so, and none says otherwise."""
    return "F" if "F" in orders and {"C", "strided"}.isdisjoint(orders) else "C"


@contextmanager
def _said_of(what: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise type(error)(f"{what}: {error}") from None
