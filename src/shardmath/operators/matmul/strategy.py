"""How a product is computed: which rank multiplies what, what must move first, and what follows.

A strategy gives every rank a box of the m x n x k iteration space, its work. Together the boxes
cover the space once. All else follows from geometry: the parts of A and B that a rank needs,
whether sums of several ranks must be added, and whether the result must move to where the caller
wants it. So a strategy is data, costs are counted and not guessed, and every pair of distributions
has at least one.

    work (rows, columns, depth)          needs           leaves
    ---------------------------------    ------------    -------------------------------------
    stationary C: as D is, all of k      rows of A,      D itself
                                         columns of B
    stationary A: as A is, all of n      rows of B       partial sums: reduce
    a grid p x q x r of the space        panels          blocks of C: reduce if r > 1, then move
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from shardmath.arrays import dtypes
from shardmath.geometry import Layout, Spans, bytes_received, common_elements, kept_elements
from shardmath.operators.matmul.problem import Problem
from shardmath.redistribution import TransferPlan

__all__ = [
    "CORES",
    "HOPPER",
    "HOPPER_MULTI_HOST",
    "Cost",
    "Machine",
    "Strategy",
    "candidates",
    "choose",
]

Column = tuple[Spans, ...]  # one axis of the work, by rank


@dataclass(frozen=True)
class Machine:
    """What one rank can do: multiply-adds counted as two operations per second by dtype, bytes per
    second that it takes from peers, seconds that a phase costs in synchronisation.
    """

    rates: Mapping[str, float]
    bandwidth: float
    latency: float

    def rate(self, dtype: str) -> float:
        """Floating-point operations per second in `dtype`; a complex product counts as one."""
        return self.rates[dtype]


# One core of a server of 2024 with the vendor's frequency limits in force; only ratios decide.
# Complex products cost four real ones, 16-bit floats are widened first.
_CORE = 5e10
CORES = Machine(
    rates={
        "float64": _CORE,
        "float32": 2 * _CORE,
        "float16": 1.5 * _CORE,
        "bfloat16": 1.5 * _CORE,
        "complex64": 2 * _CORE,
        "complex128": _CORE,
    },
    bandwidth=6e9,
    latency=2e-5,
)
# A GPU of the Hopper kind with NVLink to all peers: rates of large products on an H200.
HOPPER = Machine(
    rates={
        "float64": 6e13,
        "float32": 5e13,
        "float16": 7.5e14,
        "bfloat16": 7.5e14,
        "float8_e4m3fn": 1.2e15,
        "float8_e5m2": 1.2e15,
        "complex64": 1.2e13,
        "complex128": 1.5e13,
    },
    bandwidth=3.4e11,
    latency=1e-5,
)
# The same on several hosts, a network card of 400 Gb/s for each GPU.
HOPPER_MULTI_HOST = replace(HOPPER, bandwidth=4.5e10, latency=4e-5)


@dataclass(frozen=True)
class Cost:
    """The rank that does most: operations, bytes taken from peers, and predicted seconds."""

    flops: float
    received: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{_time(self.seconds)}, {_count(self.flops)}FLOP and {_bytes(self.received)} per rank"
        )


@dataclass(frozen=True)
class Strategy:
    """Who multiplies what. `rows`, `columns`, `depth` are the work's extent along m, n and k by
    rank.

    `sums` holds each rank's product before anything is added, `reduced` the complete sums, each on
    one rank or equal on several, and `problem.d` is where they end.
    """

    label: str
    problem: Problem
    rows: Column
    columns: Column
    depth: Column

    @cached_property
    def a(self) -> Layout:
        """The parts of op(A) that the ranks need."""
        return Layout.product(
            self.problem.a.global_shape, [self.rows, self.depth], size=self.problem.size
        )

    @cached_property
    def b(self) -> Layout:
        """The parts of op(B) that the ranks need."""
        return Layout.product(
            self.problem.b.global_shape, [self.depth, self.columns], size=self.problem.size
        )

    @cached_property
    def transfers(self) -> tuple[TransferPlan, TransferPlan]:
        """What moves of op(A), and of op(B), from where they are to where they are needed."""
        problem, itemsize = self.problem, dtypes.of(self.problem.dtype).itemsize
        return (
            TransferPlan(problem.a, self.a, itemsize),
            TransferPlan(problem.b, self.b, itemsize),
        )

    @cached_property
    def sums(self) -> Layout:
        """Each rank's product; where parts overlap they are to be added if `reduces`."""
        return Layout.product(
            self.problem.d.global_shape, [self.rows, self.columns], size=self.problem.size
        )

    @cached_property
    def reduces(self) -> bool:
        """Whether k is split, so that the products of several ranks add up."""
        k = self.problem.shape[2]
        return any(
            part.length != k and all(self.sums.local_shape(rank))
            for rank, part in enumerate(self.depth)
        )

    @cached_property
    def reduced(self) -> Layout:
        """Where the complete sums stand before they move to where the caller wants them."""
        if not self.reduces:
            return self.sums
        d = self.problem.d
        if d.disjoint():
            return d
        longer = 0 if d.global_shape[0] >= d.global_shape[1] else 1
        return Layout.slab(d.global_shape, d.size, axis=longer)

    @cached_property
    def moves_result(self) -> bool:
        """Whether the complete sums must change ranks at the end."""
        return not self.reduced.same_as(self.problem.d)

    @property
    def moves_inputs(self) -> tuple[bool, bool]:
        """Whether some rank needs a part of op(A), of op(B), that it does not own."""
        a, b = self.transfers
        return a.crosses, b.crosses

    @cached_property
    def kind(self) -> str:
        """The name of what this does: how the operands get together."""
        move_a, move_b = self.moves_inputs
        if self.reduces and not (move_a or move_b):
            return "reduce-scatter" if self.problem.d.disjoint() else "all-reduce"
        if self.reduces or self.moves_result:
            return "redistribute"
        if not (move_a or move_b):
            return "local"
        if self.a.is_replicated and self.b.is_replicated:
            return "replicate"
        return "stationary-c" if move_a and move_b else "all-gather"

    def cost(self, machine: Machine) -> Cost:
        """What the busiest rank does, by counting."""
        problem, ranks = self.problem, range(self.problem.size)
        wide = dtypes.accumulator(problem.dtype).itemsize
        work = [2.0 * r.length * c.length * d.length for r, c, d in zip(*self._work, strict=True)]
        a, b = (transfer.received for transfer in self.transfers)
        received = [a[r] + b[r] for r in ranks]
        phases = 1
        if self.reduces:
            phases += 1
            added = self._added()
            received = [received[r] + wide * added[r] for r in ranks]
        if self.moves_result:
            phases += 1
            moved = bytes_received(self.reduced, problem.d, wide)
            received = [received[r] + moved[r] for r in ranks]
        times = [
            work[r] / machine.rate(problem.dtype) + received[r] / machine.bandwidth for r in ranks
        ]
        return Cost(max(work), max(received), max(times) + phases * machine.latency)

    @property
    def _work(self) -> tuple[Column, Column, Column]:
        return self.rows, self.columns, self.depth

    def _added(self) -> list[int]:
        """Elements of other ranks' products that each rank reads to complete its sums."""
        copies = self.sums.copies
        if copies is not None and all(part.length for part in self.depth):
            own = kept_elements(self.sums, self.reduced)
            return [copies * prod(self.reduced.local_shape(r)) - own[r] for r in range(len(own))]
        read = common_elements(self.sums, self.reduced)
        ranks = range(self.problem.size)
        sources = [src for src in ranks if self.depth[src].length]
        return [sum(read[src][rank] for src in sources if src != rank) for rank in ranks]

    def steps(self) -> list[str]:
        """What happens, in order, one line each."""
        move_a, move_b = self.moves_inputs
        lines = []
        for name, moved, layout in (("a", move_a, self.a), ("b", move_b, self.b)):
            if moved:
                how = "all of" if layout.is_replicated else "panels of"
                lines.append(f"take {how} {name} from peers: {layout.local_shape(0)} on rank 0")
        m, n, k = (column[0].length for column in self._work)
        lines.append(f"multiply {m} x {n} x {k} on rank 0")
        if self.reduces:
            lines.append(f"add the ranks' products, each rank its part: {self.reduced.describe()}")
        if self.moves_result:
            lines.append(f"move the result to where it is wanted: {self.problem.d.describe()}")
        return lines

    def __str__(self) -> str:
        return f"{self.kind} ({self.label})"


