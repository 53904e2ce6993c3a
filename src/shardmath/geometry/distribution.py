"""Distributions of an array over ranks: the part of a rank, its shape, who owns an index.

A distribution is an immutable value: `bind` returns a copy that knows a global shape. Every answer
comes from one question, `part`: which `Spans` does a rank own along each axis?

The global shape of an array is inferred from the shapes that all ranks hold: every rank gets the
same shape or the same error, which names the rank that differs. A conversion never moves an
element: candidates of the wanted class are compared with the given distribution, part by part for
every rank, and the first that agrees is the answer.
"""

from __future__ import annotations

import copy as copying
import itertools
from abc import ABCMeta, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import field
from functools import lru_cache
from inspect import Signature, signature
from typing import Any, ClassVar, Self, TypeVar

from shardmath.base import current
from shardmath.base.immutable import Immutable
from shardmath.base.integers import index_within, integer, integers
from shardmath.errors import BindDistributionError, ConvertDistributionError
from shardmath.geometry.grid import ProcessGrid
from shardmath.geometry.spans import Spans

D = TypeVar("D", bound="Distribution")


class Binding(Immutable):
    """What a distribution is bound to: a global shape and, if given, a number of ranks, a rank."""

    global_shape: tuple[int, ...]
    size: int | None = None
    rank: int | None = None

    def __str__(self) -> str:
        size = "" if self.size is None else f", size={self.size}"
        rank = "" if self.rank is None else f", rank={self.rank}"
        return f".bind({self.global_shape}{size}{rank})"


class Argument(Immutable):
    """An argument of a class of distributions, and the attribute of that name.

    An argument by `keyword` is left out of a repr where it is None or zeros. `appended` is for
    arguments with a value for each axis: the value of an axis of extent 1 that is appended.
    """

    name: str
    keyword: bool = False
    appended: int | None = None

    def widened(self, value: Any, ndim: int) -> Any:
        """The value of the argument once axes were appended to make `ndim` of them."""
        if self.name == "ndim":
            return ndim
        if isinstance(value, ProcessGrid):
            return value.promoted(ndim)
        return value if self.appended is None else value + (self.appended,) * (ndim - len(value))


class _OneOfAKind(ABCMeta):
    """The class of distribution classes. Those whose arguments are numbers return the same object
    whenever they are called with equal arguments.

    A repeated call is recognised by the objects it is given, and users write distributions in the
    call: `distributions=[Slab(0), Slab(1), Slab(0)]`.
    """

    def __call__(cls, *values: Any, **named: Any) -> Any:
        if cls._of_numbers:  # type: ignore[attr-defined]
            try:
                return _made(cls, *values, **named)
            except TypeError:  # something has no hash, or is wrong
                pass
        return super().__call__(*values, **named)

    @property
    def __signature__(cls) -> Signature:
        """The arguments, which `inspect` would take from `__call__` above."""
        own = signature(cls.__init__)  # type: ignore[misc]
        return own.replace(
            parameters=[*own.parameters.values()][1:], return_annotation=Signature.empty
        )


@lru_cache(maxsize=1024, typed=True)
def _made(cls: type, *values: Any, **named: Any) -> Any:
    return ABCMeta.__call__(cls, *values, **named)


