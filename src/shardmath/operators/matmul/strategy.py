"""Strategies: which rank multiplies what, what must move before that, and what follows.

A strategy gives every rank a box of the m x n x k iteration space, its work. Together the boxes
cover the space once. All else follows from geometry: the parts of A and B that a rank needs,
whether sums of several ranks must be added, and whether the result must move to where the caller
wants it. So a strategy is data, its cost is counted from geometry, and there is at least one for
all distributions.

    work (rows, columns, depth)          needs           leaves
    ---------------------------------    ------------    -------------------------------------
    stationary C: as D is, all of k      rows of A,      D itself
                                         columns of B
    stationary A: as A is, all of n      rows of B       partial sums: reduce
    a grid p x q x r of the space        panels          blocks of C: reduce if r > 1, then move
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product

from shardmath.arrays import dtypes
from shardmath.base.immutable import Immutable
from shardmath.geometry import Layout, Spans, common_elements, kept_elements
from shardmath.machine import Rates
from shardmath.operators.matmul.problem import Problem, gradient_layouts
from shardmath.program.steps import Combine, Move
from shardmath.redistribution import TransferPlan

Column = tuple[Spans, ...]  # the work along one axis, by rank


class Cost(Immutable):
    """The cost for the busiest rank: operations, bytes that its arithmetic reads and writes in
    memory, bytes taken from peers; and predicted seconds.
    """

    flops: float
    touched: int
    received: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{_time(self.seconds)}, {_count(self.flops)}FLOP, {_bytes(self.touched)} of memory "
            f"and {_bytes(self.received)} of peers per rank"
        )


class Strategy(Immutable):
    """The work of all ranks: its extent along m, n and k by rank, in `rows`, `columns`, `depth`.

    Three layouts of the result follow each other: `sums` has each rank's product before anything is
    added, `reduced` the complete sums, on one rank or equal on several, and `problem.d` the result
    where the caller wants it.
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
        """The moves of op(A), and of op(B), from where they are to where they are needed."""
        problem, itemsize = self.problem, dtypes.of(self.problem.dtype).itemsize
        return (
            TransferPlan(problem.a, self.a, itemsize),
            TransferPlan(problem.b, self.b, itemsize),
        )

    @cached_property
    def sums(self) -> Layout:
        """The layout of each rank's product. Parts that overlap are added if `reduces`."""
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
        """The layout of the complete sums, before they move to where the caller wants them."""
        if not self.reduces:
            return self.sums
        d = self.problem.d
        if d.disjoint():
            return d
        longer = 0 if d.global_shape[0] >= d.global_shape[1] else 1
        return Layout.slab(d.global_shape, d.size, axis=longer)

    @cached_property
    def passed(self) -> dict[str, Move | Combine]:
        """The moves and sums between ranks, by the buffer that they read.

        They are the same for cores and GPUs, on one host and on several. Sums are of the
        accumulator's type; for elements of another size the transfer is replaced where it is used.
        """
        problem, d = self.problem, self.problem.d
        a, b = self.transfers
        steps: dict[str, Move | Combine] = {}
        steps["a"], steps["b"] = Move(a, "a", "a here"), Move(b, "b", "b here")
        last = TransferPlan(self.reduced, d, dtypes.accumulator(problem.dtype).itemsize)
        if self.reduces:
            steps["sums"] = Combine(self._held, self.reduced, "sums", "reduced")
            steps["reduced"] = Move(last, "reduced", "total")
        else:
            steps["sums"] = Move(last, "sums", "total")
        if problem.sums_c:
            steps["c"] = Combine(d, d, "c", "total", weight="beta")
        if problem.epilog.makes_bgrad:
            matrix, held, need = gradient_layouts(problem)
            alone = not matrix.disjoint()  # replicas count once
            steps["vector"] = Combine(held, need, "vector", "gradient", alone=alone)
        return steps

    @property
    def _held(self) -> Layout:
        """The layout of the ranks' products. Ranks without any of k have none."""
        pairs = zip(self.rows, self.depth, strict=True)
        rows = [own if depth.length else Spans.interval(0, 0) for own, depth in pairs]
        problem = self.problem
        return Layout.product(problem.d.global_shape, [rows, self.columns], size=problem.size)

    @cached_property
    def moves_result(self) -> bool:
        """Whether the complete sums must move to other ranks at the end."""
        return not self.reduced.same_as(self.problem.d)

    @property
    def moves_inputs(self) -> tuple[bool, bool]:
        """Whether some rank needs a part of op(A), of op(B), that it does not own."""
        a, b = self.transfers
        return a.crosses, b.crosses

    @cached_property
    def kind(self) -> str:
        """The name of the way in which operands and sums are brought together."""
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

    def cost(self, rates: Rates) -> Cost:
        """The cost for the busiest rank."""
        ranks = range(self.problem.size)
        flops, operands, computing = zip(*(self._product(r, rates) for r in ranks), strict=True)
        received, touched = self._traffic()
        times = [
            computing[r] + rates.touching(touched[r]) + received[r] / rates.link for r in ranks
        ]
        begun = rates.gathering * any(self.moves_inputs)
        begun += rates.finishing * (self.reduces + self.moves_result)
        memory = max(operands[r] + touched[r] for r in ranks)
        return Cost(max(flops), memory, max(received), max(times) + begun)

    def _traffic(self) -> tuple[list[int], list[int]]:
        """The bytes that each rank takes from peers, and those that it reads and writes in its own
        memory after its product: to add parts of sums, to move the part of a result that stays, and
        to round D.
        """
        problem, ranks = self.problem, range(self.problem.size)
        wide = dtypes.accumulator(problem.dtype).itemsize
        a, b = (transfer.received for transfer in self.transfers)
        received, touched = [a[r] + b[r] for r in ranks], [0] * problem.size
        if not (self.reduces or self.moves_result):
            return received, touched
        results = problem.d.local_sizes
        touched = [(wide + dtypes.of(problem.result).itemsize) * results[r] for r in ranks]
        if self.reduces:
            added = self._added()
            received = [received[r] + wide * added[r] for r in ranks]
            sums = [added[r] + self.reduced.local_sizes[r] for r in ranks]
            touched = [touched[r] + 2 * wide * sums[r] for r in ranks]
        if self.moves_result:
            # Every element of the sums has an owner, whatever the strategy.
            kept = kept_elements(self.reduced, problem.d)
            moved = [wide * (results[r] - kept[r]) for r in ranks]
            received = [received[r] + moved[r] for r in ranks]
            touched = [touched[r] + 2 * (wide * results[r] - moved[r]) for r in ranks]
        return received, touched

    def _product(self, rank: int, rates: Rates) -> tuple[float, int, float]:
        """A rank's product: its operations; the bytes of operands and result; and predicted
        seconds, bound by memory, or by operations and by copies of the operands' blocks.

        A vector, and the matrix that it is multiplied with, are not copied.
        """
        m, n, k = self.rows[rank].length, self.columns[rank].length, self.depth[rank].length
        dtype = dtypes.of(self.problem.dtype)
        flops, wide = 2.0 * m * n * k, dtypes.accumulator(dtype).itemsize
        touched = dtype.itemsize * k * (m + n) + wide * m * n if m and n else 0
        copied = touched if min(m, n) > 1 else 0
        computing = flops / rates.product(dtype.name) + copied / rates.packing
        return flops, touched, max(computing, rates.touching(touched))

    def _added(self) -> list[int]:
        """Elements of other ranks' products that each rank reads to complete its sums."""
        copies = self.sums.copies
        if copies is not None and all(part.length for part in self.depth):
            pairs = zip(
                self.reduced.local_sizes, kept_elements(self.sums, self.reduced), strict=True
            )
            return [copies * needed - own for needed, own in pairs]
        read = common_elements(self.sums, self.reduced)
        ranks = range(self.problem.size)
        sources = [src for src in ranks if self.depth[src].length]
        return [sum(read[src][rank] for src in sources if src != rank) for rank in ranks]

    def steps(self) -> list[str]:
        """The steps in order, one line each."""
        move_a, move_b = self.moves_inputs
        lines = []
        for name, moved, layout in (("a", move_a, self.a), ("b", move_b, self.b)):
            if moved:
                how = "all of" if layout.is_replicated else "panels of"
                lines.append(f"take {how} {name} from peers: {layout.local_shape(0)} on rank 0")
        m, n, k = (column[0].length for column in (self.rows, self.columns, self.depth))
        lines.append(f"multiply {m} x {n} x {k} on rank 0")
        if self.reduces:
            lines.append(f"add the ranks' products, each rank its part: {self.reduced}")
        if self.moves_result:
            lines.append(f"move the result to where it is wanted: {self.problem.d}")
        return lines

    def __str__(self) -> str:
        return f"{self.kind} ({self.label})"


