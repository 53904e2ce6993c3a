"""Communication patterns of strategies for which there is one kernel, or one collective. Pure.

A pattern follows from the layouts alone, and is the same on all ranks.

    kind             A                 B                 D
    all-gather       rows split        columns split     columns split
    reduce-scatter   split along k     split along k     rows split
    all-reduce       split along k     split along k     whole
"""

from __future__ import annotations

from collections.abc import Sequence

from shardmath.base.immutable import Immutable
from shardmath.geometry import Layout, Spans
from shardmath.operators.matmul.strategy import Strategy


class Pattern(Immutable):
    """A strategy as one collective and one product.

    `rows[r]` is how many rows of A rank r contributes to the AllGather, or of D it gets from the
    ReduceScatter. `transposed`: the kernel computes D^T = B^T A^T; with None the order of D
    decides.
    """

    kind: str
    transposed: bool | None
    rows: tuple[int, ...]

    @property
    def adds(self) -> bool:
        """Whether the ranks' products are added up."""
        return self.kind != "all-gather"


def pattern_of(strategy: Strategy) -> Pattern | None:
    """The pattern of a strategy, None where it has none."""
    if strategy.problem.size == 1 or strategy.problem.scaling is not None:
        return None
    return _summed(strategy) if strategy.reduces else gathered_lines(strategy)


def gathered_lines(strategy: Strategy) -> Pattern | None:
    """The pattern AllGather + GEMM: one operand is gathered and nothing else moves. Else None."""
    problem = strategy.problem
    m, n, k = problem.shape
    if strategy.reduces or strategy.moves_result or not _are_whole(strategy.depth, k):
        return None
    if _are_whole(strategy.rows, m) and strategy.b.same_as(problem.b):
        rows = _slabs(problem.a, 0)
        return None if rows is None else Pattern("all-gather", transposed=False, rows=rows)
    if _are_whole(strategy.columns, n) and strategy.a.same_as(problem.a):
        rows = _slabs(problem.b, 1)
        return None if rows is None else Pattern("all-gather", transposed=True, rows=rows)
    return None


def _summed(strategy: Strategy) -> Pattern | None:
    problem = strategy.problem
    m, n, _ = problem.shape
    here = strategy.a.same_as(problem.a) and strategy.b.same_as(problem.b)
    if not here or not _are_whole(strategy.rows, m) or not _are_whole(strategy.columns, n):
        return None
    if problem.d.is_replicated:
        return Pattern("all-reduce", transposed=None, rows=())
    for axis in (0, 1):
        rows = _slabs(problem.d, axis)
        if rows is not None and not strategy.moves_result:
            return Pattern("reduce-scatter", transposed=axis == 1, rows=rows)
    return None


def _are_whole(column: Sequence[Spans], extent: int) -> bool:
    return all(part == Spans.interval(0, extent) for part in column)


def _slabs(layout: Layout, axis: int) -> tuple[int, ...] | None:
    """How many indices of an axis each rank has, if these follow each other in rank order."""
    other = layout.global_shape[1 - axis]
    first, lengths = 0, []
    for part in layout.parts:
        own = part[axis]
        if part[1 - axis].length != other or own.period or (own.length and own.start != first):
            return None
        first += own.length
        lengths.append(own.length)
    return tuple(lengths) if first == layout.global_shape[axis] else None
