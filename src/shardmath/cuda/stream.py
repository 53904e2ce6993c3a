"""Streams: the user's, ours beside it, and the order of work on several.

A stream is given by its driver handle, an int; 0 is the default stream.
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
    """The stream that an argument means; None is the current one of the array library `library`.

    An int is a driver handle; other objects say theirs by `__cuda_stream__`, as cuda.core's,
    torch's and CuPy's do, or by `cuda_stream` or `ptr` in older releases. Raises TypeError for
    anything else, ValueError for a stream of another device.
    """
    if stream is None:
        return libraries()[library].stream(device.ordinal)
    handle = _handle(stream)
    # The default streams belong to the current device. A stream that is being captured must not be
    # asked for its device.
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
    """Whether a stream is being captured, as far as that can be found out.

    This looks at our own graphs, at the stream that was given to the operation under way, at the
    current streams of array libraries, and at the default stream: the driver reports an error for
    that while a stream that waits for it is being captured.
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
    """A stream that does not wait for the default one, destroyed after `owner` and its work.

    `first`: blocks of its kernels are scheduled before those of other streams.
    """
    device.activate()
    greatest = call("cuCtxGetStreamPriorityRange")[1] if first else 0
    stream = call("cuStreamCreateWithPriority", 1, greatest)
    weakref.finalize(owner, _destroy, "cuStreamDestroy", stream).atexit = False
    return stream


def new_event(owner: object) -> Any:
    """An event without timing, destroyed with `owner`. The device's context must be current."""
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
        """The handle of the second stream: it starts where `stream` is, which then waits for it."""
        self._device.activate()
        call("cuEventRecord", self._event, stream)
        call("cuStreamWaitEvent", self._stream, self._event, 0)
        yield self._stream
        call("cuEventRecord", self._event, self._stream)
        call("cuStreamWaitEvent", stream, self._event, 0)


class StreamOrder:
    """Orders sections of work on several streams that use the same words or memory.

    A section waits for the one before, whichever stream that was on. A section that is captured
    into a CUDA graph waits only for sections captured before it into the same graph: the user of
    the graph orders its launches.
    """

    def __init__(self, device: Device) -> None:
        device.activate()
        self._device = device
        self._done = new_event(self)  # see `_mark`
        self._stream: int | None = None  # the stream of the last section
        self.captured = False  # whether a section was ever captured
        self._last_captured: tuple[int, int] | None = None  # the capture, and the stream in it
        self._captured_done: Any = None  # the event behind that section

    def section(self, stream: int) -> OrderedSection:
        """A `with` whose launches on `stream` come after all earlier sections.

        It makes the device's context current.
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
        """Whether work on `stream` follows the last section without an event."""
        return stream == self._stream and stream in _DEFAULT

    def wait(self) -> None:
        """Wait, on the host, until the last section has ended; also while a stream captures."""
        self._device.activate()
        if self._stream in _DEFAULT:
            self._mark(self._stream)
        with beside_captures():  # another stream may be being captured
            call("cuEventSynchronize", self._done)

    def _begin(self, stream: int) -> bool:
        """Begin a section; False if it is captured, for `_end_captured` to end."""
        self._device.activate()
        if capturing(stream):
            self.captured = True
            self._device.captured_on = None  # the next operation sets it again
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
        """Let work on `stream` follow the last section of the same capture.

        The streams of a capture are forked from one another, and may wait for each other's events.
        """
        if self._last_captured is not None:
            capture, last = self._last_captured
            if last != stream and capture == _capture_of(stream):
                call("cuStreamWaitEvent", stream, self._captured_done, 0)

    def _end_captured(self, stream: int) -> None:
        """Remember where in the capture the section ends."""
        if self._captured_done is None:
            self._captured_done = new_event(self)
        call("cuEventRecord", self._captured_done, stream)
        self._last_captured = _capture_of(stream), stream

    def _mark(self, stream: int | None) -> None:
        """Record the event behind the last section.

        A user's stream may be gone when the next section comes on another one, so its event is
        recorded at once. The default stream stays, and most programs use no other: its event is
        recorded only when needed.
        """
        call("cuEventRecord", self._done, stream)


class OrderedSection:
    """See StreamOrder. `captured`: the section becomes part of a graph of the user's."""

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
    """The unique number of the capture that `stream` takes part in."""
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
