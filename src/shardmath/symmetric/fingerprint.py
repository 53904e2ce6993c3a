"""Fingerprints of arrays, by which repeated calls are recognised.

A program makes the same few calls for ever. Arrays of the same library, type, shape, strides and
device, at the same address and in a heap block of the same extent, have the same fingerprint:
whatever a call found out about such arrays still holds. No element is read.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from shardmath.arrays import Library, library_of
from shardmath.arrays.spec import ArraySpec
from shardmath.context import Context
from shardmath.symmetric.heap import Block

__all__ = ["fingerprint", "inspect"]

Inspected = tuple[Library, ArraySpec, int, Block | None]  # and the address, and the block there


def inspect(context: Context, x: Any) -> Inspected | None:
    """What identifies an array to a repeated call. Local.

    None where the call has to check its arguments: for what is no array, is lazy, was freed, or may
    be under a gradient.
    """
    try:
        library = library_of(x)
        identity = library.identity(x)
    except (ValueError, RuntimeError):
        return None
    if identity is None:
        return None
    spec, address = identity
    block = context.heap.find(address if spec.size else library.anchor(x))
    return None if block is not None and block.freed else (library, spec, address, block)


def fingerprint(context: Context, *arrays: Any) -> tuple[Hashable, ...] | None:
    """Equal for arrays that look and lie alike; it refers to none of them. Local.

    None where `inspect` returns None for one of them, or one lies elsewhere than where this rank
    computes. An array may be None.
    """
    device = "cpu" if context.team is None else context.team.device.name
    found: list[Hashable] = []
    for x in arrays:
        if x is None:
            found.append(None)
            continue
        inspected = inspect(context, x)
        if inspected is None or inspected[1].device != device:
            return None
        _, spec, address, block = inspected
        found += spec, address
        if block is not None:
            found += block.address, block.nbytes
    return tuple(found)
