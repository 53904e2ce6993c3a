"""Collectives on memory of GPUs, given by address: one kernel launch each, on a stream.

Small and middle sizes, and all reductions, travel through cells (`kernels/cells.cuh`) from and to
ordinary memory. Large contiguous parts are pushed straight into symmetric memory between two
barriers, by kernels (`kernels/push.cu`) or by the copy engines. `choose_all_reduce` decides, and
says so; after `together` no process waits for another here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardmath.arrays.dtypes import DType
from shardmath.collectives.far import FarCollectives
from shardmath.cuda.driver import call
from shardmath.cuda.kernel import Argument
from shardmath.errors import RankFailure
from shardmath.symmetric.heap import Buffer, Location
from shardmath.symmetric.team import Team

if TYPE_CHECKING:
    from shardmath.context import DistributedContext

__all__ = ["DeviceCollectives", "Launch", "choose_all_reduce"]

BULK_CHANNEL = 63  # of the barriers around large pushes

_PACKET = 16
_MOST_THREADS = 512  # kThreads
_SETS, _PHASES = 3, 2  # kSets, kPhases
_MOST_BLOCKS = 264  # two on each multiprocessor of an H100
_SPREAD = 64  # blocks, before there are more threads in each
_SECOND_WAIT_BYTES = 512 << 10  # what a link carries in the time of one wait, 1.4 us
_COPY_ENGINE_BYTES = 8 << 20  # to one rank: a copy engine takes 10 us to start, and is faster
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

    Calls on one stream follow each other. A call whose wait expires leaves the cells in no known
    state: `Team.check` raises, and the context's collectives are at an end.
    """

    def __init__(self, team: Team, places: Sequence[int]) -> None:
        self.team = team
        self._places = tuple(places)
        self._side: tuple[Any, Any, Any] | None = None  # stream, and events to fork and join

    @classmethod
    def together(cls, context: DistributedContext) -> DeviceCollectives | FarCollectives:
        """The context's collectives, made at the first call. Collective."""
        if context.spans_hosts:
            return FarCollectives(context)
        made: DeviceCollectives = context.cache("device collectives", lambda: cls._made(context))
        return made

    @classmethod
    def _made(cls, context: DistributedContext) -> DeviceCollectives:
        team = context.team
        assert team is not None, "a context of GPUs"
        nbytes = _MOST_BLOCKS * _SETS * _PHASES * team.size * _MOST_THREADS * _PACKET
        buffers: list[Buffer] = []

        def describe() -> tuple[int, int]:
            buffers.append(context.heap.allocate(nbytes))
            block = buffers[0].block
            team.device.activate()
            call("cuMemsetD8", block.address, 0xFF, nbytes)  # every cell is empty
            call("cuCtxSynchronize")
            context.announce(block)
            return block.location.segment, block.location.offset

        found = context.agree("collectives: cells", describe, lambda found: found)
        places = [
            context.peer_address(rank, Location(*place), nbytes) or 0
            for rank, place in enumerate(found)
        ]
        context.keep_for_kernels(buffers[0])
        return cls(team, places)

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
        element = "boolean" if dtype.name == "bool" else dtype.name
        defines = (f"ELEMENT={element}", f"OPERATION={operation}", f"WHOLE={whole:d}")
        kernel = self.team.kernel("reduce", launch.function, defines)
        argument = Argument(self._packed() + tail)
        kernel.launch(stream, launch.blocks, launch.threads, argument)

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
        self.barrier(stream)
        if max(sizes) < _COPY_ENGINE_BYTES:
            self.push_to_each(sources, targets, sizes, stream)
        else:
            *peers, own = self._rotated()
            copies = [(targets[rank], sources[rank], sizes[rank]) for rank in peers]
            with self._beside(stream) as side:
                if sizes[own] and targets[own] != sources[own]:
                    call("cuMemcpyAsync", targets[own], sources[own], sizes[own], side)
                for copy in copies:
                    if copy[2]:
                        call("cuMemcpyAsync", *copy, stream)
        self.barrier(stream)

    @contextmanager
    def _beside(self, stream: int) -> Iterator[Any]:
        """A second stream that starts where `stream` is; `stream` waits for it at the end."""
        self.team.device.activate()
        if self._side is None:
            make = call("cuStreamCreate", 1)  # it does not wait for the default stream
            self._side = (make, call("cuEventCreate", 2), call("cuEventCreate", 2))  # no timing
        side, fork, join = self._side
        call("cuEventRecord", fork, stream)
        call("cuStreamWaitEvent", side, fork, 0)
        yield side
        call("cuEventRecord", join, side)
        call("cuStreamWaitEvent", stream, join, 0)

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


def _starts(sizes: Sequence[int]) -> list[int]:
    starts, at = [], 0
    for size in sizes:
        starts.append(at)
        at += size
    return starts
