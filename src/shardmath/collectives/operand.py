"""Arguments of collectives other than arrays, in normal form: roots, axes, counts, contexts.

What is wrong with them is raised inside `describe`, and so on all ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any

from shardmath.arrays.spec import ArraySpec
from shardmath.context.context import DistributedContext, open_contexts, require_context
from shardmath.errors import CollectiveMismatch, OpTimeout, RankFailure
from shardmath.geometry import Spans

Shape = tuple[int, ...]
ON_GPUS = " on GPUs"  # ends a kind, see `kind_of`
OutputSpec = tuple[str, str, Shape] | None  # kind, dtype and shape of `out`


def context_of(operation: str, context: DistributedContext | None) -> DistributedContext:
    """`context`, or the current one where it is None.

    Raises TypeError for anything else, RuntimeError if there is no current one. If this process has
    only one context, its ranks raise the TypeError, too: it is there that they call `operation`.
    """
    if context is None:
        return require_context()
    if isinstance(context, DistributedContext):
        return context
    wrong = TypeError(f"context is a DistributedContext or None, not {context!r}")
    candidates = open_contexts()
    if len(candidates) == 1:

        def refuse() -> bytes:
            raise wrong

        with suppress(OpTimeout, RankFailure, CollectiveMismatch):  # the ranks called nothing there
            candidates[0].gather(operation, refuse)
    raise wrong


def as_index(what: str, value: Any, bound: int, *, negative: bool = False) -> int:
    """`value` as an index below `bound`; with `negative`, negative ones count from the end."""
    try:
        index = operator.index(value)
    except TypeError:
        raise TypeError(f"{what} is an integer, not {value!r}") from None
    low = -bound if negative else 0
    if isinstance(value, bool) or not low <= index < bound:
        raise ValueError(f"{what} is an integer from {low} to {bound - 1}, not {value!r}")
    return index % bound


def as_axis(axis: Any, ndim: int) -> int:
    """`axis` as an index of one of `ndim` axes, counted from the end if it is negative."""
    if ndim == 0:
        raise ValueError(f"axis={axis!r}: an array of no axes has none; pass x.reshape(1)")
    return as_index("axis", axis, ndim, negative=True)


def as_counts(
    what: str, counts: Sequence[int] | None, size: int, total: int | None
) -> Shape | None:
    """`counts`, one per rank, as a tuple. It has to add up to `total`, if that is known."""
    if counts is None:
        return None
    try:
        numbers = tuple(operator.index(n) for n in counts)
    except TypeError:
        raise TypeError(f"{what} is a sequence of {size} integers, not {counts!r}") from None
    if len(numbers) != size or any(n < 0 for n in numbers):
        raise ValueError(f"{what} holds {size} numbers >= 0, one per rank, not {list(numbers)}")
    if total is not None and sum(numbers) != total:
        raise ValueError(f"{what} {list(numbers)} add up to {sum(numbers)}; the axis has {total}")
    return numbers


def hashable(counts: Sequence[int] | None) -> Sequence[int] | None:
    """Counts as a word by which calls are recognised: a list as a tuple."""
    return tuple(counts) if isinstance(counts, list) else counts


def slab_counts(extent: int, size: int) -> Shape:
    """`extent` divided among `size` ranks as evenly as possible, as a slab is."""
    return tuple(Spans.even(extent, size, rank).length for rank in range(size))


def bounds(counts: Sequence[int]) -> list[int]:
    """Where each part begins, and where the last one ends."""
    return [0, *accumulate(counts)]


def kind_of(spec: ArraySpec) -> str:
    """The library of an array, and whether its memory is on a GPU; equal on all ranks."""
    return spec.library if spec.device == "cpu" else f"{spec.library}{ON_GPUS}"


def require_outputs_fit(
    outputs: Sequence[OutputSpec], libraries: Sequence[str], dtype: str, shapes: Sequence[Shape]
) -> None:
    """Raise ValueError if a rank's `out` is not like its result."""
    for rank, (out, library, shape) in enumerate(zip(outputs, libraries, shapes, strict=True)):
        if out is not None and out != (library, dtype, shape):
            raise ValueError(
                f"rank {rank}: out is a {out[0]} array of {out[1]} {out[2]}; "
                f"the result is a {library} array of {dtype} {shape}"
            )
