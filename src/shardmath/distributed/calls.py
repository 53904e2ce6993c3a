"""This package's own functions, called with arrays that know how they are split.

    matmul(x, y)    rfft(x, distribution=Slab.Y)    redistribute(x, Slab.Y)    all_reduce(x)

What such an array knows is left out of the call: `distribution` is that of a result, and
collectives take each rank's part. All else, such as `options`, `stream` and `alpha`, is as for
parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from inspect import unwrap
from typing import Any

from shardmath.call.agreement import raise_on_all_ranks
from shardmath.collectives import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter
from shardmath.distributed import parts, products, systems, transforms
from shardmath.distributed.layouts import layout_of
from shardmath.distributed.movement import end_explanation, redistributed
from shardmath.distributed.state import Distributed
from shardmath.geometry import Replicated, Slab
from shardmath.operators.fft import trigonometric
from shardmath.operators.fft.api import fft, ifft, irfft, rfft
from shardmath.operators.matmul.forms import matmul
from shardmath.operators.redistribute.api import redistribute

Function = Callable[..., Any]


def _matmul(a: Any, b: Any, c: Any = None, *, distributions: Any = None, **words: Any) -> Any:
    """The product alpha a @ b + beta c, split as c where it is given, else as `a @ b` is."""
    if distributions is not None:
        raise TypeError("these arrays know their distributions: leave out distributions=")
    if words.get("qualifiers") is not None:
        raise NotImplementedError("qualifiers of a DistributedArray: pass x.T or x.conj()")
    if a.ndim != 2 or b.ndim != 2:
        raise ValueError(f"matmul multiplies matrices, not arrays of {a.ndim} and {b.ndim} axes")
    return products.product(a, b, c, **words)


def _redistribute(x: Any, distribution: Any = None, *more: Any, **words: Any) -> Any:
    """The array split by `distribution`, as `x.to` has it; or `out`."""
    if distribution is None:
        distribution = words.pop("output_distribution", None)
    if more or "input_distribution" in words or "output_distribution" in words:
        raise TypeError("this array knows its distribution: redistribute(x, Slab.Y)")
    return redistributed(x, distribution, **words)


def _of_parts(function: Function) -> Function:
    """A collective of each rank's part. Its result is on every rank; that of reduce_scatter is
    split in slabs.
    """

    def collected(x: Distributed, *, out: Any = None, context: Any = None, **words: Any) -> Any:
        if context not in (None, x.context):
            raise ValueError("the array is split over the ranks of another context")
        scatters = function is reduce_scatter
        if function is all_to_all or words.get("counts") is not None:
            raise NotImplementedError(
                f"{function.__name__} whose result is no array that every rank has, nor a slab: "
                "call it with x.local, and make an array of the result with shardmath.array"
            )
        if words.get("async_op"):
            raise NotImplementedError(
                f"{function.__name__} with async_op=True of an array that knows how it is split: "
                "call it with x.local"
            )
        end_explanation(lambda: f"{function.__name__} of {x.layout}")
        into = None if out is None else out.local
        local = function(x.local, out=into, context=x.context, **words)
        if out is not None:
            return out
        axis = words.get("axis", 0)
        target = Slab(axis % x.ndim) if scatters else Replicated()
        shape = tuple((x.local if scatters else local).shape)
        return x.like(local, target, layout_of(target, shape, x.context.size))

    return collected


def _alike(function: Function, ours: Function) -> Function:
    """`ours`, for calls in which all arrays know how they are split.

    Otherwise all ranks raise the same TypeError, including those that call `function` with parts.
    """

    def called(*given: Any, **words: Any) -> Any:
        operands = [*given, *words.values()]
        first, *others = (x for x in operands if isinstance(x, Distributed))
        if any(parts.is_array(x) for x in operands):
            mixed = TypeError(
                f"{function.__name__} of parts and of arrays that know how they are split: make "
                "arrays of the parts, shardmath.array(part, distribution), or pass x.local"
            )
            raise_on_all_ranks(first.context, function.__name__, mixed)
        first.require_same_ranks(*others)
        return ours(*given, **words)

    return called


_TRIGONOMETRIC: list[tuple[Function, Function]] = [  # along one axis, and along several
    (getattr(trigonometric, name), getattr(trigonometric, f"{name}n"))
    for name in ("dct", "idct", "dst", "idst")
]
_OURS: dict[Function, Function] = {
    matmul: _matmul,
    redistribute: _redistribute,
    **{one: partial(transforms.transform, one) for one in (fft, ifft, rfft, irfft)},
    **{several: partial(transforms.trigonometric, several) for _, several in _TRIGONOMETRIC},
    **{
        one: partial(transforms.trigonometric_along_one, several) for one, several in _TRIGONOMETRIC
    },
    **systems.FUNCTIONS,
    **{
        function: _of_parts(function)
        for function in (all_gather, all_reduce, all_to_all, broadcast, reduce_scatter)
    },
}
FUNCTIONS: Mapping[Function, Function] = {
    unwrap(function): _alike(function, ours) for function, ours in _OURS.items()
}
