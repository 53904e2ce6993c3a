"""The user's stream: which one is current in their array library, and what an argument means.

A stream is handled here as its driver handle, an int; 0 is the default stream.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from shardmath.arrays import libraries
from shardmath.cuda.device import Device
from shardmath.cuda.driver import beside_captures, call, status_of
from shardmath.cuda.kernel import ReadyLaunch
from shardmath.errors import CudaError

_DEFAULT = (0, 1)  # handles of the default stream, which cannot be captured


def resolve_stream(stream: Any, library: str, device: Device) -> int:
    """The stream that an argument means; None is the current one of the library of that name.

    An int is a driver handle; other objects say theirs by `__cuda_stream__`, as cuda.core's,
    torch's and CuPy's do, or by `cuda_stream` or `ptr` in older releases. Raises TypeError for
    anything else, ValueError for a stream of another device.
    """
    if stream is None:
        return libraries()[library].stream(device.ordinal)
    handle = _handle(stream)
    # The default streams are those of whichever device is current; one that is being captured may
    # not be asked.
    if handle in (0, 1, 2):
        return handle
    if capturing(handle):
        device.captured_on = handle
    else:
        device.activate()
        home = int(call("cuStreamGetDevice", handle))
        if home != int(device.handle):
            raise ValueError(
                f"the stream belongs to CUDA device {home}, and this rank computes on device "
                f"{device.ordinal}"
            )
    return handle


def capturing(stream: int) -> bool:
    """Whether what is launched on `stream` is being captured into a CUDA graph."""
    return stream not in _DEFAULT and int(call("cuStreamIsCapturing", stream)) != 0


def any_capturing(device: Device) -> bool:
    """Whether one of the calling thread's current streams is being captured.

    And whether the stream is that was given to the operation under way, one of our own graphs, or
    any stream that waits for the default stream: asked of that, the driver fails.
    """
    if device.captures:
        return True
    device.activate()
    given_one = device.captured_on
    if given_one is not None:
        status, state = status_of("cuStreamIsCapturing", given_one)
        if not status and int(state):
            return True
        device.captured_on = None  # the capture has ended; the stream may even be gone
    handles = {0, *(library.stream(device.ordinal) for library in libraries().values())}
    answers = [status_of("cuStreamIsCapturing", handle) for handle in handles]
    return any(status or int(state) for status, state in answers)


def new_stream(owner: object, device: Device, *, first: bool = False) -> Any:
    """A stream that does not wait for the default one, and goes when it is done and `owner` gone.

    Where it is to be `first`, its kernels come before what is left of kernels of other streams.
    """
    device.activate()
    greatest = call("cuCtxGetStreamPriorityRange")[1] if first else 0
    stream = call("cuStreamCreateWithPriority", 1, greatest)
    weakref.finalize(owner, _destroy, "cuStreamDestroy", stream).atexit = False
    return stream


def new_event(owner: object) -> Any:
    """An event without times, which goes with `owner`. The device's context is the thread's."""
    event = call("cuEventCreate", 2)
    weakref.finalize(owner, _destroy, "cuEventDestroy", event).atexit = False
    return event


class SideStream:
    """A second stream, forked from the user's and joined to it again."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream = new_stream(self, device)
        self._event = new_event(self)

    @contextmanager
    def forked(self, stream: int) -> Iterator[Any]:
        """Its handle: it starts where `stream` is, which goes on after both are done."""
        self._device.activate()
        call("cuEventRecord", self._event, stream)
        call("cuStreamWaitEvent", self._stream, self._event, 0)
        yield self._stream
        call("cuEventRecord", self._event, self._stream)
        call("cuStreamWaitEvent", stream, self._event, 0)


