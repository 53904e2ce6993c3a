"""Programs on cores: each rank pulls what it needs from where its peers hold it.

What peers read has to be on the heap. Operands there are read where they lie; of others, what peers
read is staged there before the ranks agree, so that the exchange in which they agree is also the
synchronisation before reading. A call that comes again finds its copies bound: nothing is worked
out between that exchange and the first byte.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any, Literal, NamedTuple

import numpy as np

from shardmath.arrays import Library, dtypes, library_of
from shardmath.arrays.base import HostArray, share_memory
from shardmath.arrays.spec import packed_strides
from shardmath.base.lru_cache import LRUCache
from shardmath.call.agreement import Agreement
from shardmath.context.context import Context
from shardmath.handles.allocation import block_of
from shardmath.handles.operand import Operand
from shardmath.local.fft import engine_for
from shardmath.operators.in_place import array_in_place
from shardmath.operators.workspace import KEPT_STAGING, Workspace
from shardmath.program.arithmetic import Binding, bind_arithmetic, buffers_of, fused
from shardmath.program.blocks import Blocks
from shardmath.program.cores_blocks import Calls, Pass, run
from shardmath.program.numbers import agree_on_numbers, numbers_bytes, pack_numbers
from shardmath.program.overwriting import overwritten
from shardmath.program.performing import Arguments, Direct, Known, Names, Plan, Turn
from shardmath.program.steps import Move, Program, SplitArray, Synchronise, Transform
from shardmath.redistribution import Exposed, TransferPlan, Window, window_on
from shardmath.redistribution.bound_copies import bind
from shardmath.redistribution.exposure import bind_stage, staged_bytes
from shardmath.symmetric.heap import Block, Buffer

__all__ = ["Cores"]

_KEPT = 128  # calls of which the copies stay bound
_KEPT_PLACES = 16  # of new results, of each such call
_KEPT_SCRATCH = 256 << 10  # bytes that such a call may hold
_TAG = 8  # bytes, of a plan
_UNPREPARED = bytes(_TAG)
_LENGTH = struct.Struct("<H")
_SHARED_BYTES = 8 << 20  # of a move, from which on the threads of a rank share it

Ranges = tuple[tuple[int, int], ...]  # of each axis


@dataclass(frozen=True)
class HostArrays:
    """One rank's arrays: operands, and results that were given. New ones are of `library`.

    `held` keeps their memory.
    """

    library: Library
    arrays: Mapping[str, Operand]
    on_heap: bool
    held: tuple[HostArray, ...]


class _Result(NamedTuple):
    """A result that is to be made."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    order: Literal["C", "F"]
    strides: tuple[int, ...]  # in elements
    nbytes: int
    on_heap: bool
    in_place: str  # the operand whose memory it takes, or ""


@dataclass(frozen=True, eq=False)
class _Prepared:
    """What is to be done before the ranks agree on `plan`: results to make, copies that stage, and
    the steps before the first synchronisation.

    It holds while the workspace's buffers, by name and bytes, are in these blocks. `replaced` are
    operands of which copies take the place.
    """

    plan: Plan
    note: bytes
    makes: tuple[_Result, ...]
    copies: Calls
    replaced: Mapping[str, Operand]
    memory: tuple[tuple[str, int, Block], ...]


@dataclass(frozen=True, eq=False)
class _Bound:
    """What performs a program between the same arrays, by the number of each step: `parts`.

    `by_place` is all of it, in order, by where new results lie.
    """

    arrays: dict[str, Operand]
    places: Mapping[str, Sequence[bytes]]
    binding: Binding
    parts: list[tuple[int, Calls]]
    lasting: bool
    by_place: LRUCache[tuple[int, ...], Calls] = field(
        default_factory=lambda: LRUCache(_KEPT_PLACES)
    )

    def calls(self) -> Calls:
        """All, for the results that they were bound to."""
        return [call for _, calls in self.parts for call in calls]


