"""Which part of a global array every rank owns: one product of `Spans` per rank.

A `Layout` knows the parts of all ranks, unlike a box, which knows only its own. Two layouts are
equal exactly when every rank owns the same indices along every axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import zip_longest
from math import prod
from operator import attrgetter, gt

from shardmath.base.immutable import Immutable
from shardmath.base.integers import index_within, integers
from shardmath.errors import BindDistributionError
from shardmath.geometry.coverage import bits, owner_sets
from shardmath.geometry.distribution import Distribution, check_alike
from shardmath.geometry.spans import Spans

Part = tuple[Spans, ...]
_length, _stop = attrgetter("length"), attrgetter("stop")


class Layout(Immutable, hashes_once=True):
    """The parts of all ranks: `parts[rank][axis]` is a `Spans`.

    Raises ValueError when a part has another number of axes than the global shape, or exceeds it.
    """

    global_shape: tuple[int, ...]
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        shape = self.global_shape
        for rank, part in enumerate(self.parts):
            if len(part) != len(shape) or any(map(gt, map(_stop, part), shape)):
                raise ValueError(f"rank {rank}: part {_show(part)} does not fit in {shape}")

    @classmethod
    def bind(cls, distributions: Sequence[Distribution], global_shape: Sequence[int]) -> Layout:
        """The layout that `distributions`, one per rank, make of an array of `global_shape`.

        Raises BindDistributionError, naming the ranks, when the ranks hold different distributions,
        when a part does not fit, when boxes overlap, or when an index has no owner.
        """
        shape = integers(global_shape, "global_shape", least=0)
        size = len(distributions)
        check_alike(distributions)
        parts = []
        for rank, distribution in enumerate(distributions):
            try:
                parts.append(distribution.part(rank, shape, size=size))
            except BindDistributionError as error:
                raise BindDistributionError(f"rank {rank}: {error}") from None
        layout = cls(shape, tuple(parts))
        if distributions and distributions[0].per_rank:
            layout._check_tiling()
        return layout

    @classmethod
    def replicated(cls, global_shape: Sequence[int], size: int) -> Layout:
        """Every one of `size` ranks owns everything."""
        return cls.product(global_shape, [None] * len(global_shape), size=size)

    @classmethod
    def slab(cls, global_shape: Sequence[int], size: int, *, axis: int) -> Layout:
        """`axis` split into `size` parts, of which the first `extent % size` hold one more."""
        columns: list[Sequence[Spans] | None] = [None] * len(global_shape)
        extent = global_shape[axis]
        columns[axis] = [Spans.even(extent, size, k) for k in range(size)]
        return cls.product(global_shape, columns, size=size)

    @classmethod
    def on_one_rank(cls, global_shape: Sequence[int], size: int, *, rank: int) -> Layout:
        """`rank` of `size` owns everything, the others nothing."""
        nothing = (Spans(0, 0, 0, 0),) * len(global_shape)
        whole = tuple(Spans.interval(0, extent) for extent in global_shape)
        return cls(tuple(global_shape), tuple(whole if r == rank else nothing for r in range(size)))

    @classmethod
    def product(
        cls, global_shape: Sequence[int], columns: Sequence[Sequence[Spans] | None], *, size: int
    ) -> Layout:
        """Rank r owns `columns[axis][r]` along each axis; None stands for the whole axis.

        Axes behind the last column are whole, too. For example rows as in c, and all of k:
        `product((m, k), [c.column(0)], size=c.size)`.
        """
        shape = integers(global_shape, "global_shape", least=0)
        full = [
            [Spans.interval(0, extent)] * size if column is None else column
            for extent, column in zip_longest(shape, columns)
        ]
        if {len(column) for column in full} - {size}:
            raise ValueError(f"columns of {[len(column) for column in full]} ranks, not of {size}")
        return cls(shape, tuple(zip(*full, strict=True)) if full else ((),) * size)

    def with_column(self, axis: int, extent: int, column: Sequence[Spans] | None) -> Layout:
        """This layout with one axis replaced: rank r owns `column[r]` of the new `extent`.

        None stands for the whole axis.
        """
        columns: list[Sequence[Spans] | None] = [self.column(n) for n in range(self.ndim)]
        columns[axis] = column
        shape = (*self.global_shape[:axis], extent, *self.global_shape[axis + 1 :])
        return Layout.product(shape, columns, size=self.size)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.parts)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.global_shape)

    @property
    def elements(self) -> int:
        """The number of elements of the global array."""
        return prod(self.global_shape)

    def spans(self, rank: int) -> Part:
        """The indices that `rank` owns along each axis."""
        return self.parts[rank]

    def column(self, axis: int) -> tuple[Spans, ...]:
        """The indices that every rank owns along `axis`."""
        return tuple(part[axis] for part in self.parts)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of `rank`'s part."""
        return tuple(map(_length, self.parts[rank]))

    @cached_property
    def local_sizes(self) -> tuple[int, ...]:
        """The number of elements of every rank's part."""
        return tuple(prod(map(_length, part)) for part in self.parts)

    def owners(self, index: Sequence[int]) -> tuple[int, ...]:
        """The ranks that own the element at a global index, ascending.

        Raises IndexError when the index is outside the global shape.
        """
        place = index_within(index, self.global_shape)
        return tuple(
            rank
            for rank, part in enumerate(self.parts)
            if all(i in s for i, s in zip(place, part, strict=True))
        )

    def transposed(self) -> Layout:
        """The layout of the transposed array, whose axes are reversed."""
        return Layout(self.global_shape[::-1], tuple(part[::-1] for part in self.parts))

    def same_as(self, other: Layout) -> bool:
        """True when every rank owns the same elements: equal, but for where empty parts lie."""
        if self.global_shape != other.global_shape or self.size != other.size:
            return False
        pairs = zip(self.parts, other.parts, strict=True)
        return all(one == two or (_empty(one) and _empty(two)) for one, two in pairs)

    @cached_property
    def partitioned_axes(self) -> tuple[int, ...]:
        """The axes along which some rank does not own everything."""
        return tuple(
            axis
            for axis, extent in enumerate(self.global_shape)
            if any(part[axis].length != extent for part in self.parts)
        )

    def is_whole(self, axis: int) -> bool:
        """True when every rank that owns anything owns all of `axis`."""
        extent = self.global_shape[axis]
        return all(part[axis].length == extent or _empty(part) for part in self.parts)

    @property
    def is_replicated(self) -> bool:
        """True when every rank owns everything (always so for one rank that covers)."""
        return not self.partitioned_axes

    @cached_property
    def uniform(self) -> bool:
        """True when all local shapes are equal."""
        return len({self.local_shape(rank) for rank in range(self.size)}) <= 1

    @cached_property
    def owner_sets(self) -> Mapping[int, tuple[int, ...]]:
        """Each set of ranks that owns some element, as a bit mask, with the index of one."""
        return owner_sets(self.global_shape, self.parts)

    def covers(self) -> bool:
        """True when every element has an owner."""
        return 0 not in self.owner_sets

    def disjoint(self) -> bool:
        """True when every element has exactly one owner."""
        return all(mask.bit_count() == 1 for mask in self.owner_sets)

    @cached_property
    def copies(self) -> int | None:
        """How many ranks own each element; None where that differs, or there are no elements."""
        counts = {mask.bit_count() for mask in self.owner_sets}
        return counts.pop() if len(counts) == 1 else None

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...] | None:
        """The ranks that own the same part, by part; None when parts overlap without being equal.

        Ranks with empty parts are left out. Disjoint layouts have groups of one rank.
        """
        by_part: dict[Part, list[int]] = {}
        for rank, part in enumerate(self.parts):
            if not _empty(part):
                by_part.setdefault(part, []).append(rank)
        masks = {sum(1 << rank for rank in ranks) for ranks in by_part.values()}
        if not all(mask == 0 or mask in masks for mask in self.owner_sets):
            return None
        return tuple(tuple(ranks) for ranks in by_part.values())

    @cached_property
    def group_of(self) -> dict[int, tuple[int, ...]]:
        """By rank, its group among the `groups`; ranks with empty parts are left out."""
        return {rank: group for group in self.groups or () for rank in group}

    def __str__(self) -> str:
        """One line: the global shape, the ranks, how each axis is split."""
        if self.is_replicated:
            return f"{_shape(self.global_shape)} on {self.size} ranks, replicated"
        split = ", ".join(
            f"axis {axis} in {len(set(self.column(axis)))}" for axis in self.partitioned_axes
        )
        kind = "" if self.uniform else ", uneven"
        cyclic = any(s.period for part in self.parts for s in part)
        return (
            f"{_shape(self.global_shape)} on {self.size} ranks, {split}"
            f"{', cyclic' if cyclic else ''}{kind}"
        )

    def draw(self) -> str:
        """A text drawing of the ranks on the global array; * where several ranks own an element."""
        from shardmath.geometry.drawing import draw

        return draw(self.global_shape, dict(enumerate(self.parts)))

    def _check_tiling(self) -> None:
        """Raise BindDistributionError unless every element has exactly one owner."""
        for mask, index in self.owner_sets.items():
            if mask == 0:
                raise BindDistributionError(
                    f"no rank owns index {index} of the global shape {self.global_shape}"
                )
            if mask.bit_count() > 1:
                ranks = list(bits(mask))
                names = " and ".join(str(rank) for rank in ranks)
                held = "; ".join(f"rank {r}: {_show(self.parts[r])}" for r in ranks[:2])
                raise BindDistributionError(
                    f"the parts of ranks {names} overlap at index {index} ({held})"
                )


def _empty(part: Part) -> bool:
    return not all(s.block for s in part)


def _show(part: Part) -> str:
    return "[" + ", ".join(str(s) for s in part) + "]"


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(str(extent) for extent in shape) or "scalar"
