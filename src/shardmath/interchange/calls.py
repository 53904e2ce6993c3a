"""Calls with arrays of any library that speaks DLPack: results are arrays of that library, too.

An array on the host is viewed as an array of NumPy's, one on a GPU as one of torch's or CuPy's, and
results are given back the same way. Nothing is copied where the library shares memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from shardmath.arrays.detect import knows_type
from shardmath.call.agreement import raise_on_all_ranks
from shardmath.context.context import require_context
from shardmath.interchange import jax_programs
from shardmath.interchange.aligned import AlignedArray

_HOST, _GPUS = (1,), (2, 13)  # what DLPack calls devices: the host; CUDA's, and its managed memory


def with_arrays_of(call: Callable[..., Any], kind: type) -> Callable[..., Any] | None:
    """The function that calls `call` with arrays of class `kind`; None if the package knows the
    library of that class.
    """
    if knows_type(kind):
        return None
    if _is_of_jax(kind) and any(base.__name__ == "Tracer" for base in kind.__mro__):
        return partial(jax_programs.traced, call)
    return partial(_called, call)


def _called(call: Callable[..., Any], *args: Any, **words: Any) -> Any:
    """The result of `call` in the library of the first foreign array. Collective."""
    name = call.__name__
    foreign: list[Any] = []
    originals: dict[int, Any] = {}  # of arrays that the call may return: its `out`

    def taken(x: Any) -> Any:
        if isinstance(x, Mapping):
            return {key: taken(value) for key, value in x.items()}
        if type(x) in (list, tuple):
            return type(x)([taken(value) for value in x])
        if not hasattr(type(x), "__dlpack__") or knows_type(type(x)):
            originals[id(x)] = x
            return x
        foreign.append(x)
        view = borrowed(x)
        originals[id(view)] = x
        return view

    try:
        operands = [taken(x) for x in args]
        named = {key: taken(x) for key, x in words.items()}
        if words.get("async_op"):
            raise ValueError("async_op=True is for arrays of NumPy, torch and CuPy")
    except Exception as error:  # of the array's library, too: a deleted array is RuntimeError
        context = words.get("context") or require_context()
        raise_on_all_ranks(context, name, ValueError(f"{name}: {error}"))
    made = call(*operands, **named)

    def given(x: Any) -> Any:
        if isinstance(x, Mapping):
            return {key: given(value) for key, value in x.items()}
        if isinstance(x, tuple):
            return tuple(given(value) for value in x)
        if id(x) in originals:
            return originals[id(x)]
        return returned(x, foreign[0]) if knows_type(type(x)) else x

    return given(made)


def _is_of_jax(kind: type) -> bool:
    return any(base.__module__.partition(".")[0] in ("jax", "jaxlib") for base in kind.__mro__)


def borrowed(x: Any) -> Any:
    """A view of the memory of `x` as an array of a library that the package knows.

    Raises ValueError for an array of several devices, or of none that the package knows.
    """
    if _is_of_jax(type(x)) and len(x.sharding.device_set) > 1:
        raise ValueError(
            f"an array of JAX's on {len(x.sharding.device_set)} devices: pass this rank's part, "
            "x.addressable_shards[0].data, or shardmath.from_jax(x)"
        )
    device = x.__dlpack_device__()[0]
    if device in _HOST:  # NumPy reads what DLPack says, but for types that ml_dtypes has
        host = np.asarray(x) if _is_of_jax(type(x)) else np.from_dlpack(x)
        return host.view(AlignedArray)
    if device not in _GPUS:
        raise ValueError(f"an array on DLPack's device {device}: the host's is 1, CUDA's 2 and 13")
    return _library_on_gpus().from_dlpack(x)


def _library_on_gpus() -> Any:
    """Torch or CuPy: the one that is loaded, else the one that is installed."""
    names = "torch", "cupy"
    name = next((name for name in names if name in sys.modules), None)
    name = name or next((name for name in names if find_spec(name)), None)
    if name is None:
        raise ValueError("an array on a GPU, which torch or CuPy reads, and neither is installed")
    return import_module(name)


def returned(made: Any, like: Any) -> Any:
    """A new result in the library of `like`, on the same memory where that library shares it.

    Raises ValueError as `of_jax`.
    """
    if not _is_of_jax(type(like)):
        return _from_dlpack(like)(made)
    [device] = like.sharding.device_set
    return of_jax(made, device)


def of_jax(made: Any, device: Any) -> Any:
    """The array as one of JAX's on a device, on the same memory where JAX shares it.

    Raises ValueError where JAX narrows its type: float64, without jax_enable_x64.
    """
    jax: Any = import_module("jax")
    if isinstance(made, np.ndarray):
        x = jax.device_put(made, device, may_alias=True)
    else:
        x = jax.dlpack.from_dlpack(made)
    if x.dtype.itemsize != made.dtype.itemsize:
        raise ValueError(
            f"JAX makes {x.dtype} of {made.dtype}: call jax.config.update("
            '"jax_enable_x64", True) first'
        )
    return x


def _from_dlpack(like: Any) -> Callable[[Any], Any]:
    """`from_dlpack` of the library of `like`, from its namespace or its package."""
    if hasattr(like, "__array_namespace__"):
        found: Callable[[Any], Any] = like.__array_namespace__().from_dlpack
        return found
    package = sys.modules[type(like).__module__.partition(".")[0]]
    found = getattr(package, "from_dlpack", np.asarray)
    return found
