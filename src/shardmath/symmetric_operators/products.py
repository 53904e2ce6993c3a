"""Operators that multiply rows gathered from all ranks, or scatter the sums of products.

The scaled ones take eight-bit floats. Each rank multiplies by torch's own `_scaled_mm`, so scales,
types and roundings are the same. A rank's factors are checked before the ranks exchange data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed import _symmetric_memory as torchs

from shardmath.collectives import all_gather, reduce_scatter
from shardmath.collectives.operand import as_axis
from shardmath.context.context import DistributedContext, require_context
from shardmath.handles.rendezvous import context_of_group
from shardmath.symmetric.rows import order
from shardmath.symmetric_operators.sums import reduction

_PRODUCT = "torch.ops.symm_mem, a product"


def _fused_all_gather_matmul(
    a: Any, bs: list[Any], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[Any, list[Any]]:
    """All ranks' `a` along `gather_dim`, gathered once, and its product with each of `bs`."""
    context = context_of_group(group_name)
    gathered, place = _gathered(context, a, bs, gather_dim)
    products = [(gathered @ b.detach()).movedim(0, place) for b in bs]
    return gathered.movedim(0, place) if return_A else None, products


def _gathered(
    context: DistributedContext, a: Any, bs: Sequence[Any], gather_dim: int
) -> tuple[Any, int]:
    """All ranks' `a`, and the axis to which its first one has to be moved.

    The gathered axis is first, unless the rows themselves are gathered, and is moved as a view:
    torch's compiler is told of strides like these, and of those of `a` for one rank. Raises on all
    ranks where a rank's factors do not fit.
    """

    def describe() -> Any:
        along = as_axis(gather_dim, a.ndim)
        for b in bs:
            if a.ndim < 2 or b.ndim != 2 or b.dtype != a.dtype:
                raise ValueError(
                    f"expected A of two axes or more, and matrices of its type, got {_kind(a)} and "
                    f"{_kind(b)}"
                )
        return along, list(a.shape), [b.shape[0] for b in bs]

    def check(specs: Sequence[Any]) -> None:
        width = sum(shape[-1] for _, shape, _ in specs)
        for rank, (along, shape, rows) in enumerate(specs):
            k = width if along == len(shape) - 1 else shape[-1]
            if any(n != k for n in rows):
                raise ValueError(f"rank {rank}: A has {k} columns, and its B {list(rows)} rows")

    context.agree("all-gather and product", describe, check)
    place = as_axis(gather_dim, a.ndim)
    if place == a.ndim - 1:
        return all_gather(a.detach(), axis=place, context=context), 0
    if context.size == 1:
        return all_gather(a.detach(), axis=place, context=context).movedim(place, 0), place
    return all_gather(a.detach().movedim(place, 0), context=context), place


def _fused_matmul_reduce_scatter(
    a: Any, b: Any, reduce_op: str, scatter_dim: int, group_name: str
) -> Any:
    context = context_of_group(group_name)
    op = reduction(context, reduce_op)
    part = context.on_all_ranks(_PRODUCT, lambda: a.detach() @ b.detach())
    return reduce_scatter(part, op=op, axis=scatter_dim, context=context)


# -- of eight-bit floats ---------------------------------------------------------------------------


def _fused_all_gather_scaled_matmul(
    a: Any,
    bs: list[Any],
    a_scale: Any,
    b_scales: list[Any],
    gather_dim: int,
    group_name: str,
    biases: list[Any],
    result_scales: list[Any],
    out_dtypes: list[Any],
    use_fast_accum: list[bool],
) -> tuple[Any, list[Any]]:
    """All ranks' `a`, and its scaled product with each of `bs`, which have their own words.

    `a_scale` is one for all; or one for each row of this rank's `a`, gathered with it; or one for
    each row of all ranks' `a`.
    """
    context = context_of_group(group_name)
    kinds = torchs._maybe_convert_scalar_types_to_dtypes(out_dtypes)
    words = b_scales, biases, result_scales, kinds, use_fast_accum

    def describe() -> Any:
        if any(len(each) != len(bs) for each in words):
            raise ValueError(f"each of {len(bs)} B has its scale, bias, type and accumulation")
        return list(a.shape), list(a_scale.shape), as_axis(gather_dim, a.ndim)

    by_row = context.agree("all-gather of scales", describe, _are_of_rows)
    (gathered, place), scale = _gathered(context, a, bs, gather_dim), a_scale.detach()
    if by_row:
        scale = all_gather(scale, axis=place, context=context)
    if scale.numel() > 1:
        scale = scale.movedim(place, 0)

    def multiply() -> list[Any]:
        each = zip(bs, *words, strict=True)
        return [_scaled(gathered, b, scale, *rest).movedim(0, place) for b, *rest in each]

    return gathered.movedim(0, place), context.on_all_ranks(_PRODUCT, multiply)


