"""Deliveries that go on beside transforms, where ranks are on several hosts.

A transform of slabs is cut as `chunking` says. Each part of the first transform is packed when it
is made, and delivered while the next ones are made; the second transform begins with the first
part of its own axis that is all there. Every rank has as many deliveries, since in each all of them
meet. Pure.

    transforms   0 | pack 0 | 1 | pack 1 |          | a | b |
    beside                    fetch, unpack 0 | ... 1a | 1b
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from shardmath.arrays import dtypes
from shardmath.geometry import Layout, Move
from shardmath.operators.fft.chunking import (
    Cuts,
    first_parts,
    second_parts,
    split_axes,
    transform_part,
)
from shardmath.operators.fft.local_steps import View, packed
from shardmath.operators.fft.problem import Problem
from shardmath.operators.fft.program import Deliver, Ends, Program, Step, WaitDelivery, parcel_axes
from shardmath.operators.fft.stages import Stage
from shardmath.redistribution import TransferPlan
from shardmath.redistribution.delivery import Delivery

__all__ = ["far_pipelined"]

_Ranges = tuple[tuple[int, int], ...]  # of every rank: indices of its local array along an axis


@dataclass(frozen=True)
class _Excerpt(TransferPlan):
    """Of a transfer between slabs: what sources hold in `held` along axis `u`, and destinations
    take in `taken` along axis `v`. Moves are between whole local arrays.
    """

    u: int
    held: _Ranges
    v: int
    taken: _Ranges

    def into(self, rank: int) -> tuple[Move, ...]:
        """See TransferPlan."""
        return tuple(self._cut(super().into(rank)))

    def out_of(self, rank: int) -> tuple[Move, ...]:
        """See TransferPlan."""
        return tuple(self._cut(super().out_of(rank)))

    def parts_out_of(self, rank: int) -> list[tuple[int, int]]:
        """See TransferPlan."""
        return sorted((m.dst, m.elements) for m in self.out_of(rank) if m.dst != rank)

    def _cut(self, found: tuple[Move, ...]) -> Iterator[Move]:
        for move in found:
            runs = list(move.runs)
            (lo, hi), run = self.held[move.src], runs[self.u]  # all that the source has
            runs[self.u] = replace(run, length=hi - lo, src_start=lo, dst_start=run.dst_start + lo)
            (lo, hi), run = self.taken[move.dst], runs[self.v]
            runs[self.v] = replace(run, length=hi - lo, src_start=run.src_start + lo, dst_start=lo)
            cut = replace(move, runs=tuple(runs))
            if cut.elements:
                yield cut


def far_pipelined(
    found: Sequence[Stage],
    problem: Problem,
    rank: int,
    ends: Ends,
    cuts: Cuts,
    *,
    hosts: tuple[int, ...],
) -> Program | None:
    """What `rank` does for stages that deliver; None, on all ranks, where they cannot be cut.

    The result may overlap the operand: nothing is written to it before all of the operand has been
    read.
    """
    axes = split_axes(found)
    if axes is None:
        return None
    a, b = axes[:2]
    operand, result = ends.operand, ends.result
    one, exchange, two, *more = found
    work, landing = (
        packed(each.target, each.result.local_shape(rank), each.made, problem.order)
        for each in (one, exchange)
    )
    target = landing if more else result
    firsts = _firsts(exchange.layout, a, cuts.first)
    seconds = _seconds(exchange.result, b, cuts.second)
    tail = min(cuts.tail, len(firsts))
    whole = len(firsts) - tail
    made = _Made(problem, rank, hosts, last=whole + len(seconds) * (1 + len(more)) - 1)
    for number, ranges in enumerate(firsts):
        lo, hi = ranges[rank]
        made.steps += transform_part(one, operand.part(a, lo, hi), work.part(a, lo, hi), keep=True)
        if number < whole:
            made.deliver(exchange, work, landing, (a, ranges), (b, _all(exchange.result, b)))
    left = tuple((lo, hi) for (lo, _), (_, hi) in zip(firsts[whole], firsts[-1], strict=True))
    for ranges in seconds:
        made.deliver(exchange, work, landing, (a, left), (b, ranges))
    for number, ranges in enumerate(seconds, whole):
        lo, hi = ranges[rank]
        made.steps.append(WaitDelivery(number))
        made.steps += transform_part(
            two, landing.part(b, lo, hi), target.part(b, lo, hi), keep=False
        )
        for back in more:
            made.deliver(back, landing, result, (b, ranges), (axes[2], _all(back.result, axes[2])))
    return made.program()


@dataclass
class _Made:
    """The steps of one rank so far. Deliveries are numbered; the `last` closes the execution."""

    problem: Problem
    rank: int
    hosts: tuple[int, ...]
    last: int
    steps: list[Step] = field(default_factory=list)
    outboxes: list[str] = field(default_factory=list)

    def deliver(
        self,
        stage: Stage,
        own: View,
        into: View,
        held: tuple[int, _Ranges],
        taken: tuple[int, _Ranges],
    ) -> None:
        """Part of an exchange: see _Excerpt, of which `held` and `taken` have the axes first."""
        number = len(self.outboxes)
        itemsize = dtypes.of(stage.dtype).itemsize
        transfer = _Excerpt(stage.layout, stage.result, itemsize, *held, *taken)
        delivery = Delivery(transfer, self.rank, self.hosts, parcel_axes(self.problem))
        self.outboxes.append(f"outbox {number}")
        barrier_last = number == self.last
        self.steps.append(Deliver(own, into, self.outboxes[-1], delivery, barrier_last, number))

    def program(self) -> Program:
        """All of it."""
        return Program(tuple(self.steps), tuple(self.outboxes))


def _firsts(layout: Layout, axis: int, weights: Sequence[int]) -> list[_Ranges]:
    """By part of the first transform, the ranges of all ranks: as many as the shortest has."""
    extents = [layout.local_shape(rank)[axis] for rank in range(layout.size)]
    ranges = [first_parts(extent, weights) for extent in extents]
    least = min(map(len, ranges))
    if least < len(weights):
        ranges = [first_parts(extent, [1] * least) for extent in extents]
    return list(zip(*ranges, strict=True))


def _seconds(layout: Layout, axis: int, parts: int) -> list[_Ranges]:
    """By part of the second transform, the ranges of all ranks."""
    extents = [layout.local_shape(rank)[axis] for rank in range(layout.size)]
    return list(zip(*(second_parts(extent, parts) for extent in extents), strict=True))


def _all(layout: Layout, axis: int) -> _Ranges:
    """All indices of every rank."""
    return tuple((0, layout.local_shape(rank)[axis]) for rank in range(layout.size))