class Distribution(Immutable, metaclass=_OneOfAKind, hashes_once=True):
    """How a global array is split over ranks.

    The `_arguments` of a class determine what ranks compare and send, and how it prints; they are
    all numbers, or left out, where it is `_of_numbers`.

    `size=`, the number of ranks, may be left out where the distribution is bound to one or has a
    process grid, or where a context is current; `global_shape` where the distribution is bound.
    Otherwise methods raise RuntimeError.
    """

    _arguments: ClassVar[tuple[Argument, ...]]
    _of_numbers: ClassVar[bool] = False
    binding: Binding | None = field(default=None, init=False)

    @property
    @abstractmethod
    def ndim(self) -> int | None:
        """The number of axes of the global array; None where the distribution leaves it open."""

    @property
    def per_rank(self) -> bool:
        """True for a `Box`, which says what one rank owns, so that each rank holds another one."""
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
        # Grids that are equal may differ in the layout that they were made with.
        if self.grid_size is None and isinstance(global_shape, list | tuple):
            shape = tuple(global_shape)
            try:  # by the types, too: True equals 1, and is no extent
                bound: Self = _bound(self, shape, tuple(map(type, shape)), size, rank)
            except TypeError:  # an extent has no hash
                pass
            else:
                return bound
        return self._bind(global_shape, size, rank)

    def _bind(self, global_shape: Any, size: Any, rank: Any) -> Self:
        """See `bind`."""
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
        """The indices that `rank` of `size` owns along each axis.

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

        Errors as `shape`; ValueError also where the indices along an axis make no slice, as with
        cyclic blocks of several indices.
        """
        part = self._known_part(rank, global_shape, size)
        slices = [spans.slice() for spans in part]
        if None in slices:
            axis = slices.index(None)
            raise ValueError(
                f"rank {rank} owns {part[axis]} along axis {axis}, which is no slice: take them "
                "from index_ranges, or the part by redistribute(x, Replicated(), distribution)"
            )
        return tuple(along_axis for along_axis in slices if along_axis is not None)

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
        place = index_within(index, shape)
        for rank in range(ranks):
            if all(i in s for i, s in zip(place, self.part(rank, shape, size=ranks), strict=True)):
                return rank
        raise AssertionError(f"{self!r} leaves index {place} of {shape} without an owner")

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
        return infer_global_shape([self] * len(local_shapes), local_shapes)

    def to(self, cls: type[D], /, *, ndim: int | None = None, copy: bool = False) -> D:
        """The same layout as a distribution of class `cls`; `self` where it already is one.

        A larger `ndim` appends axes of extent 1. Whatever binding is known takes part: a bound
        `BlockCyclic` with one block per rank is a `Slab`, anything bound is a `Box` of its rank.
        Raises ConvertDistributionError when no `cls` describes the layout, or when that cannot be
        known unbound; ValueError when `cls` is no distribution or `ndim` is too small.
        """
        if not (isinstance(cls, type) and issubclass(cls, Distribution)):
            raise ValueError(f"{cls!r} is not a class of distributions")
        wide = self if ndim is None else self._promoted(integer(ndim, "ndim", least=0))
        converted = wide if isinstance(wide, cls) else _convert(wide, cls)
        return converted.copy() if copy and converted is self else converted

    def copy(self) -> Self:
        """An equal distribution that is another object."""
        return copying.copy(self)

    def encode(self) -> tuple[Any, ...]:
        """Plain data (tuples, strings, integers, None) from which `decode` makes an equal one.

        Raises TypeError for a class that is not one of ours: no other rank could decode it.
        """
        kind, held = type(self), self.binding
        if "_arguments" not in vars(kind):
            raise TypeError(f"{kind.__name__} cannot be sent between ranks")
        values = (getattr(self, argument.name) for argument in self._arguments)
        plain = (x.encode() if isinstance(x, ProcessGrid) else x for x in values)
        binding = None if held is None else (held.global_shape, held.size, held.rank)
        return (kind.__name__, *plain, binding)

    def alike(self, other: Distribution) -> bool:
        """True when both are the same distribution; bindings are not compared."""
        return (
            type(self) is type(other)
            and all(
                getattr(self, argument.name) == getattr(other, argument.name)
                for argument in self._arguments
                if argument.name != "ndim"
            )
            and (self.ndim == other.ndim or None in (self.ndim, other.ndim))
        )

    def __repr__(self) -> str:
        words = []
        for argument in self._arguments:
            value = getattr(self, argument.name)
            if not argument.keyword:
                words.append(str(value))
            elif value is not None and (isinstance(value, int) or any(value)):
                words.append(f"{argument.name}={value}")
        bound = "" if self.binding is None else str(self.binding)
        return f"{type(self).__name__}({', '.join(words)}){bound}"

    @abstractmethod
    def _place(self, rank: int, ndim: int, size: int) -> tuple[tuple[int, int], ...]:
        """For each axis (k, parts): `rank` holds part k of so many parts."""

    @classmethod
    def _made_of(cls, *values: Any) -> Self:
        """The distribution of these arguments, in their order. Raises as the class does."""
        pairs = list(zip(cls._arguments, values, strict=True))
        named = {argument.name: value for argument, value in pairs if argument.keyword}
        return cls(*(value for argument, value in pairs if not argument.keyword), **named)

    @classmethod
    def _candidates(cls, given: Distribution, size: int) -> Iterator[Distribution]:
        """Distributions of this class that may have the layout of `given`, the likeliest first."""
        return iter(())

    @classmethod
    def _converted(cls, given: Distribution, size: int) -> Distribution | None:
        """The distribution of this class with the layout of `given` on `size` ranks, or None.

        Raises ConvertDistributionError when that cannot be known.
        """
        same = (one for one in cls._candidates(given, size) if _same(given, one, size))
        return next(same, None)

    def _part(self, rank: int, shape: tuple[int, ...], size: int) -> tuple[Spans, ...]:
        """`part`, for arguments that are known to fit."""
        places = self._place(rank, len(shape), size)
        return tuple(
            Spans.even(extent, parts, k) for extent, (k, parts) in zip(shape, places, strict=True)
        )

    def _end(self) -> tuple[int, ...]:
        """The index behind the part, along each axis, of a distribution that is `per_rank`."""
        raise AssertionError(f"{self!r} speaks of all ranks")

    def _bound_fields(self, shape: tuple[int, ...]) -> dict[str, object]:
        """Fields whose values a copy bound to `shape` replaces, and the new values."""
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
        """A copy with `ndim` axes, or itself. Raises ValueError when it has more."""
        if self.ndim == ndim:
            return self
        if self.ndim is not None and ndim < self.ndim:
            raise ValueError(f"{self!r} has ndim {self.ndim}, which is more than ndim={ndim}")
        wide = self._made_of(*(x.widened(getattr(self, x.name), ndim) for x in self._arguments))
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
    """This process's rank, from the binding or the current context; else None."""
    if given.binding is not None and given.binding.rank is not None:
        return given.binding.rank
    context = current.get()
    return None if context is None else context.rank


