"""Operators that move elements as they are: gather, broadcast, all to all, and memory of peers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardmath.collectives import all_gather, all_to_all, broadcast
from shardmath.handles.rendezvous import context_of_group, handle_of, rendezvous


def _low_contention_all_gather(x: Any, group_name: str) -> Any:
    return all_gather(x.detach(), context=context_of_group(group_name))


def _nvshmem_broadcast(x: Any, root: int, group_name: str) -> Any:
    broadcast(x.detach(), root=root, out=x.detach(), context=context_of_group(group_name))
    return x


def _nvshmem_all_to_all(x: Any, out: Any, group_name: str) -> Any:
    all_to_all(x.detach(), out=out.detach(), context=context_of_group(group_name))
    return out


def _put(x: Any, peer: int) -> None:
    handle_of(x.detach()).put(x.detach(), peer)


def _get(x: Any, peer: int) -> None:
    handle_of(x.detach()).get(x.detach(), peer)


def _get_remote_tensors(x: Any, group_name: str) -> list[Any]:
    handle = rendezvous(x.detach(), group_name)
    return [handle.get_remote_tensor(n, x.shape, x.dtype) for n in range(handle.world_size)]


KERNELS: dict[str, Callable[..., Any]] = {
    "_low_contention_all_gather": _low_contention_all_gather,
    "nvshmem_broadcast": _nvshmem_broadcast,
    "nvshmem_all_to_all": _nvshmem_all_to_all,
    "nvshmem_put": _put,
    "nvshmem_get": _get,
    "nccl_put": _put,
    "nccl_get": _get,
    "get_remote_tensors": _get_remote_tensors,
}
