"""How an array is transformed: local transforms where axes are whole, and exchanges in between.

A strategy is a list of steps between layouts, each with a predicted cost; `search` finds the
cheapest. Pure.

    slab X            transform y, z    exchange    transform x           exchange
    0 0 0 0    ──►    (whole here)      ──►         0 0 1 1 (whole)       ──►         as at first
    1 1 1 1                                         0 0 1 1
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property

from shardmath.arrays import dtypes
from shardmath.base.immutable import Immutable
from shardmath.geometry import Layout, bytes_received
from shardmath.machine import CORES, Rates, h200
from shardmath.operators.fft.problem import Problem


class CostModel(Immutable):
    """How transforms and exchanges use a machine, which decides between strategies.

    As first step an exchange costs `first_exchange_passes` over memory, as last step
    `last_exchange_passes`; others are fused with the transforms after them. `whole_arrays`:
    transforms go over all of an array, not block by block through a cache.
    """

    rates: Rates
    first_exchange_passes: float
    last_exchange_passes: float
    whole_arrays: bool = False

    def mirrored(self) -> CostModel:
        """The costs of a program whose steps are taken from the last to the first."""
        return replace(
            self,
            first_exchange_passes=self.last_exchange_passes,
            last_exchange_passes=self.first_exchange_passes,
        )

    def seconds(self, step: Step, itemsize: int, *, first: bool, last: bool) -> float:
        """Predicted for a step, of elements of `itemsize` bytes when it begins."""
        seconds = step.seconds(itemsize, self)
        if isinstance(step, Exchange):
            passes = self.first_exchange_passes * first + self.last_exchange_passes * last
            largest = max(math.prod(step.dst.local_shape(rank)) for rank in range(step.dst.size))
            seconds += passes * itemsize * largest / self.rates.strided
        return seconds


# The last exchange has no transform after it and is a pass of its own, reading and writing; before
# the first, an operand that is not on the heap is copied there.
ON_CORES = CostModel(CORES, 1.0, 2.0)
# Every exchange is a kernel that the links limit. Transforms that come first hide the exchange
# after them.
ON_GPUS = CostModel(replace(h200.H200, link=h200.PUSHED), 0.5, 0.0, whole_arrays=True)
# An exchange between hosts is packed and unpacked, two passes that nothing hides.
ON_GPUS_OF_HOSTS = CostModel(h200.H200_MULTI_HOST, 2.0, 2.0, whole_arrays=True)


class Transform(Immutable):
    """Local transforms along `axes`, in this order, which are whole on all ranks in `layout`.

    `result` is another layout only where an axis turns from real to hermitian or back.
    """

    axes: tuple[int, ...]
    layout: Layout
    result: Layout

    def reversed(self) -> Transform:
        """The step that undoes this one."""
        return Transform(self.axes[::-1], self.result, self.layout)

    def seconds(self, itemsize: int, model: CostModel) -> float:
        """Predicted for the rank that does most."""
        logs = sum(math.log2(max(2, self.layout.global_shape[axis])) for axis in self.axes)
        largest = max(math.prod(self.layout.local_shape(rank)) for rank in range(self.layout.size))
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
        """Predicted for the rank that receives most."""
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
        """Predicted."""
        return sum(self.step_seconds)

    @cached_property
    def step_seconds(self) -> tuple[float, ...]:
        """Predicted for each step."""
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
            if isinstance(step, Transform) and self.problem.axes[-1] in step.axes
        )
        count = next(turns, 0)
        return (before,) * count + (after,) * (len(self.steps) - count)


def _passes(axes: tuple[int, ...], ndim: int) -> int:
    """Over an array in memory: one for axes side by side, three for those with axes around them."""
    runs: list[list[int]] = []
    for axis in sorted(axes):
        if runs and runs[-1][-1] == axis - 1:
            runs[-1].append(axis)
        else:
            runs.append([axis])
    return sum(1 if run[0] == 0 or run[-1] == ndim - 1 else 3 for run in runs)