# -- the global shape, from what all ranks hold ----------------------------------------------------


def infer_global_shape(
    distributions: Sequence[Distribution], local_shapes: Sequence[Sequence[int]]
) -> tuple[int, ...]:
    """The global shape of which `local_shapes` are the parts; both have one entry per rank.

    Raises BindDistributionError when the ranks hold different distributions, or when a local shape
    is not what the distribution gives its rank; the message has the given and the expected one.
    """
    if not distributions or len(distributions) != len(local_shapes):
        raise BindDistributionError(
            f"{len(distributions)} distributions and {len(local_shapes)} local shapes: "
            "give one of each per rank"
        )
    check_alike(distributions)
    locals_ = [
        integers(shape, f"rank {rank}: local shape", least=0)
        for rank, shape in enumerate(local_shapes)
    ]
    _check_ndim(distributions, locals_)
    held = distributions[0].binding
    if held is not None:
        shape = held.global_shape
    elif distributions[0].per_rank:
        ends = [distribution._end() for distribution in distributions]
        shape = tuple(max(axis) for axis in zip(*ends, strict=True))
    else:
        shape = _from_places(distributions, locals_)
    size = len(locals_)
    for rank, (distribution, given) in enumerate(zip(distributions, locals_, strict=True)):
        part = distribution.part(rank, shape, size=size)
        expected = tuple(s.length for s in part)
        if given != expected:
            raise BindDistributionError(
                f"rank {rank}: local shape {given}, expected {expected} of the global shape "
                f"{shape} by {distribution!r}; local shapes by rank: {_list(locals_)}"
            )
    return shape


def check_alike(distributions: Sequence[Distribution]) -> None:
    """Raise BindDistributionError, naming the rank, unless all ranks mean the same distribution.

    Boxes need not be equal. Where ranks differ, what most ranks hold is taken to be right.
    """
    kinds: list[list[int]] = []
    for rank, distribution in enumerate(distributions):
        for ranks in kinds:
            if distribution.alike(distributions[ranks[0]]):
                ranks.append(rank)
                break
        else:
            kinds.append([rank])
    if len(kinds) > 1:
        right = max(kinds, key=len)
        wrong = min(rank for ranks in kinds if ranks is not right for rank in ranks)
        raise BindDistributionError(
            f"rank {wrong}: {distributions[wrong]!r}, but rank {right[0]} has "
            f"{distributions[right[0]]!r}; all ranks must give the same distribution"
        )


