"""Copies of a GPU's memory that compiled code puts on the default stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardmath.base.compiled import extension
from shardmath.cuda.device import Device

Copy = Callable[[int, int, int], None]  # of a target, a source and a number of bytes


def copier(device: Device, otherwise: Copy) -> tuple[Any, ...] | Copy:
    """How direct.c copies memory of the device: the addresses of the driver's functions that copy
    and that tell the current context, the context that must be current, the stream, and the
    function that copies in all other cases. That function alone where launch.c was not built.
    """
    built = extension("shardmath.cuda._launch")
    if built is None or built.COPIES is None:
        return otherwise
    return (*built.COPIES, device.context_address, 0, otherwise)
