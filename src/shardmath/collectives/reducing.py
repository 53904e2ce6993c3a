"""Collectives that combine elements: reduce_scatter and all_reduce.

One exchange agrees on the call and tells where operands can be read. A short operand is read and
folded whole by every rank: one shot. A long one is folded in parts: each rank folds its part of
all operands and hands the result to the others, two shots; see `twoshot`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardmath.agreement import require_equal
from shardmath.collectives import twoshot
from shardmath.collectives.offers import Offer, offer, read_offers, wait_for_readers
from shardmath.collectives.operand import (
    Operand,
    Output,
    Shape,
    as_axis,
    as_counts,
    column_view,
    context_of,
    output_spec,
    require_outputs_fit,
    slab_counts,
    span_of_columns,
)
from shardmath.collectives.reduction import Reduction, fold
from shardmath.context import Context
from shardmath.distributed_context import DistributedContext
from shardmath.planning import agree_plan

if TYPE_CHECKING:
    from shardmath.collectives.on_device import DeviceOperand

__all__ = ["all_reduce", "reduce_scatter"]

# One shot reads every operand on every rank, and takes one exchange; two shots read each operand
# once, and take a barrier more. Measured on 2 cores with 4 ranks: they meet between 1 and 2 MB.
_ONE_SHOT_BYTES = 1 << 20  # of one operand: what `offers` stages at most
_ONE_SHOT_TOTAL_BYTES = 4 << 20  # of all ranks' operands


def all_reduce(
    x: Any, *, op: str = "sum", out: Any = None, context: DistributedContext | None = None
) -> Any:
    """The elements of all ranks combined, on every rank, with the same bits. Collective.

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
    context = context_of(context)
    if context.team is not None:
        return _all_reduce_on_device(context, x, op, out)
    own: list[tuple[Operand, Offer | twoshot.Parts]] = []

    def describe() -> tuple[Any, bytes]:
        operand = Operand.of(x, context)
        spec = operand.spec
        reduction = Reduction.of(op, spec.dtype)
        into, view = output_spec(out, context)
        made: Offer | twoshot.Parts
        if _in_one_shot(spec.nbytes, context.size):
            made = offer(context, operand.flat, None)
        else:
            operand = operand if twoshot.aligned(view, operand) else operand.apart(view)
            made = twoshot.publish(context, operand, out, reduction)
        own.append((operand, made))
        return (spec.library, spec.dtype, spec.shape, reduction.op, into), made.note

    plan, notes = agree_plan(context, "all_reduce", describe, _plan_all_reduce)
    ((operand, made),) = own
    with context.executing("all_reduce"):
        result = Output.of(out, operand.library, operand.spec.shape, plan.reduction.result)
        if isinstance(made, Offer):
            sizes = [operand.flat.size] * context.size
            found = read_offers(context, notes, sizes, operand.flat, operand.flat.dtype)
            fold(plan.reduction, [part[None] for part in found], [result.flat[None]])
        else:
            twoshot.combine(
                context, plan.reduction, operand.flat, result.flat, made=made, notes=notes
            )
        return result.finish()


def _in_one_shot(nbytes: int, size: int) -> bool:
    return size == 1 or (nbytes <= _ONE_SHOT_BYTES and nbytes * size <= _ONE_SHOT_TOTAL_BYTES)


@dataclass(frozen=True)
class _AllReduce:
    reduction: Reduction
    new: bool  # no rank has given an array for the result


def _plan_all_reduce(specs: list[Any]) -> _AllReduce:
    libraries, dtypes, shapes, ops, outs = zip(*specs, strict=True)
    reduction = _require_one_reduction(libraries, dtypes, shapes, ops)
    require_outputs_fit(outs, libraries, reduction.result, shapes)
    return _AllReduce(reduction, not any(outs))


