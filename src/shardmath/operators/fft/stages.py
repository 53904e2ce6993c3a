"""A strategy as work for GPUs: transforms of whole arrays, and exchanges, from memory to memory.

    operand --transform--> work --exchange--> receive 0 --transform--> out        a slab, transposed
                                                        --transform--> receive 0 --exchange--> out

Two receive buffers take turns, so that what is received is not what is still sent. Pure, like the
strategy, and the same on every rank; `lowering` has what each of them does for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardmath.arrays import dtypes
from shardmath.base.immutable import Immutable
from shardmath.geometry import Layout
from shardmath.local.fft import Kind, keeps_shape
from shardmath.operators.fft.problem import Problem
from shardmath.operators.fft.strategy import Exchange, Strategy, Transform
from shardmath.redistribution import TransferPlan


class Stage(Immutable):
    """One step of the strategy, into memory `target`.

    Before it, the array has `layout` and `dtype`, after it `result` and `result_dtype`. `kind` is
    None for an exchange, which is done by `transfer`. A transform's output is multiplied by
    `factor`.
    """

    kind: Kind | None
    axes: tuple[int, ...]
    layout: Layout
    result: Layout
    dtype: str
    result_dtype: str
    target: str
    factor: float = 1.0
    transfer: TransferPlan | None = None


def stages(strategy: Strategy) -> tuple[Stage, ...]:
    """The stages of a strategy."""
    problem = strategy.problem
    sequence: list[Stage] = []
    memory, dtype, received = "operand", problem.dtype, 0
    for number, step in enumerate(strategy.steps, 1):
        last = number == len(strategy.steps)
        if isinstance(step, Exchange):
            memory = "out" if last else f"receive {received % 2}"
            received += 1
            transfer = TransferPlan(step.src, step.dst, dtypes.of(dtype).itemsize)
            exchange = Stage(None, (), step.src, step.dst, dtype, dtype, memory, transfer=transfer)
            sequence.append(exchange)
            continue
        kind, result_dtype = _kind(problem, step, dtype)
        if last:
            memory = "out"
        elif memory == "operand" or not keeps_shape(kind):
            memory = "work 1" if memory == "work" else "work"
        axes = _axes(step.axes, problem.axes[-1])
        factor = _factor(problem, axes, first=all(stage.kind is None for stage in sequence))
        types = dtype, result_dtype
        sequence.append(Stage(kind, axes, step.layout, step.result, *types, memory, factor))
        dtype = result_dtype
    return tuple(sequence)


def _kind(problem: Problem, step: Transform, dtype: str) -> tuple[Kind, str]:
    """The kind of one step of the transform, and the type that it makes."""
    if problem.kind == "R2C" and dtype == problem.dtype:
        return "R2C", problem.result
    if problem.kind == "C2R" and problem.axes[-1] in step.axes:
        return "C2R", problem.result
    return (problem.kind if keeps_shape(problem.kind) else "C2C"), dtype


def _axes(axes: Sequence[int], real: int) -> tuple[int, ...]:
    """The real axis last, as in NumPy's functions."""
    return (*(a for a in sorted(axes) if a != real), *([real] if real in axes else []))


def _factor(problem: Problem, axes: Sequence[int], *, first: bool) -> float:
    """The factor of a transform along some of the axes, the first one or a later one.

    The first does it for all: its output is still in the cache, and an exchange that follows goes
    on meanwhile. But float16 is scaled by each: unscaled sums may be too large for it.
    """
    if "complex32" not in (problem.dtype, problem.result):
        axes = problem.axes if first else ()
    shape = (problem.target if problem.kind == "C2R" else problem.source).global_shape
    count = math.prod(shape[axis] for axis in axes)
    whole = "forward" if problem.direction < 0 else "backward"
    return {"ortho": 1 / math.sqrt(count), whole: 1 / count}.get(problem.norm or "", 1.0)
