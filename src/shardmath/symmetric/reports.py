"""Host memory in which a team's kernels report whom they waited for in vain.

Words that a team has left go to another team only when the device has done all that it had been
asked to do by then, so that a late kernel reports to nobody else. The driver never gets them back:
that would wait for the device.
"""

from __future__ import annotations

import threading
import weakref
from functools import cache

import numpy as np
import numpy.typing as npt

from shardmath.cuda.device import Device
from shardmath.cuda.driver import call
from shardmath.cuda.fence import DeferredReuse

__all__ = ["Report", "report_of"]


class Report:
    """`words` that the device writes, at `address` for the device; zero at first."""

    def __init__(self, pool: _Pool, memory: _Memory) -> None:
        self.words: npt.NDArray[np.uint64] = np.asarray(memory)
        self.words[:] = 0
        self.address = memory.address
        weakref.finalize(self, pool.left.leave, memory).atexit = False


def report_of(device: Device, count: int) -> Report:
    """A report of `count` words of 64 bits."""
    return _pool(device, count).take()


class _Memory:
    """Pinned words, for NumPy and for the device; kept for the life of the process."""

    def __init__(self, device: Device, count: int) -> None:
        device.activate()
        pinned = int(call("cuMemHostAlloc", 8 * count, 0x01))  # portable: valid in every context
        self.address = int(call("cuMemHostGetDevicePointer", pinned, 0))
        self.__array_interface__ = {
            "shape": (count,),
            "typestr": "<u8",
            "data": (pinned, False),
            "version": 3,
        }


class _Pool:
    """The reports of one length on one device."""

    def __init__(self, device: Device, count: int) -> None:
        self._device = device
        self._count = count
        self._lock = threading.Lock()
        self._free: list[_Memory] = []
        self.left: DeferredReuse[_Memory] = DeferredReuse(device)

    def take(self) -> Report:
        """A report that no kernel of another team writes to."""
        with self._lock:
            self._free += self.left.free()
            memory = self._free.pop() if self._free else _Memory(self._device, self._count)
            return Report(self, memory)


@cache
def _pool(device: Device, count: int) -> _Pool:
    return _Pool(device, count)
