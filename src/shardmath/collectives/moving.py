"""Collectives that move elements and compute nothing: broadcast, all_gather, all_to_all.

One exchange agrees on the call and tells where operands can be read; then every rank copies what is
its own. Seen along the axis, an array is a matrix whose columns are divided among the ranks:

    all_gather   rank r's columns  ->  columns [start r : start r+1] of every rank's result
    all_to_all   rank r's columns [start p : start p+1]  ->  rank p's columns for r
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from shardmath.agreement import require_equal
from shardmath.arrays import library_named, raw_view
from shardmath.arrays.base import HostArray
from shardmath.collectives.offers import NOTHING, Offer, offer, read_offers, wait_for_readers
from shardmath.collectives.operand import (
    Operand,
    Output,
    Shape,
    as_axis,
    as_counts,
    as_index,
    column_view,
    context_of,
    output_spec,
    require_outputs_fit,
    slab_counts,
    span_of_columns,
    starts,
)
from shardmath.context import Context
from shardmath.distributed_context import DistributedContext
from shardmath.errors import CollectiveMismatch
from shardmath.planning import agree_plan

if TYPE_CHECKING:
    from shardmath.collectives.on_device import DeviceOperand

__all__ = ["all_gather", "all_to_all", "broadcast"]


def broadcast(
    x: Any, *, root: int = 0, out: Any = None, context: DistributedContext | None = None
) -> Any:
    """The array of rank `root`, on every rank. Collective.

    `x` has the same shape, dtype and library on all ranks; ranks other than `root` may pass None.
    Returns `out` where it is given (it may be `x`), else a new C-ordered array of the root's
    library.

    Raises on all ranks: CollectiveMismatch when operands or `root` differ, ValueError for an `out`
    of another shape, dtype or library, or read-only, for a `root` that is no rank, and when the
    root passes None.
    """
    context = context_of(context)
    if context.team is not None:
        return _broadcast_on_device(context, x, root, out)
    own: list[tuple[Operand | None, Offer]] = []

    def describe() -> tuple[Any, bytes]:
        source = as_index("root", root, context.size)
        into, view = output_spec(out, context)
        operand = None if x is None else Operand.of(x, context)
        if operand is None:
            if context.rank == source:
                raise ValueError("the root of a broadcast passes an array, not None")
            own.append((None, Offer(NOTHING)))
            return (source, None, into), NOTHING
        spec = operand.spec
        made = Offer(NOTHING)
        if context.rank == source:
            if out is not x:
                operand = operand.apart(view)
            made = offer(context, operand.flat, operand.location)
        own.append((operand, made))
        return (source, (spec.library, spec.dtype, spec.shape), into), made.note

    plan, notes = agree_plan(context, "broadcast", describe, _plan_broadcast)
    ((operand, _kept),) = own
    with context.executing("broadcast"):
        result = Output.of(out, library_named(plan.library), plan.shape, plan.dtype)
        flat = operand.flat if operand is not None and context.rank == plan.root else None
        dtype = result.flat.dtype
        sizes = [result.flat.size] * context.size
        source = read_offers(context, notes, sizes, flat, dtype)[plan.root]
        if out is not x or context.rank != plan.root:
            _copy(result.flat, source)
            result.finish()
        wait_for_readers(context, notes)
        return result.array


@dataclass(frozen=True)
class _Broadcast:
    root: int
    library: str
    dtype: str
    shape: Shape


def _plan_broadcast(specs: list[Any]) -> _Broadcast:
    root = require_equal("root", [spec[0] for spec in specs])
    library, dtype, shape = specs[root][1]
    for rank, (_, given, _) in enumerate(specs):
        if given is not None and given != (library, dtype, shape):
            raise CollectiveMismatch(
                f"the operands of a broadcast must be equal in kind: rank {root}, the root, has "
                f"{_said((library, dtype, shape))}, rank {rank} has {_said(given)}"
            )
    size = len(specs)
    outs = [spec[2] for spec in specs]
    require_outputs_fit(outs, [library] * size, dtype, [shape] * size)
    return _Broadcast(root, library, dtype, shape)


def all_gather(
    x: Any, *, axis: int = 0, out: Any = None, context: DistributedContext | None = None
) -> Any:
    """The arrays of all ranks, one after the other along `axis`, on every rank. Collective.

    The extent of `x` along `axis` may differ by rank, and be 0; everything else is equal. Returns
    `out` where it is given, else a new C-ordered array of the library of `x`.

    Raises on all ranks: CollectiveMismatch when dtype, library, axis, or another extent differ,
    ValueError for an axis that `x` does not have, and for an `out` of another shape, dtype or
    library, or read-only.
    """
    context = context_of(context)
    if context.team is not None:
        return _all_gather_on_device(context, x, axis, out)
    own: list[tuple[Operand, Offer]] = []

    def describe() -> tuple[Any, bytes]:
        operand = Operand.of(x, context)
        spec = operand.spec
        at = as_axis(axis, spec.ndim)
        into, view = output_spec(out, context)
        operand = operand.apart(view)
        made = offer(context, operand.flat, operand.location)
        own.append((operand, made))
        return (spec.library, spec.dtype, spec.shape, at, into), made.note

    plan, notes = agree_plan(context, "all_gather", describe, _plan_gather)
    ((operand, _kept),) = own
    with context.executing("all_gather"):
        result = Output.of(out, operand.library, plan.shape, plan.dtype)
        found = read_offers(context, notes, plan.sizes, operand.flat, result.flat.dtype)
        columns, width = column_view(result.flat, plan.shape, plan.axis)
        for rank, source in enumerate(found):
            part = columns[:, plan.starts[rank] * width : plan.starts[rank + 1] * width]
            _copy(part, source.reshape(part.shape))
        wait_for_readers(context, notes)
        return result.finish()


@dataclass(frozen=True)
class _Gather:
    dtype: str
    axis: int
    shape: Shape
    operands: tuple[Shape, ...]
    sizes: Shape
    starts: tuple[int, ...]


def _plan_gather(specs: list[Any]) -> _Gather:
    libraries, _, shapes, _, outs = zip(*specs, strict=True)
    dtype, axis = _require_one_kind(specs)
    counts = [shape[axis] for shape in shapes]
    first = shapes[0]
    shape = (*first[:axis], sum(counts), *first[axis + 1 :])
    require_outputs_fit(outs, libraries, dtype, [shape] * len(specs))
    sizes = tuple(prod(each) for each in shapes)
    return _Gather(dtype, axis, shape, shapes, sizes, tuple(starts(counts)))


def all_to_all(
    x: Any,
    *,
    axis: int = 0,
    send_counts: Sequence[int] | None = None,
    receive_counts: Sequence[int] | None = None,
    out: Any = None,
    context: DistributedContext | None = None,
) -> Any:
    """What every rank has for this one, one part after the other along `axis`. Collective.

    `x` is divided along `axis` into one part for each rank: of `send_counts` indices, or, without
    them, as evenly as possible, the first ranks having one more. The result holds the parts that
    the ranks sent to this one, in their order. `receive_counts` says how large they are; it need
    not be given, and is only compared with what is sent. Extents along `axis` may differ by rank.
    Returns `out` where it is given, else a new C-ordered array of the library of `x`.

    Raises on all ranks: CollectiveMismatch when dtype, library, axis or another extent differ, or a
    rank expects another count than is sent to it; ValueError for counts that do not add up, an axis
    that `x` does not have, and an `out` of another shape, dtype or library, or read-only.
    """
    context = context_of(context)
    if context.team is not None:
        return _all_to_all_on_device(context, x, axis, send_counts, receive_counts, out)
    own: list[tuple[Operand, Offer]] = []

    def describe() -> tuple[Any, bytes]:
        operand = Operand.of(x, context)
        spec = operand.spec
        at = as_axis(axis, spec.ndim)
        extent = spec.shape[at]
        sent = as_counts("send_counts", send_counts, context.size, extent)
        expected = as_counts("receive_counts", receive_counts, context.size, None)
        into, view = output_spec(out, context)
        operand = operand.apart(view)
        made = offer(context, operand.flat, operand.location)
        own.append((operand, made))
        sent = slab_counts(extent, context.size) if sent is None else sent
        return (spec.library, spec.dtype, spec.shape, at, into, sent, expected), made.note

    plan, notes = agree_plan(context, "all_to_all", describe, _plan_all_to_all)
    ((operand, _kept),) = own
    with context.executing("all_to_all"):
        shape = plan.results[context.rank]
        result = Output.of(out, operand.library, shape, plan.dtype)
        sizes = [prod(each) for each in plan.operands]
        parts = [
            span_of_columns(each, plan.axis, sum(sent[: context.rank]), sent[context.rank])
            for each, sent in zip(plan.operands, plan.sent, strict=True)
        ]
        found = read_offers(context, notes, sizes, operand.flat, result.flat.dtype, parts)
        into, width = column_view(result.flat, shape, plan.axis)
        at = 0
        for source, its_shape, sent in zip(found, plan.operands, plan.sent, strict=True):
            columns, _ = column_view(source, its_shape, plan.axis)
            start, count = sum(sent[: context.rank]) * width, sent[context.rank] * width
            _copy(into[:, at : at + count], columns[:, start : start + count])
            at += count
        wait_for_readers(context, notes)
        return result.finish()


@dataclass(frozen=True)
class _AllToAll:
    dtype: str
    axis: int
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    sent: tuple[Shape, ...]


def _plan_all_to_all(specs: list[Any]) -> _AllToAll:
    libraries, _, shapes, _, outs, sent, expected = zip(*specs, strict=True)
    dtype, axis = _require_one_kind(specs)
    results = []
    for rank, counts in enumerate(expected):
        arriving = tuple(each[rank] for each in sent)
        if counts is not None and counts != arriving:
            raise CollectiveMismatch(
                f"rank {rank} expects receive_counts {list(counts)}, and the ranks send it "
                f"{list(arriving)}"
            )
        results.append((*shapes[0][:axis], sum(arriving), *shapes[0][axis + 1 :]))
    require_outputs_fit(outs, libraries, dtype, results)
    return _AllToAll(dtype, axis, shapes, tuple(results), sent)


def _require_one_kind(specs: list[Any]) -> tuple[str, int]:
    """The dtype and the axis; all but the extent along the axis must be equal."""
    require_equal("the library of x", [spec[0] for spec in specs])
    dtype = require_equal("the dtype of x", [spec[1] for spec in specs])
    require_equal("the number of axes of x", [len(spec[2]) for spec in specs])
    axis = require_equal("axis", [spec[3] for spec in specs])
    others = [(*spec[2][:axis], *spec[2][axis + 1 :]) for spec in specs]
    if any(other != others[0] for other in others):
        rank = next(r for r, other in enumerate(others) if other != others[0])
        raise CollectiveMismatch(
            f"the shapes of x must be equal but for axis {axis}: rank 0 has {specs[0][2]}, "
            f"rank {rank} has {specs[rank][2]}"
        )
    return dtype, axis


def _copy(into: HostArray, source: HostArray) -> None:
    np.copyto(raw_view(into), raw_view(source))


def _said(kind: tuple[str, str, Shape]) -> str:
    return f"a {kind[0]} array of {kind[1]} {kind[2]}"


def _broadcast_on_device(context: Context, x: Any, root: int, out: Any) -> Any:
    from shardmath.collectives.calls import perform_on_device
    from shardmath.collectives.on_device import DeviceOutput, stand_in

    if x is not None:

        def describe(operand: DeviceOperand) -> Hashable:
            source = as_index("root", root, context.size)
            spec = operand.spec
            return source, (operand.kind, spec.dtype, spec.shape), operand.into

        return perform_on_device(
            context,
            "broadcast",
            (root,),
            x,
            out,
            describe=describe,
            build=_plan_broadcast,
            perform=lambda operand, plan: operand.broadcast(plan.root, plan.shape),
        )

    def nothing() -> tuple[Hashable, bytes]:
        source = as_index("root", root, context.size)
        if context.rank == source:
            raise ValueError("the root of a broadcast passes an array, not None")
        return (source, None, None if out is None else DeviceOutput(context, out).spec), b""

    plan, _ = agree_plan(context, "broadcast", nothing, _plan_broadcast)
    with context.executing("broadcast"):
        operand = stand_in(context, plan.library, plan.dtype, plan.shape, out)
        return operand.broadcast(plan.root, plan.shape)


def _all_gather_on_device(context: Context, x: Any, axis: int, out: Any) -> Any:
    from shardmath.collectives.calls import perform_on_device

    def describe(operand: DeviceOperand) -> Hashable:
        spec = operand.spec
        return operand.kind, spec.dtype, spec.shape, as_axis(axis, spec.ndim), operand.into

    return perform_on_device(
        context,
        "all_gather",
        (axis,),
        x,
        out,
        describe=describe,
        build=_plan_gather,
        perform=lambda operand, plan: operand.all_gather(plan.axis, plan.operands, plan.shape),
    )


def _all_to_all_on_device(
    context: Context,
    x: Any,
    axis: int,
    send_counts: Sequence[int] | None,
    receive_counts: Sequence[int] | None,
    out: Any,
) -> Any:
    from shardmath.collectives.calls import perform_on_device

    def describe(operand: DeviceOperand) -> Hashable:
        spec = operand.spec
        at = as_axis(axis, spec.ndim)
        extent = spec.shape[at]
        sent = as_counts("send_counts", send_counts, context.size, extent)
        expected = as_counts("receive_counts", receive_counts, context.size, None)
        sent = slab_counts(extent, context.size) if sent is None else sent
        return operand.kind, spec.dtype, spec.shape, at, operand.into, sent, expected

    def perform(operand: DeviceOperand, plan: _AllToAll) -> Any:
        shape = plan.results[context.rank]
        return operand.all_to_all(plan.axis, plan.sent, plan.operands, shape)

    return perform_on_device(
        context,
        "all_to_all",
        (axis, send_counts, receive_counts),
        x,
        out,
        describe=describe,
        build=_plan_all_to_all,
        perform=perform,
    )
