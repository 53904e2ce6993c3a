"""Elementwise functions: operands that are split alike are combined part by part, with no exchange.

Otherwise the result takes the distribution of one operand: among those of the result's shape, the
one to which the others move with the fewest bytes. Every rank knows all layouts, so all make the
same choice.

    x (n, m) Slab.X  +  y (n, m) Slab.X              part + part
    x (n, m) Slab.X  +  y (m,) Replicated            part + y
    x (n, m) Slab.X  +  y (m,) Slab.X                y, which is smaller, is sent to all ranks
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np

from shardmath.arrays import array_of
from shardmath.distributed import parts
from shardmath.distributed.layouts import distribution_of, interned, layout_of, places, selector
from shardmath.distributed.movement import (
    brought,
    described,
    explained,
    explanation,
    received,
    stays,
)
from shardmath.distributed.state import Distributed
from shardmath.geometry import Distribution, Layout, Spans, unbound

Shape = tuple[int, ...]
D = TypeVar("D", bound=Distributed)


class Operand(NamedTuple):
    """One operand, as all ranks know it. `distribution` is None for boxes, which differ by rank,
    and where the choice does not depend on it.
    """

    layout: Layout
    distribution: Distribution | None
    itemsize: int


class Arrangement(NamedTuple):
    """Where the operands of an elementwise function come together: the layout of the result, the
    number of the operand that has this layout (None if none has), and the layout that each operand
    needs.
    """

    layout: Layout
    chosen: int | None
    needed: tuple[Layout, ...]


def combined(function: Callable[[Any, Any], Any], x: Distributed, y: Any) -> Any:
    """A Python operator on two operands; no exchange where they are split alike."""
    kind = type(y)
    if kind is type(x):
        if (x.layout is y.layout or x.layout == y.layout) and x.context is y.context:
            return x.with_part(function(x.local, y.local))
    elif kind is float or kind is int or kind is complex or kind is bool:
        return x.with_part(function(x.local, y))
    elif not is_operand(y):
        return NotImplemented
    return applied(function, (x, y))


def alike(x: Distributed, operands: Sequence[Any]) -> list[Any] | None:
    """The parts of the operands, if each is split as `x` is or is a Python number; else None."""
    kind, layout, context = type(x), x.layout, x.context
    parts_: list[Any] = []
    for y in operands:
        if type(y) is kind:
            if y.context is not context or not (y.layout is layout or y.layout == layout):
                return None
            parts_.append(y.local)
        elif type(y) in (float, int, complex, bool):
            parts_.append(y)
        else:
            return None
    return parts_


def is_operand(y: Any) -> bool:
    """Whether an array can be combined with `y`."""
    if isinstance(y, Distributed | np.generic | bool | int | float | complex | list | tuple):
        return True
    return parts.is_array(y)


def applied(
    function: Callable[..., Any],
    operands: Sequence[Any],
    *,
    out: Distributed | None = None,
    write: Callable[[Any, Sequence[Any]], Any] | None = None,
) -> Any:
    """`function` of each element of operands that broadcast; a tuple where it has several results.

    Operands are arrays, of which one is distributed at least, numbers, and arrays or lists that are
    the same on all ranks. With `out` the result is in its layout, and `write(part of out, parts)`
    writes it. Raises ValueError where shapes do not broadcast.
    """
    operands = _without_lists(operands)
    arrays = [x for x in operands if isinstance(x, Distributed)]
    first = out if out is not None else arrays[0]
    first.require_same_ranks(*arrays)
    together = alike(first, operands) if out is None else None
    if together is not None:
        return _results(first, function(*together), first.distribution, first.layout)
    shape = broadcast_shape(operands)
    if out is None:
        layout, chosen, needed = _arrangement(shape, _described(shape, arrays))
    elif not broadcasts(shape, out.shape):
        raise ValueError(f"the result has shape {shape}, out has {out.shape}")
    else:
        layout, chosen = out.layout, None
        needed = tuple(needed_layout(layout, x.shape) for x in arrays)
    after = iter(needed)
    locals_ = [
        brought(x, next(after), f"operand {number}")
        if isinstance(x, Distributed)
        else local_part(x, layout, first)
        for number, x in enumerate(operands)
    ]
    if out is not None:
        assert write is not None, "what has an out is written"
        if explanation.get() is None:
            write(out.local, locals_)
        return out
    if chosen is None:
        distribution = distribution_of(layout, first.context.rank)
        assert distribution is not None, "arrangements are chosen so"
    else:
        distribution = arrays[chosen].distribution
    return _results(first, function(*locals_), distribution, layout)


def _results(x: Distributed, made: Any, distribution: Distribution, layout: Layout) -> Any:
    """The array, or the tuple of arrays, whose part on this rank is `made`."""
    if isinstance(made, tuple):
        return tuple(x.like(array_of(one), distribution, layout) for one in made)
    return x.like(array_of(made), distribution, layout)


def _without_lists(operands: Sequence[Any]) -> list[Any]:
    """The operands, with lists and tuples as NumPy's arrays."""
    return [np.asarray(x) if isinstance(x, list | tuple) else x for x in operands]


