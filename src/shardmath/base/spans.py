"""Spans: the copies and the computations inside the operations of this process, for a trace.

    memory   number of spans so far
             from HEAD_BYTES on, a ring of entries of ENTRY.size bytes; their number is a power of 2

A span has a site, which says what happens there: a name, a kind, bytes, peers. Each site is told
once, when a step is bound to memory, and its spans refer to it by number.

Only a traced process imports this, and has `Spans`: see `recorder.spanned`. `record.c` writes
entries where it was built, else `_Writer` does.
"""

from __future__ import annotations

import mmap
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

from shardmath.base.compiled import CompiledStep, extension
from shardmath.base.recorder import Call, Site

P = ParamSpec("P")
R = TypeVar("R")

HEAD_BYTES = 64
ENTRY = struct.Struct("=QQII")  # begun, ended, site, thread; as record.c has it
_COUNT = struct.Struct("=Q")
_PLAIN = "shardmath.redistribution._box.Boxes"  # a type whose calls run no line of Python


class Span(NamedTuple):
    """One span. Times are nanoseconds of CLOCK_MONOTONIC."""

    begun: int
    ended: int
    site: int
    thread: int


def bytes_for(count: int) -> int:
    """The bytes of a ring of at least `count` spans."""
    return HEAD_BYTES + (1 << max(count - 1, 0).bit_length()) * ENTRY.size


def spans_in(memory: bytes) -> tuple[list[Span], int]:
    """The spans in a ring, the earliest first, and how many were written over."""
    count = _COUNT.unpack_from(memory)[0]
    room = (len(memory) - HEAD_BYTES) // ENTRY.size
    entries = memory[HEAD_BYTES : HEAD_BYTES + min(count, room) * ENTRY.size]
    return sorted(map(Span._make, ENTRY.iter_unpack(entries))), max(0, count - room)


class Spans:
    """Writes the spans of this process into `memory`; `tell` gets each new site, in order."""

    def __init__(self, memory: mmap.mmap, tell: Callable[[Site], None]) -> None:
        self._tell = tell
        self._numbers: dict[Site, int] = {}
        self._way = extension("shardmath.base._record") or _Writer(memory)
        self._way.spans_in(memory)

    def stop(self) -> None:
        """Write nothing more, as in a forked child: the memory is its parent's."""
        self._way.spans_in(None)

    def around(self, call: Callable[P, R], site: Site) -> Callable[P, R]:
        """`call`, each time within a span. What raises has none."""
        kind = type(call)
        plain = kind is CompiledStep or f"{kind.__module__}.{kind.__qualname__}" == _PLAIN
        within: Callable[P, R] = self._way.around(call, self._number(site), plain)
        return within

    def marks(self, site: Site) -> tuple[Call, Call]:
        """Two functions: each time the second is called, a span ends that the first has begun."""
        both: tuple[Call, Call] = self._way.marks(self._number(site))
        return both

    def _number(self, site: Site) -> int:
        number = self._numbers.get(site)
        if number is None:
            number = self._numbers[site] = len(self._numbers)
            self._tell(site)
        return number


class _Writer:
    """The spans of record.c in Python."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory: mmap.mmap | None = None
        self._entries = 1
        self._marked = threading.local()

    def spans_in(self, memory: mmap.mmap | None) -> None:
        self._memory = memory
        if memory is not None:
            self._entries = 1 << ((len(memory) - HEAD_BYTES) // ENTRY.size).bit_length() - 1

    def around(self, call: Callable[..., Any], site: int, plain: bool) -> Callable[..., Any]:
        def within(*args: Any, **kwargs: Any) -> Any:
            begun = time.monotonic_ns()
            result = call(*args, **kwargs)
            self._put(begun, site)
            return result

        return within

    def marks(self, site: int) -> tuple[Call, Call]:
        def begin() -> None:
            self._marked.begun = time.monotonic_ns()

        def end() -> None:
            self._put(self._marked.begun, site)

        return begin, end

    def _put(self, begun: int, site: int) -> None:
        if self._memory is None:
            return
        ended, thread = time.monotonic_ns(), threading.get_ident() & 0xFFFFFFFF
        number = _COUNT.unpack_from(self._memory)[0]
        place = HEAD_BYTES + number % self._entries * ENTRY.size
        ENTRY.pack_into(self._memory, place, begun, ended, site, thread)
        _COUNT.pack_into(self._memory, 0, number + 1)
