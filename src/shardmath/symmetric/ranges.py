"""The byte ranges of one segment that are free, and those that have memory.

Pure bookkeeping over integers: best fit, with free neighbours merged. Every offset and size is a
multiple of `ALIGNMENT`, so that every array starts on its own cache line and a block's end never
shares one with the next block.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

ALIGNMENT = 256
GRANULE = 2 << 20  # memory is committed, and given back, by so many bytes


class FreeRanges:
    """The free ranges of a segment of `nbytes`, all free at first."""

    def __init__(self, nbytes: int) -> None:
        self._most = nbytes
        self._by_offset: list[tuple[int, int]] = [(0, nbytes)]  # (offset, size), sorted, apart
        self._by_size: list[tuple[int, int]] = [(nbytes, 0)]  # (size, offset), sorted

    @property
    def free(self) -> int:
        """Bytes free in all."""
        return sum(size for size, _ in self._by_size)

    @property
    def longest(self) -> int:
        """Bytes of the longest free range."""
        return self._by_size[-1][0] if self._by_size else 0

    def take(self, nbytes: int) -> int | None:
        """The offset of `nbytes` now taken from the smallest range that holds them, or None."""
        place = bisect_left(self._by_size, (nbytes, 0))
        if place == len(self._by_size):
            return None
        size, offset = self._by_size[place]
        self._remove(offset, size)
        if size > nbytes:
            self._insert(offset + nbytes, size - nbytes)
        return offset

    def reserve(self, offset: int, nbytes: int) -> None:
        """Take `nbytes` at `offset`, all of which must be free."""
        place = bisect_right(self._by_offset, (offset, self._most)) - 1
        start, size = self._by_offset[place]
        assert start <= offset and offset + nbytes <= start + size, "a taken range was reserved"
        self._remove(start, size)
        if start < offset:
            self._insert(start, offset - start)
        if offset + nbytes < start + size:
            self._insert(offset + nbytes, start + size - offset - nbytes)

    def give(self, offset: int, nbytes: int) -> None:
        """Make a taken range free again, merged with free neighbours."""
        place = bisect_left(self._by_offset, (offset, 0))
        if place < len(self._by_offset):
            after, size = self._by_offset[place]
            assert offset + nbytes <= after, "a free range was freed again"
            if offset + nbytes == after:
                self._remove(after, size)
                nbytes += size
        if place > 0:
            before, size = self._by_offset[place - 1]
            assert before + size <= offset, "a free range was freed again"
            if before + size == offset:
                self._remove(before, size)
                offset, nbytes = before, nbytes + size
        self._insert(offset, nbytes)

    def _insert(self, offset: int, nbytes: int) -> None:
        insort(self._by_offset, (offset, nbytes))
        insort(self._by_size, (nbytes, offset))

    def _remove(self, offset: int, nbytes: int) -> None:
        del self._by_offset[bisect_left(self._by_offset, (offset, nbytes))]
        del self._by_size[bisect_left(self._by_size, (nbytes, offset))]


class OwnSegment:
    """The books of one segment: which ranges are free, and which granules have memory."""

    def __init__(self, address: int, nbytes: int, lease: object) -> None:
        self.address = address
        self.nbytes = nbytes
        self.lease = lease
        self.ranges = FreeRanges(self.nbytes)
        self.committed = bytearray(-(-self.nbytes // GRANULE))

    def uncommitted(self, offset: int, nbytes: int) -> list[tuple[int, int]]:
        """The (offset, size) runs that a block at `offset` still needs memory for."""
        runs: list[tuple[int, int]] = []
        end, last = offset // GRANULE, -(-(offset + nbytes) // GRANULE)
        while (first := self.committed.find(0, end, last)) >= 0:
            end = self.committed.find(1, first, last)
            end = last if end < 0 else end
            runs.append((first * GRANULE, min(end * GRANULE, self.nbytes) - first * GRANULE))
        return runs

    def note(self, offset: int, nbytes: int, *, committed: bool) -> None:
        """Record whether the granules of a run have memory."""
        first, last = offset // GRANULE, -(-(offset + nbytes) // GRANULE)
        self.committed[first:last] = bytes([committed]) * (last - first)
