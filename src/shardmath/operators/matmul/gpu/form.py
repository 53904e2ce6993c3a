"""The forms of strategies for which there is one kernel: pure.

A form is seen from the layouts alone, so it is the same on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardmath.geometry import Layout, Spans
from shardmath.local.epilog import MatmulEpilog
from shardmath.operators.matmul.strategy import Strategy

__all__ = ["Form", "form_of"]


@dataclass(frozen=True)
class Form:
    """What a strategy is, seen as one kernel. `turned`: of the transposes, B^T A^T = D^T."""

    kind: str  # "all-gather"
    turned: bool
    rows: tuple[int, ...]  # by rank: of A, which are gathered


def form_of(strategy: Strategy) -> Form | None:
    """The form that a strategy has, the same on all ranks; None where there is no kernel for it."""
    problem = strategy.problem
    if problem.size == 1 or problem.epilog is not MatmulEpilog.DEFAULT:
        return None
    if strategy.reduces or strategy.moves_result:
        return None
    m, n, k = problem.shape
    whole = [Spans.interval(0, extent) for extent in (m, n, k)]
    if any(part != whole[2] for part in strategy.depth):
        return None
    if all(part == whole[0] for part in strategy.rows) and strategy.b.same_as(problem.b):
        rows = _slabs(problem.a, 0)
        return None if rows is None else Form("all-gather", turned=False, rows=rows)
    if all(part == whole[1] for part in strategy.columns) and strategy.a.same_as(problem.a):
        rows = _slabs(problem.b, 1)
        return None if rows is None else Form("all-gather", turned=True, rows=rows)
    return None


def _slabs(layout: Layout, axis: int) -> tuple[int, ...] | None:
    """How many indices of an axis each rank has, where they follow each other in rank order."""
    other = layout.global_shape[1 - axis]
    at, lengths = 0, []
    for part in layout.parts:
        own = part[axis]
        if part[1 - axis].length != other or own.period or (own.length and own.start != at):
            return None
        at += own.length
        lengths.append(own.length)
    return tuple(lengths) if at == layout.global_shape[axis] else None
