"""One execution of a redistribution on GPUs: show, wait, push or pull, wait; all on a stream.

Every rank pushes what it has straight into its place in the peers' results, where all results are
on the heap; otherwise it pulls from the operands, where all of those are; otherwise results in
ordinary memory are pushed to heap memory beside them, and copied from there. All ranks decide the
same, from what each has said when the call was agreed on. The host waits for nothing but agreement,
one small exchange as long as nothing has to be allocated; two barriers on the stream are around the
copies: owners may still use the memory that is written to before the first, and all is there after
the second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardmath.arrays import library_of
from shardmath.context import Context
from shardmath.errors import HeapExhausted
from shardmath.geometry import Move
from shardmath.operators.lanes import LANES, Lane
from shardmath.operators.redistribute.device_arrays import DeviceArrays
from shardmath.operators.redistribute.memory import CopySequence, DeviceMemory, Step
from shardmath.operators.redistribute.notes import (
    Note,
    pulls,
    ranks_without_staging,
    staging_strides,
)
from shardmath.operators.redistribute.problem import Problem
from shardmath.redistribution import Exposed, TransferPlan
from shardmath.redistribution.copies import lowered, whole
from shardmath.symmetric.allocation import block_of
from shardmath.symmetric.device_array import require_device, stream_of

if TYPE_CHECKING:
    from shardmath.redistribution.device import BoxCopies

__all__ = ["DeviceExecution"]


class DeviceExecution:
    """What performs a redistribution on GPUs, and keeps copies and staging from call to call.

    `temporary`: for one call. What it keeps is kept in the context.
    """

    def __init__(self, context: Context, *, temporary: bool = False) -> None:
        self._context = context
        self._memory = None if temporary else DeviceMemory(context)
        self._arrays: DeviceArrays | None = None
        self._lane: Lane | None = None

    def inspect(self, operand: Any, out: Any, stream: Any) -> None:
        """Raise what is wrong with the user's arrays; see `DeviceArrays`. Local."""
        spec = library_of(operand).spec(operand)
        stream_of(self._context, spec, stream)
        require_device(self._context, spec, "the operand")
        block_of(self._context, operand)  # raises UseAfterFree

    def read(
        self,
        operand: Any,
        out: Any,
        stream: Any,
        problem: Problem | None = None,
        number: int = 0,
    ) -> bytes:
        """Take the user's arrays for the next execution, and say what peers must know. Local.

        With a problem, which is known or at least expected from the second execution on, the result
        is made at once. `number` as in `perform`.
        """
        arrays = DeviceArrays(self._context, operand, out, stream)
        if problem is None:
            note = arrays.note(b"")
        else:
            # What is only expected may want more than there is: then it is not made so far.
            with nullcontext() if self._memory is not None else suppress(HeapExhausted):
                arrays.allocate(problem)
            note = arrays.note(self._staging(problem, number))
        self._arrays = arrays
        return note

    def perform(self, problem: Problem, notes: list[bytes], number: int = 0) -> Any:
        """Redistribute what was read; see `execute_on_gpus`. Collective.

        `number` is the object's, for which all calls without one are one object.
        """
        arrays = self._arrays
        assert arrays is not None, "read first"
        memory, lane = self._memory_of(problem), self._use_lane(number)
        if self._crosses_hosts(problem):
            from shardmath.operators.redistribute.far import execute_far

            return execute_far(self._context, problem, arrays, notes, memory, lane)
        return execute_on_gpus(self._context, problem, arrays, notes, memory, lane)

    def _staging(self, problem: Problem, number: int) -> bytes:
        """Where memory lies that peers are to reach, packed; b"" if there is none so far."""
        if not self._crosses_hosts(problem):
            return self._memory_of(problem).staging
        if self._memory is None:
            return b""  # the plan may turn out to be another
        from shardmath.operators.redistribute.far import allocate_outbox

        delivery = self._memory.delivery(problem)
        return allocate_outbox(delivery, self._use_lane(number)).pack()

    def _use_lane(self, number: int) -> Lane:
        """The same on all ranks."""
        self._lane = Lane.numbered(self._context, number % (LANES - 1))
        return self._lane

    def _crosses_hosts(self, problem: Problem) -> bool:
        return self._context.spans_hosts and problem.transfer.crosses

    def _memory_of(self, problem: Problem) -> DeviceMemory:
        return self._memory or DeviceMemory.of_plan(self._context, problem)

    def drop_arrays(self) -> None:
        """Refer to no array that was read. Local."""
        self._arrays = None

    def release(self) -> None:
        """Give the staging back."""
        if self._memory is not None:
            self._memory.release()
        if self._lane is not None and self._context.spans_hosts:
            from shardmath.operators.redistribute.far import drop_outbox

            drop_outbox(self._lane)


def execute_on_gpus(
    context: Context,
    problem: Problem,
    arrays: DeviceArrays,
    texts: list[bytes],
    memory: DeviceMemory,
    lane: Lane,
) -> Any:
    """The result of redistributing `arrays.operand`: `out`, or a new array. Collective.

    `texts` are all ranks' notes. Raises HeapExhausted on all ranks when one lacks memory.
    """
    texts, sequence = _agreed_sequence(context, problem, arrays, texts, memory)
    stream = arrays.stream
    with context.executing("redistribute"):
        if sequence is None:
            notes = [Note.unpack(text) for text in texts]
            steps = _steps(context, problem, arrays, notes, memory)
            made = CopySequence(lane, steps, crosses=problem.transfer.crosses)
            sequence = memory.keep_sequence(_key(arrays, texts), made)
        sequence.put(stream)
        if sequence.is_staged:
            memory.staging_used_on(stream)
        memory.end_call()
        assert arrays.result is not None, "agreed on"
        given = arrays.result.give(context, stream)
        if problem.blocking:
            lane.team.synchronize(stream)
    return given


def _agreed_sequence(
    context: Context,
    problem: Problem,
    arrays: DeviceArrays,
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
    shapes = [problem.transfer.dst.local_shape(rank) for rank in range(context.size)]
    unmade = any(
        note.lacks_result((shape, problem.order)) for note, shape in zip(notes, shapes, strict=True)
    )
    if unmade or ranks_without_staging(problem, notes):

        def prepare() -> bytes:
            arrays.allocate(problem)
            if context.rank in ranks_without_staging(problem, notes) and not memory.staging:
                memory.stage(problem)
            return arrays.note(memory.staging)

        had = memory.staging
        try:
            texts = context.gather("redistribute, memory", prepare)
        except BaseException:
            if not had:
                memory.discard_staging()
            raise
    return texts, None


def _key(arrays: DeviceArrays, texts: Sequence[bytes]) -> tuple[Any, ...]:
    """What the addresses and strides of all copies of this rank follow from."""
    operand, result = arrays.operand, arrays.result
    return (*texts, operand.address, operand.strides, result and result.place)


# -- this rank's copies ----------------------------------------------------------------------------


def _steps(
    context: Context,
    problem: Problem,
    arrays: DeviceArrays,
    notes: Sequence[Note],
    memory: DeviceMemory,
) -> tuple[Step, ...]:
    """The copies between the barriers, and those after them."""
    from shardmath.redistribution.device import Box, BoxCopies

    assert arrays.result is not None and context.team is not None, "agreed on"
    transfer, rank, device = problem.transfer, context.rank, context.team.device
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

    if pulls(problem.transfer, notes) and transfer.crosses:
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
        own = (memory.staging_address, staging_strides(problem, rank))
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
