"""Operators that move elements as they are: gather, broadcast, all to all, and memory of peers.

Some put an array with a signal, whose value a peer waits for. A signal is a word of 64 bits on
symmetric memory: that with which `sigpad` begins, or the first of the signal pad of the array that
is put. See `shardmath.handles.words`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardmath.collectives import all_gather, all_to_all, broadcast
from shardmath.handles.rendezvous import context_of_group, handle_of, rendezvous
from shardmath.handles.words import Word, word_at


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


# -- with signals ---------------------------------------------------------------------------------


def _nvshmem_put_with_signal(x: Any, sigpad: Any, signal: int, peer: int) -> None:
    _put_with_signal(x, word_at(sigpad.detach()), signal, peer)


def _nvshmem_wait_for_signal(sigpad: Any, signal: int, peer: int) -> None:
    """Wait until `sigpad` is `signal`, which `peer` sets."""
    word_at(sigpad.detach()).wait(signal, peer)


def _nccl_put_with_signal(x: Any, signal: int, peer: int) -> None:
    _put_with_signal(x, _first_word(x), signal, peer)


def _nccl_wait_for_signal(x: Any, signal: int) -> None:
    """Wait until the signal of the array `x` is at least `signal`, whoever sets it."""
    _first_word(x).wait(signal, None, at_least=True)


def _first_word(x: Any) -> Word:
    """The first word of the signal pads of the array `x`."""
    handle = handle_of(x.detach())
    return word_at(handle.get_signal_pad(handle.rank))


def _put_with_signal(x: Any, word: Word, signal: int, peer: int) -> None:
    if not 0 <= signal < 1 << 64:
        raise ValueError(f"a signal's value has 64 bits, which {signal} is beyond")
    handle_of(x.detach()).put(x.detach(), peer)
    word.set(peer, signal)


KERNELS: dict[str, Callable[..., Any]] = {
    "_low_contention_all_gather": _low_contention_all_gather,
    "nvshmem_broadcast": _nvshmem_broadcast,
    "nvshmem_all_to_all": _nvshmem_all_to_all,
    "nvshmem_put": _put,
    "nvshmem_get": _get,
    "nccl_put": _put,
    "nccl_get": _get,
    "get_remote_tensors": _get_remote_tensors,
    "nvshmem_put_with_signal": _nvshmem_put_with_signal,
    "nvshmem_wait_for_signal": _nvshmem_wait_for_signal,
    "nccl_put_with_signal": _nccl_put_with_signal,
    "nccl_wait_for_signal": _nccl_wait_for_signal,
}
