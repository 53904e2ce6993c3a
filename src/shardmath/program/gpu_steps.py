"""One rank's program on its GPU: each step is bound to addresses once, and then put on streams.

The table `PERFORMERS` says what binds a step of each type, and a fused step by the type of its
plan. An operator adds its own steps to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from shardmath.arrays.spec import packed_strides
from shardmath.base.lru_cache import LRUCache
from shardmath.context.context import Context
from shardmath.cuda.driver import call
from shardmath.cuda.kernel import ReadyLaunch
from shardmath.geometry import Move as BoxMove
from shardmath.handles.operand import Exposed
from shardmath.operators.lanes import Lane
from shardmath.program.rank_program import Copy, Peer, RankProgram, View
from shardmath.program.steps import (
    Await,
    Fused,
    Get,
    Memory,
    Move,
    On,
    Pack,
    Record,
    Synchronise,
    Unpack,
)
from shardmath.redistribution.box_copies import BoxCopies
from shardmath.redistribution.copies import StridedCopy, lowered, whole
from shardmath.redistribution.delivery import fetch
from shardmath.symmetric.heap import Location

_KEPT = 64  # copies of one program, for as many ways in which peers' arrays lie
_MOST_SOURCES = 96  # of one launch
_NOWHERE = Exposed(Location(0, 0), 0, 0, ())

Launch = Callable[[int], None]  # puts something on a stream
ExposedArrays = Sequence[Exposed | None]  # of one rank


class Memories(NamedTuple):
    """Where memories begin in one execution: this rank's, by name, and those that peers share.

    `stream` is the user's stream; `numbers` are the call's, by name.
    """

    own: Mapping[str, int]
    peers: Sequence[ExposedArrays]
    stream: int
    numbers: Mapping[str, complex] = MappingProxyType({})

    def address(self, view: View) -> int:
        """Where an array of this rank begins."""
        return self.own[view.memory] + view.offset


class Ends(NamedTuple):
    """The addresses between which a step copies boxes, and the strides of peers' arrays, by rank,
    on which the boxes depend.
    """

    sources: Sequence[int]
    targets: Sequence[int]
    strides: Mapping[int, tuple[int, ...]] = MappingProxyType({})


class GPUProgram:
    """A rank's program, with the tables of its copies on its GPU. It holds no array.

    Keep it while a launch of it, or a graph, may be used.
    """

    alignment: ClassVar[int] = 1  # of the addresses at which memories of the user's arrays begin

    def __init__(self, context: Context, lane: Lane, program: RankProgram) -> None:
        self.context, self.lane, self.program = context, lane, program
        self.rank, self.size, self.device = context.rank, context.size, lane.team.device
        self.steps = list(with_streams(self.performed(program.steps)))
        self._copies: LRUCache[Any, BoxCopies] = LRUCache(_KEPT + len(self.steps))

    def performed(self, steps: Sequence[Any]) -> Sequence[Any]:
        """The steps; a subclass may replace some by others."""
        return steps

    @property
    def memories(self) -> Mapping[str, Memory]:
        """The memories of the lane that the program needs."""
        return self.program.memories

    @property
    def check(self) -> Callable[[], None] | None:
        """A function that raises, before each launch, if nothing more can be launched."""
        return None

    def prepare(self, own: Mapping[str, int], stream: int, span: tuple[int, int]) -> None:
        """Do what takes memory or time, before a launch on `stream`. Local. Raises HeapExhausted.

        `span` is (first byte of `out`, byte after its last), counted from where it begins.
        """
        for _, step in self.steps:
            if isinstance(step, Copy | Pack | Unpack):
                self._boxes_made(step, Ends((), ()))

    def bind(self, memories: Memories) -> Launch:
        """A function that puts all steps on the user's stream, and on the lane's."""
        return self.sequence(self.steps, memories)

    def sequence(self, steps: Iterable[tuple[str, Any]], memories: Memories) -> Launch:
        """A function that puts (name of a stream, step) in this order on the streams."""
        launches: list[tuple[str, Launch]] = []
        for stream, step in steps:
            launch = self.bound(step, memories)
            if launch is not None:
                launches.append((stream, launch))
        lane = self.lane

        def run(user: int) -> None:
            for name, launch in launches:
                launch(int(lane.stream(name)) if name else user)

        return run

    def bound(self, step: Any, memories: Memories) -> Launch | None:
        """A function that puts one step on a stream; None if there is nothing to do."""
        kind = type(step.plan if isinstance(step, Fused) else step)
        launch: Launch | None = self.PERFORMERS[kind](self, step, memories)
        return launch

    # -- order -------------------------------------------------------------------------------------

    def _synchronise(self, step: Synchronise, memories: Memories) -> Launch:
        return self.lane.barrier

    def _record(self, step: Record, memories: Memories) -> Launch:
        event = self.lane.event(step.event)
        return lambda stream: call("cuEventRecord", event, stream)

    def _await(self, step: Await, memories: Memories) -> Launch:
        assert not step.everywhere, "within a kernel only"
        event = self.lane.event(step.event)
        return lambda stream: call("cuStreamWaitEvent", stream, event, 0)

    # -- moves -------------------------------------------------------------------------------------

    def _transfer(self, step: Move | Copy | Pack | Unpack, memories: Memories) -> Launch | None:
        ends, launches = self.ends(step, memories), []
        for first in range(0, len(ends.sources), _MOST_SOURCES):
            sources = ends.sources[first : first + _MOST_SOURCES]
            tables = self._boxes_made(step, ends, first)
            launch = tables.ready(sources, ends.targets)
            if launch is not None:
                launches.append(_CopyLaunch(launch, tables))
        if len(launches) <= 1:
            return launches[0] if launches else None

        def run(stream: int) -> None:
            for launch in launches:
                launch(stream)

        return run

    def _boxes_made(
        self, step: Move | Copy | Pack | Unpack, ends: Ends, first: int = 0
    ) -> BoxCopies:
        """The boxes of a step, from the source number `first` on, for one launch."""

        def make() -> BoxCopies:
            sources = range(first, first + _MOST_SOURCES)
            boxes = [box for box in self.boxes(step, ends) if box.src in sources]
            moved = (replace(box, src=box.src - first) for box in boxes)
            return BoxCopies(self.device, moved if first else boxes)

        return self._copies.made((step, first, *ends.strides.items()), make)

    def boxes(self, step: Move | Copy | Pack | Unpack, ends: Ends) -> list[StridedCopy]:
        """The copies of a step. They number memories in the order of its `ends`."""
        arrays = self.program.arrays
        if isinstance(step, Copy):
            source, target = step.source, step.target
            return [whole(source.shape, source.itemsize, source.strides, target.strides)]
        if isinstance(step, Pack):
            return step.delivery.outbox.packing(arrays[step.source].strides)
        if isinstance(step, Unpack):
            strides = arrays[step.source].strides, arrays[step.target].strides
            return step.delivery.unpacking(*strides)
        itemsize, there = step.transfer.itemsize, ends.strides
        if self.program.pushes(step.target):
            own = arrays[step.source].strides
            moves = step.transfer.out_of(self.rank)
            copies = [(lowered(move, itemsize, own, there[move.dst]), move.dst) for move in moves]
            return [replace(copy, src=0, dst=dst) for copy, dst in copies]
        own = arrays[step.target].strides
        return [lowered(move, itemsize, there[move.src], own) for move in self._pulled(step)]

    def ends(self, step: Move | Copy | Pack | Unpack, memories: Memories) -> Ends:
        """The memories that a step copies from and to."""
        if isinstance(step, Move):
            return self._ends_of_move(step, memories)
        if isinstance(step, Copy):
            return Ends([memories.address(step.source)], [memories.address(step.target)])
        source = memories.address(self.program.arrays[step.source])
        if isinstance(step, Pack):
            return Ends([source], [memories.own[step.outbox]])
        delivery, outboxes = step.delivery, self._outboxes(step, memories)
        same_host = [self._peer_address(peer, outboxes[peer]) for peer in delivery.same_host]
        sources = delivery.memories(source, self._begin(step.fetched, memories), same_host)
        return Ends(sources, [memories.address(self.program.arrays[step.target])])

    def _ends_of_move(self, step: Move, memories: Memories) -> Ends:
        arrays, transfer = self.program.arrays, step.transfer
        pushes = self.program.pushes(step.target)
        own, remote = (step.source, step.target) if pushes else (step.target, step.source)
        shape_of = transfer.result_shape if pushes else transfer.source_shape
        moves = transfer.out_of(self.rank) if pushes else transfer.into(self.rank)
        name, there = self.program.shared_name(remote), arrays[remote]
        bases, strides = [0] * self.size, dict[int, tuple[int, ...]]()
        for peer in sorted({move.dst if pushes else move.src for move in moves}):
            if peer == self.rank:
                bases[peer], strides[peer] = memories.address(there), there.strides
                continue
            bases[peer], told = self.reached(peer, name, memories)
            strides[peer] = told or packed_strides(
                shape_of(peer), transfer.itemsize, self.program.order
            )
        here = [memories.address(arrays[own])]
        return Ends(here, bases, strides) if pushes else Ends(bases, here, strides)

    def _pulled(self, step: Move) -> list[BoxMove]:
        """The moves into this rank, the next rank's first: no two ranks begin with one peer."""
        moves = step.transfer.into(self.rank)
        return sorted(moves, key=lambda move: (move.src - self.rank - 1) % self.size)

    def _get(self, step: Get, memories: Memories) -> Launch:
        outboxes = [exposed.location for exposed in self._outboxes(step, memories)]
        fetches, target = step.delivery.fetches, self._begin(step.target, memories)
        return lambda stream: fetch(self.context, fetches, outboxes, target, stream)

    # -- where things lie --------------------------------------------------------------------------

    def _begin(self, name: str, memories: Memories) -> int:
        """Where an array, or a memory without one, begins."""
        array = self.program.arrays.get(name)
        return memories.own[name] if array is None else memories.address(array)

    def reached(self, peer: int, name: str, memories: Memories) -> tuple[int, tuple[int, ...]]:
        """Where the memory that a rank shares under a name begins for this GPU, 0 if there is none;
        and its strides, if the rank tells them.
        """
        exposed = memories.peers[peer][self.program.shared.index(name)]
        if peer == self.rank or exposed is None or not exposed.nbytes:
            return memories.own[name] if peer == self.rank else 0, ()
        return self._peer_address(peer, exposed), exposed.strides

    def peers_view(self, peer: Peer, memories: Memories) -> tuple[int, tuple[int, ...]]:
        """The address of a rank's matrix, which may be this rank's, and its strides in bytes."""
        exposed = memories.peers[peer.rank][self.program.shared.index(peer.name)]
        assert exposed is not None, "told by its rank"
        address, strides = self._peer_address(peer.rank, exposed), exposed.strides
        if peer.parcel is not None:
            offset, strides = peer.parcel
            address += offset - exposed.origin
        starts = zip(peer.box, strides, strict=True)
        return address + sum(first * stride for (first, _), stride in starts), strides

    def _outboxes(self, step: Get | Unpack, memories: Memories) -> list[Exposed]:
        """Where all ranks' outboxes lie."""
        number = self.program.shared.index(step.outbox)
        return [places[number] or _NOWHERE for places in memories.peers]

    def _peer_address(self, peer: int, exposed: Exposed | None) -> int:
        """Where the memory of a peer on this host begins for this GPU."""
        assert exposed is not None, "agreed on"
        address = self.context.peer_address(peer, exposed.location, exposed.nbytes)
        assert address is not None, "GPUs of one host reach each other"
        return address + exposed.origin

    PERFORMERS: ClassVar[Mapping[type, Any]] = {
        Synchronise: _synchronise,
        Record: _record,
        Await: _await,
        **dict.fromkeys((Move, Copy, Pack, Unpack), _transfer),
        Get: _get,
    }


def with_streams(steps: Iterable[Any]) -> Iterable[tuple[str, Any]]:
    """(name of its stream, step) for each step; the user's stream has the name ""."""
    for step in steps:
        yield (step.stream, step.step) if isinstance(step, On) else ("", step)


@dataclass(frozen=True, eq=False, slots=True)
class _CopyLaunch:
    """A launch of copies, which keeps the tables that it reads."""

    launch: ReadyLaunch
    tables: BoxCopies

    def __call__(self, stream: int) -> None:
        self.launch.put(stream)