class Cores:
    """Performs programs on cores.

    `kept`: for an object, whose workspace stays until it is released. Else it is the context's, and
    what is large is given back after each call.
    """

    repeat = None

    def __init__(self, context: Context, names: Names, *, kept: bool) -> None:
        self._context = context
        self._names = names
        self._kept = kept
        self.number = 0
        self._workspace = Workspace(context) if kept else Workspace.of(context)
        self._barrier = partial(context.board.barrier, names.operation)
        self._programs: LRUCache[Plan, Program] = LRUCache(_KEPT)
        self._bound: LRUCache[Any, _Bound] = LRUCache(_KEPT)
        self._blocks: LRUCache[tuple[Plan, int], Blocks] = LRUCache(_KEPT)  # of steps

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
        hosts: dict[int, HostArray] = {}  # of the operands, by their identity
        on_heap = True
        for name, x in zip(names.operands, arguments.operands, strict=True):
            if x is None:
                continue
            host = library_of(x, name).host_view(x)
            place = block_of(context, x)
            on_heap = on_heap and (place is not None or name in names.beside)
            if host is not x and host.size:  # a lazily conjugated tensor has its values elsewhere
                place = block_of(context, host)
            found[name] = _operand(host, None if place is None else place[0])
            hosts[id(x)] = host
        for name, x in zip(names.results, arguments.results, strict=True):
            if x is None:
                continue
            own = [n for n, y in zip(names.operands, arguments.operands, strict=True) if y is x]
            name_given = own[0] if own else name
            target = library_of(x, name).host_view(x, writable=True, name=name_given)
            place = block_of(context, x)
            overwritten = id(x) if set(own) & set(names.optional) else 0
            others = [host for key, host in hosts.items() if key != overwritten]
            if names.separate and any(share_memory(host, target) for host in others):
                raise ValueError(f"{name_given} overlaps {names.separate}")
            found[name] = _operand(target, None if place is None else place[0])
            hosts[id(x)] = target
        library = library_of(arguments.operands[0])
        return HostArrays(library, found, on_heap, tuple(hosts.values()))

    def without_memory(self, arrays: HostArrays) -> HostArrays:
        """See Performer."""
        return HostArrays(arrays.library, arrays.arrays, arrays.on_heap, ())

    # -- prepare -----------------------------------------------------------------------------------

    def prepare(self, turn: Turn, plan: Plan | None) -> None:
        """See Performer."""
        if plan is None:
            turn.note = pack_numbers(turn.known.numbers) + _UNPREPARED
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
        turn.prepared = prepared
        for copy in prepared.copies:
            copy()
        turn.note = prepared.note
        if prepared.makes:
            self._make(turn, prepared.makes)

    def _holds(self, prepared: _Prepared) -> bool:
        """Whether the workspace is where it was."""
        buffer = self._workspace.buffer
        return all(buffer(name, nbytes).block is block for name, nbytes, block in prepared.memory)

    def _prepare(self, turn: Turn, plan: Plan) -> _Prepared:
        context, program = self._context, self._fused(plan)
        arrays = self._operands(turn, program)
        makes = tuple(
            self._result(turn, program, name) for name in program.results if name not in arrays
        )
        workspace, memory = self._workspace_arrays(program, arrays)
        note, replaced = [pack_numbers(turn.known.numbers), plan.tag], {}
        copies: Calls = []

        def staged(name: str, ranges: Ranges) -> tuple[Exposed, Block]:
            array = arrays[name]
            buffer = self._staging(turn, name, staged_bytes(ranges, array.itemsize))
            exposed, staging = bind_stage(context, _window(array), array.itemsize, ranges, buffer)
            copies.extend(staging)
            memory.append((self._name(name), buffer.block.nbytes, buffer.block))
            return exposed, buffer.block

        for name in [] if self._names.separate else overwritten(arrays, program, context.rank):
            shape, dtype = arrays[name].shape, arrays[name].dtype
            exposed, block = staged(name, tuple((0, extent) for extent in shape))
            replaced[name] = Operand(block.address, shape, exposed.strides, dtype, block)
        for name, transfers in program.published.items():
            ranges = None if name in workspace else _ranges(transfers, context.rank)
            array = workspace.get(name) or replaced.get(name) or arrays[name]
            place = b""
            if array.block is not None and (name in workspace or ranges is not None):
                context.announce(array.block)
                place = array.exposed.pack()
            elif ranges is not None:
                place = staged(name, ranges)[0].pack()
            note.append(_LENGTH.pack(len(place)) + place)
        arrays |= {**workspace, **replaced}
        hosts = {name: _array(array) for name, array in arrays.items()}
        for number, step in enumerate(program.steps[: _agreed_at(program)]):
            if isinstance(step, Move | Transform):
                copies += self._bind_pass(plan, number, arrays, (), turn.known)
            else:
                copies += bind_arithmetic(step, hosts, turn.known.numbers)
        return _Prepared(plan, b"".join(note), makes, copies, replaced, tuple(memory))

    def _fused(self, plan: Plan) -> Program:
        """The program of a plan as cores perform it."""
        return self._programs.made(plan, lambda: fused(plan.program))

    def _operands(self, turn: Turn, program: Program) -> dict[str, Operand]:
        """Operands, and results that were given, as the steps see them."""
        arrays: dict[str, Operand] = dict(turn.known.arrays.arrays)
        for name in program.transposed:
            if name in arrays:
                arrays[name] = arrays[name].transposed()
        return arrays

    def _result(self, turn: Turn, program: Program, name: str) -> _Result:
        arrays, result = turn.known.arrays, program.results[name]
        order = result.order
        on_heap = arrays.on_heap and isinstance(result, SplitArray)
        if isinstance(result, SplitArray) and result.like:
            order = _order_like(result, arrays.arrays)
        shape, place = result.local_shape(self._context.rank), program.in_place.get(name, "")
        strides, nbytes = (
            packed_strides(shape, axes=order),
            prod(shape) * dtypes.of(result.dtype).itemsize,
        )
        return _Result(name, shape, result.dtype, order, strides, nbytes, on_heap, place)

    def _staging(self, turn: Turn, name: str, nbytes: int) -> Buffer:
        workspace = self._workspace
        if not self._kept and nbytes > KEPT_STAGING:
            workspace = turn.held = turn.held or Workspace(self._context)
        return workspace.buffer(self._name(name), nbytes)

    def _name(self, name: str) -> str:
        """What a buffer of the program is called in the workspace, which operations share."""
        return f"{self._names.operation}: {name}"

    def _make(self, turn: Turn, results: Sequence[_Result]) -> None:
        """New results for those that were not given."""
        library = turn.known.arrays.library
        for result in results:
            name, place = result.name, result.in_place
            if place:
                operand = turn.arguments.operands[self._names.operands.index(place)]
                shape, dtype, order = result.shape, result.dtype, result.order
                made = array_in_place(self._context, operand, shape, dtype, order)
                library.host_view(made, writable=True, name=place)  # raises what is wrong
                turn.made[name] = made
            else:
                turn.made[name] = self._maker(library, result)()

    def _maker(self, library: Library, result: _Result) -> Callable[[], Any]:
        """What makes a new array for a result."""
        _, shape, dtype, order, strides, nbytes, on_heap, _ = result
        if not on_heap:
            return library.maker(shape, dtype, order)
        heap = self._context.heap
        allocate, view = heap.allocate, library.viewer(dtype, shape, strides, heap.transport.device)

        def made() -> Any:
            buffer = allocate(nbytes)
            return view(buffer, buffer.block.address)

        return made

    # -- perform -----------------------------------------------------------------------------------

    def perform(self, turn: Turn, agreement: Agreement[Any], plan: Plan) -> tuple[Any, ...]:
        """See Performer."""
        made, known = turn.made, turn.known
        bound = self._bound.find((turn.prepared, agreement))
        if bound is None:
            told, equal = agreement.notes, plan.program.equal
            agree_on_numbers(self._context.board, self._names.numbers, equal, told)
            notes = self._complete(turn, told, plan)
            bound = self._bind(turn, plan, notes)
            if notes is told and known.lasting and bound.lasting and turn.held is None:
                self._bound.keep((turn.prepared, agreement), bound)
            steps = bound.by_place.keep(_pointers(turn), bound.calls())
        else:
            steps = self._steps(turn, plan, bound)
        run(steps)
        given = turn.arguments.results
        if not made:
            return given
        names = self._names.results
        return tuple([made.get(name, x) for name, x in zip(names, given, strict=True)])

    def direct(self, turn: Turn, agreement: Agreement[Any]) -> Direct | None:
        """See Performer."""
        prepared: _Prepared = turn.prepared
        bound, makes = self._bound.find((prepared, agreement)), prepared.makes
        if bound is None or len(makes) > 1 or any(result.in_place for result in makes):
            return None
        known, plan, barrier = turn.known, agreement.plan, self._barrier
        library: Library = known.arrays.library

        def bind(new: Any) -> tuple[Callable[[], object] | None, ...]:
            again = Turn(turn_arguments, known, known.spec)
            again.prepared = prepared
            again.made = {result.name: new for result in makes}
            return tuple(
                None if call is barrier else call for call in self._steps(again, plan, bound)
            )

        turn_arguments = Arguments((), ())
        new = self._maker(library, makes[0]) if makes else None
        return Direct(
            before=tuple(prepared.copies),
            memory=(self._workspace, self._workspace.version) if prepared.memory else None,
            new=new,
            result=self._names.results.index(makes[0].name) if makes else 0,
            bind=bind,
        )

    def _complete(self, turn: Turn, notes: list[bytes], plan: Plan) -> list[bytes]:
        """All ranks' notes, when all have prepared for this plan. Collective.

        They tell each other once more where some have not.
        """
        start = numbers_bytes(self._names.numbers)
        if all(note.startswith(plan.tag, start) for note in notes):
            return notes

        def prepare() -> bytes:
            turn.made.clear()
            self.prepare(turn, plan)
            return turn.note

        return self._context.gather(f"{self._names.operation}, memory", prepare)

    def _bind(self, turn: Turn, plan: Plan, notes: Sequence[bytes]) -> _Bound:
        """What performs the program, each time that it is run between the same arrays.

        It is not to be kept with large scratch, which it holds.
        """
        program = self._fused(plan)
        arrays = {**self._operands(turn, program), **_made(turn)}
        arrays |= {**self._workspace_arrays(program, arrays)[0], **turn.prepared.replaced}
        room = 0
        for name, scratch in program.scratch.items():
            like, dtype = _array(arrays[scratch.like]), dtypes.to_numpy(scratch.dtype)
            host = np.empty_like(like, dtype)
            arrays[name] = replace(_operand(host, None), keep=host)
            room += host.nbytes
        hosts = {name: _array(array) for name, array in arrays.items()}
        skip = numbers_bytes(self._names.numbers) + _TAG
        places = _places(tuple(program.published), notes, skip)
        binding = Binding(self._context, hosts, places, turn.known)
        bound = _Bound(arrays, places, binding, [], room <= _KEPT_SCRATCH)
        first = _agreed_at(program)
        if isinstance(program.steps[first], Synchronise):  # the exchange that carried the notes
            first += 1
        for number in range(first, len(program.steps)):
            calls = self._bind_step(plan, number, bound, turn.known)
            bound.parts.append((number, calls))
        return bound

    def _steps(self, turn: Turn, plan: Plan, bound: _Bound) -> Calls:
        """What follows the exchange, for the new results of this call."""
        places, by_place = _pointers(turn), bound.by_place
        return by_place.find(places) or by_place.keep(places, self._rebound(turn, plan, bound))

    def _rebound(self, turn: Turn, plan: Plan, bound: _Bound) -> Calls:
        """The same, for new results that lie elsewhere: only what reaches those is bound anew."""
        made, steps = _made(turn), self._fused(plan).steps
        hosts = {name: _array(array) for name, array in made.items()}
        other = replace(
            bound, arrays={**bound.arrays, **made}, binding=bound.binding.between(hosts)
        )
        found: Calls = []
        for number, calls in bound.parts:
            reaches = not buffers_of(steps[number]).isdisjoint(made)
            found += self._bind_step(plan, number, other, turn.known) if reaches else calls
        return found

    def _bind_step(self, plan: Plan, number: int, bound: _Bound, known: Known) -> Calls:
        step = self._fused(plan).steps[number]
        if isinstance(step, Synchronise):
            return [self._barrier]
        if isinstance(step, Move | Transform):
            told = bound.places.get(step.source, ())
            return self._bind_pass(plan, number, bound.arrays, told, known)
        return bound.binding.bind(step)

    def _bind_pass(
        self,
        plan: Plan,
        number: int,
        arrays: Mapping[str, Operand],
        places: Sequence[bytes],
        known: Known,
    ) -> Calls:
        """A move or a transform, with what it brings from peers."""
        context, step = self._context, self._fused(plan).steps[number]
        assert isinstance(step, Move | Transform), "these only"
        library = known.arrays.library
        transfer, source, target = step.transfer, arrays[step.source], arrays[step.target]
        if isinstance(step, Move) and (context.threads == 1 or target.nbytes < _SHARED_BYTES):
            perform_now = partial(_copies, context, transfer, source, places, target)
        else:
            blocks = self._blocks.made(
                (plan, number), lambda: self._cut(self._fused(plan), step, arrays)
            )
            perform_now = partial(_pass, context, step, blocks, source, places, target, library)
        if all(context.same_host(src) for src in transfer.sources(context.rank)):
            return perform_now()
        return [lambda: run(perform_now())]  # what is elsewhere is copied here when it can be read

    def _cut(
        self, program: Program, step: Move | Transform, arrays: Mapping[str, Operand]
    ) -> Blocks:
        target = program.workspace.get(step.target) or program.results[step.target]
        rank, order = self._context.rank, target.order
        itemsize = arrays[step.source].itemsize
        if isinstance(step, Move):
            return Blocks(step.transfer, rank, order=order, itemsize=itemsize)
        if step.kind == "R2C":
            itemsize = arrays[step.target].itemsize
        return Blocks(
            step.transfer, rank, axes=step.axes, kind=step.kind, order=order, itemsize=itemsize
        )

    # -- workspace ---------------------------------------------------------------------------------

    def _workspace_arrays(
        self, program: Program, arrays: Mapping[str, Operand]
    ) -> tuple[dict[str, Operand], list[tuple[str, int, Block]]]:
        """This rank's parts of the buffers of a program, in the workspace, shown to its peers; and
        the memory that they lie in: its name there, its bytes and its block.
        """
        found: dict[str, Operand] = {}
        sizes: dict[str, int] = {}
        for name, array in program.workspace.items():
            shape, itemsize = (
                array.local_shape(self._context.rank),
                dtypes.of(array.dtype).itemsize,
            )
            strides = packed_strides(shape, itemsize, _order_like(array, arrays))
            found[name] = Operand(0, shape, strides, array.dtype)
            memory = self._name(array.memory or name)
            sizes[memory] = max(sizes.get(memory, 0), found[name].nbytes)
        blocks = {name: self._workspace.buffer(name, n).block for name, n in sizes.items()}
        for name, array in program.workspace.items():
            block = blocks[self._name(array.memory or name)]
            self._context.announce(block)
            found[name] = replace(found[name], address=block.address, block=block)
        return found, [(name, sizes[name], block) for name, block in blocks.items()]

    def release(self) -> None:
        """See Performer."""
        if self._kept:
            self._workspace.release()
            self._bound.clear()


