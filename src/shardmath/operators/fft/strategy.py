"""How an array is transformed: local transforms where axes are whole, and exchanges in between.

A strategy is a list of steps between layouts, each with a predicted cost; `search` finds the
cheapest. Pure.

    slab X            transform y, z    exchange    transform x           exchange
    0 0 0 0    ──►    (whole here)      ──►         0 0 1 1 (whole)       ──►         as at first
    1 1 1 1                                         0 0 1 1
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from shardmath.arrays import dtypes
from shardmath.geometry import Layout, bytes_received
from shardmath.operators.fft.problem import Problem

__all__ = [
    "CORES",
    "GPUS",
    "MULTI_HOST_GPUS",
    "Exchange",
    "Machine",
    "Step",
    "Strategy",
    "Transform",
]


@dataclass(frozen=True)
class Machine:
    """The cost model of one rank, which decides between strategies: only ratios matter.

    `flops` are of single precision. Of memory, and of the links to its peers, a rank has
    `memory_bandwidth` and `link_bandwidth`, in bytes per second. An exchange costs `latency`
    seconds in synchronisation. As first step it costs `first_exchange_passes` over memory, as last
    step `last_exchange_passes`; others are fused with the transforms after them. `whole_arrays`:
    transforms go over all of an array, not block by block through a cache.
    """

    flops: float
    memory_bandwidth: float
    link_bandwidth: float
    latency: float
    first_exchange_passes: float
    last_exchange_passes: float
    whole_arrays: bool = False


# One core of a server of 2024, reading its peers' memory. The last exchange has no transform after
# it and is a pass of its own, reading and writing; before the first, an operand that is not on the
# heap is copied there.
CORES = Machine(2.5e9, 6e9, 6e9, 1e-5, 1.0, 2.0)
# An H200 with NVLink: every exchange is a kernel that the links limit. Transforms that come first
# hide the exchange after them.
GPUS = Machine(1e13, 4e12, 3.3e11, 1e-5, 0.5, 0.0, whole_arrays=True)
# The same on several hosts, a network card of 400 Gb/s for each. An exchange is packed and
# unpacked, two passes that nothing hides.
MULTI_HOST_GPUS = Machine(1e13, 4e12, 4.5e10, 4e-5, 2.0, 2.0, whole_arrays=True)


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
        passes = _passes(self.axes, self.layout.ndim) if machine.whole_arrays else 1
        flops = 5 * logs * itemsize / 8  # twice as slow in double precision, half as many if real
        return largest * (flops / machine.flops + 2 * passes * itemsize / machine.memory_bandwidth)

    def __str__(self) -> str:
        axes = ", ".join(map(str, self.axes))
        return f"transform {'axis' if len(self.axes) == 1 else 'axes'} {axes}: {self.layout}"


@dataclass(frozen=True)
class Exchange:
    """Elements move between ranks: the layout `src` becomes `dst`."""

    src: Layout
    dst: Layout

    def reversed(self) -> Exchange:
        """The step that undoes this one."""
        return Exchange(self.dst, self.src)

    def seconds(self, itemsize: int, machine: Machine) -> float:
        """Predicted for the rank that receives most."""
        received = max(bytes_received(self.src, self.dst, itemsize))
        return received / machine.link_bandwidth + machine.latency

    def __str__(self) -> str:
        return f"exchange: {self.src} -> {self.dst}"


Step = Transform | Exchange


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
        return sum(isinstance(step, Exchange) for step in self.steps)

    def explain(self) -> str:
        """The problem, and a line for each step with predicted bytes and time."""
        lines = [str(self.problem)]
        for number, (step, itemsize) in enumerate(zip(self.steps, self._itemsizes, strict=True), 1):
            line = f"{number}. {step}; {step.seconds(itemsize, self.machine) * 1e3:.3g} ms"
            if isinstance(step, Exchange):
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


def _passes(axes: tuple[int, ...], ndim: int) -> int:
    """Over an array in memory: one for axes side by side, three for those with axes around them."""
    runs: list[list[int]] = []
    for axis in sorted(axes):
        if runs and runs[-1][-1] == axis - 1:
            runs[-1].append(axis)
        else:
            runs.append([axis])
    return sum(1 if run[0] == 0 or run[-1] == ndim - 1 else 3 for run in runs)
