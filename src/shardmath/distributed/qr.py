"""QR of a matrix whose rows are split over the ranks: panels by a tree, the rest by products.

A panel of columns is factorised in blocks of rows, the leaves of a tree. The triangles that result
are stacked and factorised again, first those of a rank, then those of all ranks. The reflectors of
each stage are then applied to the columns to the right of the panel.

    rank 0   leaf ── R ┐
             leaf ── R ┴ R ┐
    rank 1   leaf ── R ┐   ├── R of the panel, which every rank computes
             leaf ── R ┴ R ┘

R may come from any rows, as long as Q uses the same: a panel takes rows of the rank that has the
most left. So the rows may be split in any way, and no row changes its rank.

GPUs make reflectors slowly, column by column. There, orthonormal columns come from products
(`cholesky_qr`), and reflectors are for what these cannot do: columns that depend on each other, and
the columns that complete Q. The rows of a GPU are one leaf: it needs no cache for long columns.

Source: Demmel, Grigori, Hoemmen, Langou, "Communication-optimal parallel and sequential QR and LU
factorizations", SIAM J. Sci. Comput. 34 (2012). Reflectors are those of LAPACK's geqrt, in the
compact form I - V T V^H of Schreiber and Van Loan (1989).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from shardmath.arrays import library_of
from shardmath.base.integers import slices
from shardmath.collectives import all_gather, all_reduce, broadcast
from shardmath.context.context import DistributedContext
from shardmath.distributed import dense, parts
from shardmath.distributed.cholesky_qr import CholeskyQR, orthonormalised
from shardmath.distributed.dense import reflected
from shardmath.distributed.movement import part_in
from shardmath.geometry import Layout
from shardmath.machine import Machine

_LEAF_BYTES = 2 << 20  # reflectors pass over a leaf many times, so it has to stay in a cache


class Panel(NamedTuple):
    """`width` columns from `first` on, whose rows of R are on rank `owner`.

    The panel has the rows of rank r from `starts[r]` on: those before are rows of R already.
    """

    first: int
    width: int
    owner: int
    starts: tuple[int, ...]


def panels(rows: Sequence[int], columns: int, width: int) -> list[Panel]:
    """The panels, of at most `width` columns, of a matrix with `rows[r]` rows on rank r. Pure.

    The rank that has the most rows left gives those of R, so that all have about as many.
    """
    starts, planned, first = [0] * len(rows), [], 0
    while first < min(columns, sum(rows)):
        left = [count - start for count, start in zip(rows, starts, strict=True)]
        owner = left.index(max(left))
        taken = min(width, columns - first, left[owner])
        planned.append(Panel(first, taken, owner, tuple(starts)))
        starts[owner] += taken
        first += taken
    return planned


class Stage(NamedTuple):
    """Reflectors I - V T V^H on some `rows` of this rank; `everywhere`: on rows of all ranks."""

    rows: tuple[slice, ...]
    v: Any
    t: Any
    everywhere: bool = False


class QR:
    """The factors of a matrix, by reflectors. All functions that return arrays are collective.

    `a` is this rank's rows, an array of `dense.workable`, which are overwritten, and `rows` the
    number that each rank has. `phases` are those of R's diagonal as the reflectors leave it: the R
    returned has a real diagonal that is not negative, which makes the factors of a matrix of full
    rank unique.
    """

    def __init__(
        self, context: DistributedContext, rows: Sequence[int], a: Any, *, complete: bool = False
    ) -> None:
        self.context = context
        self.complete = complete
        self.rows = tuple(rows)
        self.columns = a.shape[1]
        kind = "cpu" if dense.is_on_cores(a) else "cuda"
        self.panels = panels(self.rows, self.columns, Machine(kind, context.hosts).rates.panel)
        self.rank = min(sum(rows), self.columns)
        self.phases = parts.full((self.rank,), 1, a)
        self._a = a
        self._stages: list[list[Stage]] = []
        for panel in self.panels:
            stages, r = self._factorised(panel)
            self._stages.append(stages)
            end = panel.first + panel.width
            self.phases[panel.first : end] = dense.phases(r.diagonal())
            if panel.owner == context.rank:
                start = panel.starts[context.rank]
                a[start : start + panel.width, panel.first : end] = r
            if end < self.columns:
                for stage in stages:
                    self._apply(stage, a[:, end:], adjoint=True)

    def r(self) -> Any:
        """R, on every rank."""
        a = self._a
        for panel, rows in self._own():
            end = panel.first + panel.width
            a[rows, : panel.first] = 0
            a[rows, panel.first :] *= self.phases[panel.first : end, None].conj()
            a[rows, panel.first : end] = dense.upper_triangle(a[rows, panel.first : end])
        return self._top(a)

    def q(self) -> Any:
        """This rank's rows of Q, which has as many columns as R has rows, or is complete."""
        ends = [self.panels[-1].starts[rank] if self.panels else 0 for rank in self._ranks]
        if self.panels:
            ends[self.panels[-1].owner] += self.panels[-1].width
        rest = [count - end for count, end in zip(self.rows, ends, strict=True)]
        width = self.rank + sum(rest) * self.complete
        c = parts.full((len(self._a), width), 0, self._a)
        for panel, rows in self._own():
            end = panel.first + panel.width
            c[rows, panel.first : end] = parts.module_of(c).diag(self.phases[panel.first : end])
        if self.complete:
            own, before = self.context.rank, self.rank + sum(rest[: self.context.rank])
            c[ends[own] :, before : before + rest[own]] = dense.identity(rest[own], c)
        for number in reversed(range(len(self.panels))):
            first = self.panels[number].first  # the columns before are 0 in the rows of this panel
            is_last = number == len(self.panels) - 1 and not self.complete
            for stage in reversed(self._stages[number]):
                self._apply(stage, c[:, first:], adjoint=False, only_top=is_last)
        return c

    def times(self, top: Any) -> Any:
        """This rank's rows of Q @ top, where every rank has `top`, of as many rows as R has."""
        c = parts.full((len(self._a), top.shape[1]), 0, self._a)
        for panel, rows in self._own():
            end = panel.first + panel.width
            c[rows] = self.phases[panel.first : end, None] * top[panel.first : end]
        for number in reversed(range(len(self.panels))):
            only_top = number == len(self.panels) - 1
            for stage in reversed(self._stages[number]):
                self._apply(stage, c, adjoint=False, only_top=only_top)
        return c

    def adjoint_times(self, c: Any) -> tuple[Any, Any]:
        """Q^H @ c of this rank's rows of c, which are overwritten.

        Returns its first rows, as many as R has, on every rank, and this rank's rows below these.
        """
        for stages in self._stages:
            for stage in stages:
                self._apply(stage, c, adjoint=True)
        own = self._own()
        for panel, rows in own:
            c[rows] *= self.phases[panel.first : panel.first + panel.width, None].conj()
        return self._top(c), c[own[-1][1].stop if own else 0 :]

    # -- a panel -----------------------------------------------------------------------------------

    @property
    def _ranks(self) -> range:
        return range(self.context.size)

    def _own(self) -> list[tuple[Panel, slice]]:
        """The panels whose rows of R are of this rank, and which of its rows these are."""
        rank = self.context.rank
        return [
            (panel, slice(panel.starts[rank], panel.starts[rank] + panel.width))
            for panel in self.panels
            if panel.owner == rank
        ]

    def _factorised(self, panel: Panel) -> tuple[list[Stage], Any]:
        """The stages that make a panel a triangle, in order, and the triangle."""
        start, width = panel.starts[self.context.rank], panel.width
        columns = self._a[start:, panel.first : panel.first + width]
        stages, r = tree(columns, start)
        size = self.context.size
        if size == 1:
            return stages, r
        heights = [
            min(count - begin, width) for count, begin in zip(self.rows, panel.starts, strict=True)
        ]
        ends = list(accumulate(heights, initial=0))
        gathered = all_gather(library_of(r).contiguous(r), context=self.context)
        order = sorted(
            self._ranks, key=lambda rank: rank != panel.owner
        )  # R is left in the first one's rows
        stacked = _stacked([gathered[ends[rank] : ends[rank + 1]] for rank in order])
        v, t, r = _same_everywhere(self.context, reflected(stacked))
        own = order.index(self.context.rank)
        before = sum(heights[rank] for rank in order[:own])
        height = heights[self.context.rank]
        part = dense.rows_of_reflectors(v, slice(before, before + height))
        return [*stages, Stage((slice(start, start + height),), part, t, everywhere=True)], r

    def _apply(self, stage: Stage, c: Any, *, adjoint: bool, only_top: bool = False) -> None:
        """Multiply rows of c by a stage's reflectors, or by their adjoint, in place.

        `only_top`: c is 0 below its first rows, as many as there are reflectors.
        """
        rows, v, t, everywhere = stage
        x = c[rows[0]] if len(rows) == 1 else _stacked([c[part] for part in rows])
        known = v.shape[1] if only_top and not everywhere else len(v)
        w = v[:known].conj().T @ x[:known]
        if everywhere:
            w = all_reduce(w, context=self.context)
        w = (t.conj().T if adjoint else t) @ w
        dense.subtract_product(x, v, w)
        if len(rows) > 1:
            ends = accumulate(part.stop - part.start for part in rows)
            for part, end in zip(rows, ends, strict=True):
                c[part] = x[end - (part.stop - part.start) : end]

    def _top(self, c: Any) -> Any:
        """The rows of c that R's rows are, in the order of R, on every rank."""
        held = [panel.first + n for rank in self._ranks for panel in self.panels
                if panel.owner == rank for n in range(panel.width)]  # fmt: skip
        own = sum(panel.width for panel, _ in self._own())  # rows are given from the first on
        gathered = all_gather(c[:own], context=self.context)
        return parts.taken(gathered, np.argsort(held), 0)