def _are_of_rows(specs: Sequence[Any]) -> bool:
    """Whether ranks have scales of their own rows, which some may have by the shape alone."""
    of_rows = all(scale == [*shape[:-1], 1] for shape, scale, _ in specs)
    if of_rows and any(along == len(shape) - 1 for shape, _, along in specs):
        raise ValueError("scales of rows cannot be gathered along the rows: pass one for all")
    return of_rows


def _fused_scaled_matmul_reduce_scatter(
    a: Any,
    b: Any,
    a_scale: Any,
    b_scale: Any,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,
    group_name: str,
    output_shape: list[int] | None = None,
    bias: Any = None,
    result_scale: Any = None,
    out_dtype: Any = None,
    use_fast_accum: bool = False,
) -> Any:
    """This rank's part, along `orig_scatter_dim`, of all ranks' scaled products combined.

    `output_shape` is that of the whole product, where A was made a matrix of more axes.
    """
    context = context_of_group(group_name)
    op = reduction(context, reduce_op)

    def multiply() -> Any:
        made = _scaled(a, b, a_scale, b_scale, bias, result_scale, out_dtype, use_fast_accum)
        return made if output_shape is None else made.reshape(*output_shape[:-1], b.shape[1])

    part = context.on_all_ranks(_PRODUCT, multiply)
    return reduce_scatter(part, op=op, axis=orig_scatter_dim, context=context)


def _scaled(
    a: Any,
    b: Any,
    a_scale: Any,
    b_scale: Any,
    bias: Any,
    result_scale: Any,
    dtype: Any,
    fast: bool,
) -> Any:
    """The product of `a`, of any number of axes, and the matrix `b`. See torch._scaled_mm."""
    leading = a.shape[:-1]
    if a_scale.numel() > 1:
        a_scale = a_scale.reshape(-1, 1).contiguous()
    given = (x if x is None else x.detach() for x in (bias, result_scale))
    made = torch._scaled_mm(
        a.detach().reshape(-1, a.shape[-1]),
        b.detach(),
        a_scale.detach(),
        b_scale.detach(),
        *given,
        dtype,
        fast,
    )
    return made.reshape(*leading, b.shape[1])


# -- of one rank -----------------------------------------------------------------------------------


def _async_input_mm(a: Any, b: Any, a_chunk_signals: Any, a_chunk_pivot: int) -> Any:
    """The product of `a`, whose rows come in equal chunks meanwhile, and `b`. Local.

    Chunk i has come when `a_chunk_signals[i]` is not 0; the first one is `a_chunk_pivot`, and the
    others follow in turn. Raises ValueError where chunks and rows do not fit, OpTimeout where one
    does not come.
    """
    chunks = a_chunk_signals.numel()
    if a_chunk_signals.ndim != 1 or not chunks or a.ndim != 2 or len(a) % chunks:
        raise ValueError(
            f"expected A's rows in equal chunks, got {_kind(a)}, and {_kind(a_chunk_signals)} for "
            "the signals"
        )
    context, rows = require_context(), len(a) // chunks
    context.board.enter("_async_input_mm")
    words, out = a_chunk_signals.detach().numpy(), a.new_empty(len(a), b.shape[1])
    peers = [rank for rank in range(context.size) if rank != context.rank] or [context.rank]
    for step in range(chunks):
        chunk = (a_chunk_pivot + step) % chunks
        if not words[chunk]:
            come = partial(words.__getitem__, chunk)
            context.board.wait(come, lambda: peers, f"_async_input_mm, chunk {chunk}")
        order()  # before reading the rows that came before the signal
        part = slice(chunk * rows, (chunk + 1) * rows)
        torch.mm(a.detach()[part], b.detach(), out=out[part])
    return out


def _kind(x: Any) -> str:
    return f"{x.dtype} {tuple(x.shape)}"


KERNELS: dict[str, Callable[..., Any]] = {
    "fused_all_gather_matmul": _fused_all_gather_matmul,
    "fused_matmul_reduce_scatter": _fused_matmul_reduce_scatter,
    "fused_all_gather_scaled_matmul": _fused_all_gather_scaled_matmul,
    "fused_scaled_matmul_reduce_scatter": _fused_scaled_matmul_reduce_scatter,
    "_async_input_mm": _async_input_mm,
}
