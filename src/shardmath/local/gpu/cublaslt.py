"""cuBLASLt by its C interface, with the names of `nvmath.bindings.cublasLt` that `blaslt` uses.

It serves where nvmath-python is not installed: torch brings the library, but no bindings. Numbers
and types are those of cublasLt.h of CUDA 12 and 13. A status other than success is raised as
RuntimeError, with its name.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

_NAMES = ("libcublasLt.so.13", "libcublasLt.so.12")
_STATUS = {
    1: "NOT_INITIALIZED",
    3: "ALLOC_FAILED",
    7: "INVALID_VALUE",
    8: "ARCH_MISMATCH",
    11: "MAPPING_ERROR",
    13: "EXECUTION_FAILED",
    14: "INTERNAL_ERROR",
    15: "NOT_SUPPORTED",
}


class MatmulDescAttribute(IntEnum):
    """Attributes of the description of a product."""

    TRANSA = 3
    TRANSB = 4
    EPILOGUE = 7
    BIAS_POINTER = 8
    EPILOGUE_AUX_POINTER = 11
    EPILOGUE_AUX_LD = 12
    SM_COUNT_TARGET = 15
    A_SCALE_POINTER = 17
    B_SCALE_POINTER = 18
    D_SCALE_POINTER = 20
    AMAX_D_POINTER = 21
    A_SCALE_MODE = 31
    B_SCALE_MODE = 32


class MatmulPreferenceAttribute(IntEnum):
    """Attributes of preferences for the heuristics."""

    MAX_WORKSPACE_BYTES = 1
    REDUCTION_SCHEME_MASK = 3
    MIN_ALIGNMENT_A_BYTES = 5
    MIN_ALIGNMENT_B_BYTES = 6
    MIN_ALIGNMENT_C_BYTES = 7
    MIN_ALIGNMENT_D_BYTES = 8


class ReductionScheme(IntEnum):
    """How parts of k are added."""

    COMPUTE_TYPE = 2


matmul_heuristic_result_dtype = np.dtype(
    [
        ("algo", np.uint64, 8),
        ("workspace_size", np.uint64),
        ("state", np.int32),
        ("waves_count", np.float32),
        ("reserved", np.int32, 4),
    ]
)


def get_matmul_desc_attribute_dtype(which: MatmulDescAttribute) -> type[np.generic]:
    """The type of the value of that attribute."""
    if which.name.endswith("_POINTER"):
        return np.uint64
    if which is MatmulDescAttribute.EPILOGUE_AUX_LD:
        return np.int64
    return np.uint32 if which is MatmulDescAttribute.EPILOGUE else np.int32


def get_matmul_preference_attribute_dtype(which: MatmulPreferenceAttribute) -> type[np.generic]:
    """The type of the value of that attribute."""
    is_size = which is MatmulPreferenceAttribute.MAX_WORKSPACE_BYTES
    return np.uint64 if is_size else np.uint32


def get_version() -> int:
    """The library's version. Raises OSError where the library is not found."""
    version = _library().cublasLtGetVersion
    version.restype = ctypes.c_size_t
    return int(version())


def create() -> int:
    """A handle."""
    return _made("cublasLtCreate")


def matmul_desc_create(compute: int, scale: int) -> int:
    """The description of a product."""
    return _made("cublasLtMatmulDescCreate", ctypes.c_int(compute), ctypes.c_int(scale))


def matmul_desc_destroy(desc: int) -> None:
    """Free it."""
    _call("cublasLtMatmulDescDestroy", _pointer(desc))


def matmul_desc_set_attribute(desc: int, which: int, value: int, nbytes: int) -> None:
    """Set an attribute to what is at the address `value`."""
    _set("cublasLtMatmulDescSetAttribute", desc, which, value, nbytes)


def matrix_layout_create(dtype: int, rows: int, columns: int, leading: int) -> int:
    """The layout of a matrix, by columns."""
    extents = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(leading)
    return _made("cublasLtMatrixLayoutCreate", ctypes.c_int(dtype), *extents)


def matrix_layout_destroy(layout: int) -> None:
    """Free it."""
    _call("cublasLtMatrixLayoutDestroy", _pointer(layout))


def matmul_preference_create() -> int:
    """Preferences for the heuristics."""
    return _made("cublasLtMatmulPreferenceCreate")


def matmul_preference_destroy(preference: int) -> None:
    """Free it."""
    _call("cublasLtMatmulPreferenceDestroy", _pointer(preference))


def matmul_preference_set_attribute(preference: int, which: int, value: int, nbytes: int) -> None:
    """Set an attribute to what is at the address `value`."""
    _set("cublasLtMatmulPreferenceSetAttribute", preference, which, value, nbytes)


def matmul_algo_get_heuristic(
    handle: int,
    desc: int,
    a: int,
    b: int,
    c: int,
    d: int,
    preference: int,
    wanted: int,
    results: int,
    count: int,
) -> None:
    """Write at most `wanted` algorithms to address `results`, and their number to `count`."""
    given = [_pointer(x) for x in (handle, desc, a, b, c, d, preference)]
    last = ctypes.c_int(wanted), _pointer(results), _pointer(count)
    _call("cublasLtMatmulAlgoGetHeuristic", *given, *last)


def matmul(
    handle: int,
    desc: int,
    alpha: int,
    a: int,
    a_layout: int,
    b: int,
    b_layout: int,
    beta: int,
    c: int,
    c_layout: int,
    d: int,
    d_layout: int,
    algorithm: int,
    workspace: int,
    workspace_size: int,
    stream: int,
) -> None:
    """Put a product on a stream. All but a size are addresses."""
    given = (handle, desc, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout)
    places = [_pointer(x) for x in (*given, algorithm, workspace)]
    _call("cublasLtMatmul", *places, ctypes.c_size_t(workspace_size), _pointer(stream))


_pointer = ctypes.c_void_p


@cache
def _library() -> ctypes.CDLL:
    """The library: of the process, the system, or an installed package. Raises OSError."""
    reasons = []
    for path in _paths():
        try:
            return ctypes.CDLL(path)
        except OSError as error:
            reasons.append(str(error))
    raise OSError(reasons[0])


def _paths() -> Iterator[str]:
    yield from _NAMES
    packages = importlib.util.find_spec("nvidia")
    for folder in (packages and packages.submodule_search_locations) or ():
        for name in _NAMES:
            yield from map(str, Path(folder).glob(f"*/lib/{name}"))


def _call(name: str, *arguments: Any) -> None:
    status = getattr(_library(), name)(*arguments)
    if status:
        raise RuntimeError(f"{name}: {_STATUS.get(status, status)}")


def _made(name: str, *arguments: Any) -> int:
    made = ctypes.c_void_p()
    _call(name, ctypes.byref(made), *arguments)
    assert made.value is not None, name
    return made.value


def _set(name: str, what: int, which: int, value: int, nbytes: int) -> None:
    last = ctypes.c_int(which), _pointer(value), ctypes.c_size_t(nbytes)
    _call(name, _pointer(what), *last)
