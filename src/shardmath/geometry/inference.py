"""The global shape of an array, from what each rank holds.

Every rank can run this on the gathered shapes, and gets the same shape or the same error, which
names the rank that differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shardmath.errors import BindDistributionError
from shardmath.geometry.distribution import Distribution
from shardmath.geometry.distributions import Box
from shardmath.geometry.integers import integers

__all__ = ["check_alike", "infer_global_shape"]


def infer_global_shape(
    distributions: Sequence[Distribution], local_shapes: Sequence[Sequence[int]]
) -> tuple[int, ...]:
    """The global shape of which `local_shapes` are the parts; both have one entry per rank.

    Raises BindDistributionError when the ranks hold different distributions, or when a local shape
    is not what the distribution gives its rank; the message has the given and the expected one.
    """
    if not distributions or len(distributions) != len(local_shapes):
        raise BindDistributionError(
            f"{len(distributions)} distributions and {len(local_shapes)} local shapes: "
            "give one of each per rank"
        )
    check_alike(distributions)
    locals_ = [
        integers(shape, f"rank {rank}: local shape", least=0)
        for rank, shape in enumerate(local_shapes)
    ]
    _check_ndim(distributions, locals_)
    held = distributions[0].binding
    if held is not None:
        shape = held.global_shape
    elif all(isinstance(d, Box) for d in distributions):
        shape = _from_boxes([d for d in distributions if isinstance(d, Box)])
    else:
        shape = _from_places(distributions, locals_)
    size = len(locals_)
    for rank, (distribution, given) in enumerate(zip(distributions, locals_, strict=True)):
        part = distribution.part(rank, shape, size=size)
        expected = tuple(s.length for s in part)
        if given != expected:
            raise BindDistributionError(
                f"rank {rank}: local shape {given}, expected {expected} of the global shape "
                f"{shape} by {distribution!r}; local shapes by rank: {_list(locals_)}"
            )
    return shape


def check_alike(distributions: Sequence[Distribution]) -> None:
    """Raise BindDistributionError, naming the rank, unless all ranks mean the same distribution.

    Boxes need not be equal. Where ranks differ, the one that most ranks hold is taken for right.
    """
    kinds: list[list[int]] = []
    for rank, distribution in enumerate(distributions):
        for ranks in kinds:
            if distribution.alike(distributions[ranks[0]]):
                ranks.append(rank)
                break
        else:
            kinds.append([rank])
    if len(kinds) > 1:
        right = max(kinds, key=len)
        wrong = min(rank for ranks in kinds if ranks is not right for rank in ranks)
        raise BindDistributionError(
            f"rank {wrong}: {distributions[wrong]!r}, but rank {right[0]} has "
            f"{distributions[right[0]]!r}; all ranks must give the same distribution"
        )


def _check_ndim(distributions: Sequence[Distribution], shapes: Sequence[tuple[int, ...]]) -> None:
    known = [d.ndim for d in distributions if d.ndim is not None]
    ndim = known[0] if known else _commonest([len(shape) for shape in shapes])
    for rank, shape in enumerate(shapes):
        if len(shape) != ndim:
            raise BindDistributionError(
                f"rank {rank}: local shape {shape} has ndim {len(shape)}, expected {ndim}"
            )


def _from_boxes(boxes: Sequence[Box]) -> tuple[int, ...]:
    return tuple(max(extents) for extents in zip(*(box.upper for box in boxes), strict=True))


def _from_places(
    distributions: Sequence[Distribution], shapes: Sequence[tuple[int, ...]]
) -> tuple[int, ...]:
    """Along each axis the sum over its parts, each as long as most ranks that hold it say."""
    size, ndim = len(shapes), len(shapes[0])
    first = distributions[0]
    first._check((0,) * ndim, size)
    places = [first._place(rank, ndim, size) for rank in range(size)]
    extents = []
    for axis in range(ndim):
        said: dict[int, list[int]] = {}
        for rank, place in enumerate(places):
            said.setdefault(place[axis][0], []).append(shapes[rank][axis])
        extents.append(sum(_commonest(lengths) for lengths in said.values()))
    return tuple(extents)


def _commonest(values: Sequence[int]) -> int:
    return Counter(values).most_common(1)[0][0]


def _list(shapes: Sequence[tuple[int, ...]]) -> str:
    shown = ", ".join(str(shape) for shape in shapes[:8])
    return shown + (", ..." if len(shapes) > 8 else "")
