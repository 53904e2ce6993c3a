"""What one rank's GPU does for a plan, worked out once for arrays of each kind.

A way holds the steps and their tables on the device, and no operands. The ranks' ways differ, but
all have the same exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from shardmath.cuda.device import Device
from shardmath.geometry import moves
from shardmath.lru_cache import LRUCache
from shardmath.operators.fft.chunking import Cuts, cuts_for
from shardmath.operators.fft.far_pipeline import far_pipelined
from shardmath.operators.fft.local_steps import Copy, LocalStep, packed
from shardmath.operators.fft.overlap import PushTables
from shardmath.operators.fft.pipeline import Pipeline, pipelined
from shardmath.operators.fft.problem import Problem
from shardmath.operators.fft.program import Ends, PeerCopy, Program, programmed
from shardmath.operators.fft.stages import Stage, stages
from shardmath.operators.fft.strategy import Strategy
from shardmath.redistribution import lowered
from shardmath.redistribution.copies import whole
from shardmath.redistribution.device import Box, BoxCopies
from shardmath.symmetric.heap import Buffer

__all__ = [
    "DevicePlan",
    "RankPlan",
    "Results",
    "boxes_of_copy",
    "boxes_of_exchange",
    "make_rank_plan",
]

CHUNKS = True  # whether exchanges run beside transforms, where they can and that pays
GRAPHS = True  # whether what is launched again is one graph

_KEPT = 16  # ways of one plan


class Results(NamedTuple):
    """Whether peers reach the results of all ranks, and find them packed in the problem's order."""

    reachable: bool
    packed: bool


@dataclass(frozen=True)
class DevicePlan:
    """A strategy, and what each rank's GPU does for it."""

    problem: Problem
    strategy: Strategy
    hosts: tuple[int, ...]  # the number of each rank's

    @property
    def apart(self) -> bool:
        """Whether ranks are on several hosts, and so have no address for each other's memory."""
        return len(set(self.hosts)) > 1

    @cached_property
    def delivered(self) -> tuple[Stage, ...]:
        """The stages where ranks are on several hosts."""
        return stages(self.strategy, reachable=False, apart=True)

    @cached_property
    def pushed(self) -> tuple[Stage, ...]:
        """The stages where all results lie in symmetric memory."""
        return stages(self.strategy, reachable=True)

    @cached_property
    def pulled(self) -> tuple[Stage, ...]:
        """The stages where some result does not."""
        return stages(self.strategy, reachable=False)

    @property
    def cuts(self) -> Cuts | None:
        """How exchanges run beside transforms; None where they come one after the other."""
        if not CHUNKS:
            return None
        return cuts_for(self.problem, returns=self.strategy.exchanges > 1, apart=self.apart)

    def explain(self) -> str:
        """The strategy, and its stages."""
        found = self.delivered if self.apart else self.pushed
        lines = [f"stage {i}: {each}" for i, each in enumerate(found, 1)]
        if self.apart:
            lines.append(
                f"{len(set(self.hosts))} hosts: what is delivered is packed by each rank, and taken"
                " by its peers, in place on the same host, by `get` from another"
            )
        if self.cuts is not None:
            lines.append(f"in chunks, where these stages allow it: {self.cuts}")
        return "\n".join([self.strategy.explain(), *lines])

    @cached_property
    def ways(self) -> LRUCache[tuple[Any, ...], RankPlan]:
        """What has been worked out so far, by strides."""
        return LRUCache(_KEPT)

    def way(self, device: Device, rank: int, ends: Ends, results: Results) -> RankPlan:
        """What `make_rank_plan` makes, when first asked for."""
        return self.ways.made(
            (device, rank, ends, results, self.cuts),
            lambda: make_rank_plan(self, device, rank, ends, results),
        )


@dataclass
class RankPlan:
    """What one rank does for certain strides on one device, and its tables there."""

    device: Device
    program: Program | Pipeline
    tables: PushTables | None = None
    streams: set[int] = field(default_factory=set)  # for which cuFFT has plans and a work area
    warm: bool = False  # whether all kernels of a pipeline have been launched before
    copies: dict[tuple[Any, ...], BoxCopies] = field(default_factory=dict)
    kept: list[Buffer] = field(default_factory=list)  # what graphs of the user's write to

    def copier(self, key: tuple[Any, ...], boxes: Callable[[], list[Box]]) -> BoxCopies:
        """The copies of that name, made when first asked for."""
        if key not in self.copies:
            self.copies[key] = BoxCopies(self.device, boxes())
        return self.copies[key]


def make_rank_plan(
    plan: DevicePlan, device: Device, rank: int, ends: Ends, results: Results
) -> RankPlan:
    """What a rank does for these arrays: in chunks, if all ranks can, or one step after another."""
    problem, cuts = plan.problem, plan.cuts
    if plan.apart:
        found = plan.delivered
        program = cuts and far_pipelined(found, problem, rank, ends, cuts, hosts=plan.hosts)
        return RankPlan(device, program or programmed(found, problem, rank, ends, hosts=plan.hosts))
    if cuts is not None:
        found, last = plan.pushed, list[LocalStep]()
        if len(found) == 4 and not results.packed:
            # Through one more landing, of which the result is a copy.
            found = (*found[:3], replace(found[3], target="landing 1"))
            result = ends.result
            landing = packed("landing 1", result.shape, result.dtype, problem.order)
            last += [Copy(landing, result)] if result.size else []
        pipeline = pipelined(found, rank, ends, cuts, order=problem.order, last=last)
        if pipeline is not None:
            return RankPlan(device, pipeline, PushTables(device, pipeline))
    found = plan.pushed if results.reachable else plan.pulled
    return RankPlan(device, programmed(found, problem, rank, ends))


def boxes_of_copy(step: Copy) -> list[Box]:
    """The box that a copy is."""
    source, target = step.source, step.target
    copy = whole(source.shape, source.itemsize, source.strides, target.strides)
    return [Box.of(copy, 0)]


def boxes_of_exchange(step: PeerCopy, rank: int, strides: Sequence[Sequence[int]]) -> list[Box]:
    """The boxes of one rank, those of the next rank first: no two ranks begin with the same."""
    found: list[tuple[int, Box]] = []
    size, itemsize = step.source.size, step.own.itemsize
    if step.pull:
        for move in moves(step.source, step.target, dst_rank=rank):
            copy = lowered(move, itemsize, strides[move.src], step.own.strides)
            found.append(((move.src - rank - 1) % size, Box.of(copy, 0)))
    else:
        for move in moves(step.source, step.target, src_rank=rank):
            copy = lowered(move, itemsize, step.own.strides, strides[move.dst])
            found.append(((move.dst - rank - 1) % size, Box.of(replace(copy, src=0), move.dst)))
    found.sort(key=lambda each: each[0])
    return [box for _, box in found]
