"""A strategy as stages: transforms of whole arrays, and exchanges, from memory to memory. Pure.

    operand --transform--> work --exchange--> receive 0 --transform--> out        a slab, transposed
                                                        --transform--> receive 0 --exchange--> out

Two receive buffers take turns, so that nothing is received into a buffer that is still being sent.
The transforms of a slab may be cut into parts, so that exchanges overlap with them: see `Chunking`.
Stages are the same on every rank; `lowering` turns them into one rank's steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from shardmath.arrays import dtypes
from shardmath.base.immutable import Immutable
from shardmath.geometry import Layout
from shardmath.local.fft import COMPLETING, HALVING, Kind, keeps_shape
from shardmath.local.trigonometric import SERIES
from shardmath.operators.fft.problem import Problem
from shardmath.operators.fft.strategy import Exchange, Strategy, Transform
from shardmath.redistribution import TransferPlan


class Stage(Immutable):
    """One step of the strategy, into memory `target`.

    The array has `layout` and `dtype` before it, `result` and `result_dtype` after it. `kind` is
    None for an exchange, which `transfer` does. A transform's output is multiplied by `factor`.
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
    """The kind of one step of the transform, and the type of its result."""
    if problem.kind in HALVING and dtype == problem.dtype:
        return problem.kind, problem.result
    if problem.kind in COMPLETING and problem.axes[-1] in step.axes:
        return problem.kind, problem.result
    if problem.kind in SERIES:
        return problem.kind, problem.result
    return "C2C", dtype


def _axes(axes: Sequence[int], real: int) -> tuple[int, ...]:
    """The axes in order, the real one last, as in NumPy's functions."""
    return (*(a for a in sorted(axes) if a != real), *([real] if real in axes else []))


def _factor(problem: Problem, axes: Sequence[int], *, first: bool) -> float:
    """The factor of a transform along some of the axes, the first one or a later one.

    The first one scales for all: its output is still in the cache, and an exchange may go on
    meanwhile. But float16 is scaled by each transform: unscaled sums may be too large for it.
    """
    if "complex32" not in (problem.dtype, problem.result):
        axes = problem.axes if first else ()
    shape = (problem.target if problem.kind in COMPLETING else problem.source).global_shape
    series = SERIES.get(problem.kind)
    count = math.prod(series.period(shape[axis]) if series else shape[axis] for axis in axes)
    whole = "forward" if problem.direction < 0 else "backward"
    return {"ortho": 1 / math.sqrt(count), whole: 1 / count}.get(problem.norm or "", 1.0)


# -- in parts --------------------------------------------------------------------------------------


class Chunking(Immutable):
    """The weights of the parts of the `first` transform, and the number of parts of the `second`.

    The first transform is cut along the axis along which the operand is split, the second along the
    axis along which the array is split after the exchange. Most parts of the first are sent whole.
    The last ones, the `tail`, are sent in as many parts as the second transform has, so that it can
    begin with the first of them.

        transforms   0 | 1 | 2 | 3 |                 a | b | c | d      numbers: the first axis
        links            0   | 1   | 2   | 3a 3b 3c 3d                  letters: the second
    """

    first: tuple[int, ...]
    second: int
    tail: int = 1


_BySize = tuple[tuple[int, Chunking], ...]

# By the least bytes of a rank's result: see docs/notebook/chunked-exchanges.md. Of many parts the
# first are smaller, so that the links begin early, and are busy during the next transforms.
_ONE_EXCHANGE: _BySize = (
    (6 << 30, Chunking((2, 3, *[4] * 14), 8, 4)),
    (2 << 30, Chunking((2, 3, *[4] * 6), 8, 3)),
    (1 << 30, Chunking((1, 2, 3, *[4] * 5), 8, 3)),
    (512 << 20, Chunking((1, 2, 3, *[4] * 5), 4, 3)),
    (256 << 20, Chunking((1, 2, 3, *[4] * 4), 4, 2)),
    (96 << 20, Chunking((1, 2, 3, *[4] * 4), 2, 2)),
    (24 << 20, Chunking((1, 1, 1, 1), 1)),
    (12 << 20, Chunking((1, 1), 1)),
)
_TWO_EXCHANGES: _BySize = (
    (6 << 30, Chunking((2, 3, *[4] * 14), 8, 4)),
    (1 << 30, Chunking((2, 3, *[4] * 6), 8, 3)),
    (256 << 20, Chunking((2, 3, *[4] * 6), 4, 3)),
    (96 << 20, Chunking((2, 3, *[4] * 6), 4, 2)),
    (48 << 20, Chunking((1, 1, 1, 1), 2)),
    (12 << 20, Chunking((1, 1), 2)),
)
# Each part costs a barrier of its own.
_MULTI_HOST: _BySize = ((64 << 20, Chunking((1, 1, 1), 2)),)


def chunking_for(
    problem: Problem, *, two_exchanges: bool, multi_host: bool = False
) -> Chunking | None:
    """The chunking for arrays of that size; None where they are too small for parts to pay.

    `two_exchanges`: another exchange follows the second transform.
    """
    size = problem.source.size
    nbytes = problem.target.elements * dtypes.of(problem.result).itemsize // size
    if size == 1:
        return None
    table = _MULTI_HOST if multi_host else _TWO_EXCHANGES if two_exchanges else _ONE_EXCHANGE
    return next((chunking for least, chunking in table if nbytes >= least), None)


def split_axes(stages: Sequence[Stage]) -> tuple[int, ...] | None:
    """The axes along which the array is split before, between and after the exchanges.

    None for stages that cannot be cut. Those of slabs can be: a transform, an exchange, a transform
    and perhaps another exchange.
    """
    if len(stages) not in (3, 4) or [stage.kind is None for stage in stages[:3]] != [0, 1, 0]:
        return None
    if len(stages) == 4 and (
        stages[3].kind is not None or not keeps_shape(stages[2].kind or "C2C")
    ):
        return None
    layouts = [stages[1].layout, stages[1].result]
    if len(stages) == 4:
        layouts.append(stages[3].result)
    axes = [_split_axis(layout) for layout in layouts]
    known = tuple(axis for axis in axes if axis is not None)
    if len(known) < len(axes) or any(x == y for x, y in itertools.pairwise(known)):
        return None
    if _split_axis(stages[0].layout) != known[0] or _split_axis(stages[2].result) != known[1]:
        return None
    return known


def _split_axis(layout: Layout) -> int | None:
    """The axis along which a slab is split, into a range for each rank; None for other layouts."""
    axes = layout.partitioned_axes
    if len(axes) != 1 or not layout.disjoint():
        return None
    ranges = [layout.spans(rank)[axes[0]] for rank in range(layout.size)]
    return axes[0] if all(spans.count <= 1 for spans in ranges) else None


def first_parts(extent: int, weights: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges of these weights that cover range(extent): fewer, and equal ones, where there are too
    few indices for them. None is empty, unless it is the only one.
    """
    if extent >= 2 * sum(weights):
        return weighted_ranges(extent, weights)
    return weighted_ranges(extent, [1] * max(1, min(extent // 2, len(weights))))


def weighted_ranges(extent: int, weights: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges that cover range(extent) in proportion to the weights; some may be empty.

    Their bounds are even where there are many indices.
    """
    grain = 2 if extent >= 2 * len(weights) else 1
    total = sum(weights) * grain
    before = itertools.accumulate(weights[:-1], initial=0)
    ends = [extent * weight // total * grain for weight in before] + [extent]
    return list(itertools.pairwise(ends))
