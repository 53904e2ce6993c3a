"""Collectives on memory of GPUs, given by address: one kernel launch each, on a stream.

Sums and other reductions travel through cells (`kernels/cells.cuh`), from and to ordinary memory;
large ones are pushed straight into symmetric memory (`Pushes`). Moves of any size go through
`exchange.cu`: its kernels tell each other how much they send, and where on the heap a result lies.
After `of` no process waits for another here.

Streams: the calls of one context follow each other, whatever streams they are put on. Those of two
contexts run at once, in any order: a kernel that waits for peers takes at most half of each
multiprocessor, and leaves room for another. This holds from the second call of a kind on: the first
call loads a kernel, which may wait for other work of the GPU. If calls of three or more contexts
are under way at once, they must begin in the same order on all ranks.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardmath.arrays.dtypes import DType
from shardmath.base.immutable import Immutable
from shardmath.base.integers import up
from shardmath.base.lru_cache import LRUCache
from shardmath.collectives.forms import UNKNOWN
from shardmath.collectives.heaps import SEGMENTS, Heaps, table_bytes
from shardmath.collectives.operand import bounds
from shardmath.collectives.outboxes import FarCollectives
from shardmath.collectives.pushes import Pushes, kernel_memory, reduction_defines
from shardmath.cuda.driver import call
from shardmath.cuda.kernel import Argument, Kernel, ReadyLaunch
from shardmath.cuda.stream import StreamOrder
from shardmath.symmetric.team import Team

if TYPE_CHECKING:
    from shardmath.context.context import Context


_PACKET = 16
_MAX_THREADS = 512  # kThreads
_SETS = 3  # kSets
_MAX_BLOCKS = 132  # kMaxBlocks: one on each multiprocessor of an H100: half of its registers
_SPREAD = 64  # blocks, before there are more threads in each
_KEPT = 256  # launches that are kept ready
# From so many bytes on an all_reduce is pushed: of a rank's slice for floats, whose packets are all
# data; else of the array. The GPU would be faster with pushes of less, but the host takes longer.
_PUSHED_SLICE_BYTES, _PUSHED_BYTES = 32 << 20, 16 << 20
# Of exchange.cu: the most bytes that go to a rank as packets, chunks for more, and launches.
_MAIL_BYTES = 4 << 20  # of all ranks; packets are twice as long
_WRITTEN_BYTES = 1 << 20  # of all ranks: more is written straight into a result on the heap
_INBOX_BYTES, _LANES, _SLOTS, _SLOT_UNIT = 16 << 20, 64, 4, 2048
_MAIL_BLOCKS, _LANE_BLOCKS = 2 * _LANES - 1, 2 * _LANES
_FEW_BYTES, _FEW_THREADS = 64 << 10, 128  # to or from a rank, and in a block
_DEFINES = "MAIL_BYTES", "POST_BYTES", "SEGMENTS"
_SECOND_WAIT_BYTES = 512 << 10  # what a link carries in the time of one wait, 1.4 us


class LaunchConfig(Immutable):
    """A kernel's name and grid."""

    function: str
    blocks: int
    threads: int


