"""Functions on one rank's part, whichever library it is of.

The parts' library computes, under NumPy's names; torch takes NumPy's `axis` for its `dim`. Where
torch has another name, or no such function, the table or the function here says what is used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from shardmath.arrays import DType, Library, dtypes, libraries, library_of
from shardmath.arrays.base import HostArray

# NumPy's ufuncs that have another name in torch.
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


def module_of(x: Any) -> Any:
    """The module of an array's library, which whoever has the array has imported."""
    return sys.modules[library_of(x).name]


def is_torchs(x: Any) -> bool:
    """Whether `x` is a tensor of torch, whose functions have other names and arguments."""
    return library_of(x).name == "torch"


def first_array(operands: Sequence[Any]) -> Any:
    """The first operand that is an array: the others may be numbers."""
    return next(x for x in operands if is_array(x))


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


# -- arrays of a part's library --------------------------------------------------------------------


def converted(x: Any, part: Any) -> Any:
    """`x` as an array of a part's library, on the part's device: itself if it is one already, else
    with the elements that NumPy finds in it, in the same memory or a copy.
    """
    library = library_of(part)
    if library.owns_type(type(x)):
        return x.to(part.device) if library.name == "torch" else x
    return on_device(np.asarray(x), library, library.spec(part).device)


def on_device(host: HostArray, library: Library, device: str) -> Any:
    """An array of the library on a device, with the elements of `host`, if possible its memory."""
    if library.name == "numpy":
        return host
    if library.name != "torch":
        return sys.modules[library.name].asarray(host)
    is_plain = host.flags.writeable and all(stride >= 0 for stride in host.strides)
    made = library.from_host(host if is_plain else host.copy())
    return made if device == "cpu" else made.to(device)


def on_host(x: Any) -> HostArray:
    """The elements of `x` as NumPy's array: on its memory, or copied from the GPU."""
    return library_of(x).on_host(x)


def native_dtype(dtype: Any, library: Library) -> Any:
    """A data type, given by any library's object or by name, in the library's words."""
    known = dtypes.of(dtype)
    if library.name == "torch":
        return getattr(sys.modules["torch"], known.name)
    return dtypes.to_numpy(known)


def empty(shape: Sequence[int], like: Any, dtype: Any = None) -> Any:
    """A new array of undefined elements where `like` is, in its type or another."""
    library = library_of(like)
    spec = library.spec(like)
    kind = spec.dtype if dtype is None else dtypes.of(dtype)
    return library.empty(shape, kind, "C", spec.device)


def full(shape: Sequence[int], value: Any, like: Any, dtype: Any = None) -> Any:
    """A new array of one value where `like` is, in its type or another."""
    made = empty(shape, like, dtype)
    assign(made, ..., value)
    return made


def copied(x: Any) -> Any:
    """A copy of `x`."""
    return x.clone() if is_torchs(x) else x.copy()


def cast(x: Any, dtype: DType) -> Any:
    """`x`, in another type if it has another."""
    library = library_of(x)
    return x if library.spec(x).dtype == dtype.name else library.cast(x, dtype)


def assign(x: Any, key: Any, value: Any) -> None:
    """`x[key] = value`, in the type of `x`: torch takes no tensor of another type for some keys."""
    if hasattr(value, "shape"):
        value = cast(converted(value, x), dtypes.of(library_of(x).spec(x).dtype))
    x[key] = value


# -- elements, and where they lie ------------------------------------------------------------------


def along(axis: int, *keys: Any) -> tuple[Any, ...]:
    """The key that has `keys` from an axis on, and selects all along the other axes."""
    return (*(slice(None),) * axis, *keys)


def flipped(x: Any, axes: Sequence[int]) -> Any:
    """`x` with these axes reversed; torch has no negative strides."""
    if not axes:
        return x
    if is_torchs(x):
        return x.flip(tuple(axes))
    return x[tuple(slice(None, None, -1 if a in axes else 1) for a in range(x.ndim))]


def permuted(x: Any, axes: Sequence[int]) -> Any:
    """A view of `x` with its axes in another order."""
    return x.permute(tuple(axes)) if is_torchs(x) else x.transpose(tuple(axes))


def chosen(condition: Any, x: Any, y: Any) -> Any:
    """The elements of `x` where `condition` holds, else those of `y`."""
    return module_of(first_array((condition, x, y))).where(condition, x, y)


def rounded(x: Any, decimals: int) -> Any:
    """`x` rounded to `decimals`, which torch does for floating types only."""
    if is_torchs(x) and decimals >= 0 and not (x.is_floating_point() or x.is_complex()):
        return x.clone()
    return module_of(x).round(x, decimals=decimals)


def repeated(x: Any, times: int, axis: int) -> Any:
    """`x` with each index along an axis repeated."""
    module = module_of(x)
    return (module.repeat_interleave if is_torchs(x) else module.repeat)(x, times, axis=axis)


def taken(x: Any, numbers: HostArray, axis: int) -> Any:
    """The elements of `x` at indices along an axis."""
    there = converted(numbers, x)
    return x.index_select(axis, there) if is_torchs(x) else module_of(x).take(x, there, axis=axis)


def picked(x: Any, numbers: Sequence[HostArray], axis: int) -> Any:
    """The elements of `x` at indices along several axes, from `axis` on, which become one axis."""
    if len(numbers) == 1:
        return taken(x, numbers[0], axis)
    return x[along(axis, *(converted(line, x) for line in numbers))]


