"""Collectives on memory of GPUs, given by address: one kernel launch each, on a stream.

Small and middle sizes travel through cells (`kernels/cells.cuh`) from and to ordinary memory. Large
contiguous parts are pushed straight into symmetric memory between two barriers, by kernels
(`kernels/push.cu`) or by the copy engines, and reduced by a `Relay`. Which it is depends only on
what the ranks have agreed on. After `together` no process waits for another here, but for the first
large reduction, which needs memory.

Streams: the calls of one context follow each other on whatever streams they are put; those of
different contexts run at once.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardmath.arrays.dtypes import DType
from shardmath.collectives.engines import Engines
from shardmath.collectives.relay import Relay, scratch_bytes
from shardmath.cuda.kernel import Argument
from shardmath.cuda.stream import Turns
from shardmath.errors import HeapExhausted, RankFailure
from shardmath.symmetric.heap import Buffer, Location
from shardmath.symmetric.team import RESERVED, Team

if TYPE_CHECKING:
    from shardmath.context import DistributedContext

__all__ = ["DeviceCollectives", "Launch", "choose_all_reduce"]

BULK_CHANNEL = RESERVED  # of the barriers around large pushes
_RELAY_CHANNEL = RESERVED + 1

_PACKET = 16
_MOST_THREADS = 512  # kThreads
_SETS, _PHASES = 3, 2  # kSets, kPhases
_MOST_BLOCKS = 264  # two on each multiprocessor of an H100
_SPREAD = 64  # blocks, before there are more threads in each
_SECOND_WAIT_BYTES = 512 << 10  # what a link carries in the time of one wait, 1.4 us
_COPY_ENGINE_BYTES = 8 << 20  # to one rank: a copy engine takes 10 us to start, and is faster
_RELAY_BYTES = 128 << 20  # of an array whose all_reduce is left to copy engines
_LANES = 2
_PIECE, _STAGES, _AHEAD = 16 << 10, 12, 6


@dataclass(frozen=True)
class Launch:
    """A kernel's name and grid."""

    function: str
    blocks: int
    threads: int


