"""Which elements go from which rank to which when one layout becomes another.

A move is a product of runs: one strided box, copied from the source's local array to the
destination's. Over all moves into a rank, every element of its part is written exactly once, from
exactly one source; every rank computes the same moves, so sender and receiver need not talk.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

from shardmath.geometry.coverage import Atom, atoms, bits
from shardmath.geometry.layout import Layout
from shardmath.geometry.spans import Run, Spans, run_between


@dataclass(frozen=True, slots=True)
class Move:
    """One strided box from rank `src` to rank `dst`: one `Run` per axis."""

    src: int
    dst: int
    runs: tuple[Run, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The elements moved along each axis."""
        return tuple(run.count * run.length for run in self.runs)

    @property
    def elements(self) -> int:
        """The elements moved."""
        return prod(self.shape)

    def with_run(self, axis: int, run: Run) -> Move:
        """The move with another run along an axis."""
        return Move(self.src, self.dst, (*self.runs[:axis], run, *self.runs[axis + 1 :]))

    def clipped(self, axis: int, lo: int, hi: int) -> list[Move]:
        """The part that lands between lo and hi of the destination's `axis`, from lo on."""
        return [self.with_run(axis, run) for run in self.runs[axis].clipped(lo, hi)]

    def __str__(self) -> str:
        return f"{self.src} -> {self.dst}: " + ", ".join(str(run) for run in self.runs)


class Pattern(enum.Enum):
    """The kind of a redistribution, seen over all ranks: the first of these that applies."""

    LOCAL = "local"  # no element changes its rank
    ALL_GATHER = "all-gather"  # every rank ends with everything
    GATHER = "gather"  # one rank ends with everything, the others with nothing
    SCATTER = "scatter"  # one rank began with everything, the others with nothing
    ALL_TO_ALL = "all-to-all"  # one owner per element, at most one move between any two ranks
    GENERAL = "general"  # anything else: replicas, or several strided boxes between two ranks


class Traffic(NamedTuple):
    """Bytes that leave and that enter each rank; what stays on a rank is not counted."""

    sent: tuple[int, ...]
    received: tuple[int, ...]


def moves(
    src: Layout, dst: Layout, *, dst_rank: int | None = None, src_rank: int | None = None
) -> tuple[Move, ...]:
    """The moves that turn `src` into `dst`: all, or those into `dst_rank`, or out of `src_rank`.

    Where several ranks own the data, a rank takes what it has itself, and otherwise the owners
    share the destinations evenly. The moves ascend by destination, then, where each element has one
    owner, by source. Raises ValueError when the global shapes or sizes differ, or when an element
    that `dst` needs has no owner in `src`.
    """
    _check(src, dst)
    return tuple(
        Move(s, d, runs)
        for d in (range(dst.size) if dst_rank is None else (dst_rank,))
        for s, columns in _sources(src, dst, d, src_rank)
        for runs in product(*columns)
    )


def shared_part(held: Layout, need: Layout, *, src: int, dst: int) -> tuple[Move, ...]:
    """The moves of all that `dst` needs and `src` holds, whether or not others hold it, too."""
    columns = _meet(held.spans(src), need.spans(dst))
    return () if columns is None else tuple(Move(src, dst, runs) for runs in product(*columns))


def bytes_moved(src: Layout, dst: Layout, itemsize: int) -> Traffic:
    """The bytes that each rank sends and receives when `src` becomes `dst`.

    Raises ValueError as `moves` does.
    """
    received = bytes_received(src, dst, itemsize)
    if src.copies == dst.copies == 1:
        # Each rank sends what it does not keep: pairs of ranks need not be compared.
        pairs = zip(src.local_sizes, kept_elements(src, dst), strict=True)
        sent = [(part - keeps) * itemsize for part, keeps in pairs]
        return Traffic(tuple(sent), received)
    sent = [0] * src.size
    for s, d, count in counted(src, dst):
        sent[s] += count * itemsize * (s != d)
    return Traffic(tuple(sent), received)


def bytes_received(src: Layout, dst: Layout, itemsize: int) -> tuple[int, ...]:
    """The bytes that each rank receives: of its part, all that it does not have already.

    Raises ValueError as `moves` does.
    """
    _check(src, dst)
    if not src.covers():
        for _ in counted(src, dst):  # raises where an element is needed that has no owner
            pass
    pairs = zip(dst.local_sizes, kept_elements(src, dst), strict=True)
    return tuple((need - keeps) * itemsize for need, keeps in pairs)


def kept_elements(src: Layout, dst: Layout) -> list[int]:
    """How many elements of its part of `dst` each rank owns in `src`, too."""
    pairs = zip(src.parts, dst.parts, strict=True)
    return [prod(map(Spans.shared, one, two)) for one, two in pairs]


def counted(src: Layout, dst: Layout) -> Iterator[tuple[int, int, int]]:
    """(source, destination, elements) of all moves, ascending by destination, without the runs.

    Raises ValueError as `moves` does.
    """
    groups = src.groups
    if groups is None:
        for d in range(dst.size):
            for s, columns in _sources(src, dst, d, None):
                yield s, d, prod(sum(run.elements for run in runs) for runs in columns)
        return
    shared = common_elements(src, dst)
    turns = [0] * len(groups)
    for d in range(dst.size):
        owned = 0
        for number, group in enumerate(groups):
            count = shared[group[0]][d]
            if not count:
                continue
            owned += count
            if d in group:
                yield d, d, count
            else:
                yield group[turns[number] % len(group)], d, count  # in turn, as `_choose` does
                turns[number] += 1
        need = dst.local_sizes[d]
        if owned != need:
            raise ValueError(f"rank {d} needs {need} elements of which {owned} have an owner")


