"""Operators that put an array with a signal, whose value a peer waits for.

A signal is a word of 64 bits on symmetric memory: that with which `sigpad` begins, or the first of
the signal pad of the array that is put. See `shardmath.handles.words`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardmath.handles.rendezvous import handle_of
from shardmath.handles.words import Word, word_at


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
    "nvshmem_put_with_signal": _nvshmem_put_with_signal,
    "nvshmem_wait_for_signal": _nvshmem_wait_for_signal,
    "nccl_put_with_signal": _nccl_put_with_signal,
    "nccl_wait_for_signal": _nccl_wait_for_signal,
}
