"""A strategy as steps for cores: passes over memory, between two buffers. Pure.

An exchange is fused with the transform that follows. Axes that do not fit together in a block of
the size of a cache are transformed in several passes. Between passes the array is in one of two
buffers, so that peers can pull from one while the other is written. Passes that need nothing from
peers work in place, and the last of these write the result itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardmath.arrays import dtypes
from shardmath.base.immutable import Immutable
from shardmath.geometry import Layout
from shardmath.local.fft import COMPLETING, HALVING, Kind, keeps_shape
from shardmath.operators.fft.problem import Problem
from shardmath.operators.fft.stages import Stage, stages
from shardmath.operators.fft.strategy import Strategy
from shardmath.program import passes
from shardmath.program.steps import (
    READ,
    TAKEN,
    Convert,
    Move,
    Reason,
    SplitArray,
    Step,
    Synchronise,
    Transform,
)
from shardmath.redistribution import TransferPlan

_WRITTEN_AND_READ = Synchronise(
    (Reason.AFTER_WRITING, Reason.BEFORE_READING, Reason.BEFORE_REUSING)
)


def cores_steps(
    strategy: Strategy, problem: Problem
) -> tuple[tuple[Step, ...], dict[str, SplitArray]]:
    """The steps of every rank, and their workspace. `strategy` is for the `widened` problem: an
    operand and a result of half precision are converted before and after.
    """
    passes = _passes(strategy)
    computed = strategy.problem
    workspace: dict[str, SplitArray] = {}
    steps: list[Step] = []
    source, target = "operand", "out"
    if problem.dtype != computed.dtype:
        source = "wide operand"
        workspace[source] = SplitArray(problem.source, computed.dtype, problem.order)
        steps.append(Convert("operand", source))
    wide = dtypes.accumulator(problem.result).name
    narrow = wide != problem.result
    if narrow:
        target = "wide result"
        workspace[target] = SplitArray(problem.target, wide, problem.order)
    memories = _memories(passes)
    read = False  # whether peers may still be reading what this rank wrote
    for number, (one, memory) in enumerate(zip(passes, memories, strict=True)):
        crosses = one.transfer.crosses
        reuses = read and memory not in ("", memories[number - 1])
        if crosses or reuses:
            steps.append(_WRITTEN_AND_READ if reuses else READ)
        read = crosses or (read and not reuses)
        written = target
        if memory:
            written = f"pass {number + 1}"
            workspace[written] = SplitArray(one.result, one.dtype, problem.order, memory=memory)
        steps.append(one.step(computed, source, written))
        source = written
    if read:
        steps.append(TAKEN)
    if narrow:
        steps.append(Convert(target, "out"))
    return tuple(steps), workspace


class _Pass(Immutable):
    """Move an array by `transfer`, and transform `axes` of what arrives.

    `kind` is that of a real transform where the last of `axes` turns from real to hermitian or
    back; `result` and `dtype` are the layout and the type afterwards.
    """

    transfer: TransferPlan
    axes: tuple[int, ...]
    kind: Kind
    result: Layout
    dtype: str

    def step(self, problem: Problem, source: str, target: str) -> Step:
        """The step from buffer `source` to buffer `target`."""
        if not self.axes:
            return Move(self.transfer, source, target)
        forward = problem.direction < 0
        return Transform(self.transfer, self.axes, self.kind, forward, problem.norm, source, target)


def _passes(strategy: Strategy) -> list[_Pass]:
    """The passes that perform a strategy; at least one."""
    problem = strategy.problem
    passes: list[_Pass] = []
    held, dtype = problem.source, problem.dtype

    def transfer(layout: Layout) -> TransferPlan:
        return TransferPlan(held, layout, dtypes.of(dtype).itemsize)

    for stage in stages(strategy):
        if stage.kind is None:
            continue  # an exchange is fused with the transform after it
        layout = stage.layout
        groups = _groups(stage, problem)
        real = dict.fromkeys(HALVING, 0) | dict.fromkeys(COMPLETING, len(groups) - 1)
        turning = real.get(stage.kind)  # the group of the real axis
        for index, group in enumerate(groups):
            kind: Kind = stage.kind if keeps_shape(stage.kind) else "C2C"
            result, result_dtype = layout, dtype
            if index == turning:
                kind, result, result_dtype = stage.kind, stage.result, stage.result_dtype
            passes.append(_Pass(transfer(layout), group, kind, result, result_dtype))
            held, layout, dtype = result, result, result_dtype
    if not held.same_as(problem.target):
        passes.append(_Pass(transfer(problem.target), (), "C2C", problem.target, dtype))
    return passes


def _memories(passes: Sequence[_Pass]) -> list[str]:
    """The buffer that each pass writes, one of two; "" for the result."""
    memories: list[str] = []
    for number, one in enumerate(passes):
        if all(later.transfer.stays and keeps_shape(later.kind) for later in passes[number + 1 :]):
            memories.append("")
        elif number and one.transfer.stays and keeps_shape(one.kind):
            memories.append(memories[-1])
        else:
            memories.append("passes 1" if memories and memories[-1] == "passes 0" else "passes 0")
    return memories


def _groups(stage: Stage, problem: Problem) -> list[tuple[int, ...]]:
    """The axes by passes: a block of all axes of one pass fits in the cache.

    The fastest in memory come first; but a real axis is the first to be halved, and the last to be
    completed. Within a group the real axis is last, as in the transforms of libraries.
    """
    shape = stage.layout.global_shape
    itemsize = max(dtypes.of(name).itemsize for name in (stage.dtype, problem.result))
    ordered = sorted(stage.axes, reverse=problem.order == "C")
    if not keeps_shape(stage.kind or "C2C"):
        ordered.sort(key=lambda axis: axis != stage.axes[-1])
    groups: list[tuple[int, ...]] = []
    held = 0
    for axis in ordered:
        if groups and held * shape[axis] <= 2 * passes.BLOCK_BYTES:  # better than one more pass
            held *= shape[axis]
            groups[-1] = (axis, *groups[-1])
        else:
            held = itemsize * shape[axis]
            groups.append((axis,))
    return groups[::-1] if stage.kind in COMPLETING else groups
