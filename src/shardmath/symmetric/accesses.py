"""The detector of data races: SHARDMATH_CHECK=1 looks for accesses on cores that nothing orders.

Each rank logs what it reads and writes of symmetric memory, its own and its peers', where the peers
see it. After each access it looks for a peer's access to the same bytes, where one of the two
writes and neither comes before the other. Vector clocks tell what comes before what: a rank counts
its releases (it comes to a barrier or an exchange, it signals), and notes with each what it knows
of all ranks' counts; a rank that waits for a release takes over what its note says.

    accesses   the last _ACCESSES of a rank, each with the rank's count when it was made
    notes      its last _NOTES releases, each with the counts of all ranks that it knew

Both are rings that one rank writes. `stamp` is the number of an entry, and 0 while it is written: a
reader checks it again after reading. Of two ranks whose accesses race at least one sees the other's
access, because each logs its own before it looks.

There are no false reports: an entry that was overwritten counts as ordered, and so do two accesses
whose overlap would take too long to work out.

Source: vector clocks of Fidge and Mattern, 1988; of data races, Djit, Itzkovitz et al., 1999.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardmath.arrays.base import host_array
from shardmath.arrays.spec import byte_span
from shardmath.base.caller import caller_line
from shardmath.base.immutable import Immutable
from shardmath.errors import DataRace
from shardmath.symmetric.heap import Location
from shardmath.symmetric.rows import order
from shardmath.transport.base import Bytes

_ACCESSES, _NOTES = 2048, 512
_AXES = 4  # of an access; one with more axes counts as all bytes from its first to its last
_WORK = 10_000  # steps in which NumPy is to find out whether two accesses overlap
_FAR = 1 << 40  # where arrays pretend to lie whose memory is never read
_ACCESS = np.dtype(
    [
        ("stamp", "u8"),
        ("count", "u8"),
        ("rank", "u4"),
        ("segment", "u4"),
        ("low", "i8"),
        ("high", "i8"),
        ("start", "i8"),
        ("shape", "i8", (_AXES,)),
        ("strides", "i8", (_AXES,)),
        ("writes", "u1"),
        ("line", "S87"),
        ("what", "S40"),
    ],
    align=True,
)


def _note(size: int) -> np.dtype[Any]:
    return np.dtype([("stamp", "u8"), ("name", "u8"), ("number", "u8"), ("counts", "u8", (size,))])


def log_bytes(size: int) -> int:
    """Bytes of the log of one of `size` ranks."""
    return _ACCESSES * _ACCESS.itemsize + _NOTES * _note(size).itemsize


class Extent(Immutable):
    """The bytes of a segment that an access touches: those of an array of bytes, `start` bytes into
    the segment, with this shape and these strides. `low` is the first of them, `high` the one
    behind the last.
    """

    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    low: int
    high: int

    @classmethod
    def of(
        cls, start: int, shape: Sequence[int], strides: Sequence[int], itemsize: int
    ) -> Extent | None:
        """The extent of an array whose element (0, 0, ...) is `start` bytes into the segment.

        None where it has no elements. Strides are bytes.
        """
        if 0 in shape:
            return None
        low, high = (start + end for end in byte_span(shape, strides, itemsize))
        axes: list[tuple[int, int]] = []
        for n, stride in [*zip(shape, strides, strict=True), (itemsize, 1)]:
            if n == 1:
                continue
            if axes and axes[-1][1] == n * stride:
                axes[-1] = axes[-1][0] * n, stride
            else:
                axes.append((n, stride))
        if len(axes) > _AXES:
            start, axes = low, [(high - low, 1)]
        return cls(start, tuple(n for n, _ in axes), tuple(by for _, by in axes), low, high)

    def overlaps(self, other: Extent) -> bool:
        """Whether a byte is in both; False also where that would take too long to find out."""
        try:
            work: Any = _WORK
            return bool(np.shares_memory(self._array(), other._array(), max_work=work))
        except np.exceptions.TooHardError:
            return False

    def _array(self) -> npt.NDArray[np.uint8]:
        """An array on these bytes, moved to `_FAR`. Its elements must not be read."""
        return host_array(_FAR + self.start, self.shape, self.strides, "|u1", None)


class AccessLog:
    """This rank's side of `logs`, those of all ranks of a job, which share a host; by rank."""

    def __init__(self, rank: int, logs: Sequence[Bytes]) -> None:
        size, end = len(logs), _ACCESSES * _ACCESS.itemsize
        self.rank = rank
        self.looks_away = False  # nothing more is logged or found
        self._accesses = [np.asarray(log)[:end].view(_ACCESS) for log in logs]
        notes = _note(size)
        self._notes = [np.asarray(log)[end : log_bytes(size)].view(notes) for log in logs]
        self._counts = np.zeros(size, np.uint64)  # by rank: accesses up to it come before
        self._count = 1  # of this rank's own releases
        self._logged = self._noted = 0
        self._since_release: set[Hashable] = set()  # accesses, which need no second entry

    def release(self, name: int, number: int) -> None:
        """Let a rank that acquires this `name` and `number` know what this rank has done so far."""
        notes = self._notes[self.rank]
        self._counts[self.rank] = self._count
        note = notes[self._noted % _NOTES]
        note["stamp"] = 0
        note["name"], note["number"], note["counts"] = name, number, self._counts
        order()
        self._noted += 1
        note["stamp"] = self._noted
        self._count += 1
        self._since_release.clear()

    def acquire(self, name: int, number: int, ranks: Sequence[int]) -> None:
        """Take over what these ranks knew at the release of that name and number."""
        order()
        for rank in ranks:
            notes = self._notes[rank]
            found = np.flatnonzero((notes["name"] == name) & (notes["number"] == number))
            if len(found):
                note = notes[found[0]].copy()
                if note["stamp"] and notes[found[0]]["stamp"] == note["stamp"]:
                    np.maximum(self._counts, note["counts"], out=self._counts)
                    continue
            # The note was overwritten: all that the rank has logged counts as before.
            latest = self._accesses[rank]["count"].max()
            self._counts[rank] = max(self._counts[rank], latest)
        self._since_release.clear()

    def access(self, rank: int, segment: int, extent: Extent, *, writes: bool, what: str) -> None:
        """Log that this rank accesses memory of `rank`.

        Raises DataRace where a peer accesses the same bytes and nothing orders the two.
        """
        if self.looks_away:
            return
        line = caller_line()
        key = rank, segment, extent, writes, line
        if key in self._since_release:
            return
        entry = self._accesses[self.rank][self._logged % _ACCESSES]
        entry["stamp"] = 0
        entry["count"], entry["rank"], entry["segment"] = self._count, rank, segment
        entry["low"], entry["high"], entry["start"] = extent.low, extent.high, extent.start
        entry["shape"], entry["strides"] = 1, 0
        entry["shape"][: len(extent.shape)] = extent.shape
        entry["strides"][: len(extent.strides)] = extent.strides
        entry["writes"], entry["line"], entry["what"] = writes, line.encode()[-87:], what.encode()
        order()
        self._logged += 1
        entry["stamp"] = self._logged
        self._since_release.add(key)
        for peer in range(len(self._accesses)):
            if peer != self.rank:
                other = self._race(peer, rank, segment, extent, writes=writes)
                if other is not None:
                    own = _does(self.rank, writes, line, what)
                    raise DataRace(_in_words(own, peer, other, rank, extent))

    def _race(self, peer: int, rank: int, segment: int, extent: Extent, *, writes: bool) -> Any:
        """A peer's access to the same bytes that is not ordered with this one, or None."""
        log = self._accesses[peer]
        order()
        chosen = (log["stamp"] > 0) & (log["count"] > self._counts[peer])
        chosen &= (log["rank"] == rank) & (log["segment"] == segment)
        chosen &= (log["low"] < extent.high) & (log["high"] > extent.low)
        if not writes:
            chosen &= log["writes"] > 0
        for number in np.flatnonzero(chosen):
            other = log[number : number + 1].copy()[0]
            low, high = int(other["low"]), int(other["high"])
            shape, strides = other["shape"].tolist(), other["strides"].tolist()
            theirs = Extent(int(other["start"]), tuple(shape), tuple(strides), low, high)
            if log[number]["stamp"] == other["stamp"] and extent.overlaps(theirs):
                return other
        return None


