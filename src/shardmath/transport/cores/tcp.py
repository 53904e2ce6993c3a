"""Memory of ranks on the cores of several hosts without MPI, read and written by messages.

A reader asks over the wires, and the owner answers when it next looks at them, which it does
whenever it waits. So this serves any launcher, and is as fast as a connection; between hosts with a
fast network MPI's windows are faster.
"""

from __future__ import annotations

import itertools
import struct
from collections import deque
from typing import ClassVar

import numpy as np

from shardmath.transport.base import Bytes, Segment
from shardmath.transport.mesh import Mesh
from shardmath.transport.multi_host import MultiHostTransport

_READ, _DATA, _WRITE, _FLUSH, _FLUSHED = range(5)  # places of messages: what they are
_ASK = struct.Struct("<QIQQ")  # number of the question, segment, offset, bytes
_PART = struct.Struct("<QQ")  # number of the question, start of these bytes in the answer
_WHERE = struct.Struct("<IQ")  # segment, offset
_FRAME = 256 << 10  # bytes of memory in one message
_ASKED = 4 << 20  # bytes asked for at once: what an answer may take of the owner's memory
_AHEAD = 2  # questions that are open at a time
_QUEUED = 8 << 20  # bytes of writes that wait to be sent


class _Question:
    """Memory that an answer fills, and how many bytes are still to come."""

    def __init__(self, into: Bytes) -> None:
        self.into = into
        self.missing = len(into)


class TCPTransport(MultiHostTransport):
    """Segments of ranks of several hosts, reached over the wires of `mesh`."""

    name: ClassVar[str] = "tcp"
    preference: ClassVar[int] = 2

    def __init__(self, mesh: Mesh, *, timeout: float) -> None:
        super().__init__(mesh, timeout=timeout)
        self._numbers = itertools.count()
        self._open: dict[tuple[int, int], _Question] = {}  # (rank, number)
        self._flushed: set[tuple[int, int]] = set()
        wires = mesh.wires
        self._channel = None if wires is None else wires.open("memory", 0, self._heard)

    def quiet(self, rank: int, stream: int = 0) -> None:
        """See Transport. Messages arrive in order: an answer means that all writes have arrived."""
        if self._mesh.same_host(rank):
            return
        key = (rank, next(self._numbers))
        self._tell(rank, _FLUSH, _PART.pack(key[1], 0))
        self._wait(lambda: key in self._flushed, rank, "its word that all is written")
        self._flushed.discard(key)

    def _fetch(self, rank: int, index: int, offset: int, into: Bytes) -> None:
        asked: deque[tuple[int, int]] = deque()
        try:
            for start in range(0, len(into), _ASKED):
                if len(asked) == _AHEAD:
                    self._await(asked.popleft())
                piece = into[start : start + _ASKED]
                key = (rank, next(self._numbers))
                self._open[key] = _Question(piece)
                asked.append(key)
                self._tell(rank, _READ, _ASK.pack(key[1], index, offset + start, len(piece)))
            while asked:
                self._await(asked.popleft())
        finally:
            for key in asked:
                self._open.pop(key, None)

    def _await(self, key: tuple[int, int]) -> None:
        question = self._open[key]
        try:
            self._wait(lambda: not question.missing, key[0], "a read of its memory")
        finally:
            del self._open[key]

    def _send(self, rank: int, index: int, offset: int, data: Bytes) -> None:
        wires = self._mesh.wires
        assert wires is not None, "there are ranks on other hosts"
        for start in range(0, len(data), _FRAME):
            part = data[start : start + _FRAME].tobytes()
            self._tell(rank, _WRITE, _WHERE.pack(index, offset + start) + part)
            if wires.queued(rank) > _QUEUED:
                self._wait(lambda: not wires.queued(rank), rank, "its taking what is written")

    def _tell(self, rank: int, what: int, data: bytes) -> None:
        assert self._channel is not None, "there are ranks on other hosts"
        self._channel.send([rank], [(what, data)])

    # -- what others say ---------------------------------------------------------------------------

    def _heard(self, rank: int, what: int, data: bytes) -> None:
        """Serve a request or take an answer; ignore malformed messages, for which nobody waits."""
        try:
            if what == _READ:
                self._answer(rank, *_ASK.unpack(data))
            elif what == _DATA:
                number, start = _PART.unpack_from(data)
                self._take(rank, number, start, data[_PART.size :])
            elif what == _WRITE:
                index, offset = _WHERE.unpack_from(data)
                self._own_part(index, offset, len(data) - _WHERE.size)[:] = np.frombuffer(
                    data, np.uint8, offset=_WHERE.size
                )
            elif what == _FLUSH:
                self._tell(rank, _FLUSHED, data)
            elif what == _FLUSHED:
                self._flushed.add((rank, _PART.unpack(data)[0]))
        except (struct.error, LookupError, ValueError):
            return

    def _answer(self, rank: int, number: int, index: int, offset: int, nbytes: int) -> None:
        part = self._own_part(index, offset, min(nbytes, _ASKED))
        for start in range(0, len(part), _FRAME):
            piece = part[start : start + _FRAME].tobytes()
            self._tell(rank, _DATA, _PART.pack(number, start) + piece)

    def _take(self, rank: int, number: int, start: int, data: bytes) -> None:
        question = self._open[rank, number]
        question.into[start : start + len(data)] = np.frombuffer(data, np.uint8)
        question.missing -= len(data)

    def _own_part(self, index: int, offset: int, nbytes: int) -> Bytes:
        """Bytes of an own segment. Raises CollectiveMismatch, a ValueError, outside of it."""
        segment: Segment = self._own[index][1]
        return self._part(segment.rank, index, offset, nbytes)