class Parts(NamedTuple):
    """What a rank sends in an exchange, and what it knows about what it receives.

    Counts are in units of `width` bytes. The part for rank r begins `starts[r]` bytes into the
    operand, and has `sent[r]` units; `expected[r]` come from rank r, and the result has `room` for
    so many in all. Both are None if they are not known. `guess` is a number for the counts of all
    ranks: ranks that assume the same counts have the same number. `UNKNOWN` if a rank cannot guess.
    """

    width: int
    starts: Sequence[int]
    sent: Sequence[int]
    expected: Sequence[int] | None
    room: int | None
    guess: int = UNKNOWN

    @classmethod
    def guessed(
        cls,
        width: int,
        starts: Sequence[int],
        sent: Sequence[int],
        expected: Sequence[int] | None,
        room: int | None,
    ) -> Parts:
        """The parts of a rank that assumes, if it can, that all ranks' parts are of one size."""
        count, own = sent[0], (*sent, *(expected or ()))
        alike = own.count(count) == len(own) and room in (None, count * len(sent))
        return cls(width, starts, sent, expected, room, count if alike else UNKNOWN)

    @property
    def largest(self) -> int:
        """The bytes of the largest part that is known, to or from any rank."""
        return self.width * max(*self.sent, *(self.expected or ()), 0)

    def most(self, rank: int) -> tuple[int, int]:
        """(the most bytes to a peer, or that may come from one; the bytes of this rank's part)."""
        own, peers = self.sent[rank], [r for r in range(len(self.sent)) if r != rank]
        counts = [self.sent[peer] for peer in peers]
        counts += [self.expected[peer] for peer in peers] if self.expected is not None else []
        counts += [self.room - own] if self.room is not None else []
        return self.width * max(counts, default=0), self.width * own


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
        self._launches: LRUCache[tuple[Any, ...], ReadyLaunch | None] = LRUCache(_KEPT)
        mail = _mail_bytes(team.size)
        table = cells[team.rank] + _words_end(team.size) + _post_bytes(team.size, mail)
        self._lay_out(cells, Heaps(context, table))

    def _lay_out(self, cells: Sequence[int], heaps: Heaps) -> None:
        """Note where every rank's memory lies: cells, counts, words of launches, and its `Post`."""
        team = self.team
        self.heaps = heaps
        self._cells = [cells[rank] for rank in team.ring_order]
        self._team_bytes = team.packed()
        self._counts_address = cells[team.rank] + _cells_bytes(team.size)
        self._posts = [start + _words_end(team.size) for start in cells]
        self._exchanges: dict[LaunchConfig, ReadyLaunch] = {}
        self._mail_bytes = _mail_bytes(team.size)
        self._written_bytes = _written_bytes(team.size)

    @classmethod
    def of(cls, context: Context) -> DeviceCollectives | FarCollectives:
        """The context's collectives, made at the first call. Collective."""
        if context.multi_host:
            return FarCollectives.of(context)
        return context.cache("device collectives", lambda: cls._first(context))

    @classmethod
    def _first(cls, context: Context) -> DeviceCollectives:
        """The context's own collectives, whose table of heaps the context keeps up to date."""
        made = cls.separate(context)
        context.heaps = made.heaps
        return made

    @classmethod
    def separate(cls, context: Context) -> DeviceCollectives:
        """Other collectives, with their own cells: they never wait for the context's. Collective.

        Ranks of one host only. Raises HeapExhausted on all ranks.
        """
        team = context.gpu_team
        nbytes = _words_end(team.size) + _post_bytes(team.size, _mail_bytes(team.size))
        nbytes += table_bytes(team.size)
        Heaps.announce(context)
        cells = kernel_memory(context, "collectives: cells", nbytes)
        context.heap.groups.watch_everywhere(context.number, team.failed)
        return cls(context, team, cells)

    # -- what is pushed ----------------------------------------------------------------------------

    def reduction_pushes(self, nbytes: int, dtype: DType) -> Pushes | None:
        """The pushes that combine `nbytes` of each rank on the heap; None if cells do it."""
        if dtype.kind in "fc":
            pushed = nbytes // self.team.size >= _PUSHED_SLICE_BYTES
        else:
            pushed = nbytes >= _PUSHED_BYTES
        return self if pushed and self.team.size > 1 else None

    # -- through cells -----------------------------------------------------------------------------
    # `tag` says which call this is, the same on all ranks: kernels compare it before they write.
    # Each returns the launch, or None if there was nothing to do.

    @property
    def order(self) -> StreamOrder:
        """The order in which launches follow each other on any streams."""
        return self._order

    @property
    def addresses_place(self) -> int:
        """Where a launch's argument has the addresses of operand and result, side by side."""
        return len(self._argument(0, ()))

    def counted(self) -> tuple[tuple[int, int, int], tuple[int, int, int, int, int, int, int]]:
        """How compiled code launches an exchange of any counts:

        (kernel, blocks, threads)
        (ranks, this rank, most bytes for these blocks, blocks for more,
         most bytes of a part for another kernel, that kernel, its threads)
        """
        team, more = self.team, self._exchange_kernel("exchange").handle
        few = _FEW_BYTES, self._exchange_kernel("exchange_few").handle, _FEW_THREADS
        ranks = team.size, team.rank
        return (more, _MAIL_BLOCKS, _MAX_THREADS), (*ranks, self._written_bytes, _LANE_BLOCKS, *few)

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

    def move(
        self,
        source: int,
        target: int,
        table: Sequence[Sequence[int]],
        width: int,
        stream: int,
        *,
        whole: bool = False,
        tag: int = 0,
    ) -> ReadyLaunch:
        """Send `table[src][dst]` times `width` bytes from every rank to every other.

        The parts lie at `source` in the order of the ranks, or each rank sends the same to all
        (`whole`); the parts at `target` lie in the order of the ranks, too.
        """
        rank, size = self.team.rank, self.team.size
        sent, received = table[rank], [row[rank] for row in table]
        starts = [0] * size if whole else [width * start for start in bounds(sent)[:-1]]
        parts = Parts(width, starts, sent, received, None, _digest(table))
        return self.exchange(source, target, parts, stream, tag=tag)

    def exchange(
        self, source: int, target: int, parts: Parts, stream: int, *, tag: int = 0
    ) -> ReadyLaunch:
        """Send every rank its part of `source`; the parts from all ranks come to `target`, in
        order.

        If a rank is sent another count than it expects, nothing is written, and all report it.
        """
        self.team.require_usable()
        config = _exchange_config(parts, self.team.rank, self._written_bytes)
        argument = self._argument(tag, self._exchange_words(source, target, parts))
        launch = self._exchanges.get(config)
        if launch is None:
            kernel = self._exchange_kernel(config.function)
            launch = kernel.ready(config.blocks, config.threads, Argument(argument))
            self._exchanges[config] = launch
        else:
            launch.change(argument)
        self._order.put(launch, stream)
        return launch

    def _exchange_kernel(self, function: str) -> Kernel:
        sizes = self._mail_bytes, _post_bytes(self.team.size, self._mail_bytes), SEGMENTS
        defines = [f"{name}={value}" for name, value in zip(_DEFINES, sizes, strict=True)]
        return self.team.kernel("exchange", function, defines)

    def _exchange_words(self, source: int, target: int, parts: Parts) -> list[int]:
        """The words that follow the struct `Cells` in the argument of exchange.cu."""
        unknown = (UNKNOWN,) * self.team.size
        row = (*parts.sent, *(parts.expected or unknown), UNKNOWN)
        if parts.room is not None:
            row = (*row[:-1], parts.room)
        packed = self._written_bytes if self.heaps.holds(target) else self._mail_bytes
        where = *self._posts, self.heaps.address, packed
        return [source, target, parts.width, *parts.starts, *row, parts.guess, *where]

    def rows(self, launch: int) -> list[tuple[int, ...]]:
        """The rows of counts that all ranks have sent to this one in their last launch."""
        size = self.team.size
        packets = np.empty((size, _row_packets(size), 2), np.uint64)
        place = self._posts[self.team.rank] + 2 * size * _PACKET + (launch & 1) * packets.nbytes
        self.team.device.activate()
        call("cuMemcpyDtoH", packets.ctypes.data, place, packets.nbytes)
        return [tuple(row) for row in packets[:, : 2 * size + 1, 0].tolist()]

    def _run(
        self, key: tuple[Any, ...], stream: int, make: Callable[[], ReadyLaunch | None]
    ) -> ReadyLaunch | None:
        """Put the launch of that key on `stream`; `make()` gives it the first time."""
        self.team.require_usable()
        launch = self._launches.made(key, make)
        if launch is not None:
            self._order.put(launch, stream)
        return launch

    def _reduce(
        self, config: LaunchConfig, dtype: DType, operation: str, words: Sequence[int], tag: int
    ) -> ReadyLaunch | None:
        """A launch that combines through cells; the third of `words` is the most bytes."""
        if words[2] == 0:
            return None
        assert config.blocks <= _MAX_BLOCKS and config.threads <= _MAX_THREADS, config
        aligned = not any(word % _PACKET for word in words)
        defines = reduction_defines(dtype, operation, aligned)
        kernel = self.team.kernel("reduce", config.function, defines)
        argument = Argument(self._argument(tag, words))
        return kernel.ready(config.blocks, config.threads, argument)

    def _argument(self, tag: int, words: Sequence[int]) -> bytes:
        """The argument of a kernel: the struct `Cells`, and these words."""
        words = (self._counts_address, tag, *self._cells, *words)
        return self._team_bytes + struct.pack(f"{len(words)}Q", *words)


