"""Collectives on memory of GPUs, given by address: one kernel launch each, on a stream.

Small and middle sizes travel through cells (`kernels/cells.cuh`) from and to ordinary memory. Large
ones are pushed straight into symmetric memory (`Pushes`). After `together` no process waits for
another here.

Streams: the calls of one context follow each other on whatever streams they are put. Those of two
contexts run at once, in whatever order a rank has put them: a kernel that waits for peers takes at
most half of each multiprocessor, and leaves room for another. This holds from the second call of a
kind on: the first one loads a kernel, which may wait for what the GPU does. Calls of three or more
contexts that are under way at once must begin in the same order on all ranks.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardmath.arrays.dtypes import DType
from shardmath.collectives.far import FarCollectives
from shardmath.collectives.pushes import Pushes, on_all_ranks, reduction_defines
from shardmath.cuda.kernel import Argument
from shardmath.symmetric.team import Team

if TYPE_CHECKING:
    from shardmath.context import DistributedContext

__all__ = ["DeviceCollectives", "Launch", "choose_all_reduce"]


_PACKET = 16
_MOST_THREADS = 512  # kThreads
_SETS, _PHASES = 3, 2  # kSets, kPhases
_MOST_BLOCKS = 132  # one on each multiprocessor of an H100: half of its registers
_SPREAD = 64  # blocks, before there are more threads in each
_SECOND_WAIT_BYTES = 512 << 10  # what a link carries in the time of one wait, 1.4 us


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


class DeviceCollectives(Pushes):
    """The collectives of one context's team. Made by `together`.

    A call whose wait expires leaves the cells in no known state: `Team.check` raises, and the
    context's collectives are at an end.
    """

    def __init__(self, context: DistributedContext, team: Team, places: Sequence[int]) -> None:
        super().__init__(context, team)
        self._places = tuple(places)
        self._turns_at = places[team.rank] + _cells_bytes(team.size)

    @classmethod
    def together(cls, context: DistributedContext) -> DeviceCollectives | FarCollectives:
        """The context's collectives, made at the first call. Collective."""
        if context.spans_hosts:
            return FarCollectives(context)
        made: DeviceCollectives = context.cache("device collectives", lambda: cls.apart(context))
        return made

    @classmethod
    def apart(cls, context: DistributedContext) -> DeviceCollectives:
        """Others, with cells of their own: they never wait for the context's. Collective.

        Ranks of one host only. Raises HeapExhausted on all ranks.
        """
        team = context.team
        assert team is not None, "a context of GPUs"
        nbytes = _cells_bytes(team.size) + 8 * _MOST_BLOCKS
        return cls(context, team, on_all_ranks(context, "collectives: cells", nbytes))

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
        with self._turns.taken(stream):
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
        kernel = self.team.kernel(
            "reduce", launch.function, reduction_defines(dtype, operation, whole)
        )
        argument = Argument(self._packed() + tail)
        with self._turns.taken(stream):
            kernel.launch(stream, launch.blocks, launch.threads, argument)

    def _packed(self) -> bytes:
        """The struct `Cells`."""
        places = [self._places[rank] for rank in self._rotated()]
        return self.team.packed() + struct.pack(f"{1 + len(places)}Q", self._turns_at, *places)


def _cells_bytes(size: int) -> int:
    """Of one rank's cells; the blocks' turns follow."""
    return _MOST_BLOCKS * _SETS * _PHASES * size * _MOST_THREADS * _PACKET


def _starts(sizes: Sequence[int]) -> list[int]:
    starts, at = [], 0
    for size in sizes:
        starts.append(at)
        at += size
    return starts
