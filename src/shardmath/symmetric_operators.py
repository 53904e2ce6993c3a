"""torch.ops.symm_mem on tensors in host memory, by the collectives of this package.

torch defines these operators, and has kernels for GPUs only. `serve` adds kernels for CPU tensors,
and shapes for torch's compiler where torch has none; the kernels for GPUs stay torch's own. A
kernel is as collective as torch's, over the group that its `group_name` names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed._symmetric_memory  # it defines a part of the operators

from shardmath.base.collective_call import collective_call
from shardmath.call.agreement import raise_on_all_ranks
from shardmath.collectives import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter
from shardmath.context.agreement import require_equal
from shardmath.context.context import DistributedContext
from shardmath.handles.rendezvous import context_of_group, rendezvous

_OPS = {"sum": "sum", "avg": "mean", "min": "min", "max": "max", "product": "product"}


@cache
def serve(memset32: Callable[..., Any]) -> Any:
    """Register the kernels, once in a process; return the torch.library.Library that keeps them.

    `memset32(tensor, offset, value, count)` writes uint32 elements. Raises NotImplementedError
    where this torch does not define an operator of the table.
    """

    def memset32_(x: Any, offset: int, val: int, count: int) -> Any:
        return memset32(x, offset, val, count)

    def stream_write_value32_(x: Any, offset: int, val: int) -> Any:
        return memset32(x, offset, val)

    kernels = {**_KERNELS, "memset32_": memset32_, "stream_write_value32_": stream_write_value32_}
    missing = [name for name in kernels if not hasattr(torch.ops.symm_mem, name)]
    if missing:
        raise NotImplementedError(f"torch {torch.__version__} does not define symm_mem::{missing}")
    library = torch.library.Library("symm_mem", "IMPL")
    for name, kernel in kernels.items():
        library.impl(name, kernel, "CPU")
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"symm_mem::{name}", "Meta"):
            library.impl(name, _SHAPES.get(name, _written), "Meta")
    return library


def _op(context: DistributedContext, reduce_op: str) -> str:
    """Our name of torch's reduction. An unknown one raises ValueError on all ranks. Collective."""
    found = _OPS.get(reduce_op)
    if found is None:
        error = ValueError(f"reduce_op is one of {', '.join(_OPS)}, not {reduce_op!r}")
        raise_on_all_ranks(context, "torch.ops.symm_mem", error)
        raise error
    return found


# -- sums ------------------------------------------------------------------------------------------


def _all_reduced(x: Any, reduce_op: str, group_name: str, out: Any = None) -> Any:
    context = context_of_group(group_name)
    op = _op(context, reduce_op)
    return all_reduce(x.detach(), op=op, out=None if out is None else out.detach(), context=context)


def _one_shot_all_reduce(x: Any, reduce_op: str, group_name: str) -> Any:
    return _all_reduced(x, reduce_op, group_name)


def _one_shot_all_reduce_out(x: Any, reduce_op: str, group_name: str, out: Any) -> Any:
    _all_reduced(x, reduce_op, group_name, out)
    return out


def _one_shot_all_reduce_copy(buffer: Any, x: Any, reduce_op: str, group_name: str) -> Any:
    """The sum of `x`: the buffer, through which torch's kernel goes, is not needed."""
    return _all_reduced(x, reduce_op, group_name)


def _one_shot_all_reduce_copy_out(
    buffer: Any, x: Any, reduce_op: str, group_name: str, out: Any
) -> Any:
    _all_reduced(x, reduce_op, group_name, out)
    return out


def _two_shot_all_reduce_(x: Any, reduce_op: str, group_name: str) -> Any:
    _all_reduced(x, reduce_op, group_name, x)
    return x


def _reduce_scatter_out(x: Any, group_name: str, split_last_dim: bool, output: Any) -> Any:
    context = context_of_group(group_name)
    axis = x.ndim - 1 if split_last_dim else 0
    reduce_scatter(x.detach(), axis=axis, out=output.detach(), context=context)
    return output


def _low_contention_reduce_scatter(x: Any, reduce_op: str, group_name: str) -> Any:
    context = context_of_group(group_name)
    return reduce_scatter(x.detach(), op=_op(context, reduce_op), context=context)


def _multi_root_tile_reduce(
    in_tiles: list[Any], out_tile: Any, roots: list[int], group_name: str, reduce_op: str = "sum"
) -> None:
    """The sum of every rank's `in_tiles[i]`, in `out_tile` of rank `roots[i]`. Collective.

    Raises on all ranks: ValueError for a root that is no rank or has two tiles, for another number
    of tiles than of roots, and where the root's `out_tile` has another shape or dtype.
    """
    context = context_of_group(group_name)
    op = _op(context, reduce_op)

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


# -- moves -----------------------------------------------------------------------------------------


def _low_contention_all_gather(x: Any, group_name: str) -> Any:
    return all_gather(x.detach(), context=context_of_group(group_name))


def _nvshmem_broadcast(x: Any, root: int, group_name: str) -> Any:
    broadcast(x.detach(), root=root, out=x.detach(), context=context_of_group(group_name))
    return x


def _nvshmem_all_to_all(x: Any, out: Any, group_name: str) -> Any:
    all_to_all(x.detach(), out=out.detach(), context=context_of_group(group_name))
    return out


