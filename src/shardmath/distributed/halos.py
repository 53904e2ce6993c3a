"""Parts with their neighbours' rims, for stencils: `x.halo(width)`.

    rank 0   . . . | 0 1 2 | 3        a rim of 1 around [3, 6) of 9; what lies beyond the array is
    rank 1       2 | 3 4 5 | 6        filled, or comes from its other end where that is periodic
    rank 2           5 | 6 7 8 | .

A rim is one more layout of moves: from whoever owns an index to where it lies in the wider array.
So a part may be narrower than its rims, and any number of axes may be split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product
from typing import Any

from shardmath.base import current
from shardmath.base.collective_call import collective_call
from shardmath.base.immutable import Immutable
from shardmath.base.integers import integers
from shardmath.call.agreement import raising_on_all_ranks
from shardmath.call.driver import call
from shardmath.context.agreement import require_equal
from shardmath.distributed import parts
from shardmath.distributed.movement import Rearrangement, end_explanation
from shardmath.distributed.state import Distributed
from shardmath.geometry import Layout, Move, Spans, Traffic, moves
from shardmath.machine import Machine
from shardmath.operators.redistribute.operation import Problem
from shardmath.program.performing import Arguments, Names
from shardmath.program.steps import LocalArray
from shardmath.redistribution.plan import Transfer

Widths = tuple[int, ...]
Periodic = tuple[bool, ...]


@collective_call
def halo(
    x: Distributed,
    width: int | Sequence[int],
    *,
    periodic: bool | Sequence[bool] = False,
    fill: Any = 0,
    out: Any = None,
) -> Any:
    """This rank's part with rims of `width` indices before and behind it, along each axis.
    Collective.

        u = x.halo(1)                                            # 2 more along each axis
        x.local[...] = (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]) / 4

    The result is an array of the parts' library: `out`, or a new one. Rims, including their
    corners, have the elements of the neighbours. Beyond the array they have `fill`, or, along axes
    that are `periodic`, the elements of its other end. `width` and `periodic` are the same for all
    axes, or given for each; an axis of width 0 has no rim. Parts may be narrower than their rims;
    the rims of an empty part have `fill`.

    Raises the same on all ranks: ValueError for negative widths, for as many as do not fit the
    axes, where a part is several blocks, as in `BlockCyclic`, and for an `out` of another shape or
    type; TypeError or ValueError for a `fill` that the array's type cannot hold; CollectiveMismatch
    where the ranks give different widths.
    """
    end_explanation(lambda: f"halo: rims of {width} of {x.layout}")
    rim = raising_on_all_ranks(x.context, "halo", lambda: parts.full((), fill, x.local))
    words = (x.layout.global_shape, x.layout.spans(x.context.rank), width, periodic)
    arguments = Arguments((x.local,), (out,), words, None, None)
    with current.within(x.context):
        wide = call(HALO, arguments)
    widths, wraps = _by_axis(width, periodic, x.ndim)
    for axis, spans in enumerate(x.layout.spans(x.context.rank)):
        if wraps[axis] and spans.block:
            continue
        before = max(0, widths[axis] - spans.start)
        behind = max(0, spans.stop + widths[axis] - x.shape[axis])
        if not spans.block:
            before = behind = 2 * widths[axis]
        wide[parts.along(axis, slice(0, before))] = rim
        wide[parts.along(axis, slice(wide.shape[axis] - behind, None))] = rim
    return wide


class Halo(Immutable, Transfer):
    """Every rank's part with its rims, of an array of `itemsize`-byte elements in `layout`."""

    layout: Layout
    widths: Widths
    periodic: Periodic
    itemsize: int

    @property
    def kind(self) -> str:
        return f"parts with rims of {' x '.join(map(str, self.widths))}"

    @cached_property
    def traffic(self) -> Traffic:
        sent, received = [0] * self.layout.size, [0] * self.layout.size
        for rank in range(self.layout.size):
            for move in self.into(rank):
                if move.src != rank:
                    sent[move.src] += move.elements * self.itemsize
                    received[rank] += move.elements * self.itemsize
        return Traffic(tuple(sent), tuple(received))

    def source_shape(self, rank: int) -> tuple[int, ...]:
        return self.layout.local_shape(rank)

    def result_shape(self, rank: int) -> tuple[int, ...]:
        local = self.layout.local_shape(rank)
        return tuple(n + 2 * width for n, width in zip(local, self.widths, strict=True))

    def into(self, rank: int) -> tuple[Move, ...]:
        return self._once(("into", rank), lambda: tuple(self._into(rank)))

    def out_of(self, rank: int) -> tuple[Move, ...]:
        size = self.layout.size
        peers = ((rank + 1 + step) % size for step in range(size))
        return tuple(move for peer in peers for move in self.into(peer) if move.src == rank)

    def _into(self, rank: int) -> list[Move]:
        part = self.layout.spans(rank)
        if not all(spans.block for spans in part):
            return []
        columns = map(_pieces, part, self.layout.global_shape, self.widths, self.periodic)
        nothing = tuple(Spans.interval(0, 0) for _ in part)
        found = []
        for pieces in product(*columns):
            box = tuple(spans for spans, _ in pieces)
            held = tuple(box if r == rank else nothing for r in range(self.layout.size))
            for move in moves(self.layout, Layout(self.layout.global_shape, held), dst_rank=rank):
                runs = [
                    replace(run, dst_start=run.dst_start + start)
                    for run, (_, start) in zip(move.runs, pieces, strict=True)
                ]
                found.append(replace(move, runs=tuple(runs)))
        return found


