"""Operators that combine what all ranks have: all_reduce, reduce_scatter, and sums for one root."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from shardmath.call.agreement import raise_on_all_ranks
from shardmath.collectives import all_reduce, reduce_scatter
from shardmath.collectives.operand import slab_counts
from shardmath.context.agreement import require_equal
from shardmath.context.context import DistributedContext
from shardmath.handles.rendezvous import context_of_group

_OPS = {"sum": "sum", "avg": "mean", "min": "min", "max": "max", "product": "product"}


def reduction(context: DistributedContext, reduce_op: str) -> str:
    """Our name of torch's reduction. An unknown one raises ValueError on all ranks. Collective."""
    if reduce_op not in _OPS:
        error = ValueError(f"reduce_op is one of {', '.join(_OPS)}, not {reduce_op!r}")
        raise_on_all_ranks(context, "torch.ops.symm_mem", error)
    return _OPS[reduce_op]


def _one_shot_all_reduce(x: Any, reduce_op: str, group_name: str, out: Any = None) -> Any:
    context = context_of_group(group_name)
    if out is None and not x.is_contiguous():
        out = torch.empty_like(x)  # torch's compiler expects the strides of x
    op, into = reduction(context, reduce_op), None if out is None else out.detach()
    made = all_reduce(x.detach(), op=op, out=into, context=context)
    return made if out is None else out


def _one_shot_all_reduce_copy(
    buffer: Any, x: Any, reduce_op: str, group_name: str, out: Any = None
) -> Any:
    """The sum of `x`: the buffer, through which torch's kernel goes, is not needed."""
    return _one_shot_all_reduce(x, reduce_op, group_name, out)


def _two_shot_all_reduce_(x: Any, reduce_op: str, group_name: str) -> Any:
    return _one_shot_all_reduce(x, reduce_op, group_name, x)


def _reduce_scatter_out(x: Any, group_name: str, split_last_dim: bool, output: Any) -> Any:
    context = context_of_group(group_name)
    axis = x.ndim - 1 if split_last_dim else 0
    reduce_scatter(x.detach(), axis=axis, out=output.detach(), context=context)
    return output


def _low_contention_reduce_scatter(x: Any, reduce_op: str, group_name: str) -> Any:
    context = context_of_group(group_name)
    return reduce_scatter(x.detach(), op=reduction(context, reduce_op), context=context)


# -- blocks for chosen ranks -----------------------------------------------------------------------


def _multi_root_tile_reduce(
    in_tiles: list[Any], out_tile: Any, roots: list[int], group_name: str, reduce_op: str = "sum"
) -> None:
    """The sum of every rank's `in_tiles[i]`, in `out_tile` of rank `roots[i]`. Collective.

    Raises on all ranks: ValueError for a root that is no rank or has two tiles, for another number
    of tiles than of roots, and where the root's `out_tile` has another shape or dtype.
    """
    context = context_of_group(group_name)
    op = reduction(context, reduce_op)

    def describe() -> Any:
        tiles = [(list(tile.shape), str(tile.dtype)) for tile in in_tiles]
        return tiles, list(roots), [list(out_tile.shape), str(out_tile.dtype)]

    def check(specs: Sequence[Any]) -> None:
        tiles, agreed = specs[0][0], require_equal("roots", [tuple(spec[1]) for spec in specs])
        for rank, (given, *_) in enumerate(specs):
            if len(given) != len(agreed) or len(set(agreed)) != len(agreed):
                raise ValueError(
                    f"rank {rank}: {len(given)} tiles need as many different roots, not {agreed}"
                )
        for tile, root in zip(tiles, agreed, strict=True):
            if not 0 <= root < len(specs):
                raise ValueError(f"root {root} is no rank of {len(specs)}")
            if list(tile) != list(specs[root][2]):
                raise ValueError(f"rank {root}: out_tile is {specs[root][2]}, and the tile {tile}")

    context.agree("multi_root_tile_reduce", describe, check)
    for tile, root in zip(in_tiles, roots, strict=True):
        counts = [tile.numel() if rank == root else 0 for rank in range(context.size)]
        made = reduce_scatter(tile.detach().reshape(-1), op=op, counts=counts, context=context)
        if context.rank == root:
            out_tile.detach().copy_(made.reshape(tile.shape))


