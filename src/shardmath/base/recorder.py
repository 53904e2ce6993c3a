"""The flight recorder: the last operations of this process, in memory that others can read.

    record   number of the last operation · length of the description · when a table was shown last
             description of the process: JSON
    from HEAD_BYTES on, a ring of entries of ENTRY.size bytes, whose length is a power of two and
             at least OPERATIONS: operation n has entry n modulo that; its number is 0 while it is
             written

The memory is anonymous: it ends with the last process that maps it. `record.c` writes entries where
it was built, else `_Writer` does. Nothing is recorded before a context is made.
"""

from __future__ import annotations

import json
import mmap
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

from shardmath.base.caller import BETWEEN, PACKAGE, caller_place
from shardmath.base.compiled import extension

OPERATIONS = 256
HEAD_BYTES = 4096
ENTRY = struct.Struct("=QQQQQII48s72s88s")  # as record.c has it
_HEAD = struct.Struct("=QQQ")
SHOWN = 16  # the place in the head of the time when a table was shown last
RAISED = 1  # the state of an operation that raised an exception
_NOTHING: Mapping[int, int] = {}

P = ParamSpec("P")
R = TypeVar("R")
Kind = Literal["copy", "compute", "wait"]
Call = Callable[[], object]


class Operation(NamedTuple):
    """An operation of one rank. Times are nanoseconds of CLOCK_MONOTONIC; `ended` is 0 before."""

    number: int
    begun: int
    ended: int
    state: int
    stream: int
    thread: int
    line: int
    name: str
    operands: str
    file: str

    @classmethod
    def unpack(cls, data: bytes) -> Operation:
        """The operation of an entry's bytes."""
        fields = ENTRY.unpack(data)
        texts = [text.partition(b"\0")[0].decode(errors="replace") for text in fields[7:]]
        return cls(*fields[:7], *texts)


def bytes_for(count: int) -> int:
    """The bytes of a record of at least `count` operations."""
    entries = max(OPERATIONS, 1 << max(count - 1, 0).bit_length())
    return HEAD_BYTES + entries * ENTRY.size


def operations(record: bytes) -> list[Operation]:
    """The operations in a record, the earliest first."""
    entries = range(HEAD_BYTES, len(record), ENTRY.size)
    found = [Operation.unpack(record[at : at + ENTRY.size]) for at in entries]
    return sorted(each for each in found if each.number)


def description(record: bytes) -> dict[str, Any]:
    """What a process says of itself in its record; {} while that is being written."""
    length = _HEAD.unpack_from(record)[1]
    try:
        told: dict[str, Any] = json.loads(record[_HEAD.size : _HEAD.size + length])
    except ValueError:
        return {}
    return told


def operands_of(arguments: tuple[Any, ...]) -> str:
    """The types and shapes of the arrays among the arguments of a call, as text."""
    return " ".join(filter(None, map(_operand, arguments)))


class Recorder:
    """The recorder of a process. It does nothing before `start`.

    `begin(function, arguments)`, `on_stream(address)`, and `end()`, or `leave()` where it raised,
    concern the operation of the calling thread. `tell_plan`, where set, gets the number of the
    operation for which a plan was made, and a text of the plan. `compared(function)`, where set,
    wraps each function: see `inspection.digests`. A traced process has `spans`, of `base.spans`,
    and `on_gpu`, which is called when the process begins to compute on a GPU.
    """

    spans: Any = None
    on_gpu: Callable[[], None] | None = None
    compared: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    tell_plan: Callable[[int, str], None] | None = None
    begin: Callable[[Any, tuple[Any, ...]], None]
    on_stream: Callable[[int], None]
    end: Callable[[], None]
    leave: Callable[[], None]

    def __init__(self) -> None:
        self.memory: mmap.mmap | None = None
        self.stop()

    def start(self, memory: mmap.mmap) -> None:
        """Record from now on in `memory`, as long as `bytes_for` says."""
        built = extension("shardmath.base._record")
        if built is not None:
            built.record_in(memory, PACKAGE, BETWEEN)
        way = built or _Writer(memory)
        self.memory, self.on_stream = memory, way.on_stream
        self.begin, self.end, self.leave = way.begin, way.end, way.leave

    def stop(self) -> None:
        """Record nothing more, as in a forked child: the memory is its parent's."""
        if self.memory is not None:
            built = extension("shardmath.base._record")
            if built is not None:
                built.record_in(None, PACKAGE, BETWEEN)
        if self.spans is not None:
            self.spans.stop()
        self.memory = self.compared = self.spans = self.on_gpu = None
        self.begin = self.on_stream = self.end = self.leave = _nothing

    @property
    def under_way(self) -> int:
        """The number of the last operation, if it has not ended; else 0."""
        if self.memory is None or not (found := operations(self.memory[:])):
            return 0
        return 0 if found[-1].ended else found[-1].number

    def planned(self, explain: Callable[[], str]) -> None:
        """Note that the operation under way has made a plan; `explain()` is the text of it."""
        if self.tell_plan is not None and self.memory is not None:
            self.tell_plan(_HEAD.unpack_from(self.memory)[0], explain())

    def describe(self, told: Mapping[str, Any]) -> None:
        """Say what this process is, if there is room for it."""
        text = json.dumps(told).encode()
        if self.memory is not None and _HEAD.size + len(text) <= HEAD_BYTES:
            struct.pack_into("=Q", self.memory, 8, len(text))
            self.memory[_HEAD.size : _HEAD.size + len(text)] = text


