"""What one redistribution moves: a plan that is data, prints in a few lines, and needs no ranks.

All ranks derive the same plan from the same two layouts. A rank on cores pulls: it executes the
moves into itself, and reads the others' local arrays in place. A GPU may also push.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import field
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any, TypeVar

from shardmath.base.immutable import Immutable
from shardmath.geometry import (
    Layout,
    Move,
    Pattern,
    Run,
    Traffic,
    bytes_moved,
    bytes_received,
    classify,
    counted,
    moves,
    shared_part,
)
from shardmath.machine import Rates
from shardmath.redistribution.copies import Strides, lowered, pieces_of

T = TypeVar("T")

Ranges = tuple[tuple[int, int], ...]


def in_ring_order(found: Iterable[Move], rank: int, size: int) -> tuple[Move, ...]:
    """Moves out of the array of `rank`, to the next rank first, itself last."""
    return tuple(sorted(found, key=lambda move: (move.dst - rank - 1) % size))


class Transfer:
    """Which elements, of `itemsize` bytes, move from every rank's array to every rank's.

    A subclass says what moves `into` a rank and `out_of` one; the rest follows.
    """

    itemsize: int

    @property
    def kind(self) -> str:
        """A short name of what is moved."""
        raise NotImplementedError

    @property
    def crosses(self) -> bool:
        """Whether any byte changes its rank; if not, ranks need not wait for each other."""
        return any(self.traffic.received)

    @property
    def stays(self) -> bool:
        """Whether every rank's array becomes what it was."""
        return False

    @property
    def traffic(self) -> Traffic:
        """The bytes that each rank sends and receives; what stays on a rank is not counted."""
        raise NotImplementedError

    def source_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the array of `rank` that elements move out of."""
        raise NotImplementedError

    def result_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the array of `rank` that elements move into."""
        raise NotImplementedError

    def into(self, rank: int) -> tuple[Move, ...]:
        """The moves that `rank` executes: all that end in its array."""
        raise NotImplementedError

    def out_of(self, rank: int) -> tuple[Move, ...]:
        """The moves that begin in the array of `rank`, to the next rank first, itself last."""
        raise NotImplementedError

    def pieces(self, rank: int, src: int, strides: Strides) -> list[tuple[int, int]]:
        """Ranges of bytes of `src`'s local array, from its element 0, with all that moves to
        `rank`.

        See `pieces_of`.
        """
        return [
            piece
            for move in self.into(rank)
            if move.src == src
            for piece in pieces_of(lowered(move, self.itemsize, strides, strides))
        ]

    def sources(self, rank: int) -> tuple[int, ...]:
        """The ranks that the moves into `rank` come from."""
        return self._once(
            ("sources", rank), lambda: tuple(sorted({move.src for move in self.into(rank)}))
        )

    def read_by_peers(self, rank: int) -> Ranges | None:
        """For each axis of the array of `rank` the range (lo, hi) in which peers read.

        None if they read nothing.
        """
        return self._once(("read", rank), lambda: self._bounds(rank))

    def _bounds(self, rank: int) -> Ranges | None:
        out = [move for move in self.out_of(rank) if move.dst != rank]
        if not out:
            return None
        axes = zip(*(move.runs for move in out), strict=True)
        return tuple(
            (min(run.src_start for run in runs), max(run.src_stop for run in runs)) for runs in axes
        )

    @cached_property
    def _kept(self) -> dict[Any, Any]:
        """Answers so far. They are no field: plans are compared and printed without them."""
        return {}

    def _once(self, key: Hashable, make: Callable[[], T]) -> T:
        """The answer of that key, worked out when it is first asked for."""
        if key not in self._kept:
            self._kept[key] = make()
        kept: T = self._kept[key]
        return kept


