"""Performing products on GPUs: all ranks decide between one kernel and phases, then launch.

To decide, each rank tells the lane of its stream, the order of its result, and a digest of the
product as one kernel would take it. With operands on GPUs a call returns when everything is on the
stream; operands in host memory are carried to the GPU and back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ClassVar

import numpy as np

from shardmath.arrays import ArraySpec
from shardmath.base import wire
from shardmath.context.context import Context
from shardmath.cuda import stream as streams
from shardmath.handles import device_array
from shardmath.handles.operand import Operand
from shardmath.local.gpu.blaslt import bindings
from shardmath.machine import Machine
from shardmath.operators.lanes import LANES, Lane
from shardmath.operators.matmul.gpu.fused import FusedProduct
from shardmath.operators.matmul.gpu.product_program import ProductProgram, collectives_of
from shardmath.operators.matmul.gpu.rank_plan import RankPlan, matrix_of, placement_of
from shardmath.operators.matmul.gpu.scale_moves import choose_strategy
from shardmath.operators.matmul.gpu.scaled_lowering import lowered
from shardmath.operators.matmul.scaling import SCALES
from shardmath.program.gpu_performing import Execution, Facts, Given, GPUPerformer, Ready
from shardmath.program.gpu_steps import GPUProgram
from shardmath.program.notes import real
from shardmath.program.performing import Plan, Turn

_ORDERS = ("", "C", "F")  # of products that one collective adds up; "" where peers read them
_DECISIONS = [  # numbered from 1: whether by one kernel, that order, whether in the last lane
    (is_fused, order, last)
    for last in (False, True)
    for order in _ORDERS
    for is_fused in (False, True)
]
_MOST_COPIED = 32 << 20  # bytes of operands: some 20 us, where a new call takes more than 1 ms
_UNKNOWN = b"?"  # the form of a call whose plan is not known yet


class Products(GPUPerformer):
    """Performs products on GPUs. Workspace belongs to the lanes, also that of objects."""

    carries_all: ClassVar[bool] = True  # programs that train get new results wherever there is room

    def _lane(self, stream: int, decision: int) -> Lane:
        """The lane of the stream, or the last one where ranks number their streams differently."""
        if decision and _DECISIONS[decision - 1][2]:
            return Lane.numbered(self._context, LANES - 1)
        return Lane.of(self._context, stream)

    def most_copied(self, spec: ArraySpec) -> int:
        """See Performer. On the default stream a copy follows the call before, which has read the
        same stand-ins.
        """
        default = device_array.stream_of(self._context, spec, None) == 0
        return _MOST_COPIED if default else 0

    def _facts(self, execution: Execution) -> Facts:
        rank_plan, out = rank_plan_of(self._context, execution.plan), execution.results["d"].array
        form = b""
        if rank_plan.one_kernel:
            form = self._by_one_kernel(execution).form
        return self._facts_of(execution.stream, matrix_of(out).by_columns, form)

    def _foreseen(self, turn: Turn, stream: int) -> Facts:
        arrays = turn.known.arrays.operands
        like = [arrays[name] for name in (["c"] if "c" in arrays else ["a", "b"])]
        return self._facts_of(stream, all(x.order == "F" for x in like), _UNKNOWN)

    def _facts_of(self, stream: int, by_columns: bool, form: bytes) -> Facts:
        lane = Lane.of(self._context, stream).number
        return Facts(False, False, False, "F" if by_columns else "C", lane, form)

    def _decide(self, plan: Plan, facts: Sequence[Facts]) -> int:
        rank_plan = rank_plan_of(self._context, plan)
        forms = [rank_facts.form for rank_facts in facts if rank_facts.form != _UNKNOWN]
        is_fused = rank_plan.one_kernel and all(forms) and len({form[0] for form in forms}) <= 1
        orders = {rank_facts.order for rank_facts in facts}
        order = rank_plan.addition_order(orders.pop()) if len(orders) == 1 else ""
        in_different_lanes = len({rank_facts.lane for rank_facts in facts}) > 1
        return 1 + _DECISIONS.index((is_fused, order, in_different_lanes))

    def _ready(self, execution: Execution, decision: int, *, allocate: bool) -> Ready | None:
        bindings()  # raises where there is no cuBLASLt
        context, is_fused = self._context, _DECISIONS[decision - 1][0]
        if is_fused:
            product = self._by_one_kernel(execution)
            return Ready((product.result_place,), partial(product.bind, context))
        return super()._ready(execution, decision, allocate=allocate)

    def _by_one_kernel(self, execution: Execution) -> FusedProduct:
        rank_plan, given = rank_plan_of(self._context, execution.plan), self._given(execution)
        return FusedProduct(rank_plan, given, execution.lane.team)

    def _program(self, execution: Execution, given: Given, decision: int) -> GPUProgram:
        context, lane, plan = self._context, execution.lane, execution.plan
        rank_plan, arrays = rank_plan_of(context, plan), placement_of(given.arrays, given.numbers)
        _, order, _ = _DECISIONS[decision - 1]

        def make() -> GPUProgram:
            return ProductProgram(context, lane, lowered(rank_plan, arrays, order), rank_plan)

        return self._programs.made((lane.number, plan, arrays, order), make)

    def _meet(self, lane: Lane, decision: int) -> None:
        is_fused, order, _ = _DECISIONS[decision - 1]
        if order and not is_fused:
            collectives_of(self._context, lane)

    def _given(self, execution: Execution) -> Given:
        """The arrays and numbers of an execution, by their names in programs. They keep no memory
        alive, except for copies made for this execution alone.

        Raises HeapExhausted where algorithms are to be timed.
        """
        context, problem = self._context, execution.plan.problem
        operands, numbers, results = execution.operands, execution.numbers, execution.results
        out = results["d"].array.without_memory()
        timings = rank_plan_of(context, execution.plan).algorithms.timings
        if timings is not None and "c" in operands and operands["c"].address == out.address:
            out = device_array.laid_out_alike(context, out)  # timing overwrites it
        arrays = {name: x for name, x in operands.items() if name not in SCALES}
        for name, turned in zip("ab", problem.transpose, strict=True):
            arrays[name] = operands[name].transposed() if turned else operands[name]
        arrays["d"] = out
        arrays |= {name: x.array.without_memory() for name, x in results.items() if name != "d"}
        values: dict[str, complex] = dict.fromkeys(SCALES, 1.0)
        for name in ("alpha", "beta"):
            number = numbers[name]
            assert number is not None, "it has a default"
            values[name] = number
        if problem.scaling is not None:
            for index, name in enumerate(SCALES):
                if numbers[name] is not None and problem.scaling.whole[index]:
                    values[name] = real(numbers, name)
                elif (scale := self._scale(execution, index)) is not None:
                    arrays[name] = scale
        carried = any(name in arrays and arrays[name].keep is not None for name in SCALES)
        values = {name: complex(value) for name, value in values.items()}
        return Given(arrays, values, lasting=not carried)

    def _scale(self, execution: Execution, index: int) -> Operand | None:
        """The array of the scales of an eight-bit matrix, transposed as op(A) and op(B) are; None
        where there are none. A copy of one in host memory lives as long as this call.
        """
        name, transpose = SCALES[index], execution.plan.problem.transpose
        array = execution.operands.get(name)
        if execution.numbers[name] is not None:  # of one row, in host memory
            one = np.full((1, 1), real(execution.numbers, name), np.float32)
            array = device_array.read(self._context, one, name)
        if array is not None and index < 2 and transpose[index] and len(array.shape) == 2:
            return array.transposed()
        return array


def rank_plan_of(context: Context, plan: Plan) -> RankPlan:
    """This rank's part of a plan, which is kept with the plan."""
    if "rank plan" not in plan.kept:
        strategy, _ = choose_strategy(plan.problem, Machine("cuda", context.hosts))
        plan.kept["rank plan"] = RankPlan(strategy, context.rank, context.hosts)
    rank_plan: RankPlan = plan.kept["rank plan"]
    return rank_plan


