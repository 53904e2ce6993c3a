"""The part of a strategy that one rank performs on its GPU, and the arrays of one execution.

A rank plan is derived from the strategy alone, kept with the plan, and the same for every
execution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from shardmath.arrays import dtypes
from shardmath.arrays.dtypes import FLOAT8, HALVES
from shardmath.base.lru_cache import LRUCache
from shardmath.geometry import Move, shared_part
from shardmath.handles.operand import Operand
from shardmath.local.float8 import BLOCK
from shardmath.local.gpu import Matrix
from shardmath.local.gpu.gemm import Algorithms
from shardmath.machine import Machine, h200
from shardmath.operators.matmul.gpu.local_product import OperandLayout
from shardmath.operators.matmul.gpu.panels import Interval, OperandPlan, intervals
from shardmath.operators.matmul.gpu.patterns import Pattern, pattern_of
from shardmath.operators.matmul.gpu.reduction_choice import (
    CHOICES,
    EPILOGS,
    adds_in_half_precision,
    split_k_product,
)
from shardmath.operators.matmul.gpu.rounds import Rounds, rounds_of
from shardmath.operators.matmul.gpu.row_split import RowSplitProduct, is_fused_faster
from shardmath.operators.matmul.gpu.scale_moves import (
    ScaleMoves,
    amax_transfer,
    modes,
    scale_moves,
)
from shardmath.operators.matmul.program import SCALES, passed
from shardmath.operators.matmul.strategy import Strategy
from shardmath.program import steps
from shardmath.program.steps import Combine
from shardmath.redistribution import TransferPlan
from shardmath.redistribution.parcels import Fetch, Outbox, Parcel, fetches, parcel_of

ALIGNMENT = 256  # bytes, where memory of a GPU begins
_KEPT = 32  # programs
# Of an operand every parcel has k slowest: an interval of k is one range of its bytes.
_SLOWEST = {"a": (1, 0), "b": (0, 1)}

Place = tuple[int, tuple[int, ...]]  # the address of element (0, 0), strides in bytes
AddressTable = Callable[[int], Place]  # by rank


class Lying(NamedTuple):
    """How an execution's arrays lie: their matrices by name, with addresses modulo ALIGNMENT, and
    which of a and b are on the heap. Of its numbers those that are 1, and those that are 0.
    """

    arrays: tuple[tuple[str, Matrix], ...]
    on_heap: tuple[bool, bool]
    ones: frozenset[str]
    zeros: frozenset[str]


@dataclass(frozen=True)
class Scales:
    """The scales of eight-bit a, b, c and D: for each a number, and what multiplies it, if any: an
    array on the GPU, of a's and b's granularity and lying as op(A) and op(B).
    """

    numbers: tuple[float, ...]
    arrays: tuple[Operand | None, ...]

    def address(self, index: int) -> int:
        """That of an array of one element; 0 if there is none."""
        array = self.arrays[index]
        return 0 if array is None else array.address


@dataclass(frozen=True)
class Operands:
    """One execution's arrays on this rank's GPU: op(A), op(B), C, D to be filled, what an epilog
    reads (`inputs`) and makes (`outputs`), and how.
    """

    a: Operand
    b: Operand
    c: Operand | None
    out: Operand
    alpha: complex
    beta: complex
    inputs: Mapping[str, Operand] = field(repr=False)
    outputs: Mapping[str, Operand] = field(repr=False)
    scales: Scales | None = None
    compute: int | None = None  # a MatmulComputeType that is faster, and less exact
    algorithms: Algorithms | None = None  # of cuBLASLt: the share's, or a dictionary to fill

    @property
    def arrays(self) -> dict[str, Operand]:
        """All of them by the names that programs have for them."""
        named = {"a": self.a, "b": self.b, "d": self.out, **self.inputs, **self.outputs}
        if self.c is not None:
            named["c"] = self.c
        if self.scales is not None:
            arrays = zip(SCALES, self.scales.arrays, strict=True)
            named |= {name: array for name, array in arrays if array is not None}
        return named

    @property
    def values(self) -> dict[str, complex]:
        """The numbers by name."""
        scales = (1.0,) * len(SCALES) if self.scales is None else self.scales.numbers
        names, values = ("alpha", "beta", *SCALES), (self.alpha, self.beta, *scales)
        return {name: complex(value) for name, value in zip(names, values, strict=True)}

    def lying(self) -> Lying:
        """How the arrays lie, as far as a program depends on it."""
        matrices = []
        for name, array in self.arrays.items():
            if name in SCALES and len(array.shape) < 2:  # one axis fits one of its matrix
                step = 0 if not array.shape else array.strides[0] // array.itemsize
                x = Matrix(array.address, array.size, 1, step, step, array.dtype)
            else:
                x = matrix_of(array)
            matrices.append((name, x._replace(address=x.address % ALIGNMENT)))
        values = self.values.items()
        return Lying(
            tuple(matrices),
            (self.a.block is not None, self.b.block is not None),
            frozenset(name for name, value in values if value == 1),
            frozenset(name for name, value in values if value == 0),
        )

    @property
    def ab(self) -> tuple[Operand, Operand]:
        """op(A) and op(B)."""
        return self.a, self.b


def matrix_of(array: Operand) -> Matrix:
    """An array of two axes, or a vector as a column."""
    one, two = (stride // array.itemsize for stride in (*array.strides, array.itemsize)[:2])
    rows, columns = (*array.shape, 1)[:2]
    return Matrix(array.address, rows, columns, one, two, array.dtype)


class Routes:
    """The matrices, by name, that ranks on several hosts pack for each other, and where `rank`
    finds them. The ranks with equal numbers in `hosts` are on one host.

    All is worked out when it is asked for.
    """

    def __init__(self, strategy: Strategy, rank: int, hosts: Sequence[int]) -> None:
        self._strategy = strategy
        self._rank = rank
        self._hosts = tuple(hosts)
        self._passed = passed(strategy)
        self._outboxes: dict[tuple[str, int, int], Outbox] = {}
        self._parcels: dict[tuple[str, int, int], Parcel] = {}
        self._transfers: dict[tuple[str, int], TransferPlan] = {}

    def outbox(self, name: str, src: int, itemsize: int) -> Outbox:
        """The parcels that `src` packs of its matrix, whose elements have so many bytes."""
        key = (name, src, itemsize)
        if key not in self._outboxes:
            axes, transfer = _SLOWEST.get(name, (0, 1)), self._transfer(name, itemsize)
            if transfer is not None:
                self._outboxes[key] = Outbox.of_transfer(transfer, src, axes)
            else:
                self._outboxes[key] = Outbox.of(self._added(name, src), itemsize, axes)
        return self._outboxes[key]

    def parcel(self, name: str, src: int, itemsize: int) -> Parcel:
        """The parcel that this rank takes of it."""
        key = (name, src, itemsize)
        if key not in self._parcels:
            axes, transfer = _SLOWEST.get(name, (0, 1)), self._transfer(name, itemsize)
            if transfer is not None:
                self._parcels[key] = parcel_of(transfer, src, self._rank, axes)
            else:
                self._parcels[key] = self.outbox(name, src, itemsize).parcels[self._rank]
        return self._parcels[key]

    def boxed(self, name: str, moves: Iterable[Move], itemsize: int) -> tuple[Move, ...]:
        """Moves into this rank, those of peers out of what they have packed."""
        made: list[Move] = []
        for move in moves:
            if move.src == self._rank:
                made.append(move)
            else:
                made += self.parcel(name, move.src, itemsize).boxed(move)
        return tuple(made)

    def fetches(self, name: str, boxed: Sequence[Move], itemsize: int) -> tuple[Fetch, ...]:
        """The parts of outboxes on other hosts that moves read."""
        return fetches(
            boxed,
            lambda src: self.parcel(name, src, itemsize),
            lambda src: self._hosts[src] != self._hosts[self._rank],
        )

    def _transfer(self, name: str, itemsize: int) -> TransferPlan | None:
        """The transfer of the matrices of that name; None where they are added up."""
        key = (name, itemsize)
        if isinstance(self._passed.get(name), Combine):
            return None
        if key not in self._transfers:
            self._transfers[key] = self._made_transfer(name, itemsize)
        return self._transfers[key]

    def _made_transfer(self, name: str, itemsize: int) -> TransferPlan:
        strategy, step = self._strategy, self._passed.get(name)
        if name == "amax":
            return amax_transfer(strategy.problem.size)
        if name.startswith("scales "):
            found = scale_moves(strategy, "ab".index(name[-1]))
            assert found is not None, "there are some"
            return found.transfer
        assert step is not None and not isinstance(step, Combine), name
        transfer = step.transfer
        assert isinstance(transfer, TransferPlan), "between layouts"
        return transfer if name in ("a", "b") else replace(transfer, itemsize=itemsize)

    def _added(self, name: str, src: int) -> list[Move]:
        """All moves out of a matrix of `src` that is added to others, to whomever needs it."""
        step = self._passed[name]
        assert isinstance(step, Combine), name
        ranks = () if step.alone else range(self._strategy.problem.size)
        return [
            move for dst in ranks for move in shared_part(step.held, step.needed, src=src, dst=dst)
        ]


@dataclass(frozen=True)
class RankPlan:
    """The part of `rank` in `strategy`, on its GPU; `hosts` are the numbers of all ranks' hosts.

    All moves of peers are out of what they show: their arrays, or their outboxes where ranks are on
    several hosts.
    """

    strategy: Strategy
    rank: int
    hosts: tuple[int, ...]

    @property
    def multi_host(self) -> bool:
        """Whether ranks are on several hosts, and so have no address for each other's memory."""
        return len(set(self.hosts)) > 1

    @property
    def machine(self) -> Machine:
        """The processors and hosts of the ranks."""
        return Machine("cuda", self.hosts)

    @cached_property
    def routes(self) -> Routes:
        """The contents of the ranks' outboxes."""
        return Routes(self.strategy, self.rank, self.hosts)

    @cached_property
    def operand_plans(self) -> tuple[OperandPlan, OperandPlan]:
        """How this rank reads op(A), along its axis 1, and op(B), along its axis 0."""
        (one, two), rank = self.strategy.transfers, self.rank
        shapes = self.strategy.a.local_shape(rank), self.strategy.b.local_shape(rank)
        return (
            OperandPlan.plan(self._published_moves("a", one.into(rank)), shapes[0], rank, 1),
            OperandPlan.plan(self._published_moves("b", two.into(rank)), shapes[1], rank, 0),
        )

    @cached_property
    def passed(self) -> dict[str, steps.Move | Combine]:
        """The steps that pass data from rank to rank, by the matrix that is read."""
        return passed(self.strategy)

    @cached_property
    def additions(self) -> tuple[tuple[Move, ...], ...]:
        """By source rank in order: its products that this rank adds to complete its sums."""
        return self._added("sums")

    @cached_property
    def last_moves(self) -> tuple[Move, ...]:
        """The moves that bring the complete sums to where the caller wants them."""
        name = "reduced" if self.strategy.reduces else "sums"
        step = self.passed[name]
        assert not isinstance(step, Combine), name
        return self._published_moves(name, step.transfer.into(self.rank))

    @cached_property
    def vectors(self) -> tuple[tuple[Move, ...], ...]:
        """The moves of the sums of a bias's gradient: of each rank, or of this one of replicas."""
        return self._added("vector")

    @cached_property
    def all_c(self) -> tuple[Move, ...]:
        """The moves that bring every rank's C, where all have one."""
        return tuple(move for moves in self._added("c") for move in moves)

    def _added(self, name: str) -> tuple[tuple[Move, ...], ...]:
        """By source: what this rank adds of the matrices of that name."""
        step = self.passed[name]
        assert isinstance(step, Combine), name
        return tuple(
            self._published_moves(name, shared_part(step.held, step.needed, src=src, dst=self.rank))
            for src in step.sources(self.rank)
        )

    def _published_moves(self, name: str, moves: tuple[Move, ...]) -> tuple[Move, ...]:
        """Moves of ranks' matrices of that name, as they are shown."""
        if not self.multi_host:
            return moves
        dtype = dtypes.of(self.strategy.problem.dtype)
        wide = dtypes.accumulator(dtype)
        return self.routes.boxed(name, moves, (dtype if name in ("a", "b") else wide).itemsize)

    @cached_property
    def schedule(self) -> tuple[list[Interval], int]:
        """The intervals of k, and how many indices the panels' memory has."""
        strategy, rank, (a, b) = self.strategy, self.rank, self.operand_plans
        dtype = strategy.problem.dtype
        itemsize = dtypes.of(dtype).itemsize
        flops = 2.0 * strategy.rows[rank].length * strategy.columns[rank].length
        came = max((a.remote + b.remote) * itemsize / self.machine.rates.link, 1e-12)
        rate = self.machine.rates.product(dtype)
        rotate = strategy.sums.disjoint()
        grain = BLOCK if self.multiplies_elements else 64
        ratio = flops / rate / came
        plan, room = intervals(a, b, itemsize, rate=rate, ratio=ratio, rotate=rotate, grain=grain)
        if self.rounds is not None:
            return [Interval(0, a.extent, 0, None)], 0
        if self.multiplies_elements and room == a.extent:
            hidden = came * (a.extent - (plan[0].hi - plan[0].lo))
            if self._passes_over_sums(len(plan)) >= hidden:
                return [Interval(0, a.extent, 0, None)], room
        return plan, room

    def _passes_over_sums(self, panels: int) -> float:
        """Seconds that several panels of float8 operands cost: their sums are added up in memory,
        as float32, which each further panel reads and writes, and are then rounded.
        """
        strategy, result = self.strategy, dtypes.of(self.strategy.problem.result)
        sums = strategy.rows[self.rank].length * strategy.columns[self.rank].length
        rounding = 0 if result.name == "float32" else 4 + result.itemsize
        return (
            sums * (8 * (panels - 1) + rounding) / self.machine.rates.memory
            + (panels - 1) * h200.PANEL
        )

    @cached_property
    def rounds(self) -> Rounds | None:
        """How eight-bit lines that all ranks need come; None where none do."""
        return (
            rounds_of(self.strategy) if self.multiplies_elements and not self.multi_host else None
        )

    @property
    def own_lines(self) -> int:
        """How many of them this rank has."""
        return 0 if self.rounds is None else self.rounds.lines[self.rank]

    @cached_property
    def scale_moves(self) -> tuple[ScaleMoves | None, ScaleMoves | None]:
        """How the scales of float8 operands get here."""
        return scale_moves(self.strategy, 0), scale_moves(self.strategy, 1)

    def scales_into(self, index: int) -> tuple[Move, ...]:
        """The moves of the scales of an operand that do not stay where they are."""
        found = self.scale_moves[index]
        assert found is not None, "there are some"
        return self._published_moves(f"scales {'ab'[index]}", found.transfer.into(self.rank))

    @cached_property
    def amax_moves(self) -> tuple[Move, ...]:
        """The moves of the greatest value of every rank's part of D."""
        return self._published_moves("amax", amax_transfer(len(self.hosts)).into(self.rank))

    @cached_property
    def modes(self) -> tuple[str, str]:
        """The modes of a product of float8 operands."""
        return modes(self.strategy)

    @property
    def multiplies_elements(self) -> bool:
        """Whether operands are multiplied as eight-bit elements, with scales."""
        return self.strategy.problem.dtype in FLOAT8

    @cached_property
    def cache(self) -> dict[Any, Any]:
        """Geometry that is on the device, which executions keep for the next."""
        return {}

    @cached_property
    def programs(self) -> LRUCache[Any, Any]:
        """The programs of executions whose arrays lay alike, as this GPU performs them."""
        return LRUCache(_KEPT)

    @cached_property
    def algorithms(self) -> Algorithms:
        """Those of cuBLASLt's that have been chosen for this rank's products."""
        return Algorithms()

    @cached_property
    def pattern(self) -> Pattern | None:
        """The pattern of the strategy, if one kernel can do all of it."""
        return None if self.multi_host else pattern_of(self.strategy)

    @cached_property
    def one_kernel(self) -> bool:
        """Whether the kernel for the pattern is predicted to be faster than the phases, or was
        asked for by the name of its kind. The same on all ranks.
        """
        strategy, pattern = self.strategy, self.pattern
        problem = strategy.problem
        if pattern is None or problem.dtype not in HALVES or problem.epilog not in EPILOGS:
            return False
        if problem.strategy == pattern.kind:
            return True
        if pattern.kind != "all-gather":
            return CHOICES[pattern.kind](split_k_product(strategy, pattern)).fused
        columns = strategy.rows if pattern.transposed else strategy.columns
        k = problem.shape[2]
        plain = OperandLayout("C", k)
        widest = max(part.length for part in columns)
        product = RowSplitProduct(pattern.rows, widest, k, problem.dtype, plain, plain)
        return is_fused_faster(product)

    @cached_property
    def parts_dtype(self) -> str:
        """The type in which the ranks' products are added up, where they are."""
        problem = self.strategy.problem
        m, n, _ = problem.shape
        is_half = dtypes.of(problem.result).itemsize == 2
        added = self.pattern is not None and self.pattern.kind != "all-gather"
        if is_half and added and adds_in_half_precision(m * n):
            return problem.result
        return dtypes.accumulator(problem.dtype).name

    def addition_order(self, order: str) -> str:
        """The order in which one collective adds up the products, for a result in that order.

        "" where none does: parts of it would not lie as the ranks want them.
        """
        if self.pattern is None or self.pattern.kind == "all-gather":
            return ""
        if self.pattern.kind == "all-reduce":
            return order
        natural = "F" if self.pattern.transposed else "C"
        return natural if order == natural else ""

    @property
    def multiplies(self) -> bool:
        """Whether this rank has a product to compute: it may have no elements, or none of k."""
        strategy, rank = self.strategy, self.rank
        return 0 not in strategy.sums.local_shape(rank) and strategy.depth[rank].length > 0

    @cached_property
    def reads_peers(self) -> bool:
        """Whether any rank reads another's operand where that is shown."""
        return self.rounds is None and any(transfer.crosses for transfer in self.strategy.transfers)