def factors_of(
    context: DistributedContext, rows: Sequence[int], a: Any, *, complete: bool = False
) -> QR | CholeskyQR:
    """The factors of a matrix with `rows[r]` rows on rank r, of which `a` has this rank's.
    Collective. With `complete`, Q has as many columns as rows.
    """
    if not (complete or dense.is_on_cores(a)):
        factors = orthonormalised(context, a, sum(rows))
        if factors is not None:
            return factors
    return QR(context, rows, dense.copied(a), complete=complete)


def factorised(a: Any, *, complete: bool = False) -> tuple[Layout, QR | CholeskyQR]:
    """The factors of a matrix, and which rows of it each rank has factorised: its own where `a` is
    split by whole rows, each on one rank, else those of a slab. Collective. With `complete`, Q has
    as many columns as rows.
    """
    rows = a.layout
    held = sum(part[0].length for part in rows.parts)
    if any(axis for axis in rows.partitioned_axes) or held != a.shape[0]:
        rows = Layout.slab(a.shape, a.context.size, axis=0)
    part = dense.workable(part_in(a, rows))
    heights = [along[0].length for along in rows.parts]
    return rows, factors_of(a.context, heights, part, complete=complete)


def _same_everywhere(context: DistributedContext, results: tuple[Any, ...]) -> tuple[Any, ...]:
    """The results that every rank has computed from the same elements. On GPUs, and on several
    hosts, whose processors may differ in the last bit, those of rank 0. Collective.
    """
    if not context.multi_host and all(map(dense.is_on_cores, results)):
        return results
    return tuple(broadcast(library_of(x).contiguous(x), context=context) for x in results)