class Overlap(Immutable, Transfer):
    """Parts to be added up, which may overlap: what each rank needs of what every rank holds, or of
    what it holds itself (`alone`).
    """

    held: Layout
    needed: Layout
    itemsize: int
    alone: bool = False

    @property
    def kind(self) -> str:
        return "parts to be added"

    @property
    def crosses(self) -> bool:
        return not self.alone and self.held.size > 1

    def source_shape(self, rank: int) -> tuple[int, ...]:
        return self.held.local_shape(rank)

    def result_shape(self, rank: int) -> tuple[int, ...]:
        return self.needed.local_shape(rank)

    def into(self, rank: int) -> tuple[Move, ...]:
        """The moves that end in the array of `rank`, in the order of their sources."""
        return tuple(move for src in self._peers(rank) for move in self._moves(src, rank))

    def out_of(self, rank: int) -> tuple[Move, ...]:
        found = (move for dst in self._peers(rank) for move in self._moves(rank, dst))
        return in_ring_order(found, rank, self.held.size)

    def _peers(self, rank: int) -> Sequence[int]:
        return (rank,) if self.alone else range(self.held.size)

    def _moves(self, src: int, dst: int) -> tuple[Move, ...]:
        return shared_part(self.held, self.needed, src=src, dst=dst)


class SomeMoves(Immutable, Transfer):
    """These moves into one rank. What moves into other ranks is not known."""

    moves: tuple[Move, ...] = field(repr=False)
    itemsize: int

    @property
    def kind(self) -> str:
        return f"from ranks {', '.join(str(src) for src in sorted({m.src for m in self.moves}))}"

    @property
    def crosses(self) -> bool:
        return any(move.src != move.dst for move in self.moves)

    def into(self, rank: int) -> tuple[Move, ...]:
        return tuple(move for move in self.moves if move.dst == rank)


class TransferPlan(Immutable, Transfer):
    """The redistribution of an array of `itemsize`-byte elements from layout `src` to layout `dst`.

    Raises ValueError when the global shapes or the numbers of ranks differ.
    """

    src: Layout
    dst: Layout
    itemsize: int

    def __post_init__(self) -> None:
        if self.src.global_shape != self.dst.global_shape or self.src.size != self.dst.size:
            raise ValueError(
                f"a redistribution changes neither the global shape nor the ranks: "
                f"{self.src}; {self.dst}"
            )

    @cached_property
    def pattern(self) -> Pattern:
        """The pattern of the redistribution, seen over all ranks."""
        return classify(self.src, self.dst)

    @cached_property
    def traffic(self) -> Traffic:
        return bytes_moved(self.src, self.dst, self.itemsize)

    @cached_property
    def received(self) -> tuple[int, ...]:
        """The bytes that each rank receives."""
        return bytes_received(self.src, self.dst, self.itemsize)

    @cached_property
    def crosses(self) -> bool:
        return any(self.received)

    @property
    def kind(self) -> str:
        return self.pattern.value

    @property
    def stays(self) -> bool:
        return self.src.same_as(self.dst)

    def source_shape(self, rank: int) -> tuple[int, ...]:
        return self.src.local_shape(rank)

    def result_shape(self, rank: int) -> tuple[int, ...]:
        return self.dst.local_shape(rank)

    def seconds(self, rates: Rates) -> float:
        """The predicted time of the rank that does most. Bytes come from peers over a link; what
        stays is read and written.
        """
        received = self.received
        stay = [
            self.itemsize * math.prod(self.dst.local_shape(rank)) - received[rank]
            for rank in range(self.dst.size)
        ]
        times = [
            came / rates.link + rates.touching(2 * kept)
            for came, kept in zip(received, stay, strict=True)
        ]
        return max(times, default=0.0) + rates.latency

    def into(self, rank: int) -> tuple[Move, ...]:
        return self._once(("into", rank), lambda: moves(self.src, self.dst, dst_rank=rank))

    def out_of(self, rank: int) -> tuple[Move, ...]:
        return self._once(
            ("out of", rank),
            lambda: in_ring_order(moves(self.src, self.dst, src_rank=rank), rank, self.dst.size),
        )

    def parts_out_of(self, rank: int) -> list[tuple[int, int]]:
        """(destination, elements) of what moves from `rank` to each of its peers, ascending."""
        return self._parts_out.get(rank, [])

    def explain(self) -> str:
        """A few lines: from, to, the pattern and the bytes."""
        sent, received = (max(amounts, default=0) for amounts in self.traffic)
        return (
            f"redistribute {self.src}\n"
            f"          to {self.dst}\n"
            f"{self.pattern.value}; {self.itemsize} bytes per element; a rank sends at most "
            f"{sent:,} bytes and receives at most {received:,}"
        )

    def __str__(self) -> str:
        return self.explain()

    @cached_property
    def _parts_out(self) -> dict[int, list[tuple[int, int]]]:
        parts: dict[int, list[tuple[int, int]]] = {}
        for src, dst, count in counted(self.src, self.dst):
            if src != dst:
                parts.setdefault(src, []).append((dst, count))
        return parts


