"""One rank's part of a strategy on its GPU, and the placement of the arrays of one execution.

A rank plan follows from the strategy alone. It is kept with the plan, for all executions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from functools import cached_property
from typing import Any, NamedTuple

from shardmath.arrays import dtypes
from shardmath.arrays.dtypes import FLOAT8, HALVES
from shardmath.base.immutable import Immutable
from shardmath.geometry import Move
from shardmath.handles.operand import Operand
from shardmath.local.float8 import BLOCK
from shardmath.local.gpu import Matrix
from shardmath.local.gpu.gemm import Algorithms
from shardmath.machine import Machine, OnHosts, h200
from shardmath.operators.matmul.gpu.local_product import OperandLayout
from shardmath.operators.matmul.gpu.panels import Interval, OperandPlan, intervals
from shardmath.operators.matmul.gpu.patterns import Pattern, pattern_of
from shardmath.operators.matmul.gpu.reduction_choice import (
    EPILOGS,
    adds_in_half_precision,
    choose,
    split_k_product,
)
from shardmath.operators.matmul.gpu.rounds import Rounds, rounds_of
from shardmath.operators.matmul.gpu.row_split import RowSplitProduct, is_fused_faster
from shardmath.operators.matmul.gpu.scale_moves import ScaleMoves, amax_transfer, modes, scale_moves
from shardmath.operators.matmul.scaling import SCALES
from shardmath.operators.matmul.strategy import Strategy
from shardmath.program import steps
from shardmath.program.steps import Combine
from shardmath.redistribution.delivery import Delivery
from shardmath.redistribution.plan import Overlap, Transfer

ALIGNMENT = 256  # bytes, where memory of a GPU begins
# Parcels of operands have k as slowest axis: an interval of k is then one range of bytes.
_SLOWEST = {"a": (1, 0), "b": (0, 1)}


class Placement(NamedTuple):
    """All that a program depends on in an execution's arrays and numbers: matrices by name, with
    addresses modulo ALIGNMENT; whether a and b are on the heap; which numbers are 1, and which 0.
    """

    arrays: tuple[tuple[str, Matrix], ...]
    on_heap: tuple[bool, bool]
    ones: frozenset[str]
    zeros: frozenset[str]


def placement_of(arrays: Mapping[str, Operand], numbers: Mapping[str, complex]) -> Placement:
    """The placement of an execution's arrays, and of its numbers.

    Arrays are named as in programs: op(A) is "a", op(B) "b", C "c" and D "d"; scales, and inputs
    and outputs of epilogs, have their own names.
    """
    matrices = []
    for name, array in arrays.items():
        if name in SCALES and len(array.shape) < 2:  # a vector, for either axis of its matrix
            step = 0 if not array.shape else array.strides[0] // array.itemsize
            x = Matrix(array.address, array.size, 1, step, step, array.dtype)
        else:
            x = matrix_of(array)
        matrices.append((name, x._replace(address=x.address % ALIGNMENT)))
    return Placement(
        tuple(matrices),
        (arrays["a"].block is not None, arrays["b"].block is not None),
        frozenset(name for name, value in numbers.items() if value == 1),
        frozenset(name for name, value in numbers.items() if value == 0),
    )


def matrix_of(array: Operand) -> Matrix:
    """An array of two axes, or a vector as a column."""
    one, two = (stride // array.itemsize for stride in (*array.strides, array.itemsize)[:2])
    rows, columns = (*array.shape, 1)[:2]
    return Matrix(array.address, rows, columns, one, two, array.dtype)


class RankPlan(OnHosts, Immutable):
    """The part of `rank` in `strategy`, on its GPU; `hosts` are the numbers of all ranks' hosts.

    Moves read what peers share: their arrays or, where ranks are on several hosts, the parcels that
    they pack. `cache` has results for the next executions, on the host and on the device, and
    `algorithms` are those of cuBLASLt that timing has chosen for this rank's products.
    """

    strategy: Strategy
    rank: int
    hosts: tuple[int, ...]
    cache: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    algorithms: Algorithms = field(default_factory=Algorithms, repr=False, compare=False)

    @property
    def machine(self) -> Machine:
        """The processors and hosts of the ranks."""
        return Machine("cuda", self.hosts)

    def transfer(self, name: str) -> Transfer:
        """How the matrices of that name pass from rank to rank."""
        problem = self.strategy.problem
        if name == "amax":
            return amax_transfer(problem.size)
        if name.startswith("scales "):
            moves = self.scale_moves["ab".index(name[-1])]
            assert moves is not None, "they travel"
            return moves.transfer
        step = self.strategy.passed[name]
        if isinstance(step, steps.Move):
            return step.transfer
        itemsize = dtypes.accumulator(problem.dtype).itemsize
        return Overlap(step.held, step.needed, itemsize, step.alone)

    def delivery(self, name: str, itemsize: int) -> Delivery:
        """How they pass between hosts, as elements of so many bytes."""
        key = "delivery", name, itemsize
        if key not in self.cache:
            transfer: Any = self.transfer(name)
            if transfer.itemsize != itemsize:
                transfer = replace(transfer, itemsize=itemsize)
            axes = _SLOWEST.get(name, (0, 1))
            self.cache[key] = Delivery(transfer, self.rank, self.hosts, axes)
        delivery: Delivery = self.cache[key]
        return delivery

    def moves(self, name: str) -> tuple[Move, ...]:
        """The moves into this rank, from the ranks' matrices of that name or from their parcels."""
        transfer = self.transfer(name)
        if self.multi_host:
            return self.delivery(name, transfer.itemsize).moves
        return transfer.into(self.rank)

    def added(self, name: str) -> list[tuple[Move, ...]]:
        """The moves of the parts that this rank adds up: a group for each source rank, in order."""
        step, moves = self.strategy.passed[name], self.moves(name)
        assert isinstance(step, Combine), name
        sources = step.sources(self.rank)
        return [tuple(move for move in moves if move.src == src) for src in sources]

    @cached_property
    def operand_plans(self) -> tuple[OperandPlan, OperandPlan]:
        """How this rank reads op(A), along its axis 1, and op(B), along its axis 0."""
        rank = self.rank
        shapes = self.strategy.a.local_shape(rank), self.strategy.b.local_shape(rank)
        return (
            OperandPlan.plan(self.moves("a"), shapes[0], rank, 1),
            OperandPlan.plan(self.moves("b"), shapes[1], rank, 0),
        )

    @cached_property
    def schedule(self) -> tuple[list[Interval], int]:
        """The intervals of k, and how many indices the panels' memory has."""
        strategy, rank, (a, b) = self.strategy, self.rank, self.operand_plans
        dtype = strategy.problem.dtype
        itemsize = dtypes.of(dtype).itemsize
        flops = 2.0 * strategy.rows[rank].length * strategy.columns[rank].length
        received = max((a.remote + b.remote) * itemsize / self.machine.rates.link, 1e-12)
        rate = self.machine.rates.product(dtype)
        rotate = strategy.sums.disjoint()
        grain = BLOCK if self.multiplies_elements else 64
        ratio = flops / rate / received
        plan, room = intervals(a, b, itemsize, rate=rate, ratio=ratio, rotate=rotate, grain=grain)
        if self.rounds is not None:
            return [Interval(0, a.extent, 0, None)], 0
        if self.multiplies_elements and room == a.extent:
            hidden = received * (a.extent - (plan[0].hi - plan[0].lo))
            if self._passes_over_sums(len(plan)) >= hidden:
                return [Interval(0, a.extent, 0, None)], room
        return plan, room

    def _passes_over_sums(self, panels: int) -> float:
        """Seconds that several panels of float8 operands cost more than one: their sums are float32
        in memory, which each further panel reads and writes, and which is rounded at the end.
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
        """The rounds in which eight-bit lines come that all ranks need; None where none do."""
        return (
            rounds_of(self.strategy) if self.multiplies_elements and not self.multi_host else None
        )

    @cached_property
    def scale_moves(self) -> tuple[ScaleMoves | None, ScaleMoves | None]:
        """The moves of the scales of float8 operands."""
        return scale_moves(self.strategy, 0), scale_moves(self.strategy, 1)

    @cached_property
    def modes(self) -> tuple[str, str]:
        """The modes of the scales of a and b, in a product of float8 operands."""
        return modes(self.strategy)

    @property
    def multiplies_elements(self) -> bool:
        """Whether cuBLASLt multiplies eight-bit elements, with their scales."""
        return self.strategy.problem.dtype in FLOAT8

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
        if pattern.adds:
            return choose(pattern.kind, split_k_product(strategy, pattern)).fused
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
        added = self.pattern is not None and self.pattern.adds
        if is_half and added and adds_in_half_precision(m * n):
            return problem.result
        return dtypes.accumulator(problem.dtype).name

    def addition_order(self, order: str) -> str:
        """The memory order in which one collective adds up the products, for a result in `order`.

        "" where no collective can: the ranks' parts would not be contiguous.
        """
        if self.pattern is None or not self.pattern.adds:
            return ""
        if self.pattern.kind == "all-reduce":
            return order
        natural = "F" if self.pattern.transposed else "C"
        return natural if order == natural else ""

    @property
    def multiplies(self) -> bool:
        """Whether this rank has a product to compute: its part, or its range of k, may be empty."""
        strategy, rank = self.strategy, self.rank
        return 0 not in strategy.sums.local_shape(rank) and strategy.depth[rank].length > 0

    @cached_property
    def reads_peers(self) -> bool:
        """Whether any rank reads another's operand."""
        return self.rounds is None and any(transfer.crosses for transfer in self.strategy.transfers)
