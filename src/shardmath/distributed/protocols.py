"""NumPy's protocols: what `np.add(x, y, out=z)`, `np.sum(x, axis=0)` and the like do here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from inspect import Signature, signature
from typing import Any

import numpy as np

from shardmath.arrays import array_of, dtypes
from shardmath.distributed import (
    contractions,
    decompositions,
    elementwise,
    manipulation,
    norms,
    parts,
    products,
    reductions,
    scans,
    searching,
    statistics,
    systems,
    transforms,
)
from shardmath.distributed.state import Distributed

_CALL = "__call__"
_PLAIN = {"initial": np._NoValue, "where": np._NoValue, "out": None}  # values that mean not given
_WIDENING = "buifc"  # the kinds of elements: each can be cast to those after it
_REDUCTIONS: dict[np.ufunc, Callable[..., Any]] = {
    np.add: reductions.sum,
    np.multiply: reductions.prod,
    np.minimum: reductions.min,
    np.maximum: reductions.max,
    np.logical_or: reductions.any,
    np.logical_and: reductions.all,
}


def ufunc(x: Distributed, function: np.ufunc, method: str, inputs: Any, words: Any) -> Any:
    """The result of a ufunc, or of one of its methods. Raises NotImplementedError for other
    methods.
    """
    if function is np.matmul and method == _CALL:
        return _into(words, products.matmul(*inputs))
    if function is np.vecdot and method == _CALL:
        return _into(words, products.vecdot(inputs[0], inputs[1], words.get("axis", -1)))
    if method == "reduce" and function in _REDUCTIONS:
        words = {"axis": 0, **words}
        return function_of(_REDUCTIONS[function], inputs, words)
    if method != _CALL:
        raise NotImplementedError(
            f"np.{function.__name__}.{method} of a DistributedArray: use np.sum, np.cumsum and the "
            "like, or apply it to x.local along an axis that is not split"
        )
    if words.pop("where", True) is not True:
        raise NotImplementedError(
            f"np.{function.__name__}(..., where=mask): use np.where(mask, result, other)"
        )
    outs = words.pop("out", None)
    compute = parts.elementwise(x.library, function)
    compute = partial(compute, **words) if words else compute
    if outs is None:
        return elementwise.applied(compute, inputs)
    if len(outs) > 1:
        raise NotImplementedError(f"np.{function.__name__} with several out: assign its results")
    (out,) = outs
    _require_array(out)

    def write(into: Any, operands: Sequence[Any]) -> None:
        written(function, operands, out, words)

    return elementwise.applied(compute, inputs, out=out, write=write)


def written(
    function: np.ufunc, operands: Sequence[Any], out: Distributed, words: Mapping[str, Any]
) -> Any:
    """`out`, into whose part `function` of the operands' parts has been written, cast as NumPy
    casts.

    Raises TypeError on all ranks where the result cannot be cast to the type of `out`.
    """
    if isinstance(out.local, np.ndarray):
        function(*operands, out=out.local, **words)
        return out
    library = out.library
    result = parts.elementwise(library, function)(*operands, **words)
    made, taken = (dtypes.of(library.spec(array_of(x)).dtype) for x in (result, out.local))
    if _WIDENING.index(made.kind) > _WIDENING.index(taken.kind):
        raise TypeError(
            f"np.{function.__name__}: its {made} is not cast to the {taken} of out: pass another "
            "out, or assign its result"
        )
    out.local[...] = result
    return out


def function_of(function: Callable[..., Any], given: Any, words: Mapping[str, Any]) -> Any:
    """The result of a function of ours, called with NumPy's arguments; in `out`, if that is given.

    Raises NotImplementedError for arguments that only NumPy's function takes.
    """
    for name in ("initial", "where"):
        if words.get(name, np._NoValue) is not np._NoValue:
            raise NotImplementedError(
                f"{name}= in a reduction of a DistributedArray: reduce np.where(mask, x, value), "
                "or combine the result with a value"
            )
    plain = {
        name: value
        for name, value in words.items()
        if name not in _PLAIN and value is not np._NoValue
    }
    try:
        made = function(*given, **plain)
    except TypeError:
        _require_taken(function, given, plain)
        raise
    return _into(words, made)


def _require_taken(function: Callable[..., Any], given: Any, words: Mapping[str, Any]) -> None:
    """Raise NotImplementedError where `function` lacks arguments that NumPy's function has."""
    taken = signature(function)
    try:
        taken.bind(*given, **words)
    except TypeError as error:
        plain = [one.replace(annotation=one.empty) for one in taken.parameters.values()]
        name = getattr(function, "__name__", "")
        raise NotImplementedError(
            f"{name}{Signature(plain)} of DistributedArrays: {error}"
        ) from None


