"""The all_reduce of large arrays: copy engines on the wire, kernels for the arithmetic, in chunks.

    chunk 0   send slices ─ fold own ─ send results ─ copy out
    chunk 1                 send slices ─ fold own ─ send results ─ copy out
                                                                     ...

Copies reach peers' scratch memory on the heap only. A slot of the inbox is written again after the
barrier that says that all ranks' results of it have been sent, so all have folded it; a slot of the
results after a barrier that every rank enters once it has copied it out.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from shardmath.collectives.engines import Engines
from shardmath.cuda.driver import call
from shardmath.cuda.kernel import Argument, Kernel
from shardmath.symmetric.team import Team

__all__ = ["Relay", "Slice", "chunked", "scratch_bytes"]

CHUNK_BYTES = 32 << 20
INBOX_SLOTS = 3  # one being folded, one that comes, one that is sent back
RESULT_SLOTS = 2
_UNIT = 16


@dataclass(frozen=True)
class Slice:
    """The bytes of a chunk that one rank folds."""

    start: int
    nbytes: int


def chunked(nbytes: int, size: int, most: int) -> list[tuple[Slice, ...]]:
    """Cut `nbytes` into even chunks of about `most` at most: of each, every rank's slice.

    Slices start at multiples of 16. The last ones are shorter, and may be empty.
    """
    count = -(-nbytes // most)
    width = -(-nbytes // (count * size * _UNIT)) * _UNIT  # of a slice
    cuts = [min(at, nbytes) for at in range(0, (count * size + 1) * width, width)]
    slices = [Slice(a, b - a) for a, b in pairwise(cuts)]
    return [tuple(slices[at : at + size]) for at in range(0, count * size, size)]


def scratch_bytes(size: int, chunk: int = CHUNK_BYTES) -> int:
    """Bytes of one rank's scratch memory."""
    return (INBOX_SLOTS + RESULT_SLOTS) * (chunk + size * _UNIT)


class Relay:
    """The scratch memory of one team, at `places` by rank, and the lanes that copy to it."""

    def __init__(
        self,
        team: Team,
        places: Sequence[int],
        engines: Engines,
        *,
        channel: int,
        chunk: int = CHUNK_BYTES,
    ) -> None:
        self._team, self._places, self._engines = team, tuple(places), engines
        self._channel, self.chunk = channel, chunk
        half = len(engines.lanes) // 2
        self._sending, self._returning = engines.lanes[:half], engines.lanes[half:]
        self._sent = [[call("cuEventCreate", 2) for _ in self._sending] for _ in range(INBOX_SLOTS)]
        self._slot_bytes = chunk + team.size * _UNIT
        self._rotated = [(team.rank + step) % team.size for step in range(1, team.size)]

    def all_reduce(self, source: int, target: int, nbytes: int, fold: Kernel, stream: int) -> None:
        """Fold all ranks' `nbytes` at `source` into `target`, which may be `source`."""
        chunks = chunked(nbytes, self._team.size, self.chunk)
        count = len(chunks)
        for number in range(min(INBOX_SLOTS, count)):
            self._send(number, chunks[number], source, stream)
        for number, chunk in enumerate(chunks):
            for event in self._sent[number % INBOX_SLOTS]:
                call("cuStreamWaitEvent", stream, event, 0)
            self._barrier(stream)  # before reading what the peers have sent
            self._fold(number, chunk, source, target, fold, stream)
            if number:
                self._engines.finish(stream, self._returning)
            self._return(number, chunk, target, stream)
            if number:
                self._barrier(stream)  # before reading results; all inboxes of it are free
                self._copy_out(number - 1, chunks[number - 1], target, stream)
                if number - 1 + INBOX_SLOTS < count:
                    later = number - 1 + INBOX_SLOTS
                    self._send(later, chunks[later], source, stream)
        self._engines.finish(stream, self._returning)
        self._barrier(stream)
        self._copy_out(count - 1, chunks[-1], target, stream)

    def _inbox(self, rank: int, number: int, src: int) -> int:
        at = self._places[rank] + number % INBOX_SLOTS * self._slot_bytes
        return at + src * (self._slot_bytes // self._team.size // _UNIT * _UNIT)

    def _results(self, rank: int, number: int) -> int:
        return self._places[rank] + (INBOX_SLOTS + number % RESULT_SLOTS) * self._slot_bytes

    def _send(self, number: int, chunk: Sequence[Slice], source: int, stream: int) -> None:
        own = self._team.rank
        copies = [
            (self._inbox(peer, number, own), source + chunk[peer].start, chunk[peer].nbytes)
            for peer in self._rotated
        ]
        self._engines.start(copies, stream, self._sending)
        for lane, event in zip(self._sending, self._sent[number % INBOX_SLOTS], strict=True):
            call("cuEventRecord", event, lane)

    def _fold(
        self,
        number: int,
        chunk: Sequence[Slice],
        source: int,
        target: int,
        fold: Kernel,
        stream: int,
    ) -> None:
        own, rank = chunk[self._team.rank], self._team.rank
        if not own.nbytes:
            return
        places = [self._inbox(rank, number, src) for src in range(self._team.size)]
        places[rank] = source + own.start
        words = (*places, target + own.start, own.nbytes)
        blocks = max(1, min(2 * self._team.device.processors, own.nbytes // (_UNIT * 512)))
        fold.launch(stream, blocks, 512, Argument(struct.pack(f"{len(words)}Q", *words)))

    def _return(self, number: int, chunk: Sequence[Slice], target: int, stream: int) -> None:
        own = chunk[self._team.rank]
        offset = own.start - chunk[0].start
        copies = [
            (self._results(peer, number) + offset, target + own.start, own.nbytes)
            for peer in self._rotated
        ]
        self._engines.start(copies, stream, self._returning)

    def _copy_out(self, number: int, chunk: Sequence[Slice], target: int, stream: int) -> None:
        own, first = chunk[self._team.rank], chunk[0].start
        end = chunk[-1].start + chunk[-1].nbytes
        results = self._results(self._team.rank, number)
        for start, stop in ((first, own.start), (own.start + own.nbytes, end)):
            if stop > start:
                call("cuMemcpyAsync", target + start, results + start - first, stop - start, stream)

    def _barrier(self, stream: int) -> None:
        self._team.barrier(stream, channel=self._channel)