def broadcast_shape(operands: Sequence[Any]) -> Shape:
    """The shape of the result. Raises ValueError with all shapes where they do not broadcast."""
    shapes = tuple([tuple(getattr(x, "shape", ())) for x in operands])
    try:
        return _broadcast(shapes)
    except ValueError:
        raise ValueError(
            f"operands of global shapes {', '.join(map(str, shapes))} do not broadcast; an array "
            "that is one rank's part becomes one operand by shardmath.array(part, distribution)"
        ) from None


@lru_cache(maxsize=1024)
def _broadcast(shapes: tuple[Shape, ...]) -> Shape:
    return np.broadcast_shapes(*shapes)


def broadcasts(given: Shape, shape: Shape) -> bool:
    """Whether an array of one shape broadcasts to another."""
    pairs = zip(given[::-1], shape[::-1], strict=False)
    return len(given) <= len(shape) and all(one in (1, extent) for one, extent in pairs)


def whole(x: Any, first: D) -> D:
    """The operand `x` as a distributed array; one that is not is the same on all ranks."""
    if isinstance(x, Distributed):
        first.require_same_ranks(x)
        return x  # type: ignore[return-value]
    return first.everywhere(parts.converted(x, first.local))


def all_distributed(arrays: Sequence[Any]) -> list[Any]:
    """The operands as distributed arrays: those that are not are the same on all ranks. Raises
    ValueError if none is distributed.
    """
    for first in arrays:
        if isinstance(first, Distributed):
            return [whole(x, first) for x in arrays]
    raise ValueError("none of the arrays is a DistributedArray: one must be")


def explain(function: Any, *operands: Any, **words: Any) -> str:
    """What a call of `function` would move, where to, and how many bytes. Local.

        print(shardmath.explain(np.add, x, y))
        print(shardmath.explain(np.concatenate, [x, y], axis=1))

    Where later moves depend on the elements, the text ends before them. Raises what the function
    raises; ValueError where operands do not broadcast, TypeError where none is distributed.
    """
    if not isinstance(function, np.ufunc) or function.signature is not None:
        return _explained_call(function, operands, words)
    arrays = [(n, x) for n, x in enumerate(operands) if isinstance(x, Distributed)]
    if not arrays:
        raise TypeError(f"none of the operands of {function.__name__} is distributed: one must be")
    shape = broadcast_shape(_without_lists(operands))
    layout, _, needed = _arrangement(shape, _described(shape, [x for _, x in arrays]))
    name = getattr(function, "__name__", str(function))
    lines = [f"{name}: the result is {layout}"]
    for (number, x), target in zip(arrays, needed, strict=True):
        if target == x.layout:
            lines.append(f"operand {number} stays: {x.layout}")
        elif stays(x.layout, target):
            lines.append(f"operand {number}: {x.layout}, of which each rank takes its part")
        else:
            lines.append(f"operand {number}: {described(x, target)}")
    return "\n".join(lines)


def _explained_call(function: Any, operands: Any, words: Any) -> str:
    """What a function that is not elementwise would exchange."""
    lines, result = explained(lambda: function(*operands, **words))
    name = getattr(function, "__name__", str(function))
    made = [one.layout for one in (result if isinstance(result, tuple) else (result,))
            if isinstance(one, Distributed)]  # fmt: skip
    results = [f"the result is {layout}" for layout in made] or ["the rest shows when it is done"]
    return "\n".join([f"{name}: {', '.join(results)}", *(lines or ["nothing moves"])])


def _described(shape: Shape, arrays: Sequence[Distributed]) -> tuple[Operand, ...]:
    """The operands as all ranks know them. Their distributions count only where none has the shape
    of the result.
    """
    some_has_it = any(x.layout.global_shape == shape for x in arrays)
    return tuple(
        [
            Operand(
                x.layout,
                None if some_has_it or x.distribution.per_rank else unbound(x.distribution),
                x.local.dtype.itemsize,
            )
            for x in arrays
        ]
    )


