"""Collectives that move elements and compute nothing: broadcast, all_gather, all_to_all.

Each is one move: which sections of the axis go from which rank to which.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from shardmath.arrays import Array, dtypes
from shardmath.arrays.spec import ArraySpec
from shardmath.base.collective_call import collective_call, differentiable
from shardmath.base.immutable import Immutable
from shardmath.collectives.dispatch import Collective, in_background, perform
from shardmath.collectives.forms import ANY_EXTENT, Broadcast, Gathered, OnGPUs, Received, Scattered
from shardmath.collectives.operand import (
    OutputSpec,
    Shape,
    as_axis,
    as_counts,
    as_index,
    context_of,
    hashable,
    require_outputs_fit,
    slab_counts,
)
from shardmath.context.agreement import require_equal
from shardmath.context.context import DistributedContext, require_context
from shardmath.errors import CollectiveMismatch
from shardmath.program.steps import LocalArray, Program, moved
from shardmath.redistribution import Sections

if TYPE_CHECKING:
    from shardmath.collectives.background import Work
    from shardmath.collectives.gpu_operand import DeviceOperand

_NO_ARRAY = (None, None, None)  # the spec of x on a rank that receives a broadcast and passes None


class _Moved(Immutable, words="{dtype}, {transfer}"):
    """A collective on which all ranks have agreed: sections of `dtype` that move.

    `library` is the first rank's; `root` is -1 if there is none.
    """

    transfer: Sections
    dtype: str
    library: str
    root: int

    @property
    def shape(self) -> Shape:
        """The shape of the first rank's result, which in a broadcast is that of all."""
        return self.transfer.result_shape(0)


def _fitting(
    transfer: Sections,
    dtype: str,
    libraries: Sequence[str],
    outs: Sequence[OutputSpec],
    root: int = -1,
) -> _Moved:
    """The plan of a transfer. Raises ValueError if a rank's `out` is not like its result."""
    shapes = [transfer.result_shape(rank) for rank in range(len(outs))]
    require_outputs_fit(outs, libraries, dtype, shapes)
    return _Moved(transfer, dtype, libraries[0], root)


def _steps(plan: _Moved, rank: int) -> Program:
    result = LocalArray(plan.transfer.result_shape(rank), plan.dtype)
    steps = moved(plan.transfer, "x", "out")
    return Program(steps, results={"out": result}, library=plan.library)


def _sections_on_gpus(operand: DeviceOperand, plan: _Moved, *, whole: bool) -> Any:
    """See `DeviceOperand.move`."""
    transfer = plan.transfer
    shape = transfer.result_shape(operand.context.rank)
    return operand.move(transfer.counts, shape, transfer.axis, whole=whole)


@overload
def broadcast(
    x: Array | None,
    *,
    root: int = 0,
    out: Any = None,
    context: DistributedContext | None = None,
    async_op: Literal[False] = False,
) -> Array: ...


@overload
def broadcast(
    x: Array | None,
    *,
    root: int = 0,
    out: Any = None,
    context: DistributedContext | None = None,
    async_op: Literal[True],
) -> Work[Array]: ...


@differentiable
def broadcast(
    x: Any,
    *,
    root: int = 0,
    out: Any = None,
    context: DistributedContext | None = None,
    async_op: bool = False,
) -> Any:
    """The array of rank `root`, on every rank. Collective.

        x = broadcast(numpy.load("x.npy") if context.rank == 0 else None)

    `x` has the same shape, dtype and library on all ranks; ranks other than `root` may pass None.
    Returns `out` where it is given (it may be `x`), else a new C-ordered array of the root's
    library.

    Raises on all ranks: CollectiveMismatch when operands or `root` differ, ValueError for an `out`
    of another shape, dtype or library, or read-only, for a `root` that is no rank, and when the
    root passes None.
    """
    if async_op:
        return in_background(broadcast, context, x, root=root, out=out)
    context = context_of("broadcast", context)
    if context.repeats is not None and type(root) is int:
        given = out if x is None and context.rank != root else x
        result = context.repeats.make(("broadcast", root), given, out)
        if result is not None:
            return result
    return perform(context, BROADCAST, (root,), x, out)


def _plan_broadcast(specs: list[Any]) -> _Moved:
    *given, outs, roots = zip(*specs, strict=True)
    root = require_equal("root", roots)
    kinds = list(zip(*given, strict=True))
    for rank, kind in enumerate(kinds):
        if kind not in (kinds[root], _NO_ARRAY):
            raise CollectiveMismatch(
                f"the operands of a broadcast must be equal in kind: rank {root}, the root, has "
                f"{_described(kinds[root])}, rank {rank} has {_described(kind)}"
            )
    size = len(specs)
    library, dtype, shape = kinds[root]
    transfer = Sections.of_one(shape, root, size, dtypes.of(dtype).itemsize)
    return _fitting(transfer, dtype, [library] * size, outs, root)


