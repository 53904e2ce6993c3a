"""Lanes of a context of GPUs: operations in one lane follow each other, those in others need not.

A lane has a workspace, which its operations share, and a channel of barriers. Workspace that peers
reach is on the heap; the rest may be elsewhere. An operation takes the lane of its stream. Streams
are numbered as they are first used; where the ranks' numbers differ, all take the last lane, in
which an operation waits for the one before it on any stream. So only one operation at a time uses a
workspace, and the barrier at the end of each says that no peer reads it any more. Operations that
are captured into one CUDA graph follow each other in a lane, too. Whoever replays graphs orders
them: those captured on one stream, and operations on that stream, must run one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from shardmath.collectives.pushes import Pushes
from shardmath.context.context import Context
from shardmath.cuda.allocation import Allocation
from shardmath.cuda.driver import beside_captures, call
from shardmath.cuda.graph import Graph
from shardmath.cuda.stream import OrderedSection, StreamOrder, new_event, new_stream
from shardmath.errors import HeapExhausted
from shardmath.handles.device_array import Copy
from shardmath.symmetric.heap import Block, Buffer

LANES = 16
NEW_RESULT = "new result"  # the name of a buffer
_FIRST_CHANNEL = 32  # of the team; those below are for collectives and the user


class Lane:
    """One lane on one rank: `channel` of the team's barriers, and heap buffers by name."""

    def __init__(self, context: Context, number: int) -> None:
        self.number = number
        self.channel = _FIRST_CHANNEL + number
        self.team = context.gpu_team
        self._context = context
        self._buffers: dict[str, Buffer] = {}
        self._allocations: dict[str, Allocation] = {}  # under other names than buffers
        self.version = 0  # rises when a buffer comes or goes
        self._kept: list[object] = []  # that graphs refer to
        self._streams: dict[str, Any] = {}
        self._events: dict[str, Any] = {}
        self._order = StreamOrder(self.team.device)

    @classmethod
    def of(cls, context: Context, stream: int) -> Lane:
        """The lane of a stream on this rank. Peers may number theirs differently."""
        known: dict[int, int] = context.cache("streams of lanes", dict)
        return cls.numbered(context, known.setdefault(stream, len(known)) % (LANES - 1))

    @classmethod
    def numbered(cls, context: Context, number: int) -> Lane:
        """The lane of that number, below LANES."""
        return context.cache(f"lane {number}", lambda: cls(context, number))

    def section(self, stream: int) -> OrderedSection:
        """A context for the launches of one operation on `stream`, after all earlier operations."""
        return self._order.section(stream)

    def stream(self, name: str) -> Any:
        """A stream of the lane's own, by name, for work beside the user's.

        It has priority: copies within a GPU may be kernels, which would otherwise wait for the
        product that they are to run beside.
        """
        if name not in self._streams:
            self._streams[name] = new_stream(self, self.team.device, first=True)
        return self._streams[name]

    @property
    def pushes(self) -> Pushes:
        """The kernels that push to peers, on the stream of an operation of this lane."""
        context = self._context
        return context.cache("pushes of lanes", lambda: Pushes(context, self.team))

    def event(self, name: str) -> Any:
        """An event of the lane's own."""
        if name not in self._events:
            self._events[name] = new_event(self)
        return self._events[name]

    def barrier(self, stream: int) -> None:
        """A barrier on `stream`: all ranks have come here in their operation of this lane."""
        self.team.enqueue_barrier(stream, channel=self.channel)

    def buffer(self, name: str, nbytes: int) -> Buffer:
        """At least `nbytes` of memory under that name. Local. Raises HeapExhausted.

        To grow one waits for the lane's last operation, since the old memory is given back.
        """
        held = self._buffers.get(name)
        if held is None or held.block.nbytes < nbytes:
            del held
            self.drop(name)
            self.version += 1
            self._buffers[name] = self._context.allocate_shared(nbytes)
        return self._buffers[name]

    def room(self, nbytes: int) -> Block | None:
        """Memory for a new result of so many bytes, which is copied to its place at the end; None
        where `make_room` has not made it, or for no bytes.
        """
        held = self._buffers.get(NEW_RESULT) if nbytes else None
        return None if held is None or held.block.nbytes < nbytes else held.block

    def make_room(self, nbytes: int) -> None:
        """Make `room` for the next operation, if there is memory."""
        if nbytes and self.room(nbytes) is None:
            with suppress(HeapExhausted), beside_captures():
                self.buffer(NEW_RESULT, nbytes)

    def private(self, name: str, nbytes: int) -> int:
        """The address of at least `nbytes` under that name, which no peer reaches. Local.

        As `buffer`, but ordinary memory of the GPU where the heap cannot grow.
        """
        if self._context.heap.transport.grows:
            return self.buffer(name, nbytes).block.address
        held = self._allocations.get(name)
        if held is None or held.nbytes < nbytes:
            del held
            self.drop(name)
            self.version += 1
            self._allocations[name] = Allocation(self.team.device, nbytes)
        return self._allocations[name].address

    def shared(self, name: str, nbytes: int) -> int:
        """The address of a buffer, which peers reach. Local. Raises HeapExhausted."""
        return self.buffer(name, nbytes).block.address

    def has(self, name: str, nbytes: int) -> bool:
        """Whether at least `nbytes` have been asked for under that name."""
        if name in self._buffers:
            return self._buffers[name].block.nbytes >= nbytes
        return name in self._allocations and self._allocations[name].nbytes >= nbytes

    def address(self, name: str) -> int:
        """The address of memory that has been asked for."""
        if name in self._allocations:
            return self._allocations[name].address
        return self._buffers[name].block.address

    def memory(self) -> dict[str, object]:
        """An object for each name that identifies its present memory, and does not keep it."""
        return {name: self._identity(name) for name in (*self._buffers, *self._allocations)}

    def holds(self, memory: Mapping[str, object]) -> bool:
        """Whether these names still stand for that `memory`."""
        return all(self._identity(name) is kept for name, kept in memory.items())

    def _identity(self, name: str) -> object:
        buffer = self._buffers.get(name)
        if buffer is not None:
            return buffer.block
        allocation = self._allocations.get(name)
        return None if allocation is None else allocation.identity

    def graph(self, launches: Callable[[int], None]) -> Graph:
        """The work that `launches(stream)` puts on a stream, as a graph.

        It may be launched only while the buffers are as they are now, and does not keep them.
        """
        captured = self._order.captured
        try:
            return Graph(self.team.device, launches)
        finally:
            self._order.captured = captured

    def launch(self, graph: Graph, copy: Copy | None, stream: int) -> None:
        """Put a `graph` and then a copy on `stream`, as one operation. It is not being captured."""
        self.team.check()
        if self._order.continues(stream):
            self.team.device.activate()
            graph.launch(stream)
            self.copy(copy, stream)
            return
        with self.section(stream):
            graph.launch(stream)
            self.copy(copy, stream)

    def copy(self, copy: Copy | None, stream: int) -> None:
        """Put a copy on `stream`, within a section."""
        if copy is not None:
            target, source, nbytes = copy
            call("cuMemcpyDtoDAsync", target, source, nbytes, stream)

    def keep(self, used: object) -> None:
        """Keep an object that a captured graph refers to as long as the lane."""
        if not any(kept is used for kept in self._kept):
            self._kept.append(used)

    def drop(self, *names: str) -> None:
        """Give back the buffers of these names that no graph refers to. Local."""
        for name in names:
            held = self._buffers.pop(name, None) or self._allocations.pop(name, None)
            if held is not None:
                self.version += 1
                if self._order.captured:
                    self._kept.append(held)
                else:
                    self._order.wait()
            del held

    @classmethod
    def release(cls, context: Context) -> None:
        """Give back all buffers of a context's lanes that no graph refers to. Local."""
        for number in range(LANES):
            lane = cls.numbered(context, number)
            lane.drop(*lane.memory())
