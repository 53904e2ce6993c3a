"""Programs on cores: each rank pulls what it needs from where its peers hold it.

What peers read has to be on the heap. Operands there are read where they lie; of others, what peers
read is staged there before the ranks agree, so that the exchange in which they agree is also the
synchronisation before reading. A call that comes again finds its copies bound: nothing is worked
out between that exchange and the first byte.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from shardmath.arrays import Library, dtypes, library_of
from shardmath.arrays.base import HostArray, share_memory
from shardmath.call.agreement import Agreement
from shardmath.context import Context
from shardmath.geometry.moves import shared_part
from shardmath.local.gemm import multiply
from shardmath.lru_cache import LRUCache
from shardmath.operators.workspace import KEPT_STAGING, Workspace
from shardmath.program.performing import Arguments, Names, Plan, Turn
from shardmath.program.steps import Combine, Move, Multiply, SplitArray, Synchronise
from shardmath.redistribution import Exposed, StridedCopy, TransferPlan, Window, window_on
from shardmath.redistribution.exposure import bind_stage, staged_bytes
from shardmath.redistribution.host import bind, copy_moves, perform
from shardmath.symmetric.allocation import block_of, empty_on_heap
from shardmath.symmetric.heap import Block, Buffer
from shardmath.symmetric.operand import Operand

__all__ = ["Cores", "run"]

_KEPT = 128  # calls of which the copies stay bound
_TAG = 8  # bytes, of a plan
_UNPREPARED = bytes(_TAG)
_LENGTH = struct.Struct("<H")

Bound = list[Callable[[], object]]


@dataclass(frozen=True)
class HostArrays:
    """One rank's arrays: operands, and results that were given. New ones are of `library`.

    `held` keeps their memory.
    """

    library: Library
    arrays: Mapping[str, Operand]
    on_heap: bool
    held: tuple[HostArray, ...]


@dataclass(frozen=True, eq=False)
class _Prepared:
    """What is to be done before the ranks agree on `plan`: results to make, copies that stage.

    It holds while the workspace's buffers, by name and bytes, are in these blocks.
    """

    plan: Plan
    note: bytes
    makes: tuple[str, ...]
    copies: Bound
    memory: tuple[tuple[str, int, Block], ...]


class Cores:
    """Performs programs on cores.

    `kept`: for an object, whose workspace stays until it is released. Else it is the context's, and
    what is large is given back after each call.
    """

    def __init__(self, context: Context, names: Names, *, kept: bool) -> None:
        self._context = context
        self._names = names
        self._kept = kept
        self.number = 0
        self._workspace = Workspace(context) if kept else Workspace.of(context)
        self._bound: LRUCache[Any, Bound] = LRUCache(_KEPT)

    # -- read --------------------------------------------------------------------------------------

    def inspect(self, arguments: Arguments) -> None:
        """See Performer."""
        self.read(arguments)

    def read(self, arguments: Arguments) -> HostArrays:
        """See Performer. Raises ValueError when a result cannot be written to, or overlaps an
        operand that it has to be separate from; UseAfterFree.
        """
        context, names = self._context, self._names
        found: dict[str, Operand] = {}
        hosts: list[HostArray] = []
        on_heap = True
        for name, x in zip(names.operands, arguments.operands, strict=True):
            host = library_of(x, name).host_view(x)
            place = block_of(context, x)
            on_heap = on_heap and place is not None
            if host is not x and host.size:  # a lazily conjugated tensor has its values elsewhere
                place = block_of(context, host)
            found[name] = _operand(host, None if place is None else place[0])
            hosts.append(host)
        for name, x in zip(names.results, arguments.results, strict=True):
            if x is None:
                continue
            target = library_of(x, name).host_view(x, writable=True, name=name)
            place = block_of(context, x)
            if names.separate and any(share_memory(host, target) for host in hosts):
                raise ValueError(f"{name} overlaps {names.separate}")
            found[name] = _operand(target, None if place is None else place[0])
        return HostArrays(library_of(arguments.operands[0]), found, on_heap, tuple(hosts))

    def without_memory(self, arrays: HostArrays) -> HostArrays:
        """See Performer."""
        return HostArrays(arrays.library, arrays.arrays, arrays.on_heap, ())

    # -- prepare -----------------------------------------------------------------------------------

    def prepare(self, turn: Turn, plan: Plan | None) -> None:
        """See Performer."""
        if plan is None:
            turn.note = _UNPREPARED
            return
        prepared = turn.known.prepared
        if (
            prepared is None
            or prepared.plan is not plan
            or (prepared.memory and not self._holds(prepared))
        ):
            prepared = self._prepare(turn, plan)
            if turn.known.lasting and turn.held is None:
                turn.known.prepared = prepared
        for copy in prepared.copies:
            copy()
        turn.note = prepared.note
        if prepared.makes:
            self._make(turn, plan)

    def _holds(self, prepared: _Prepared) -> bool:
        """Whether the workspace is where it was."""
        buffer = self._workspace.buffer
        return all(buffer(name, nbytes).block is block for name, nbytes, block in prepared.memory)

    def _prepare(self, turn: Turn, plan: Plan) -> _Prepared:
        context, program = self._context, plan.program
        arrays = turn.known.arrays.arrays
        note, memory = [plan.tag], []
        copies: Bound = []
        for name, array in program.workspace.items():
            own = self._workspace_array(name, array)
            assert own.block is not None
            memory.append((self._name(name), own.block.nbytes, own.block))
        for name, transfers in program.published.items():
            place = b""
            if name in program.workspace:
                place = self._workspace_array(name, program.workspace[name]).exposed.pack()
            else:
                ranges, array = _ranges(transfers, context.rank), arrays[name]
                if ranges is not None and array.block is not None:
                    context.announce(array.block)
                    place = array.exposed.pack()
                elif ranges is not None:
                    buffer = self._staging(turn, name, staged_bytes(ranges, array.itemsize))
                    exposed, staging = bind_stage(
                        context, _window(array), array.itemsize, ranges, buffer
                    )
                    place, copies = exposed.pack(), copies + staging
                    memory.append((self._name(name), buffer.block.nbytes, buffer.block))
            note.append(_LENGTH.pack(len(place)) + place)
        makes = tuple(name for name in self._names.results if name not in arrays)
        return _Prepared(plan, b"".join(note), makes, copies, tuple(memory))

    def _staging(self, turn: Turn, name: str, nbytes: int) -> Buffer:
        workspace = self._workspace
        if not self._kept and nbytes > KEPT_STAGING:
            workspace = turn.held = turn.held or Workspace(self._context)
        return workspace.buffer(self._name(name), nbytes)

    def _name(self, name: str) -> str:
        """What a buffer of the program is called in the workspace, which operations share."""
        return f"{self._names.operation}: {name}"

    def _make(self, turn: Turn, plan: Plan) -> None:
        """New results for those that were not given."""
        context, arrays = self._context, turn.known.arrays
        for name, result in plan.program.results.items():
            if name in arrays.arrays or name in turn.made:
                continue
            shape = result.layout.local_shape(context.rank)
            if arrays.on_heap:
                made = empty_on_heap(context, arrays.library, shape, result.dtype, result.order)
            else:
                made = arrays.library.empty(shape, result.dtype, result.order)
            turn.made[name] = made

    # -- perform -----------------------------------------------------------------------------------

    def perform(self, turn: Turn, agreement: Agreement[Any], plan: Plan) -> tuple[Any, ...]:
        """See Performer."""
        made, known = turn.made, turn.known
        places = tuple([known.arrays.library.pointer(x) for x in made.values()]) if made else ()
        key = known.prepared, agreement, places
        steps = self._bound.find(key)
        if steps is None:
            notes = self._complete(turn, agreement.notes, plan)
            steps = self._bind(turn, plan, notes)
            if notes is agreement.notes and known.lasting and turn.held is None:
                self._bound.keep(key, steps)
        with self._context.board.guard(self._names.operation):
            run(steps)
        given = turn.arguments.results
        if not made:
            return given
        names = self._names.results
        return tuple(made.get(name, x) for name, x in zip(names, given, strict=True))

    def _complete(self, turn: Turn, notes: list[bytes], plan: Plan) -> list[bytes]:
        """All ranks' notes, when all have prepared for this plan. Collective.

        They tell each other once more where some have not.
        """
        if all(note.startswith(plan.tag) for note in notes):
            return notes

        def prepare() -> bytes:
            turn.made.clear()
            self.prepare(turn, plan)
            return turn.note

        return self._context.gather(f"{self._names.operation}, memory", prepare)

    def _bind(self, turn: Turn, plan: Plan, notes: Sequence[bytes]) -> Bound:
        """What performs the program, each time that it is run between the same arrays."""
        context, program = self._context, plan.program
        arrays = dict(turn.known.arrays.arrays)
        for name, made in turn.made.items():
            host = turn.known.arrays.library.host_view(made, writable=True)
            arrays[name] = _operand(host, None)
        arrays |= {n: self._workspace_array(n, x) for n, x in program.workspace.items()}
        places = _places(tuple(program.published), notes)
        steps: Bound = []
        for number, step in enumerate(program.steps):
            if isinstance(step, Synchronise):
                if number:  # the first is the exchange that carried the notes
                    steps.append(partial(context.board.barrier, self._names.operation))
            elif isinstance(step, Move):
                steps += self._bind_move(step, arrays, places.get(step.source, ()))
            elif isinstance(step, Multiply):
                factors = (_array(arrays[name]) for name in (step.left, step.right, step.target))
                steps.append(partial(multiply, *map(_matrix, factors)))
            elif isinstance(step, Combine):
                own = places[step.source]
                steps.append(partial(self._combine, step, arrays, own))
            else:
                raise AssertionError(f"cores read in place what {step} is for")
        return steps

    def _bind_move(
        self, move: Move, arrays: Mapping[str, Operand], places: Sequence[bytes]
    ) -> Bound:
        context, transfer = self._context, move.transfer
        own, target = _window(arrays[move.source]), _window(arrays[move.target])
        sources = transfer.sources(context.rank)
        if not all(context.reads_in_place(src) for src in sources):
            return [partial(_fetch, context, transfer, own, places, target)]
        return bind(*_pulled(context, transfer, own, places, target))

    def _combine(
        self, step: Combine, arrays: Mapping[str, Operand], places: Sequence[bytes]
    ) -> None:
        context, target = self._context, _array(arrays[step.target])
        target[...] = 0
        own = _array(arrays[step.source])

        def array(src: int) -> HostArray:
            if src == context.rank:
                return own
            window = window_on(context, src, Exposed.unpack(places[src]))
            return window.array(step.held.local_shape(src), own.dtype)

        for src in range(context.size):
            found = shared_part(step.held, step.needed, src=src, dst=context.rank)
            copy_moves(found, array, target, add=True)

    # -- workspace ---------------------------------------------------------------------------------

    def _workspace_array(self, name: str, array: SplitArray) -> Operand:
        """This rank's part of a buffer of the program, in the workspace, shown to its peers."""
        own, dtype = self._name(name), dtypes.to_numpy(array.dtype)
        shape = array.layout.local_shape(self._context.rank)
        host = self._workspace.array(own, shape, dtype)
        block = self._workspace.block(own)
        self._context.announce(block)
        return _operand(host, block)

    def release(self) -> None:
        """See Performer."""
        if self._kept:
            self._workspace.release()
            self._bound.clear()


