"""Panels of k: local operands are used in place, remote ones are gathered panel by panel.

k is cut into intervals with a product each, so that the panels of the next interval come while one
is multiplied. The first is short, since nothing hides its panels. Then they grow by as much as
panels come faster than they are used, since few long products are faster than many. A rank begins
with its own part of k and goes round from there, so that ranks do not all read from one. Where
several ranks compute the same elements, they go in the order of k, so that replicas hold the same
bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

from shardmath.base.immutable import Immutable
from shardmath.geometry import Move
from shardmath.program.factors import AlongK

_FIRST_BYTES = 8 << 20  # of panels: less is gathered in one go
_LEAST = 256  # indices of k
_FIRST = 1.4e-12  # indices for each flop per second: with fewer, adding to D takes too long
_LEAST_GROWTH, _MOST_GROWTH = 1.25, 3.0
_ROOM = 2 << 30  # bytes of panels, of both operands together
_SLOTS = 3  # panels that take turns in memory, where all together would need more than _ROOM


class OperandPlan(AlongK):
    """One rank's reading of one operand on its GPU. If it is one dense box of this rank's own
    array, nothing moves, and `place` is where that box starts along each axis.
    """

    place: tuple[int, int] | None

    @classmethod
    def plan(
        cls, moves: Sequence[Move], shape: tuple[int, ...], rank: int, axis: int
    ) -> OperandPlan:
        """How `rank` reads its part, of that shape, which `moves` bring."""
        extent, width = shape[axis], shape[1 - axis]
        place = None
        if len(moves) == 1 and moves[0].src == rank:
            one, two = moves[0].runs
            if one.count == two.count == 1:
                place = one.src_start, two.src_start
        return cls(axis, extent, width, tuple(moves), place)

    @property
    def gathers(self) -> bool:
        """Whether it comes in panels."""
        return self.place is None and self.extent > 0 and self.width > 0

    def transposed(self) -> OperandPlan:
        """The reading of the transposed operand."""
        moves = tuple(Move(move.src, move.dst, move.runs[::-1]) for move in self.moves)
        place = None if self.place is None else (self.place[1], self.place[0])
        return OperandPlan(1 - self.axis, self.extent, self.width, moves, place)

    @property
    def remote(self) -> float:
        """Elements from peers for each index of k."""
        if not self.gathers:
            return 0.0
        return sum(m.elements for m in self.moves if m.src != m.dst) / self.extent

    @cached_property
    def own_start(self) -> int:
        """The first index of k of this rank's own part, 0 if that is in several pieces."""
        own = {move.runs[self.axis] for move in self.moves if move.src == move.dst}
        run = own.pop() if len(own) == 1 else None
        return run.dst_start if run is not None and run.count == 1 else 0


class Interval(Immutable):
    """Indices lo to hi of k. Its panels start `offset` indices into the panels' memory, once the
    product of interval number `after`, if any, is done with that.
    """

    lo: int
    hi: int
    offset: int
    after: int | None


def intervals(
    a: OperandPlan,
    b: OperandPlan,
    itemsize: int,
    *,
    rate: float,
    ratio: float,
    rotate: bool,
    grain: int = 64,
) -> tuple[list[Interval], int]:
    """The intervals in the order in which they are multiplied, and how many indices of k the
    panels' memory holds.

    Products do `rate` flops per second; panels come `ratio` times as fast as they are used. With
    `rotate` this rank's own part of k comes first. Lengths are multiples of `grain`, but at the end
    of k; and so are bounds, if `grain` is greater than 64.
    """
    extent = a.extent
    per_index = itemsize * sum(
        operand_plan.width for operand_plan in (a, b) if operand_plan.gathers
    )
    if not per_index:
        return [Interval(0, extent, 0, None)], 0
    least = max(_LEAST, int(rate * _FIRST / 64) * 64)
    if per_index * extent <= _FIRST_BYTES or extent <= 2 * least:
        return [Interval(0, extent, 0, None)], extent
    room = max(least, _ROOM // per_index)
    first = max(least, _FIRST_BYTES // per_index) // grain * grain
    growth = min(_MOST_GROWTH, max(_LEAST_GROWTH, 0.9 * ratio))
    start = 0
    if rotate:
        start = next((operand_plan.own_start for operand_plan in (a, b) if operand_plan.gathers), 0)
        start -= start % grain if grain > 64 else 0
    ends = [extent, start] if start else [extent]
    fits_at_once = extent <= room
    most = extent if fits_at_once else max(grain, room // _SLOTS // grain * grain)
    pieces: list[tuple[int, int]] = []
    lo, length = start, float(min(first, most))
    for end in ends:
        while lo < end:
            left = end - lo
            step = min(int(length) // grain * grain, most)
            step = left if left < 1.5 * step and left <= most else min(step, left)
            pieces.append((lo, lo + step))
            lo += step
            length *= growth
        lo = 0
    if fits_at_once:
        offsets = accumulate((hi - lo for lo, hi in pieces), initial=0)
        together = zip(pieces, offsets, strict=False)
        return [Interval(lo, hi, offset, None) for (lo, hi), offset in together], extent
    return [
        Interval(lo, hi, i % _SLOTS * most, i - _SLOTS if i >= _SLOTS else None)
        for i, (lo, hi) in enumerate(pieces)
    ], most * _SLOTS
