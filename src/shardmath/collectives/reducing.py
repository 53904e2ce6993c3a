"""Collectives that combine elements: reduce_scatter and all_reduce.

One exchange agrees on the call and tells where operands can be read. A short operand is
reduced whole by every rank: one shot. A long one is reduced in parts: each rank reduces its part of
all operands, and the others get the result from it, two shots; see `twoshot`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardmath.arrays.base import HostArray
from shardmath.arrays.spec import ArraySpec
from shardmath.base.collective_call import collective_call
from shardmath.collectives import twoshot
from shardmath.collectives.dispatch import (
    AgreedCall,
    Collective,
    Offered,
    perform,
    perform_on_cores,
)
from shardmath.collectives.forms import Alike
from shardmath.collectives.offers import offer
from shardmath.collectives.operand import (
    Operand,
    Shape,
    as_axis,
    as_counts,
    column_view,
    context_of,
    require_outputs_fit,
    slab_counts,
    span_of_columns,
)
from shardmath.collectives.reduction import Reduction, reduce_local
from shardmath.context.agreement import require_equal
from shardmath.context.context import Context
from shardmath.context.distributed_context import DistributedContext
from shardmath.program.performing import Turn

if TYPE_CHECKING:
    from shardmath.collectives.device_operand import DeviceOperand

__all__ = ["all_reduce", "reduce_scatter"]

# One shot reads every operand on every rank, and takes one exchange; two shots read each operand
# once, and take a barrier more. Measured on 2 cores with 4 ranks: they meet between 1 and 2 MB.
_ONE_SHOT_BYTES = 1 << 20  # of one operand: what `offers` stages at most
_ONE_SHOT_TOTAL_BYTES = 4 << 20  # of all ranks' operands
_ALIKE = Alike()  # how reductions run ahead on GPUs


@collective_call
def all_reduce(
    x: Any, *, op: str = "sum", out: Any = None, context: DistributedContext | None = None
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
    context = context_of("all_reduce", context)
    if context.team is None:
        return perform_on_cores(context, _ALL_REDUCE, (op,), x, out)
    if context.repeats is not None:
        found = context.repeats.make(("all_reduce", op), x, out)
        if found is not None:
            return found

    def on_device(operand: DeviceOperand, plan: _AllReduce) -> Any:
        return operand.all_reduce(plan.reduction, new=plan.new)

    return perform(context, _ALL_REDUCE, (op,), x, out, on_device, _ALIKE, _result_of_all_reduce)


def _offer_to_reduce(
    context: Context, operand: Operand, turn: Turn, target: HostArray | None
) -> Offered:
    if _in_one_shot(operand.spec.nbytes, context.size):
        return operand, offer(context, operand.flat, None)
    operand = operand if twoshot.is_in_place(target, operand) else operand.without_alias(target)
    reduction = Reduction.of(turn.arguments.words[1], operand.spec.dtype)
    return operand, twoshot.publish(context, operand, turn.arguments.results[0], reduction)


def _result_of_all_reduce(operand: DeviceOperand, plan: _AllReduce) -> tuple[str, Shape] | None:
    if operand.is_pushed(plan.reduction):
        return None
    return plan.reduction.result, operand.spec.shape


def _in_one_shot(nbytes: int, size: int) -> bool:
    return size == 1 or (nbytes <= _ONE_SHOT_BYTES and nbytes * size <= _ONE_SHOT_TOTAL_BYTES)


@dataclass(frozen=True)
class _AllReduce:
    reduction: Reduction
    new: bool  # no rank has given an array for the result


def _plan_all_reduce(specs: list[Any]) -> _AllReduce:
    libraries, dtypes, shapes, outs, ops = zip(*specs, strict=True)
    reduction = _require_one_reduction(libraries, dtypes, shapes, ops)
    require_outputs_fit(outs, libraries, reduction.result, shapes)
    return _AllReduce(reduction, not any(outs))


def _all_reduce(agreed: AgreedCall, plan: _AllReduce) -> Any:
    context, operand, reduction = agreed.context, agreed.operand, plan.reduction
    assert operand is not None, "required"
    result = agreed.result(operand.library, operand.spec.shape, reduction.result)
    if isinstance(agreed.offered, twoshot.Staged):
        twoshot.all_reduce(
            context,
            reduction,
            operand.flat,
            result.flat,
            staged=agreed.offered,
            notes=agreed.notes,
        )
    else:
        found = agreed.read([operand.spec.size] * context.size, reduction.dtype)
        reduce_local(reduction, [part[None] for part in found], [result.flat[None]])
    return result.finish()


_ALL_REDUCE = Collective(
    "all_reduce",
    lambda spec, size, op: (Reduction.of(op, spec.dtype).op,),
    _plan_all_reduce,
    _all_reduce,
    _offer_to_reduce,
)


@collective_call
def reduce_scatter(
    x: Any,
    *,
    op: str = "sum",
    axis: int = 0,
    counts: Sequence[int] | None = None,
    out: Any = None,
    context: DistributedContext | None = None,
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
    context = context_of("reduce_scatter", context)
    words = op, axis, tuple(counts) if isinstance(counts, list) else counts
    if context.team is None:
        return perform_on_cores(context, _REDUCE_SCATTER, words, x, out)
    if context.repeats is not None and counts is None and type(axis) is int:
        found = context.repeats.make(("reduce_scatter", op, axis, None), x, out)
        if found is not None:
            return found
    rank = context.rank

    def on_device(operand: DeviceOperand, plan: _ReduceScatter) -> Any:
        return operand.reduce_scatter(plan.reduction, plan.axis, plan.counts, plan.results[rank])

    def result(_: DeviceOperand, plan: _ReduceScatter) -> tuple[str, Shape]:
        return plan.reduction.result, plan.results[rank]

    return perform(context, _REDUCE_SCATTER, words, x, out, on_device, _ALIKE, result)


def _arguments_of_reduce_scatter(
    spec: ArraySpec, size: int, op: Any, axis: Any, counts: Any
) -> tuple[Hashable, ...]:
    reduction, at = Reduction.of(op, spec.dtype), as_axis(axis, spec.ndim)
    extent = spec.shape[at]
    given = as_counts("counts", counts, size, extent)
    return reduction.op, at, slab_counts(extent, size) if given is None else given


@dataclass(frozen=True)
class _ReduceScatter:
    reduction: Reduction
    axis: int
    counts: Shape
    results: tuple[Shape, ...]


def _plan_reduce_scatter(specs: list[Any]) -> _ReduceScatter:
    libraries, dtypes, shapes, outs, ops, axes, parts = zip(*specs, strict=True)
    reduction = _require_one_reduction(libraries, dtypes, shapes, ops)
    axis = require_equal("axis", axes)
    counts = require_equal("counts", parts)
    shape = shapes[0]
    results = tuple((*shape[:axis], count, *shape[axis + 1 :]) for count in counts)
    require_outputs_fit(outs, libraries, reduction.result, results)
    return _ReduceScatter(reduction, axis, counts, results)


def _reduce_scatter(agreed: AgreedCall, plan: _ReduceScatter) -> Any:
    rank, size, operand = agreed.context.rank, agreed.context.size, agreed.operand
    assert operand is not None, "required"
    shape, whole, reduction = plan.results[rank], operand.spec.shape, plan.reduction
    result = agreed.result(operand.library, shape, reduction.result)
    first, count = sum(plan.counts[:rank]), plan.counts[rank]
    span = span_of_columns(whole, plan.axis, first, count)
    found = agreed.read([operand.spec.size] * size, reduction.dtype, [span] * size)
    into, width = column_view(result.flat, shape, plan.axis)
    own = slice(first * width, (first + count) * width)
    parts = [column_view(each, whole, plan.axis)[0][:, own] for each in found]
    reduce_local(reduction, parts, [into])
    return agreed.finish(result)


_REDUCE_SCATTER = Collective(
    "reduce_scatter", _arguments_of_reduce_scatter, _plan_reduce_scatter, _reduce_scatter
)


def _require_one_reduction(
    libraries: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Shape], ops: Sequence[str]
) -> Reduction:
    require_equal("the library of x", libraries)
    dtype = require_equal("the dtype of x", dtypes)
    require_equal("the shape of x", shapes)
    return Reduction.of(require_equal("op", ops), dtype)
