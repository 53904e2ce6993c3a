"""Functions on one rank's part, whichever library it is of.

The parts' library computes. NumPy's names are asked for, and the standard's; where torch calls a
function otherwise, or lacks it, the table says what it is there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from shardmath.arrays import DType, Library, dtypes, libraries, library_of
from shardmath.arrays.base import HostArray

# NumPy's ufuncs that torch calls otherwise; all others have the same name there.
_TORCH = {
    "equal": "eq",
    "power": "pow",
    "rint": "round",
    "conjugate": "conj_physical",
    "invert": "bitwise_not",
    "left_shift": "bitwise_left_shift",
    "right_shift": "bitwise_right_shift",
    "fabs": "absolute",
}


def is_array(x: Any) -> bool:
    """Whether `x` is an array of a library that we know."""
    kind: Any = type(x)
    return _is_array_type(kind)


@lru_cache(maxsize=256)
def _is_array_type(kind: type) -> bool:
    return any(library.owns_type(kind) for library in libraries().values())


def module_of(library: Library) -> Any:
    """The module of the library, which whoever has an array of it has imported."""
    return sys.modules[library.name]


def elementwise(library: Library, ufunc: np.ufunc) -> Callable[..., Any]:
    """The library's function that does what NumPy's does.

    Raises NotImplementedError where it has none.
    """
    if library.name == "numpy":
        return ufunc
    return _elementwise(library.name, ufunc.__name__)


@lru_cache(maxsize=256)
def _elementwise(library: str, name: str) -> Callable[..., Any]:
    module = sys.modules[library]
    function: Callable[..., Any] | None = getattr(
        module, _TORCH.get(name, name) if library == "torch" else name, None
    )
    if function is None:
        raise NotImplementedError(
            f"{library} has no {name}: compute it part by part, x.like(f(x.local))"
        )
    if library != "torch":
        return function

    def of_tensors(*operands: Any, **words: Any) -> Any:
        first = next(x for x in operands if hasattr(x, "device"))
        given = [
            x if hasattr(x, "device") else module.as_tensor(x, device=first.device)
            for x in operands
        ]
        return function(*given, **words)

    return of_tensors


def converted(x: Any, part: Any) -> Any:
    """An array that is the same on all ranks, in the library of a part, and where that is."""
    library = library_of(part)
    if library.owns_type(type(x)):
        return x
    if library.name == "numpy":
        return np.asarray(x)
    module = module_of(library)
    if library.name == "torch":
        host = np.asarray(x)
        is_plain = host.flags.writeable and all(n >= 0 for n in host.strides)
        return module.as_tensor(host if is_plain else host.copy(), device=part.device)
    return module.asarray(np.asarray(x))


def on_device(host: HostArray, library: Library, device: str) -> Any:
    """An array of the library on a device, with the elements of one on the host, or that one."""
    if library.name == "numpy":
        return host
    if library.name == "torch":
        made = library.from_host(host if host.flags.writeable else host.copy())
        return made if device == "cpu" else made.to(device)
    return module_of(library).asarray(host)


def on_host(x: Any, library: Library) -> HostArray:
    """The elements of `x` as NumPy's array: on its memory, or copied from the GPU."""
    return library.on_host(x)


def flipped(x: Any, axes: Sequence[int], library: Library) -> Any:
    """`x` with the order of elements along these axes reversed; torch has no negative strides."""
    if not axes:
        return x
    if library.name == "torch":
        return x.flip(tuple(axes))
    return x[tuple(slice(None, None, -1 if a in axes else 1) for a in range(x.ndim))]


def permuted(x: Any, axes: Sequence[int], library: Library) -> Any:
    """A view of `x` with its axes in another order."""
    return x.permute(tuple(axes)) if library.name == "torch" else x.transpose(tuple(axes))


def native_dtype(dtype: Any, library: Library) -> Any:
    """A data type, given by any library's object or by name, in the library's words."""
    known = dtypes.of(dtype)
    if library.name == "torch":
        return getattr(module_of(library), known.name)
    return dtypes.to_numpy(known)


def full(shape: Sequence[int], value: Any, like: Any, dtype: Any, library: Library) -> Any:
    """A new array beside `like`, of one value."""
    made = library.empty(shape, dtypes.of(dtype), "C", library.spec(like).device)
    made[...] = value
    return made


def cast(x: Any, dtype: DType, library: Library) -> Any:
    """`x`, in another type if it has another."""
    return x if library.spec(x).dtype == dtype.name else library.cast(x, dtype)


def is_nan(x: Any, library: Library) -> Any:
    """Which elements are not numbers."""
    return module_of(library).isnan(x)


def chosen(condition: Any, x: Any, y: Any, library: Library) -> Any:
    """The elements of `x` where `condition` holds, else those of `y`."""
    return module_of(library).where(condition, x, y)


def clipped(x: Any, low: Any, high: Any, library: Library) -> Any:
    """The elements of `x` within bounds, of which None is none."""
    if low is None and high is None:
        return x + 0
    return module_of(library).clip(x, low, high)


def rounded(x: Any, decimals: int, library: Library) -> Any:
    """The elements of `x` rounded to so many decimals; torch has this of floats only."""
    if library.name == "torch" and decimals >= 0 and not (x.is_floating_point() or x.is_complex()):
        return x.clone()
    return module_of(library).round(x, decimals=decimals)


def broadcast(x: Any, shape: Sequence[int], library: Library) -> Any:
    """A view of `x` in a shape that it broadcasts to."""
    return module_of(library).broadcast_to(x, tuple(shape))


def joined(pieces: Sequence[Any], axis: int, library: Library) -> Any:
    """The arrays one after the other along an axis."""
    if library.name == "torch":
        return module_of(library).cat(pieces, dim=axis)
    return module_of(library).concatenate(pieces, axis=axis)


