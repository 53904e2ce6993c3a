"""Executing a transform on the cores: pass by pass, block by block.

Between passes arrays lie on the heap, in two buffers that take turns, so that peers can pull from
one while the other is written. Passes that need nothing from peers work in place, and the last ones
of these straight in the result. A rank that lacks memory says so before any element is touched, and
then all ranks raise.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from shardmath.arrays import Library, dtypes, library_of
from shardmath.arrays.base import HostArray
from shardmath.context import Context
from shardmath.local.fft import engine_for, transform
from shardmath.operators.fft.float16 import narrow_into, wide, wide_like
from shardmath.operators.fft.passes import Block, Pass, passes
from shardmath.operators.fft.problem import Problem
from shardmath.operators.fft.strategy import Strategy
from shardmath.operators.workspace import Workspace
from shardmath.redistribution import Exposed, Window, expose, perform, stage, window_on
from shardmath.redistribution.exposure import staged_bytes
from shardmath.symmetric.allocation import block_of, empty_on_heap
from shardmath.symmetric.heap import Block as HeapBlock

__all__ = ["Arrays", "Plan", "execute"]

_RESULT = -1  # the place of an array that is not in buffer 0 or 1


@dataclass(frozen=True)
class Plan:
    """A strategy, and what each rank does for it."""

    problem: Problem
    strategy: Strategy

    @cached_property
    def passes(self) -> tuple[Pass, ...]:
        """What every rank does, in order."""
        return passes(self.strategy)

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Where each pass writes: buffer 0 or 1, or the result."""
        found: list[int] = []
        for index, each in enumerate(self.passes):
            if all(later.stays and later.kind == "C2C" for later in self.passes[index + 1 :]):
                found.append(_RESULT)
            elif index and each.stays and each.kind == "C2C":
                found.append(found[-1])
            else:
                found.append(1 - found[-1] if found else 0)
        return tuple(found)

    @cached_property
    def waits(self) -> tuple[bool, ...]:
        """Whether the ranks wait for each other before each pass, and at the end.

        Before a pass that pulls, so that what it pulls is there (the operand is: the call has been
        agreed on); and before one that writes to the buffer that an earlier one was pulled from.
        """
        found: list[bool] = []
        read = False  # whether peers may still be reading what this rank wrote
        for index, (each, place) in enumerate(zip(self.passes, self.places, strict=True)):
            pulls = each.transfer.crosses
            reuses = read and place not in (_RESULT, self.places[index - 1])
            found.append(bool(index) and (pulls or reuses))
            read = pulls or (read and not found[-1])
        return (*found, read)

    def explain(self) -> str:
        """The strategy, and its passes over memory."""
        lines = [f"pass {i}: {each}" for i, each in enumerate(self.passes, 1)]
        return "\n".join([self.strategy.explain(), *lines])


@dataclass(frozen=True)
class Arrays:
    """One rank's arrays for one execution, as NumPy views.

    `block` is where the view of the operand lies on the heap, `on_heap`: the operand does. `given`
    is the user's array for the result, `out` the view of it.
    """

    library: Library
    operand: HostArray
    block: HeapBlock | None
    on_heap: bool
    out: HostArray | None
    given: Any

    @classmethod
    def read(cls, context: Context, operand: Any, out: Any) -> Arrays:
        """Take the user's arrays.

        Raises ValueError when `out` cannot be written to, UseAfterFree when one of them was freed.
        """
        library = library_of(operand)
        host = wide(library.host_view(operand))
        on_heap = block_of(context, operand)
        in_place = host is operand or host.size == 0
        found = on_heap if in_place else block_of(context, host)
        block = None if found is None else found[0]
        target = None
        if out is not None:
            target = library_of(out).host_view(out, writable=True)
            block_of(context, out)  # raises UseAfterFree
        return cls(library, host, block, on_heap is not None, target, out)

    @cached_property
    def overlap(self) -> bool:
        """Whether writing the result may change the operand."""
        return self.out is not None and np.may_share_memory(self.operand, self.out)

    @cached_property
    def same(self) -> bool:
        """Whether the result is to take the place of the operand, element by element."""
        one, two = self.operand, self.out
        return (
            two is not None
            and one.__array_interface__["data"][0] == two.__array_interface__["data"][0]
            and (one.shape, one.strides, one.dtype) == (two.shape, two.strides, two.dtype)
        )