def _check_ndim(distributions: Sequence[Distribution], shapes: Sequence[tuple[int, ...]]) -> None:
    known = [d.ndim for d in distributions if d.ndim is not None]
    ndim = known[0] if known else _commonest([len(shape) for shape in shapes])
    for rank, shape in enumerate(shapes):
        if len(shape) != ndim:
            raise BindDistributionError(
                f"rank {rank}: local shape {shape} has ndim {len(shape)}, expected {ndim}"
            )


def _from_places(
    distributions: Sequence[Distribution], shapes: Sequence[tuple[int, ...]]
) -> tuple[int, ...]:
    """Along each axis the sum of its parts, each as long as most of the ranks that hold it say."""
    size, ndim = len(shapes), len(shapes[0])
    first = distributions[0]
    first._check((0,) * ndim, size)
    places = [first._place(rank, ndim, size) for rank in range(size)]
    extents = []
    for axis in range(ndim):
        said: dict[int, list[int]] = {}
        for rank, place in enumerate(places):
            said.setdefault(place[axis][0], []).append(shapes[rank][axis])
        extents.append(sum(_commonest(lengths) for lengths in said.values()))
    return tuple(extents)


def _commonest(values: Sequence[int]) -> int:
    return Counter(values).most_common(1)[0][0]


def _list(shapes: Sequence[tuple[int, ...]]) -> str:
    shown = ", ".join(str(shape) for shape in shapes[:8])
    return shown + (", ..." if len(shapes) > 8 else "")


@lru_cache(maxsize=1024, typed=True)
def _bound(
    given: Distribution, shape: tuple[Any, ...], types: tuple[type, ...], size: Any, rank: Any
) -> Any:
    """What `bind` returns, one object for equal arguments: layers bind in each call."""
    return given._bind(shape, size, rank)


# -- the same layout as another kind of distribution -----------------------------------------------


def _convert(given: Distribution, cls: type[D]) -> D:
    """`given` as a `cls`, bound as `given` is. Raises ConvertDistributionError if there is none."""
    size = known_size(given)
    if size is None:
        raise ConvertDistributionError(
            f"the number of ranks of {given!r} is not known: bind it with size=, "
            "or call shardmath.initialize"
        )
    alike = cls._converted(given, size)
    if not isinstance(alike, cls):
        raise refuse_conversion(given, cls, f"no {cls.__name__} describes the same layout")
    held = given.binding
    return alike if held is None else alike.bind(held.global_shape, size=size, rank=held.rank)


def refuse_conversion(
    given: Distribution, cls: type[Distribution], why: str
) -> ConvertDistributionError:
    """The error that says why `given` does not convert to `cls`."""
    hint = "" if given.is_bound else "; bound to a global shape it may have one"
    return ConvertDistributionError(f"{given!r} does not convert to {cls.__name__}: {why}{hint}")


def _same(given: Distribution, candidate: Distribution, size: int) -> bool:
    """True when both give every rank the same part, of the bound shape or else of any shape."""
    if given.binding is not None:
        shapes = [given.binding.global_shape]
    else:
        if given.per_rank:
            raise refuse_conversion(given, type(candidate), "it is not bound to a global shape")
        # On axes this long, any two numbers of parts and any two places give different even parts;
        # and no block size but that of a single part gives even parts of both lengths. So what
        # agrees on these two shapes agrees on every shape.
        extent = 4 * size * size
        ndim = candidate.ndim if given.ndim is None else given.ndim
        if ndim is None:
            ndim = 1 + max(getattr(d, "partition_dim", 0) for d in (given, candidate))
        shapes = [(extent,) * ndim, (2 * extent + 1,) * ndim]
    ranks = [asking_rank(given, type(candidate))] if given.per_rank else range(size)
    for shape in shapes:
        for rank in ranks:
            one = given.part(rank, shape, size=size)
            two = candidate.part(rank, shape, size=size)
            if one != two and (all(s.block for s in one) or all(s.block for s in two)):
                return False  # empty parts are equal wherever they lie
    return True


def asking_rank(given: Distribution, cls: type[Distribution]) -> int:
    """This process's rank. Raises ConvertDistributionError when it is not known."""
    known = known_rank(given)
    if known is None:
        raise refuse_conversion(given, cls, "this rank is not known: bind it with rank=")
    return known
