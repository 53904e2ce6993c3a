"""Collectives on memory of GPUs, given by address: one kernel launch each, on a stream.

Small and middle sizes travel through cells (`kernels/cells.cuh`) from and to ordinary memory. Large
ones are pushed straight into symmetric memory (`Pushes`). After `of` no process waits for
another here.

Streams: the calls of one context follow each other on whatever streams they are put. Those of two
contexts run at once, in whatever order a rank has put them: a kernel that waits for peers takes at
most half of each multiprocessor, and leaves room for another. This holds from the second call of a
kind on: the first one loads a kernel, which may wait for what the GPU does. Calls of three or more
contexts that are under way at once must begin in the same order on all ranks.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardmath.arrays.dtypes import DType
from shardmath.base.lru_cache import LRUCache
from shardmath.collectives.far import FarCollectives
from shardmath.collectives.operand import bounds
from shardmath.collectives.pushes import Pushes, kernel_memory, reduction_defines
from shardmath.cuda.kernel import Argument, ReadyLaunch
from shardmath.cuda.stream import StreamOrder
from shardmath.symmetric.team import Team

if TYPE_CHECKING:
    from shardmath.context.context import Context

__all__ = ["DeviceCollectives", "LaunchConfig", "choose_all_reduce"]


_PACKET = 16
_MAX_THREADS = 512  # kThreads
_SETS = 3  # kSets
_MAX_BLOCKS = 132  # kMaxBlocks: one on each multiprocessor of an H100: half of its registers
_SPREAD = 64  # blocks, before there are more threads in each
_KEPT = 256  # launches that are kept ready
# From here on an all_reduce is pushed: of a rank's slice where packets are all data, as those of
# floats are; else of the array. It is faster on the GPU from less on, but takes the host longer.
_PUSHED_SLICE_BYTES, _PUSHED_BYTES = 32 << 20, 16 << 20
_PUSHED_PART_BYTES = 4 << 20  # to one rank; from here on it is moved into its place
_SECOND_WAIT_BYTES = 512 << 10  # what a link carries in the time of one wait, 1.4 us


@dataclass(frozen=True)
class LaunchConfig:
    """A kernel's name and grid."""

    function: str
    blocks: int
    threads: int