def reduce_scatter(
    x: Any,
    *,
    op: str = "sum",
    axis: int = 0,
    counts: Sequence[int] | None = None,
    out: Any = None,
    context: DistributedContext | None = None,
) -> Any:
    """The own part, along `axis`, of the elements of all ranks combined. Collective.

    `x` has the same shape, dtype and library on all ranks; `op` and the dtype of the result are as
    in `all_reduce`. Rank r receives `counts[r]` indices of the axis; without `counts`, it is
    divided as evenly as possible, the first ranks having one more. Returns `out` where it is given,
    else a new C-ordered array.

    Raises on all ranks: CollectiveMismatch when shape, dtype, library, op, axis or counts differ;
    ValueError for counts that do not add up, an axis that `x` does not have, and where `all_reduce`
    does.
    """
    context = context_of(context)
    if context.team is not None:
        return _reduce_scatter_on_device(context, x, op, axis, counts, out)
    own: list[tuple[Operand, Offer]] = []

    def describe() -> tuple[Any, bytes]:
        operand = Operand.of(x, context)
        spec = operand.spec
        reduction = Reduction.of(op, spec.dtype)
        at = as_axis(axis, spec.ndim)
        extent = spec.shape[at]
        given = as_counts("counts", counts, context.size, extent)
        into, view = output_spec(out, context)
        operand = operand.apart(view)
        made = offer(context, operand.flat, operand.location)
        own.append((operand, made))
        parts = slab_counts(extent, context.size) if given is None else given
        return (spec.library, spec.dtype, spec.shape, reduction.op, into, at, parts), made.note

    plan, notes = agree_plan(context, "reduce_scatter", describe, _plan_reduce_scatter)
    ((operand, _kept),) = own
    with context.executing("reduce_scatter"):
        shape = plan.results[context.rank]
        result = Output.of(out, operand.library, shape, plan.reduction.result)
        sizes = [operand.flat.size] * context.size
        first, count = sum(plan.counts[: context.rank]), plan.counts[context.rank]
        span = span_of_columns(operand.spec.shape, plan.axis, first, count)
        spans = [span] * context.size
        found = read_offers(context, notes, sizes, operand.flat, operand.flat.dtype, spans)
        into, width = column_view(result.flat, shape, plan.axis)
        start = first * width
        end = start + count * width
        parts = [
            column_view(each, operand.spec.shape, plan.axis)[0][:, start:end] for each in found
        ]
        fold(plan.reduction, parts, [into])
        wait_for_readers(context, notes)
        return result.finish()


@dataclass(frozen=True)
class _ReduceScatter:
    reduction: Reduction
    axis: int
    counts: Shape
    results: tuple[Shape, ...]


def _plan_reduce_scatter(specs: list[Any]) -> _ReduceScatter:
    libraries, dtypes, shapes, ops, outs, axes, parts = zip(*specs, strict=True)
    reduction = _require_one_reduction(libraries, dtypes, shapes, ops)
    axis = require_equal("axis", axes)
    counts = require_equal("counts", parts)
    shape = shapes[0]
    results = tuple((*shape[:axis], count, *shape[axis + 1 :]) for count in counts)
    require_outputs_fit(outs, libraries, reduction.result, results)
    return _ReduceScatter(reduction, axis, counts, results)


def _require_one_reduction(
    libraries: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Shape], ops: Sequence[str]
) -> Reduction:
    require_equal("the library of x", libraries)
    dtype = require_equal("the dtype of x", dtypes)
    require_equal("the shape of x", shapes)
    return Reduction.of(require_equal("op", ops), dtype)


def _all_reduce_on_device(context: Context, x: Any, op: str, out: Any) -> Any:
    from shardmath.collectives.calls import perform_on_device

    def describe(operand: DeviceOperand) -> Hashable:
        spec = operand.spec
        reduction = Reduction.of(op, spec.dtype)
        return operand.kind, spec.dtype, spec.shape, reduction.op, operand.into

    return perform_on_device(
        context,
        "all_reduce",
        (op,),
        x,
        out,
        describe=describe,
        build=_plan_all_reduce,
        perform=lambda operand, plan: operand.all_reduce(plan.reduction, new=plan.new),
    )


def _reduce_scatter_on_device(
    context: Context, x: Any, op: str, axis: int, counts: Sequence[int] | None, out: Any
) -> Any:
    from shardmath.collectives.calls import perform_on_device

    def describe(operand: DeviceOperand) -> Hashable:
        spec = operand.spec
        reduction = Reduction.of(op, spec.dtype)
        at = as_axis(axis, spec.ndim)
        given = as_counts("counts", counts, context.size, spec.shape[at])
        parts = slab_counts(spec.shape[at], context.size) if given is None else given
        return operand.kind, spec.dtype, spec.shape, reduction.op, operand.into, at, parts

    def perform(operand: DeviceOperand, plan: _ReduceScatter) -> Any:
        shape = plan.results[context.rank]
        return operand.reduce_scatter(plan.reduction, plan.axis, plan.counts, shape)

    return perform_on_device(
        context,
        "reduce_scatter",
        (op, axis, counts),
        x,
        out,
        describe=describe,
        build=_plan_reduce_scatter,
        perform=perform,
    )
