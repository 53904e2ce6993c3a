"""The layouts of operands and results, from the distributions in all ranks' descriptions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Literal

from shardmath import geometry
from shardmath.geometry import Layout


def infer_layout(what: str, encoded: Sequence[Any], shapes: Sequence[Sequence[int]]) -> Layout:
    """The layout of a global array whose local shapes and distributions are given by rank.

    `encoded` are the distributions as `Distribution.encode` returns them. Raises ValueError, which
    begins with `what`, where these do not fit together.
    """
    with _named_errors(what):
        return _inferred(tuple(encoded), tuple(shapes))


def bind_layout(what: str, encoded: Sequence[Any], global_shape: Sequence[int]) -> Layout:
    """The layout of an array of a global shape in these distributions. See `infer_layout`."""
    with _named_errors(what):
        return _bound(tuple(encoded), tuple(global_shape))


# Operands and results of a program have few layouts, and one object for each also has worked out
# only once what follows from it.
@lru_cache(maxsize=1024)
def _inferred(encoded: tuple[Any, ...], shapes: tuple[Sequence[int], ...]) -> Layout:
    distributions = [geometry.decode(distribution) for distribution in encoded]
    return _bound(encoded, tuple(geometry.infer_global_shape(distributions, shapes)))


@lru_cache(maxsize=1024)
def _bound(encoded: tuple[Any, ...], global_shape: tuple[int, ...]) -> Layout:
    return Layout.bind([geometry.decode(distribution) for distribution in encoded], global_shape)


def result_order(orders: Sequence[str]) -> Literal["C", "F"]:
    """The memory order of results: F where some operand is so, and none says otherwise."""
    return "F" if "F" in orders and {"C", "strided"}.isdisjoint(orders) else "C"


@contextmanager
def _named_errors(what: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise type(error)(f"{what}: {error}") from None
