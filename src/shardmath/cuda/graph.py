"""Launches that are captured once as a CUDA graph and then launched as one."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

from shardmath.cuda.device import Device
from shardmath.cuda.driver import beside_captures, bindings, call
from shardmath.errors import CudaError


class Graph:
    """The launches of `launches(stream)` as one, which can be put on any stream, often.

    The caller keeps what the launches use, until the last launch has ended. The graph itself may be
    dropped before: the driver frees it after that launch.
    """

    def __init__(self, device: Device, launches: Callable[[int], None]) -> None:
        """Raises what `launches` raises. Nothing is launched yet."""
        device.activate()
        stream = _stream(device)
        with beside_captures():
            relaxed = bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            # An exception, also one between two statements, leaves no capture open.
            try:
                call("cuStreamBeginCapture", stream, relaxed)
                device.captures = True
                launches(int(stream))
                graph = call("cuStreamEndCapture", stream)
                device.captures = False
            except BaseException:
                device.captures = False
                with suppress(CudaError):  # there may be none
                    call("cuGraphDestroy", call("cuStreamEndCapture", stream))
                raise
            try:
                self._graph = call("cuGraphInstantiate", graph, 0)
            finally:
                call("cuGraphDestroy", graph)
        weakref.finalize(self, _destroy, self._graph).atexit = False

    def launch(self, stream: int) -> None:
        """Put all of it on `stream`. The device's context must be the calling thread's."""
        call("cuGraphLaunch", self._graph, stream)


def _destroy(graph: Any) -> None:
    with suppress(CudaError), beside_captures():
        call("cuGraphExecDestroy", graph)


@cache
def _stream(device: Device) -> Any:
    """The stream on which this process captures; nothing ever runs on it."""
    return call("cuStreamCreate", 1)