def execute(context: Context, plan: Plan, read: Callable[[], Arrays]) -> Any:
    """The transform of the operand that `read` returns: the array given for it, or a new one.
    Collective.

    Raises on all ranks what `read` raises on one, and HeapExhausted or MemoryError when one lacks
    memory.
    """
    made: list[_Execution] = []

    def prepare() -> tuple[bytes, ...]:
        made.append(_Execution(context, plan, read()))
        return made[0].prepare()

    # Also: after writing what a peer will read (the operand), and before reading what it wrote.
    shown = context.agree("fft, memory", prepare, list)
    with context.executing("fft"):
        made[0].run(shown)
    return made[0].result


class _Execution:
    """The state of one execution on one rank."""

    def __init__(self, context: Context, plan: Plan, arrays: Arrays) -> None:
        self._context = context
        self._rank = context.rank
        self._plan = plan
        self._arrays = arrays
        self._inputs: list[HostArray] = []  # of each pass
        self._outputs: list[HostArray] = []
        self._rounded: HostArray | None = None  # the result, where it is computed in a wider type
        self._engine = engine_for(plan.problem.library)
        self._threads = 1 if self._engine == "torch" else context.threads  # torch has its own
        self.result: Any = arrays.given

    # -- memory ------------------------------------------------------------------------------------

    def prepare(self) -> tuple[bytes, ...]:
        """Make all memory; what peers have to know of it, for each pass."""
        out = self._arrays.out
        if out is None:
            self.result = self._new_result()
            out = self._arrays.library.host_view(self.result, writable=True)
        if self._plan.strategy.problem.result != self._plan.problem.result:
            self._rounded, out = out, wide_like(out)
        sizes = [0, 0]
        for each, place in zip(self._plan.passes, self._plan.places, strict=True):
            if place != _RESULT:
                sizes[place] = max(sizes[place], self._bytes(each))
        workspace = Workspace.of(self._context)
        buffers = [
            workspace.array(f"fft {place}", (size,), np.uint8) if size else None
            for place, size in enumerate(sizes)
        ]
        shown = [self._expose_operand()]
        for index, (each, place) in enumerate(
            zip(self._plan.passes, self._plan.places, strict=True)
        ):
            if index:
                self._inputs.append(self._outputs[-1])
                shown.append(self._expose(each, self._plan.places[index - 1]))
            buffer = None if place == _RESULT else buffers[place]
            self._outputs.append(out if buffer is None else self._shaped(each, buffer))
        return tuple(shown)

    def _new_result(self) -> Any:
        problem, arrays = self._plan.problem, self._arrays
        shape = problem.target.local_shape(self._rank)
        if arrays.on_heap:
            return empty_on_heap(
                self._context, arrays.library, shape, problem.result, problem.order
            )
        return arrays.library.empty(shape, problem.result, problem.order)

    def _bytes(self, each: Pass) -> int:
        shape = each.result.local_shape(self._rank)
        return max(1, int(np.prod(shape, dtype=np.int64)) * dtypes.of(each.made).itemsize)

    def _shaped(self, each: Pass, buffer: HostArray) -> HostArray:
        shape, dtype = each.result.local_shape(self._rank), dtypes.to_numpy(each.made)
        return np.ndarray(shape, dtype, buffer.data, order=each.order)

    def _expose_operand(self) -> bytes:
        """The operand, or a copy of what peers read of it, or of all where it is overwritten."""
        first, arrays = self._plan.passes[0], self._arrays
        operand = arrays.operand
        crosses = first.transfer.crosses
        written = arrays.overlap and (
            crosses or (self._plan.places[0] == _RESULT and not arrays.same)
        )
        if written:
            workspace = Workspace.of(self._context)
            copy = workspace.array("fft operand", operand.shape, operand.dtype)
            np.copyto(copy, operand)
            self._inputs.append(copy)
            return expose(self._context, copy, workspace.block("fft operand")).pack()
        self._inputs.append(operand)
        if not crosses:
            return b""
        if arrays.block is not None:
            return expose(self._context, operand, arrays.block).pack()
        ranges = first.transfer.read_by_peers(self._rank)
        if ranges is None:
            return b""
        workspace = Workspace.of(self._context)
        nbytes = staged_bytes(ranges, operand.dtype.itemsize)
        return stage(self._context, operand, ranges, workspace.buffer("fft operand", nbytes)).pack()

    def _expose(self, each: Pass, place: int) -> bytes:
        if not each.transfer.crosses:
            return b""
        block = Workspace.of(self._context).block(f"fft {place}")
        return expose(self._context, self._inputs[-1], block).pack()

    # -- passes ------------------------------------------------------------------------------------

    def run(self, shown: Sequence[tuple[bytes, ...]]) -> None:
        """All passes. `shown` is what `prepare` returned on every rank."""
        *before, after = self._plan.waits
        for index, (each, waits) in enumerate(zip(self._plan.passes, before, strict=True)):
            if waits:
                # Before reading what a peer wrote, and before reusing what a peer may still read.
                self._context.board.barrier("fft")
            self._pass(index, each, [notes[index] for notes in shown])
        if after:
            # Before reusing what a peer may still read: the operand and both buffers.
            self._context.board.barrier("fft")
        if self._rounded is not None:
            narrow_into(self._rounded, self._outputs[-1])

    def _pass(self, index: int, each: Pass, shown: Sequence[bytes]) -> None:
        source, target = self._inputs[index], self._outputs[index]
        blocks = each.blocks(self._rank)
        if not blocks:
            return
        windows: dict[int, Window] = {}
        if not each.stays:
            for src in each.transfer.sources(self._rank):
                if src == self._rank:
                    windows[src] = Window.of(source)
                else:
                    exposed = Exposed.unpack(shown[src])
                    windows[src] = window_on(self._context, src, exposed, each.transfer)
        work = _Work(self._plan.problem, each, self._rank, source, target, windows, self._engine)
        self._share(work, len(blocks))

    def _share(self, work: _Work, count: int) -> None:
        """Perform blocks 0, ..., count - 1 on this rank's threads."""
        threads = min(self._threads, count)
        if threads == 1:
            work.perform(range(count))
            return
        pool: ThreadPoolExecutor = self._context.cache(
            "fft threads", lambda: ThreadPoolExecutor(self._threads, "shardmath-fft")
        )
        ends = [count * i // threads for i in range(threads + 1)]
        ranges = [range(lo, hi) for lo, hi in itertools.pairwise(ends)]
        for _ in pool.map(work.perform, ranges):
            pass


@dataclass(frozen=True)
class _Work:
    """One pass on one rank: `perform` may run on several threads, for different blocks."""

    problem: Problem
    each: Pass
    rank: int
    source: HostArray
    target: HostArray
    windows: dict[int, Window]
    engine: str

    def perform(self, numbers: range) -> None:
        """Gather, transform and write these blocks."""
        given = _Scratch(self.source.dtype, self.each.order, apart=self.each.kind != "R2C")
        made = _Scratch(self.target.dtype, self.each.order, apart=self.each.kind != "C2R")
        blocks = self.each.blocks(self.rank)
        for number in numbers:
            block = blocks[number]
            target = self.target[self.each.whole(block)]
            if not self.each.axes:
                self._gather(number, block, target)
                continue
            taken = self._taken(number, block, target, given)
            if self.each.kind == "C2C":
                out = taken
            else:
                out = target if self.each.exceeds(target.nbytes) else made.array(target.shape)
            transform(
                taken,
                self.each.axes,
                out=out,
                kind=self.each.kind,
                forward=self.problem.direction < 0,
                norm=self.problem.norm,
                engine=self.engine,
            )
            if out is not target:
                np.copyto(target, out)

    def _taken(self, number: int, block: Block, target: HostArray, given: _Scratch) -> HostArray:
        """The block's elements, in the cache if they fit: memory is read faster by copies than by
        transforms. They may be overwritten, except by R2C.
        """
        large = self.each.exceeds(target.nbytes)
        if large and self.each.stays and self.each.kind == "R2C":
            return self.source[block]
        in_place = large and self.each.kind == "C2C"
        taken = target if in_place else given.array(tuple(cut.stop - cut.start for cut in block))
        self._gather(number, block, taken)
        return taken

    def _gather(self, number: int, block: Block, into: HostArray) -> None:
        if self.each.stays:
            np.copyto(into, self.source[block])
            return
        strides = {src: window.strides for src, window in self.windows.items()}
        copies = self.each.copies(self.rank, number, strides, into.strides)
        perform(copies, self.windows, Window.of(into))


class _Scratch:
    """Memory of one thread that blocks pass through, its rows a little `apart`.

    Lines of a power of two of rows would all fight for the same few places of the cache. What is
    only read or written row by row lies dense.
    """

    def __init__(self, dtype: np.dtype[Any], order: str, *, apart: bool) -> None:
        self._apart = apart
        self._dtype = dtype
        self._order = order
        self._held: dict[tuple[int, ...], HostArray] = {}

    def array(self, shape: tuple[int, ...]) -> HostArray:
        """An array of this shape, the same each time."""
        if shape not in self._held:
            extents = shape if self._order == "C" else shape[::-1]
            meet = self._apart and extents[-1] * self._dtype.itemsize % 512 == 0
            pad = 64 // self._dtype.itemsize if meet else 0
            memory = np.empty((*extents[:-1], extents[-1] + pad), self._dtype)
            held = memory[..., : extents[-1]]
            self._held = {shape: held if self._order == "C" else held.transpose()}
        return self._held[shape]