def alike(name: str, a: Any, compute: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
    """What every rank computes from equal arrays; the same bits on all. Collective. Raises on all
    ranks what one of them raises.
    """
    return _same_everywhere(a.context, a.context.on_all_ranks(name, compute))


def tree(a: Any, start: int) -> tuple[list[Stage], Any]:
    """The stages that make a rank's columns a triangle, and the triangle. Pure.

    The rows of `a` are those from `start` on; the triangle is left in the first of them.
    """
    rows, width = a.shape
    leaf = rows or 1
    if dense.is_on_cores(a):
        leaf = max(2 * width, _LEAF_BYTES // (a.itemsize * max(width, 1)))
    places = [slice(part.start + start, part.stop + start) for part in slices(rows, leaf)]
    heights = [min(place.stop - place.start, width) for place in places]
    stages, triangles = [], []
    for place in places:
        v, t, r = reflected(a[place.start - start : place.stop - start])
        stages.append(Stage((place,), v, t))
        triangles.append(r)
    tops = [slice(p.start, p.start + height) for p, height in zip(places, heights, strict=True)]
    fan = max(2, leaf // max(width, 1))  # triangles one on the other are no higher than a leaf
    while len(tops) > 1:
        above, joined = [], []
        for group in slices(len(tops), fan):
            v, t, r = reflected(_stacked(triangles[group]))
            stages.append(Stage(tuple(tops[group]), v, t))
            above.append(slice(tops[group][0].start, tops[group][0].start + len(r)))
            joined.append(r)
        tops, triangles = above, joined
    return stages, triangles[0] if triangles else a[:0]


def _stacked(rows: Sequence[Any]) -> Any:
    """Rows below rows."""
    return parts.module_of(rows[0]).concatenate(rows)
