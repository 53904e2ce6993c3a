"""Pipelines where ranks are on several hosts: deliveries overlap with transforms.

A transform of slabs is cut as `chunking` says. Each part of the first transform is packed when it
is done, and delivered during the next ones; the second transform begins with the first part of its
own axis that has arrived from all ranks. Every rank has as many deliveries: in each all ranks meet.
Pure.

    transforms   0 | pack 0 | 1 | pack 1 |          | a | b |
    deliveries                fetch, unpack 0 | ... 1a | 1b
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from shardmath.arrays import dtypes
from shardmath.geometry import Layout, Move
from shardmath.operators.fft.chunking import (
    Chunking,
    first_parts,
    second_parts,
    split_axes,
    transform_part,
)
from shardmath.operators.fft.local_steps import View, packed
from shardmath.operators.fft.problem import Problem
from shardmath.operators.fft.program import (
    Deliver,
    Program,
    Step,
    UserArrays,
    WaitDelivery,
    parcel_axes,
)
from shardmath.operators.fft.stages import Stage
from shardmath.redistribution import TransferPlan
from shardmath.redistribution.delivery import Delivery

__all__ = ["make_multi_host_program"]

_Ranges = tuple[tuple[int, int], ...]  # of every rank: indices of its local array along an axis


@dataclass(frozen=True)
class _PartOfTransfer(TransferPlan):
    """The part of a transfer between slabs that is in `source_ranges` of the sources' arrays along
    axis `u`, and in `target_ranges` of the destinations' along axis `v`.

    Moves are between whole local arrays.
    """

    u: int
    source_ranges: _Ranges
    v: int
    target_ranges: _Ranges

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
            (lo, hi), run = self.source_ranges[move.src], runs[self.u]  # all that the source has
            runs[self.u] = replace(run, length=hi - lo, src_start=lo, dst_start=run.dst_start + lo)
            (lo, hi), run = self.target_ranges[move.dst], runs[self.v]
            runs[self.v] = replace(run, length=hi - lo, src_start=run.src_start + lo, dst_start=lo)
            cut = replace(move, runs=tuple(runs))
            if cut.elements:
                yield cut


def make_multi_host_program(
    stages: Sequence[Stage],
    problem: Problem,
    rank: int,
    arrays: UserArrays,
    chunking: Chunking,
    *,
    hosts: tuple[int, ...],
) -> Program | None:
    """What `rank` does for stages that deliver, in parts; None, on all ranks, where these stages
    cannot be cut.

    The result may overlap the operand: nothing is written to it before all of the operand has been
    read.
    """
    axes = split_axes(stages)
    if axes is None:
        return None
    u, v = axes[:2]
    operand, result = arrays.operand, arrays.result
    first_fft, exchange, second_fft, *second_exchange = stages
    work, receive = (
        packed(each.target, each.result.local_shape(rank), each.result_dtype, problem.order)
        for each in (first_fft, exchange)
    )
    target = receive if second_exchange else result
    firsts = _first_ranges(exchange.layout, u, chunking.first)
    seconds = _second_ranges(exchange.result, v, chunking.second)
    tail = min(chunking.tail, len(firsts))
    whole_parts = len(firsts) - tail
    builder = _ProgramBuilder(
        problem, rank, hosts, last=whole_parts + len(seconds) * (1 + len(second_exchange)) - 1
    )
    for number, ranges in enumerate(firsts):
        lo, hi = ranges[rank]
        builder.steps += transform_part(
            first_fft, operand.part(u, lo, hi), work.part(u, lo, hi), preserve_input=True
        )
        if number < whole_parts:
            builder.deliver(
                exchange, work, receive, (u, ranges), (v, _full_ranges(exchange.result, v))
            )
    tail_ranges = tuple(
        (lo, hi) for (lo, _), (_, hi) in zip(firsts[whole_parts], firsts[-1], strict=True)
    )
    for ranges in seconds:
        builder.deliver(exchange, work, receive, (u, tail_ranges), (v, ranges))
    for number, ranges in enumerate(seconds, whole_parts):
        lo, hi = ranges[rank]
        builder.steps.append(WaitDelivery(number))
        builder.steps += transform_part(
            second_fft, receive.part(v, lo, hi), target.part(v, lo, hi), preserve_input=False
        )
        for last in second_exchange:
            everything = axes[2], _full_ranges(last.result, axes[2])
            builder.deliver(last, receive, result, (v, ranges), everything)
    return builder.program()


@dataclass
class _ProgramBuilder:
    """Appends the steps of one rank. Deliveries are numbered up to `last`."""

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
        target: View,
        sources: tuple[int, _Ranges],
        targets: tuple[int, _Ranges],
    ) -> None:
        """Deliver a part of an exchange: (axis, ranges) of the sources, and of the destinations."""
        number = len(self.outboxes)
        itemsize = dtypes.of(stage.dtype).itemsize
        transfer = _PartOfTransfer(stage.layout, stage.result, itemsize, *sources, *targets)
        delivery = Delivery(transfer, self.rank, self.hosts, parcel_axes(self.problem))
        self.outboxes.append(f"outbox {number}")
        barrier_last = number == self.last
        self.steps.append(Deliver(own, target, self.outboxes[-1], delivery, barrier_last, number))

    def program(self) -> Program:
        """The program of these steps."""
        return Program(tuple(self.steps), tuple(self.outboxes))


def _first_ranges(layout: Layout, axis: int, weights: Sequence[int]) -> list[_Ranges]:
    """By part of the first transform, the ranges of all ranks: as many as the shortest has."""
    extents = [layout.local_shape(rank)[axis] for rank in range(layout.size)]
    ranges = [first_parts(extent, weights) for extent in extents]
    least = min(map(len, ranges))
    if least < len(weights):
        ranges = [first_parts(extent, [1] * least) for extent in extents]
    return list(zip(*ranges, strict=True))


def _second_ranges(layout: Layout, axis: int, parts: int) -> list[_Ranges]:
    """By part of the second transform, the ranges of all ranks."""
    extents = [layout.local_shape(rank)[axis] for rank in range(layout.size)]
    return list(zip(*(second_parts(extent, parts) for extent in extents), strict=True))


def _full_ranges(layout: Layout, axis: int) -> _Ranges:
    """All indices of every rank."""
    return tuple((0, layout.local_shape(rank)[axis]) for rank in range(layout.size))
