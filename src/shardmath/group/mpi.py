"""The ranks of an MPI communicator, through the user's mpi4py.

Only buffers travel: mpi4py's object calls would unpickle what a peer sends. Every wait polls a
non-blocking request, so that it can end at a deadline.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from shardmath.base.caller import who
from shardmath.base.config import Settings
from shardmath.errors import BootstrapError
from shardmath.group.base import GatheringGroup
from shardmath.group.mpi_process import bound_end

_SPINS = 1000  # polls without a pause: most exchanges end within them
_PAUSE = 0.0005


class MPIProcessGroup(GatheringGroup):
    """The ranks of an mpi4py communicator. Waits end after `timeout` seconds.

    Raises ValueError for the null communicator, and for one between two groups.
    """

    def __init__(self, mpi_comm: Any, *, timeout: float | None = None) -> None:
        if not mpi_comm:
            raise ValueError(
                "this process is in no part of the communicator, which is MPI.COMM_NULL here: "
                "only its members may call"
            )
        if mpi_comm.is_inter:
            raise ValueError("a communicator between two groups has no ranks: pass its Merge()")
        super().__init__(int(mpi_comm.rank), int(mpi_comm.size))
        self._comm = mpi_comm
        self._mpi: Any = sys.modules["mpi4py.MPI"]
        self._timeout = Settings.from_environment().startup_timeout if timeout is None else timeout
        bound_end()

    def allgather_bytes(self, data: bytes) -> list[bytes]:
        """The `data` of every rank, in the order of the ranks. Collective; sizes may differ."""
        import numpy as np

        sizes = np.zeros(self.nranks, np.int64)
        own = np.array([len(data)], np.int64)
        self._wait(self._comm.Iallgather(own, sizes), "gather of sizes")
        gathered = bytearray(int(sizes.sum()))
        counts = sizes.tolist()
        byte = self._mpi.BYTE
        self._wait(self._comm.Iallgatherv([data, byte], [gathered, counts, byte]), "gather")
        ends = np.cumsum(sizes).tolist()
        return [bytes(gathered[end - count : end]) for end, count in zip(ends, counts, strict=True)]

    def duplicate(self) -> Any:
        """A communicator of the same ranks, for traffic that meets no other's. Collective."""
        return self._comm.Dup()

    def split(self, color: int | None, *, key: int = 0) -> MPIProcessGroup | None:
        """The group of the ranks that pass the same `color`; None if that is None. Collective."""
        part = self._comm.Split(self._mpi.UNDEFINED if color is None else color, key)
        return None if color is None else MPIProcessGroup(part, timeout=self._timeout)

    def _wait(self, request: Any, what: str) -> None:
        deadline = time.monotonic() + self._timeout
        polls = 0
        while not request.Test():
            polls += 1
            if polls < _SPINS:
                continue
            if time.monotonic() >= deadline:
                raise BootstrapError(
                    f"{who(self.rank)}: a {what} of "
                    f"{self.nranks} ranks over MPI did not complete in {self._timeout:g} s: does "
                    "every rank call shardmath.initialize()? SHARDMATH_STARTUP_TIMEOUT sets the "
                    "limit"
                )
            time.sleep(_PAUSE)