def choose(
    problem: Problem,
    rates: Rates,
    predicted: Callable[[Strategy], float | None] = lambda _: None,
) -> tuple[Strategy, list[tuple[Strategy, Cost]]]:
    """The strategy predicted to be fastest, and all candidates with their costs, fastest first.

    `predicted` returns the seconds of a strategy whose steps overlap, and None for others. A kind
    or label that the problem names wins over a faster one. Raises ValueError where there is no such
    strategy for these distributions, and lists those that there are.
    """
    compared = []
    for candidate in candidates(problem):
        cost, seconds = candidate.cost(rates), predicted(candidate)
        compared.append((candidate, cost if seconds is None else replace(cost, seconds=seconds)))
    compared.sort(key=lambda entry: entry[1].seconds)
    wanted = problem.strategy
    fitting = [x for x, _ in compared if wanted is None or wanted in (x.kind, x.label)]
    if not fitting:
        names = ", ".join(dict.fromkeys(str(candidate) for candidate, _ in compared))
        raise ValueError(f"no strategy {wanted!r} for these distributions; there are {names}")
    return fitting[0], compared


def candidates(problem: Problem) -> list[Strategy]:
    """The strategies worth comparing, without repetition."""
    strategies: dict[tuple[Column, Column, Column], Strategy] = {}
    for strategy in _all(problem):
        strategies.setdefault((strategy.rows, strategy.columns, strategy.depth), strategy)
    return list(strategies.values())


