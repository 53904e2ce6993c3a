"""Who owns what, without asking for every index: the distinct sets of owners of a layout.

An axis falls into atoms, pieces whose indices all have the same owners along that axis. Atoms
repeat with the common period of the spans: their number follows the pattern, not the extent.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardmath.geometry.spans import Spans

__all__ = ["Atom", "atoms", "owner_sets"]


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

    Yields atoms that cover every index once, those in none of the spans (mask 0) included.
    """
    hard = {0, extent}
    for s in spans:
        hard.update((min(s.start, extent), min(s.stop, extent)))
    marks = sorted(hard)
    for lo, hi in itertools.pairwise(marks):
        yield from _zone(spans, lo, hi)


def _zone(spans: Sequence[Spans], lo: int, hi: int) -> Iterator[Atom]:
    """Atoms of [lo, hi), in which no span starts or stops: each is all, nothing, or periodic."""
    cyclic = [s for s in spans if s.period and s.start <= lo < s.stop]
    common = math.lcm(*(s.period for s in cyclic)) if cyclic else hi - lo
    end = min(hi, lo + common)
    at = lo
    while at < end:
        cuts = [cut for s in cyclic if (cut := s.cut_after(at)) is not None]
        upto = min([end, *cuts])
        mask = sum(1 << j for j, s in enumerate(spans) if at in s)
        length = upto - at
        count, rest = divmod(hi - at, common)
        if rest >= length:
            count, rest = count + 1, 0
        if count:
            yield Atom(at, length, count, common if count > 1 else 0, mask)
        if rest:
            yield Atom(at + count * common, rest, 1, 0, mask)
        at = upto


def owner_sets(
    global_shape: Sequence[int], parts: Sequence[Sequence[Spans]]
) -> Mapping[int, tuple[int, ...]]:
    """Every set of ranks that owns some index, as a bit mask, with one such index for each.

    The mask 0 stands for indices without an owner. Empty when the global shape holds no element.
    """
    if 0 in global_shape:
        return {}
    found: dict[int, tuple[int, ...]] = {(1 << len(parts)) - 1: ()}
    for axis, extent in enumerate(global_shape):
        along: dict[int, int] = {}
        holders: dict[Spans, int] = {}
        for rank, part in enumerate(parts):
            holders[part[axis]] = holders.get(part[axis], 0) | 1 << rank
        ranks = list(holders.values())
        for atom in atoms(list(holders), extent):
            mask = sum(ranks[j] for j in range(len(ranks)) if atom.mask >> j & 1)
            along.setdefault(mask, atom.start)
        met: dict[int, tuple[int, ...]] = {}
        for held, index in found.items():
            for mask, start in along.items():
                met.setdefault(held & mask, (*index, start))
        found = met
    return found
