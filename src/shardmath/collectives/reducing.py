"""Collectives that combine elements: reduce_scatter and all_reduce.

Each is one step that combines what all ranks have; see `program.two_shots` for long arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, overload

from shardmath.arrays import Array
from shardmath.arrays.spec import ArraySpec
from shardmath.base.collective_call import collective_call, differentiable
from shardmath.base.immutable import Immutable
from shardmath.collectives.dispatch import Collective, in_background, perform
from shardmath.collectives.forms import Form, OnGPUs, OwnCount
from shardmath.collectives.operand import (
    Shape,
    as_axis,
    as_counts,
    bounds,
    context_of,
    hashable,
    require_outputs_fit,
    slab_counts,
)
from shardmath.context.agreement import require_equal
from shardmath.context.context import DistributedContext, require_context
from shardmath.geometry import Layout, Spans
from shardmath.local.reduction import Reduction
from shardmath.program.steps import READ, REUSE, Combine, LocalArray, Program

if TYPE_CHECKING:
    from shardmath.collectives.background import Work
    from shardmath.collectives.gpu_operand import DeviceOperand


@overload
def all_reduce(
    x: Array,
    *,
    op: str = "sum",
    out: Any = None,
    context: DistributedContext | None = None,
    async_op: Literal[False] = False,
) -> Array: ...


@overload
def all_reduce(
    x: Array,
    *,
    op: str = "sum",
    out: Any = None,
    context: DistributedContext | None = None,
    async_op: Literal[True],
) -> Work[Array]: ...


@differentiable
def all_reduce(
    x: Any,
    *,
    op: str = "sum",
    out: Any = None,
    context: DistributedContext | None = None,
    async_op: bool = False,
) -> Any:
    """The elements of all ranks combined, on every rank, with the same bits. Collective.

        norm = all_reduce((x * x).sum()) ** 0.5

    `x` has the same shape, dtype and library on all ranks. `op` is "sum", "min", "max", "product"
    or "mean": ranks are combined in their order, as by numpy.add, minimum, maximum, multiply (so
    NaN wins, integers wrap, and bool is combined by "or" and "and"); float16, bfloat16 and float8
    are combined in float32 and rounded once. The result has the dtype of `x`, but the mean of
    integers and of bool is float64. Returns `out` where it is given (it may be `x`), else a new
    C-ordered array.

    Raises on all ranks: CollectiveMismatch when shape, dtype, library or op differ; ValueError for
    an unknown op, for the min and max of complex numbers, and for an `out` of another shape, dtype
    or library, or read-only.
    """
    if async_op:
        return in_background(all_reduce, context, x, op=op, out=out)
    context = context_of("all_reduce", context)
    if context.repeats is not None:
        result = context.repeats.make(("all_reduce", op), x, out)
        if result is not None:
            return result
    return perform(context, ALL_REDUCE, (op,), x, out)


class _Combined(Immutable, words="{reduction.op} of {reduction.dtype}, {needed}"):
    """A collective on which all ranks have agreed: their arrays are combined, and each rank gets
    its part of `needed`: all, or `counts` indices of the axis.

    With `new`, no rank has given an array for the result.
    """

    reduction: Reduction
    needed: Layout
    new: bool
    axis: int = 0
    counts: Shape = ()


def _steps(plan: _Combined, rank: int) -> Program:
    needed = plan.needed
    held = Layout.replicated(needed.global_shape, needed.size)
    combine = Combine(held, needed, "x", "out", reduction=plan.reduction)
    result = LocalArray(needed.local_shape(rank), plan.reduction.result)
    return Program((READ, combine, REUSE), results={"out": result})


def _plan_all_reduce(specs: list[Any]) -> _Combined:
    libraries, dtypes, shapes, outs, ops = zip(*specs, strict=True)
    reduction = _require_one_reduction(libraries, dtypes, shapes, ops)
    require_outputs_fit(outs, libraries, reduction.result, shapes)
    return _Combined(reduction, Layout.replicated(shapes[0], len(specs)), not any(outs))


def _result_of_all_reduce(operand: DeviceOperand, plan: _Combined) -> tuple[str, Shape] | None:
    if operand.is_pushed(plan.reduction):
        return None
    return plan.reduction.result, operand.spec.shape


ALL_REDUCE = Collective(
    "all_reduce",
    lambda spec, size, op: (Reduction.of(op, spec.dtype).op,),
    _plan_all_reduce,
    _steps,
    OnGPUs(
        Form(),
        lambda operand, plan: operand.all_reduce(plan.reduction, new=plan.new),
        _result_of_all_reduce,
    ),
)


@overload
def reduce_scatter(
    x: Array,
    *,
    op: str = "sum",
    axis: int = 0,
    counts: Sequence[int] | None = None,
    out: Any = None,
    context: DistributedContext | None = None,
    async_op: Literal[False] = False,
) -> Array: ...


@overload
def reduce_scatter(
    x: Array,
    *,
    op: str = "sum",
    axis: int = 0,
    counts: Sequence[int] | None = None,
    out: Any = None,
    context: DistributedContext | None = None,
    async_op: Literal[True],
) -> Work[Array]: ...


@differentiable
def reduce_scatter(
    x: Any,
    *,
    op: str = "sum",
    axis: int = 0,
    counts: Sequence[int] | None = None,
    out: Any = None,
    context: DistributedContext | None = None,
    async_op: bool = False,
) -> Any:
    """This rank's part, along `axis`, of the elements of all ranks combined. Collective.

        rows = reduce_scatter(gradient, op="mean")

    `x` has the same shape, dtype and library on all ranks; `op` and the dtype of the result are as
    in `all_reduce`. Rank r receives `counts[r]` indices of the axis; without `counts`, it is
    divided as evenly as possible, the first ranks having one more. Returns `out` where it is given,
    else a new C-ordered array.

    Raises on all ranks: CollectiveMismatch when shape, dtype, library, op, axis or counts differ;
    ValueError for counts that do not add up, an axis that `x` does not have, and where `all_reduce`
    does.
    """
    if async_op:
        return in_background(reduce_scatter, context, x, op=op, axis=axis, counts=counts, out=out)
    context = context_of("reduce_scatter", context)
    words = op, axis, None if counts is None else hashable(counts)
    if context.repeats is not None and counts is None and type(axis) is int:
        result = context.repeats.make(("reduce_scatter", op, axis, None), x, out)
        if result is not None:
            return result
    return perform(context, REDUCE_SCATTER, words, x, out)


def _arguments_of_reduce_scatter(
    spec: ArraySpec, size: int, op: Any, axis: Any, counts: Any
) -> tuple[Hashable, ...]:
    reduction, along = Reduction.of(op, spec.dtype), as_axis(axis, spec.ndim)
    extent = spec.shape[along]
    given = as_counts("counts", counts, size, extent)
    return reduction.op, along, slab_counts(extent, size) if given is None else given


def _plan_reduce_scatter(specs: list[Any]) -> _Combined:
    return _scattered(specs, lambda parts: require_equal("counts", parts))


def _scattered(specs: list[Any], counts_of: Callable[[Sequence[Any]], Shape]) -> _Combined:
    """The plan, where `counts_of` makes all ranks' counts of the last words of the specs."""
    libraries, dtypes, shapes, outs, ops, axes, parts = zip(*specs, strict=True)
    reduction = _require_one_reduction(libraries, dtypes, shapes, ops)
    axis, counts = require_equal("axis", axes), counts_of(parts)
    if sum(counts) != shapes[0][axis]:
        raise ValueError(f"the ranks receive {list(counts)} indices of {shapes[0][axis]}")
    columns: list[list[Spans] | None] = [None] * len(shapes[0])
    columns[axis] = [Spans.interval(*ends) for ends in pairwise(bounds(counts))]
    needed = Layout.product(shapes[0], columns, size=len(shapes))
    results = [needed.local_shape(rank) for rank in range(len(shapes))]
    require_outputs_fit(outs, libraries, reduction.result, results)
    return _Combined(reduction, needed, not any(outs), axis, counts)


