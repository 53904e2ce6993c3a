"""What every distribution can answer: the part of a rank, its shape, who owns an index.

A distribution is an immutable value: `bind` returns a copy that knows a global shape and writes
nothing. Every answer comes from one question, `part`: which `Spans` does a rank own, per axis?
"""

from __future__ import annotations

import copy as copying
import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from shardmath import current
from shardmath.errors import BindDistributionError
from shardmath.geometry.integers import index_within, integer, integers
from shardmath.geometry.spans import Spans

__all__ = ["Binding", "Distribution", "known_rank", "known_size"]

D = TypeVar("D", bound="Distribution")


@dataclass(frozen=True, slots=True)
class Binding:
    """What a bound distribution knows besides itself; None where it was not told."""

    global_shape: tuple[int, ...]
    size: int | None = None
    rank: int | None = None

    def __str__(self) -> str:
        size = "" if self.size is None else f", size={self.size}"
        rank = "" if self.rank is None else f", rank={self.rank}"
        return f".bind({self.global_shape}{size}{rank})"


@dataclass(frozen=True, repr=False, slots=True)
class Distribution(ABC):
    """How a global array is split over ranks.

    `size=`, the number of ranks, may be left out where the distribution is bound to one or has a
    process grid, or where a context is current; otherwise RuntimeError. `global_shape` may be left
    out where the distribution is bound; otherwise RuntimeError.
    """

    binding: Binding | None = field(default=None, init=False)

    @property
    @abstractmethod
    def ndim(self) -> int | None:
        """The number of axes of the global array; None where the distribution leaves it open."""

    @property
    def per_rank(self) -> bool:
        """True when it speaks of one rank only, so that each rank holds another one (`Box`)."""
        return False

    @property
    def grid_size(self) -> int | None:
        """The number of ranks where the distribution itself fixes it, else None."""
        return None

    @property
    def is_bound(self) -> bool:
        """True when it knows its global shape."""
        return self.binding is not None

    def bind(
        self, global_shape: Sequence[int], *, size: int | None = None, rank: int | None = None
    ) -> Self:
        """A copy that knows the global shape and, if given, the number of ranks and this rank.

        Raises BindDistributionError when the shape does not fit, or when this distribution is bound
        to something else already.
        """
        try:
            shape = integers(global_shape, "global_shape", least=0)
            size = self.grid_size if size is None else integer(size, "size", least=1)
            rank = None if rank is None else integer(rank, "rank", least=0)
        except ValueError as error:
            raise BindDistributionError(str(error)) from None
        held = self.binding
        if held is not None:
            size = held.size if size is None else size
            rank = held.rank if rank is None else rank
            if held.size not in (None, size) or held.rank not in (None, rank):
                raise BindDistributionError(f"{self!r} cannot be bound again, to another rank")
        if rank is not None and size is not None and rank >= size:
            raise BindDistributionError(f"rank {rank} is not one of {size} ranks")
        self._check(shape, size)
        bound = copying.copy(self)
        values = {"binding": Binding(shape, size, rank), **self._bound_fields(shape)}
        for name, value in values.items():
            object.__setattr__(bound, name, value)
        return bound

    def part(self, rank: int, global_shape: Sequence[int], *, size: int) -> tuple[Spans, ...]:
        """What `rank` of `size` owns along each axis.

        Raises BindDistributionError when the shape or the size does not fit, ValueError when the
        rank is not one of `size`.
        """
        shape = integers(global_shape, "global_shape", least=0)
        number = integer(rank, "rank")
        if not 0 <= number < size:
            raise ValueError(f"rank {number} is not one of {size} ranks")
        self._check(shape, size)
        return self._part(number, shape, size)

    def shape(
        self, rank: int, global_shape: Sequence[int] | None = None, *, size: int | None = None
    ) -> tuple[int, ...]:
        """The local shape of `rank`.

        Raises ValueError when the rank is out of range or the global shape is not the bound one;
        RuntimeError when something is left out that is not known.
        """
        return tuple(s.length for s in self._known_part(rank, global_shape, size))

    def index_ranges(
        self, rank: int, global_shape: Sequence[int] | None = None, *, size: int | None = None
    ) -> tuple[list[tuple[int, int]], ...]:
        """For each axis the ranges (lo, hi) of global indices that `rank` owns. Errors as `shape`.

        An element is owned when each of its indices lies in a range of its axis.
        """
        return tuple(list(s.ranges()) for s in self._known_part(rank, global_shape, size))

    def slices(
        self, rank: int, global_shape: Sequence[int] | None = None, *, size: int | None = None
    ) -> tuple[slice, ...]:
        """Where the part of `rank` lies: `x[distribution.slices(rank, x.shape)]` of a global array.

        Errors as `shape`; ValueError also where the indices along an axis make no slice, as blocks
        of several indices that are dealt in turn.
        """
        part = self._known_part(rank, global_shape, size)
        found = [spans.slice() for spans in part]
        if None in found:
            axis = found.index(None)
            raise ValueError(
                f"rank {rank} owns {part[axis]} along axis {axis}, which is no slice: take them "
                "from index_ranges, or the part by redistribute(x, Replicated(), distribution)"
            )
        return tuple(each for each in found if each is not None)

    def owner(
        self,
        index: Sequence[int],
        global_shape: Sequence[int] | None = None,
        *,
        size: int | None = None,
    ) -> int | tuple[int, ...]:
        """The rank that owns the element at a global index; for `Replicated` all ranks, as a tuple.

        Raises IndexError when the index is outside the global shape, and otherwise as `shape`.
        """
        shape, ranks = self._known_shape(global_shape), self._known_size(size)
        at = index_within(index, shape)
        for rank in range(ranks):
            if all(i in s for i, s in zip(at, self.part(rank, shape, size=ranks), strict=True)):
                return rank
        raise AssertionError(f"{self!r} leaves index {at} of {shape} without an owner")

    def draw(self, global_shape: Sequence[int] | None = None, *, size: int | None = None) -> str:
        """A text drawing of the ranks on the global array. Errors as `shape`.

        One character per element, or per block where the array is large; one line per axis and part
        from 3 axes on.
        """
        from shardmath.geometry.drawing import draw

        shape, ranks = self._known_shape(global_shape), self._known_size(size)
        return draw(shape, {rank: self.part(rank, shape, size=ranks) for rank in range(ranks)})

    def infer_global_shape(self, local_shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """The global shape of which `local_shapes`, one per rank, are the parts.

        Raises BindDistributionError, naming the rank that differs, when there is none.
        """
        from shardmath.geometry.inference import infer_global_shape

        return infer_global_shape([self] * len(local_shapes), local_shapes)

    def to(self, cls: type[D], /, *, ndim: int | None = None, copy: bool = False) -> D:
        """The same layout as a distribution of class `cls`; `self` where it already is one.

        A larger `ndim` appends axes of extent 1. Whatever binding is known takes part: a bound
        `BlockCyclic` with one block per rank is a `Slab`, anything bound is a `Box` of its rank.
        Raises ConvertDistributionError when no `cls` describes the layout, or when that cannot be
        known unbound; ValueError when `cls` is no distribution or `ndim` is too small.
        """
        from shardmath.geometry.convert import convert

        if not (isinstance(cls, type) and issubclass(cls, Distribution)):
            raise ValueError(f"{cls!r} is not a class of distributions")
        wide = self if ndim is None else self._promoted(integer(ndim, "ndim", least=0))
        made = wide if isinstance(wide, cls) else convert(wide, cls)
        return made.copy() if copy and made is self else made

    def copy(self) -> Self:
        """An equal distribution that is another object."""
        return copying.copy(self)

    def encode(self) -> tuple[Any, ...]:
        """Plain data (tuples, strings, integers, None) from which `decode` makes an equal one."""
        from shardmath.geometry.encoding import encode

        return encode(self)

    def alike(self, other: Distribution) -> bool:
        """True when two ranks that hold these mean the same distribution; bindings do not count."""
        return (
            type(self) is type(other)
            and self._key() == other._key()
            and (self.ndim == other.ndim or None in (self.ndim, other.ndim))
        )

    def __repr__(self) -> str:
        return self._expression() + ("" if self.binding is None else str(self.binding))

    @abstractmethod
    def _place(self, rank: int, ndim: int, size: int) -> tuple[tuple[int, int], ...]:
        """For each axis (k, parts): `rank` holds part k of so many parts."""

    @abstractmethod
    def _key(self) -> tuple[Any, ...]:
        """What makes it itself, without ndim and binding."""

    @abstractmethod
    def _expression(self) -> str:
        """Itself as Python, without the binding."""

    @abstractmethod
    def _widened(self, ndim: int) -> Self:
        """Itself, unbound, with `ndim` axes, which is more than it has, or the first it is told."""

    def _part(self, rank: int, shape: tuple[int, ...], size: int) -> tuple[Spans, ...]:
        """`part` of arguments that are known to fit."""
        places = self._place(rank, len(shape), size)
        return tuple(
            Spans.even(extent, parts, k) for extent, (k, parts) in zip(shape, places, strict=True)
        )

    def _bound_fields(self, shape: tuple[int, ...]) -> dict[str, object]:
        """Fields that take another value in a copy bound to `shape`."""
        return {}

    def _check(self, shape: tuple[int, ...], size: int | None) -> None:
        """Raise BindDistributionError when the shape or the number of ranks does not fit."""
        if self.ndim is not None and len(shape) != self.ndim:
            raise BindDistributionError(
                f"{self!r} has ndim {self.ndim}, the global shape {shape} has {len(shape)}"
            )
        if size is not None and self.grid_size not in (None, size):
            raise BindDistributionError(
                f"{self!r} is made for {self.grid_size} ranks, not for {size}"
            )
        if self.binding is not None:
            if self.binding.global_shape != shape:
                raise BindDistributionError(f"{self!r} is bound to another shape than {shape}")
            if size is not None and self.binding.size not in (None, size):
                raise BindDistributionError(f"{self!r} is bound to another size than {size}")

    def _known_part(
        self, rank: int, global_shape: Sequence[int] | None, size: int | None
    ) -> tuple[Spans, ...]:
        shape = self._known_shape(global_shape)
        return self.part(rank, shape, size=self._known_size(size))

    def _known_shape(self, global_shape: Sequence[int] | None) -> tuple[int, ...]:
        if global_shape is not None:
            return integers(global_shape, "global_shape", least=0)
        if self.binding is None:
            raise RuntimeError(f"{self!r} is not bound: give global_shape, or bind it first")
        return self.binding.global_shape

    def _known_size(self, size: int | None) -> int:
        if size is not None:
            return integer(size, "size", least=1)
        known = known_size(self)
        if known is None:
            raise RuntimeError(
                f"the number of ranks of {self!r} is not known: call shardmath.initialize, "
                "or give size="
            )
        return known

    def _promoted(self, ndim: int) -> Self:
        """Itself with `ndim` axes. Raises ValueError when it has more."""
        if self.ndim == ndim:
            return self
        if self.ndim is not None and ndim < self.ndim:
            raise ValueError(f"{self!r} has ndim {self.ndim}, which is more than ndim={ndim}")
        wide = self._widened(ndim)
        if self.binding is None:
            return wide
        held = self.binding
        shape = tuple(
            itertools.islice(itertools.chain(held.global_shape, itertools.repeat(1)), ndim)
        )
        return wide.bind(shape, size=held.size, rank=held.rank)


def known_size(given: Distribution) -> int | None:
    """The number of ranks, from the grid, the binding or the current context; else None."""
    if given.grid_size is not None:
        return given.grid_size
    if given.binding is not None and given.binding.size is not None:
        return given.binding.size
    context = current.get()
    return None if context is None else context.size


def known_rank(given: Distribution) -> int | None:
    """The rank that asks, from the binding or the current context; else None."""
    if given.binding is not None and given.binding.rank is not None:
        return given.binding.rank
    context = current.get()
    return None if context is None else context.rank
