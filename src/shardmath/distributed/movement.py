"""Moves between layouts that operations on arrays need, and whether they are allowed.

Operands that are split alike never move. Otherwise every rank computes from the layouts what moves,
so all agree without asking; `communication` says whether that is allowed. What a caller asks for by
name (`to`, `numpy`, a reduction, a product) is always allowed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar, Token
from functools import lru_cache
from typing import Any, Self, TypeVar

import numpy as np

from shardmath.arrays import array_of
from shardmath.arrays.base import HostArray
from shardmath.base import current
from shardmath.base.caller import caller_place
from shardmath.base.collective_call import collective_call
from shardmath.call.agreement import raise_on_all_ranks
from shardmath.call.driver import call
from shardmath.context.agreement import require_equal
from shardmath.context.context import DistributedContext
from shardmath.distributed import parts
from shardmath.distributed.layouts import distribution_of, layout_of, places, selector
from shardmath.distributed.state import Distributed
from shardmath.errors import BindDistributionError
from shardmath.geometry import (
    Distribution,
    Layout,
    Pattern,
    Slab,
    Spans,
    bytes_received,
    classify,
    unbound,
)
from shardmath.operators.layouts import bind_layout
from shardmath.operators.redistribute.api import redistribute
from shardmath.operators.redistribute.operation import Redistribution
from shardmath.program.performing import Arguments, Names

D = TypeVar("D", bound=Distributed)

_MODES = ("forbid", "warn", "allow")
# The lines of the explanation, while a call is only explained; None while calls are made.
explanation: ContextVar[list[str] | None] = ContextVar("shardmath_explanation", default=None)
_mode: ContextVar[str] = ContextVar("shardmath_communication", default="allow")


class communication:  # noqa: N801  (it reads as a statement)
    """Set whether operations on arrays may move operands that are not split alike. Local.

        shardmath.communication("forbid")           # from now on, in this thread
        with shardmath.communication("warn"): ...   # until the end of the block

    "forbid" raises RuntimeError on all ranks before anything moves; "warn" issues a UserWarning
    that names the bytes; "allow", the default, does neither. All ranks must set the same. Raises
    ValueError for another mode.
    """

    def __init__(self, mode: str) -> None:
        if mode not in _MODES:
            raise ValueError(f"communication is one of {', '.join(_MODES)}, not {mode!r}")
        self._before: Token[str] = _mode.set(mode)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        _mode.reset(self._before)


class Explained(Exception):
    """Ends the explanation of a call, as nothing more is known before the call is made."""


def explained(call: Callable[[], Any]) -> tuple[list[str], Any]:
    """What `call` would exchange, in lines, and its result, with zeros for elements that would have
    moved; None if the explanation ends early. Local.
    """
    lines: list[str] = []
    before = explanation.set(lines)
    try:
        return lines, call()
    except Explained:
        return lines, None
    finally:
        explanation.reset(before)


def in_place_of(
    describe: Callable[[], str], x: Distributed, layout: Layout, dtype: Any = None
) -> Any:
    """Zeros for the part that an exchange would give, where a call is only explained; otherwise
    None.
    """
    lines = explanation.get()
    if lines is None:
        return None
    lines.append(describe())
    return parts.full(layout.local_shape(x.context.rank), 0, x.local, dtype)


def end_explanation(describe: Callable[[], str]) -> None:
    """End the explanation, if a call is only explained: the rest depends on elements."""
    lines = explanation.get()
    if lines is not None:
        lines.append(describe())
        raise Explained


def permit(describe: Callable[[], str]) -> None:
    """Raise RuntimeError, or warn, if the thread's mode asks for it; `describe` says what moves."""
    end_explanation(describe)
    mode = _mode.get()
    if mode == "allow":
        return
    if mode == "forbid":
        raise RuntimeError(
            f'{describe()}, and communication("forbid") is in force: bring the operands together '
            "by x.to(distribution), or allow it"
        )
    file, line = caller_place()
    warnings.warn_explicit(describe(), UserWarning, file, line)