def _into(words: Mapping[str, Any], result: Any) -> Any:
    """The result, copied into the array `out` if that is given."""
    out = words.get("out")
    out = out[0] if isinstance(out, tuple) else out
    if out is None:
        return result
    _require_array(out)
    if out.shape != result.shape:
        raise ValueError(f"out has shape {out.shape}, the result has {result.shape}")
    out[...] = result
    return out


def _require_array(out: Any) -> None:
    if not isinstance(out, Distributed):
        raise TypeError(f"out is a DistributedArray where an operand is one, not {type(out)}")


def array_function(function: Callable[..., Any], given: Any, words: Any) -> Any:
    """The result of NumPy's `function` of distributed arrays, by our function of that name.

    Raises NotImplementedError where there is none.
    """
    made = ours(function)
    if made is None:
        name = getattr(function, "__name__", str(function))
        module = getattr(function, "__module__", "numpy").replace("numpy", "np", 1)
        way = _INSTEAD.get(name)
        raise NotImplementedError(
            f"{module}.{name} of a DistributedArray: {f'use {way}, or ' if way else ''}apply it to "
            "x.local, each rank's part, or to x.numpy(), the whole"
        )
    return function_of(made, given, words)


@lru_cache(maxsize=256)
def ours(function: Any) -> Callable[..., Any] | None:
    """Our function for one of NumPy's, None where there is none."""
    name, module = getattr(function, "__name__", ""), getattr(function, "__module__", "")
    if module not in _NAMESPACES:
        return None
    if module == "numpy" and name in _RENAMED:
        return _RENAMED[name]
    if module == "numpy.linalg" and name == "svd":
        return _svd  # whose factors are square by default
    for own in _NAMESPACES[module]:
        found: Callable[..., Any] | None = getattr(own, name, None)
        if getattr(found, "__module__", "") == own.__name__:
            return found
    return None


_NAMESPACES = {
    "numpy": (
        contractions,
        elementwise,
        manipulation,
        norms,
        products,
        reductions,
        scans,
        searching,
        statistics,
    ),
    "numpy.fft": (transforms,),
    "numpy.linalg": (decompositions, norms, products, manipulation, systems),
}


def _unique(
    x: Any,
    return_index: bool = False,
    return_inverse: bool = False,
    return_counts: bool = False,
    axis: int | None = None,
    *,
    equal_nan: bool = True,
) -> Any:
    """The different elements, NaN once unless `equal_nan` is False. Raises NotImplementedError for
    the other arguments.
    """
    if return_index or return_inverse or return_counts:
        raise NotImplementedError(
            "np.unique with return_index and the like: use np.unique_all, np.unique_counts or "
            "np.unique_inverse"
        )
    if axis is not None:
        raise NotImplementedError("np.unique along an axis: apply it to x.numpy(), the whole")
    values = searching.unique_values(x)
    if equal_nan and x.element_type.kind == "f":  # NaN are the last
        surplus = int(reductions.sum(np.isnan(values))) - 1
        values = values[: len(values) - max(surplus, 0)]
    return values


def dot(a: Any, b: Any) -> Any:
    """The product of numbers or arrays, as numpy.dot: along the last axis of a and the last but one
    of b. Unlike in `matmul`, all matrices of two stacks are multiplied with each other.
    """
    if not (np.ndim(a) and np.ndim(b)):
        return a * b
    return products.tensordot(a, b, (-1, -2)) if np.ndim(b) > 2 else products.matmul(a, b)


