"""How an array is transformed: local transforms where axes are whole, and exchanges in between.

A strategy is a list of steps between layouts. It is found by counting: the cheapest path from the
operand's layout to the result's, over slabs, grids and these two, until every axis has been whole
on all ranks once. Backwards is the same list reversed, which is how C2R comes from R2C.

    slab X            transform y, z    exchange    transform x           exchange
    0 0 0 0    ──►    (whole here)      ──►         0 0 1 1 (whole)       ──►         as at first
    1 1 1 1                                         0 0 1 1
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from shardmath.arrays import dtypes
from shardmath.geometry import Layout, Spans, bytes_received
from shardmath.operators.fft.problem import Problem

__all__ = [
    "CORES",
    "GPUS",
    "GPUS_APART",
    "Machine",
    "Move",
    "Step",
    "Strategy",
    "Transform",
    "choose",
]


@dataclass(frozen=True)
class Machine:
    """What decides between strategies: only ratios matter.

    `flops`, of single precision, and `bandwidth`, in bytes per second, are one rank's; `wire` is
    what it receives from its peers. An exchange costs `latency` seconds in synchronisation.
    `first_move` and `last_move` are passes over memory that a move costs as first or last step;
    others are fused with the transforms after them.
    """

    flops: float
    bandwidth: float
    wire: float
    latency: float
    first_move: float
    last_move: float
    whole: bool = False


# One core of a server of 2024, reading its peers' memory. The last move has no transform after it
# and is a pass of its own, reading and writing; before the first, an operand that is not on the
# heap is copied there.
CORES = Machine(2.5e9, 6e9, 6e9, 1e-5, 1.0, 2.0)
# An H200 with NVLink: every move is a kernel that the wire limits. Transforms that come first hide
# the move after them.
GPUS = Machine(1e13, 4e12, 3.3e11, 1e-5, 0.5, 0.0, whole=True)
# The same on several hosts, a network card of 400 Gb/s for each. A move is packed and unpacked, two
# passes that nothing hides.
GPUS_APART = Machine(1e13, 4e12, 4.5e10, 4e-5, 2.0, 2.0, whole=True)


@dataclass(frozen=True)
class Transform:
    """Local transforms along `axes`, in this order, which are whole on all ranks in `layout`.

    `result` is another layout only where an axis turns from real to hermitian or back.
    """

    axes: tuple[int, ...]
    layout: Layout
    result: Layout

    def reversed(self) -> Transform:
        """The step that undoes this one."""
        return Transform(self.axes[::-1], self.result, self.layout)

    def seconds(self, itemsize: int, machine: Machine) -> float:
        """Predicted for the rank that does most."""
        logs = sum(math.log2(max(2, self.layout.global_shape[axis])) for axis in self.axes)
        largest = max(math.prod(self.layout.local_shape(rank)) for rank in range(self.layout.size))
        passes = _passes(self.axes, self.layout.ndim) if machine.whole else 1
        flops = 5 * logs * itemsize / 8  # twice as slow in double precision, half as many if real
        return largest * (flops / machine.flops + 2 * passes * itemsize / machine.bandwidth)

    def __str__(self) -> str:
        axes = ", ".join(map(str, self.axes))
        return f"transform {'axis' if len(self.axes) == 1 else 'axes'} {axes}: {self.layout}"


@dataclass(frozen=True)
class Move:
    """An exchange: `src` becomes `dst`."""

    src: Layout
    dst: Layout

    def reversed(self) -> Move:
        """The step that undoes this one."""
        return Move(self.dst, self.src)

    def seconds(self, itemsize: int, machine: Machine) -> float:
        """Predicted for the rank that receives most."""
        received = max(bytes_received(self.src, self.dst, itemsize))
        return received / machine.wire + machine.latency

    def __str__(self) -> str:
        return f"exchange: {self.src} -> {self.dst}"


Step = Transform | Move
_Cut = tuple[tuple[int, ...], list[tuple[Spans, ...] | None]]  # global shape, columns


@dataclass(frozen=True)
class Strategy:
    """The steps from `problem.source` to `problem.target`, chosen for a machine."""

    problem: Problem
    steps: tuple[Step, ...]
    machine: Machine = CORES

    @cached_property
    def seconds(self) -> float:
        """Predicted."""
        pairs = zip(self.steps, self._itemsizes, strict=True)
        return sum(step.seconds(itemsize, self.machine) for step, itemsize in pairs)

    @property
    def exchanges(self) -> int:
        """How many of the steps move bytes between ranks."""
        return sum(isinstance(step, Move) for step in self.steps)

    def explain(self) -> str:
        """The problem, and a line for each step with predicted bytes and time."""
        lines = [str(self.problem)]
        for number, (step, itemsize) in enumerate(zip(self.steps, self._itemsizes, strict=True), 1):
            line = f"{number}. {step}; {step.seconds(itemsize, self.machine) * 1e3:.3g} ms"
            if isinstance(step, Move):
                received = max(bytes_received(step.src, step.dst, itemsize))
                line += f", a rank receives at most {received:,} bytes"
            lines.append(line)
        exchanges = "1 exchange" if self.exchanges == 1 else f"{self.exchanges} exchanges"
        lines.append(f"predicted: {self.seconds * 1e3:.3g} ms, {exchanges}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.explain()

    @cached_property
    def _itemsizes(self) -> tuple[int, ...]:
        """Of the elements that each step begins with."""
        before, after = (
            dtypes.of(name).itemsize for name in (self.problem.dtype, self.problem.result)
        )
        turns = (
            index
            for index, step in enumerate(self.steps, 1)
            if isinstance(step, Transform) and self.problem.axes[-1] in step.axes
        )
        count = next(turns, 0)
        return (before,) * count + (after,) * (len(self.steps) - count)


def choose(problem: Problem, machine: Machine = CORES) -> Strategy:
    """The strategy with the smallest predicted time. Pure: every rank finds the same."""
    real = problem.kind != "C2C"
    if problem.kind == "C2R":
        turned = replace(machine, first_move=machine.last_move, last_move=machine.first_move)
        backwards = _Search(problem.target, problem.source, problem.axes, real, turned).run()
        steps = tuple(step.reversed() for step in reversed(backwards))
        return Strategy(problem, steps, machine)
    search = _Search(problem.source, problem.target, problem.axes, real, machine)
    return Strategy(problem, tuple(search.run()), machine)


@dataclass(frozen=True)
class _Place:
    """A layout in which steps may be taken; before and after a real axis has been halved.

    None where it does not exist: it splits the real axis, which is then not halved there.
    """

    before: Layout | None
    after: Layout | None


class _Search:
    """Dijkstra's algorithm over (place, axes that are done); ties go to what was found first."""

    def __init__(
        self,
        source: Layout,
        target: Layout,
        axes: tuple[int, ...],
        real: bool,
        machine: Machine,
    ) -> None:
        self._machine = machine
        self._axes = axes
        self._real = axes[-1] if real else None
        self._shapes = (source.global_shape, target.global_shape)
        self._places = [
            _Place(source, self._resized(source, self._shapes[1])),
            _Place(self._resized(target, self._shapes[0]), target),
            *(
                _Place(*(Layout.product(shape, split, size=source.size) for shape, split in both))
                for both in self._others(source.size)
            ),
        ]

    def run(self) -> list[Step]:
        """The steps of the cheapest path from place 0, nothing done, to place 1, all done."""
        everything = frozenset(self._axes)
        start = (0, frozenset[int](), False)
        number = itertools.count()
        queue: list[tuple[float, int, tuple[int, frozenset[int], bool], tuple[Step, ...]]]
        queue = [(0.0, next(number), start, ())]
        finished = set()
        while queue:
            seconds, _, state, steps = heapq.heappop(queue)
            place, done, _ = state
            if place == 1 and done == everything:
                return list(steps)
            if state in finished:
                continue
            finished.add(state)
            for following, step in self._next(state):
                cost = seconds + self._seconds(step, state[1], not steps)
                more = steps if step is None else (*steps, step)
                heapq.heappush(queue, (cost, next(number), following, more))
        raise AssertionError("some place has each axis whole")

    def _seconds(self, step: Step | None, done: frozenset[int], first: bool) -> float:
        """Predicted in single precision for a step, when the axes `done` have been transformed."""
        if step is None:
            return 0.0
        machine = self._machine
        # On GPUs real elements count in full: a move is hidden by transforms that come before it.
        real = self._real is not None and self._real not in done and not machine.whole
        itemsize = 4 if real else 8
        if isinstance(step, Transform):
            return step.seconds(itemsize, machine)
        last = len(done) == len(self._axes)
        turns = machine.first_move * first + machine.last_move * last
        largest = max(math.prod(step.dst.local_shape(rank)) for rank in range(step.dst.size))
        return step.seconds(itemsize, machine) + turns * itemsize * largest / machine.bandwidth

    def _next(
        self, state: tuple[int, frozenset[int], bool]
    ) -> Iterator[tuple[tuple[int, frozenset[int], bool], Step | None]]:
        place, done, moved = state
        here = self._layout(place, done)
        assert here is not None, "a path leads only to layouts that exist"
        ready = self._ready(here, done)
        if ready:
            halves = self._real is not None and self._real not in done
            result = self._resized(here, self._shapes[1]) if halves else here
            assert result is not None, "the real axis is whole"
            yield (place, done | set(ready), False), Transform(ready, here, result)
        if moved:
            return
        finished = len(done) == len(self._axes)
        for other in [1] if finished else range(len(self._places)):
            there = self._layout(other, done)
            if other == place or there is None or not (finished or self._ready(there, done)):
                continue
            step = None if here.same_as(there) else Move(here, there)
            yield (other, done, True), step

    def _layout(self, place: int, done: frozenset[int]) -> Layout | None:
        halved = self._real is None or self._real in done
        return self._places[place].after if halved else self._places[place].before

    def _ready(self, layout: Layout, done: frozenset[int]) -> tuple[int, ...]:
        """The axes that can be transformed there, the real one first."""
        whole = {axis for axis in self._axes if axis not in done and _is_whole(layout, axis)}
        if self._real is not None and self._real not in done:
            if self._real not in whole:
                return ()
            return (self._real, *sorted(whole - {self._real}, reverse=True))
        return tuple(sorted(whole, reverse=True))

    def _resized(self, layout: Layout, shape: tuple[int, ...]) -> Layout | None:
        """`layout` of an array of `shape`, other along the real axis; None if it splits that."""
        if self._real is None:
            return layout
        if not _is_whole(layout, self._real):
            return None
        axis, extent = self._real, layout.global_shape[self._real]
        whole = Spans.interval(0, shape[axis])
        columns = [layout.column(each) for each in range(layout.ndim)]
        columns[axis] = tuple(
            whole if spans.length == extent else Spans.interval(0, 0) for spans in columns[axis]
        )
        return Layout.product(shape, columns, size=layout.size)

    def _others(self, size: int) -> Iterator[list[_Cut]]:
        """For each slab, for each grid where slabs leave ranks idle, and for one rank alone if no
        slab has the axis whole; each before and after halving.
        """
        ndim = len(self._shapes[0])
        cuts: list[dict[int, int]] = [{axis: size} for axis in range(ndim)]
        roomy = [axis for axis in range(ndim) if min(s[axis] for s in self._shapes) >= size]
        if len(roomy) < 2:
            cuts += [
                {one: p, two: size // p}
                for one, two in itertools.combinations(range(ndim), 2)
                for p in range(2, size)
                if size % p == 0
            ]
        if ndim == 1:
            cuts.append({})
        for cut in cuts:
            yield [(shape, _columns(shape, cut, size)) for shape in self._shapes]


def _columns(
    shape: tuple[int, ...], cut: dict[int, int], size: int
) -> list[tuple[Spans, ...] | None]:
    """The columns of a layout with axes in so many even parts; no cut gives rank 0 everything."""
    columns: list[tuple[Spans, ...] | None] = [None] * len(shape)
    if not cut:
        columns[0] = tuple(Spans.interval(0, shape[0] if rank == 0 else 0) for rank in range(size))
    step = size
    for axis, parts in cut.items():
        step //= parts
        columns[axis] = tuple(
            Spans.even(shape[axis], parts, rank // step % parts) for rank in range(size)
        )
    return columns


def _passes(axes: tuple[int, ...], ndim: int) -> int:
    """Over an array in memory: one for axes side by side, three for those with axes around them."""
    runs: list[list[int]] = []
    for axis in sorted(axes):
        if runs and runs[-1][-1] == axis - 1:
            runs[-1].append(axis)
        else:
            runs.append([axis])
    return sum(1 if run[0] == 0 or run[-1] == ndim - 1 else 3 for run in runs)


def _is_whole(layout: Layout, axis: int) -> bool:
    """Whether every rank that holds anything holds all of `axis`."""
    extent = layout.global_shape[axis]
    return all(
        part[axis].length == extent or any(spans.length == 0 for spans in part)
        for part in layout.parts
    )
