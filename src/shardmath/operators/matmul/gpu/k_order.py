"""In which order a rank goes along k, and where each of its factors then lies: pure.

k is cut into steps, what the kernel multiplies at once. Where each step of a factor comes from one
rank, the factor's panel holds its sources one after another, each as it lies there, so that it is
fetched in long rows; what this rank has itself is read where it lies. Steps for which nothing has
to come are first, those for which both factors have to come are last:

    k in blocks    0 1 2 3 4 5 6 7      rank (0, 0) of a grid of 2 x 4
    of A, from     0 1 2 3 0 1 2 3      its own: blocks 0 and 4
    of B, from     0 1 0 1 0 1 0 1      its own: blocks 0, 2, 4 and 6
    order          0 4 | 2 6 | 1 5 | 3 7

A factor whose steps have several sources is gathered as it is, and then k has its own order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from shardmath.geometry import Move, Run
from shardmath.operators.matmul.panels import clip

__all__ = ["OWN", "KOrder", "Lines"]

OWN = 1 << 31  # the highest bit of a step's place: in the own array (kOwn of panel_gemm.cuh)
_ALL, _HERE = -1, -2  # sources of a step: several ranks; nobody, as the factor lies here

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Lines:
    """One factor along k: by step, whom it comes from, and at which index of its panel, or of the
    own array, it begins.

    `own` says whether the steps of `rank` itself are read where they lie. `width` is what the panel
    holds along k, `bases[src]` what is to be added to an index of a source's array to have that of
    the panel, and `ends[src]` where what is needed of that array ends; both are empty where the
    panel is k itself.
    """

    axis: int  # of the factor, which is k
    moves: tuple[Move, ...]
    rank: int
    own: bool
    width: int
    bases: dict[int, int]
    ends: dict[int, int]
    sources: Integers
    places: Integers

    @classmethod
    def here(cls, axis: int, extent: int, step: int) -> Lines:
        """A factor that lies here, all of k in its own order."""
        places = np.arange(0, extent, step)
        return cls(axis, (), -1, True, 0, {}, {}, np.full(len(places), _HERE), places)

    @classmethod
    def of(
        cls,
        moves: Sequence[Move],
        rank: int,
        *,
        axis: int,
        extent: int,
        step: int,
        loadable: bool,
    ) -> Lines:
        """A factor that `moves` bring to `rank`; `loadable`: steps can be read in its own array."""
        moves = tuple(move for move in moves if move.elements)
        width = moves[0].shape[1 - axis] if moves else 0
        found = _sources(moves, axis, extent, step)
        if found is None:
            places = np.arange(0, extent, step)
            sources = np.full(len(places), _ALL)
            return cls(axis, moves, rank, False, extent, {}, {}, sources, places)
        sources, places = found
        own = loadable and _lies_whole([m for m in moves if m.src == rank], 1 - axis, width)
        last = int(sources[-1])  # its end is the panel's: what is beyond it is read as zeros
        bases, ends, at = {}, {}, 0
        for src in sorted(set(sources.tolist()), key=lambda src: (src == last, src)):
            runs = [move.runs[axis] for move in moves if move.src == src]
            start, ends[src] = min(run.src_start for run in runs), max(map(_end, runs))
            if not (own and src == rank):
                at = -(-at // step) * step
                bases[src] = at - start
                at += ends[src] - start
        return cls(axis, moves, rank, own, at, bases, ends, sources, places)

    @property
    def waits(self) -> npt.NDArray[np.bool_]:
        """By step, whether something has to come from a peer."""
        return np.not_equal(self.sources, _HERE) & np.not_equal(self.sources, self.rank)

    @property
    def in_order(self) -> bool:
        """Whether steps have to come in the order of k."""
        return bool((self.sources == _ALL).any())

    def table(self, order: Integers) -> npt.NDArray[np.uint32]:
        """The steps' places as the kernel reads them."""
        places = self.places.copy()
        for src, base in self.bases.items():
            places[self.sources == src] += base
        if self.own:
            mine = (self.sources == self.rank) | (self.sources == _HERE)
            places[mine] |= OWN
        return places[order].astype(np.uint32)

    def gather_moves(self, chosen: Integers, across: tuple[int, int], step: int) -> list[Move]:
        """The moves that bring the chosen steps of some rows or columns into the panel, of which
        those are the first. What is read where it lies is left out.
        """
        if self.in_order:
            lo, hi = int(chosen[0]) * step, (int(chosen[-1]) + 1) * step
            cut = [part for move in self.moves for part in clip(move, self.axis, lo, hi)]
            whole = [_with(move, self.axis, _later(move.runs[self.axis], lo)) for move in cut]
        else:
            lines = {(move.src, move.runs[1 - self.axis]): move for move in self.moves}
            whole = [
                _with(move, self.axis, run)
                for (src, _), move in lines.items()
                if not (self.own and src == self.rank)
                for run in self._runs(src, chosen[self.sources[chosen] == src], step)
            ]
        return [part for move in whole for part in clip(move, 1 - self.axis, *across)]

    def _runs(self, src: int, chosen: Integers, step: int) -> list[Run]:
        """The chosen steps, all from `src`, from its array into the panel."""
        if not len(chosen):
            return []
        starts, base, end = np.sort(self.places[chosen]), self.bases[src], self.ends[src]
        cuts = np.flatnonzero(np.diff(starts) != step) + 1
        firsts = starts[np.concatenate([[0], cuts])]
        lasts = starts[np.concatenate([cuts, [len(starts)]]) - 1]
        return _joined(
            [
                Run(1, min(last + step, end) - first, first, 0, first + base, 0)
                for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True)
            ]
        )