class HaloExchange(Rearrangement):
    """The operation that gives the operand's part rims.

    Its words are the global shape, this rank's part, the width, and whether it is periodic.
    """

    names = Names(
        "halo", ("operand",), ("out",), separate="the operand: a part lies elsewhere among its rims"
    )

    def encoded(self, words: tuple[Any, ...]) -> tuple[Any, Any]:
        shape, part, width, periodic = words
        held, _ = super().encoded((shape, part, part))
        return held, _by_axis(width, periodic, len(shape))

    def transfer(
        self,
        sources: Sequence[Any],
        targets: Sequence[Any],
        shapes: Sequence[Sequence[int]],
        itemsize: int,
    ) -> Halo:
        layout, _ = self.layouts(sources, sources, shapes)
        widths, periodic = require_equal("the widths of rims, and which are periodic", targets)
        for rank, part in enumerate(layout.parts):
            if any(spans.period for spans in part):
                raise ValueError(
                    f"rank {rank} has several blocks, which have no rims: bring the array into one "
                    "block for each rank, such as x.to(Slab.X)"
                )
        return Halo(layout, tuple(widths), tuple(periodic), itemsize)

    def result(self, problem: Problem, rank: int) -> LocalArray:
        return LocalArray(problem.transfer.result_shape(rank), problem.dtype, problem.order)

    def explain(self, problem: Problem, machine: Machine) -> str:
        sent, received = (max(amounts, default=0) for amounts in problem.transfer.traffic)
        return (
            f"{problem.transfer.kind}; a rank sends at most {sent:,} bytes and receives at most "
            f"{received:,}"
        )


HALO = HaloExchange()


def _by_axis(width: Any, periodic: Any, ndim: int) -> tuple[Widths, Periodic]:
    """The width of the rims along each axis, and whether it is periodic. Raises ValueError."""
    if not ndim:
        raise ValueError("an array of no axes has no rims")
    given = (width,) * ndim if isinstance(width, int) else width
    widths = integers(given, "width", least=0)
    wraps = tuple(periodic) if isinstance(periodic, Sequence) else (periodic,) * ndim
    if len(widths) != ndim or len(wraps) != ndim or not all(type(wrap) is bool for wrap in wraps):
        raise ValueError(
            f"width is an integer, and periodic True or False, or one for each of {ndim} axes; "
            f"not {width!r} and {periodic!r}"
        )
    return widths, wraps


def _pieces(spans: Spans, extent: int, width: int, wraps: bool) -> list[tuple[Spans, int]]:
    """The indices of a part with its rims along one axis, as runs of the array's indices, and where
    each run begins in the wider part.

    Along a periodic axis the array is repeated before and behind itself.
    """
    low, high = spans.start - width, spans.stop + width
    copies = range(low // extent, -(-high // extent)) if wraps else range(1)
    found = []
    for number in copies:
        first = number * extent
        start, stop = max(low, first), min(high, first + extent)
        found.append((Spans.interval(start - first, stop - first), start - low))
    return found
