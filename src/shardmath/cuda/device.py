"""A CUDA device as one rank uses it: its primary context, which CuPy and torch share.

The context is retained until the process ends, so that memory that outlives a distributed context
can still be freed.
"""

from __future__ import annotations

from functools import cache, cached_property
from typing import Any

from shardmath.cuda.driver import beside_captures, bindings, call, status_of
from shardmath.errors import BackendUnavailable


class Device:
    """One CUDA device. `ordinal` is its index among those that this process sees.

    `name` is like "cuda:0", `arch` like "sm_90"; `processors` the number of its multiprocessors;
    `overlaps_launches` says whether a kernel can start before the one ahead of it has ended. Get it
    with `Device.of`.
    """

    def __init__(self, ordinal: int) -> None:
        call("cuInit", 0)
        count = call("cuDeviceGetCount")
        if not 0 <= ordinal < count:
            raise BackendUnavailable(
                f"device_id={ordinal}: this process sees {count} CUDA devices, numbered from 0"
            )
        self.ordinal = ordinal
        self.name = f"cuda:{ordinal}"  # as array libraries write it
        self.handle = call("cuDeviceGet", ordinal)
        self._context = call("cuDevicePrimaryCtxRetain", self.handle)
        self.context_address = int(self._context)
        attribute = bindings().CUdevice_attribute
        major = self.attribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
        minor = self.attribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
        self.spare_events: list[Any] = []  # events without timing, for reuse
        self.captures = False  # whether one of our own graphs is being captured
        self.captured_on: int | None = None  # the stream of an operation, if it is being captured
        self.arch = f"sm_{major}{minor}"
        self.overlaps_launches = major >= 9
        self.processors = self.attribute(attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)

    @staticmethod
    @cache
    def of(ordinal: int) -> Device:
        """The device, the same object every time. Raises BackendUnavailable when there is none."""
        return Device(ordinal)

    def __repr__(self) -> str:
        return f"Device({self.ordinal}, {self.arch})"

    def attribute(self, which: object) -> int:
        """The value of a `CUdevice_attribute`."""
        return int(call("cuDeviceGetAttribute", which, self.handle))

    @property
    def uuid(self) -> str:
        """The identifier of this GPU, unique on all hosts: 32 hexadecimal digits."""
        return bytes(call("cuDeviceGetUuid", self.handle).bytes).hex()

    def activate(self) -> None:
        """Make its context the calling thread's, as launches and allocations need."""
        if int(call("cuCtxGetCurrent")) != self.context_address:
            call("cuCtxSetCurrent", self._context)

    def zero(self, address: int, nbytes: int) -> None:
        """Set memory of the device to zero; waits for that, and for no other work."""
        self.fill(address, 0, nbytes)

    def fill(self, address: int, byte: int, nbytes: int) -> None:
        """Set all bytes of memory of the device; waits for that, and for no other work.

        Also while a stream is being captured.
        """
        self.activate()
        with beside_captures():
            call("cuMemsetD8Async", address, byte, nbytes, self._side)
            call("cuStreamSynchronize", self._side)

    def write(self, address: int, data: bytes) -> None:
        """Write to memory of the device; waits for that, and for no other work.

        Also while a stream is being captured.
        """
        self.activate()
        with beside_captures():
            call("cuMemcpyHtoDAsync", address, data, len(data), self._side)
            call("cuStreamSynchronize", self._side)

    @cached_property
    def _side(self) -> Any:
        """A stream that waits for no other: work on users' streams may wait for a peer."""
        return call("cuStreamCreate", 1)

    def record_all(self) -> Any:
        """An event behind all work that this process has put on any stream of the device.

        The caller gives it back to `spare_events`. Not to be called while a stream is being
        captured: that would end the capture.
        """
        self.activate()
        try:
            event = self.spare_events.pop()
        except IndexError:
            event = call("cuEventCreate", 2)
        call("cuCtxRecordEvent", self._context, event)
        return event

    def mark_behind_all(self, address: int) -> None:
        """Have the device set a 32-bit word of the host's memory to 1, after all it has been given.

        The word is at `address` for the device. Not to be called while a stream is being captured.
        """
        event = self.record_all()
        call("cuStreamWaitEvent", self._marking, event, 0)
        call("cuStreamWriteValue32", self._marking, address, 1, 0)
        self.spare_events.append(event)

    @cached_property
    def _marking(self) -> Any:
        """A stream for marks, which wait for all others, and for which nothing must wait."""
        return call("cuStreamCreate", 1)

    def reached(self, event: Any) -> bool:
        """Whether the work before `event` is done. Also while a stream is being captured."""
        self.activate()
        with beside_captures():
            status, _ = status_of("cuEventQuery", event)
        return status != int(bindings().CUresult.CUDA_ERROR_NOT_READY)

    def synchronize(self) -> None:
        """Wait until the device has done all that this process asked of it."""
        self.activate()
        call("cuCtxSynchronize")
