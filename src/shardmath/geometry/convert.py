"""The same layout as another kind of distribution, where both kinds can describe it.

A conversion never moves an element: the candidates of the wanted class are compared with the given
distribution, part by part for every rank, and the first that agrees is the answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from shardmath.errors import ConvertDistributionError
from shardmath.geometry.distribution import Distribution, known_rank, known_size
from shardmath.geometry.distributions import BlockCyclic, BlockNonCyclic, Box, Replicated, Slab
from shardmath.geometry.grid import ProcessGrid

__all__ = ["convert"]

D = TypeVar("D", bound=Distribution)


def convert(given: Distribution, cls: type[D]) -> D:
    """`given` as a `cls`, bound as `given` is. Raises ConvertDistributionError if there is none."""
    size = _size(given)
    if issubclass(cls, Box):
        found: Distribution | None = _box(given, size)
    else:
        found = next((c for c in _candidates(given, cls, size) if _same(given, c, size)), None)
    if not isinstance(found, cls):
        raise _refusal(given, cls, f"no {cls.__name__} describes the same layout")
    held = given.binding
    return found if held is None else found.bind(held.global_shape, size=size, rank=held.rank)


def _refusal(given: Distribution, cls: type[Distribution], why: str) -> ConvertDistributionError:
    hint = "" if given.is_bound else "; bound to a global shape it may have one"
    return ConvertDistributionError(f"{given!r} does not convert to {cls.__name__}: {why}{hint}")


def _size(given: Distribution) -> int:
    """The number of ranks. Raises ConvertDistributionError when it is not known."""
    known = known_size(given)
    if known is None:
        raise ConvertDistributionError(
            f"the number of ranks of {given!r} is not known: bind it with size=, "
            "or call shardmath.initialize"
        )
    return known


def _rank(given: Distribution, cls: type[Distribution]) -> int:
    """The rank that asks. Raises ConvertDistributionError when it is not known."""
    known = known_rank(given)
    if known is None:
        raise _refusal(given, cls, "this rank is not known: bind it with rank=")
    return known


def _candidates(given: Distribution, cls: type[Distribution], size: int) -> Iterator[Distribution]:
    """Every `cls` that could describe the layout of `given`, the likeliest first."""
    ndim = given.ndim
    if issubclass(cls, Replicated):
        yield Replicated(ndim)
    elif issubclass(cls, Slab):
        for axis in range(1 if ndim is None else ndim):
            yield Slab(axis, ndim)
    elif issubclass(cls, BlockCyclic):
        if ndim is None:
            raise _refusal(given, cls, "the number of axes is not known, give ndim=")
        if isinstance(given, BlockCyclic):
            yield BlockNonCyclic(given.process_grid, first_process=given.first_process)
        for axis in range(ndim):
            shape = [size if i == axis else 1 for i in range(ndim)]
            yield BlockNonCyclic(ProcessGrid(shape=shape))


def _box(given: Distribution, size: int) -> Box:
    """The asking rank's part as a box, once every rank's part is known to be one box."""
    if given.binding is None:
        raise _refusal(given, Box, "it is not bound to a global shape")
    if isinstance(given, Replicated) and size > 1:
        raise _refusal(given, Box, "the boxes of different ranks must not overlap")
    shape = given.binding.global_shape
    rank = _rank(given, Box)
    for other in range(size):
        for axis, spans in enumerate(given.part(other, shape, size=size)):
            if spans.count > 1:
                why = f"rank {other} holds {spans.count} blocks along axis {axis}"
                raise _refusal(given, Box, why)
    part = given.part(rank, shape, size=size)
    return Box([s.start for s in part], [s.stop for s in part])


def _same(given: Distribution, candidate: Distribution, size: int) -> bool:
    """True when both give every rank the same part, of the bound shape or else of any shape."""
    if given.binding is not None:
        shapes = [given.binding.global_shape]
    else:
        if given.per_rank:
            raise _refusal(given, type(candidate), "it is not bound to a global shape")
        # Even parts of so long an axis tell any two numbers of parts and any two places apart, and
        # blocks of one size cannot be even parts of both lengths, unless they are one part: what
        # agrees on these two shapes agrees on every shape.
        extent = 4 * size * size
        ndim = candidate.ndim if given.ndim is None else given.ndim
        if ndim is None:
            ndim = 1 + max(getattr(d, "partition_dim", 0) for d in (given, candidate))
        shapes = [(extent,) * ndim, (2 * extent + 1,) * ndim]
    ranks = [_rank(given, type(candidate))] if given.per_rank else range(size)
    for shape in shapes:
        for rank in ranks:
            one = given.part(rank, shape, size=size)
            two = candidate.part(rank, shape, size=size)
            if one != two and all(s.block for s in one):
                return False
            if one != two and all(s.block for s in two):
                return False
    return True
