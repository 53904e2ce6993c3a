"""Copies of a GPU's memory that compiled code puts on the default stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardmath.base.compiled import extension
from shardmath.cuda.device import Device

Copy = Callable[[int, int, int], None]  # (target, source, bytes)


def copier(device: Device, otherwise: Copy) -> tuple[Any, ...] | Copy:
    """How direct.c copies memory of the device: addresses of the driver's functions, the context
    that must be current, the stream, and a function for all other cases; or that function.
    """
    built = extension("shardmath.cuda._launch")
    if built is None or built.COPIES is None:
        return otherwise
    return (*built.COPIES, device.context_address, 0, otherwise)