def _all_to_all_vdev(
    x: Any, out: Any, in_splits: Any, out_splits_offsets: Any, group_name: str
) -> None:
    """Rows of `x` to all ranks: `in_splits[r]` of them, in order, to rank r. Collective.

    Rows that came stand at the start of `out`, by rank; its other rows stay. Row 0 of
    `out_splits_offsets` (2, ranks) becomes how many came from each rank, row 1 where they start.

    Raises on all ranks: ValueError for counts that are negative, or are not one for each rank, for
    more rows than a rank's `x` has, and where a rank's `out` has no room.
    """
    context = context_of_group(group_name)
    size = context.size

    def describe() -> tuple[list[int], int, int, list[int]]:
        return in_splits.tolist(), len(x), len(out), list(out_splits_offsets.shape)

    def check(specs: Sequence[Any]) -> list[list[int]]:
        table = [list(splits) for splits, *_ in specs]
        for rank, (splits, rows, room, shape) in enumerate(specs):
            if len(splits) != size or min(splits) < 0 or list(shape) != [2, size]:
                raise ValueError(
                    f"rank {rank}: expected in_splits of {size} counts and out_splits_offsets of "
                    f"2 x {size}, got {list(splits)} and {list(shape)}"
                )
            if sum(splits) > rows:
                raise ValueError(f"rank {rank} sends {sum(splits)} rows of an input of {rows}")
            coming = sum(other[0][rank] for other in specs)
            if coming > room:
                raise ValueError(f"rank {rank}: {coming} rows come, and out has room for {room}")
        return table

    table = context.agree("all_to_all_vdev", describe, check)
    sent, received = table[context.rank], [row[context.rank] for row in table]
    came = all_to_all(
        x.detach()[: sum(sent)], send_counts=sent, receive_counts=received, context=context
    )
    out.detach()[: len(came)].copy_(came)
    counts = torch.tensor(received, dtype=out_splits_offsets.dtype)
    out_splits_offsets[0].copy_(counts)
    out_splits_offsets[1].copy_(counts.cumsum(0) - counts)


def _nvshmem_put(x: Any, peer: int) -> None:
    rendezvous(x.detach()).put(x.detach(), peer)


def _nvshmem_get(x: Any, peer: int) -> None:
    rendezvous(x.detach()).get(x.detach(), peer)


def _get_remote_tensors(x: Any, group_name: str) -> list[Any]:
    handle = rendezvous(x.detach(), group_name)
    return [handle.get_remote_tensor(n, x.shape, x.dtype) for n in range(handle.world_size)]


# -- products --------------------------------------------------------------------------------------


def _fused_all_gather_matmul(
    a: Any, bs: list[Any], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[Any, list[Any]]:
    """All ranks' `a` along `gather_dim`, gathered once, and its product with each of `bs`."""
    gathered = all_gather(a.detach(), axis=gather_dim, context=context_of_group(group_name))
    return gathered if return_A else None, [gathered @ b.detach() for b in bs]


def _fused_matmul_reduce_scatter(
    a: Any, b: Any, reduce_op: str, scatter_dim: int, group_name: str
) -> Any:
    context = context_of_group(group_name)
    op = _op(context, reduce_op)
    return reduce_scatter(a.detach() @ b.detach(), op=op, axis=scatter_dim, context=context)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "one_shot_all_reduce": _one_shot_all_reduce,
    "one_shot_all_reduce_out": _one_shot_all_reduce_out,
    "one_shot_all_reduce_copy": _one_shot_all_reduce_copy,
    "one_shot_all_reduce_copy_out": _one_shot_all_reduce_copy_out,
    "two_shot_all_reduce_": _two_shot_all_reduce_,
    "two_shot_all_reduce_out": _one_shot_all_reduce_out,
    "reduce_scatter_out": _reduce_scatter_out,
    "_low_contention_reduce_scatter": _low_contention_reduce_scatter,
    "tile_reduce": _tile_reduce,
    "multi_root_tile_reduce": _multi_root_tile_reduce,
    "_low_contention_all_gather": _low_contention_all_gather,
    "nvshmem_broadcast": _nvshmem_broadcast,
    "nvshmem_all_to_all": _nvshmem_all_to_all,
    "all_to_all_vdev": _all_to_all_vdev,
    "nvshmem_put": _nvshmem_put,
    "nvshmem_get": _nvshmem_get,
    "get_remote_tensors": _get_remote_tensors,
    "fused_all_gather_matmul": _fused_all_gather_matmul,
    "fused_matmul_reduce_scatter": _fused_matmul_reduce_scatter,
}
_KERNELS = {name: collective_call(kernel) for name, kernel in _FUNCTIONS.items()}


# -- shapes for torch's compiler -------------------------------------------------------------------


def _written(*arguments: Any, **words: Any) -> None:
    """The shape of nothing: an operator that only writes into its arguments."""


def _first(x: Any, *_: Any) -> Any:
    return x


def _last(*arguments: Any) -> Any:
    return arguments[-1]


_SHAPES: dict[str, Callable[..., Any]] = {
    "one_shot_all_reduce": lambda x, *_: torch.empty_like(x),
    "one_shot_all_reduce_copy": lambda buffer, x, *_: torch.empty_like(x),
    "one_shot_all_reduce_out": _last,
    "one_shot_all_reduce_copy_out": _last,
    "two_shot_all_reduce_": _first,
    "two_shot_all_reduce_out": _last,
    "reduce_scatter_out": _last,
    "nvshmem_broadcast": _first,
    "nvshmem_all_to_all": lambda x, out, _: out,
    "memset32_": _first,
    "stream_write_value32_": _first,
}
