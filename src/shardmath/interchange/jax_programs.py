"""Calls in programs that JAX compiles: `jax.jit` stages an ordered callback, which makes the call.

Collective calls must come in the same order on all ranks. `jax.pure_callback` promises no order:
XLA may move such a callback, make it twice, or leave it out if its result is unused, on one rank
and not on another, and then wrong calls would be paired. JAX keeps ordered callbacks in order,
within a program and from one program to the next, and calls outside wait for programs before them.

Tracing is local, because a rank that has traced such shapes before does not trace again. The shape
of a result follows from the distributions, or from the assumption that parts are even, as JAX's
are. When the call is made, the ranks compare whether that is so.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from shardmath.arrays import dtypes
from shardmath.base import current
from shardmath.base.collective_call import waits
from shardmath.context.agreement import require_equal
from shardmath.context.context import DistributedContext, require_context
from shardmath.geometry import Spans
from shardmath.interchange.aligned import AlignedArray
from shardmath.traced import shapes
from shardmath.traced.arguments import (
    functions_of,
    words_of_fft,
    words_of_matmul,
    words_of_redistribute,
    words_of_trigonometric,
)
from shardmath.traced.words import read_words

Shape = tuple[int, ...]

_REFUSED = ("out", "async_op", "stream", "quantization_scales")  # arguments in compiled programs


class _Thread(threading.local):
    """Whether a compiled program makes a call in this thread."""

    calls = False


_this_thread = _Thread()


def _wait() -> None:
    """Wait for the calls of compiled programs that this process has started, as the ranks' calls
    have to come in one order. JAX returns from a program before it has run.
    """
    if not _this_thread.calls:
        import_module("jax").effects_barrier()


def traced(call: Callable[..., Any], *args: Any, **words: Any) -> Any:
    """What JAX traces in place of a call of the public function. Local.

    The call is made when the compiled program runs, and is collective then. Raises ValueError and
    NotImplementedError for calls that a compiled program cannot make.
    """
    jax: Any = import_module("jax")
    name = call.__name__
    context = words.get("context") or require_context()
    bound = inspect.signature(call).bind(*args, **words)
    bound.apply_defaults()
    given = bound.arguments
    for word in _REFUSED:
        if given.get(word) is not None and given[word] is not False:
            raise ValueError(f"{name}: {word}= is not for calls that JAX compiles: leave it out")
    leaves, structure = jax.tree_util.tree_flatten((args, words), is_leaf=_is_no_tree)
    places = [n for n, leaf in enumerate(leaves) if _is_array(leaf)]
    shape, dtype, is_even = _result(name, given, context)
    made_by = _Callback(call, leaves, structure, places, (shape, dtype), is_even, context)
    result = jax.ShapeDtypeStruct(shape, dtype)
    if _wait not in waits:
        waits.append(_wait)
    callback = import_module("jax.experimental").io_callback
    return callback(made_by, result, *[leaves[n] for n in places], ordered=True)


def _is_array(x: Any) -> bool:
    """Whether it is an operand. `qualifiers`, an array of NumPy's with fields, is not one."""
    has_fields = isinstance(x, np.ndarray) and x.dtype.names is not None
    return hasattr(type(x), "__dlpack__") and not has_fields


def _is_no_tree(x: Any) -> bool:
    return not isinstance(x, dict | list | tuple)


class _Callback:
    """The call that a compiled program makes, with arrays of JAX's in the `places` of `leaves`."""

    def __init__(
        self,
        call: Callable[..., Any],
        leaves: list[Any],
        structure: Any,
        places: list[int],
        result: tuple[Shape, Any],
        is_even: bool,
        context: DistributedContext,
    ) -> None:
        self._call, self._structure, self._places = call, structure, places
        self._leaves = [None if n in places else leaf for n, leaf in enumerate(leaves)]
        self._shape, self._dtype = result
        self._is_even = is_even
        # A program may outlive the context in which it was traced: it runs in the default one then.
        self._context = None if current.default() is context else context
        self._traced_for = context.rank, context.size

    def __call__(self, *arrays: Any) -> Any:
        context = self._context or require_default()
        if (context.rank, context.size) != self._traced_for:
            raise RuntimeError(
                "this program was compiled as rank {} of {} and runs as rank {} of {}: call "
                "jax.clear_caches() first".format(*self._traced_for, context.rank, context.size)
            )
        views = [np.asarray(x).view(AlignedArray) for x in arrays]
        leaves = list(self._leaves)
        for place, view in zip(self._places, views, strict=True):
            leaves[place] = view
        args, words = self._structure.unflatten(leaves)
        _this_thread.calls = True
        try:
            with current.within(context):
                if self._is_even:
                    context.agree(
                        f"{self._call.__name__} in a program of JAX",
                        lambda: list(views[0].shape),
                        partial(require_equal, "the shapes of parts, which have no counts"),
                    )
                made = self._call(*args, **words)
        finally:
            _this_thread.calls = False
        if (made.shape, made.dtype) != (self._shape, self._dtype):
            raise RuntimeError(
                f"{self._call.__name__}: the result is {made.dtype} {made.shape}, and JAX was told "
                f"{self._dtype} {self._shape}: pass distributions that are bound to global shapes"
            )
        return made


