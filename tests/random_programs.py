"""R22: random programs of several ranks, beside NumPy, which does the same with global arrays.

    python tests/random_programs.py --minutes 60                      4 ranks on cores
    python tests/random_programs.py --minutes 1 --ranks 2 --gpus      a GPU for each

A program is a number: all ranks draw the same steps from it. Each step makes one thing together, or
a few, of arrays that earlier ones have made, and compares what comes out with what NumPy makes of
the global arrays. What was computed within rounding is then replaced by NumPy's, so that errors do
not add up. The first difference ends it, with the number of the program and of the step: `--seed 7
--programs 1` repeats program 7 alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np

import shardmath
from shardmath import collectives, symmetric_memory
from shardmath.context.context import DistributedContext
from shardmath.distribution import BlockCyclic, BlockNonCyclic, ProcessGrid, Replicated, Slab
from shardmath.linalg.advanced import matmul

STEPS = 40  # of a program
KEPT = 6  # arrays
EXTENTS = (0, 1, 2, 3, 5, 7, 8, 9, 16, 33)
TYPES = ("float32", "float64", "complex64", "complex128", "int64")
FOLDED = {"sum": np.sum, "max": np.max, "min": np.min, "product": np.prod}

Pair = tuple[Any, Any]  # a global array of NumPy's, and the DistributedArray with its elements


class Program:
    """The program of one number, on this rank of `context`; `on_gpus`: parts are torch's, there."""

    def __init__(self, context: DistributedContext, seed: int, *, on_gpus: bool) -> None:
        self.context, self.seed, self.on_gpus = context, seed, on_gpus
        self.draw = Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.held: list[Pair] = []
        self.done: list[str] = []

    def run(self, steps: int) -> int:
        """Do so many steps; how many. Raises AssertionError where one has another result."""
        for number in range(steps):
            step = self.draw.choice(STEPS_OF_PROGRAMS)
            self.done.append(step.__name__)
            try:
                step(self)
            except AssertionError as error:
                raise AssertionError(
                    f"program {self.seed}, step {number}, rank {self.context.rank}: "
                    f"{step.__name__}: {error}"
                ) from error
        return steps

    # -- arrays ------------------------------------------------------------------------------------

    def elements(self, shape: Any, dtype: str) -> Any:
        """Random elements, the same on all ranks."""
        if dtype == "int64":
            return self.numbers.integers(-9, 9, shape)
        made = self.numbers.standard_normal(shape)
        if dtype.startswith("complex"):
            made = made + 1j * self.numbers.standard_normal(shape)
        return made.astype(dtype)

    def shape(self, ndim: int, *, empty: bool = True) -> tuple[int, ...]:
        """Random extents."""
        return tuple(self.draw.choice(EXTENTS[0 if empty else 1 :]) for _ in range(ndim))

    def distribution(self, ndim: int) -> Any:
        """A random distribution of an array with so many axes."""
        kind, size = self.draw.randrange(4), self.context.size
        if kind == 0:
            return Slab(self.draw.randrange(ndim))
        if kind == 1:
            return Replicated()
        extents, rest = [1] * ndim, size
        for prime in (2, 3, 5, 7):
            while rest % prime == 0:
                rest //= prime
                extents[self.draw.randrange(ndim)] *= prime
        extents[0] *= rest
        grid = ProcessGrid(shape=extents, layout=self.draw.choice(list(ProcessGrid.Layout)))
        if kind == 2:
            return BlockNonCyclic(grid)
        return BlockCyclic(grid, [self.draw.randint(1, 9) for _ in range(ndim)])

    def native(self, host: Any) -> Any:
        """The array as ranks here have it: on the symmetric heap or not, on cores or a GPU."""
        heap = self.draw.random() < 0.5
        if not self.on_gpus:
            if not heap:
                return np.ascontiguousarray(host)
            made = symmetric_memory.empty(*host.shape, dtype=host.dtype)
            made[...] = host
            return made
        import torch

        made = torch.from_numpy(np.ascontiguousarray(host))
        if not heap:
            return made.cuda()
        on_heap = symmetric_memory.empty(*host.shape, dtype=made.dtype, device="cuda")
        on_heap.copy_(made)
        return on_heap

    def split(self, whole: Any) -> Any:
        """A DistributedArray with these elements, in some distribution and memory."""
        distribution = self.distribution(whole.ndim)
        part = shardmath.from_global(whole, distribution).local
        return shardmath.array(self.native(part), distribution)

    def keep(self, whole: Any, array: Any) -> None:
        """Hold a result that is right within rounding, with NumPy's elements."""
        self.held.append((whole, array if whole.dtype == np.int64 else self.split(whole)))
        if len(self.held) > KEPT:
            self.held.pop(self.draw.randrange(len(self.held)))

    def chosen(self, fits: Callable[[Any], bool]) -> Pair:
        """One of the arrays that fit, or a new one of two axes."""
        fitting = [pair for pair in self.held if fits(pair[0])]
        if fitting and self.draw.random() < 0.8:
            return self.draw.choice(fitting)
        whole = self.elements(self.shape(2, empty=False), self.draw.choice(TYPES[:4]))
        return whole, self.split(whole)

    # -- steps -------------------------------------------------------------------------------------

    def make(self) -> None:
        """A new array, in any distribution, which is gathered again."""
        whole = self.elements(self.shape(self.draw.randint(1, 3)), self.draw.choice(TYPES))
        made = self.split(whole)
        equal(made.numpy(), whole)
        self.held.append((whole, made))

    def move(self) -> None:
        whole, x = self.chosen(lambda x: True)
        moved = x.to(self.distribution(whole.ndim))
        equal(moved.numpy(), whole)
        self.held.append((whole, moved))
        self.held = self.held[-KEPT:]

    def transform(self) -> None:
        whole, x = self.chosen(lambda x: x.dtype.kind == "c" and x.size and x.ndim > 1)
        if whole.dtype.kind != "c":
            whole, x = whole + 1j, x + 1j
        axes = sorted(self.draw.sample(range(whole.ndim), self.draw.randint(1, whole.ndim)))
        norm = self.draw.choice(("backward", "ortho", "forward"))
        there = self.distribution(whole.ndim) if self.draw.random() < 0.5 else None
        made = shardmath.fft.fft(x, axes=axes, norm=norm, distribution=there)
        wanted = np.fft.fftn(whole, axes=axes, norm=norm).astype(whole.dtype)
        close(made.numpy(), wanted, np.log2(whole.size + 2))
        back = shardmath.fft.ifft(made, axes=axes, norm=norm)
        close(back.numpy(), whole, np.log2(whole.size + 2))
        self.keep(wanted, made)

    def multiply(self) -> None:
        whole, x = self.chosen(lambda x: x.dtype.kind in "fc" and x.ndim == 2)
        other = self.elements((whole.shape[1], self.draw.choice(EXTENTS[1:])), whole.dtype.name)
        y = self.split(other)
        made = matmul(x, y) if self.draw.random() < 0.5 else x @ y
        bound = np.abs(whole).astype(float) @ np.abs(other).astype(float)
        close(made.numpy(), whole @ other, 2 * np.sqrt(whole.shape[1] + 1), bound)
        self.keep(whole @ other, made)

    def combine(self) -> None:
        """Elementwise, with an operand that is split otherwise."""
        whole, x = self.chosen(lambda x: x.dtype.kind in "fc")
        other = self.elements(whole.shape, whole.dtype.name)
        y = self.split(other)
        close((2 * x - y).numpy(), 2 * whole - other, 4)
        self.keep(2 * whole - other, y)

    def reduce(self) -> None:
        whole, x = self.chosen(lambda x: x.dtype.kind in "fi" and x.size)
        if whole.dtype.kind == "c":
            whole, x = whole.real.copy(), x.real
        axis = self.draw.choice([None, *range(whole.ndim)])
        scale = np.abs(whole).sum(axis=axis)
        for name in ("sum", "max"):
            made, wanted = getattr(x, name)(axis=axis), getattr(whole, name)(axis=axis)
            found = made.numpy() if isinstance(made, shardmath.DistributedArray) else made
            close(on_host(found), wanted, np.log2(whole.size + 2), scale)

    def collect(self) -> None:
        """The collectives, of another array on each rank."""
        size, rank = self.context.size, self.context.rank
        n, width = self.draw.choice(EXTENTS), self.draw.choice(EXTENTS[1:])
        dtype = self.draw.choice(TYPES)
        every = self.elements((size, n, width), dtype)
        own = self.native(every[rank])
        op = self.draw.choice(("sum", "max", "min") if "complex" not in dtype else ("sum",))
        wanted = FOLDED[op](every, axis=0)
        scale = np.abs(every).sum(axis=0)
        close(on_host(collectives.all_reduce(own, op=op)), wanted, size, scale)
        equal(on_host(collectives.all_gather(own)), every.reshape(size * n, width))
        root = self.draw.randrange(size)
        equal(on_host(collectives.broadcast(own, root=root)), every[root])
        rows = Slab.X.slices(rank, (n, width))
        close(on_host(collectives.reduce_scatter(own, op=op)), wanted[rows], size, scale[rows])
        parts = np.concatenate([each[rows] for each in every])
        equal(on_host(collectives.all_to_all(own)), parts)

    def neighbours(self) -> None:
        """Put and get around a ring, ordered by barriers, or by signals."""
        size, rank = self.context.size, self.context.rank
        n = self.draw.choice(EXTENTS[1:])
        every = self.elements((size, n), "float64")
        memory = self.native_on_heap(every[rank])
        handle = symmetric_memory.rendezvous(memory)
        handle.barrier()
        to, source = (rank + 1) % size, (rank - 1) % size
        found = self.plain(np.zeros(n))
        handle.get(found, source)
        handle.synchronize()
        equal(on_host(found), every[source])
        handle.barrier()
        handle.put(self.plain(every[rank] + 1), to)
        if size > 1 and self.draw.random() < 0.5:
            channel = self.draw.randrange(3)
            handle.put_signal(to, channel)
            handle.wait_signal(source, channel)
        else:
            handle.barrier()
        handle.synchronize()
        equal(on_host(memory), every[source] + 1)
        handle.barrier()

    def part_of_the_ranks(self) -> None:
        """A sum in a context of some of the ranks, in another order."""
        size = self.context.size
        ranks = self.draw.sample(range(size), self.draw.randint(1, size))
        every = self.elements((size, 5), "int64")
        own = self.native(every[self.context.rank])
        if self.context.rank in ranks:
            part = self.context.subset(ranks)
            found = collectives.all_reduce(own, context=part)
            equal(on_host(found), every[ranks].sum(axis=0))

    def forget(self) -> None:
        """Let go of arrays, and collect, on some of the ranks."""
        self.draw.shuffle(self.held)
        del self.held[2:]
        if (self.seed + self.context.rank) % 2:
            gc.collect()

    def plain(self, host: Any) -> Any:
        """The array in ordinary memory."""
        if not self.on_gpus:
            return host
        import torch

        return torch.from_numpy(host).cuda()

    def native_on_heap(self, host: Any) -> Any:
        """The array on the symmetric heap, never empty."""
        if not self.on_gpus:
            made = symmetric_memory.empty(*host.shape, dtype=host.dtype)
            made[...] = host
            return made
        import torch

        made = symmetric_memory.empty(*host.shape, dtype=torch.float64, device="cuda")
        made.copy_(torch.from_numpy(host))
        return made


