"""The distinct sets of ranks that own elements of a layout, found without visiting every index.

An axis is divided into atoms, pieces whose indices all have the same owners along that axis. Atoms
repeat with the common period of the spans, so their number depends on the pattern, not the extent.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardmath.geometry.spans import Spans


@dataclass(frozen=True, slots=True)
class Atom:
    """`count` blocks of `length` indices at `start + i * step`; bit j of `mask`: in `spans[j]`."""

    start: int
    length: int
    count: int
    step: int
    mask: int


def atoms(spans: Sequence[Spans], extent: int) -> Iterator[Atom]:
    """Split the indices 0, ..., extent - 1 by which of `spans` hold them.

    The atoms cover every index once; those of mask 0 are in none of the spans.
    """
    turns: dict[int, int] = {0: 0, extent: 0}  # which spans start or stop there
    for j, s in enumerate(spans):
        for mark in (min(s.start, extent), min(s.stop, extent)):
            turns[mark] = turns.get(mark, 0) ^ 1 << j
    held = 0
    for lo, hi in itertools.pairwise(sorted(turns)):
        held ^= turns[lo]
        yield from _zone(spans, held, lo, hi)


def _zone(spans: Sequence[Spans], held: int, lo: int, hi: int) -> Iterator[Atom]:
    """Atoms of [lo, hi), in which no span starts or stops.

    The spans of `held` cover all of it, without gaps or periodically; the others none of it.
    """
    cyclic = [j for j in bits(held) if spans[j].period]
    if not cyclic:
        yield Atom(lo, hi - lo, 1, 0, held)
        return
    common = math.lcm(*(spans[j].period for j in cyclic))
    end = min(hi, lo + common)
    mask = held - sum(1 << j for j in cyclic if lo not in spans[j])
    cuts = [(cut, j) for j in cyclic if (cut := spans[j].cut_after(lo)) is not None]
    heapq.heapify(cuts)
    start = lo
    while start < end:
        upto = min(end, cuts[0][0]) if cuts else end
        length = upto - start
        count, rest = divmod(hi - start, common)
        if rest >= length:
            count, rest = count + 1, 0
        if count:
            yield Atom(start, length, count, common if count > 1 else 0, mask)
        if rest:
            yield Atom(start + count * common, rest, 1, 0, mask)
        start = upto
        while cuts and cuts[0][0] == start < end:  # where a block of span j starts or ends
            j = cuts[0][1]
            mask ^= 1 << j
            following = spans[j].cut_after(start)
            assert following is not None, "no span stops within a zone"
            heapq.heapreplace(cuts, (following, j))


def bits(mask: int) -> Iterator[int]:
    """The bits that are set, ascending."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def owner_sets(
    global_shape: Sequence[int], parts: Sequence[Sequence[Spans]]
) -> Mapping[int, tuple[int, ...]]:
    """Every set of ranks that owns some index, as a bit mask, with one such index.

    The mask 0 means that an index has no owner. Empty when the global shape has no elements.
    """
    if 0 in global_shape:
        return {}
    sets: dict[int, tuple[int, ...]] = {(1 << len(parts)) - 1: ()}
    for axis, extent in enumerate(global_shape):
        along: dict[int, int] = {}
        holders: dict[Spans, int] = {}
        for rank, part in enumerate(parts):
            holders[part[axis]] = holders.get(part[axis], 0) | 1 << rank
        ranks = list(holders.values())
        for atom in atoms(list(holders), extent):
            mask = sum(ranks[j] for j in bits(atom.mask))
            along.setdefault(mask, atom.start)
        met: dict[int, tuple[int, ...]] = {}
        for held, index in sets.items():
            for mask, start in along.items():
                met.setdefault(held & mask, (*index, start))
        sets = met
    return sets