def require_default() -> DistributedContext:
    """The default context. Raises RuntimeError where there is none."""
    context = current.default()
    return context if isinstance(context, DistributedContext) else require_context()


def _result(
    name: str, given: Mapping[str, Any], context: DistributedContext
) -> tuple[Shape, Any, bool]:
    """The shape and the type of this rank's result, and whether they assume even parts."""
    rule = RULES.get(name)
    if rule is None:
        raise NotImplementedError(f"{name} is not there in programs that JAX compiles: call it "
                                  "outside of jax.jit")  # fmt: skip
    with current.within(context):
        extents, dtype = rule(name, given)
        is_even = None in extents and name in ("all_gather", "all_to_all")
        if is_even:
            extents = _even(name, extents, given["x"].shape, context)
    if None in extents:
        raise ValueError(
            f"{name}: the shape of this rank's result depends on its peers': pass distributions "
            "that are bound, distribution.bind(global_shape)"
        )
    return tuple(map(int, extents)), dtype, is_even


def _even(
    name: str, extents: shapes.Shape, shape: shapes.Shape, context: DistributedContext
) -> list[int]:
    """The extents of a result if all ranks' parts have the same shape."""
    axis = list(extents).index(None)
    part = shape[axis]
    if name == "all_to_all":
        part = Spans.even(shape[axis], context.size, context.rank).length
    return [context.size * part if extent is None else extent for extent in extents]


def _of_matmul(name: str, given: Mapping[str, Any]) -> tuple[shapes.Shape, Any]:
    functions_of(given["epilog"])  # raises for one with more results
    text = words_of_matmul(*(given[word] for word in _WORDS_OF_MATMUL))
    words, c = read_words(text), given["c"]
    xs = [given["a"], given["b"], *([] if c is None else [c])]
    dtype = shapes.type_of("matmul", xs, words)
    return shapes.of_product(xs, words, None), dtypes.to_numpy(dtype)


_WORDS_OF_MATMUL = ("distributions", "alpha", "beta", "epilog", "qualifiers", "options")


def _of_redistribute(name: str, given: Mapping[str, Any]) -> tuple[shapes.Shape, Any]:
    x = given["operand"]
    words = words_of_redistribute(given["input_distribution"], given["output_distribution"])
    return shapes.of_redistribution([x], read_words(words), None), np.dtype(x.dtype)


def _of_fft(name: str, given: Mapping[str, Any]) -> tuple[shapes.Shape, Any]:
    x = given["operand"]
    named = (given[word] for word in ("distribution", "axes", "norm", "options"))
    words = read_words(words_of_fft(x.ndim, *named))
    made = shapes.of_transform(name, [x], words, None)
    return made, dtypes.to_numpy(shapes.type_of(name, [x], words))


def _of_trigonometric(name: str, given: Mapping[str, Any]) -> tuple[shapes.Shape, Any]:
    x, several = given["x"], name.endswith("n")
    axes, extents = (given["axes"], given["s"]) if several else ([given["axis"]], given["n"])
    named = given["distribution"], axes, given["norm"], given["options"]
    others = given["type"], given["orthogonalize"], extents, name.startswith("i")
    words = read_words(words_of_trigonometric(x.ndim, *named, *others))
    made = shapes.of_transform("fft", [x], words, None)
    return made, dtypes.to_numpy(shapes.type_of("dct", [x], words))


def _of_collective(name: str, given: Mapping[str, Any]) -> tuple[shapes.Shape, Any]:
    x = given["x"]
    dtype = np.dtype(x.dtype)
    axis = given.get("axis", 0)
    words = {"axis": axis + x.ndim if axis < 0 else axis}
    if name in ("all_reduce", "broadcast"):
        return tuple(x.shape), dtype
    if name == "all_gather":
        return shapes.with_extent([x], words, None), dtype
    if name == "reduce_scatter":
        return shapes.of_scattering([x], words, given["counts"]), dtype
    sent, received = given["send_counts"], given["receive_counts"]
    if (sent is None) != (received is None):
        raise ValueError(
            "all_to_all: name both send_counts and receive_counts in compiled programs"
        )
    counts = None if sent is None else [*sent, *received]
    return shapes.of_exchange([x], words, counts), dtype


_TRANSFORMS = ("fft", "ifft", "rfft", "irfft")
_SERIES = ("dct", "dctn", "idct", "idctn", "dst", "dstn", "idst", "idstn")
_COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all", "broadcast", "all_reduce")
RULES: dict[str, Callable[[str, Mapping[str, Any]], tuple[shapes.Shape, Any]]] = {
    "matmul": _of_matmul,
    "redistribute": _of_redistribute,
    **dict.fromkeys(_TRANSFORMS, _of_fft),
    **dict.fromkeys(_SERIES, _of_trigonometric),
    **dict.fromkeys(_COLLECTIVES, _of_collective),
}