def _broadcast_on_gpus(operand: DeviceOperand, plan: _Moved) -> Any:
    size = operand.context.size
    table = [[int(rank == plan.root)] * size for rank in range(size)]
    return operand.move(table, plan.shape, None, whole=True, in_place=True)


BROADCAST = Collective(
    "broadcast",
    lambda spec, size, root: (as_index("root", root, size),),
    _plan_broadcast,
    _steps,
    OnGPUs(Broadcast(), _broadcast_on_gpus),
    gives=lambda rank, root: bool(rank == root),
)


@overload
def all_gather(
    x: Array,
    *,
    axis: int = 0,
    out: Any = None,
    context: DistributedContext | None = None,
    async_op: Literal[False] = False,
) -> Array: ...


@overload
def all_gather(
    x: Array,
    *,
    axis: int = 0,
    out: Any = None,
    context: DistributedContext | None = None,
    async_op: Literal[True],
) -> Work[Array]: ...


@differentiable
def all_gather(
    x: Any,
    *,
    axis: int = 0,
    out: Any = None,
    context: DistributedContext | None = None,
    async_op: bool = False,
) -> Any:
    """The arrays of all ranks, one after the other along `axis`, on every rank. Collective.

        matrix = all_gather(rows)

    The extent of `x` along `axis` may differ by rank, and be 0; everything else is equal. Returns
    `out` where it is given, else a new C-ordered array of the library of `x`; on GPUs a rank with
    an `out` waits for no other's host.

    Raises on all ranks: CollectiveMismatch when dtype, library, axis, or another extent differ,
    ValueError for an axis that `x` does not have, and for an `out` of another shape, dtype or
    library, or read-only.
    """
    if async_op:
        return in_background(all_gather, context, x, axis=axis, out=out)
    context = context_of("all_gather", context)
    if context.repeats is not None and type(axis) is int:
        result = context.repeats.make(("all_gather", axis), x, out)
        if result is not None:
            return result
    return perform(context, ALL_GATHER, (axis,), x, out)


def _plan_gather(specs: list[Any]) -> _Moved:
    libraries, _, shapes, outs, _ = zip(*specs, strict=True)
    dtype, axis = _require_one_kind(specs)
    transfer = Sections.gathered(shapes, axis, dtypes.of(dtype).itemsize)
    return _fitting(transfer, dtype, libraries, outs)


ALL_GATHER = Collective(
    "all_gather",
    lambda spec, size, axis: (as_axis(axis, spec.ndim),),
    _plan_gather,
    _steps,
    OnGPUs(Gathered(), lambda operand, plan: _sections_on_gpus(operand, plan, whole=True)),
)


@overload
def all_to_all(
    x: Array,
    *,
    axis: int = 0,
    send_counts: Sequence[int] | None = None,
    receive_counts: Sequence[int] | None = None,
    out: Any = None,
    context: DistributedContext | None = None,
    async_op: Literal[False] = False,
) -> Array: ...


@overload
def all_to_all(
    x: Array,
    *,
    axis: int = 0,
    send_counts: Sequence[int] | None = None,
    receive_counts: Sequence[int] | None = None,
    out: Any = None,
    context: DistributedContext | None = None,
    async_op: Literal[True],
) -> Work[Array]: ...


@differentiable
def all_to_all(
    x: Any,
    *,
    axis: int = 0,
    send_counts: Sequence[int] | None = None,
    receive_counts: Sequence[int] | None = None,
    out: Any = None,
    context: DistributedContext | None = None,
    async_op: bool = False,
) -> Any:
    """The parts that all ranks have for this one, one after the other along `axis`. Collective.

        received = all_to_all(sorted_by_owner, send_counts=counts)

    `x` is divided along `axis` into one part for each rank: of `send_counts` indices, or, without
    them, as evenly as possible, the first ranks having one more. The result holds the parts that
    the ranks sent to this one, in their order. `receive_counts` says how large they are; it need
    not be given, and is only compared with what is sent. Extents along `axis` may differ by rank.
    Returns `out` where it is given, else a new C-ordered array of the library of `x`; on GPUs a
    rank with an `out`, or with `receive_counts`, waits for no other's host.

    Raises on all ranks: CollectiveMismatch when dtype, library, axis or another extent differ, or a
    rank expects another count than is sent to it; ValueError for counts that do not add up, an axis
    that `x` does not have, and an `out` of another shape, dtype or library, or read-only.
    """
    if async_op:
        return in_background(
            all_to_all,
            context,
            x,
            axis=axis,
            send_counts=send_counts,
            receive_counts=receive_counts,
            out=out,
        )
    context = context_of("all_to_all", context)
    words = axis, hashable(send_counts), hashable(receive_counts)
    if context.repeats is not None and type(axis) is int:
        if send_counts is not None:
            result = context.repeats.make_counted(("all_to_all", axis), x, out, *words[1:])
        else:
            result = context.repeats.make(("all_to_all", *words), x, out)
        if result is not None:
            return result
    return perform(context, ALL_TO_ALL, words, x, out)


