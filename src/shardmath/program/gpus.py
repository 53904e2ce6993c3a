"""Moves on GPUs: synchronise, push or pull, synchronise; all on a stream.

Every rank pushes what it has straight into its place in the peers' results, where all results were
given and are on the heap; otherwise it pulls from the operands, where all of those are: peers need
not be told where a new result lies, which is elsewhere each time. Otherwise results in ordinary
memory are pushed to heap memory beside them, and copied from there. Two barriers on the
stream are around the copies: owners may still use the memory that is written to before the first,
and all is there after the second. Between hosts moves are packed and fetched, as `hosts` says.
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
    """Performs programs of one move on GPUs. All calls without an object are one object."""

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
        """See Performer. What calls without an object keep is the context's."""
        if self._kept and self._used is not None:
            self._launches.clear()
            self._used.drop(_STAGING, NEW_RESULT, OUTBOX, FETCHED)


def moved_program(
    program: Program, operand: View, out: View, *, pulls: bool, staged: bool
) -> RankProgram:
    """A move on one host. `pulls`: ranks pull from operands, and do not push into what peers share:
    their results or, `staged`, memory beside one from which it is copied.
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
    """A move between hosts. Outbox and fetch buffer are the lane's, in which operations follow each
    other; the barrier at the end says that no peer reads them any more.
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
