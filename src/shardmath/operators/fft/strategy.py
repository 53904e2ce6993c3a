"""Strategies: local transforms where axes are whole, and exchanges in between. Pure.

A strategy is a list of steps between layouts, each with a predicted cost; `choose` finds the
cheapest.

    slab X            transform y, z    exchange    transform x           exchange
    0 0 0 0    ──►    (whole here)      ──►         0 0 1 1 (whole)       ──►         as at first
    1 1 1 1                                         0 0 1 1
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

from shardmath.arrays import dtypes
from shardmath.base.immutable import Immutable
from shardmath.geometry import Layout, Spans, bytes_received
from shardmath.local.fft import COMPLETING, keeps_shape
from shardmath.machine import CORES, Rates, h200
from shardmath.operators.fft.problem import Problem


class CostModel(Immutable):
    """The costs of transforms and exchanges on a machine, which decide between strategies.

    An exchange costs `first_exchange_passes` over memory as the first step, and
    `last_exchange_passes` as the last; others are fused with the transforms after them.
    `whole_arrays`: transforms go over all of an array, not block by block through a cache.
    """

    rates: Rates
    first_exchange_passes: float
    last_exchange_passes: float
    whole_arrays: bool = False

    def mirrored(self) -> CostModel:
        """The costs of the same steps in reverse order."""
        return replace(
            self,
            first_exchange_passes=self.last_exchange_passes,
            last_exchange_passes=self.first_exchange_passes,
        )

    def seconds(self, step: Step, itemsize: int, *, first: bool, last: bool) -> float:
        """The predicted time of a step whose source has elements of `itemsize` bytes."""
        seconds = step.seconds(itemsize, self)
        if isinstance(step, Exchange):
            passes = self.first_exchange_passes * first + self.last_exchange_passes * last
            largest = max(step.dst.local_sizes)
            seconds += passes * itemsize * largest / self.rates.strided
        return seconds


# The last exchange has no transform after it: it reads and writes memory by itself. Before the
# first, an operand that is not on the heap is copied there.
ON_CORES = CostModel(CORES, 1.0, 2.0)
# Every exchange is a kernel, limited by the links. Transforms before it hide it.
ON_GPUS = CostModel(replace(h200.H200, link=h200.PUSHED), 0.5, 0.0, whole_arrays=True)
# An exchange between hosts is packed and unpacked: two passes that nothing hides.
ON_GPUS_OF_HOSTS = CostModel(h200.H200_MULTI_HOST, 2.0, 2.0, whole_arrays=True)


class Transform(Immutable):
    """Local transforms along `axes`, in this order, which are whole on all ranks in `layout`.

    `result` differs from `layout` only where an axis turns from real to hermitian or back.
    """

    axes: tuple[int, ...]
    layout: Layout
    result: Layout

    def reversed(self) -> Transform:
        """The step that undoes this one."""
        return Transform(self.axes[::-1], self.result, self.layout)

    def seconds(self, itemsize: int, model: CostModel) -> float:
        """The predicted time for the busiest rank."""
        logs = sum(math.log2(max(2, self.layout.global_shape[axis])) for axis in self.axes)
        largest = max(self.layout.local_sizes)
        passes = _passes(self.axes, self.layout.ndim) if model.whole_arrays else 1
        flops = 5 * logs * itemsize / 8  # twice as slow in double precision, half as many if real
        touched = 2 * passes * itemsize / model.rates.strided
        return largest * (flops / model.rates.transforms + touched)

    def __str__(self) -> str:
        axes = ", ".join(map(str, self.axes))
        return f"transform {'axis' if len(self.axes) == 1 else 'axes'} {axes}: {self.layout}"


class Exchange(Immutable, words="exchange: {src} -> {dst}"):
    """Elements move between ranks: the layout `src` becomes `dst`."""

    src: Layout
    dst: Layout

    def reversed(self) -> Exchange:
        """The step that undoes this one."""
        return Exchange(self.dst, self.src)

    def seconds(self, itemsize: int, model: CostModel) -> float:
        """The predicted time for the rank that receives most."""
        received = max(bytes_received(self.src, self.dst, itemsize))
        return received / model.rates.link + model.rates.latency


Step = Transform | Exchange


class Strategy(Immutable):
    """The steps from `problem.source` to `problem.target`, chosen by a cost model."""

    problem: Problem
    steps: tuple[Step, ...]
    model: CostModel = ON_CORES

    @cached_property
    def seconds(self) -> float:
        """The predicted time."""
        return sum(self.step_seconds)

    @cached_property
    def step_seconds(self) -> tuple[float, ...]:
        """The predicted time of each step."""
        last = len(self.steps) - 1
        return tuple(
            self.model.seconds(step, itemsize, first=index == 0, last=index == last)
            for index, (step, itemsize) in enumerate(zip(self.steps, self._itemsizes, strict=True))
        )

    @property
    def exchanges(self) -> int:
        """How many of the steps move bytes between ranks."""
        return sum(isinstance(step, Exchange) for step in self.steps)

    def __str__(self) -> str:
        """The problem, and a line for each step with predicted bytes and time."""
        lines = [str(self.problem)]
        steps = zip(self.steps, self._itemsizes, self.step_seconds, strict=True)
        for number, (step, itemsize, seconds) in enumerate(steps, 1):
            line = f"{number}. {step}; {seconds * 1e3:.3g} ms"
            if isinstance(step, Exchange):
                received = max(bytes_received(step.src, step.dst, itemsize))
                line += f", a rank receives at most {received:,} bytes"
            lines.append(line)
        exchanges = "1 exchange" if self.exchanges == 1 else f"{self.exchanges} exchanges"
        lines.append(f"predicted: {self.seconds * 1e3:.3g} ms, {exchanges}")
        return "\n".join(lines)

    @cached_property
    def _itemsizes(self) -> tuple[int, ...]:
        """The bytes of an element when each step begins."""
        before, after = (
            dtypes.of(name).itemsize for name in (self.problem.dtype, self.problem.result)
        )
        turns = (
            index
            for index, step in enumerate(self.steps, 1)
            if isinstance(step, Transform)
            and (keeps_shape(self.problem.kind) or self.problem.axes[-1] in step.axes)
        )
        count = next(turns, 0)
        return (before,) * count + (after,) * (len(self.steps) - count)


def _passes(axes: tuple[int, ...], ndim: int) -> int:
    """Passes over memory: one for axes at either end of the order, three for those in between."""
    runs: list[list[int]] = []
    for axis in sorted(axes):
        if runs and runs[-1][-1] == axis - 1:
            runs[-1].append(axis)
        else:
            runs.append([axis])
    return sum(1 if run[0] == 0 or run[-1] == ndim - 1 else 3 for run in runs)


# -- the cheapest one ------------------------------------------------------------------------------

_Node = tuple[int, frozenset[int], bool]  # see _Search


def choose(problem: Problem, model: CostModel = ON_CORES) -> Strategy:
    """The strategy with the smallest predicted time, the same on every rank.

    It is a shortest path from the operand's layout to the result's, through slabs and grids, on
    which every axis is whole on all ranks once; a step costs its predicted time. The path of C2R is
    that of R2C, reversed.
    """
    real = not keeps_shape(problem.kind)
    if problem.kind in COMPLETING:
        backwards = _Search(
            problem.target, problem.source, problem.axes, real, model.mirrored()
        ).run()
        steps = tuple(step.reversed() for step in reversed(backwards))
        return Strategy(problem, steps, model)
    search = _Search(problem.source, problem.target, problem.axes, real, model)
    return Strategy(problem, tuple(search.run()), model)


class _Candidate(Immutable):
    """A layout that the array may have between steps, before and after the real axis is halved.

    One of them is None where the layout splits the real axis.
    """

    before: Layout | None
    after: Layout | None


class _Search:
    """Dijkstra's algorithm over (layout, axes that are done); ties go to what was found first.

    A node is (number of a candidate, axes done, whether an exchange has led there); candidate 0 is
    the source, 1 the target.
    """

    def __init__(
        self,
        source: Layout,
        target: Layout,
        axes: tuple[int, ...],
        real: bool,
        model: CostModel,
    ) -> None:
        self._model = model
        self._axes = axes
        self._real = axes[-1] if real else None
        self._shapes = (source.global_shape, target.global_shape)
        self._candidates = [
            _Candidate(source, self._resized(source, self._shapes[1])),
            _Candidate(self._resized(target, self._shapes[0]), target),
            *self._intermediate(source.size),
        ]

    def run(self) -> list[Step]:
        """The steps of the cheapest path from the source, nothing done, to the target, all done."""
        everything = frozenset(self._axes)
        order = itertools.count()  # breaks ties
        queue: list[tuple[float, int, _Node, tuple[Step, ...]]]
        queue = [(0.0, next(order), (0, frozenset(), False), ())]
        visited = set()
        while queue:
            seconds, _, node, steps = heapq.heappop(queue)
            number, done, _ = node
            if number == 1 and done == everything:
                return list(steps)
            if node in visited:
                continue
            visited.add(node)
            for neighbour, step in self._edges(node):
                cost = seconds + self._seconds(step, done, not steps)
                path = steps if step is None else (*steps, step)
                heapq.heappush(queue, (cost, next(order), neighbour, path))
        raise AssertionError("some candidate has each axis whole")

    def _seconds(self, step: Step | None, done: frozenset[int], first: bool) -> float:
        """The predicted time of a step in single precision, after the axes in `done`."""
        if step is None:
            return 0.0
        # On GPUs real elements count in full: transforms before an exchange hide it.
        real = self._real is not None and self._real not in done and not self._model.whole_arrays
        last = len(done) == len(self._axes)
        return self._model.seconds(step, 4 if real else 8, first=first, last=last)

    def _edges(self, node: _Node) -> Iterator[tuple[_Node, Step | None]]:
        """The next nodes, and the steps to them, None where nothing moves."""
        number, done, exchanged = node
        here = self._layout(number, done)
        assert here is not None, "a path leads only to layouts that exist"
        ready = self._ready(here, done)
        if ready:
            halving = self._real is not None and self._real not in done
            result = self._resized(here, self._shapes[1]) if halving else here
            assert result is not None, "the real axis is whole"
            yield (number, done | set(ready), False), Transform(ready, here, result)
        if exchanged:
            return
        finished = len(done) == len(self._axes)
        for other in [1] if finished else range(len(self._candidates)):
            there = self._layout(other, done)
            if other == number or there is None or not (finished or self._ready(there, done)):
                continue
            step = None if here.same_as(there) else Exchange(here, there)
            yield (other, done, True), step

    def _layout(self, number: int, done: frozenset[int]) -> Layout | None:
        halved = self._real is None or self._real in done
        return self._candidates[number].after if halved else self._candidates[number].before

    def _ready(self, layout: Layout, done: frozenset[int]) -> tuple[int, ...]:
        """The axes that can be transformed in this layout, the real one first."""
        whole = {axis for axis in self._axes if axis not in done and layout.is_whole(axis)}
        if self._real is not None and self._real not in done:
            if self._real not in whole:
                return ()
            return (self._real, *sorted(whole - {self._real}, reverse=True))
        return tuple(sorted(whole, reverse=True))

    def _resized(self, layout: Layout, shape: tuple[int, ...]) -> Layout | None:
        """`layout` for `shape`, which differs along the real axis; None if that is split."""
        if self._real is None:
            return layout
        if not layout.is_whole(self._real):
            return None
        axis, extent = self._real, layout.global_shape[self._real]
        whole, nothing = Spans.interval(0, shape[axis]), Spans.interval(0, 0)
        column = [whole if spans.length == extent else nothing for spans in layout.column(axis)]
        return layout.with_column(axis, shape[axis], column)

    def _intermediate(self, size: int) -> Iterator[_Candidate]:
        """Each slab, each grid where slabs leave ranks idle, and one rank alone if no slab has the
        axis whole.
        """
        ndim = len(self._shapes[0])
        splits: list[dict[int, int]] = [{axis: size} for axis in range(ndim)]
        long_enough = [axis for axis in range(ndim) if min(s[axis] for s in self._shapes) >= size]
        if len(long_enough) < 2:
            splits += [
                {one: p, two: size // p}
                for one, two in itertools.combinations(range(ndim), 2)
                for p in range(2, size)
                if size % p == 0
            ]
        for split in splits:
            before, after = (
                Layout.product(shape, _columns(shape, split, size), size=size)
                for shape in self._shapes
            )
            yield _Candidate(before, after)
        if ndim == 1:
            yield _Candidate(*(Layout.on_one_rank(shape, size, rank=0) for shape in self._shapes))


def _columns(
    shape: tuple[int, ...], split: dict[int, int], size: int
) -> list[tuple[Spans, ...] | None]:
    """The columns of a layout whose axes are `split` into so many even parts."""
    columns: list[tuple[Spans, ...] | None] = [None] * len(shape)
    step = size
    for axis, parts in split.items():
        step //= parts
        columns[axis] = tuple(
            Spans.even(shape[axis], parts, rank // step % parts) for rank in range(size)
        )
    return columns
