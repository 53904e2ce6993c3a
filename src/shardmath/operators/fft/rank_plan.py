"""What one rank's GPU does for a plan, worked out once for arrays of each kind.

A rank plan holds the steps and their tables on the device, and no operands. Those of the ranks
differ, but all have the same exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from shardmath.base.lru_cache import LRUCache
from shardmath.cuda.device import Device
from shardmath.geometry import moves
from shardmath.operators.fft.chunking import Chunking, chunking_for
from shardmath.operators.fft.local_steps import Copy, LocalStep, packed
from shardmath.operators.fft.multi_host_pipeline import make_multi_host_program
from shardmath.operators.fft.pipeline import Pipeline, make_pipeline
from shardmath.operators.fft.problem import Problem
from shardmath.operators.fft.program import PeerCopy, Program, UserArrays, make_program
from shardmath.operators.fft.push_stream import PushTables
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

USE_CHUNKS = True  # whether exchanges overlap with transforms, where they can and that pays
USE_GRAPHS = True  # whether an execution that comes again is replayed as one graph

_MAX_RANK_PLANS = 16  # of one plan


class Results(NamedTuple):
    """Whether peers reach the results of all ranks, and find them packed in the problem's order."""

    reachable: bool
    packed: bool


@dataclass(frozen=True)
class DevicePlan:
    """A strategy, and what each rank's GPU does for it.

    `hosts` are the numbers of all ranks' hosts.
    """

    problem: Problem
    strategy: Strategy
    hosts: tuple[int, ...]

    @property
    def multi_host(self) -> bool:
        """Whether ranks are on several hosts, and so have no address for each other's memory."""
        return len(set(self.hosts)) > 1

    def stages(self, *, reachable: bool) -> tuple[Stage, ...]:
        """The stages. `reachable`: all results lie in symmetric memory."""
        return stages(self.strategy, reachable=reachable, multi_host=self.multi_host)

    @property
    def chunking(self) -> Chunking | None:
        """How exchanges overlap with transforms; None where they come one after the other."""
        if not USE_CHUNKS:
            return None
        return chunking_for(
            self.problem, two_exchanges=self.strategy.exchanges > 1, multi_host=self.multi_host
        )

    def explain(self) -> str:
        """The strategy, and its stages."""
        found = self.stages(reachable=True)
        lines = [f"stage {i}: {each}" for i, each in enumerate(found, 1)]
        if self.multi_host:
            lines.append(
                f"{len(set(self.hosts))} hosts: what is delivered is packed by each rank, and taken"
                " by its peers, in place on the same host, by `get` from another"
            )
        if self.chunking is not None:
            lines.append(f"in chunks, where these stages allow it: {self.chunking}")
        return "\n".join([self.strategy.explain(), *lines])

    @cached_property
    def rank_plans(self) -> LRUCache[tuple[Any, ...], RankPlan]:
        """The rank plans made so far: see `rank_plan`."""
        return LRUCache(_MAX_RANK_PLANS)

    def rank_plan(
        self, device: Device, rank: int, arrays: UserArrays, results: Results
    ) -> RankPlan:
        """What `make_rank_plan` returns, made when first asked for."""
        return self.rank_plans.made(
            (device, rank, arrays, results, self.chunking),
            lambda: make_rank_plan(self, device, rank, arrays, results),
        )


@dataclass
class RankPlan:
    """What one rank does for certain strides on one device, and its tables there."""

    device: Device
    program: Program | Pipeline
    tables: PushTables | None = None
    streams: set[int] = field(default_factory=set)  # for which cuFFT has plans and a work area
    warmed_up: bool = False  # whether all kernels of a pipeline have been launched before
    copies: dict[tuple[Any, ...], BoxCopies] = field(default_factory=dict)
    graph_buffers: list[Buffer] = field(default_factory=list)  # what the user's graphs write to

    def copier(self, key: tuple[Any, ...], boxes: Callable[[], list[Box]]) -> BoxCopies:
        """The copies of that name, made when first asked for."""
        if key not in self.copies:
            self.copies[key] = BoxCopies(self.device, boxes())
        return self.copies[key]


def make_rank_plan(
    plan: DevicePlan, device: Device, rank: int, arrays: UserArrays, results: Results
) -> RankPlan:
    """What a rank does for these arrays: in chunks if all ranks can, or one step after another."""
    problem, chunking = plan.problem, plan.chunking
    if plan.multi_host:
        found = plan.stages(reachable=False)
        program = chunking and make_multi_host_program(
            found, problem, rank, arrays, chunking, hosts=plan.hosts
        )
        return RankPlan(
            device, program or make_program(found, problem, rank, arrays, hosts=plan.hosts)
        )
    if chunking is not None:
        found, last = plan.stages(reachable=True), list[LocalStep]()
        if len(found) == 4 and not results.packed:
            # Through one more receive buffer, which is then copied to the result.
            found = (*found[:3], replace(found[3], target="receive 1"))
            result = arrays.result
            receive = packed("receive 1", result.shape, result.dtype, problem.order)
            last += [Copy(receive, result)] if result.size else []
        pipeline = make_pipeline(found, rank, arrays, chunking, order=problem.order, last=last)
        if pipeline is not None:
            return RankPlan(device, pipeline, PushTables(device, pipeline))
    found = plan.stages(reachable=results.reachable)
    return RankPlan(device, make_program(found, problem, rank, arrays))


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
