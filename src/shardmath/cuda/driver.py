"""Calls of the CUDA driver: one door, one check.

`call("cuMemCreate", ...)` returns the function's results without its status, and raises CudaError,
which names the function and the reason, when the status is not success.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

from shardmath.errors import BackendUnavailable, CudaError, HeapExhausted

__all__ = ["bindings", "call", "call_for_memory", "status_of"]


@cache
def bindings() -> ModuleType:
    """The module `cuda.bindings.driver`. Raises BackendUnavailable, with the line to run."""
    try:
        from cuda.bindings import driver
    except ImportError:
        raise BackendUnavailable(
            "computing on GPUs needs cuda-bindings: pip install 'cuda-bindings>=13'"
        ) from None
    module: ModuleType = driver
    return module


def call(name: str, *args: Any) -> Any:
    """The results of the driver's function `name`: None, one value, or a tuple.

    Raises CudaError when it fails, BackendUnavailable when there is no driver.
    """
    status, results = status_of(name, *args)
    if status:
        raise CudaError(f"{name}: {_reason(status)}")
    return results


def call_for_memory(need: int, name: str, *args: Any) -> Any:
    """As `call`, for one that takes `need` bytes: HeapExhausted when the device lacks them."""
    status, results = status_of(name, *args)
    if not status:
        return results
    if status == bindings().CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        have, total = call("cuMemGetInfo")
        raise HeapExhausted(
            f"symmetric memory needs {need:,} bytes more, and {have:,} of the GPU's {total:,} are "
            "free; free arrays, or use more ranks on more GPUs",
            need=need,
            have=int(have),
        )
    raise CudaError(f"{name} of {need:,} bytes: {_reason(status)}")


def status_of(name: str, *args: Any) -> tuple[int, Any]:
    """The status of the driver's function `name`, 0 for success, and its results."""
    try:
        status, *results = getattr(bindings(), name)(*args)
    except RuntimeError as error:  # the bindings find no libcuda, or no such function in it
        raise BackendUnavailable(f"{name}: no usable CUDA driver here ({error})") from None
    if not results:
        return int(status), None
    return int(status), results[0] if len(results) == 1 else tuple(results)


def _reason(status: int) -> str:
    driver = bindings()
    code = driver.CUresult(status)
    _, name = driver.cuGetErrorName(code)
    _, text = driver.cuGetErrorString(code)
    return f"{_text(name)} ({_text(text)})"


def _text(data: bytes | None) -> str:
    return data.decode() if data else "unknown error"