STEPS_OF_PROGRAMS = (
    Program.make,
    Program.make,
    Program.move,
    Program.transform,
    Program.multiply,
    Program.combine,
    Program.reduce,
    Program.collect,
    Program.neighbours,
    Program.part_of_the_ranks,
    Program.forget,
)


def on_host(x: Any) -> Any:
    """An array as NumPy's."""
    return x.cpu().numpy() if hasattr(x, "cpu") else np.asarray(x)


def equal(found: Any, wanted: Any) -> None:
    """Assert that both have the same bits."""
    assert found.dtype == wanted.dtype and found.shape == wanted.shape, (found, wanted)
    assert found.tobytes() == np.ascontiguousarray(wanted).tobytes(), (found, wanted)


def close(found: Any, wanted: Any, factor: float, scale: Any = None) -> None:
    """Assert that they differ by `factor` roundings at most, of numbers as large as `scale`."""
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    if wanted.dtype.kind == "i":
        assert (found == wanted).all(), (found, wanted)
        return
    assert found.dtype == wanted.dtype, (found.dtype, wanted.dtype)
    largest = np.linalg.norm(wanted) if scale is None else scale
    bound = 8 * factor * np.finfo(wanted.dtype).eps * np.asarray(largest)
    assert (np.abs(found - wanted) <= bound + np.finfo(wanted.dtype).tiny).all(), (found, wanted)


