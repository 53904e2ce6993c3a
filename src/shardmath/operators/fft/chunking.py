"""Into which parts the transforms of a slab are cut, so that exchanges run beside them.

The first transform is cut along the axis that the operand is split along, the second along the axis
that it is split along after the exchange. Most parts of the first go to the peers whole; the last
ones, the tail, go in as many parts as the second transform has, so that this can begin with the
first of them. Pure.

    transforms   0 | 1 | 2 | 3 |                 a | b | c | d      numbers: along the first axis
    wire             0   | 1   | 2   | 3a 3b 3c 3d                  letters: along the second
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from shardmath.arrays import dtypes
from shardmath.geometry import Layout
from shardmath.operators.fft.local_steps import LocalStep, View, local_steps
from shardmath.operators.fft.problem import Problem
from shardmath.operators.fft.stages import Stage

__all__ = [
    "Cuts",
    "cuts_for",
    "first_parts",
    "second_parts",
    "split_axes",
    "transform_part",
]


@dataclass(frozen=True)
class Cuts:
    """Into which parts the first transform is cut, of these weights, and how many the second.

    `tail`: so many parts of the first go to the peers in parts of the second.
    """

    first: tuple[int, ...]
    second: int
    tail: int = 1


_Table = tuple[tuple[int, Cuts], ...]

# By bytes of a rank's result, from so many on; docs/decisions/chunks-beside-transforms.md. Of many
# parts the first are smaller: the wire begins early, and is busy while the next are made.
_CUTS: _Table = (
    (6 << 30, Cuts((2, 3, *[4] * 14), 8, 4)),
    (2 << 30, Cuts((2, 3, *[4] * 6), 8, 3)),
    (1 << 30, Cuts((1, 2, 3, *[4] * 5), 8, 3)),
    (512 << 20, Cuts((1, 2, 3, *[4] * 5), 4, 3)),
    (256 << 20, Cuts((1, 2, 3, *[4] * 4), 4, 2)),
    (96 << 20, Cuts((1, 2, 3, *[4] * 4), 2, 2)),
    (24 << 20, Cuts((1, 1, 1, 1), 1)),
    (12 << 20, Cuts((1, 1), 1)),
)
# With an exchange back.
_CUTS_BACK: _Table = (
    (6 << 30, Cuts((2, 3, *[4] * 14), 8, 4)),
    (1 << 30, Cuts((2, 3, *[4] * 6), 8, 3)),
    (256 << 20, Cuts((2, 3, *[4] * 6), 4, 3)),
    (96 << 20, Cuts((2, 3, *[4] * 6), 4, 2)),
    (48 << 20, Cuts((1, 1, 1, 1), 2)),
    (12 << 20, Cuts((1, 1), 2)),
)
# Among hosts, where each part costs a barrier of its own.
_CUTS_APART: _Table = ((64 << 20, Cuts((1, 1, 1), 2)),)


def cuts_for(problem: Problem, *, returns: bool, apart: bool = False) -> Cuts | None:
    """The cuts for arrays of that size; None where they are so small that parts do not pay.

    `returns`: there is an exchange after the second transform, too. `apart`: ranks are on several
    hosts.
    """
    size = problem.source.size
    nbytes = problem.target.elements * dtypes.of(problem.result).itemsize // size
    if size == 1:
        return None
    table = _CUTS_APART if apart else _CUTS_BACK if returns else _CUTS
    return next((cuts for least, cuts in table if nbytes >= least), None)


def split_axes(found: Sequence[Stage]) -> tuple[int, ...] | None:
    """The axes along which an array is split before, between and after the exchanges.

    None where the stages are not those that can be cut: a transform, an exchange, a transform and
    perhaps one more exchange, of slabs.
    """
    if len(found) not in (3, 4) or [stage.kind is None for stage in found[:3]] != [0, 1, 0]:
        return None
    if len(found) == 4 and (found[3].kind is not None or found[2].kind != "C2C"):
        return None
    layouts = [found[1].layout, found[1].result]
    if len(found) == 4:
        layouts.append(found[3].result)
    axes = [_slab_axis(layout) for layout in layouts]
    known = tuple(axis for axis in axes if axis is not None)
    if len(known) < len(axes) or any(x == y for x, y in itertools.pairwise(known)):
        return None
    if _slab_axis(found[0].layout) != known[0] or _slab_axis(found[2].result) != known[1]:
        return None
    return known


def _slab_axis(layout: Layout) -> int | None:
    """The one axis along which every rank has a range of its own, if that is how it is split."""
    axes = layout.partitioned_axes
    if len(axes) != 1 or not layout.disjoint():
        return None
    ranges = [layout.spans(rank)[axes[0]] for rank in range(layout.size)]
    return axes[0] if all(spans.count <= 1 for spans in ranges) else None


def transform_part(
    stage: Stage, source: View, target: View, *, keep: bool
) -> tuple[LocalStep, ...]:
    """The steps of a stage's transform for one part of its arrays. `keep`: see `local_steps`."""
    assert stage.kind is not None, "a transform"
    steps = local_steps(stage.kind, stage.axes, source, target, keep=keep, factor=stage.factor)
    return tuple(steps)


def first_parts(extent: int, weights: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges that cover range(extent): one at least, and none empty beside others.

    Of these weights; fewer, and even ones, where there are not so many indices.
    """
    if extent >= 2 * sum(weights):
        return _cut(extent, weights)
    return _cut(extent, [1] * max(1, min(extent // 2, len(weights))))


def second_parts(extent: int, parts: int) -> list[tuple[int, int]]:
    """So many ranges that cover range(extent), some of which may be empty."""
    return _cut(extent, [1] * parts)


def _cut(extent: int, weights: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges as long as the weights say, even ones where there are many indices."""
    grain = 2 if extent >= 2 * len(weights) else 1
    total = sum(weights) * grain
    before = itertools.accumulate(weights[:-1], initial=0)
    ends = [extent * weight // total * grain for weight in before] + [extent]
    return list(itertools.pairwise(ends))
