"""One rank's program on its GPU: each step is bound to addresses once, and then put on streams.

`PERFORMERS` has what binds a step of each type. An operator adds those of its own steps; of fused
ones, by the type of their plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from shardmath.arrays.spec import packed_strides
from shardmath.base.lru_cache import LRUCache
from shardmath.context.context import Context
from shardmath.cuda.driver import call
from shardmath.cuda.kernel import ReadyLaunch
from shardmath.geometry import Move as BoxMove
from shardmath.handles.operand import Exposed
from shardmath.operators.lanes import Lane
from shardmath.program.rank_program import Copy, RankProgram, View
from shardmath.program.steps import (
    Await,
    Fused,
    Get,
    Move,
    On,
    Pack,
    Record,
    Synchronise,
    Unpack,
)
from shardmath.redistribution.box_copies import BoxCopies
from shardmath.redistribution.boxes import Box
from shardmath.redistribution.copies import lowered, whole
from shardmath.redistribution.delivery import fetch

_KEPT = 64  # copies of one program, for as many ways in which peers' arrays lie

Launch = Callable[[int], None]  # puts something on a stream
ExposedArrays = Sequence[Exposed | None]  # of one rank


class Memories(NamedTuple):
    """Where memories begin in one execution: this rank's, by name, and those that its peers share.

    `stream` is the user's stream.
    """

    own: Mapping[str, int]
    peers: Sequence[ExposedArrays]
    stream: int

    def address(self, view: View) -> int:
        """Where an array of this rank begins."""
        return self.own[view.memory] + view.offset


class GPUProgram:
    """A rank's program, with the tables of its copies on its GPU. It holds no array.

    Keep it while a launch of it, or a graph, may be used.
    """

    def __init__(self, context: Context, lane: Lane, program: RankProgram) -> None:
        self.context, self.lane, self.program = context, lane, program
        self.rank, self.size, self.device = context.rank, context.size, lane.team.device
        self.steps = [  # with the names of their streams, "" for the user's
            (step.stream, step.step) if isinstance(step, On) else ("", step)
            for step in program.steps
        ]
        self._copies: LRUCache[Any, BoxCopies] = LRUCache(_KEPT + len(self.steps))

    @property
    def check(self) -> Callable[[], None] | None:
        """A function that raises, before each launch, where nothing more can be launched."""
        return None

    def prepare(self, own: Mapping[str, int], stream: int, span: tuple[int, int]) -> None:
        """Do what takes memory or time before a launch on `stream`. Local. Raises HeapExhausted.

        `span` are the first byte of `out` and the one behind its last, from where it begins.
        """
        for _, step in self.steps:
            if isinstance(step, Copy | Pack | Unpack):
                self._local_copies(step)

    def bind(self, memories: Memories) -> Launch:
        """A function that puts all steps on the user's stream, and on the lane's."""
        launches: list[tuple[str, Launch]] = []
        for stream, step in self.steps:
            launch = self.bound(step, memories)
            if launch is not None:
                launches.append((stream, launch))
        lane = self.lane

        def run(user: int) -> None:
            for name, launch in launches:
                launch(int(lane.stream(name)) if name else user)

        return run

    def bound(self, step: Any, memories: Memories) -> Launch | None:
        """A function that puts one step on a stream; None where nothing is to be done."""
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

    def _move(self, step: Move, memories: Memories) -> Launch | None:
        program, transfer, rank = self.program, step.transfer, self.rank
        own, remote = program.arrays[step.source], program.arrays[step.target]
        moves: Sequence[BoxMove] = transfer.out_of(rank)
        shape_of, pushes = transfer.result_shape, remote.memory in program.shared
        if not pushes:
            own, remote, shape_of = remote, own, transfer.source_shape
            moves = sorted(transfer.into(rank), key=lambda m: (m.src - rank - 1) % self.size)
        bases, strides = [0] * self.size, dict[int, tuple[int, ...]]()
        for peer in sorted({move.dst if pushes else move.src for move in moves}):
            bases[peer], told = self.reached(peer, remote.memory, memories)
            strides[peer] = told or packed_strides(shape_of(peer), transfer.itemsize, program.order)
            if peer == rank:
                bases[peer], strides[peer] = memories.address(remote), remote.strides

        def boxes() -> Iterator[Box]:
            for move in moves:
                if pushes:
                    copy = lowered(move, transfer.itemsize, own.strides, strides[move.dst])
                    yield Box.of(replace(copy, src=0), move.dst)
                else:
                    copy = lowered(move, transfer.itemsize, strides[move.src], own.strides)
                    yield Box.of(copy, 0)

        copies = self._copies.made(
            (step, *strides.items()), lambda: BoxCopies(self.device, boxes())
        )
        here = [memories.address(own)]
        return _ready(copies, *((here, bases) if pushes else (bases, here)))

    def _copy(self, step: Copy, memories: Memories) -> Launch | None:
        source, target = memories.address(step.source), memories.address(step.target)
        return _ready(self._local_copies(step), [source], [target])

    def _pack(self, step: Pack, memories: Memories) -> Launch | None:
        source = memories.address(self.program.arrays[step.source])
        return _ready(self._local_copies(step), [source], [memories.own[step.outbox]])

    def _get(self, step: Get, memories: Memories) -> Launch:
        outboxes = [exposed.location for exposed in self._outboxes(step, memories)]
        fetches, target = step.delivery.fetches, memories.own[step.target]
        return lambda stream: fetch(self.context, fetches, outboxes, target, stream)

    def _unpack(self, step: Unpack, memories: Memories) -> Launch | None:
        delivery, outboxes = step.delivery, self._outboxes(step, memories)
        same_host = [self._peer_address(peer, outboxes[peer]) for peer in delivery.same_host]
        source, target = (
            memories.address(self.program.arrays[name]) for name in (step.source, step.target)
        )
        sources = delivery.memories(source, memories.own[step.fetched], same_host)
        return _ready(self._local_copies(step), sources, [target])

    def reached(self, peer: int, memory: str, memories: Memories) -> tuple[int, tuple[int, ...]]:
        """Where a rank's memory that corresponds to this one begins for this GPU, 0 where it has
        none; and the strides of a user's array.
        """
        exposed = memories.peers[peer][self.program.shared.index(memory)]
        if peer == self.rank or exposed is None or not exposed.nbytes:
            return memories.own[memory] if peer == self.rank else 0, ()
        return self._peer_address(peer, exposed), exposed.strides

    def _outboxes(self, step: Get | Unpack, memories: Memories) -> list[Exposed]:
        """Where all ranks' outboxes lie."""
        number = self.program.shared.index(step.outbox)
        return [exposed for places in memories.peers if (exposed := places[number]) is not None]

    def _peer_address(self, peer: int, exposed: Exposed | None) -> int:
        """Where the memory of a peer on this host begins for this GPU."""
        assert exposed is not None, "agreed on"
        address = self.context.peer_address(peer, exposed.location, exposed.nbytes)
        assert address is not None, "GPUs of one host reach each other"
        return address + exposed.origin

    def _local_copies(self, step: Copy | Pack | Unpack) -> BoxCopies:
        """The copies of a step from memory of this rank, or from what peers have packed."""
        arrays = self.program.arrays

        def boxes() -> list[Box]:
            if isinstance(step, Pack):
                return step.delivery.packing(arrays[step.source].strides)
            if isinstance(step, Unpack):
                strides = arrays[step.source].strides, arrays[step.target].strides
                return step.delivery.unpacking(*strides)
            source, target = step.source, step.target
            copy = whole(source.shape, source.itemsize, source.strides, target.strides)
            return [Box.of(copy, 0)]

        return self._copies.made(step, lambda: BoxCopies(self.device, boxes()))

    PERFORMERS: ClassVar[Mapping[type, Any]] = {
        Synchronise: _synchronise,
        Record: _record,
        Await: _await,
        Move: _move,
        Copy: _copy,
        Pack: _pack,
        Get: _get,
        Unpack: _unpack,
    }


@dataclass(frozen=True, eq=False, slots=True)
class _CopyLaunch:
    """Copies between certain addresses, and their tables, which live as long."""

    launch: ReadyLaunch
    tables: BoxCopies

    def __call__(self, stream: int) -> None:
        self.launch.put(stream)


def _ready(copies: BoxCopies, sources: Sequence[int], targets: Sequence[int]) -> Launch | None:
    launch = copies.ready(sources, targets)
    return None if launch is None else _CopyLaunch(launch, copies)
