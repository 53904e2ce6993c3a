"""The GPUs of a context whose ranks are on several hosts: their processes meet, not their kernels.

No kernel can write the words of a rank without an address. So what a team does on a stream is done
by the host, once the stream has come there: every call waits, and none can be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardmath.symmetric.heap import Buffer
from shardmath.symmetric.team import Team

__all__ = ["FarTeam"]


class FarTeam(Team):
    """See Team. Of `pads` those of ranks on other hosts are 0."""

    def another(self, own: Buffer, pads: Sequence[int], channels: int) -> FarTeam:
        """See Team."""
        return FarTeam(self.device, self._board, own, pads, channels=channels)

    def barrier(self, stream: int, *, channel: int = 0, timeout: float | None = None) -> None:
        """Wait for `stream`, then for every rank: what was written before, all see after."""
        self._require(channel)
        self.synchronize(stream)
        self._board.barrier("barrier", timeout)

    def put_signal(self, dst: int, stream: int, *, channel: int = 0) -> None:
        """Raise NotImplementedError: a handle's signals serve."""
        raise self._no_kernel("put_signal")

    def wait_signal(
        self, src: int, stream: int, *, channel: int = 0, timeout: float | None = None
    ) -> None:
        """Raise NotImplementedError: a handle's signals serve."""
        raise self._no_kernel("wait_signal")

    def _no_kernel(self, name: str) -> NotImplementedError:
        return NotImplementedError(
            f"rank {self.rank}: {name} of a team is a kernel that writes peers' memory, and some "
            "ranks are on other hosts; use the handle of a rendezvous"
        )