class Rearrangement(Redistribution):
    """A redistribution between any two layouts, including those that no distribution describes.

    Its words are the global shape and this rank's part before and after.
    """

    names = Names(
        "rearrange",
        ("operand",),
        ("out",),
        separate="the operand: a redistribution cannot be done in place",
    )

    def encoded(self, words: tuple[Any, ...]) -> tuple[Any, Any]:
        shape, *parts = words
        source, target = (
            tuple((s.start, s.block, s.period, s.stop) for s in part) for part in parts
        )
        return (shape, source), (shape, target)

    def layouts(
        self, sources: Sequence[Any], targets: Sequence[Any], shapes: Sequence[Sequence[int]]
    ) -> tuple[Layout, Layout]:
        shape = require_equal("the global shape", [shape for shape, _ in sources])
        src, dst = (
            Layout(tuple(shape), tuple(tuple(Spans(*s) for s in part) for _, part in encoded))
            for encoded in (sources, targets)
        )
        for rank, local in enumerate(shapes):
            if tuple(local) != src.local_shape(rank):
                raise ValueError(
                    f"rank {rank}: the part has shape {tuple(local)}, expected "
                    f"{src.local_shape(rank)} of the global shape {src.global_shape}"
                )
        return src, dst


REARRANGE = Rearrangement()


class Whole(Rearrangement):
    """The whole array, on every rank or on one. Its words are the global shape, this rank's part,
    and the rank that gets the array, or None for every rank.
    """

    names = Names(
        "numpy",
        ("operand",),
        ("out",),
        separate="the operand: the whole array is not where a part is",
    )

    def encoded(self, words: tuple[Any, ...]) -> tuple[Any, Any]:
        shape, part, root = words
        held, _ = super().encoded((shape, part, part))
        return held, root

    def layouts(
        self, sources: Sequence[Any], targets: Sequence[Any], shapes: Sequence[Sequence[int]]
    ) -> tuple[Layout, Layout]:
        root = require_equal("root", targets)
        src, _ = super().layouts(sources, sources, shapes)
        return src, _whole_layout(src.global_shape, src.size, root)


WHOLE = Whole()


@collective_call
def rearranged(x: Distributed, layout: Layout, out: Any = None, purpose: str = "the array") -> Any:
    """This rank's part of `x` in another layout: `out`, or a new array. Collective."""
    rank = x.context.rank
    zeros = in_place_of(lambda: f"{purpose}: {described(x, layout)}", x, layout)
    if zeros is not None:
        return zeros
    words = (layout.global_shape, x.layout.spans(rank), layout.spans(rank))
    arguments = Arguments((x.local,), (out,), words, None, None)
    with current.within(x.context):
        return call(REARRANGE, arguments)


@collective_call
def whole_on(x: Distributed, root: int | None) -> Any:
    """The whole array on every rank, or on rank `root`, where the others get no elements: its own
    part if every rank has all, otherwise a new array. Collective.
    """
    if x.layout.is_replicated:
        return x.local
    layout = _whole_layout(x.shape, x.context.size, root)
    zeros = in_place_of(lambda: f"numpy: {described(x, layout)}", x, layout)
    if zeros is not None:
        return zeros
    words = (x.layout.global_shape, x.layout.spans(x.context.rank), root)
    arguments = Arguments((x.local,), (None,), words, None, None)
    with current.within(x.context):
        return call(WHOLE, arguments)


def _whole_layout(shape: tuple[int, ...], size: int, root: int | None) -> Layout:
    if root is None:
        return Layout.replicated(shape, size)
    return Layout.on_one_rank(shape, size, rank=root)


def part_in(x: Distributed, layout: Layout) -> Any:
    """This rank's part of `x` in a layout. Collective unless `x` has that layout already."""
    return x.local if x.layout == layout else rearranged(x, layout)


@collective_call
def agreed_layout(
    distribution: Distribution, shape: tuple[int, ...], context: DistributedContext
) -> Layout:
    """The layout of an array whose shape all ranks know. Local, except for boxes, which the ranks
    exchange; raises ValueError on all ranks where these do not fit.
    """
    if not distribution.per_rank:
        return layout_of(distribution, shape, context.size)

    def described() -> tuple[Any, ...]:
        return unbound(distribution).encode(), shape

    def bound(specs: list[Any]) -> Layout:
        require_equal("the shape", [shape for _, shape in specs])
        return bind_layout("distribution", [encoded for encoded, _ in specs], shape)

    return context.agree("boxes", described, bound)


