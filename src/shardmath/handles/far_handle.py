"""The handle on memory of GPUs of several hosts: copies, signals and barriers on the stream.

All is as on one host but for kernels, which would find no addresses: none can be given the handle.
Signals travel beside the memory: `get_signal_pad` does not show them.
"""

from __future__ import annotations

from typing import NoReturn

from shardmath.handles.device_handle import DeviceSymmetricMemory

__all__ = ["FarDeviceSymmetricMemory"]


class FarDeviceSymmetricMemory(DeviceSymmetricMemory):
    """A handle whose memory is on GPUs of several hosts. See SymmetricMemory."""

    def _packed(self, timeout: float | None) -> NoReturn:
        """Raise NotImplementedError: a kernel would find no addresses."""
        raise NotImplementedError(
            "some ranks are on other hosts, where a kernel of this GPU cannot write: use put, get "
            "and the signals of the handle, or a handle of the ranks of one host"
        )
