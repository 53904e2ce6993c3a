"""The call: read the arguments, agree, find the plan, run it, give the result back as it came.

A plan is what all ranks have agreed on and what this rank does for it; it holds no operand, and is
kept for the next call that looks the same on every rank. alpha and beta are not part of it: they
travel with each call, and must be equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardmath.agreement import checked, require_equal
from shardmath.arrays import Library, library_of
from shardmath.arrays.base import HostArray, share_memory
from shardmath.call.agreement import HashedSpec, agree_plan
from shardmath.context import Context
from shardmath.local.float8 import dequantize
from shardmath.machine import CORES, Machine
from shardmath.operators.lifecycle import log_plan
from shardmath.operators.matmul import host
from shardmath.operators.matmul.arguments import Arguments, agreed_scalars, packed_scalars
from shardmath.operators.matmul.problem import Call, Facts, Problem, check, check_operands, describe
from shardmath.operators.matmul.scaling import Scaling, blocks_of, scale_matrix
from shardmath.operators.matmul.strategy import Cost, Strategy, choose
from shardmath.operators.workspace import Workspace
from shardmath.symmetric.allocation import block_of, empty_on_heap
from shardmath.symmetric.heap import Block

__all__ = [
    "Plan",
    "agree_on_operands",
    "agree_on_plan",
    "autotuned",
    "call_of",
    "product",
    "run",
    "was_executed",
]


@dataclass(frozen=True)
class Plan:
    """What the ranks agreed on, and what this rank does."""

    strategy: Strategy
    compared: tuple[tuple[Strategy, Cost], ...]
    rank_plan: host.RankPlan
    notes: tuple[str, ...] = ()  # on how the steps are done

    @property
    def problem(self) -> Problem:
        """The product."""
        return self.strategy.problem

    def explain(self) -> str:
        """What was chosen, its steps, and what it was compared with, predicted by counting."""
        costs = {id(each): cost for each, cost in self.compared}
        forced = f", as options.strategy={self.problem.strategy!r} asks" * bool(
            self.problem.strategy
        )
        lines = [
            str(self.problem),
            f"chosen: {self.strategy}{forced}; predicted {costs[id(self.strategy)]}",
        ]
        lines += [f"  {i}. {step}" for i, step in enumerate(self.strategy.steps(), 1)]
        lines += [f"  {note}" for note in (*self.notes, *self.rank_plan.notes)]
        others = [entry for entry in self.compared if entry[0] is not self.strategy]
        if others:
            lines.append("compared with")
            lines += [f"  {each!s:<34} {cost}" for each, cost in others]
        return "\n".join(lines)


def agree_on_operands(context: Context, arguments: Arguments) -> Facts:
    """Agree that the operands fit, before an epilog is known. Collective."""

    def described() -> tuple[Facts, tuple[complex, complex]]:
        return describe(call_of(context, arguments)), arguments.scalars()

    def check(specs: list[Any]) -> Facts:
        require_equal("(alpha, beta)", [scalars for _, scalars in specs])
        return check_operands([facts for facts, _ in specs], context.rank)

    return context.agree("Matmul", described, check)


def agree_on_plan(context: Context, arguments: Arguments) -> tuple[Plan, Call]:
    """The plan for these arguments, and the call as read. Collective.

    Raises the same error on every rank when the arguments of one are wrong, or do not fit together.
    """
    calls: list[Call] = []
    plan, _ = _planned(context, arguments, calls)
    return plan, calls[0]


def _planned(
    context: Context,
    arguments: Arguments,
    calls: list[Call],
    repeat: Callable[[], tuple[HashedSpec, bytes] | None] = lambda: None,
) -> tuple[Plan, list[bytes]]:
    """The plan, and what each rank said by `repeat`, if not None. Collective.

    The call is read, and put into `calls`, where that has nothing to say.
    """

    def described() -> tuple[Facts | HashedSpec, bytes]:
        said = repeat()
        if said is not None:
            return said
        calls.append(call_of(context, arguments))
        return describe(calls[0]), b""

    def build(specs: list[Any]) -> Plan:
        if context.team is None:
            strategy, compared = choose(check(specs).widened(), CORES)
            return Plan(strategy, tuple(compared), host.RankPlan(strategy, context.rank))
        from shardmath.operators.matmul import gpu

        hosts = context.hosts
        strategy, compared = gpu.choose_strategy(check(specs), Machine("cuda", hosts))
        rank_plan = gpu.RankPlan(strategy, context.rank, hosts)
        return Plan(strategy, tuple(compared), rank_plan, tuple(gpu.notes(rank_plan)))

    plan, notes = agree_plan(context, "matmul" if context.team else "Matmul", described, build)
    if calls:
        log_plan(context, calls[0].options.logger, plan)
    return plan, notes


def autotuned(context: Context, operation: str, arguments: Arguments, plan: Plan) -> Plan:
    """A plan of its own whose products have been timed on the arguments, which stay as they are.

    On cores the same plan: there is nothing to choose. Collective.
    """
    if context.team is None:
        return plan
    from shardmath.operators.matmul import gpu

    own = replace(plan, rank_plan=gpu.RankPlan(plan.strategy, context.rank, context.hosts))
    gpu.tune(context, operation, arguments, lambda: own, lambda: call_of(context, arguments))
    return own


def call_of(context: Context, arguments: Arguments) -> Call:
    """The call with specs in place of arrays. Raises ValueError also for one that lies elsewhere
    than `context` computes.
    """
    call = arguments.call()
    given = [*zip("abc", call.operands, strict=True), *call.inputs]
    for name, spec in given:
        if spec is None or spec.device in _places(context):
            continue
        raise ValueError(
            f"{name} is on {spec.device}, and this rank computes on {_places(context)[0]}"
        )
    return call


def was_executed(context: Context, plan: Plan, arguments: Arguments) -> bool:
    """Whether this rank has executed the plan on arguments like these, which fit therefore."""
    if context.team is None:
        return False
    from shardmath.operators.matmul import gpu

    rank_plan: Any = plan.rank_plan
    return gpu.was_executed(context, rank_plan, arguments)


def _places(context: Context) -> tuple[str, ...]:
    """The devices whose arrays a context takes: its own, and the host."""
    return ("cpu",) if context.team is None else (context.team.device.name, "cpu")


def product(context: Context, arguments: Arguments) -> Any:
    """What the function returns: agree on a plan, and execute it. Collective.

    On GPUs a call that all ranks have made before is agreed on in one exchange.
    """
    if context.team is None:
        plan, call = agree_on_plan(context, arguments)
        return run(context, "matmul", arguments, lambda: plan, lambda: call)
    from shardmath.operators.matmul import gpu

    calls: list[Call] = []
    invocation = gpu.Invocation(context, "matmul", arguments)
    plan, notes = _planned(context, arguments, calls, invocation.try_replay)
    if not invocation.is_replay(notes):
        invocation.agree(lambda: plan, lambda: calls[0] if calls else call_of(context, arguments))
    return invocation.perform()


def run(
    context: Context,
    operation: str,
    arguments: Arguments,
    ready: Callable[[], Plan],
    read: Callable[[], Call],
) -> Any:
    """Execute a plan on arguments that it was made for: D, or (D, outputs of the epilog).
    Collective.

    `ready()` is the plan. `read()` is the call that the arguments make; a rank that has executed
    the plan on arrays that look the same need not ask. What they raise on one rank is raised on
    all, as is want of memory, before any element has been written.
    """
    if context.team is not None:
        from shardmath.operators.matmul import gpu

        invocation = gpu.Invocation(context, operation, arguments)
        invocation.agree(ready, read)
        return invocation.perform()
    made: list[tuple[Any, host.Execution]] = []

    def prepare() -> bytes:
        plan, call = ready(), read()
        out, operands = _operands(context, plan, call, arguments)
        made.append((out, host.Execution(context, plan.rank_plan, operands, operation)))
        told = packed_scalars((operands.alpha, operands.beta), operands.scales)
        return told + made[0][1].prepare()

    texts = context.gather(operation, prepare)
    shown = checked(context.board, agreed_scalars, texts)
    out, execution = made[0]
    with context.executing(operation):
        aux = execution.run(shown)
    if not aux:
        return out
    library = library_of(arguments.a)
    return out, {name: library.from_host(array) for name, array in aux.items()}


def _operands(
    context: Context, plan: Plan, call: Call, arguments: Arguments
) -> tuple[Any, host.Operands]:
    """D, in the library of a, and all arrays as the execution sees them.

    Raises UseAfterFree for a freed operand, ValueError when D is c and cannot be written to or
    overlaps a or b, HeapExhausted when D finds no room.
    """
    library, scaling = library_of(arguments.a), plan.problem.scaling
    a, b = library.host_view(arguments.a), library.host_view(arguments.b)
    c = None if arguments.c is None else library.host_view(arguments.c)
    blocks = [None if x is None else _block(context, x) for x in (a, b, c)]
    alpha, beta = arguments.scalars()
    scales = () if scaling is None else arguments.numbers(scaling)
    if call.options.inplace:
        out = arguments.c
        target = library.host_view(out, writable=True, name="c")
        if share_memory(target, a) or share_memory(target, b):
            raise ValueError("c shares memory with a or b, and options.inplace=True overwrites it")
    else:
        out = _result(context, plan, library, call, None not in blocks[: 2 + (c is not None)])
        target = library.host_view(out, writable=True)
    a, b = (x.T if turned else x for x, turned in zip((a, b), call.transpose, strict=False))
    if scaling is not None:
        a, b, blocks = _widened(context, scaling, arguments, (a, b), call.transpose)
    return out, host.Operands(
        a=a,
        b=b,
        c=c,
        out=target,
        alpha=alpha,
        beta=beta,
        blocks=(blocks[0], blocks[1]),
        inputs={name: library.host_view(x) for name, x in (arguments.inputs or {}).items()},
        scales=scales,
        library=library if scaling is None else None,
    )


def _widened(
    context: Context,
    scaling: Scaling,
    arguments: Arguments,
    factors: tuple[HostArray, HostArray],
    transpose: Sequence[bool],
) -> tuple[HostArray, HostArray, list[Block | None]]:
    """The numbers that op(A) and op(B) stand for, on the heap, where peers read them in place."""
    found: list[HostArray] = []
    workspace = Workspace.of(context)
    for index, x in enumerate(factors):
        blocks = blocks_of((scaling.a, scaling.b)[index], index)
        scales = scale_matrix(arguments.scales, index, blocks.shape(*x.shape), transpose[index])
        by_columns = abs(x.strides[0]) < abs(x.strides[1])
        shape = x.shape[::-1] if by_columns else x.shape
        numbers = workspace.array(f"numbers {'ab'[index]}", shape, np.float32)
        numbers = numbers.T if by_columns else numbers
        dequantize(x, scales, blocks, numbers)
        found.append(numbers)
    return found[0], found[1], [workspace.block(f"numbers {name}") for name in "ab"]


def _block(context: Context, host_array: HostArray) -> Block | None:
    """Where an array lies on the heap: of its memory, since a lazy tensor is read from a copy."""
    found = block_of(context, host_array)
    return None if found is None else found[0]


def _result(context: Context, plan: Plan, library: Library, call: Call, on_heap: bool) -> Any:
    """A new local part of D, in column-major order if the operands are, on the heap if they are."""
    a, b, c = call.operands
    assert a is not None and b is not None
    column = c.order == "F" if c is not None else a.order == b.order == "F"
    order: Any = "F" if column else "C"
    shape = plan.problem.d.local_shape(context.rank)
    if on_heap:
        return empty_on_heap(context, library, shape, plan.problem.result, order)
    return library.empty(shape, plan.problem.result, order)
