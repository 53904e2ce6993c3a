"""The layouts of operands and results, from the distributions in all ranks' descriptions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Literal

from shardmath import geometry
from shardmath.geometry import Distribution, Layout


def distributions_of(
    given: Any, operands: Sequence[str] = ()
) -> tuple[list[Distribution], list[Distribution | None]]:
    """The distributions in `distributions=`, one or several: first those of the operands, then
    those of results; None for a result that stays as it was computed.

    Raises TypeError for anything else than distributions, and for None where there are operands;
    ValueError for fewer than there are operands.
    """
    if given is None and operands:
        raise TypeError(f"parts need distributions=[...], of {', '.join(operands)} and of results")
    several = isinstance(given, Sequence) and not isinstance(given, str)
    every = [] if given is None else list(given) if several else [given]
    split, wanted = every[: len(operands)], every[len(operands) :]
    for one in (*split, *(x for x in wanted if x is not None)):
        if not isinstance(one, Distribution):
            raise TypeError(f"a distribution is Slab.X, a Box or the like, not {one!r}")
    if len(split) < len(operands):
        raise ValueError(
            f"distributions holds one for each of {', '.join(operands)}, and one for each result "
            f"that is to be split otherwise; {len(every)} given"
        )
    return split, wanted


def distributions_of_results(
    wanted: Sequence[Distribution | None], results: int
) -> list[Distribution | None]:
    """The distribution of each result, None where none is `wanted`. Raises ValueError for more
    distributions than `results`.
    """
    if len(wanted) > results:
        raise ValueError(f"distributions for {len(wanted)} results were given; there are {results}")
    return [*wanted, *[None] * (results - len(wanted))]


def infer_layout(what: str, encoded: Sequence[Any], shapes: Sequence[Sequence[int]]) -> Layout:
    """The layout of a global array whose local shapes and distributions are given by rank.

    `encoded` are the distributions as `Distribution.encode` returns them. Raises ValueError, whose
    message begins with `what`, where shapes and distributions do not fit together.
    """
    with _named_errors(what):
        return _inferred(tuple(encoded), tuple(shapes))


def bind_layout(what: str, encoded: Sequence[Any], global_shape: Sequence[int]) -> Layout:
    """The layout of an array of this global shape. Arguments and errors as `infer_layout`."""
    with _named_errors(what):
        return _bound(tuple(encoded), tuple(global_shape))


# A program has few layouts. One object for each is also what keeps everything derived from a layout
# from being worked out again.
@lru_cache(maxsize=1024)
def _inferred(encoded: tuple[Any, ...], shapes: tuple[Sequence[int], ...]) -> Layout:
    distributions = [geometry.decode(distribution) for distribution in encoded]
    return _bound(encoded, tuple(geometry.infer_global_shape(distributions, shapes)))


@lru_cache(maxsize=1024)
def _bound(encoded: tuple[Any, ...], global_shape: tuple[int, ...]) -> Layout:
    return Layout.bind([geometry.decode(distribution) for distribution in encoded], global_shape)


def result_order(orders: Sequence[str]) -> Literal["C", "F"]:
    """The memory order of results: "F" if an operand is in that order and none is in another.

    Operands that are in both orders at once, such as vectors, follow the others.
    """
    return "F" if "F" in orders and {"C", "strided"}.isdisjoint(orders) else "C"


@contextmanager
def _named_errors(what: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise type(error)(f"{what}: {error}") from None