def _tile_reduce(
    in_tile: Any, out_tile: Any, root: int, group_name: str, reduce_op: str = "sum"
) -> None:
    _multi_root_tile_reduce([in_tile], out_tile, [root], group_name, reduce_op)


def reduce_scatter_offset(
    x: Any,
    out: Sequence[Any],
    group: Any,
    dim: int,
    offsets: Sequence[int] | None = None,
    dst_ranks: Sequence[int] | None = None,
    red_op: str = "sum",
) -> None:
    """See `symmetric_memory.reduce_scatter_offset`."""
    context = context_of_group(group)
    op = reduction(context, red_op)

    def describe() -> Any:
        if x.ndim != 2 or dim not in (0, 1):
            raise ValueError(f"expected a matrix and dim 0 or 1, got {tuple(x.shape)} and {dim}")
        ends = _block_ends(context, x.shape[dim], offsets)
        owners = [n % context.size for n in range(len(ends))] if dst_ranks is None else dst_ranks
        return list(x.shape), dim, ends, list(owners), [_kind(each) for each in out], str(x.dtype)

    ends, owners = context.agree("nccl_reduce_scatter_offset", describe, _checked_blocks)
    sizes = [high - low for low, high in pairwise([0, *ends])]
    rows = x.detach()
    blocks = [rows.narrow(dim, low, high - low) for low, high in pairwise([0, *ends])]
    order = sorted(range(len(sizes)), key=lambda n: owners[n])
    counts = [
        sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank)
        for rank in range(context.size)
    ]
    packed = torch.cat([rows.narrow(dim, 0, 0), *(blocks[n] for n in order)], dim)
    made = reduce_scatter(packed, op=op, axis=dim, counts=counts, context=context)
    for each, part in zip(out, made.split([o.shape[dim] for o in out], dim), strict=True):
        each.detach().copy_(part)


def _checked_blocks(specs: Sequence[Any]) -> tuple[list[int], list[int]]:
    """The ends of the blocks, and the ranks to which they go, on which all agree."""
    shape, along, ends, owners = (
        require_equal(what, [spec[i] for spec in specs])
        for i, what in enumerate(("the shape of input", "dim", "offsets", "dst_ranks"))
    )
    cuts = [0, *ends]
    if any(low > high for low, high in pairwise([*cuts, shape[along]])):
        raise ValueError(f"offsets rise up to {shape[along]}, not as {list(ends)}")
    if len(owners) != len(ends) or any(not 0 <= owner < len(specs) for owner in owners):
        raise ValueError(
            f"dst_ranks names one of {len(specs)} ranks for each of {len(ends)} blocks, "
            f"not {list(owners)}"
        )
    for rank, (*_, given, dtype) in enumerate(specs):
        wanted = [
            [_block_shape(shape, along, high - low), dtype]
            for (low, high), owner in zip(pairwise(cuts), owners, strict=True)
            if owner == rank
        ]
        if [[list(each), kind] for each, kind in given] != wanted:
            raise ValueError(f"rank {rank}: out is {given}, and its blocks are {wanted}")
    return list(ends), list(owners)


def _block_ends(
    context: DistributedContext, extent: int, offsets: Sequence[int] | None
) -> list[int]:
    if offsets is not None:
        return list(offsets)
    counts = slab_counts(extent, context.size)
    return [sum(counts[: rank + 1]) for rank in range(context.size)]


def _block_shape(shape: Sequence[int], along: int, extent: int) -> list[int]:
    return [extent if axis == along else n for axis, n in enumerate(shape)]


def _kind(x: Any) -> tuple[list[int], str]:
    return list(x.shape), str(x.dtype)


KERNELS: dict[str, Callable[..., Any]] = {
    "one_shot_all_reduce": _one_shot_all_reduce,
    "one_shot_all_reduce_out": _one_shot_all_reduce,
    "one_shot_all_reduce_copy": _one_shot_all_reduce_copy,
    "one_shot_all_reduce_copy_out": _one_shot_all_reduce_copy,
    "two_shot_all_reduce_": _two_shot_all_reduce_,
    "two_shot_all_reduce_out": _one_shot_all_reduce,
    "reduce_scatter_out": _reduce_scatter_out,
    "_low_contention_reduce_scatter": _low_contention_reduce_scatter,
    "tile_reduce": _tile_reduce,
    "multi_root_tile_reduce": _multi_root_tile_reduce,
    "nccl_reduce_scatter_offset": reduce_scatter_offset,
}
