"""One rank's transforms on a GPU as steps: copies, conversions, and batched plans.

A GPU transforms whole arrays at once, from one place in memory to another or in place. Which axes
go together is found by counting bytes and calls. Pure: places are names, and strides are bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from shardmath.arrays import dtypes
from shardmath.arrays.spec import packed_strides
from shardmath.local.batches import Batches, Strided, batches
from shardmath.local.fft import Kind
from shardmath.operators.fft.options import WIDE

__all__ = ["Convert", "Copy", "Fourier", "LocalStep", "Scale", "View", "local_steps", "packed"]

_CALL = 4e-6  # seconds that the host needs for one call of a plan
_BANDWIDTH = 4e12  # bytes per second that a GPU reads and writes


@dataclass(frozen=True)
class View:
    """An array in a place: strides in bytes from the element with index 0 along every axis.

    That element is `offset` bytes into the place, and `misfit` is its address modulo 16; places of
    our own begin at multiples of it.
    """

    place: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    misfit: int = 0
    offset: int = 0

    def part(self, axis: int, first: int, last: int) -> View:
        """The indices first, ..., last - 1 of an axis."""
        step = first * self.strides[axis]
        shape = (*self.shape[:axis], last - first, *self.shape[axis + 1 :])
        return replace(
            self, shape=shape, offset=self.offset + step, misfit=(self.misfit + step) % 16
        )

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return dtypes.of(self.dtype).itemsize

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def strided(self) -> Strided:
        """As plans see it."""
        return Strided(self.shape, self.strides, self.itemsize, self.misfit)

    def __str__(self) -> str:
        return f"{self.place} {self.dtype} {self.shape}"


def packed(
    place: str, shape: Sequence[int], dtype: str, axes: Sequence[int] | Literal["C", "F"] = "C"
) -> View:
    """A view without gaps; `axes` are "C", "F", or all axes from the slowest in memory on."""
    fastest_first = axes if isinstance(axes, str) else axes[::-1]
    strides = packed_strides(shape, dtypes.of(dtype).itemsize, fastest_first)
    return View(place, tuple(shape), strides, dtype)


@dataclass(frozen=True)
class Copy:
    """Copy the bits of one array to another of the same shape."""

    source: View
    target: View

    def __str__(self) -> str:
        return f"copy {self.source} to {self.target.place}"


@dataclass(frozen=True)
class Convert:
    """Turn halves into single precision, or numbers times `factor` into halves."""

    source: View
    target: View
    factor: float = 1.0

    def __str__(self) -> str:
        times = f" times {self.factor:.6g}" if self.factor != 1 else ""
        return f"convert {self.source}{times} to {self.target}"


@dataclass(frozen=True)
class Scale:
    """Multiply an array by a number."""

    target: View
    factor: float

    def __str__(self) -> str:
        return f"scale {self.target} by {self.factor:.6g}"


@dataclass(frozen=True)
class Fourier:
    """Transform along `axes`; from complex to real the source is lost."""

    kind: Kind
    axes: tuple[int, ...]
    source: View
    target: View

    @cached_property
    def batches(self) -> Batches:
        """The plan and its calls."""
        found = batches(self.kind, self.axes, self.source.strided, self.target.strided)
        assert found is not None, "chosen because there are"
        return found

    def __str__(self) -> str:
        where = f"in {self.target}"
        if self.source != self.target:
            where = f"from {self.source} to {self.target}"
        calls = len(self.batches.offsets)
        return f"{self.kind} along {self.axes} {where}" + f", {calls} calls" * (calls > 1)


LocalStep = Copy | Convert | Scale | Fourier


def local_steps(
    kind: Kind,
    axes: Sequence[int],
    source: View,
    target: View,
    *,
    keep: bool,
    factor: float = 1.0,
) -> list[LocalStep]:
    """The transform of `source` along `axes`, of which a real one is the last, into `target`.

    They are the same place, with the same strides, or do not overlap. `keep`: the source must stay
    as it is. What is made is multiplied by `factor`. Halves are transformed in single precision,
    and scaled before they are rounded. Extra places that the steps use have names that begin with
    "pack".
    """
    if source.size == 0 or target.size == 0:
        return []
    before: list[LocalStep] = []
    after: list[LocalStep] = [Scale(target, factor)] if factor != 1 else []
    if source.dtype in WIDE:
        wide = _like("pack wide", source, WIDE[source.dtype])
        before = [Convert(source, wide)]
        source, keep = wide, False
    if target.dtype in WIDE:
        made = source
        if keep or kind != "C2C":
            made = _like("pack made", target, WIDE[target.dtype])
        after = [Convert(made, target, factor)]
        target = made
    if kind == "C2R":
        return [*before, *_completing(axes, source, target, keep=keep), *after]
    real = axes[-1] if kind == "R2C" else None
    _, groups = _groups(kind, frozenset(axes), real, source, target)
    return [*before, *_performed(kind, groups, source, target), *after]


def _like(place: str, view: View, dtype: str) -> View:
    """A packed view whose axes lie in memory in the order that those of `view` have."""
    axes = sorted(range(len(view.shape)), key=lambda axis: -abs(view.strides[axis]))
    return packed(place, view.shape, dtype, axes)


def _completing(axes: Sequence[int], source: View, target: View, *, keep: bool) -> list[LocalStep]:
    """From complex to real: the real axis, and perhaps some with it, after all others."""
    own = packed("pack kept", source.shape, source.dtype) if keep else source
    found = []
    for last in _candidates(frozenset(axes), axes[-1], source):
        if len(last) > 1 and target.shape[axes[-1]] == 1:
            continue  # which no plan can do
        before = frozenset(axes) - set(last)
        seconds, make = _one("C2R", last, own, target)
        more, groups = _groups("C2C", before, None, source, own)
        found.append((seconds + more, groups, make))
    _, groups, make = min(found, key=lambda each: each[0])
    first: list[LocalStep] = [Copy(source, own)] if keep and not groups else []
    return [*first, *_performed("C2C", groups, source, own), *make()]


_Group = tuple[int, ...]


def _performed(kind: Kind, groups: Sequence[_Group], source: View, target: View) -> list[LocalStep]:
    """The first group takes the source to the target, the others follow there."""
    steps: list[LocalStep] = []
    for group in groups:
        _, make = _one(kind, group, source, target)
        steps += make()
        kind, source = "C2C", target
    return steps


def _groups(
    kind: Kind, axes: frozenset[int], real: int | None, source: View, target: View
) -> tuple[float, list[_Group]]:
    """The axes in groups of one plan each, such that all takes the least time; and that time."""
    known: dict[tuple[frozenset[int], bool], tuple[float, list[_Group]]] = {}

    def best(left: frozenset[int], first: bool) -> tuple[float, list[_Group]]:
        if not left:
            return 0.0, []
        if (left, first) not in known:
            found = []
            for group in _candidates(left, real if first else None, target):
                here = kind if first else "C2C"
                seconds, _ = _one(here, group, source if first else target, target)
                more, others = best(left - set(group), False)
                found.append((seconds + more, [group, *others]))
            known[left, first] = min(found, key=lambda each: each[0])
        return known[left, first]

    return best(axes, True)


def _candidates(left: frozenset[int], real: int | None, target: View) -> Iterator[_Group]:
    """Groups that hold the real axis, last, or else the fastest in memory."""
    fast = real if real is not None else min(left, key=lambda a: (abs(target.strides[a]), -a))
    others = sorted(left - {fast})
    for count in (2, 1, 0):
        for more in itertools.combinations(others, count):
            yield (*more, fast)


def _one(
    kind: Kind, group: _Group, source: View, target: View
) -> tuple[float, Callable[[], list[LocalStep]]]:
    """One plan: the predicted time, and what makes its steps."""
    found = batches(kind, group, source.strided, target.strided)
    nbytes = source.size * source.itemsize + target.size * target.itemsize
    # In memory of its own the transform is dense, but goes there and back.
    around = 3 * nbytes / _BANDWIDTH + 3 * _CALL
    if found is not None:
        direct = max(len(found.offsets) * _CALL, nbytes / _BANDWIDTH)
        if direct <= around:
            return direct, lambda: [Fourier(kind, group, source, target)]
    return around, lambda: _packed_steps(kind, group, source, target)


def _packed_steps(kind: Kind, group: _Group, source: View, target: View) -> list[LocalStep]:
    axes = [*(axis for axis in range(len(source.shape)) if axis not in group), *group]
    one = packed("pack one", source.shape, source.dtype, axes)
    two = one
    if kind != "C2C":
        two = packed("pack two", target.shape, target.dtype, axes)
    return [Copy(source, one), Fourier(kind, group, one, two), Copy(two, target)]
