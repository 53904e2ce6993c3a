"""Programs on GPUs: synchronise, push or pull, synchronise; all on a stream.

Every rank pushes what it has straight into its place in the peers' results, where all results are
on the heap; otherwise it pulls from the operands, where all of those are; otherwise results in
ordinary memory are pushed to heap memory beside them, and copied from there. All ranks decide the
same, from what each has said when the call was agreed on. The host waits for nothing but agreement,
one small exchange as long as nothing has to be allocated; two barriers on the stream are around the
copies: owners may still use the memory that is written to before the first, and all is there after
the second. Between hosts see `gpu_hosts`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shardmath.arrays import library_of
from shardmath.call.agreement import Agreement
from shardmath.context import Context
from shardmath.errors import HeapExhausted
from shardmath.geometry import Move
from shardmath.lru_cache import LRUCache
from shardmath.operators.lanes import LANES, Lane
from shardmath.program.gpu_arrays import GPUArrays, GPUTurn, read_arrays
from shardmath.program.gpu_memory import CopySequence, DeviceMemory, Step
from shardmath.program.gpu_notes import (
    Note,
    OneMove,
    pulls,
    ranks_without_staging,
    staging_strides,
)
from shardmath.program.hosts import between_hosts
from shardmath.program.performing import Arguments, Names, Plan, Turn
from shardmath.program.steps import Program
from shardmath.redistribution import Exposed, TransferPlan
from shardmath.redistribution.copies import lowered, whole
from shardmath.symmetric.allocation import block_of
from shardmath.symmetric.device_array import require_device, stream_of

if TYPE_CHECKING:
    from shardmath.redistribution.device import BoxCopies

__all__ = ["GPUs"]

_PLANS = 64  # of which copies and staging are kept


class GPUs:
    """Performs programs on GPUs, and keeps copies and staging from call to call.

    `kept`: for an object, which has staging of its own. `number` is the object's, by which it takes
    a lane; all calls without an object are one object.
    """

    def __init__(self, context: Context, names: Names, *, kept: bool) -> None:
        self._context = context
        self._names = names
        self._kept = kept
        self.number = 0
        self._moves: LRUCache[Plan, _KeptMove] = LRUCache(_PLANS)
        self._lane: Lane | None = None

    def inspect(self, arguments: Arguments) -> None:
        """See Performer."""
        (operand,), context = arguments.operands, self._context
        spec = library_of(operand).spec(operand)
        stream_of(context, spec, arguments.stream)
        require_device(context, spec, "the operand")
        block_of(context, operand)  # raises UseAfterFree

    def read(self, arguments: Arguments) -> GPUArrays:
        """See Performer, and `read_arrays`."""
        (operand,), (out,) = arguments.operands, arguments.results
        return read_arrays(self._context, operand, out, self._names.separate)

    def without_memory(self, arrays: GPUArrays) -> GPUArrays:
        """See Performer."""
        return arrays.without_memory()

    def prepare(self, turn: Turn, plan: Plan | None) -> None:
        """See Performer. The result is made at once where the plan is known, or expected."""
        arrays = turn.held = GPUTurn(self._context, turn.arguments, turn.known.arrays)
        if plan is None:
            turn.note = arrays.note(b"")
            return
        kept = self._of(plan)
        # What is only expected may want more than there is: then it is not made so far.
        with nullcontext() if self._kept else suppress(HeapExhausted):
            arrays.allocate(kept.move)
        turn.note = arrays.note(self._staging(kept))

    def perform(self, turn: Turn, agreement: Agreement[Any], plan: Plan) -> tuple[Any, ...]:
        """See Performer; `perform_on_one_host`."""
        kept, lane, texts = self._of(plan), self._use_lane(), agreement.notes
        if self._crosses_hosts(kept.move):
            from shardmath.program.gpu_hosts import perform_between_hosts

            program = kept.between_hosts
            return (
                perform_between_hosts(
                    self._context, program, kept.move, turn.held, texts, kept.memory, lane
                ),
            )
        return (perform_on_one_host(self._context, kept.move, turn.held, texts, kept.memory, lane),)

    def _of(self, plan: Plan) -> _KeptMove:
        context, operation = self._context, self._names.operation
        return self._moves.made(plan, lambda: _KeptMove(context, operation, plan, kept=self._kept))

    def _staging(self, kept: _KeptMove) -> bytes:
        """Where memory lies that peers are to reach, packed; b"" if there is none so far."""
        if not self._crosses_hosts(kept.move):
            return kept.memory.staging
        if not self._kept:
            return b""  # the plan may turn out to be another
        from shardmath.program.gpu_hosts import allocate_outbox, delivery_in

        return allocate_outbox(delivery_in(kept.between_hosts), self._use_lane()).pack()

    def _use_lane(self) -> Lane:
        """The same on all ranks."""
        self._lane = Lane.numbered(self._context, self.number % (LANES - 1))
        return self._lane

    def _crosses_hosts(self, move: OneMove) -> bool:
        return self._context.spans_hosts and move.transfer.crosses

    def release(self) -> None:
        """See Performer. What calls without an object keep is the context's."""
        if not self._kept:
            return
        for kept in self._moves.values():
            kept.memory.release()
        if self._lane is not None and self._context.spans_hosts:
            from shardmath.program.gpu_hosts import drop_outbox

            drop_outbox(self._lane)


