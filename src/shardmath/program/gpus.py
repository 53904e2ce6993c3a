"""Moves on GPUs: synchronise, push or pull, synchronise; all on a stream.

Every rank pushes what it has straight into its place in the peers' results, where all results are
on the heap; otherwise it pulls from the operands, where all of those are; otherwise results in
ordinary memory are pushed to heap memory beside them, and copied from there. Two barriers on the
stream are around the copies: owners may still use the memory that is written to before the first,
and all is there after the second. Between hosts see `gpu_hosts`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardmath.arrays.spec import packed_strides
from shardmath.base.lru_cache import LRUCache
from shardmath.context.context import Context
from shardmath.geometry import Move as BoxMove
from shardmath.handles.operand import Operand
from shardmath.operators.lanes import LANES, NEW_RESULT, Lane
from shardmath.operators.workspace import KEPT_STAGING
from shardmath.program.gpu_performing import (
    Execution,
    ExposedArrays,
    Facts,
    GPUPerformer,
    Launch,
    Ready,
)
from shardmath.program.hosts import FETCHED, OUTBOX
from shardmath.program.performing import Names, Plan
from shardmath.program.steps import Move
from shardmath.redistribution import Exposed, TransferPlan
from shardmath.redistribution.copies import lowered, whole
from shardmath.symmetric.heap import Block

if TYPE_CHECKING:
    from shardmath.cuda.kernel import ReadyLaunch
    from shardmath.redistribution.device import Box, BoxCopies

__all__ = ["GPUs"]

_KEPT = 64  # copies whose geometry is on the device
_PUSH, _PULL, _STAGED, _DELIVER = 1, 2, 3, 4  # decisions
_STAGING = "staging"  # of the lane's buffers

_Strides = tuple[int, ...]
_Copies = tuple["BoxCopies", "ReadyLaunch | None"]  # and those between certain addresses


class GPUs(GPUPerformer):
    """Performs programs of one move on GPUs. All calls without an object are one object."""

    def __init__(self, context: Context, names: Names, *, kept: bool) -> None:
        super().__init__(context, names, kept=kept)
        self._copies: LRUCache[Any, BoxCopies] = LRUCache(_KEPT)
        self._used: Lane | None = None

    @property
    def _lane(self) -> Lane:
        if self._used is None or self._used.number != self.number % (LANES - 1):
            self._used = Lane.numbered(self._context, self.number % (LANES - 1))
        return self._used

    def _decide(self, plan: Plan, facts: Sequence[Facts]) -> int:
        transfer = _move(plan).transfer
        if self._context.multi_host and transfer.crosses:
            return _DELIVER
        sent, received = transfer.traffic
        if all(each.result or not n for each, n in zip(facts, received, strict=True)):
            return _PUSH
        if all(each.operand or not n for each, n in zip(facts, sent, strict=True)):
            return _PULL
        return _STAGED

    def _ready(self, execution: Execution, decision: int, *, allocate: bool) -> Ready | None:
        plan, _, operand, result = execution
        if decision == _DELIVER:
            from shardmath.program.gpu_hosts import ready_delivery

            if not (allocate or {OUTBOX, FETCHED} <= self._lane.memory().keys()):
                return None
            return ready_delivery(self._context, self._lane, execution, self._copies)
        if decision == _PULL:
            place, bind = operand.told, self._pulling(execution)
        else:
            place, target = result.array.told, (result.array.address, result.array.strides)
            transfer = _move(plan).transfer
            if decision == _STAGED and transfer.received[self._context.rank] and not place:
                staging = self._staging(execution, allocate=allocate)
                if staging is None:
                    return None
                target = staging.address, _staging_strides(execution, self._context.rank)
                nbytes = result.array.nbytes
                place = Exposed(staging.location, nbytes, 0, target[1]).pack()
            bind = self._pushing(execution, target)
        return Ready((place,), bind)

    def _staging(self, execution: Execution, *, allocate: bool) -> Block | None:
        """Heap memory for a packed result, if there is some or it may be allocated."""
        lane, nbytes = self._lane, execution.result.array.nbytes
        held = lane.memory().get(_STAGING)
        if not allocate and not (isinstance(held, Block) and held.nbytes >= nbytes):
            return None
        return lane.buffer(_STAGING, nbytes).block

    def _end(self, execution: Execution) -> None:
        if not self._kept and execution.result.array.nbytes > KEPT_STAGING:
            self._lane.drop(_STAGING)

    def release(self) -> None:
        """See Performer. What calls without an object keep is the context's."""
        if self._kept and self._used is not None:
            self._launches.clear()
            self._used.drop(_STAGING, NEW_RESULT, OUTBOX, FETCHED)

    # -- this rank's copies ------------------------------------------------------------------------

    def _pulling(self, execution: Execution) -> Callable[[Sequence[ExposedArrays]], Launch]:
        """Copies from the operands of all ranks."""
        plan, rank = execution.plan, self._context.rank
        transfer, (operand, result) = _move(plan).transfer, _arrays(execution)

        def bind(places: Sequence[ExposedArrays]) -> Launch:
            published = {src: places[src][0] for src in transfer.sources(rank) if src != rank}
            own = operand.address, operand.strides
            bases, strides = _reached(self._context, published, own)
            copies = self._made(
                plan,
                transfer,
                _in_ring_order(transfer, rank),
                lambda move: (move.src, 0, strides[move.src], result.strides),
            )
            return self._launch(transfer, (copies, copies.ready(bases, (result.address,))))

        return bind

    def _pushing(
        self, execution: Execution, own: tuple[int, _Strides]
    ) -> Callable[[Sequence[ExposedArrays]], Launch]:
        """Copies to where all ranks' results go, this rank's at `own`; from there to the result."""
        plan, rank = execution.plan, self._context.rank
        transfer, (operand, result) = _move(plan).transfer, _arrays(execution)

        def bind(places: Sequence[ExposedArrays]) -> Launch:
            moves = transfer.out_of(rank)
            published = {move.dst: places[move.dst][0] for move in moves if move.dst != rank}
            bases, strides = _reached(self._context, published, own)
            copies = self._made(
                plan,
                transfer,
                moves,
                lambda move: (0, move.dst, operand.strides, strides[move.dst]),
            )
            pushes = copies, copies.ready((operand.address,), bases)
            if own[0] == result.address:
                return self._launch(transfer, pushes)
            back = self._back(result.shape, transfer.itemsize, own[1], result.strides)
            last = back, back.ready((own[0],), (result.address,))
            return self._launch(transfer, pushes, last)

        return bind

    def _launch(self, transfer: TransferPlan, *copies: _Copies) -> Launch:
        """The first copies, between barriers where ranks push or pull, then the others."""
        lane, crosses = self._lane, transfer.crosses

        def run(stream: int) -> None:
            for number, (_, ready) in enumerate(copies):
                around = crosses and number == 0
                if around:
                    lane.barrier(stream)
                if ready is not None:
                    ready.put(stream)
                if around:
                    lane.barrier(stream)

        return run

    def _made(
        self,
        plan: Plan,
        transfer: TransferPlan,
        moves: Sequence[BoxMove],
        sides: Callable[[BoxMove], tuple[int, int, _Strides, _Strides]],
    ) -> BoxCopies:
        """The copies of moves, of which `sides` has source, target and their strides."""
        from shardmath.redistribution.device import Box

        found = [sides(move) for move in moves]

        def boxes() -> list[Box]:
            made = []
            for move, (source, target, src_strides, dst_strides) in zip(moves, found, strict=True):
                copy = lowered(move, transfer.itemsize, src_strides, dst_strides)
                made.append(Box.of(replace(copy, src=source), target))
            return made

        return self._kept_copies((plan, *found), boxes)

    def _back(
        self, shape: _Strides, itemsize: int, source: _Strides, target: _Strides
    ) -> BoxCopies:
        """The copy from staging to the result."""
        from shardmath.redistribution.device import Box

        key = "back", shape, itemsize, source, target
        return self._kept_copies(key, lambda: [Box.of(whole(shape, itemsize, source, target), 0)])

    def _kept_copies(self, key: Any, boxes: Callable[[], list[Box]]) -> BoxCopies:
        from shardmath.redistribution.device import BoxCopies

        assert self._context.team is not None, "a context of GPUs"
        device = self._context.team.device
        return self._copies.made(key, lambda: BoxCopies(device, boxes()))