def _nothing(*_: object) -> None:
    """Record nothing."""


class _Writer:
    """record.c in Python. Threads take no lock, which an exception could leave held."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._turn = 1 << ((len(memory) - HEAD_BYTES) // ENTRY.size).bit_length() - 1
        self._new_numbers = count(_HEAD.unpack_from(memory)[0] + 1)
        self._numbers = threading.local()  # `last`: of the operation under way, else 0

    def begin(self, function: Any, arguments: tuple[Any, ...]) -> None:
        operands = operands_of(arguments)
        file, line = caller_place()
        texts = [function.__qualname__.encode()[-47:], operands.encode()[:71], file.encode()[-87:]]
        number = next(self._new_numbers)
        place = self._place(number)
        struct.pack_into("=Q", self._memory, place, 0)
        thread = threading.get_ident() & 0xFFFFFFFF
        fields = (time.monotonic_ns(), 0, 0, 0, thread, line)
        self._memory[place + 8 : place + ENTRY.size] = ENTRY.pack(0, *fields, *texts)[8:]
        self._numbers.last = number  # before it is visible: an exception may come in between
        struct.pack_into("=Q", self._memory, place, number)
        struct.pack_into("=Q", self._memory, 0, number)

    def on_stream(self, address: int) -> None:
        self._put("=Q", 32, address)

    def end(self, state: int = 0) -> None:
        self._put("=QQ", 16, time.monotonic_ns(), state)
        self._numbers.last = 0

    def leave(self) -> None:
        self.end(RAISED)

    def _put(self, how: str, at: int, *words: int) -> None:
        number = getattr(self._numbers, "last", 0)
        place = self._place(number)
        if number and struct.unpack_from("=Q", self._memory, place)[0] == number:
            struct.pack_into(how, self._memory, place + at, *words)

    def _place(self, number: int) -> int:
        return HEAD_BYTES + number % self._turn * ENTRY.size


def _operand(x: Any) -> str:
    shape = getattr(x, "shape", None)
    if not isinstance(shape, tuple):
        return ""
    kind = x.dtype if type(x).__name__ == "ndarray" else type(x).__name__
    return f"{kind}{list(shape)}".replace(" ", "")


this_process = Recorder()


# -- what happens inside operations, in a traced process ------------------------------------------


class Site(NamedTuple):
    """What spans of one place in a program show.

    `read` and `written` are the bytes in the memory of other ranks, by the rank in the context of
    the call; `nbytes` are all that are copied, 0 where nothing is.
    """

    name: str
    kind: Kind
    nbytes: int = 0
    read: tuple[tuple[int, int], ...] = ()
    written: tuple[tuple[int, int], ...] = ()


def spanned(
    call: Callable[P, R],
    name: str,
    kind: Kind = "compute",
    nbytes: int = 0,
    *,
    read: Mapping[int, int] = _NOTHING,
    written: Mapping[int, int] = _NOTHING,
) -> Callable[P, R]:
    """`call`, within a span each time where this process is traced; see `Site`.

    Elsewhere it is `call` itself, so that a call that was bound before costs nothing more.
    """
    spans = this_process.spans
    if spans is None:
        return call
    peers = tuple(sorted(read.items())), tuple(sorted(written.items()))
    within: Callable[P, R] = spans.around(call, Site(name, kind, nbytes, *peers))
    return within


def waited(call: Call, name: str) -> Sequence[Call]:
    """`call`, in which this rank waits for others, between marks where this process is traced.

    It stays recognisable: compiled code knows a barrier by its identity.
    """
    spans = this_process.spans
    if spans is None:
        return (call,)
    begins, ends = spans.marks(Site(name, "wait"))
    return begins, call, ends
