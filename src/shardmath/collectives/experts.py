"""Rows to the experts of all ranks, and back, on GPUs: counts are read by kernels, never by hosts.

Kernels of `kernels/experts.cu` push the rows straight into every rank's result, which is symmetric
memory, between two barriers on the stream. They can be captured in CUDA graphs, and replayed with
other counts. If rows do not fit, all ranks find the same: nothing is written, and the next call of
each, or its wait, raises ValueError, which ends the context.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from shardmath.collectives.cells import DeviceCollectives
from shardmath.collectives.pushes import CHANNEL, kernel_memory
from shardmath.context.context import Context
from shardmath.cuda.kernel import Argument

_HEAD_WORDS = 4  # the struct Head of experts.cu
_CHUNK_WORDS = 4  # and its Chunk
_PLAN_WORDS = 4  # of its Plan, but for what it has of each rank
_PLAN_ARRAYS = 2  # of the ranks
_TELL_THREADS, _SEND_THREADS, _BLOCKS_EACH = 1024, 256, 8
_TILE_BYTES = 32 << 10


class RowExchange(NamedTuple):
    """One rank's part of an exchange: addresses, on its GPU, and sizes.

    `counts`, `told` and `starts` are addresses of int64; `starts` is 0 if chunks lie one after the
    other. `targets` are the results of all ranks; this rank's has `room` rows, of `width` bytes
    each. See `kernels/experts.cu`.
    """

    source: int
    targets: Sequence[int]
    counts: int
    starts: int
    told: int
    width: int
    rows: int
    room: int
    experts: int
    align: int
    combines: bool

    @property
    def tag(self) -> int:
        """A number for what has to be equal on all ranks of an exchange."""
        words = repr((self.width, self.experts, self.align, self.combines)).encode()
        return int.from_bytes(blake2b(words, digest_size=7).digest(), "little")


class Experts:
    """The exchanges of one context of GPUs. Made by `of`."""

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

    @classmethod
    def of(cls, context: Context) -> Experts:
        """The exchanges of `context`, made at the first. Collective."""
        return context.cache("experts", lambda: cls(context))

    def put(self, exchange: RowExchange, stream: int) -> None:
        """Put an exchange on `stream`. Collective; the hosts meet if the tables have to grow.

        Raises HeapExhausted on all ranks.
        """
        team, chunks = self._collectives.team, self._collectives.team.size * exchange.experts
        team.require_usable()
        if chunks > self._capacity:
            nbytes = 8 * _words(team.size, chunks)
            self._tables = kernel_memory(self._context, "collectives: experts", nbytes)
            self._capacity = chunks
        argument = Argument(self.packed(exchange))
        tiles = exchange.rows * exchange.width // _TILE_BYTES + chunks
        blocks = max(1, min(tiles, team.device.processors * _BLOCKS_EACH))
        with self._collectives.order.section(stream):
            team.kernel("experts", "tell_counts").launch(stream, 1, _TELL_THREADS, argument)
            team.kernel("experts", "send_rows").launch(stream, blocks, _SEND_THREADS, argument)
            team.kernel("experts", "finish_sending").launch(stream, 1, _TELL_THREADS, argument)

    def packed(self, exchange: RowExchange) -> bytes:
        """The struct `ExpertsArgument`."""
        team, given = self._collectives.team, exchange
        pitch = _HEAD_WORDS + self._capacity
        plan = self._tables[team.rank] + 8 * team.size * pitch
        words = [given.tag, given.width, given.rows, given.room, given.experts, given.align, pitch]
        words += [given.counts, given.starts, given.told, given.source]
        words += [*given.targets, *self._tables, plan]
        head = struct.pack("II", CHANNEL, given.combines)
        return team.packed() + head + struct.pack(f"{len(words)}Q", *words)


def _words(size: int, chunks: int) -> int:
    """The words of a rank's tables and of its plan, for so many chunks of each rank."""
    tables = size * (_HEAD_WORDS + chunks)
    plan = _PLAN_WORDS + _PLAN_ARRAYS * size + _CHUNK_WORDS * chunks
    return tables + plan + size * max(size, chunks // size) + chunks