def _arrays(execution: Execution) -> tuple[Operand, Operand]:
    """Where operand and result lie: what is kept of an execution holds no array."""
    return execution.operand.without_memory(), execution.result.array.without_memory()


def _move(plan: Plan) -> Move:
    """The one move of a program."""
    (move,) = (step for step in plan.program.steps if isinstance(step, Move))
    return move


def _staging_strides(execution: Execution, rank: int) -> _Strides:
    """The strides of a packed result in bytes."""
    (look,) = execution.plan.program.results.values()
    return packed_strides(look.local_shape(rank), execution.operand.itemsize, look.order)


def _in_ring_order(transfer: TransferPlan, rank: int) -> list[BoxMove]:
    """The moves into `rank`, from the next rank first and from itself last."""
    size = transfer.src.size
    return sorted(transfer.into(rank), key=lambda move: (move.src - rank - 1) % size)


def _reached(
    context: Context, published: dict[int, Exposed | None], own: tuple[int, _Strides]
) -> tuple[tuple[int, ...], dict[int, _Strides]]:
    """Where the element 0 of each rank's array is for this GPU, 0 if unneeded; and its strides."""
    bases = [0] * context.size
    bases[context.rank], strides = own[0], {context.rank: own[1]}
    for peer, exposed in published.items():
        assert exposed is not None, "agreed on"
        address = context.peer_address(peer, exposed.location, exposed.nbytes)
        assert address is not None, "ranks of one host have an address for each other's memory"
        bases[peer] = address + exposed.origin
        strides[peer] = exposed.strides
    return tuple(bases), strides
