"""A strategy as work for GPUs: transforms of whole arrays, and exchanges, from buffer to buffer.

Ranks push into each other's receive buffers, two in turn, or into the results where peers reach all
of them; otherwise the last exchange is pulled. Pure, like the strategy, and the same on every rank;
`lowering` has what each of them does for it.

    operand --transform--> work --push--> receive 0 --transform--> out      a slab, transposed
                                                    --transform--> receive 0 --push--> out

On several hosts no rank writes to another's memory: arrays are delivered, by way of outboxes, to
receive buffers, and to results in any memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shardmath.geometry import Layout
from shardmath.local.fft import Kind
from shardmath.operators.fft.problem import Problem
from shardmath.operators.fft.strategy import Exchange, Strategy, Transform

__all__ = ["Stage", "stages"]

Mode = Literal["push", "pull", "deliver"]


@dataclass(frozen=True)
class Stage:
    """One step of the strategy: the array goes from buffer `source` to buffer `target`.

    Before it, the array has `layout` and `dtype`, after it `result` and `result_dtype`. `kind` is
    None for an exchange, which is a push, a pull or a delivery, by `mode`. A transform's output is
    multiplied by `factor`.
    """

    kind: Kind | None
    axes: tuple[int, ...]
    layout: Layout
    result: Layout
    dtype: str
    result_dtype: str
    source: str
    target: str
    mode: Mode = "push"
    factor: float = 1.0

    def __str__(self) -> str:
        if self.kind is None:
            return f"{self.mode} {self.source} -> {self.target}: {self.layout} -> {self.result}"
        return f"{self.kind} along {self.axes}, {self.source} -> {self.target}: {self.result}"


def stages(strategy: Strategy, *, reachable: bool, multi_host: bool = False) -> tuple[Stage, ...]:
    """The stages. `reachable`: all ranks' results lie in symmetric memory. `multi_host`: some ranks
    have no address for others' memory, symmetric or not.
    """
    problem, steps = strategy.problem, strategy.steps
    found: list[Stage] = []
    buffer, dtype, received = "operand", problem.dtype, 0
    for number, step in enumerate(steps):
        last = number == len(steps) - 1
        if isinstance(step, Exchange):
            target = "out" if last else f"receive {received % 2}"
            received += not last
            mode: Mode = "deliver" if multi_host else "pull" if last and not reachable else "push"
            found.append(Stage(None, (), step.src, step.dst, dtype, dtype, buffer, target, mode))
        else:
            kind, made = _kind(problem, step, dtype)
            if last:
                target = "out"
            elif buffer == "operand" or kind != "C2C":
                target = "work 1" if buffer == "work" else "work"
            else:
                target = buffer
            axes = _axes(step.axes, problem.axes[-1])
            factor = _factor(problem, axes, first=all(each.kind is None for each in found))
            layouts = step.layout, step.result
            found.append(Stage(kind, axes, *layouts, dtype, made, buffer, target, factor=factor))
            dtype = made
        buffer = target
    return tuple(found)


def _kind(problem: Problem, step: Transform, dtype: str) -> tuple[Kind, str]:
    """The kind of one step of the transform, and the type that it makes."""
    if problem.kind == "R2C" and dtype == problem.dtype:
        return "R2C", problem.result
    if problem.kind == "C2R" and problem.axes[-1] in step.axes:
        return "C2R", problem.result
    return "C2C", dtype


def _axes(axes: Sequence[int], real: int) -> tuple[int, ...]:
    """The real axis last, as in NumPy's functions."""
    return (*(a for a in sorted(axes) if a != real), *([real] if real in axes else []))


def _factor(problem: Problem, axes: Sequence[int], *, first: bool) -> float:
    """What a transform along some of the axes is multiplied by, the first one or a later one.

    The first does it for all: its output is still in the cache, and an exchange that follows goes
    on meanwhile. But float16 is scaled by each: unscaled sums may be too large for it.
    """
    if "complex32" not in (problem.dtype, problem.result):
        axes = problem.axes if first else ()
    shape = (problem.target if problem.kind == "C2R" else problem.source).global_shape
    count = math.prod(shape[axis] for axis in axes)
    whole = "forward" if problem.direction < 0 else "backward"
    return {"ortho": 1 / math.sqrt(count), whole: 1 / count}.get(problem.norm or "", 1.0)