def run(steps: Bound) -> None:
    """Perform what was bound, in order."""
    for step in steps:
        step()


def _ranges(
    transfers: Sequence[TransferPlan | None], rank: int
) -> tuple[tuple[int, int], ...] | None:
    """For each axis of `rank`'s part the range in which peers read; None if they read nothing."""
    found = []
    for transfer in transfers:
        assert transfer is not None, "operands are moved, and only buffers of the program combined"
        ranges = transfer.read_by_peers(rank)
        if ranges is not None:
            found.append(ranges)
    if not found:
        return None
    return tuple(
        (min(lo for lo, _ in axis), max(hi for _, hi in axis)) for axis in zip(*found, strict=True)
    )


def _places(names: Sequence[str], notes: Sequence[bytes]) -> dict[str, list[bytes]]:
    """Where each rank's buffers of these names lie, packed, from all ranks' notes."""
    found: dict[str, list[bytes]] = {name: [] for name in names}
    for note in notes:
        at = _TAG
        for name in names:
            (length,) = _LENGTH.unpack_from(note, at)
            at += _LENGTH.size
            found[name].append(note[at : at + length])
            at += length
    return found


def _pulled(
    context: Context,
    transfer: TransferPlan,
    own: Window,
    places: Sequence[bytes],
    target: Window,
) -> tuple[list[StridedCopy], dict[int, Window], Window]:
    """The copies into this rank's part, and where they are from and to."""
    rank = context.rank
    windows = {
        src: own if src == rank else window_on(context, src, Exposed.unpack(places[src]), transfer)
        for src in transfer.sources(rank)
    }
    strides = {src: window.strides for src, window in windows.items()}
    return transfer.copies(rank, strides, target.strides), windows, target


def _fetch(
    context: Context,
    transfer: TransferPlan,
    own: Window,
    places: Sequence[bytes],
    target: Window,
) -> None:
    """Perform a move of which some sources are on other hosts, and are copied here first."""
    perform(*_pulled(context, transfer, own, places, target))


def _operand(host: HostArray, block: Block | None) -> Operand:
    """Where an array lies, whose memory somebody else keeps."""
    address = int(host.__array_interface__["data"][0])
    return Operand(address, host.shape, host.strides, dtypes.of(host.dtype).name, block)


def _window(array: Operand) -> Window:
    return Window(array.address, array.strides, array.keep)


def _array(array: Operand) -> HostArray:
    return _window(array).array(array.shape, dtypes.to_numpy(array.dtype))


def _matrix(array: HostArray) -> HostArray:
    """A vector as a matrix of one column."""
    return array if array.ndim == 2 else array[:, np.newaxis]