class Observer:
    """What the ranks of one group do with the log: `ranks[r]` is its rank r's number in the job.

    The releases of two groups never have the same name.
    """

    def __init__(self, log: AccessLog, group: str, ranks: Sequence[int]) -> None:
        self._log = log
        self._group = group
        self._ranks = tuple(ranks)
        self._names: dict[Hashable, int] = {}
        self._last: dict[Hashable, int] = {}

    def come(self, name: Hashable, number: int) -> None:
        """Release: who waits for this knows what this rank has done. Once for each number."""
        if self._last.get(name) != number:
            self._last[name] = number
            self._log.release(self._hash(name), number)

    def met(self, name: Hashable, number: int, ranks: Sequence[int] | None = None) -> None:
        """Acquire: this rank has waited for these ranks of the group to `come`, or for all."""
        numbers = self._ranks if ranks is None else [self._ranks[rank] for rank in ranks]
        others = [number for number in numbers if number != self._log.rank]
        self._log.acquire(self._hash(name), number, others)

    def look_away(self) -> None:
        """Report nothing from now on: the program signals by words of its own."""
        self._log.looks_away = True

    def access(
        self, rank: int, location: Location, extent: Extent | None, *, writes: bool, what: str
    ) -> None:
        """Log an access to memory of `rank`; `extent` counts from `location` on. Raises DataRace.

        An extent of None touches nothing.
        """
        if extent is not None:
            by = location.offset
            start, low, high = extent.start + by, extent.low + by, extent.high + by
            there = Extent(start, extent.shape, extent.strides, low, high)
            self._log.access(self._ranks[rank], location.segment, there, writes=writes, what=what)

    def _hash(self, name: Hashable) -> int:
        """A hash of the name, the same on all ranks: Python's own differ by process."""
        if name not in self._names:
            text = f"{self._group}: {name}".encode()
            self._names[name] = zlib.crc32(text) | zlib.adler32(text) << 32
        return self._names[name]


def _does(rank: int, writes: bool, line: str, what: str) -> str:
    return f"rank {rank} {'writes' if writes else 'reads'} in {line} ({what})"


def _in_words(own: str, peer: int, other: Any, rank: int, extent: Extent) -> str:
    line, what = other["line"].decode(errors="replace"), other["what"].decode()
    theirs = _does(peer, bool(other["writes"]), line, what)
    low, high = max(extent.low, int(other["low"])), min(extent.high, int(other["high"]))
    return (
        f"{own} what {theirs}: both use some of {high - low:,} bytes of rank {rank}'s symmetric "
        "memory, and nothing orders the two; put a barrier between them, or put_signal after the "
        "first and wait_signal before the second"
    )