class _KeptMove:
    """The one move of a plan, and what is kept for it."""

    def __init__(self, context: Context, operation: str, plan: Plan, *, kept: bool) -> None:
        self.move = OneMove.of(plan.program, operation)
        self.memory = DeviceMemory(context, temporary=not kept)
        self._program, self._rank, self._hosts = plan.program, context.rank, context.hosts

    @cached_property
    def between_hosts(self) -> Program:
        """The program where ranks are on several hosts."""
        return between_hosts(self._program, self._rank, self._hosts)


def perform_on_one_host(
    context: Context,
    move: OneMove,
    arrays: GPUTurn,
    texts: list[bytes],
    memory: DeviceMemory,
    lane: Lane,
) -> Any:
    """The result of a move of `arrays.operand`: `out`, or a new array. Collective.

    `texts` are all ranks' notes. Raises HeapExhausted on all ranks when one lacks memory.
    """
    texts, sequence = _agreed_sequence(context, move, arrays, texts, memory)
    stream = arrays.stream
    with context.executing(move.operation):
        if sequence is None:
            notes = [Note.unpack(text) for text in texts]
            steps = _steps(context, move, arrays, notes, memory)
            made = CopySequence(lane, steps, crosses=move.transfer.crosses)
            sequence = memory.keep_sequence(_key(arrays, texts), made)
        sequence.put(stream)
        if sequence.is_staged:
            memory.staging_used_on(stream)
        memory.end_call()
        assert arrays.result is not None, "agreed on"
        given = arrays.result.give(context, stream)
        if move.blocking:
            lane.team.synchronize(stream)
    return given


def _agreed_sequence(
    context: Context,
    move: OneMove,
    arrays: GPUTurn,
    texts: list[bytes],
    memory: DeviceMemory,
) -> tuple[list[bytes], CopySequence | None]:
    """All ranks' notes when all have what they need, and the copies, if they are known. Collective.

    Ranks agree once more where one has to allocate. The same notes mean the same on all.
    """
    sequence = memory.sequence(_key(arrays, texts))
    if sequence is not None:
        return texts, sequence
    notes = [Note.unpack(text) for text in texts]
    shapes = [move.transfer.dst.local_shape(rank) for rank in range(context.size)]
    unmade = any(
        note.lacks_result((shape, move.order)) for note, shape in zip(notes, shapes, strict=True)
    )
    if unmade or ranks_without_staging(move, notes):

        def prepare() -> bytes:
            arrays.allocate(move)
            if context.rank in ranks_without_staging(move, notes) and not memory.staging:
                memory.stage(move)
            return arrays.note(memory.staging)

        had = memory.staging
        try:
            texts = context.gather(f"{move.operation}, memory", prepare)
        except BaseException:
            if not had:
                memory.discard_staging()
            raise
    return texts, None


def _key(arrays: GPUTurn, texts: Sequence[bytes]) -> tuple[Any, ...]:
    """What the addresses and strides of all copies of this rank follow from."""
    operand, result = arrays.operand, arrays.result
    return (*texts, operand.address, operand.strides, result and result.place)


# -- this rank's copies ----------------------------------------------------------------------------


def _steps(
    context: Context,
    one: OneMove,
    arrays: GPUTurn,
    notes: Sequence[Note],
    memory: DeviceMemory,
) -> tuple[Step, ...]:
    """The copies between the barriers, and those after them."""
    from shardmath.redistribution.device import Box, BoxCopies

    assert arrays.result is not None and context.team is not None, "agreed on"
    transfer, rank, device = one.transfer, context.rank, context.team.device
    operand, result = arrays.operand, arrays.result.array

    def made(
        moves: Sequence[Move], sides: Callable[[Move], tuple[int, int, _Strides, _Strides]]
    ) -> BoxCopies:
        described = [(move, *sides(move)) for move in moves]
        key = tuple(described)

        def make() -> BoxCopies:
            boxes = []
            for move, source, target, src_strides, dst_strides in described:
                copy = lowered(move, transfer.itemsize, src_strides, dst_strides)
                boxes.append(Box.of(replace(copy, src=source), target))
            return BoxCopies(device, boxes)

        return memory.copies(key, make)

    if pulls(transfer, notes) and transfer.crosses:
        ordered = _in_ring_order(transfer, rank)
        published = {src: notes[src].operand for src in transfer.sources(rank) if src != rank}
        bases, strides = _reached(context, published, own=(operand.address, operand.strides))
        copies = made(ordered, lambda move: (move.src, 0, strides[move.src], result.strides))
        return (Step.of(copies, bases, (result.address,)),)
    moves = transfer.out_of(rank)
    published = {move.dst: notes[move.dst].place for move in moves if move.dst != rank}
    staged = bool(transfer.received[rank]) and result.block is None
    own = (result.address, result.strides)
    if staged:
        own = (memory.staging_address, staging_strides(one, rank))
    bases, strides = _reached(context, published, own=own)
    copies = made(moves, lambda move: (0, move.dst, operand.strides, strides[move.dst]))
    step = Step.of(copies, (operand.address,), bases)
    if not staged:
        return (step,)
    copy = whole(result.shape, transfer.itemsize, own[1], result.strides)
    back = memory.copies(("back", copy), lambda: BoxCopies(device, [Box.of(copy, 0)]))
    return (step, Step.of(back, (own[0],), (result.address,)))


_Strides = tuple[int, ...]


def _in_ring_order(transfer: TransferPlan, rank: int) -> list[Move]:
    """The moves into `rank`, from the next rank first and from itself last."""
    size = transfer.src.size
    return sorted(transfer.into(rank), key=lambda move: (move.src - rank - 1) % size)


def _reached(
    context: Context,
    published: dict[int, Exposed | None],
    own: tuple[int, _Strides],
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