# -- where operands come together ------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _arrangement(shape: Shape, operands: tuple[Operand, ...]) -> Arrangement:
    """The arrangement in which the fewest bytes change their rank; the first of equal ones."""
    full = [(n, x.layout) for n, x in enumerate(operands) if x.layout.global_shape == shape]
    candidates: list[tuple[int | None, Layout]] = list(full) or _widened(shape, operands)

    def cost(candidate: tuple[int | None, Layout]) -> int:
        needs = [needed_layout(candidate[1], x.layout.global_shape) for x in operands]
        pairs = zip(operands, needs, strict=True)
        return sum(received(x.layout, need, x.itemsize) for x, need in pairs)

    chosen, layout = min(candidates, key=cost)
    needed = tuple(needed_layout(layout, x.layout.global_shape) for x in operands)
    return Arrangement(layout, chosen, needed)


def _widened(shape: Shape, operands: Sequence[Operand]) -> list[tuple[int | None, Layout]]:
    """Candidates for the layout of the result, where no operand has its shape."""
    size = operands[0].layout.size
    candidates: list[tuple[int | None, Layout]] = []
    for number, x in enumerate(operands):
        if x.distribution is not None and x.layout.ndim == len(shape):
            candidates.append((number, layout_of(x.distribution, shape, size)))
    for x in operands:
        held, new = x.layout.global_shape, len(shape) - x.layout.ndim
        columns = [
            None if axis < new or held[axis - new] != extent else x.layout.column(axis - new)
            for axis, extent in enumerate(shape)
        ]
        candidates.append((None, interned(Layout.product(shape, columns, size=size))))
    fits = [one for one in candidates if one[0] is not None or distribution_of(one[1], 0)]
    return fits or [(None, Layout.replicated(shape, size))]


@lru_cache(maxsize=4096)
def needed_layout(layout: Layout, shape: Shape) -> Layout:
    """The layout in which ranks need an operand of `shape` beside a result in `layout`."""
    new = layout.ndim - len(shape)
    if new == 0 and shape == layout.global_shape:
        return layout
    one = [Spans.interval(0, 1)] * layout.size
    columns = [
        one if extent == 1 != layout.global_shape[new + axis] else layout.column(new + axis)
        for axis, extent in enumerate(shape)
    ]
    return interned(Layout.product(shape, columns, size=layout.size))


def local_part(x: Any, layout: Layout, first: Distributed) -> Any:
    """This rank's part of a number, or of an array that is the same on all ranks, beside its part
    of an array in `layout`.
    """
    if not hasattr(x, "shape"):
        return x
    whole_array = parts.converted(x, first.local)
    key = _own_part(layout, tuple(x.shape), first.context.rank)
    return whole_array if key is None else whole_array[key]


@lru_cache(maxsize=1024)
def _own_part(layout: Layout, shape: Shape, rank: int) -> Any:
    """The key of a rank's part in an array of `shape` that it has whole; None for all of it."""
    needed = needed_layout(layout, shape).spans(rank)
    if all(spans.length == extent for spans, extent in zip(needed, shape, strict=True)):
        return None
    along = [places(Spans.interval(0, n), s) for n, s in zip(shape, needed, strict=True)]
    return selector(along)


def where(condition: Any, x: Any, y: Any) -> Any:
    """The elements of `x` where `condition` holds, else those of `y`; broadcast, as numpy.where."""
    return applied(parts.chosen, (condition, x, y))


def clip(x: Any, min: Any = None, max: Any = None) -> Any:
    """Elements limited to `min` and `max`, as numpy.clip; None is no limit."""
    bounds = [one for one in (min, max) if one is not None]
    if not bounds:
        return x.copy()

    def clipped(part: Any, first: Any, second: Any = None) -> Any:
        low, high = (None, first) if min is None else (first, second)
        return parts.module_of(parts.first_array((part, first))).clip(part, low, high)

    return applied(clipped, (x, *bounds))


def round(x: D, decimals: int = 0) -> D:
    """Elements rounded to `decimals`, halves to even, as numpy.round. Local."""
    return x.with_part(parts.rounded(x.local, decimals))


def zeros_like(x: D, dtype: Any = None, *, device: Any = None) -> D:
    """An array of zeros, split as `x`, in its type or another. Local."""
    return full_like(x, 0, dtype)


def ones_like(x: D, dtype: Any = None, *, device: Any = None) -> D:
    """An array of ones, split as `x`, in its type or another. Local."""
    return full_like(x, 1, dtype)


def full_like(x: D, fill_value: Any, dtype: Any = None, *, device: Any = None) -> D:
    """An array of one value, split as `x`, in its type or another. Local."""
    return x.with_part(parts.full(x.local.shape, fill_value, x.local, dtype))


def empty_like(x: D, dtype: Any = None, *, device: Any = None) -> D:
    """An array of undefined elements, split as `x`, in its type or another. Local."""
    return x.with_part(parts.empty(x.local.shape, x.local, dtype))