def common_elements(one: Layout, two: Layout) -> list[list[int]]:
    """How many elements rank r of `one` and rank s of `two` both own, as `[r][s]`."""
    table = [[1] * two.size for _ in range(one.size)]
    for axis in range(one.ndim):
        ours, theirs = one.column(axis), two.column(axis)
        # There are few distinct spans: these are compared, rather than all pairs of ranks.
        place = {spans: number for number, spans in enumerate(dict.fromkeys(theirs))}
        columns = [place[spans] for spans in theirs]
        rows = {spans: [spans.shared(other) for other in place] for spans in dict.fromkeys(ours)}
        for counts, spans in zip(table, ours, strict=True):
            row = rows[spans]
            counts[:] = [count * row[number] for count, number in zip(counts, columns, strict=True)]
    return table


def classify(src: Layout, dst: Layout) -> Pattern:
    """The pattern of the redistribution from `src` to `dst`. Raises ValueError as `moves` does."""
    _check(src, dst)
    if all(map(_holds, src.parts, dst.parts)):
        return Pattern.LOCAL
    if dst.is_replicated:
        return Pattern.ALL_GATHER
    everything = dst.elements
    if sorted(dst.local_sizes)[-2:] == [0, everything]:
        return Pattern.GATHER
    if sorted(src.local_sizes)[-2:] == [0, everything]:
        return Pattern.SCATTER
    if src.disjoint() and dst.disjoint() and _one_move_per_pair(src, dst):
        return Pattern.ALL_TO_ALL
    return Pattern.GENERAL


def _check(src: Layout, dst: Layout) -> None:
    if src.global_shape != dst.global_shape or src.size != dst.size:
        raise ValueError(f"no moves between different arrays: {src}; {dst}")


def _sources(
    src: Layout, dst: Layout, d: int, only: int | None
) -> Iterator[tuple[int, list[tuple[Run, ...]]]]:
    """(source, runs per axis) for every source of rank `d`; only from rank `only` if given."""
    part = dst.spans(d)
    need = dst.local_sizes[d]
    if need == 0:
        return
    if src.groups is None:
        yield from _overlapping_sources(src, dst, d, only)
        return
    owned = 0
    for group in src.groups if only is None else filter(None, [src.group_of.get(only)]):
        columns = _meet(src.spans(group[0]), part)
        if columns is None:
            continue
        s = group[0] if len(group) == 1 else _choose(group, src.spans(group[0]), dst, d)
        if only is None or s == only:
            yield s, columns
        owned += prod(sum(run.elements for run in runs) for runs in columns)
    if only is None and owned != need:
        raise ValueError(f"rank {d} needs {need} elements of which {owned} have an owner")


def _meet(src: Sequence[Spans], dst: Sequence[Spans]) -> list[tuple[Run, ...]] | None:
    """The runs of each axis from one part to another; None when they share nothing."""
    columns = []
    for one, two in zip(src, dst, strict=True):
        runs = one.intersect(two)
        if not runs:
            return None
        columns.append(runs)
    return columns


def _choose(group: Sequence[int], part: Sequence[Spans], dst: Layout, d: int) -> int:
    """The rank of `group`, all of which own `part`, that sends it to rank `d`.

    `d` itself if it is one; otherwise ranks outside the group are served by its ranks in turn.
    """
    if d in group:
        return d
    turn = 0
    members = set(group)
    for other in range(d):
        takes = other not in members and all(
            one.shared(two) for one, two in zip(part, dst.spans(other), strict=True)
        )
        turn += takes
    return group[turn % len(group)]


def _overlapping_sources(
    src: Layout, dst: Layout, d: int, only: int | None
) -> Iterator[tuple[int, list[tuple[Run, ...]]]]:
    """The sources where parts overlap without being equal: atom by atom, each from one owner.

    This serves every layout; where it applies, the other way gives fewer and longer runs.
    """
    axes: list[list[tuple[Atom, int]]] = []
    for axis, extent in enumerate(src.global_shape):
        column = src.column(axis)
        mine = 1 << src.size
        axes.append(
            [
                (atom, atom.mask & ~mine)
                for atom in atoms([*column, dst.spans(d)[axis]], extent)
                if atom.mask & mine
            ]
        )
    for cell in product(*axes):
        mask = -1
        for _, held in cell:
            mask &= held
        owners = list(bits(mask))
        if not owners:
            index = tuple(atom.start for atom, _ in cell)
            raise ValueError(f"rank {d} needs index {index}, which has no owner")
        s = d if d in owners else owners[d % len(owners)]
        if only is None or s == only:
            columns = zip(cell, src.spans(s), dst.spans(d), strict=True)
            yield (
                s,
                [
                    (run_between(one, two, atom.start, atom.length, atom.count, atom.step),)
                    for (atom, _), one, two in columns
                ],
            )


def _holds(src: Sequence[Spans], dst: Sequence[Spans]) -> bool:
    """True when everything in the part `dst` is also in the part `src`."""
    if not all(s.block for s in dst):
        return True
    return all(one.shared(two) == two.length for one, two in zip(src, dst, strict=True))


def _one_move_per_pair(src: Layout, dst: Layout) -> bool:
    # There are few distinct spans: comparing these mostly decides, without all pairs of ranks.
    columns = [(set(src.column(axis)), set(dst.column(axis))) for axis in range(src.ndim)]
    if all(len(a.intersect(b)) <= 1 for one, two in columns for a in one for b in two):
        return True
    return all(
        prod(len(one.intersect(two)) for one, two in zip(a, b, strict=True)) <= 1
        for a in src.parts
        for b in dst.parts
    )