def order(x: Any, axis: int) -> Any:
    """The indices that sort `x` along an axis; equal elements keep their order."""
    words: dict[str, Any] = {"stable": True} if is_torchs(x) else {"kind": "stable"}
    return module_of(x).argsort(x, axis=axis, **words)


def taken_along(x: Any, numbers: Any, axis: int) -> Any:
    """The elements of `x` at indices along an axis, different ones for each line."""
    module = module_of(x)
    function = module.take_along_dim if is_torchs(x) else module.take_along_axis
    return function(x, numbers, axis=axis)


def crossed(x: Any, y: Any, axis: int) -> Any:
    """The cross products of vectors of three elements along an axis, which both have."""
    module = module_of(x)
    if is_torchs(x):
        return module.linalg.cross(x, y, dim=axis)
    made = module.empty(np.broadcast_shapes(x.shape, y.shape), x.dtype)  # C order, unlike np.cross
    a, b, c = (tuple(z[along(axis, n, ...)] for n in range(3)) for z in (x, y, made))
    for n, (i, j) in enumerate(((1, 2), (2, 0), (0, 1))):
        module.multiply(a[i], b[j], out=c[n])
        module.subtract(c[n], a[j] * b[i], out=c[n])
    return made


def accumulated(x: Any, name: str, axis: int, dtype: Any) -> Any:
    """The "cumsum" or "cumprod" of `x` along an axis."""
    words = {} if dtype is None else {"dtype": native_dtype(dtype, library_of(x))}
    return getattr(module_of(x), name)(x, axis=axis, **words)


# -- reductions ------------------------------------------------------------------------------------


def histogram(x: Any, bins: Any, ends: tuple[float, float] | None, weights: Any) -> tuple[Any, Any]:
    """How many elements of `x` lie in each bin, or the sums of their weights, and the bins' edges,
    as numpy.histogram; torch has no such function for every device and type.
    """
    module, library = module_of(x), library_of(x)
    if library.name == "numpy":
        counts, edges = np.histogram(x, bins, ends, weights=weights)
        return counts, edges
    kind = dtypes.to_numpy(library.spec(x).dtype)
    edges = np.histogram_bin_edges(np.empty(0, kind), bins, ends)
    if library.name != "torch":  # CuPy's own edges and counts have other types
        counts, _ = module.histogram(x, converted(edges, x), weights=weights)
        counts = counts.astype("int64" if weights is None else weights.dtype)
        return counts, converted(edges, x)
    bounds = converted(edges.astype("float64"), x)
    values = x.reshape(-1).double()
    places = module.bucketize(values, bounds, right=True) - 1
    places = module.where(values == bounds[-1], len(edges) - 2, places)  # the last bin is closed
    held = (places >= 0) & (places < len(edges) - 1)
    words = {} if weights is None else {"weights": weights.reshape(-1)[held].double()}
    counts = module.bincount(places[held], minlength=len(edges) - 1, **words)
    counts = counts if weights is None else counts.to(weights.dtype)
    return counts, converted(edges, x)


_SUMMED_BY_TORCH = ("float32", "float64", "complex64", "complex128")
_REDUCTIONS = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "any": np.logical_or,
    "all": np.logical_and,
}


def reduced(x: Any, name: str, axes: tuple[int, ...], dtype: Any = None) -> Any:
    """`x` without `axes`: their "sum", "prod", "min", "max", "any" or "all"; a sum or a product is
    in the type `dtype`, if it is given.
    """
    library = library_of(x)
    words = {} if dtype is None else {"dtype": native_dtype(dtype, library)}
    if library.name == "numpy":  # as NumPy's functions do
        return _REDUCTIONS[name].reduce(x, axis=axes if len(axes) != 1 else axes[0], **words)
    module = sys.modules[library.name]
    if library.name != "torch":
        return getattr(module, name)(x, axis=axes, **words)
    if not axes:  # torch would reduce all
        return x.to(words["dtype"]) if words else _type_kept(x, name)
    if name in ("min", "max"):
        return getattr(module, f"a{name}")(x, dim=axes)
    if name != "prod":
        return getattr(module, name)(x if name == "sum" else x.bool(), dim=axes, **words)
    for axis in sorted(axes, reverse=True):
        x = module.prod(x, dim=axis, **words)
    return x


def squares(x: Any) -> Any:
    """The squared absolute value of each element."""
    if dtypes.of(x.dtype).kind != "c":
        return x * x
    return x.real * x.real + x.imag * x.imag


def sum_of_squares(x: Any, axes: tuple[int, ...]) -> Any:
    """The sum of the squared absolute values of elements along `axes`. torch reads each element
    once; other libraries first write the squares.
    """
    if axes and library_of(x).name == "torch" and dtypes.of(x.dtype).name in _SUMMED_BY_TORCH:
        return sys.modules["torch"].linalg.vector_norm(x, dim=axes) ** 2
    return reduced(squares(x), "sum", axes)


def _type_kept(x: Any, name: str) -> Any:
    """A tensor without any reduced axis, in the type of the reduction's result."""
    if name in ("any", "all"):
        return x.bool()
    is_narrow = name in ("sum", "prod") and not (x.is_floating_point() or x.is_complex())
    return x.long() if is_narrow else x.clone()