def programs(
    seed: int, count: int, seconds: float, *, group: Any = None, on_gpus: bool = False
) -> tuple[int, int]:
    """Run programs from number `seed` on, up to `count` or for so long: how many, and their steps.

    Collective, from a start to an end; `group` as `initialize` takes it.
    """
    context = shardmath.initialize("cuda" if on_gpus else "cpu", group)
    if on_gpus:
        import torch

        torch.cuda.set_device(context.device_id)
    until, made, steps = time.monotonic() + seconds, 0, 0
    while made < count:
        steps += Program(context, seed + made, on_gpus=on_gpus).run(STEPS)
        made += 1
        if made % 25 == 0 and context.rank == 0 and sys.stderr.isatty():
            print(f"\r{made} programs, {steps} steps", end="", file=sys.stderr, flush=True)
        if collectives.all_reduce(time.monotonic() > until, op="max"):
            break
    shardmath.finalize()
    return made, steps


def main() -> int:
    parser = argparse.ArgumentParser(description="random programs beside a sequential oracle")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0, help="the number of the first program")
    parser.add_argument("--programs", type=int, default=1 << 60, help="at most so many")
    parser.add_argument("--gpus", action="store_true", help="a GPU for each rank")
    given = parser.parse_args()

    def job() -> tuple[int, int]:
        return programs(given.seed, given.programs, 60 * given.minutes, on_gpus=given.gpus)

    made, steps = shardmath.spawn(job, given.ranks, timeout=None)[0]
    facts = {"programs": made, "steps": steps, "ranks": given.ranks, "first": given.seed}
    print(json.dumps({**facts, "minutes": given.minutes, "on": "GPUs" if given.gpus else "cores"}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
