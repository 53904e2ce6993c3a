"""The spec of an array, which ranks compare: all that is known without touching its elements.

A spec is plain data: it holds no reference to the array, prints in one line, and means the same for
every library.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import product
from math import prod
from typing import Literal

from shardmath.base.immutable import Immutable

Order = Literal["C", "F", "both", "strided"]
Packed = Literal["C", "F"]  # the order of an array without gaps


class ArraySpec(Immutable, hashes_once=True):
    """An array's library, dtype name, shape, strides in elements, device, and bytes per element.

    `library` is the name that `library_named` takes; `device` is "cpu" or like "cuda:0".
    """

    library: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: str
    itemsize: int

    @cached_property
    def space(self) -> str:
        """The kind of memory, "cpu" or "cuda", which is equal on all ranks: devices need not be."""
        return self.device.partition(":")[0]

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @cached_property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all elements, without gaps between them."""
        return self.size * self.itemsize

    @cached_property
    def span(self) -> tuple[int, int]:
        """The first byte and the one behind the last, counted from the element (0, 0, ...).

        (0, 0) where there are no elements.
        """
        strides = [stride * self.itemsize for stride in self.strides]
        return byte_span(self.shape, strides, self.itemsize)

    @cached_property
    def order(self) -> Order:
        """How the elements lie in memory; see `order_of`."""
        return order_of(self.shape, self.strides)

    @cached_property
    def overlaps(self) -> bool:
        """Whether two indices surely share an element; see `overlaps`."""
        return overlaps(self.shape, self.strides)

    def __str__(self) -> str:
        return f"{self.library} {self.dtype} {self.shape} order {self.order} on {self.device}"


def order_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> Order:
    """Whether `strides`, in elements, are those of a gap-free array: "C", "F", "both" or "strided".

    Axes of extent 1 are ignored, since no step is taken along them. An array with no elements, one
    element, or one axis longer than 1 and contiguous, is "both".
    """
    if 0 in shape:
        return "both"
    axes = [(extent, stride) for extent, stride in zip(shape, strides, strict=True) if extent != 1]
    is_c, is_f = _packed(reversed(axes)), _packed(axes)
    if is_c and is_f:
        return "both"
    return "C" if is_c else "F" if is_f else "strided"


def byte_span(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[int, int]:
    """See `ArraySpec.span`; `strides` are bytes."""
    if 0 in shape:
        return 0, 0
    reach = [(n - 1) * step for n, step in zip(shape, strides, strict=True)]
    low = sum(step for step in reach if step < 0)
    return low, sum(step for step in reach if step > 0) + itemsize


def overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two indices surely share an element: an axis longer than 1 takes no step."""
    return 0 not in shape and any(
        extent > 1 and stride == 0 for extent, stride in zip(shape, strides, strict=True)
    )


def packed_strides(
    shape: Sequence[int], step: int = 1, axes: Sequence[int] | Packed = "C"
) -> tuple[int, ...]:
    """The strides of an array without gaps, whose elements are `step` apart.

    `axes` are "C", "F", or all axes from the fastest on.
    """
    if isinstance(axes, str):
        axes = range(len(shape)) if axes == "F" else range(len(shape))[::-1]
    strides = [step] * len(shape)
    for axis in axes:
        strides[axis] = step
        step *= max(shape[axis], 1)
    return tuple(strides)


Dimension = tuple[int, int, int]  # extent, stride in one array, stride in another


def coalesced(dimensions: Iterable[Dimension]) -> list[Dimension]:
    """These dimensions merged into as few as address the same pairs of elements, fastest first."""
    kept: list[Dimension] = []
    for extent, one, two in dimensions:
        if extent == 1:
            continue
        if kept and (one, two) == (kept[-1][0] * kept[-1][1], kept[-1][0] * kept[-1][2]):
            kept[-1] = (kept[-1][0] * extent, *kept[-1][1:])
        else:
            kept.append((extent, one, two))
    return kept


def offsets(dimensions: Sequence[Dimension]) -> Iterator[tuple[int, int]]:
    """How far each element lies from the first, in either array; the last dimension is fastest."""
    for index in product(*(range(extent) for extent, _, _ in dimensions)):
        pairs = list(zip(index, dimensions, strict=True))
        yield sum(i * one for i, (_, one, _) in pairs), sum(i * two for i, (_, _, two) in pairs)


def _packed(axes: Iterable[tuple[int, int]]) -> bool:
    expected = 1
    for extent, stride in axes:
        if stride != expected:
            return False
        expected *= extent
    return True