def _spread(function: Callable[..., Any]) -> Callable[..., Any]:
    """`var` or `std` with NumPy's arguments."""

    def called(x: Any, axis: Any = None, dtype: Any = None, ddof: float = 0, **words: Any) -> Any:
        words["correction"] = words.get("correction", ddof)
        return function(x, axis, dtype, **words)

    return _documented(called, function)


def _of_two_axes(function: Callable[..., Any]) -> Callable[..., Any]:
    """`diagonal` or `trace` with NumPy's older arguments: of the first two axes, or two others."""

    def called(x: Any, offset: int = 0, axis1: int = 0, axis2: int = 1, **words: Any) -> Any:
        moved = manipulation.moveaxis(x, (axis1, axis2), (-2, -1))
        return function(moved, offset=offset, **words)

    return _documented(called, function)


def _flat(function: Callable[..., Any]) -> Callable[..., Any]:
    """`cumulative_sum` or `cumulative_prod` with the arguments of NumPy's older functions, by
    default of the flattened array.
    """

    def called(x: Any, axis: Any = None, dtype: Any = None) -> Any:
        return function(*manipulation.flat_or_along(x, axis), dtype)

    return _documented(called, function)


def _documented(called: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """`called`, with the name and the docstring of `function`."""
    called.__name__, called.__doc__ = function.__name__, function.__doc__
    return called


cumprod, cumsum = _flat(scans.cumulative_prod), _flat(scans.cumulative_sum)
diagonal, trace = _of_two_axes(norms.diagonal), _of_two_axes(norms.trace)
std, var = _spread(reductions.std), _spread(reductions.var)


def _svd(a: Any, full_matrices: bool = True, *more: Any, **words: Any) -> Any:
    return decompositions.svd(a, full_matrices, *more, **words)


# What to write in place of some of NumPy's functions that are missing here.
_INSTEAD = {
    "angle": "np.arctan2(x.imag, x.real)",
    "append": "np.concatenate([x, y])",
    "argwhere": "np.stack(np.nonzero(x), axis=1)",
    "average": "(x * weights).sum() / weights.sum()",
    "column_stack": "np.stack(arrays, axis=1)",
    "delete": "x[np.setdiff1d(np.arange(len(x)), indices)]",
    "diag": "np.diagonal(x)",
    "flatnonzero": "np.nonzero(x.ravel())[0]",
    "flipud": "np.flip(x, 0)",
    "fliplr": "np.flip(x, 1)",
    "hstack": "np.concatenate(arrays, axis=1)",
    "inner": "np.tensordot(x, y, axes=(-1, -1))",
    "nan_to_num": "np.where(np.isnan(x), 0, x)",
    "nanmax": "np.where(np.isnan(x), -np.inf, x).max()",
    "nanmin": "np.where(np.isnan(x), np.inf, x).min()",
    "nansum": "np.where(np.isnan(x), 0, x).sum()",
    "ptp": "x.max() - x.min()",
    "savez": "shardmath.save(folder, {'x': x, 'y': y})",
    "save": "shardmath.save(path, x)",
    "split": "slices such as x[:n] and x[n:]",
    "vdot": "np.vecdot(x.ravel(), y.ravel())",
    "vstack": "np.concatenate(arrays, axis=0)",
}
# NumPy's functions that have another name or other arguments here.
_RENAMED: dict[str, Callable[..., Any]] = {
    "amin": reductions.min,
    "amax": reductions.max,
    "around": elementwise.round,
    "concatenate": manipulation.concat,
    "copy": lambda x: x.copy(),
    "cumprod": cumprod,
    "cumsum": cumsum,
    "diagonal": diagonal,
    "dot": dot,
    "imag": lambda x: x.imag,
    "ndim": lambda x: x.ndim,
    "ravel": lambda x: manipulation.reshape(x, (-1,)),
    "real": lambda x: x.real,
    "shape": lambda x: x.shape,
    "size": lambda x: x.size,
    "std": std,
    "trace": trace,
    "transpose": manipulation.permute_dims,
    "unique": _unique,
    "var": var,
    "where": lambda condition, *chosen: (
        elementwise.where(condition, *chosen) if chosen else searching.nonzero(condition)
    ),
}