def _part_of(operand: DeviceOperand, plan: _Combined) -> Shape:
    """The shape of this rank's result."""
    return plan.needed.local_shape(operand.context.rank)


def _scatter_on_gpus(operand: DeviceOperand, plan: _Combined) -> Any:
    shape = _part_of(operand, plan)
    return operand.reduce_scatter(plan.reduction, plan.axis, plan.counts, shape)


REDUCE_SCATTER = Collective(
    "reduce_scatter",
    _arguments_of_reduce_scatter,
    _plan_reduce_scatter,
    _steps,
    OnGPUs(
        Form(),
        _scatter_on_gpus,
        lambda operand, plan: (plan.reduction.result, _part_of(operand, plan)),
    ),
)


@collective_call
def reduce_scatter_by_own(x: Any, *, op: str, axis: int, own: int) -> Any:
    """As `reduce_scatter`, where each rank knows only how many indices it receives itself: `own`.

    The gradient of an all_gather is one: what the peers have brought travels in its agreement.
    """
    return perform(require_context(), REDUCE_SCATTER_BY_OWN, (op, axis, own), x, None)


REDUCE_SCATTER_BY_OWN = Collective(
    "reduce_scatter by own counts",
    lambda spec, size, op, axis, own: (
        Reduction.of(op, spec.dtype).op,
        as_axis(axis, spec.ndim),
        own,
    ),
    lambda specs: _scattered(specs, tuple),
    _steps,
    OnGPUs(OwnCount(), _scatter_on_gpus),
)


def _require_one_reduction(
    libraries: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Shape], ops: Sequence[str]
) -> Reduction:
    require_equal("the library of x", libraries)
    dtype = require_equal("the dtype of x", dtypes)
    require_equal("the shape of x", shapes)
    return Reduction.of(require_equal("op", ops), dtype)
