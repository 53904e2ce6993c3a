"""Rows to the experts of all ranks, and back, on GPUs: counts are read by kernels, never by hosts.

The kernel of `kernels/experts.cu` pushes the rows straight into every rank's result, which is
symmetric memory. It can be captured in CUDA graphs, and replayed with other counts. If rows do not
fit, all ranks find the same: nothing is written, and the next call of each, or its wait, raises
ValueError, which ends the context.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from shardmath.arrays import libraries
from shardmath.base.compiled import extension
from shardmath.base.lru_cache import LRUCache
from shardmath.collectives.cells import DeviceCollectives
from shardmath.collectives.pushes import CHANNEL, kernel_memory
from shardmath.context.context import Context
from shardmath.cuda.driver import require_success
from shardmath.cuda.kernel import Argument, ReadyLaunch

_HEAD_WORDS = 4  # the struct Head of experts.cu, each in a packet
_CHUNK_WORDS = 4  # and its Chunk
_PLAN_WORDS = 6  # of its Plan, without the arrays
_PLAN_ARRAYS = 2  # of its Plan, with a word for each rank
# At most half of the threads and registers of each multiprocessor: the blocks wait for peers, and
# kernels of another context may have to run meanwhile.
_THREADS, _BLOCKS_EACH = 256, 2
_TILE_BYTES = 32 << 10
_KEPT = 64  # calls that are known, each with the handle of its result
_WORD, _PACKET = 8, 16
_NAME = "shardmath.cuda._launch"


class RowExchange(NamedTuple):
    """One rank's part of an exchange, without the addresses of what it sends.

    `targets` are the addresses, on its GPU, of the results of all ranks; this rank's has `room`
    rows, of `width` bytes each, and its input has `rows`. The counts are int64, and where they have
    `starts`, these lie behind them; else chunks lie one after the other. See `kernels/experts.cu`.
    """

    targets: Sequence[int]
    width: int
    rows: int
    room: int
    experts: int
    align: int
    combines: bool
    starts: bool

    @property
    def tag(self) -> int:
        """A number for what has to be equal on all ranks of an exchange."""
        words = repr((self.width, self.experts, self.align, self.combines)).encode()
        return int.from_bytes(blake2b(words, digest_size=7).digest(), "little")


class Experts:
    """The exchanges of one context of GPUs: `calls` are those that all ranks know. Made by `of`.

    All launches in `calls` use the same tables. Ranks whose exchanges differ could not tell if they
    used different ones, so where the tables grow, all ranks forget the calls.
    """

    def __init__(self, context: Context) -> None:
        collectives = DeviceCollectives.of(context)
        if not isinstance(collectives, DeviceCollectives):
            raise NotImplementedError(
                "some ranks are on other hosts, where kernels of this GPU cannot write rows; "
                "collectives.all_to_all with send_counts reaches them"
            )
        self._context, self._collectives = context, collectives
        self._capacity = 0  # in chunks, of the tables
        self._tables: list[int] = []
        self.calls: LRUCache[Any, RowLaunch] = LRUCache(_KEPT)

    @classmethod
    def of(cls, context: Context) -> Experts:
        """The exchanges of `context`, made at the first. Collective."""
        return context.cache("experts", lambda: cls(context))

    def prepare(self, exchange: RowExchange, keeps: object = None) -> RowLaunch:
        """The launch of such exchanges, which `keeps` what their results lie in.

        Collective; the hosts meet if the tables have to grow. Raises HeapExhausted on all ranks.
        """
        team, chunks = self._collectives.team, self._collectives.team.size * exchange.experts
        if chunks > self._capacity:
            nbytes = _table_bytes(team.size, chunks) + _WORD * _plan_words(team.size, chunks)
            self._tables = kernel_memory(self._context, "collectives: experts", nbytes)
            self._capacity = chunks
            self.calls.clear()
        tiles = exchange.rows * exchange.width // _TILE_BYTES + chunks
        blocks = max(1, min(tiles, team.device.processors * _BLOCKS_EACH))
        kernel = team.kernel("experts", "exchange_rows")
        packed = self.packed(exchange)
        ready = kernel.ready(blocks, _THREADS, Argument(b"".join(packed)))
        behind = _WORD * chunks if exchange.starts else None
        return RowLaunch(self._collectives, ready, len(packed[0]), behind, keeps)

    def packed(self, exchange: RowExchange) -> tuple[bytes, bytes, bytes]:
        """The struct `ExpertsArgument`: what is before its four addresses, these, and the rest."""
        team, given = self._collectives.team, exchange
        pitch = _HEAD_WORDS + self._capacity
        plan = self._tables[team.rank] + _table_bytes(team.size, self._capacity)
        words = [given.tag, given.width, given.rows, given.room, given.experts, given.align, pitch]
        head = team.packed() + struct.pack(f"II{len(words)}Q", CHANNEL, given.combines, *words)
        rest = [*given.targets, *self._tables, plan]
        return head, bytes(4 * _WORD), struct.pack(f"{len(rest)}Q", *rest)


class RowLaunch:
    """Exchanges that differ only in the addresses of what is sent and told.

    `place` is where the kernel's argument has the addresses of counts, starts, `told` and input;
    the starts lie so many bytes `behind` the counts, or nowhere. Made by `Experts.prepare`.
    """

    def __init__(
        self,
        collectives: DeviceCollectives,
        ready: ReadyLaunch,
        place: int,
        behind: int | None,
        keeps: object,
    ) -> None:
        self._team, self._order = collectives.team, collectives.order
        self._ready, self._place, self._behind, self._keeps = ready, place, behind, keeps
        self._go: Any = None  # of compiled code, which makes the same launch: see cuda/launch.c

    def takes(self, tensors: Sequence[Any]) -> bool:
        """Whether tensors lie as those of these exchanges: contiguous, on this rank's GPU."""
        ordinal = self._team.device.ordinal
        return all(x.is_contiguous() and x.get_device() == ordinal for x in tensors)

    def put(self, x: Any, counts: Any, told: Any) -> None:
        """Put an exchange of torch's tensors on their current stream, as `put_on`."""
        self._team.require_usable()
        stream = libraries()["torch"].stream(self._team.device.ordinal)
        if self._go is None:
            self._go = self._compiled(x, counts, told) or _by_python
        if self._order.continues(stream):
            status = self._go(stream, x, counts, told)
        else:
            with self._order.section(stream):
                status = self._go(stream, x, counts, told)
        if status is None:
            self.put_on(stream, x.data_ptr(), counts.data_ptr(), told.data_ptr())
        else:
            require_success("cuLaunchKernel", status)

    def put_on(self, stream: int, source: int, counts: int, told: int) -> None:
        """Put an exchange on `stream`, given the addresses of the rows, of their counts, and of
        room for the counts and the starts of the rows that arrive.
        """
        starts = 0 if self._behind is None else counts + self._behind
        argument = bytearray(self._ready.parts[3])
        struct.pack_into("4Q", argument, self._place, counts, starts, told, source)
        self._ready.change(bytes(argument))
        self._order.put(self._ready, stream)

    def _compiled(self, x: Any, counts: Any, told: Any) -> Any:
        """What launches exchanges of tensors that look like these, or None where it does nothing:
        the tensors look otherwise, or another CUDA context is current.
        """
        built, torch = extension(_NAME), libraries()["torch"]
        if built is None:
            return None
        place = self._place
        places = [(1, place, 0), (2, place + 2 * _WORD, 0), (0, place + 3 * _WORD, 0)]
        if self._behind is not None:
            places.append((1, place + _WORD, self._behind))
        function, blocks, threads, argument = self._ready.parts
        kernel = function, self._team.device.context_address, blocks, threads, argument
        alike = x, counts, told
        return built.Launch(torch.attributes(), alike, tuple(places), kernel).go


def _by_python(stream: int, x: Any, counts: Any, told: Any) -> None:
    """What stands for compiled code that was not built: it does nothing."""


def _table_bytes(size: int, chunks: int) -> int:
    """The bytes of a rank's table, for so many chunks of each rank."""
    return _PACKET * size * (_HEAD_WORDS + chunks)


def _plan_words(size: int, chunks: int) -> int:
    """The words of the plan and of all that may not fit in shared memory."""
    groups = size * max(size, chunks // size)
    room = 2 * groups + chunks + size * (_HEAD_WORDS + chunks)
    return _PLAN_WORDS + _PLAN_ARRAYS * size + _CHUNK_WORDS * chunks + room