Shape = tuple[int, ...]


class Sections(Immutable, Transfer):
    """Ranges of `axis` of the ranks' arrays, which are of `shapes`: what collectives move.

        all_gather   every rank takes all of every rank's array
        broadcast    every rank takes all of the root's, and nothing else
        all_to_all   rank d takes the d-th range of every rank's array

    A rank's result has what it takes one after the other along the axis, in rank order.
    `counts[s][d]` indices of rank s go to rank d; they begin at `starts[s][d]`. An array of no axes
    moves whole if its count is not 0.
    """

    shapes: tuple[Shape, ...]
    axis: int
    counts: tuple[Shape, ...]
    starts: tuple[Shape, ...]
    itemsize: int

    @classmethod
    def gathered(cls, shapes: Sequence[Shape], axis: int, itemsize: int) -> Sections:
        """All of every rank's array, to every rank."""
        size = len(shapes)
        counts = tuple((shape[axis],) * size for shape in shapes)
        return cls(tuple(shapes), axis, counts, ((0,) * size,) * size, itemsize)

    @classmethod
    def of_one(cls, shape: Shape, root: int, size: int, itemsize: int) -> Sections:
        """All of the array of `root`, to every rank."""
        whole = shape[0] if shape else 1
        counts = tuple((whole * (rank == root),) * size for rank in range(size))
        return cls((shape,) * size, 0, counts, ((0,) * size,) * size, itemsize)

    @classmethod
    def divided(
        cls, shapes: Sequence[Shape], axis: int, counts: Sequence[Shape], itemsize: int
    ) -> Sections:
        """Rank s's array in parts of `counts[s]` indices, one for each rank."""
        starts = tuple((0, *accumulate(sent[:-1])) for sent in counts)
        return cls(tuple(shapes), axis, tuple(counts), starts, itemsize)

    @property
    def kind(self) -> str:
        return f"sections along axis {self.axis}"

    @property
    def crosses(self) -> bool:
        return any(
            self._moves(src, dst)
            for src in range(len(self.shapes))
            for dst in range(len(self.shapes))
            if src != dst
        )

    @property
    def stays(self) -> bool:
        return len(self.shapes) == 1

    def source_shape(self, rank: int) -> Shape:
        return self.shapes[rank]

    def result_shape(self, rank: int) -> Shape:
        shape = self.shapes[0]
        total = sum(sent[rank] for sent in self.counts)
        return (*shape[: self.axis], total, *shape[self.axis + 1 :]) if shape else shape

    def into(self, rank: int) -> tuple[Move, ...]:
        starts = accumulate((sent[rank] for sent in self.counts), initial=0)
        return tuple(
            self._move(src, rank, start)
            for src, start in zip(range(len(self.shapes)), starts, strict=False)
            if self._moves(src, rank)
        )

    def out_of(self, rank: int) -> tuple[Move, ...]:
        size = len(self.shapes)
        return tuple(
            self._move(rank, dst, sum(sent[dst] for sent in self.counts[:rank]))
            for dst in ((rank + 1 + step) % size for step in range(size))
            if self._moves(rank, dst)
        )

    def __str__(self) -> str:
        total = sum(prod(self.result_shape(rank)) for rank in range(len(self.shapes)))
        return f"{total:,} elements of {self.itemsize} bytes arrive along axis {self.axis}"

    def _moves(self, src: int, dst: int) -> bool:
        return bool(self.counts[src][dst]) and prod(self._others(src)) > 0

    def _others(self, src: int) -> Shape:
        shape = self.shapes[src]
        return (*shape[: self.axis], *shape[self.axis + 1 :])

    def _move(self, src: int, dst: int, start: int) -> Move:
        runs = [Run(1, extent, 0, 0, 0, 0) for extent in self.shapes[src]]
        if runs:
            runs[self.axis] = Run(1, self.counts[src][dst], self.starts[src][dst], 0, start, 0)
        return Move(src, dst, tuple(runs))