def choose_all_reduce(nbytes: int, size: int) -> Launch:
    """How to reduce `nbytes` of every one of `size` ranks."""
    packets = -(-nbytes // _PACKET)
    # One shot sends n (size - 1) bytes; two shots 2 n (size - 1) / size, and wait twice.
    more = nbytes * (size - 1) * (size - 2) // size
    if more <= _SECOND_WAIT_BYTES:
        return _grid("one_shot", packets)
    return _grid("two_shot", -(-packets // size))


def _grid(function: str, packets: int) -> Launch:
    """Spread over the multiprocessors first, then over the threads of each."""
    threads = 128
    while threads < _MOST_THREADS and packets > threads * _SPREAD:
        threads *= 2
    return Launch(function, max(1, min(_MOST_BLOCKS, -(-packets // threads))), threads)


class DeviceCollectives:
    """The collectives of one context's team. Made by `together`.

    A call whose wait expires leaves the cells in no known state: `Team.check` raises, and the
    context's collectives are at an end.
    """

    def __init__(self, context: DistributedContext, team: Team, places: Sequence[int]) -> None:
        self.team = team
        self._context = weakref.ref(context)  # it keeps this
        self._places = tuple(places)
        self._turns = Turns(team.device)
        self._engines = Engines(team.device, 2 * _LANES)
        self._relay: Relay | None = None
        self._relay_wanted = team.size > 1

    @classmethod
    def together(cls, context: DistributedContext) -> DeviceCollectives:
        """The context's collectives, made at the first call. Collective."""
        made: DeviceCollectives = context.cache("device collectives", lambda: cls._made(context))
        return made

    @classmethod
    def _made(cls, context: DistributedContext) -> DeviceCollectives:
        team = context.team
        assert team is not None, "a context of GPUs"
        nbytes = _MOST_BLOCKS * _SETS * _PHASES * team.size * _MOST_THREADS * _PACKET
        return cls(context, team, _on_all_ranks(context, "collectives: cells", nbytes))

    # -- through cells -----------------------------------------------------------------------------

    def all_reduce(
        self,
        source: int,
        target: int,
        count: int,
        dtype: DType,
        operation: str,
        stream: int,
        *,
        launch: Launch | None = None,
    ) -> None:
        """Combine `count` elements of all ranks into `target`, which may be `source`."""
        if count == 0:
            return
        nbytes = count * dtype.itemsize
        relay = self._relay_for(nbytes) if launch is None else None
        if relay is not None:
            self._require_usable()
            whole = (source | target | nbytes) % _PACKET == 0
            fold = self.team.kernel("reduce", "fold", _reduction(dtype, operation, whole))
            with self._turns.on(stream):
                relay.all_reduce(source, target, nbytes, fold, stream)
            return
        launch = launch or choose_all_reduce(nbytes, self.team.size)
        tail = struct.pack("QQQ", source, target, nbytes)
        whole = (source | target | nbytes) % _PACKET == 0
        self._reduce(launch, dtype, operation, whole, tail, stream)

    def reduce_scatter(
        self,
        source: int,
        target: int,
        counts: Sequence[int],
        dtype: DType,
        operation: str,
        stream: int,
    ) -> None:
        """Combine all ranks' `sum(counts)` elements; rank r's `target` gets `counts[r]` of them."""
        most = max(counts) * dtype.itemsize
        if most == 0:
            return
        sizes = [count * dtype.itemsize for count in counts]
        words = (source, target, most, *_starts(sizes), *sizes)
        tail = struct.pack(f"{len(words)}Q", *words)
        launch = _grid("reduce_scatter", -(-most // _PACKET))
        whole = not any(word % _PACKET for word in words)
        self._reduce(launch, dtype, operation, whole, tail, stream)

    def all_gather(self, source: int, target: int, sizes: Sequence[int], stream: int) -> None:
        """Put every rank's `sizes[rank]` bytes at `source`, in order, into everybody's `target`."""
        own = sizes[self.team.rank]
        self._exchange(
            source, target, [0] * self.team.size, [own] * self.team.size, sizes, max(sizes), stream
        )

    def all_to_all(
        self, source: int, target: int, sizes: Sequence[Sequence[int]], stream: int
    ) -> None:
        """Send `sizes[src][dst]` bytes from every rank to every other; both sides lie in order."""
        rank = self.team.rank
        sent = list(sizes[rank])
        received = [row[rank] for row in sizes]
        most = max(max(row) for row in sizes)
        self._exchange(source, target, _starts(sent), sent, received, most, stream)

    def broadcast(self, source: int, target: int, nbytes: int, root: int, stream: int) -> None:
        """Copy `nbytes` at `source` of rank `root` to everybody's `target`."""
        size, rank = self.team.size, self.team.rank
        received = [nbytes if peer == root else 0 for peer in range(size)]
        sent = [nbytes if rank == root else 0] * size
        self._exchange(source, target, [0] * size, sent, received, nbytes, stream)

    def _exchange(
        self,
        source: int,
        target: int,
        starts: Sequence[int],
        sent: Sequence[int],
        received: Sequence[int],
        most: int,
        stream: int,
    ) -> None:
        if most == 0:
            return
        self._require_usable()
        words = (source, target, most, *starts, *sent, *_starts(received), *received)
        launch = _grid("exchange", -(-most // (_PACKET // 2)))
        argument = Argument(self._packed() + struct.pack(f"{len(words)}Q", *words))
        whole = not any(word % (_PACKET // 2) for word in words)
        kernel = self.team.kernel("exchange", launch.function, (f"WHOLE={whole:d}",))
        with self._turns.on(stream):
            kernel.launch(stream, launch.blocks, launch.threads, argument)

    def _reduce(
        self,
        launch: Launch,
        dtype: DType,
        operation: str,
        whole: bool,
        tail: bytes,
        stream: int,
    ) -> None:
        self._require_usable()
        assert launch.blocks <= _MOST_BLOCKS and launch.threads <= _MOST_THREADS, launch
        kernel = self.team.kernel("reduce", launch.function, _reduction(dtype, operation, whole))
        argument = Argument(self._packed() + tail)
        with self._turns.on(stream):
            kernel.launch(stream, launch.blocks, launch.threads, argument)

    def _relay_for(self, nbytes: int) -> Relay | None:
        """What reduces an array of that size by copy engines. Collective, the first time."""
        if nbytes < _RELAY_BYTES or not self._relay_wanted:
            return None
        context = self._context()
        if self._relay is None and context is not None:
            room = scratch_bytes(self.team.size)
            try:
                places = _on_all_ranks(context, "collectives: scratch memory", room)
            except HeapExhausted:  # on all ranks
                self._relay_wanted = False
                return None
            self._relay = Relay(self.team, places, self._engines, channel=_RELAY_CHANNEL)
        return self._relay

    def _require_usable(self) -> None:
        self.team.check()
        if self.team.broken:
            raise RankFailure(
                f"rank {self.team.rank}: an earlier collective of this context was given up "
                f"({self.team.broken}); finalize and initialize again among the ranks that remain"
            )

    def _packed(self) -> bytes:
        """The struct `Cells`."""
        places = [self._places[rank] for rank in self._rotated()]
        return self.team.packed() + struct.pack(f"{self.team.size}Q", *places)

    # -- straight into symmetric memory ------------------------------------------------------------

    def push_to_all(self, source: int, targets: Sequence[int], nbytes: int, stream: int) -> None:
        """Copy `nbytes` at `source` to an address on each rank; multiples of 16, no barrier."""
        order = self._rotated()
        words = (source, nbytes, self.team.size, *(targets[peer] for peer in order))
        self._push("spread", struct.pack(f"QQQ{len(order)}Q", *words), nbytes, stream)

    def push_to_each(
        self, sources: Sequence[int], targets: Sequence[int], sizes: Sequence[int], stream: int
    ) -> None:
        """Copy `sizes[r]` bytes at `sources[r]` to `targets[r]`, for every r; no barrier."""
        order = self._rotated()
        columns = [[values[peer] for peer in order] for values in (sources, targets, sizes)]
        words = [max(sizes), *(word for column in columns for word in column)]
        tail = struct.pack(f"{len(words)}Q", *words)
        self._push("scatter", tail, max(sizes) * self.team.size, stream)

    def move(
        self, sources: Sequence[int], targets: Sequence[int], sizes: Sequence[int], stream: int
    ) -> None:
        """Copy `sizes[r]` bytes at `sources[r]` to `targets[r]`, for every rank r; multiples of 16.

        With a barrier on either side: before, since the owners may still use the targets; after,
        since they will read them. Collective.
        """
        with self._turns.on(stream):
            self.barrier(stream)
            if max(sizes) < _COPY_ENGINE_BYTES:
                self.push_to_each(sources, targets, sizes, stream)
            else:
                self._copy_to_each(sources, targets, sizes, stream)
            self.barrier(stream)

    def _copy_to_each(
        self, sources: Sequence[int], targets: Sequence[int], sizes: Sequence[int], stream: int
    ) -> None:
        *peers, own = self._rotated()
        copies = [(targets[rank], sources[rank], sizes[rank]) for rank in peers]
        *lanes, side = self._engines.lanes[: _LANES + 1]
        self._engines.start([(targets[own], sources[own], sizes[own])], stream, [side])
        self._engines.start(copies, stream, lanes)
        self._engines.finish(stream, [*lanes, side])

    def _rotated(self) -> list[int]:
        """All ranks, from the next one on to this one: no two ranks begin with the same."""
        return [(self.team.rank + step) % self.team.size for step in range(1, self.team.size + 1)]

    def _push(self, function: str, tail: bytes, nbytes: int, stream: int) -> None:
        self.team.check()
        if nbytes == 0:
            return
        defines = (f"PIECE={_PIECE}", f"STAGES={_STAGES}", f"AHEAD={_AHEAD}")
        kernel = self.team.kernel("push", function, defines, shared=_PIECE * _STAGES)
        blocks = max(1, min(self.team.device.processors, -(-nbytes // _PIECE)))
        kernel.launch(stream, blocks, 32, Argument(tail))

    def barrier(self, stream: int) -> None:
        """Around pushes: before them, the owners may use the targets; after, all is there."""
        self.team.barrier(stream, channel=BULK_CHANNEL)


def _on_all_ranks(context: DistributedContext, name: str, nbytes: int) -> list[int]:
    """Heap memory on every rank, all ones, kept until the context has ended: its addresses.

    Collective. Raises HeapExhausted on all ranks.
    """
    buffers: list[Buffer] = []

    def describe() -> tuple[int, int]:
        buffers.append(context.heap.allocate(nbytes))
        block = buffers[0].block
        assert context.team is not None, "a context of GPUs"
        context.team.device.fill(block.address, 0xFF, nbytes)
        context.announce(block)
        return block.location.segment, block.location.offset

    found = context.agree(name, describe, lambda found: found)
    context.keep_for_kernels(buffers[0])
    return [
        context.peer_address(rank, Location(*place), nbytes) or 0
        for rank, place in enumerate(found)
    ]


def _reduction(dtype: DType, operation: str, whole: bool) -> tuple[str, ...]:
    """What reduce.cu is compiled with."""
    element = "boolean" if dtype.name == "bool" else dtype.name
    return f"ELEMENT={element}", f"OPERATION={operation}", f"WHOLE={whole:d}"


def _starts(sizes: Sequence[int]) -> list[int]:
    starts, at = [], 0
    for size in sizes:
        starts.append(at)
        at += size
    return starts