def _arguments_of_all_to_all(
    spec: ArraySpec, size: int, axis: Any, send_counts: Any, receive_counts: Any
) -> tuple[Hashable, ...]:
    along = as_axis(axis, spec.ndim)
    extent = spec.shape[along]
    sent = as_counts("send_counts", send_counts, size, extent)
    expected = as_counts("receive_counts", receive_counts, size, None)
    return along, slab_counts(extent, size) if sent is None else sent, expected


def _plan_all_to_all(specs: list[Any]) -> _Moved:
    libraries, _, shapes, outs, _, sent, expected = zip(*specs, strict=True)
    dtype, axis = _require_one_kind(specs)
    for rank, counts in enumerate(expected):
        arriving = tuple(row[rank] for row in sent)
        if counts is not None and counts != arriving:
            raise CollectiveMismatch(
                f"rank {rank} expects receive_counts {list(counts)}, and the ranks send it "
                f"{list(arriving)}"
            )
    transfer = Sections.divided(shapes, axis, sent, dtypes.of(dtype).itemsize)
    return _fitting(transfer, dtype, libraries, outs)


ALL_TO_ALL = Collective(
    "all_to_all",
    _arguments_of_all_to_all,
    _plan_all_to_all,
    _steps,
    OnGPUs(Scattered(), lambda operand, plan: _sections_on_gpus(operand, plan, whole=False)),
)


@collective_call
def all_to_all_by_received(x: Any, *, axis: int, received: Shape) -> Any:
    """As `all_to_all`, where each rank knows how much it receives of each other, and not what it
    sends: the gradient of an all_to_all. What the peers receive travels in its agreement.
    """
    return perform(require_context(), ALL_TO_ALL_BY_RECEIVED, (axis, received), x, None)


def _plan_by_received(specs: list[Any]) -> _Moved:
    libraries, _, shapes, outs, _, received = zip(*specs, strict=True)
    dtype, axis = _require_one_kind(specs)
    sent = list(zip(*received, strict=True))
    extents = [sum(row) for row in sent]
    for rank, (shape, extent) in enumerate(zip(shapes, extents, strict=True)):
        if shape[axis] not in (extent, ANY_EXTENT):
            raise CollectiveMismatch(
                f"rank {rank} has {shape[axis]} indices of axis {axis}, and the ranks receive "
                f"{extent} of it"
            )
    whole = [(*s[:axis], n, *s[axis + 1 :]) for s, n in zip(shapes, extents, strict=True)]
    transfer = Sections.divided(whole, axis, sent, dtypes.of(dtype).itemsize)
    return _fitting(transfer, dtype, libraries, outs)


ALL_TO_ALL_BY_RECEIVED = Collective(
    "all_to_all by received counts",
    lambda spec, size, axis, received: (as_axis(axis, spec.ndim), received),
    _plan_by_received,
    _steps,
    OnGPUs(Received(), lambda operand, plan: _sections_on_gpus(operand, plan, whole=False)),
)


def _require_one_kind(specs: list[Any]) -> tuple[str, int]:
    """The dtype and the axis; all but the extent along the axis must be equal."""
    require_equal("the library of x", [spec[0] for spec in specs])
    dtype = require_equal("the dtype of x", [spec[1] for spec in specs])
    require_equal("the ndim of x", [len(spec[2]) for spec in specs])
    axis = require_equal("axis", [spec[4] for spec in specs])
    others = [(*spec[2][:axis], *spec[2][axis + 1 :]) for spec in specs]
    if any(other != others[0] for other in others):
        rank = next(r for r, other in enumerate(others) if other != others[0])
        raise CollectiveMismatch(
            f"the shapes of x must be equal but for axis {axis}: rank 0 has "
            f"{_but_for(axis, specs[0][2])}, rank {rank} has {_but_for(axis, specs[rank][2])}"
        )
    return dtype, axis


def _but_for(axis: int, shape: Shape) -> str:
    """A shape, without its extent along the axis."""
    return f"({', '.join('_' if number == axis else str(n) for number, n in enumerate(shape))})"


def _described(kind: tuple[str, str, Shape]) -> str:
    return f"a {kind[0]} array of {kind[1]} {kind[2]}"