def stacked(pieces: Sequence[Any], axis: int, library: Library) -> Any:
    """The arrays one after the other along a new axis."""
    if library.name == "torch":
        return module_of(library).stack(pieces, dim=axis)
    return module_of(library).stack(pieces, axis=axis)


def repeated(x: Any, times: int, axis: int, library: Library) -> Any:
    """`x` with each index of an axis so many times."""
    if library.name == "torch":
        return module_of(library).repeat_interleave(x, times, dim=axis)
    return module_of(library).repeat(x, times, axis=axis)


def taken(x: Any, numbers: HostArray, axis: int, library: Library) -> Any:
    """The elements of `x` at indices along an axis."""
    there = on_device(numbers, library, library.spec(x).device)
    if library.name == "torch":
        return module_of(library).index_select(x, axis, there)
    return module_of(library).take(x, there, axis=axis)


def picked(x: Any, numbers: Sequence[HostArray], axis: int, library: Library) -> Any:
    """The elements of `x` at indices along several axes, from `axis` on, which become one."""
    if len(numbers) == 1:
        return taken(x, numbers[0], axis, library)
    device = library.spec(x).device
    there = tuple(on_device(line, library, device) for line in numbers)
    return x[(slice(None),) * axis + there]


def order(x: Any, axis: int, library: Library) -> Any:
    """The indices that sort `x` along an axis, those of equal elements ascending."""
    if library.name == "torch":
        return module_of(library).argsort(x, dim=axis, stable=True)
    return module_of(library).argsort(x, axis=axis, kind="stable")


def taken_along(x: Any, numbers: Any, axis: int, library: Library) -> Any:
    """The elements of `x` at indices along an axis, other ones for each line."""
    if library.name == "torch":
        return module_of(library).take_along_dim(x, numbers, dim=axis)
    return module_of(library).take_along_axis(x, numbers, axis=axis)


def crossed(x: Any, y: Any, axis: int, library: Library) -> Any:
    """The cross products of vectors of three elements along an axis, which both have."""
    module = module_of(library)
    if library.name == "torch":
        return module.linalg.cross(x, y, dim=axis)
    made = module.empty(np.broadcast_shapes(x.shape, y.shape), x.dtype)  # C order, unlike np.cross
    a, b, c = (tuple(z[(slice(None),) * axis + (n, ...)] for n in range(3)) for z in (x, y, made))
    for n, (i, j) in enumerate(((1, 2), (2, 0), (0, 1))):
        module.multiply(a[i], b[j], out=c[n])
        module.subtract(c[n], a[j] * b[i], out=c[n])
    return made


def accumulated(x: Any, name: str, axis: int, dtype: Any, library: Library) -> Any:
    """The "cumsum" or "cumprod" of `x` along an axis."""
    words = {} if dtype is None else {"dtype": native_dtype(dtype, library)}
    words["dim" if library.name == "torch" else "axis"] = axis
    return getattr(module_of(library), name)(x, **words)


def _type_kept(x: Any, name: str) -> Any:
    """A tensor of which no axis is reduced, in the type that the reduction gives."""
    if name in ("any", "all"):
        return x.bool()
    is_narrow = name in ("sum", "prod") and not (x.is_floating_point() or x.is_complex())
    return x.long() if is_narrow else x.clone()


def histogram(
    x: Any, bins: Any, ends: tuple[float, float] | None, weights: Any, library: Library
) -> tuple[Any, Any]:
    """How many elements of `x` lie in each bin, or the sums of their weights, and the bins' edges,
    as numpy.histogram; torch has no such function for every device and type.
    """
    if library.name == "numpy":
        return np.histogram(x, bins, ends, weights=weights)
    spec = library.spec(x)
    if library.name != "torch":
        bins = bins if np.ndim(bins) == 0 else converted(bins, x)
        counts, edges = module_of(library).histogram(x, bins, ends, weights=weights)
        return counts, edges
    module = module_of(library)
    edges = np.histogram_bin_edges(np.empty(0, dtypes.to_numpy(spec.dtype)), bins, ends)
    bounds = on_device(edges.astype("float64"), library, spec.device)
    values = x.reshape(-1).double()
    places = module.bucketize(values, bounds, right=True) - 1
    places = module.where(values == bounds[-1], len(edges) - 2, places)  # the last bin is closed
    held = (places >= 0) & (places < len(edges) - 1)
    words = {} if weights is None else {"weights": weights.reshape(-1)[held].double()}
    counts = module.bincount(places[held], minlength=len(edges) - 1, **words)
    counts = counts if weights is None else counts.to(weights.dtype)
    return counts, on_device(edges, library, spec.device)


_REDUCTIONS = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "any": np.logical_or,
    "all": np.logical_and,
}


def reduced(
    x: Any, name: str, axes: tuple[int, ...], library: Library, words: dict[str, Any]
) -> Any:
    """`x` without `axes`: their "sum", "prod", "min", "max", "any" or "all"."""
    if library.name == "numpy":  # what NumPy's functions call
        return _REDUCTIONS[name].reduce(x, axis=axes if len(axes) != 1 else axes[0], **words)
    module = module_of(library)
    if library.name != "torch":
        return getattr(module, name)(x, axis=axes, **words)
    if not axes:  # torch would reduce all
        return x.to(words["dtype"]) if words else _type_kept(x, name)
    if name in ("min", "max"):
        return getattr(module, f"a{name}")(x, dim=axes)
    if name == "sum":
        return module.sum(x, dim=axes, **words)
    function = getattr(module, name)
    if name != "prod":
        x = x.bool()
    for axis in sorted(axes, reverse=True):
        x = function(x, dim=axis, **words)
    return x