# -- tuning ----------------------------------------------------------------------------------------

Timings = Mapping[bytes, Sequence[float]]  # by a product's signature: seconds of each algorithm


def tuned(
    context: Context,
    products: Products,
    operation: str,
    ready: Callable[[], Turn],
    plan: Plan,
) -> list[str]:
    """Time the algorithms of a plan's products, and choose some for all executions. Collective.

    `ready()` makes the turn to time. Returns lines for `explain`. Operands stay as they are. Waits
    for the stream. Raises RuntimeError on all ranks while a stream is being captured on one.
    """
    algorithms, turns = rank_plan_of(context, plan).algorithms, []
    timings = algorithms.timings = {}

    def prepare() -> bytes:
        turn = ready()
        turns.append(turn)
        stream = device_array.stream_of(context, turn.known.arrays.spec, turn.arguments.stream)
        if streams.capturing(stream):
            raise RuntimeError(
                "plan(autotune=True) waits for its stream, which is being captured into a CUDA "
                "graph; plan before the capture"
            )
        products.prepare(turn, plan)
        return turn.note

    notes = context.gather(operation, prepare)
    (turn,) = turns
    notes = products.complete(turn, notes, plan)
    stream, lane = turn.held.stream, turn.held.lane
    with context.executing(operation):
        with lane.section(stream):
            products.launching(turn, notes).run(stream)
        lane.team.synchronize(stream)
    algorithms.timings = None
    texts = context.gather(operation, lambda: wire.encode(list(timings.items())))
    chosen = fastest([dict(wire.decode(text)) for text in texts])
    algorithms.chosen.update(chosen)
    return tuning_notes(timings, chosen)


def tuning_notes(timings: Timings, chosen: Mapping[bytes, int]) -> list[str]:
    """The lines that `explain` prints about this rank's products."""
    lines = []
    for signature, seconds in timings.items():
        number = chosen[signature]
        lines.append(
            f"autotuned: algorithm {number + 1} of {len(seconds)} takes "
            f"{seconds[number] * 1e6:.1f} us here, the one named first {seconds[0] * 1e6:.1f} us"
        )
    return lines or ["autotuned: no product of cuBLASLt to time"]


def fastest(ranks: Sequence[Timings]) -> dict[bytes, int]:
    """The number of the algorithm for each product, by its signature: the one that is fastest on
    its slowest rank. All ranks with that product use it, so that replicas keep the same bits.
    """
    chosen = {}
    for signature in dict.fromkeys(signature for timings in ranks for signature in timings):
        timed = [timings[signature] for timings in ranks if signature in timings]
        slowest = [max(seconds) for seconds in zip(*timed, strict=True)]
        chosen[signature] = slowest.index(min(slowest))
    return chosen