def choose(
    problem: Problem,
    machine: Machine,
    predicted: Callable[[Strategy], float | None] = lambda _: None,
) -> tuple[Strategy, list[tuple[Strategy, Cost]]]:
    """The strategy predicted to be fastest, and all that were compared, fastest first.

    `predicted` gives the seconds of those whose steps are not done one after another. A kind or
    label named in the problem wins over a faster one. Raises ValueError when no strategy of that
    kind exists for these distributions, listing those that do.
    """
    compared = []
    for each in candidates(problem):
        cost, seconds = each.cost(machine), predicted(each)
        compared.append((each, cost if seconds is None else replace(cost, seconds=seconds)))
    compared.sort(key=lambda entry: entry[1].seconds)
    wanted = problem.strategy
    fitting = [each for each, _ in compared if wanted is None or wanted in (each.kind, each.label)]
    if not fitting:
        names = ", ".join(dict.fromkeys(str(each) for each, _ in compared))
        raise ValueError(f"no strategy {wanted!r} for these distributions; there are {names}")
    return fitting[0], compared


def candidates(problem: Problem) -> list[Strategy]:
    """The strategies worth comparing, without repetition."""
    found: dict[tuple[Column, Column, Column], Strategy] = {}
    for strategy in _all(problem):
        found.setdefault((strategy.rows, strategy.columns, strategy.depth), strategy)
    return list(found.values())


def _all(problem: Problem) -> Iterator[Strategy]:
    m, n, k = problem.shape
    whole = Strategy("", problem, _whole(m, problem), _whole(n, problem), _whole(k, problem))
    rows, columns = problem.d.column(0), problem.d.column(1)
    yield replace(whole, label="stationary c", rows=rows, columns=columns)
    if problem.a.disjoint():
        rows, depth = problem.a.column(0), problem.a.column(1)
        yield replace(whole, label="stationary a", rows=rows, depth=depth)
    if problem.b.disjoint():
        depth, columns = problem.b.column(0), problem.b.column(1)
        yield replace(whole, label="stationary b", depth=depth, columns=columns)
    for p, q, r in _grids(problem.size):
        places = [(x, y, z) for x in range(p) for y in range(q) for z in range(r)]
        yield replace(
            whole,
            label=f"grid {p} x {q} x {r}",
            rows=tuple(Spans.even(m, p, x) for x, _, _ in places),
            columns=tuple(Spans.even(n, q, y) for _, y, _ in places),
            depth=tuple(Spans.even(k, r, z) for _, _, z in places),
        )


def _whole(extent: int, problem: Problem) -> Column:
    return (Spans.interval(0, extent),) * problem.size


def _grids(size: int) -> Iterator[tuple[int, int, int]]:
    for p in _divisors(size):
        for q in _divisors(size // p):
            yield p, q, size // p // q


def _divisors(number: int) -> Sequence[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def _count(number: float) -> str:
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g} {prefix}"
    return f"{number:.0f} "


def _bytes(number: float) -> str:
    for unit, scale in (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number:.0f} B"
