"""Programs on cores: each rank pulls what it needs from where its peers hold it.

What peers read has to be on the heap. Operands on the heap are read where they lie; of others, the
part that peers read is copied there before the ranks agree. So the exchange in which they agree is
also the synchronisation before reading. A repeated call finds its copies bound: nothing is worked
out between that exchange and the first byte.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from math import prod
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from shardmath.arrays import ArraySpec, Library, dtypes, library_named, library_of
from shardmath.arrays.base import HostArray, share_memory
from shardmath.arrays.spec import packed_strides
from shardmath.base.immutable import Immutable
from shardmath.base.lru_cache import LRUCache
from shardmath.base.recorder import spanned, waited
from shardmath.call.agreement import Agreement
from shardmath.context.context import Context
from shardmath.handles.allocation import block_of, maker_on_heap
from shardmath.handles.operand import Operand
from shardmath.operators.in_place import array_in_place
from shardmath.operators.workspace import KEPT_STAGING, Workspace, kept_for_readers
from shardmath.program import two_shots
from shardmath.program.analysis import agreed_at, fused, overwritten, staged, waits_at_end
from shardmath.program.binding import Binding, named
from shardmath.program.notes import (
    TAG_BYTES,
    UNPREPARED,
    agree_on_numbers,
    numbers_bytes,
    pack_numbers,
    pack_parts,
    unpack_parts,
)
from shardmath.program.offers import (
    LENT,
    STAGED,
    STAGED_BYTES,
    DoubleBuffer,
    Offered,
    Offers,
    announced,
    array_at,
    note_of,
    offer,
    room_for,
)
from shardmath.program.passes import Blocks
from shardmath.program.performing import Arguments, Copier, Direct, Home, Names, Plan, Turn
from shardmath.program.steps import (
    Arrive,
    Combine,
    Program,
    SplitArray,
    Step,
    Synchronise,
    buffers_of,
)
from shardmath.redistribution import Transfer
from shardmath.redistribution.bound_copies import Calls, run
from shardmath.redistribution.plan import Ranges
from shardmath.symmetric.heap import Block, Buffer

_KEPT = 128  # calls of which the copies stay bound
_KEPT_PLACES = 16  # places of new results, for each such call
_KEPT_SCRATCH = 256 << 10  # bytes of scratch that such a call may hold
_COPIED_BYTES = 32 << 10  # new results of so many bytes are copied faster than steps are bound
_OFTEN = 1  # results at a place; then steps are bound to it
_MOST_COPIED = 1 << 20  # bytes of operands that are copied faster than a call is bound

Performing = Callable[[Any, Mapping[str, HostArray]], Calls]  # binds a step to buffers


class HostArrays(Immutable):
    """One rank's arrays: its operands, and the results that it gave.

    New results are of `library`, which is None if all operands were left out. `held` keeps the
    memory of the arrays.
    """

    library: Library | None
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


class _Prepared(Immutable, eq=False):
    """What a rank does before the ranks agree on `plan`: it makes results, and offers its arrays.

    The copies of `offered` include the steps before the first synchronisation. All this can be
    repeated while `memory`, the buffers of the workspace by name and bytes, lies in these blocks.
    """

    plan: Plan
    library: Library  # of the arrays
    note: bytes
    makes: tuple[_Result, ...]
    offered: Offered
    memory: tuple[tuple[str, int, Block], ...]


class _Bound(Immutable, eq=False):
    """The calls that perform a program between the same arrays, step by step in `parts`.

    `by_place` has all calls in order, by where new results lie. In a user's program that keeps its
    results no two lie in the same place: at a new place, small results are copied from `homes`.
    """

    binding: Binding
    parts: list[tuple[int, Calls]]
    lasting: bool
    homes: dict[str, Any]
    by_place: LRUCache[tuple[int, ...], Calls] = field(
        default_factory=lambda: LRUCache(_KEPT_PLACES)
    )

    def calls(self) -> Calls:
        """All calls, for the results that they were bound to first."""
        return [call for _, calls in self.parts for call in calls]


class Cores:
    """Performs programs on cores.

    With `kept`, those of one object, whose workspace stays until it is released. Otherwise the
    workspace is the context's, and large buffers are given back after each call.
    """

    performers: ClassVar[Mapping[type[Step], Performing]] = {}  # of an operator's own steps

    def __init__(self, context: Context, names: Names, *, kept: bool) -> None:
        self._context = context
        self._names = names
        self._kept = kept
        self.number = 0
        self._workspace = Workspace(context) if kept else Workspace.of(context)
        self._halves = DoubleBuffer.of(context)
        self._barrier = partial(context.board.barrier, names.operation)
        self._arrive = partial(context.board.arrive, names.operation)
        self._programs: LRUCache[Plan, Program] = LRUCache(_KEPT)
        self._bound: LRUCache[Any, _Bound] = LRUCache(_KEPT)
        self._blocks: LRUCache[Plan, dict[int, Blocks]] = LRUCache(_KEPT)
        self._homes: LRUCache[Any, dict[str, Any]] = LRUCache(_KEPT)

    # -- read --------------------------------------------------------------------------------------

    def inspect(self, arguments: Arguments) -> None:
        """See Performer."""
        self.read(arguments)

    def read(self, arguments: Arguments) -> HostArrays:
        """See Performer. Raises ValueError if a result cannot be written to, or overlaps an operand
        from which it has to be separate; UseAfterFree.
        """
        context, names = self._context, self._names
        operands: dict[str, Operand] = {}
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
            operands[name] = _operand(host, place and place[0])
            hosts[id(x)] = host
        for name, x in zip(names.results, arguments.results, strict=True):
            if x is None:
                continue
            own = [n for n, y in zip(names.operands, arguments.operands, strict=True) if y is x]
            name_given = own[0] if own else name
            target = library_of(x, name).host_view(x, writable=True, name=name_given)
            place = block_of(context, x, "out")
            reused = id(x) if set(own) & set(names.optional) else 0
            others = [host for key, host in hosts.items() if key != reused]
            if names.separate and any(share_memory(host, target) for host in others):
                raise ValueError(f"{name_given} overlaps {names.separate}")
            operands[name] = _operand(target, place and place[0])
            hosts[id(x)] = target
        first, left_out = arguments.operands[0], names.operands[0] in names.optional
        library = None if first is None and left_out else library_of(first)
        return HostArrays(library, operands, on_heap, tuple(hosts.values()))

    def without_memory(self, arrays: HostArrays) -> HostArrays:
        """See Performer."""
        return replace(arrays, held=())

    # -- prepare -----------------------------------------------------------------------------------

    def prepare(self, turn: Turn, plan: Plan | None) -> None:
        """See Performer."""
        if plan is None:
            turn.note = pack_numbers(turn.known.numbers) + UNPREPARED
            return
        half, known = self._halves.turn(), turn.known
        by_half: list[_Prepared | None] = known.prepared or [None, None]
        prepared = by_half[half]
        if prepared is None or prepared.plan is not plan or not self._holds(prepared):
            prepared = self._prepare(turn, plan)
            if known.lasting and turn.held is None:
                by_half[half] = prepared
                known.prepared = by_half if prepared.offered.halved else [prepared] * 2
        turn.prepared, turn.note = prepared, prepared.note
        for copy in prepared.offered.copies:
            copy()
        payload = prepared.offered.payload
        if payload is None:
            turn.payload = b""  # not the one that was sent when another plan was expected
        else:
            turn.payload = bytes(payload) if isinstance(payload, memoryview) else payload()
        if prepared.makes:
            self._make(turn, prepared)

    def _holds(self, prepared: _Prepared) -> bool:
        """Whether the workspace is where it was."""
        buffer = self._workspace.buffer
        return all(buffer(name, nbytes).block is block for name, nbytes, block in prepared.memory)

    def _prepare(self, turn: Turn, plan: Plan) -> _Prepared:
        context, program = self._context, self._fused(plan)
        arrays = _transposed(turn.known.arrays.arrays, program)
        makes = tuple(
            self._result(turn, program, name) for name in program.results if name not in arrays
        )
        workspace, memory = self._workspace_arrays(program, arrays)
        combines = {x.source: x for x in program.steps if isinstance(x, Combine)}
        by_parts, late = self._combined_by_parts(program, arrays)
        read = {
            name: None if name in by_parts else _ranges(arrays[name], transfers, context)
            for name, transfers in program.published.items()
            if name in arrays
        }
        lends = not workspace.keys().isdisjoint(program.published)

        def buffer(name: str, nbytes: int) -> Buffer:
            large = not self._kept and nbytes > KEPT_STAGING
            if large and turn.held is None:
                turn.held = Workspace(context)
            staging = (turn.held if large else self._workspace).buffer(self._name(name), nbytes)
            memory.append((self._name(name), staging.block.nbytes, staging.block))
            return staging

        offered = offer(context, arrays, read, late, combines, buffer, lends=lends)
        parts = []
        for name in program.published:
            if name in by_parts:
                operand, combine = offered.replaced.get(name) or arrays[name], by_parts[name]
                into = arrays.get(combine.target)
                place, staging = two_shots.offer(context, combine, operand, into)
                parts.append(place)
                offered.copies += staging
            elif name in workspace:
                lent = any(workspace[name].block is block for *_, block in memory)
                kind = LENT if lent else STAGED
                parts.append(note_of(kind, announced(context, workspace[name])))
            else:
                parts.append(offered.notes.get(name, b""))
        arrays |= {**workspace, **offered.replaced}
        library = turn.known.arrays.library or library_named(program.library)
        nothing = Offers(context, (), (), 0)  # before the ranks agree
        binding = self._binding(turn, plan, library, arrays, nothing)
        for number in range(agreed_at(program)):
            offered.copies += binding.bind(number)
        note = pack_numbers(turn.known.numbers) + plan.tag + pack_parts(parts)
        return _Prepared(plan, library, note, makes, offered, tuple(memory))

    def _combined_by_parts(
        self, program: Program, arrays: Mapping[str, Operand]
    ) -> tuple[dict[str, Combine], set[str]]:
        """The operands that are combined in two shots, and those that have to be copied first."""
        by_parts = {
            step.source: step
            for step in program.steps
            if isinstance(step, Combine)
            and step.source in arrays
            and two_shots.takes(step, arrays[step.source].nbytes)
        }
        rank = self._context.rank
        late = set() if self._names.separate else {*overwritten(arrays, program, rank)}
        for name, step in by_parts.items():
            if two_shots.needs_copy(arrays[name], arrays.get(step.target)):
                late.add(name)
            else:
                late.discard(name)
        return by_parts, late

    def _fused(self, plan: Plan) -> Program:
        """The program of a plan as cores perform it."""
        return self._programs.made(plan, lambda: fused(plan.program))

    def _result(self, turn: Turn, program: Program, name: str) -> _Result:
        arrays, result = turn.known.arrays, program.results[name]
        order = result.order_among(arrays.arrays)
        on_heap = arrays.on_heap and isinstance(result, SplitArray)
        shape, place = result.local_shape(self._context.rank), program.in_place.get(name, "")
        strides, nbytes = packed_strides(shape, axes=order), _bytes_of(shape, result.dtype)
        return _Result(name, shape, result.dtype, order, strides, nbytes, on_heap, place)

    def _name(self, name: str) -> str:
        """The name of a buffer of the program in the workspace, which operations share."""
        return f"{self._names.operation}: {name}"

    def _make(self, turn: Turn, prepared: _Prepared) -> None:
        """New results for those that were not given."""
        library = prepared.library
        for result in prepared.makes:
            name, place = result.name, result.in_place
            if place:
                operand = turn.arguments.operands[self._names.operands.index(place)]
                shape, dtype, order = result.shape, result.dtype, result.order
                made = array_in_place(self._context, operand, shape, dtype, order)
                library.host_view(made, writable=True, name=place)  # raises what is wrong
                turn.made[name] = made
            elif result.on_heap:
                turn.made[name], _ = self._maker(library, result)()
            else:
                turn.made[name] = self._maker(library, result)()

    def _maker(self, library: Library, result: _Result) -> Callable[[], Any]:
        """A function that makes a new array for a result; on the heap, (array, address)."""
        shape, dtype, strides = result.shape, result.dtype, result.strides
        if result.on_heap:
            return maker_on_heap(self._context.heap, library, shape, dtype, strides)
        return library.maker(shape, dtype, result.order)

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
            steps = bound.by_place.keep(_pointers(turn.prepared.library, made), bound.calls())
        else:
            steps = self._steps(turn, bound)
        if bound.binding.offers.landing is not None:
            bound.binding.offers.landing.data[:] = b"".join(turn.payloads)
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
        barrier, library, program = self._barrier, prepared.library, bound.binding.program

        def bind(new: Any) -> tuple[Callable[[], object] | None, ...]:
            return into({result.name: new for result in makes})

        def into(made: Mapping[str, Any]) -> tuple[Callable[[], object] | None, ...]:
            steps = self._steps_into(made, bound)
            return tuple(None if call is barrier else call for call in steps)

        landing = bound.binding.offers.landing
        reads = library.is_read_by_compiled_code()
        homes = [library.host_view(x, writable=True) for x in bound.homes.values() if reads]
        home = None
        summed = None
        if reads and landing is not None and len(bound.parts) == len(program.published) == 1:
            summed = bound.binding.payload_sum(program.steps[bound.parts[0][0]])
        if homes and summed is None:
            memory = homes[0]
            steps = into(bound.homes)
            home = Home(memory, memory.ctypes.data, memory.nbytes, steps, _OFTEN, self.copier)
        return Direct(
            before=tuple(prepared.offered.copies),
            memory=(self._workspace, self._workspace.version) if prepared.memory else None,
            half=self._halves.half if prepared.offered.halved else None,
            payload=prepared.offered.payload,
            new=self._maker(library, makes[0]) if makes else None,
            result=self._names.results.index(makes[0].name) if makes else 0,
            bind=bind if summed is None else None,
            home=home,
            receive=summed or (None if landing is None else landing.data),
        )

    def _complete(self, turn: Turn, notes: list[bytes], plan: Plan) -> list[bytes]:
        """All ranks' notes, when all have prepared for this plan. Collective.

        If some have not, they do, and all exchange their notes once more.
        """
        start = numbers_bytes(self._names.numbers)
        if all(note.startswith(plan.tag, start) for note in notes):
            return notes

        def prepare() -> bytes:
            turn.made.clear()
            self.prepare(turn, plan)
            return pack_parts((turn.note, turn.payload))

        texts = self._context.gather(f"{self._names.operation}, memory", prepare)
        pairs = [unpack_parts(text) for text in texts]
        turn.payloads = [payload for _, payload in pairs]
        return [note for note, _ in pairs]

    def _bind(self, turn: Turn, plan: Plan, notes: Sequence[bytes]) -> _Bound:
        """The calls that perform the program, each time that it runs between the same arrays.

        They hold scratch, and are not kept where that is large.
        """
        program, library = self._fused(plan), turn.prepared.library
        made = _made(library, turn.made, program)
        arrays = {**_transposed(turn.known.arrays.arrays, program), **made}
        arrays |= {**self._workspace_arrays(program, arrays)[0], **turn.prepared.offered.replaced}
        skip = numbers_bytes(self._names.numbers) + TAG_BYTES
        offers = Offers(self._context, tuple(program.published), notes, skip)
        arrays |= {
            name: offers.own(name, arrays[name]) for name in program.published if name in arrays
        }
        room = 0
        for name, scratch in program.scratch.items():
            like, dtype = array_at(arrays[scratch.like]), dtypes.to_numpy(scratch.dtype)
            host = np.empty_like(like, dtype)
            arrays[name] = replace(_operand(host, None), keep=host)
            room += host.nbytes
        binding = self._binding(turn, plan, library, arrays, offers)
        first, last = agreed_at(program), len(program.steps)
        if isinstance(program.steps[first], Synchronise):  # the exchange that carried the notes
            first += 1
        if isinstance(program.steps[-1], Synchronise) and not waits_at_end(program, offers):
            last -= 1  # no peer is still reading what is written next
        parts = [(number, self._bind_step(number, binding)) for number in range(first, last)]
        return _Bound(binding, parts, room <= _KEPT_SCRATCH, self._homes_of(turn.prepared))

    def _binding(
        self,
        turn: Turn,
        plan: Plan,
        library: Library,
        arrays: Mapping[str, Operand],
        offers: Offers,
    ) -> Binding:
        hosts = {name: array_at(array) for name, array in arrays.items()}
        program, blocks = self._fused(plan), self._blocks.made(plan, dict)
        return Binding(self._context, program, library, turn.known.numbers, hosts, offers, blocks)

    def _homes_of(self, prepared: _Prepared) -> dict[str, Any]:
        """Arrays for new results to be copied from, if those are small and lie in C order.

        All calls with such results have the same, since each copies its own before it returns. A
        home for each place of operands would take memory that the next operands lie behind: in a
        program that trains no call would find its operands where they lay before.
        """
        makes, library = prepared.makes, prepared.library
        small = 0 < sum(result.nbytes for result in makes) <= _COPIED_BYTES
        if not small or any(result.in_place or result.order != "C" for result in makes):
            return {}

        def make() -> dict[str, Any]:
            return {x.name: library.maker(x.shape, x.dtype, x.order)() for x in makes}

        return self._homes.made((library.name, makes), make)

    def _steps(self, turn: Turn, bound: _Bound) -> Calls:
        """The calls that follow the exchange, for the new results of this call."""
        made, homes, library = turn.made, bound.homes, bound.binding.library
        if not homes or _pointers(library, made) in bound.by_place:
            return self._steps_into(made, bound)
        copies = [
            partial(
                np.copyto, library.host_view(made[name], writable=True), library.host_view(home)
            )
            for name, home in homes.items()
        ]
        return [*self._steps_into(homes, bound), *copies]

    def _steps_into(self, made: Mapping[str, Any], bound: _Bound) -> Calls:
        """The calls that write these new results: steps that reach them are bound anew."""
        library, program = bound.binding.library, bound.binding.program
        places = _pointers(library, made)
        known = bound.by_place.find(places)
        if known is not None:
            return known
        results = _made(library, made, program)
        binding = bound.binding.between({name: array_at(x) for name, x in results.items()})
        rebound: Calls = []
        for number, calls in bound.parts:
            reaches = not buffers_of(program.steps[number]).isdisjoint(made)
            rebound += self._bind_step(number, binding) if reaches else calls
        return bound.by_place.keep(places, rebound)

    def _bind_step(self, number: int, binding: Binding) -> Calls:
        step = binding.program.steps[number]
        if isinstance(step, Synchronise):
            return [*waited(self._barrier, "barrier")]
        if isinstance(step, Arrive):
            return [self._arrive]
        perform = self.performers.get(type(step))
        if perform is None:
            return binding.bind(number)
        return [spanned(call, named(step)) for call in perform(step, binding.hosts)]

    def most_copied(self, spec: ArraySpec) -> int:
        """See Performer."""
        return _MOST_COPIED

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """See Performer."""
        ctypes.memmove(target, source, nbytes)

    @property
    def copier(self) -> Copier:
        """See Performer."""
        return None

    # -- workspace ---------------------------------------------------------------------------------

    def _workspace_arrays(
        self, program: Program, arrays: Mapping[str, Operand]
    ) -> tuple[dict[str, Operand], list[tuple[str, int, Block]]]:
        """This rank's parts of a program's workspace, announced to its peers; and the memory that
        they lie in, if it may be given back: (name, bytes, block).
        """
        operands: dict[str, Operand] = {}
        sizes: dict[str, int] = {}
        for name, array in program.workspace.items():
            shape, itemsize = array.local_shape(self._context.rank), dtypes.of(array.dtype).itemsize
            strides = packed_strides(shape, itemsize, array.order_among(arrays))
            operands[name] = Operand(0, shape, strides, array.dtype)
            memory = self._name(array.memory or name)
            sizes[memory] = max(sizes.get(memory, 0), operands[name].nbytes)
        stays = {self._name(name) for name in staged(program)}
        stays = {name for name in stays if sizes[name] <= STAGED_BYTES}
        blocks = {
            name: kept_for_readers(self._context, name, room_for(nbytes)).block
            if name in stays
            else self._workspace.buffer(name, nbytes).block
            for name, nbytes in sizes.items()
        }
        for name, array in program.workspace.items():
            block = blocks[self._name(array.memory or name)]
            self._context.announce(block)
            operands[name] = replace(operands[name], address=block.address, block=block)
        return operands, [(name, sizes[name], blocks[name]) for name in sizes if name not in stays]

    def release(self) -> None:
        """See Performer."""
        if self._kept:
            self._workspace.release()
            self._bound.clear()
            self._homes.clear()


def _pointers(library: Library, made: Mapping[str, Any]) -> tuple[int, ...]:
    """Where new results begin."""
    return tuple([library.pointer(x) for x in made.values()]) if made else ()


def _transposed(arrays: Mapping[str, Operand], program: Program) -> dict[str, Operand]:
    """Arrays as the steps of a program see them."""
    turned = program.transposed
    return {name: x.transposed() if name in turned else x for name, x in arrays.items()}


def _made(library: Library, made: Mapping[str, Any], program: Program) -> dict[str, Operand]:
    """Where new results lie, as the steps see them. It does not keep their memory."""
    hosts = {name: library.host_view(x, writable=True) for name, x in made.items()}
    return _transposed({name: _operand(host, None) for name, host in hosts.items()}, program)


def _bytes_of(shape: tuple[int, ...], dtype: str) -> int:
    return prod(shape) * dtypes.of(dtype).itemsize


def _ranges(
    array: Operand, transfers: Sequence[Transfer | None], context: Context
) -> Ranges | None:
    """For each axis of this rank's part, the range in which peers read; None if they do not."""
    whole = tuple((0, extent) for extent in array.shape)
    read = [whole if move is None else move.read_by_peers(context.rank) for move in transfers]
    parts = [ranges for ranges in read if ranges is not None]
    if not parts:
        return None
    return tuple(
        (min(lo for lo, _ in axis), max(hi for _, hi in axis)) for axis in zip(*parts, strict=True)
    )


def _operand(host: HostArray, block: Block | None) -> Operand:
    """Where an array lies. It does not keep the array's memory."""
    address = int(host.__array_interface__["data"][0])
    return Operand(address, host.shape, host.strides, dtypes.of(host.dtype).name, block)
