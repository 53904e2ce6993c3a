"""Fences, which tell when a device is done with its work, and reuse that waits for them."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Generic, TypeVar

from shardmath.cuda import stream as streams
from shardmath.cuda.device import Device

T = TypeVar("T")


class DeviceFence:
    """An event behind all streams of a device's context."""

    _event: Any = None  # for `__del__` after an exception in `__init__`

    def __init__(self, device: Device) -> None:
        self._device = device
        self._passed = False
        self._event = device.record_all()

    def __del__(self) -> None:
        if self._event is not None:
            self._device.spare_events.append(self._event)

    @classmethod
    def behind(cls, device: Device) -> DeviceFence | None:
        """A fence behind all work of the device; None while a stream is being captured."""
        return None if streams.any_capturing(device) else cls(device)

    def passed(self) -> bool:
        """Whether all work before it is done. Never blocks."""
        self._passed = self._passed or self._device.reached(self._event)
        return self._passed


class DeferredReuse(Generic[T]):
    """Resources that the host has left while kernels may still use them, which are reused later.

    `leave` only appends to a list: the garbage collector may call it during a capture, when no
    fence can be set. Fences are set by `free`.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        # Reentrant: after an exception before its release this thread must still get it.
        self._lock = threading.RLock()
        self._left: deque[T] = deque()
        self._behind: list[tuple[DeviceFence, list[T]]] = []
        self.leave = self._left.append

    def free(self) -> list[T]:
        """The resources that no kernel uses any more, each once: a fence behind them has passed."""
        with self._lock:
            count = len(self._left)  # more may come at any time, for the next fence
            fence = DeviceFence.behind(self._device) if count else None
            if fence is not None:
                self._behind.append((fence, [self._left.popleft() for _ in range(count)]))
            free: list[T] = []
            waiting = []
            for fence, things in self._behind:
                if fence.passed():
                    free += things
                else:
                    waiting.append((fence, things))
            self._behind = waiting
            return free
