"""One execution of a redistribution: show, wait, pull, wait.

Operands on the heap are read where they are; of others, what peers read is staged on the heap. A
rank that has to allocate or to stage says so when the call is agreed on, and then all ranks agree
once more, so that want of memory on one rank is an error on all before any element has moved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardmath.arrays import Library, library_of
from shardmath.arrays.base import HostArray, share_memory
from shardmath.context import Context
from shardmath.operators.redistribute.problem import Problem
from shardmath.operators.workspace import KEPT_STAGING, Workspace
from shardmath.redistribution import Exposed, Window, expose, perform, stage, window_on
from shardmath.redistribution.exposure import staged_bytes
from shardmath.symmetric.allocation import block_of, empty_on_heap
from shardmath.symmetric.heap import Block, Buffer

__all__ = ["HostExecution"]

_ORDINARY, _ALLOCATES = 1, 2


class HostExecution:
    """What performs a redistribution on cores, and keeps its staging from call to call.

    `temporary`: for one call. Its staging is the context's workspace, unless it is large.
    """

    def __init__(self, context: Context, *, temporary: bool = False) -> None:
        self._context = context
        self._staging = Staging(context, temporary=temporary)
        self._arrays: Arrays | None = None

    def inspect(self, operand: Any, out: Any, stream: Any) -> None:
        """Raise what is wrong with the user's arrays; see `Arrays.read`. Local."""
        Arrays.read(self._context, operand, out)

    def read(
        self,
        operand: Any,
        out: Any,
        stream: Any,
        problem: Problem | None = None,
        number: int = 0,
    ) -> bytes:
        """Take the user's arrays for the next execution, and say what peers must know. Local."""
        self._arrays = Arrays.read(self._context, operand, out)
        return self._arrays.note(self._context)

    def perform(self, problem: Problem, notes: list[bytes], number: int = 0) -> Any:
        """Redistribute what was read; see `execute`. Collective."""
        arrays = self._arrays
        assert arrays is not None, "read first"
        return execute(self._context, problem, arrays, notes, self._staging)

    def drop_arrays(self) -> None:
        """Refer to no array that was read. Local."""
        self._arrays = None

    def release(self) -> None:
        """Give the staging back."""
        self._staging.release()


@dataclass(frozen=True)
class Arrays:
    """One rank's arrays for one execution, as NumPy views.

    `block` is where the view of the operand lies on the heap; `on_heap`: the operand itself does. A
    lazily conjugated tensor has a view elsewhere.
    """

    library: Library
    operand: HostArray
    block: Block | None
    on_heap: bool
    out: HostArray | None
    given: Any  # the user's `out`

    @classmethod
    def read(cls, context: Context, operand: Any, out: Any) -> Arrays:
        """Take the user's arrays.

        Raises ValueError when `out` cannot be written to or overlaps the operand, UseAfterFree when
        one of them was freed.
        """
        library = library_of(operand)
        host = library.host_view(operand)
        on_heap = block_of(context, operand)
        in_place = host is operand or host.size == 0
        found = on_heap if in_place else block_of(context, host)
        block = None if found is None else found[0]
        if out is None:
            return cls(library, host, block, on_heap is not None, None, None)
        target = library_of(out).host_view(out, writable=True)
        block_of(context, out)  # raises UseAfterFree
        if share_memory(host, target):
            raise ValueError("out overlaps the operand: a redistribution cannot be done in place")
        return cls(library, host, block, on_heap is not None, target, out)

    def note(self, context: Context) -> bytes:
        """What this rank says of this execution: flags, and where its operand is on the heap."""
        flags = _ORDINARY * (self.block is None) + _ALLOCATES * (self.out is None)
        published = b"" if self.block is None else expose(context, self.operand, self.block).pack()
        return bytes([flags]) + published


class Staging:
    """The heap memory through which ordinary operands pass; kept until released."""

    def __init__(self, context: Context, *, temporary: bool) -> None:
        self._context = context
        self._temporary = temporary
        self._buffer: Buffer | None = None

    def buffer(self, nbytes: int) -> Buffer:
        """At least `nbytes`. Raises HeapExhausted."""
        if self._temporary and nbytes <= KEPT_STAGING:
            return Workspace.of(self._context).buffer("redistribution", nbytes)
        if self._buffer is None or self._buffer.block.nbytes < nbytes:
            self._buffer = None  # its memory first, then more
            self._buffer = self._context.heap.allocate(nbytes)
        return self._buffer

    def release(self) -> None:
        """Give the memory back."""
        self._buffer = None


def execute(
    context: Context,
    problem: Problem,
    arrays: Arrays,
    notes: list[bytes],
    staging: Staging,
) -> Any:
    """The result of redistributing `arrays.operand`: `out`, or a new array. Collective.

    `notes` are all ranks'. Raises HeapExhausted or MemoryError on all ranks when one lacks memory.
    """
    transfer, rank = problem.transfer, context.rank
    sent = transfer.traffic.sent
    stages = [bool(note[0] & _ORDINARY) and sent[r] > 0 for r, note in enumerate(notes)]
    published = [note[1:] for note in notes]
    made: list[Any] = [arrays.given]

    def prepare() -> bytes:
        if arrays.out is None:
            made[0] = _result(context, problem, arrays)
        if not stages[rank]:
            return published[rank]
        ranges = transfer.read_by_peers(rank)
        assert ranges is not None, "a rank that sends is read"
        buffer = staging.buffer(staged_bytes(ranges, transfer.itemsize))
        return stage(context, arrays.operand, ranges, buffer).pack()

    if any(stages) or any(note[0] & _ALLOCATES for note in notes):
        # Also: after writing what a peer will read, and before reading what a peer wrote.
        published = context.gather("redistribute, memory", prepare)
    with context.executing("redistribute"):
        target = arrays.out
        if target is None:
            target = arrays.library.host_view(made[0], writable=True)
        _pull(context, problem, arrays.operand, published, target)
        if transfer.crosses:
            # Before reusing what a peer may still read: operand and staging.
            context.board.barrier("redistribute")
    return made[0]


def _pull(
    context: Context,
    problem: Problem,
    operand: HostArray,
    published: list[bytes],
    target: HostArray,
) -> None:
    transfer, rank = problem.transfer, context.rank
    windows: dict[int, Window] = {}
    for src in transfer.sources(rank):
        if src == rank:
            windows[src] = Window.of(operand)
        else:
            windows[src] = window_on(context, src, Exposed.unpack(published[src]), transfer)
    strides = {src: window.strides for src, window in windows.items()}
    perform(transfer.copies(rank, strides, target.strides), windows, Window.of(target))


def _result(context: Context, problem: Problem, arrays: Arrays) -> Any:
    """A new local array for the result, on the heap if the operand is."""
    shape = problem.transfer.dst.local_shape(context.rank)
    if not arrays.on_heap:
        return arrays.library.empty(shape, problem.dtype, problem.order)
    return empty_on_heap(context, arrays.library, shape, problem.dtype, problem.order)
