"""Lanes of a context of GPUs: operations in one lane follow each other, those in others need not.

A lane has a workspace on the heap, which its operations share, and a channel of barriers. All ranks
put an operation into the same lane, since its number is the operator's, which they agree on. On one
rank an operation that comes on another stream than the last one waits for it there, so the
workspace is never in two hands; the barrier at the end of each operation says that no peer reads it
any more. What is captured into a CUDA graph is ordered by whoever replays the graph: graphs of one
operator, or of operators whose numbers are equal modulo `LANES`, are to be replayed one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardmath.context import DistributedContext
from shardmath.cuda import stream as streams
from shardmath.cuda.driver import call
from shardmath.symmetric.heap import Buffer

__all__ = ["LANES", "Lane"]

LANES = 16
_FIRST_CHANNEL = 32  # of the team's; the others are those of collectives and of the user


class Lane:
    """One lane on one rank: `channel` of the team's barriers, and heap buffers by name."""

    def __init__(self, context: DistributedContext, number: int) -> None:
        assert context.team is not None, "a context of GPUs"
        self.channel = _FIRST_CHANNEL + number
        self.team = context.team
        self._context = context
        self._buffers: dict[str, Buffer] = {}
        self._captured = False  # a graph refers to the buffers
        self._kept: list[Buffer] = []
        self._stream: int | None = None
        self._side: Any = None
        self._events: dict[str, Any] = {}
        self._done: Any = None

    @classmethod
    def of(cls, context: DistributedContext, number: int) -> Lane:
        """The lane of the operator of that number."""
        number %= LANES
        lane: Lane = context.cache(f"lane {number}", lambda: cls(context, number))
        return lane

    @contextmanager
    def entered(self, stream: int) -> Iterator[None]:
        """Around what one operation puts on `stream`."""
        self.team.device.activate()
        if streams.capturing(stream):
            self._captured = True
            yield
            return
        if self._done is None:
            self._done = call("cuEventCreate", 2)  # no timing
        if self._stream is not None and self._stream != stream:
            call("cuStreamWaitEvent", stream, self._done, 0)
        try:
            yield
        finally:
            self._stream = stream
            call("cuEventRecord", self._done, stream)

    @property
    def side(self) -> Any:
        """A stream of the lane's own, for what runs beside the user's. It starts where told to."""
        if self._side is None:
            self.team.device.activate()
            least, _ = call("cuCtxGetStreamPriorityRange")
            self._side = call("cuStreamCreateWithPriority", 1, least)
        return self._side

    def event(self, name: str) -> Any:
        """An event of the lane's own."""
        if name not in self._events:
            self._events[name] = call("cuEventCreate", 2)  # no timing
        return self._events[name]

    def barrier(self, stream: int) -> None:
        """All ranks have come here in their operation of this lane. On `stream`."""
        self.team.barrier(stream, channel=self.channel)

    def buffer(self, name: str, nbytes: int) -> Buffer:
        """At least `nbytes` of memory under that name. Local. Raises HeapExhausted.

        One that grows waits for the lane's last operation: its memory may go to anyone.
        """
        held = self._buffers.get(name)
        if held is None or held.block.nbytes < nbytes:
            if held is not None:
                self._drop(self._buffers.pop(name))
            del held
            self._buffers[name] = self._context.heap.allocate(nbytes)
            self._context.announce(self._buffers[name].block)
        return self._buffers[name]

    def address(self, name: str) -> int:
        """Where a buffer that has been asked for lies."""
        return self._buffers[name].block.address

    def release(self) -> None:
        """Give all buffers back that no graph refers to."""
        while self._buffers:
            self._drop(self._buffers.popitem()[1])

    def _drop(self, buffer: Buffer) -> None:
        if self._captured:
            self._kept.append(buffer)
        elif self._stream is not None:
            self.team.device.activate()
            call("cuEventSynchronize", self._done)
