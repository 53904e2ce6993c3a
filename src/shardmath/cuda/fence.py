"""When a device is done with what it was given: fences, and what may be used again behind them."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Generic, TypeVar

from shardmath.cuda import stream as streams
from shardmath.cuda.device import Device

T = TypeVar("T")


class DeviceFence:
    """An event behind all streams of a device's context."""

    _event: Any = None  # also of one that an exception has left half made

    def __init__(self, device: Device) -> None:
        self._device = device
        self._passed = False
        self._event = device.record_all()

    def __del__(self) -> None:
        if self._event is not None:
            self._device.spare_events.append(self._event)

    @classmethod
    def behind(cls, device: Device) -> DeviceFence | None:
        """A fence behind what the device has been asked to do; None while that is captured."""
        return None if streams.any_capturing(device) else cls(device)

    def passed(self) -> bool:
        """Whether all of it is done. Never blocks."""
        self._passed = self._passed or self._device.reached(self._event)
        return self._passed


class DeferredReuse(Generic[T]):
    """Things that the host has left while kernels may still use them. Nobody waits for these.

    `leave` only appends to a list: the garbage collector may call it in the middle of a capture,
    when no fence can be set. So fences are set when it is asked what is free again.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        # An exception that strikes before its release must not keep this thread from going on.
        self._lock = threading.RLock()
        self._left: deque[T] = deque()
        self._behind: list[tuple[DeviceFence, list[T]]] = []
        self.leave = self._left.append

    def free(self) -> list[T]:
        """Things that no kernel uses any more, once: those left before a fence that has passed."""
        with self._lock:
            count = len(self._left)  # more may come at any time: the next fence is theirs
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