def redistributed(x: D, distribution: Distribution, *, out: Any = None, **words: Any) -> D:
    """`x` in another distribution: `out`, or itself if it is already split so, or a new array;
    `words` are those of `redistribute`. Collective.
    """
    if not isinstance(distribution, Distribution):
        wrong = TypeError(f"to takes a distribution such as Slab.X, not {distribution!r}")
        raise_on_all_ranks(x.context, "redistribute", wrong)
    if out is None and not distribution.per_rank and distribution == x.distribution:
        return x
    if distribution.per_rank:
        end_explanation(lambda: f"to: {x.layout} becomes {distribution}, of each rank")
    if explanation.get() is not None:
        target = agreed_layout(distribution, x.shape, x.context)
        zeros = in_place_of(lambda: f"to: {described(x, target)}", x, target)
        return x.like(zeros, unbound(distribution), target)
    into = None if out is None else out.local
    with current.within(x.context):  # raises on all ranks what is wrong on one
        local = redistribute(x.local, x.distribution, distribution, out=into, **words)
    if out is not None:
        made: D = out
        return made
    target = agreed_layout(distribution, x.shape, x.context)
    return x.like(local, unbound(distribution), target)


def require_root(root: Any, size: int) -> None:
    """Raise ValueError unless `root` is None or a rank."""
    if root is not None and not (type(root) is int and 0 <= root < size):
        raise ValueError(f"root must be None or a rank below {size}, not {root!r}")


def brought(x: Distributed, layout: Layout, purpose: str) -> Any:
    """This rank's part of `x` in another layout, moved if necessary; `purpose` names the move.

    Collective where anything moves. Raises RuntimeError where that is forbidden.
    """
    if layout is x.layout or layout == x.layout:
        return x.local
    if not stays(x.layout, layout):
        if explanation.get() is None:
            permit(lambda: f"{purpose}: {described(x, layout)}")
        return rearranged(x, layout, purpose=purpose)
    key = _within_part(x.layout, layout, x.context.rank)
    if key is None:
        return parts.empty(layout.local_shape(x.context.rank), x.local)
    return array_of(x.local[key])


@lru_cache(maxsize=1024)
def _within_part(held: Layout, needed: Layout, rank: int) -> Any:
    """The key of what a rank needs in its part; None where it needs nothing."""
    pairs = list(zip(held.spans(rank), needed.spans(rank), strict=True))
    if not all(spans.block for _, spans in pairs):
        return None
    return selector([places(one, other) for one, other in pairs])


def settled(x: Any, local: Any, layout: Layout, like: Distribution | None) -> Any:
    """The array whose part is `local` in `layout`, split by `like` if that describes the layout, or
    by the simplest distribution that does. If none does, as may happen with block-cyclic axes, the
    array is moved to the layout of `like`, or to slabs.
    """
    distribution = distribution_of(layout, x.context.rank, like)
    if distribution is not None:
        return x.like(local, distribution, layout)
    held, purpose = x.like(local, x.distribution, layout), "a part of block-cyclic axes"
    if like is not None and not like.per_rank:
        with suppress(BindDistributionError):  # raised before anything moves
            return split_by(held, unbound(like), purpose)
    return in_slabs(held, 0, purpose)


def split_by(x: Any, distribution: Distribution, purpose: str) -> Any:
    """`x`, split by a distribution that is the same on all ranks; `purpose` names the move.
    Collective and errors as `brought`.
    """
    layout = layout_of(distribution, x.shape, x.context.size)
    return x.like(brought(x, layout, purpose), distribution, layout)


def in_slabs(x: Any, axis: int, purpose: str) -> Any:
    """`x` in slabs along an axis, as `split_by`."""
    return split_by(x, Slab(axis), purpose)


def whole_everywhere(x: Any, purpose: str) -> Any:
    """`x`, whole on every rank; `purpose` names the move. Collective and errors as `brought`."""
    return x.everywhere(brought(x, Layout.replicated(x.shape, x.context.size), purpose))


def on_all_ranks(x: Any) -> HostArray:
    """The elements of `x`, distributed or the same on all ranks, as a NumPy array on every rank."""
    if not isinstance(x, Distributed):
        return np.asarray(x)
    return parts.on_host(whole_everywhere(x, "an array for all ranks").local)


def described(x: Distributed, layout: Layout) -> str:
    """The move of `x` to `layout`, in one line."""
    moved = received(x.layout, layout, x.element_type.itemsize)
    return f"{x.layout} becomes {layout}, {moved} bytes change their rank"


@lru_cache(maxsize=4096)
def stays(src: Layout, dst: Layout) -> bool:
    """Whether every rank already has all that it needs."""
    return classify(src, dst) is Pattern.LOCAL


@lru_cache(maxsize=4096)
def received(src: Layout, dst: Layout, itemsize: int) -> int:
    """The number of bytes that change their rank when `src` becomes `dst`."""
    return sum(bytes_received(src, dst, itemsize))