def _all(problem: Problem) -> Iterator[Strategy]:
    every = [(Spans.interval(0, extent),) * problem.size for extent in problem.shape]
    d, a, b = problem.d, problem.a, problem.b
    yield Strategy("stationary c", problem, d.column(0), d.column(1), every[2])
    if a.disjoint():
        yield Strategy("stationary a", problem, a.column(0), every[1], a.column(1))
    if b.disjoint():
        yield Strategy("stationary b", problem, every[0], b.column(1), b.column(0))
    for p, q, r in _grids(problem.size):
        parts = [
            [Spans.even(extent, count, number) for number in range(count)]
            for extent, count in zip(problem.shape, (p, q, r), strict=True)
        ]
        yield Strategy(f"grid {p} x {q} x {r}", problem, *zip(*product(*parts), strict=True))


def _grids(size: int) -> Iterator[tuple[int, int, int]]:
    for p in _divisors(size):
        for q in _divisors(size // p):
            yield p, q, size // p // q


def _divisors(number: int) -> Sequence[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _time(seconds: float) -> str:
    return _in_units(seconds, {"s": 1.0, "ms": 1e-3, "us": 1e-6})


def _count(number: float) -> str:
    return _in_units(number, {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0}, whole="")


def _bytes(number: float) -> str:
    return _in_units(number, {"GiB": 2.0**30, "MiB": 2.0**20, "KiB": 2.0**10, "B": 1.0}, whole="B")


def _in_units(number: float, units: Mapping[str, float], whole: str | None = None) -> str:
    """A number in the largest unit that it reaches, else in the last; without digits in `whole`."""
    unit = next((unit for unit, scale in units.items() if number >= scale), list(units)[-1])
    return f"{number / units[unit]:{'.0f' if unit == whole else '.3g'}} {unit}"