@dataclass(frozen=True, eq=False)
class KOrder:
    """k in steps of `step` indices: the `order` in which they are multiplied, and the factors."""

    step: int
    order: Integers
    lines: tuple[Lines, Lines]

    @classmethod
    def plan(cls, lines: tuple[Lines, Lines], costs: tuple[float, float], step: int) -> KOrder:
        """`costs` are those of an index of k of each factor, for what is multiplied first."""
        a, b = lines
        count = len(a.places)
        if a.in_order or b.in_order:
            return cls(step, np.arange(count), lines)
        cost = a.waits * costs[0] + b.waits * costs[1]
        turns = [_turn(one) for one in lines]
        return cls(step, np.lexsort((np.arange(count), turns[1], turns[0], cost)), lines)

    @property
    def steps(self) -> int:
        """How many there are."""
        return len(self.order)

    def here(self, side: int) -> int:
        """How many steps can be multiplied before anything of a factor has come."""
        waits = self.lines[side].waits[self.order]
        return int(np.argmax(waits)) if waits.any() else self.steps

    def table(self) -> npt.NDArray[np.uint32]:
        """The struct `Step` of panel_gemm.cuh for each step."""
        return np.column_stack([one.table(self.order) for one in self.lines])

    def gather_moves(self, side: int, first: int, last: int, across: tuple[int, int]) -> list[Move]:
        """The moves from peers for steps `first` to `last` of the order; see `Lines.gather_moves`."""
        lines = self.lines[side]
        if first >= last:
            return []
        found = lines.gather_moves(self.order[first:last], across, self.step)
        return [move for move in found if move.src != lines.rank]

    def pieces(self, costs: tuple[float, float], first_bytes: float) -> list[tuple[int, int]]:
        """Steps from one to another that come together: the first with about so many bytes, each
        later one with twice as many. Nothing comes for those before the first piece.
        """
        a, b = self.lines
        cost = (a.waits * costs[0] + b.waits * costs[1])[self.order] * self.step
        come = np.concatenate([[0.0], np.cumsum(cost)])
        at, found = min(self.here(0), self.here(1)), []
        if at:
            first_bytes *= 2  # it comes while those are multiplied
        while at < self.steps:
            end = int(np.searchsorted(come, come[at] + first_bytes, "left"))
            end = min(max(end, at + 1), self.steps)
            if come[-1] - come[end] < first_bytes / 2:
                end = self.steps
            found.append((at, end))
            at, first_bytes = end, first_bytes * 2
        return found


def _sources(
    moves: Sequence[Move], axis: int, extent: int, step: int
) -> tuple[Integers, Integers] | None:
    """By step, the rank it comes from and its index there; None where a step has several."""
    source = np.full(extent, _HERE, np.int64)
    place = np.zeros(extent, np.int64)
    for src, run in {(move.src, move.runs[axis]) for move in moves}:
        blocks = np.arange(run.count)[:, None], np.arange(run.length)[None]
        index = (run.dst_start + blocks[0] * run.dst_step + blocks[1]).reshape(-1)
        if (source[index] != _HERE).any():
            return None
        source[index] = src
        place[index] = (run.src_start + blocks[0] * run.src_step + blocks[1]).reshape(-1)
    inside = np.arange(1, extent) % step != 0
    same = (source[1:] == source[:-1]) & (place[1:] == place[:-1] + 1)
    if (source == _HERE).any() or not same[inside].all():
        return None
    return source[::step], place[::step]


def _lies_whole(mine: Sequence[Move], across: int, width: int) -> bool:
    """Whether this rank's own lines are all of it across, from its first on."""
    if not mine or len({move.runs[across] for move in mine}) > 1:
        return False
    run = mine[0].runs[across]
    return run.count == 1 and run.length == width and run.src_start == run.dst_start == 0


def _turn(lines: Lines) -> Integers:
    """By step: from this rank on, so that no two ranks begin with the same peer."""
    size = max(int(lines.sources.max()), lines.rank, 0) + 1
    return (lines.sources - lines.rank) % size


def _end(run: Run) -> int:
    """Behind its last index in the source."""
    return run.src_start + (run.count - 1) * run.src_step + run.length


def _joined(runs: Sequence[Run]) -> list[Run]:
    """Runs of one block each, those of equal length at equal distances as one."""
    found: list[Run] = []
    for run in runs:
        last = found[-1] if found else None
        if last is not None and last.length == run.length:
            distance = run.src_start - last.src_start - (last.count - 1) * last.src_step
            if last.count == 1 or distance == last.src_step:
                found[-1] = replace(
                    last, count=last.count + 1, src_step=distance, dst_step=distance
                )
                continue
        found.append(run)
    return found


def _with(move: Move, axis: int, run: Run) -> Move:
    """The same with another run along an axis."""
    return replace(move, runs=(*move.runs[:axis], run, *move.runs[axis + 1 :]))


def _later(run: Run, distance: int) -> Run:
    """The same into a place further along."""
    return replace(run, dst_start=run.dst_start + distance)
