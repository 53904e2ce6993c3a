"""Passes over memory on cores, block by block: gathered, transformed in the cache, and written.

A pass is shared by the threads of the rank. One of few blocks is bound whole: every copy and every
call of the library that transforms is ready when the ranks agree.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from shardmath.arrays.base import HostArray
from shardmath.base.immutable import Immutable
from shardmath.context.context import Context
from shardmath.local.fft import Norm, bound_transform, keeps_shape, starts_threads
from shardmath.program.blocks import Blocks
from shardmath.redistribution import Window
from shardmath.redistribution.bound_copies import bind, bind_array

Calls = list[Callable[[], object]]

_BOUND_BLOCKS = 64  # of a pass that is bound whole
_CACHED = 32 << 10  # bytes of a block that is transformed where it is wanted
_KEPT_SCRATCH = 16 << 20  # bytes, for what cannot be cut; more is taken when it is needed


def run(calls: Iterable[Callable[[], object]]) -> None:
    """Perform what was bound, in order."""
    for call in calls:
        call()


class Pass(Immutable):
    """One pass of this rank: from `windows` on all ranks' arrays, or `source`, to `target`.

    `windows` are those of the ranks that something comes from; they are not looked at where all
    stays. `engine` transforms.
    """

    context: Context
    blocks: Blocks
    source: HostArray
    target: HostArray
    windows: Mapping[int, Window]
    engine: str = ""
    forward: bool = True
    norm: Norm = None

    def bound(self) -> Calls:
        """The call that performs it, each time that it is made."""
        count = len(self.blocks)
        # torch has threads of its own
        threads = min(1 if starts_threads(self.engine) else self.context.threads, count)
        if threads <= 1:
            return self._part(range(count), 0)
        ends = [count * i // threads for i in range(threads + 1)]
        parts = [
            self._part(range(lo, hi), worker)
            for worker, (lo, hi) in enumerate(itertools.pairwise(ends))
        ]
        return [partial(_share, self.context, parts)]

    def _part(self, numbers: range, worker: int) -> Calls:
        """The call that performs these blocks, on one thread."""
        scratches: dict[int, _Scratch] = self.context.cache("scratch of passes", dict)
        scratch = scratches.setdefault(worker, _Scratch())
        few = len(self.blocks) <= _BOUND_BLOCKS
        if few and not any(self._is_large(number) for number in numbers):
            return list(self._calls(numbers, scratch))
        return [lambda: run(self._calls(numbers, scratch))]

    def _is_large(self, number: int) -> bool:
        target = self.target[self.blocks.whole(self.blocks[number])]
        return self.blocks.exceeds(target.nbytes)

    def _calls(self, numbers: range, scratch: _Scratch) -> Iterator[Callable[[], object]]:
        blocks = self.blocks
        for number in numbers:
            target = self.target[blocks.whole(blocks[number])]
            if not blocks.axes:
                yield from self._gathering(number, target)
                continue
            large = blocks.exceeds(target.nbytes)
            if large and blocks.stays and blocks.kind == "R2C":  # which leaves it as it is
                taken = self.source[blocks[number]]
            else:
                taken = target
                small = (
                    len(blocks) == 1 and target.nbytes <= _CACHED
                )  # and stays in the first cache
                if not (keeps_shape(blocks.kind) and (large or small)):
                    shape = tuple(cut.stop - cut.start for cut in blocks[number])
                    taken = self._scratch(scratch, "taken", shape, self.source.dtype)
                yield from self._gathering(number, taken)
            out = taken
            if not keeps_shape(blocks.kind):
                out = target
                if not large:
                    out = self._scratch(scratch, "made", target.shape, target.dtype)
            yield bound_transform(
                taken,
                blocks.axes,
                out=out,
                kind=blocks.kind,
                forward=self.forward,
                norm=self.norm,
                engine=self.engine,
            )
            if out is not target:
                yield from bind_array(out, target)

    def _gathering(self, number: int, into: HostArray) -> Calls:
        blocks = self.blocks
        if blocks.stays:
            return bind_array(self.source[blocks[number]], into)
        strides = {src: window.strides for src, window in self.windows.items()}
        copies = blocks.copies(number, strides, into.strides)
        return bind(copies, self.windows, Window.of(into))

    def _scratch(
        self, scratch: _Scratch, role: str, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> HostArray:
        """Where a block passes through the cache: it is read from there by transforms, since memory
        is read faster by copies. What is only read or written row by row lies dense.
        """
        dense = {"taken": "R2C", "made": "C2R"}[role] == self.blocks.kind
        return scratch.array(role, shape, dtype, self.blocks.order, apart=not dense)


class _Scratch:
    """Memory of one thread that blocks pass through, one after the other, by what it is for."""

    def __init__(self) -> None:
        self._memory: dict[str, HostArray] = {}

    def array(
        self, role: str, shape: tuple[int, ...], dtype: np.dtype[Any], order: str, *, apart: bool
    ) -> HostArray:
        """An array there, its rows a little `apart`.

        Lines of a power of two of rows would all fight for the same few places of the cache.
        """
        extents = shape if order == "C" else shape[::-1]
        meet = apart and extents[-1] * dtype.itemsize % 512 == 0
        rows = (*extents[:-1], extents[-1] + (64 // dtype.itemsize if meet else 0))
        nbytes = math.prod(rows) * dtype.itemsize
        memory = self._memory.get(role)
        if nbytes > _KEPT_SCRATCH:
            memory = np.empty(nbytes, np.uint8)
        elif memory is None or memory.nbytes < nbytes:
            memory = self._memory[role] = np.empty(nbytes, np.uint8)
        held = np.ndarray(rows, dtype, memory.data)[..., : extents[-1]]
        return held if order == "C" else held.transpose()


def _share(context: Context, parts: Sequence[Calls]) -> None:
    """Perform the parts of a pass, each on a thread."""
    from concurrent.futures import ThreadPoolExecutor  # which few calls need

    pool: ThreadPoolExecutor = context.cache(
        "threads of passes", lambda: ThreadPoolExecutor(context.threads, "shardmath-pass")
    )
    for _ in pool.map(run, parts):
        pass
