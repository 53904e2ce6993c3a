"""Moves on GPUs: synchronise, push or pull, synchronise; all on a stream.

    push     into the peers' results, if all results were given, and are on the heap
    pull     from the peers' operands, if all of those are on the heap: so peers need not be told
             where a new result lies, which differs from call to call
    staged   otherwise: push to heap memory of the peers, from which they copy their results
    deliver  between hosts: pack and fetch, as `hosts` says

Before the first barrier, owners may still use the memory that is written; after the second, all
elements are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from shardmath.operators.lanes import LANES, NEW_RESULT, Lane
from shardmath.operators.workspace import KEPT_STAGING
from shardmath.program.gpu_performing import Execution, Facts, Given, GPUPerformer
from shardmath.program.gpu_steps import GPUProgram
from shardmath.program.hosts import FETCHED, OUTBOX, between_hosts
from shardmath.program.performing import Plan, Turn
from shardmath.program.rank_program import Copy, RankProgram, View, packed
from shardmath.program.steps import Memory, Move, Pack, Program
from shardmath.redistribution.plan import Transfer

_PUSH, _PULL, _STAGED, _DELIVER = 1, 2, 3, 4  # decisions
_STAGING = "staging"  # of the lane's memories


class GPUs(GPUPerformer):
    """Performs programs of one move on GPUs. All calls without an object share one lane."""

    _used: Lane | None = None

    def _lane(self, stream: int, decision: int) -> Lane:
        if self._used is None or self._used.number != self.number % (LANES - 1):
            self._used = Lane.numbered(self._context, self.number % (LANES - 1))
        return self._used

    def _decide(self, plan: Plan, facts: Sequence[Facts]) -> int:
        transfer = _transfer(plan.program)
        if self._context.multi_host and transfer.crosses:
            return _DELIVER
        sent, received = transfer.traffic
        if all(rank.result or not n for rank, n in zip(facts, received, strict=True)):
            return _PUSH
        if all(rank.operand or not n for rank, n in zip(facts, sent, strict=True)):
            return _PULL
        return _STAGED

    def _facts(self, execution: Execution) -> Facts:
        facts = super()._facts(execution)
        return facts._replace(result=facts.result and not execution.new)

    def _foreseen(self, turn: Turn, stream: int) -> Facts:
        facts = super()._foreseen(turn, stream)
        return facts._replace(result=facts.result and bool(turn.known.arrays.targets))

    def _program(self, execution: Execution, given: Given, decision: int) -> GPUProgram:
        context, lane, plan = self._context, execution.lane, execution.plan
        operand, out = (
            View(name, array.shape, array.strides, array.dtype)
            for name, array in (("operand", execution.operand), ("out", execution.result.array))
        )
        received = _transfer(plan.program).traffic.received[context.rank]
        staged = decision == _STAGED and received > 0 and execution.result.array.block is None

        def make() -> GPUProgram:
            if decision == _DELIVER:
                program = delivered_program(
                    plan.program, operand, out, rank=context.rank, hosts=context.hosts
                )
            else:
                pulls = decision == _PULL
                program = moved_program(plan.program, operand, out, pulls=pulls, staged=staged)
            return GPUProgram(context, lane, program)

        return self._programs.made((lane.number, plan, decision, staged, operand, out), make)

    def _end(self, execution: Execution) -> None:
        if not self._kept and execution.result.array.nbytes > KEPT_STAGING:
            execution.lane.drop(_STAGING)

    def release(self) -> None:
        """See Performer. The memory of calls without an object belongs to the context."""
        if self._kept and self._used is not None:
            self._launches.clear()
            self._used.drop(_STAGING, NEW_RESULT, OUTBOX, FETCHED)


def moved_program(
    program: Program, operand: View, out: View, *, pulls: bool, staged: bool
) -> RankProgram:
    """A move on one host. Ranks pull from operands (`pulls`), or push into the peers' results; if
    this rank's result is `staged`, into memory from which it is copied.
    """
    arrays, steps = {"operand": operand, "out": out}, program.steps
    order = _order(program)
    if not staged:
        shared = "operand" if pulls else "out"
        return RankProgram(steps, arrays, shared=(shared,), order=order)
    arrays[_STAGING] = staging = packed(_STAGING, out.shape, out.dtype, order)
    pushed = [replace(step, target=_STAGING) if isinstance(step, Move) else step for step in steps]
    memories = {_STAGING: Memory(staging.end, shared=True)}
    return RankProgram((*pushed, Copy(staging, out)), arrays, memories, (_STAGING,), order)


def delivered_program(
    program: Program, operand: View, out: View, *, rank: int, hosts: tuple[int, ...]
) -> RankProgram:
    """A move between hosts. The outbox and the fetch buffer are the lane's, whose operations follow
    each other: after the barrier at the end no peer reads them any more.
    """
    steps = between_hosts(program, rank, hosts).steps
    (delivery,) = (step.delivery for step in steps if isinstance(step, Pack))
    memories = {
        FETCHED: Memory(delivery.room, shared=True),
        OUTBOX: Memory(delivery.outbox.nbytes, shared=True),
    }
    arrays = {"operand": operand, "out": out}
    return RankProgram(steps, arrays, memories, (OUTBOX,), _order(program))


def _transfer(program: Program) -> Transfer:
    """What a program's one move transfers."""
    (move,) = (step for step in program.steps if isinstance(step, Move))
    return move.transfer


def _order(program: Program) -> Literal["C", "F"]:
    (result,) = program.results.values()
    return result.order
