"""The tables of a rendezvous, where kernels read them."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardmath.cuda.driver import call

if TYPE_CHECKING:
    from shardmath.symmetric.heap import Buffer, Heap
    from shardmath.symmetric.team import Team

__all__ = ["DeviceTables"]

Table: TypeAlias = NDArray[np.uint64]


class DeviceTables:
    """The addresses of all ranks' allocations and pads, in memory of the device."""

    def __init__(self, heap: Heap, team: Team, buffers: Table, pads: Table) -> None:
        self._kept: list[Buffer] = []
        self.buffers = self._on_device(heap, team, buffers.tobytes())
        self.pads = self._on_device(heap, team, pads.tobytes())
        self.arguments: dict[float | None, int] = {}  # SymmetricMemory, by its time-out

    def argument(self, heap: Heap, team: Team, packed: bytes, timeout: float | None) -> int:
        """Where the struct `packed` lies, put there when first asked for."""
        if timeout not in self.arguments:
            self.arguments[timeout] = self._on_device(heap, team, packed)
        return self.arguments[timeout]

    def _on_device(self, heap: Heap, team: Team, data: bytes) -> int:
        buffer = heap.allocate(len(data))
        self._kept.append(buffer)
        team.device.activate()
        call("cuMemcpyHtoD", buffer.block.address, data, len(data))
        return buffer.block.address