def choose_all_reduce(nbytes: int, size: int) -> LaunchConfig:
    """How to reduce `nbytes` of every one of `size` ranks."""
    packets = -(-nbytes // _PACKET)
    # One shot sends n (size - 1) bytes; two shots 2 n (size - 1) / size, and wait twice.
    more = nbytes * (size - 1) * (size - 2) // size
    if more <= _SECOND_WAIT_BYTES:
        return _launch_config("one_shot", packets)
    return _launch_config("two_shot", -(-packets // size))


def _launch_config(function: str, packets: int) -> LaunchConfig:
    """Spread over the multiprocessors first, then over the threads of each."""
    threads = 128
    while threads < _MAX_THREADS and packets > threads * _SPREAD:
        threads *= 2
    return LaunchConfig(function, max(1, min(_MAX_BLOCKS, -(-packets // threads))), threads)


class DeviceCollectives(Pushes):
    """The collectives of one context's team. Made by `of`.

    A call whose wait expires leaves the cells in no known state: `Team.check` raises, and the
    context's collectives are at an end.
    """

    def __init__(self, context: Context, team: Team, cells: Sequence[int]) -> None:
        super().__init__(context, team)
        self._cells = tuple(cells)
        self._counts_address = cells[team.rank] + _cells_bytes(team.size)
        self._launches: LRUCache[tuple[Any, ...], ReadyLaunch | None] = LRUCache(_KEPT)

    @classmethod
    def of(cls, context: Context) -> DeviceCollectives | FarCollectives:
        """The context's collectives, made at the first call. Collective."""
        if context.multi_host:
            return FarCollectives.of(context)
        made: DeviceCollectives = context.cache("device collectives", lambda: cls.separate(context))
        return made

    @classmethod
    def separate(cls, context: Context) -> DeviceCollectives:
        """Others, with cells of their own: they never wait for the context's. Collective.

        Ranks of one host only. Raises HeapExhausted on all ranks.
        """
        team = context.team
        assert team is not None, "a context of GPUs"
        nbytes = _cells_bytes(team.size) + 16 * _MAX_BLOCKS * (1 + team.size)  # counts, words
        return cls(context, team, kernel_memory(context, "collectives: cells", nbytes))

    # -- what is pushed ----------------------------------------------------------------------------

    def pushes(self, most: int) -> Pushes | None:
        """What moves parts of up to `most` bytes to a rank into place; None where cells do it."""
        return self if most >= _PUSHED_PART_BYTES else None

    def reduction_pushes(self, nbytes: int, dtype: DType) -> Pushes | None:
        """What combines `nbytes` of each rank into symmetric memory; None where cells do it."""
        if dtype.kind in "fc":
            pushed = nbytes // self.team.size >= _PUSHED_SLICE_BYTES
        else:
            pushed = nbytes >= _PUSHED_BYTES
        return self if pushed and self.team.size > 1 else None

    # -- through cells -----------------------------------------------------------------------------
    # `tag` says which call this is, the same on all ranks: kernels compare it before they write.
    # What is returned is the launch, None where there was nothing to do.

    @property
    def order(self) -> StreamOrder:
        """In which the launches follow each other."""
        return self._order

    @property
    def addresses_place(self) -> int:
        """Where a launch's argument has the addresses of operand and result, side by side."""
        return len(self._argument(0, ()).first)

    def all_reduce(
        self,
        source: int,
        target: int,
        count: int,
        dtype: DType,
        operation: str,
        stream: int,
        *,
        launch: LaunchConfig | None = None,
        tag: int = 0,
    ) -> ReadyLaunch | None:
        """Combine `count` elements of all ranks into `target`, which may be `source`."""

        def make() -> ReadyLaunch | None:
            nbytes = count * dtype.itemsize
            config = launch or choose_all_reduce(nbytes, self.team.size)
            return self._reduce(config, dtype, operation, (source, target, nbytes), tag)

        key = ("all_reduce", source, target, count, dtype.name, operation, launch, tag)
        return self._run(key, stream, make)

    def reduce_scatter(
        self,
        source: int,
        target: int,
        counts: Sequence[int],
        dtype: DType,
        operation: str,
        stream: int,
        *,
        tag: int = 0,
    ) -> ReadyLaunch | None:
        """Combine all ranks' `sum(counts)` elements; rank r's `target` gets `counts[r]` of them."""

        def make() -> ReadyLaunch | None:
            sizes = [count * dtype.itemsize for count in counts]
            config = _launch_config("reduce_scatter", -(-max(sizes) // _PACKET))
            words = (source, target, max(sizes), *bounds(sizes)[:-1], *sizes)
            return self._reduce(config, dtype, operation, words, tag)

        key = ("reduce_scatter", source, target, tuple(counts), dtype.name, operation, tag)
        return self._run(key, stream, make)

    def all_gather(
        self, source: int, target: int, sizes: Sequence[int], stream: int, *, tag: int = 0
    ) -> ReadyLaunch | None:
        """Put every rank's `sizes[rank]` bytes at `source`, in order, into everybody's `target`."""

        def make() -> ReadyLaunch | None:
            size, own = self.team.size, sizes[self.team.rank]
            return self._exchange(source, target, [0] * size, [own] * size, sizes, max(sizes), tag)

        return self._run(("all_gather", source, target, tuple(sizes), tag), stream, make)

    def all_to_all(
        self,
        source: int,
        target: int,
        sizes: Sequence[Sequence[int]],
        stream: int,
        *,
        tag: int = 0,
    ) -> ReadyLaunch | None:
        """Send `sizes[src][dst]` bytes from every rank to every other; both sides lie in order."""

        def make() -> ReadyLaunch | None:
            rank = self.team.rank
            received = [row[rank] for row in sizes]
            most, sent = max(max(row) for row in sizes), sizes[rank]
            return self._exchange(source, target, bounds(sent)[:-1], sent, received, most, tag)

        return self._run(
            ("all_to_all", source, target, tuple(map(tuple, sizes)), tag), stream, make
        )

    def broadcast(
        self, source: int, target: int, nbytes: int, root: int, stream: int, *, tag: int = 0
    ) -> ReadyLaunch | None:
        """Copy `nbytes` at `source` of rank `root` to everybody's `target`."""

        def make() -> ReadyLaunch | None:
            size, rank = self.team.size, self.team.rank
            received = [nbytes if peer == root else 0 for peer in range(size)]
            sent = [nbytes if rank == root else 0] * size
            return self._exchange(source, target, [0] * size, sent, received, nbytes, tag)

        return self._run(("broadcast", source, target, nbytes, root, tag), stream, make)

    def _run(
        self, key: tuple[Any, ...], stream: int, make: Callable[[], ReadyLaunch | None]
    ) -> ReadyLaunch | None:
        """Put the launch of that key, which `make` gives when it first comes, on `stream`: that."""
        self.team.require_usable()
        launch = self._launches.made(key, make)
        if launch is not None:
            self._order.put(launch, stream)
        return launch

    def _exchange(
        self,
        source: int,
        target: int,
        starts: Sequence[int],
        sent: Sequence[int],
        received: Sequence[int],
        most: int,
        tag: int,
    ) -> ReadyLaunch | None:
        """A launch that exchanges bytes through cells; None where there are none."""
        if most == 0:
            return None
        words = (source, target, most, *starts, *sent, *bounds(received)[:-1], *received)
        config = _launch_config("exchange", -(-most // (_PACKET // 2)))
        aligned = not any(word % (_PACKET // 2) for word in words)
        kernel = self.team.kernel("exchange", config.function, (f"ALIGNED={aligned:d}",))
        return kernel.ready(config.blocks, config.threads, self._argument(tag, words))

    def _reduce(
        self, config: LaunchConfig, dtype: DType, operation: str, words: Sequence[int], tag: int
    ) -> ReadyLaunch | None:
        """A launch that combines through cells; the third of `words` are the most bytes."""
        if words[2] == 0:
            return None
        assert config.blocks <= _MAX_BLOCKS and config.threads <= _MAX_THREADS, config
        aligned = not any(word % _PACKET for word in words)
        defines = reduction_defines(dtype, operation, aligned)
        kernel = self.team.kernel("reduce", config.function, defines)
        return kernel.ready(config.blocks, config.threads, self._argument(tag, words))

    def _argument(self, tag: int, words: Sequence[int]) -> Argument:
        """The struct `Cells`, and what follows it."""
        cells = [self._cells[rank] for rank in self.team.ring_order]
        words = (self._counts_address, tag, *cells, *words)
        return Argument(self.team.packed() + struct.pack(f"{len(words)}Q", *words))


def _phases(size: int) -> int:
    """The number of phases of a step, `kPhases` in kernels/cells.cuh."""
    return 4 if size == 2 else 2


def _cells_bytes(size: int) -> int:
    """The bytes of one rank's cells, behind which counts and words of launches follow."""
    return _MAX_BLOCKS * _SETS * _phases(size) * size * _MAX_THREADS * _PACKET
