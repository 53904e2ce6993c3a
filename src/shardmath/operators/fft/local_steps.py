"""One rank's transforms on a GPU as steps: copies, conversions, and batched FFTs. Pure.

A GPU transforms whole arrays at once, in place or out of place. Bytes and calls are counted to find
the axes that one plan transforms together. Memories are names, and strides are bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from shardmath.arrays import dtypes
from shardmath.base.immutable import Immutable
from shardmath.local.fft import ADJOINTS, COMPLETING, HALVING, Kind, paired
from shardmath.local.plan_many import PlanMany, StridedArray, plan_many
from shardmath.local.trigonometric import SERIES, turns
from shardmath.machine import h200
from shardmath.program.rank_program import Copy, View, packed


class Scale(Immutable):
    """The numbers of `source`, times `factor`, go to `target`, which may be `source`.

    Types differ where one is of half precision and the other float32.
    """

    source: View
    target: View
    factor: float = 1.0

    def __str__(self) -> str:
        into = "" if self.source == self.target else f" to {self.target}"
        return f"scale {self.source} by {self.factor:.6g}{into}"


class LocalFFT(Immutable):
    """A transform along `axes`, by cuFFT. C2R overwrites its source."""

    kind: Kind
    axes: tuple[int, ...]
    source: View
    target: View

    @cached_property
    def plan(self) -> PlanMany:
        """The plan of cuFFT, and its calls."""
        plan = plan_many(self.kind, self.axes, strided(self.source), strided(self.target))
        assert plan is not None, "chosen because there is one"
        return plan

    @property
    def double(self) -> bool:
        """Whether it is in double precision."""
        return "complex128" in (self.source.dtype, self.target.dtype)

    def __str__(self) -> str:
        where = f"in {self.target}"
        if self.source != self.target:
            where = f"from {self.source} to {self.target}"
        calls = len(self.plan.offsets)
        return f"{self.kind} along {self.axes} {where}" + f", {calls} calls" * (calls > 1)


class Turn(Immutable):
    """The numbers of `source` along `axis`, times complex factors, before or after the Fourier
    transform behind a cosine or sine transform.

    Before it `source` is real and `target` complex, and as long as the period: the rest becomes 0.
    After it `source` is complex, and `target` has the real parts, times `factor`.
    """

    kind: Kind
    axis: int
    source: View
    target: View
    factor: float = 1.0

    @cached_property
    def factors(self) -> npt.NDArray[np.complexfloating]:
        """The complex factors, in the precision of the complex numbers."""
        extent = min(view.shape[self.axis] for view in (self.source, self.target))
        before, after = turns(SERIES[self.kind], extent)
        if self.target.dtype.startswith("complex"):
            return before.astype(self.target.dtype)
        return (after * self.factor).astype(self.source.dtype)

    def __str__(self) -> str:
        return f"turn {self.source} along {self.axis} for {self.kind} to {self.target}"


LocalStep = Copy | Scale | LocalFFT | Turn


def local_steps(
    kind: Kind,
    axes: Sequence[int],
    source: View,
    target: View,
    *,
    preserve_input: bool,
    factor: float = 1.0,
) -> list[LocalStep]:
    """The steps of the transform of `source` along `axes`, a real axis last, into `target`.

    These are one array, or do not overlap. `preserve_input`: the source must not be overwritten.
    The output is multiplied by `factor`. Half precision is transformed in float32, and scaled
    before it is rounded. The names of extra memories begin with "pack".
    """
    if source.size == 0 or target.size == 0:
        return []
    if kind in SERIES:
        return _series_steps(kind, axes, source, target, factor)
    before: list[LocalStep] = []
    after: list[LocalStep] = [Scale(target, target, factor)] if factor != 1 else []
    computed = {x.dtype: dtypes.accumulator(x.dtype).name for x in (source, target)}
    if computed[source.dtype] != source.dtype:
        wide = _like("pack wide", source, computed[source.dtype])
        before = [Scale(source, wide)]
        source, preserve_input = wide, False
    if computed[target.dtype] != target.dtype:
        computing = source
        if preserve_input or kind != "C2C":
            computing = _like("pack made", target, computed[target.dtype])
        after = [Scale(computing, target, factor)]
        target = computing
    if kind in COMPLETING:
        steps = _c2r_steps(kind, axes, source, target, preserve_input=preserve_input)
        return [*before, *steps, *after]
    if kind in ADJOINTS:
        after = [*_scaled_pairs(target, axes[-1], source.shape[axes[-1]], 2.0), *after]
        kind = ADJOINTS[kind]
    real = axes[-1] if kind in HALVING else None
    _, groups = _groups(kind, frozenset(axes), real, source, target)
    return [*before, *_group_steps(kind, groups, source, target), *after]


def real_numbers(view: View) -> View:
    """The real numbers that an array consists of."""
    if not view.dtype.startswith("complex"):
        return view
    size = view.itemsize // 2
    shape, strides = (*view.shape, 2), (*view.strides, size)
    return replace(view, shape=shape, strides=strides, dtype=f"float{8 * size}")


def strided(view: View) -> StridedArray:
    """A view, as `plan_many` takes it."""
    return StridedArray(view.shape, view.strides, view.itemsize, view.misalignment)


def _like(memory: str, view: View, dtype: str) -> View:
    """A packed view whose axes have the same order in memory as those of `view`."""
    axes = sorted(range(len(view.shape)), key=lambda axis: -abs(view.strides[axis]))
    return packed(memory, view.shape, dtype, axes)


def _series_steps(
    kind: Kind, axes: Sequence[int], source: View, target: View, factor: float
) -> list[LocalStep]:
    """Cosine or sine transforms, one axis after the other: turn, transform, and turn back."""
    steps: list[LocalStep] = []
    one, two = real_numbers(source), real_numbers(target)
    for axis in axes:
        shape = [*two.shape]
        shape[axis] = SERIES[kind].period(shape[axis])
        order = sorted(range(len(shape)), key=lambda axis: -abs(two.strides[axis]))
        if order[-1] != axis:  # an axis between others would take many calls
            order.remove(axis)
            order.insert(0, axis)
        turned = packed("pack turned", shape, dtypes.of(two.dtype).complex, order)
        last = factor if axis == axes[-1] else 1.0
        steps += [
            Turn(kind, axis, one, turned),
            LocalFFT("C2C", (axis,), turned, turned),
            Turn(kind, axis, turned, two, last),
        ]
        one = two
    return steps


def _scaled_pairs(spectrum: View, axis: int, extent: int, factor: float) -> list[LocalStep]:
    """Scale the elements of a halved spectrum that have conjugates: see `paired`."""
    first, end = paired(extent)
    if first >= end:
        return []
    pairs = spectrum.part(axis, first, end)
    return [Scale(pairs, pairs, factor)]


def _c2r_steps(
    kind: Kind, axes: Sequence[int], source: View, target: View, *, preserve_input: bool
) -> list[LocalStep]:
    """C2R: along the real axis at the end, perhaps with others; before it C2C along the rest.

    The operand of an adjoint is not hermitian along the other axes, so cuFFT must not transform
    these together with the real one.
    """
    own = packed("pack kept", source.shape, source.dtype) if preserve_input else source
    ways = []
    scaled: list[LocalStep] = []
    candidates: Iterable[_Group] = _candidates(frozenset(axes), axes[-1], source)
    if kind in ADJOINTS:
        candidates = [(axes[-1],)]
        scaled = _scaled_pairs(own, axes[-1], target.shape[axes[-1]], 0.5)
    for last in candidates:
        if len(last) > 1 and target.shape[axes[-1]] == 1:
            continue  # no plan can do this
        before = frozenset(axes) - set(last)
        seconds, make = _plan("C2R", last, own, target)
        more, groups = _groups("C2C", before, None, source, own)
        ways.append((seconds + more, groups, make))
    _, groups, make = min(ways, key=lambda way: way[0])
    first: list[LocalStep] = [Copy(source, own)] if preserve_input and not groups else []
    return [*first, *_group_steps("C2C", groups, source, own), *scaled, *make()]


_Group = tuple[int, ...]


def _group_steps(
    kind: Kind, groups: Sequence[_Group], source: View, target: View
) -> list[LocalStep]:
    """The steps of all groups: the first from source to target, the others in place there."""
    steps: list[LocalStep] = []
    for group in groups:
        _, make = _plan(kind, group, source, target)
        steps += make()
        kind, source = "C2C", target
    return steps


def _groups(
    kind: Kind, axes: frozenset[int], real: int | None, source: View, target: View
) -> tuple[float, list[_Group]]:
    """The least time for all axes, and the groups of axes, with one plan each, that take it."""
    known: dict[tuple[frozenset[int], bool], tuple[float, list[_Group]]] = {}

    def best(left: frozenset[int], first: bool) -> tuple[float, list[_Group]]:
        if not left:
            return 0.0, []
        if (left, first) not in known:
            ways = []
            for group in _candidates(left, real if first else None, target):
                here = kind if first else "C2C"
                seconds, _ = _plan(here, group, source if first else target, target)
                more, others = best(left - set(group), False)
                ways.append((seconds + more, [group, *others]))
            known[left, first] = min(ways, key=lambda way: way[0])
        return known[left, first]

    return best(axes, True)


def _candidates(left: frozenset[int], real: int | None, target: View) -> Iterator[_Group]:
    """Groups with the real axis at the end, or else with the fastest one in memory."""
    fast = real if real is not None else min(left, key=lambda a: (abs(target.strides[a]), -a))
    others = sorted(left - {fast})
    for count in (2, 1, 0):
        for more in itertools.combinations(others, count):
            yield (*more, fast)


def _plan(
    kind: Kind, group: _Group, source: View, target: View
) -> tuple[float, Callable[[], list[LocalStep]]]:
    """One plan: its predicted time, and a function that makes its steps."""
    plan = plan_many(kind, group, strided(source), strided(target))
    nbytes = source.size * source.itemsize + target.size * target.itemsize
    # In packed buffers one call transforms everything, but there are two copies.
    packed_seconds = 3 * nbytes / h200.H200.memory + 3 * h200.PLAN_CALL
    if plan is not None:
        direct = max(len(plan.offsets) * h200.PLAN_CALL, nbytes / h200.H200.memory)
        if direct <= packed_seconds:
            return direct, lambda: [LocalFFT(kind, group, source, target)]
    return packed_seconds, lambda: _packed_steps(kind, group, source, target)


def _packed_steps(kind: Kind, group: _Group, source: View, target: View) -> list[LocalStep]:
    axes = [*(axis for axis in range(len(source.shape)) if axis not in group), *group]
    one = packed("pack one", source.shape, source.dtype, axes)
    two = one
    if kind != "C2C":
        two = packed("pack two", target.shape, target.dtype, axes)
    return [Copy(source, one), LocalFFT(kind, group, one, two), Copy(two, target)]