class StreamOrder:
    """Orders sections of work on several streams that use the same words or memory.

    A section waits for the one before, on whichever stream that was. What is captured into a CUDA
    graph waits for what was captured before it into the same graph, and for nothing else: whoever
    replays the graph orders that.
    """

    def __init__(self, device: Device) -> None:
        device.activate()
        self._device = device
        self._done = new_event(self)  # see `_mark`
        self._stream: int | None = None  # of the last section
        self.captured = False  # whether a CUDA graph has ever been told of such work
        self._last_captured: tuple[int, int] | None = None  # the capture, and the stream in it
        self._captured_done: Any = None  # an event of that capture

    def section(self, stream: int) -> OrderedSection:
        """A section: what is launched on `stream` within comes after all earlier sections.

        The device's context is the calling thread's within.
        """
        return OrderedSection(self, stream)

    def put(self, launch: ReadyLaunch, stream: int) -> None:
        """Put one launch on `stream`, as a section of its own."""
        begun = self._begin(stream)
        launch.put(stream)
        if begun:
            self._end(stream)
        else:
            self._end_captured(stream)

    def continues(self, stream: int) -> bool:
        """Whether what is put on `stream` follows the last section as it is: no event is needed."""
        return stream == self._stream and stream in _DEFAULT

    def wait(self) -> None:
        """Wait, on the host, until the last section has ended; also while a stream captures."""
        self._device.activate()
        if self._stream in _DEFAULT:
            self._mark(self._stream)
        with beside_captures():  # memory of a lane may grow for what is captured on another stream
            call("cuEventSynchronize", self._done)

    def _begin(self, stream: int) -> bool:
        """Whether it is to be ended: false for what is captured."""
        self._device.activate()
        if capturing(stream):
            self.captured = True
            self._device.captured_on = None  # nobody asks before the next operation
            self._begin_captured(stream)
            return False
        if self._stream not in (None, stream):
            if self._stream in _DEFAULT:
                self._mark(self._stream)
            call("cuStreamWaitEvent", stream, self._done, 0)
        return True

    def _end(self, stream: int) -> None:
        if stream not in _DEFAULT:
            self._mark(stream)
        self._stream = stream

    def _begin_captured(self, stream: int) -> None:
        """Let what comes on `stream` follow the last section of the capture that it belongs to.

        Its streams have been forked from one another, and may wait for each other's events.
        """
        if self._last_captured is not None:
            capture, last = self._last_captured
            if last != stream and capture == _capture_of(stream):
                call("cuStreamWaitEvent", stream, self._captured_done, 0)

    def _end_captured(self, stream: int) -> None:
        """Remember where in the capture the section has ended. It waits for no earlier capture."""
        if self._captured_done is None:
            self._captured_done = new_event(self)
        call("cuEventRecord", self._captured_done, stream)
        self._last_captured = _capture_of(stream), stream

    def _mark(self, stream: int | None) -> None:
        """Let the event say when the last section has ended.

        A stream may be gone when the next section comes on another: its event is recorded at once.
        The default stream stays, and most programs use no other: there it is done when asked for.
        """
        call("cuEventRecord", self._done, stream)


class OrderedSection:
    """See StreamOrder. `captured`: what is launched within goes into a graph of the user's."""

    __slots__ = ("_order", "_stream", "captured")

    def __init__(self, order: StreamOrder, stream: int) -> None:
        self._order, self._stream = order, stream

    def __enter__(self) -> OrderedSection:
        self.captured = not self._order._begin(self._stream)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return
        if self.captured:
            self._order._end_captured(self._stream)
        else:
            self._order._end(self._stream)


def _capture_of(stream: int) -> int:
    """The number of the capture that `stream` takes part in; no other has it."""
    return int(call("cuStreamGetCaptureInfo", stream)[1])


def _destroy(function: str, handle: Any) -> None:
    with suppress(CudaError), beside_captures():
        call(function, handle)


def _handle(stream: Any) -> int:
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        version, handle = protocol() if callable(protocol) else protocol
        if version == 0:
            return int(handle)
    for name in ("cuda_stream", "ptr"):
        handle = getattr(stream, name, None)
        if isinstance(handle, int):
            return handle
    raise TypeError(
        "stream is None, an int, or an object with __cuda_stream__ (of torch, cupy or cuda.core), "
        f"not a {type(stream).__module__}.{type(stream).__qualname__}"
    )