def _phases(size: int) -> int:
    """The number of phases of a step, `kPhases` in kernels/cells.cuh."""
    return 4 if size == 2 else 2


def _cells_bytes(size: int) -> int:
    """The bytes of one rank's cells. Counts and words of launches follow them."""
    return _MAX_BLOCKS * _SETS * _phases(size) * size * _MAX_THREADS * _PACKET


def _words_end(size: int) -> int:
    """Where, in one rank's memory, the words of launches end and its `Post` follows."""
    return _cells_bytes(size) + 16 * _MAX_BLOCKS * (1 + size)


def _mail_bytes(size: int) -> int:
    """The most bytes that go to a rank as packets: with those to all ranks, a link is busy."""
    return up(_MAIL_BYTES // size, 8)


def _written_bytes(size: int) -> int:
    """The most bytes that go to a rank as packets where its result is on the heap."""
    return min(up(_WRITTEN_BYTES // size, 8), _mail_bytes(size))


def _row_packets(size: int) -> int:
    """The number of packets of a row, `kRow` in kernels/exchange.cu."""
    return 3 * size + 3


def _post_bytes(size: int, mail: int) -> int:
    """The bytes of the struct `Post` of kernels/exchange.cu."""
    rows, mails = 2 * size * (_row_packets(size) + 1) * _PACKET, 2 * size * mail // 8 * _PACKET
    rows += 2 * size * 8  # counts of blocks
    slot = _INBOX_BYTES // (_LANES * size * _SLOTS) // _SLOT_UNIT * _SLOT_UNIT
    return rows + mails + _LANES * size * (16 + _SLOTS * slot) + _PACKET


def _digest(table: Sequence[Sequence[int]]) -> int:
    """A number for the counts of all ranks: the count itself if all are equal."""
    counts = {count for row in table for count in row}
    if len(counts) == 1:
        return counts.pop()
    words = repr([list(row) for row in table]).encode()
    return int.from_bytes(blake2b(words, digest_size=8).digest(), "little") | 1 << 63


def _exchange_config(parts: Parts, rank: int, packed: int) -> LaunchConfig:
    """The launch of an exchange in which up to `packed` bytes go to a rank as packets."""
    most, own = parts.most(rank)
    if most <= packed and parts.largest <= _FEW_BYTES:
        packets = -(-parts.largest // (_PACKET // 2))
        return LaunchConfig("exchange_few", max(1, -(-packets // _FEW_THREADS)), _FEW_THREADS)
    if most > packed:
        return LaunchConfig("exchange", _LANE_BLOCKS, _MAX_THREADS)
    config = _launch_config("exchange", -(-max(most, own) // (_PACKET // 2)))
    return LaunchConfig("exchange", min(config.blocks, _MAIL_BLOCKS), config.threads)
