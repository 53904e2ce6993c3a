"""The handle on memory of GPUs of several hosts: copies and barriers on the stream.

Signals are the host's: one is sent once the current stream has done what came before it, and a wait
for one blocks the caller. They travel beside the memory: `get_signal_pad` does not show them.
"""

from __future__ import annotations

from typing import NoReturn

from shardmath.symmetric.device_handle import DeviceSymmetricMemory
from shardmath.symmetric.handle import SymmetricMemory

__all__ = ["FarDeviceSymmetricMemory"]


class FarDeviceSymmetricMemory(DeviceSymmetricMemory):
    """A handle whose memory is on GPUs of several hosts. See SymmetricMemory."""

    def _packed(self, timeout: float | None) -> NoReturn:
        """Raise NotImplementedError: a kernel would find no addresses."""
        raise NotImplementedError(
            "some ranks are on other hosts, where a kernel of this GPU cannot write: use put, get "
            "and the signals of the handle, or a handle of the ranks of one host"
        )

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Wait for the current stream, then signal `dst_rank`."""
        self._ready(channel, timeout_ms)
        self.synchronize()
        SymmetricMemory.put_signal(self, dst_rank, channel, timeout_ms)

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Wait for a signal of `src_rank`, and consume it. Blocks the caller."""
        self._ready(channel, timeout_ms)
        self.synchronize()  # the source may overwrite, from now on, what the stream still reads
        SymmetricMemory.wait_signal(self, src_rank, channel, timeout_ms)
