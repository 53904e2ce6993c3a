"""The global indices that one rank owns along one axis, and the intersection of two such sets.

Every named distribution is, per rank and axis, one `Spans`: equal blocks at a constant period, cut
at a stop. The fields have a normal form, so that two `Spans` are equal exactly when they hold the
same indices. Blocks are never enumerated: work is bounded by one common period of two sets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Run:
    """`count` blocks of `length` elements that two ranks share along one axis.

    Block i starts at `src_start + i * src_step` in the source's local axis and at
    `dst_start + i * dst_step` in the destination's. Steps are 0 when `count` is 1.
    """

    count: int
    length: int
    src_start: int
    src_step: int
    dst_start: int
    dst_step: int

    @property
    def elements(self) -> int:
        """How many elements the run holds: `count * length`."""
        return self.count * self.length

    @property
    def src_stop(self) -> int:
        """The index behind the last in the source's local axis."""
        return self.src_start + (self.count - 1) * self.src_step + self.length

    def block(self, index: int) -> Run:
        """One block of the run."""
        src = self.src_start + index * self.src_step
        return Run(1, self.length, src, 0, self.dst_start + index * self.dst_step, 0)

    def clipped(self, lo: int, hi: int) -> Iterator[Run]:
        """The elements between lo and hi of the destination's axis, which then starts at lo.

        They are a cut block, the whole blocks as one run, and another cut block, where there are.
        """
        if self.count == 1:
            start, stop = max(self.dst_start, lo), min(self.dst_start + self.length, hi)
            if start < stop:
                src = self.src_start + start - self.dst_start
                yield Run(1, stop - start, src, 0, start - lo, 0)
            return
        step = self.dst_step
        first = max(0, -((self.dst_start - lo) // step)) if lo > self.dst_start else 0
        last = min(self.count, (hi - self.dst_start - self.length) // step + 1)
        whole = max(0, last - first)
        for cut in (first - 1, last) if last >= first else (first - 1,):
            if 0 <= cut < self.count:
                yield from self.block(cut).clipped(lo, hi)
        if whole:
            head, steps = self.block(first), (self.src_step, step) if whole > 1 else (0, 0)
            yield Run(whole, self.length, head.src_start, steps[0], head.dst_start - lo, steps[1])

    def __str__(self) -> str:
        if self.count == 1:
            src = f"{self.src_start}:{self.src_stop}"
            return f"{src} -> {self.dst_start}:{self.dst_start + self.length}"
        return (
            f"{self.count} x {self.length} at {self.src_start}+{self.src_step}i"
            f" -> {self.dst_start}+{self.dst_step}i"
        )


@dataclass(frozen=True, slots=True)
class Spans:
    """The indices in [start + i * period, start + i * period + block), i >= 0, below `stop`.

    A period of 0 means one block. Normal form: an empty set is `Spans(0, 0, 0, 0)`, one block has
    period 0, and `stop` is the last index + 1. Raises ValueError for negative fields and for blocks
    that overlap (a period smaller than the block, but not 0).
    """

    start: int
    block: int
    period: int
    stop: int

    def __post_init__(self) -> None:
        start, block, period, stop = self.start, self.block, self.period, self.stop
        if start < 0 or block < 0 or period < 0 or 0 < period < block:
            raise ValueError(
                f"start={start}, block={block}, period={period}: none may be negative, and the "
                "period must be 0 (one block) or at least the block"
            )
        if block == 0 or start >= stop:
            start = block = period = stop = 0
        elif period == 0:
            stop = min(stop, start + block)
            block = stop - start
        else:
            last = (stop - 1 - start) // period
            stop = min(stop, start + last * period + block)
            if last == 0 or period == block:
                block, period = stop - start, 0
        write = object.__setattr__
        write(self, "start", start)
        write(self, "block", block)
        write(self, "period", period)
        write(self, "stop", stop)

    @classmethod
    def interval(cls, lo: int, hi: int) -> Spans:
        """The indices lo, ..., hi - 1; empty when `hi <= lo`."""
        return cls(lo, max(hi - lo, 0), 0, hi)

    @classmethod
    def even(cls, extent: int, parts: int, k: int) -> Spans:
        """Part `k` of `extent` indices in even parts: `extent // parts` of them, perhaps none.

        The first `extent % parts` parts hold one more.
        """
        base, more = divmod(extent, parts)
        lo = k * base + min(k, more)
        return cls.interval(lo, lo + base + (k < more))

    @classmethod
    def cyclic(cls, extent: int, block: int, parts: int, k: int) -> Spans:
        """Part `k` when blocks of `block` indices are dealt to `parts` parts in turn."""
        return cls(k * block, block, parts * block, extent)

    @property
    def length(self) -> int:
        """How many indices there are."""
        if self.period == 0:
            return self.block
        full, rest = divmod(self.stop - self.start, self.period)
        return full * self.block + rest

    @property
    def count(self) -> int:
        """The number of blocks. The last one may be short."""
        if self.period == 0:
            return 1 if self.block else 0
        return -((self.start - self.stop) // self.period)

    def __len__(self) -> int:
        return self.length

    def __contains__(self, index: int) -> bool:
        if not self.start <= index < self.stop:
            return False
        return self.period == 0 or (index - self.start) % self.period < self.block

    def ranges(self) -> Iterator[tuple[int, int]]:
        """The blocks as (lo, hi), ascending."""
        if self.period == 0:
            if self.block:
                yield self.start, self.stop
            return
        for lo in range(self.start, self.stop, self.period):
            yield lo, min(lo + self.block, self.stop)

    def slice(self) -> slice | None:
        """The indices as a slice; None where they are several blocks of several indices."""
        if self.period == 0:
            return slice(self.start, self.stop)
        return slice(self.start, self.stop, self.period) if self.block == 1 else None

    def before(self, index: int) -> int:
        """How many owned indices are smaller than `index`."""
        if index <= self.start:
            return 0
        if index >= self.stop:
            return self.length
        if self.period == 0:
            return index - self.start
        full, rest = divmod(index - self.start, self.period)
        return full * self.block + min(rest, self.block)

    def cut_after(self, index: int) -> int | None:
        """The smallest start or end of a block that is greater than `index`; None past the last."""
        if index >= self.stop:
            return None
        if index < self.start:
            return self.start
        if self.period == 0:
            return self.stop
        full, rest = divmod(index - self.start, self.period)
        lo = self.start + full * self.period
        return min(lo + self.block, self.stop) if rest < self.block else lo + self.period

    def intersect(self, other: Spans) -> tuple[Run, ...]:
        """The indices in both, as runs from this local axis (source) to the other's (destination).

        There are at most as many runs as blocks in one common period, whatever the extent.
        """
        return _intersect(self, other)

    def shared(self, other: Spans) -> int:
        """How many indices are in both."""
        if self.period or other.period:
            return _shared(self, other)
        return max(0, min(self.stop, other.stop) - max(self.start, other.start))

    def __str__(self) -> str:
        if not self.block:
            return "empty"
        head = f"{self.start}:{self.start + self.block}"
        return f"{head} every {self.period} to {self.stop}" if self.period else head


# A piece is (lo, length, count, step): count equal blocks at a constant step, in global indices.
_Piece = tuple[int, int, int, int]


@lru_cache(maxsize=1 << 14)
def _intersect(src: Spans, dst: Spans) -> tuple[Run, ...]:
    lo, hi = max(src.start, dst.start), min(src.stop, dst.stop)
    if lo >= hi:
        return ()
    src_is_coarse = src.period == 0 or (dst.period != 0 and src.period >= dst.period)
    coarse, fine = (src, dst) if src_is_coarse else (dst, src)
    pieces = _periodic(coarse, fine, lo, hi) if coarse.period else _within(fine, lo, hi)
    return tuple(joined(run_between(src, dst, *piece) for piece in pieces))


def run_between(src: Spans, dst: Spans, start: int, length: int, count: int, step: int) -> Run:
    """The run from the local axis of `src` to that of `dst`, of global indices that both own:
    `count` blocks of `length`, `step` apart, from `start` on.
    """
    src_start, dst_start = src.before(start), dst.before(start)
    if count == 1:
        return Run(1, length, src_start, 0, dst_start, 0)
    src_step = src.before(start + step) - src_start
    dst_step = dst.before(start + step) - dst_start
    if src_step == length == dst_step:
        return Run(1, length * count, src_start, 0, dst_start, 0)
    return Run(count, length, src_start, src_step, dst_start, dst_step)


def joined(runs: Iterable[Run]) -> list[Run]:
    """These runs, in order, where neighbours at a constant distance are merged into one."""
    kept: list[Run] = []
    for run in runs:
        both = _join(kept[-1], run) if kept else None
        if both is None:
            kept.append(run)
        else:
            kept[-1] = both
    return kept


@lru_cache(maxsize=1 << 14)
def _shared(one: Spans, other: Spans) -> int:
    return sum(run.elements for run in _intersect(one, other))


def _blocks_within(
    spans: Spans, lo: int, hi: int
) -> tuple[tuple[int, int] | None, int, int, tuple[int, int] | None]:
    """The blocks of periodic `spans` in [lo, hi), which lies in [spans.start, spans.stop).

    The one that lo cuts, if any; the start of the first whole one; their number; the one that hi
    cuts, if any.
    """
    start, block, period = spans.start, spans.block, spans.period
    first, cut = divmod(lo - start, period)
    head = (lo, min(lo - cut + block, hi)) if 0 < cut < block else None
    first += cut > 0
    last, rest = divmod(hi - start, period)
    full = max(0, last + (rest >= block) - first)
    tail = (start + last * period, hi) if 0 < rest < block and last >= first else None
    return head, start + first * period, full, tail


def _within(fine: Spans, lo: int, hi: int) -> Iterator[_Piece]:
    """The pieces of `fine` in [lo, hi), which lies in [fine.start, fine.stop): at most 3."""
    if fine.period == 0:
        yield lo, hi - lo, 1, 0
        return
    head, first, full, tail = _blocks_within(fine, lo, hi)
    if head:
        yield head[0], head[1] - head[0], 1, 0
    if full:
        yield first, fine.block, full, fine.period if full > 1 else 0
    if tail:
        yield tail[0], tail[1] - tail[0], 1, 0


def _periodic(coarse: Spans, fine: Spans, lo: int, hi: int) -> Iterator[_Piece]:
    """The pieces of both in [lo, hi): those in the coarse blocks of one common period, repeated.

    Only the first and the last coarse block can be cut by lo and hi; they are not repeated.
    """
    head, first, full, tail = _blocks_within(coarse, lo, hi)
    if head:
        yield from _within(fine, *head)
    common = math.lcm(coarse.period, fine.period)
    pattern = common // coarse.period
    for i in range(min(full, pattern)):
        repeats, start = 1 + (full - 1 - i) // pattern, first + i * coarse.period
        for piece in _within(fine, start, start + coarse.block):
            yield from _repeat(piece, repeats, common)
    if tail:
        yield from _within(fine, *tail)


def _repeat(piece: _Piece, repeats: int, common: int) -> Iterator[_Piece]:
    """A piece and its copies at multiples of `common`, in as few pieces as one step allows."""
    lo, length, count, step = piece
    if count == 1:
        yield lo, length, repeats, common
    elif count <= repeats:
        for i in range(count):
            yield lo + i * step, length, repeats, common
    else:
        for i in range(repeats):
            yield lo + i * common, length, count, step


def _join(one: Run, two: Run) -> Run | None:
    """One run of both, where `two` follows `one`; None where there is none."""
    if one.count == two.count == 1:
        src_gap = two.src_start - one.src_start
        dst_gap = two.dst_start - one.dst_start
        if src_gap == dst_gap == one.length:
            return Run(1, one.length + two.length, one.src_start, 0, one.dst_start, 0)
    if one.length != two.length:
        return None
    src_step = two.src_start - one.src_start - (one.count - 1) * one.src_step
    dst_step = two.dst_start - one.dst_start - (one.count - 1) * one.dst_step
    for run in (one, two):
        if run.count > 1 and (run.src_step, run.dst_step) != (src_step, dst_step):
            return None
    count = one.count + two.count
    return Run(count, one.length, one.src_start, src_step, one.dst_start, dst_step)