def _pointers(turn: Turn) -> tuple[int, ...]:
    """Where new results begin."""
    made = turn.made
    return tuple([turn.known.arrays.library.pointer(x) for x in made.values()]) if made else ()


def _made(turn: Turn) -> dict[str, Operand]:
    """Where new results lie."""
    library = turn.known.arrays.library
    return {
        name: _operand(library.host_view(made, writable=True), None)
        for name, made in turn.made.items()
    }


def _agreed_at(program: Program) -> int:
    """How many steps come before the ranks agree, which is the first synchronisation."""
    kinds = [isinstance(step, Synchronise) for step in program.steps]
    return kinds.index(True) if True in kinds else 0


def _order_like(array: SplitArray, arrays: Mapping[str, Operand]) -> Literal["C", "F"]:
    """The memory order of a buffer: its own, or that of the operands that it is like."""
    if not array.like:
        return array.order
    return "F" if all(arrays[name].order == "F" for name in array.like) else "C"


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


def _places(names: Sequence[str], notes: Sequence[bytes], start: int) -> dict[str, list[bytes]]:
    """Where each rank's buffers of these names lie, packed; notes have it from byte `start`."""
    found: dict[str, list[bytes]] = {name: [] for name in names}
    for note in notes:
        at = start
        for name in names:
            (length,) = _LENGTH.unpack_from(note, at)
            at += _LENGTH.size
            found[name].append(note[at : at + length])
            at += length
    return found


