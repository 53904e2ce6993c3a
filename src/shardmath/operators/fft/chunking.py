"""Into which parts the transforms of a slab are cut, so that exchanges overlap with them.

The first transform is cut along the axis along which the operand is split, the second along the
axis along which the array is split after the exchange. Most parts of the first go to the peers
whole; the last ones, the tail, go in as many parts as the second transform has, so that this can
begin with the first of them. Pure.

    transforms   0 | 1 | 2 | 3 |                 a | b | c | d      numbers: along the first axis
    links            0   | 1   | 2   | 3a 3b 3c 3d                  letters: along the second
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from shardmath.arrays import dtypes
from shardmath.base.immutable import Immutable
from shardmath.geometry import Layout
from shardmath.operators.fft.problem import Problem
from shardmath.operators.fft.stages import Stage


class Chunking(Immutable):
    """The weights of the parts of the first transform, and the number of parts of the second.

    `tail`: so many of the first parts go to the peers in parts of the second.
    """

    first: tuple[int, ...]
    second: int
    tail: int = 1


_BySize = tuple[tuple[int, Chunking], ...]

# By bytes of a rank's result, from so many on: docs/notebook/chunked-exchanges.md. Of many
# parts the first are smaller: the links begin early, and are busy during the next transforms.
_ONE_EXCHANGE: _BySize = (
    (6 << 30, Chunking((2, 3, *[4] * 14), 8, 4)),
    (2 << 30, Chunking((2, 3, *[4] * 6), 8, 3)),
    (1 << 30, Chunking((1, 2, 3, *[4] * 5), 8, 3)),
    (512 << 20, Chunking((1, 2, 3, *[4] * 5), 4, 3)),
    (256 << 20, Chunking((1, 2, 3, *[4] * 4), 4, 2)),
    (96 << 20, Chunking((1, 2, 3, *[4] * 4), 2, 2)),
    (24 << 20, Chunking((1, 1, 1, 1), 1)),
    (12 << 20, Chunking((1, 1), 1)),
)
_TWO_EXCHANGES: _BySize = (
    (6 << 30, Chunking((2, 3, *[4] * 14), 8, 4)),
    (1 << 30, Chunking((2, 3, *[4] * 6), 8, 3)),
    (256 << 20, Chunking((2, 3, *[4] * 6), 4, 3)),
    (96 << 20, Chunking((2, 3, *[4] * 6), 4, 2)),
    (48 << 20, Chunking((1, 1, 1, 1), 2)),
    (12 << 20, Chunking((1, 1), 2)),
)
# Each part costs a barrier of its own.
_MULTI_HOST: _BySize = ((64 << 20, Chunking((1, 1, 1), 2)),)


def chunking_for(
    problem: Problem, *, two_exchanges: bool, multi_host: bool = False
) -> Chunking | None:
    """The chunking of arrays of that size; None where they are so small that parts do not pay.

    `two_exchanges`: another exchange follows the second transform. `multi_host`: ranks are on
    several hosts.
    """
    size = problem.source.size
    nbytes = problem.target.elements * dtypes.of(problem.result).itemsize // size
    if size == 1:
        return None
    table = _MULTI_HOST if multi_host else _TWO_EXCHANGES if two_exchanges else _ONE_EXCHANGE
    return next((chunking for least, chunking in table if nbytes >= least), None)


def split_axes(stages: Sequence[Stage]) -> tuple[int, ...] | None:
    """The axes along which an array is split before, between and after the exchanges.

    None for stages that cannot be cut. Those that can are a transform, an exchange, a transform and
    perhaps another exchange, of slabs.
    """
    if len(stages) not in (3, 4) or [stage.kind is None for stage in stages[:3]] != [0, 1, 0]:
        return None
    if len(stages) == 4 and (stages[3].kind is not None or stages[2].kind != "C2C"):
        return None
    layouts = [stages[1].layout, stages[1].result]
    if len(stages) == 4:
        layouts.append(stages[3].result)
    axes = [_split_axis(layout) for layout in layouts]
    known = tuple(axis for axis in axes if axis is not None)
    if len(known) < len(axes) or any(x == y for x, y in itertools.pairwise(known)):
        return None
    if _split_axis(stages[0].layout) != known[0] or _split_axis(stages[2].result) != known[1]:
        return None
    return known


def _split_axis(layout: Layout) -> int | None:
    """The axis of a slab: the only one that is split, into a range for each rank."""
    axes = layout.partitioned_axes
    if len(axes) != 1 or not layout.disjoint():
        return None
    ranges = [layout.spans(rank)[axes[0]] for rank in range(layout.size)]
    return axes[0] if all(spans.count <= 1 for spans in ranges) else None


def first_parts(extent: int, weights: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges of these weights that cover range(extent): one at least, and none empty among several.

    Fewer and even ones where there are not so many indices.
    """
    if extent >= 2 * sum(weights):
        return _ranges(extent, weights)
    return _ranges(extent, [1] * max(1, min(extent // 2, len(weights))))


def second_parts(extent: int, parts: int) -> list[tuple[int, int]]:
    """Ranges, `parts` of them, that cover range(extent); some may be empty."""
    return _ranges(extent, [1] * parts)


def _ranges(extent: int, weights: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges in proportion to the weights, at even bounds where there are many indices."""
    grain = 2 if extent >= 2 * len(weights) else 1
    total = sum(weights) * grain
    before = itertools.accumulate(weights[:-1], initial=0)
    ends = [extent * weight // total * grain for weight in before] + [extent]
    return list(itertools.pairwise(ends))