def _windows(
    context: Context, transfer: TransferPlan, source: Operand, places: Sequence[bytes]
) -> dict[int, Window]:
    """Where this rank reads what a transfer brings it, by the rank that it comes from."""
    rank, own = context.rank, _window(source)
    return {
        src: own if src == rank else window_on(context, src, Exposed.unpack(places[src]), transfer)
        for src in transfer.sources(rank)
    }


def _copies(
    context: Context,
    transfer: TransferPlan,
    source: Operand,
    places: Sequence[bytes],
    target: Operand,
) -> Calls:
    """What performs a move as copies of whole parts."""
    windows = _windows(context, transfer, source, places)
    strides = {src: window.strides for src, window in windows.items()}
    copies = transfer.copies(context.rank, strides, target.strides)
    return bind(copies, windows, _window(target))


def _pass(
    context: Context,
    step: Move | Transform,
    blocks: Blocks,
    source: Operand,
    places: Sequence[bytes],
    target: Operand,
    library: Library,
) -> Calls:
    """What performs a step block by block."""
    windows = {} if blocks.stays else _windows(context, step.transfer, source, places)
    arrays = _array(source), _array(target)
    if isinstance(step, Move):
        return Pass(context, blocks, *arrays, windows).bound()
    engine = engine_for(library.name)
    return Pass(context, blocks, *arrays, windows, engine, step.forward, step.norm).bound()


def _operand(host: HostArray, block: Block | None) -> Operand:
    """Where an array lies, whose memory somebody else keeps."""
    address = int(host.__array_interface__["data"][0])
    return Operand(address, host.shape, host.strides, dtypes.of(host.dtype).name, block)


def _window(array: Operand) -> Window:
    return Window(array.address, array.strides, array.keep)


def _array(array: Operand) -> HostArray:
    return _window(array).array(array.shape, dtypes.to_numpy(array.dtype))
