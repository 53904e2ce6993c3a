"""Calls of the CUDA driver, all of them through here, and the check of their status.

`call("cuMemCreate", ...)` returns the function's results without its status, and raises CudaError,
which names the function and the reason, when the status is not success.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

from shardmath.cuda.packages import unavailable
from shardmath.errors import BackendUnavailable, CudaError, HeapExhausted


@cache
def bindings() -> ModuleType:
    """The module `cuda.bindings.driver`. Raises BackendUnavailable, with the line to run."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise unavailable("computing on GPUs needs cuda-bindings", error) from None
    module: ModuleType = driver
    return module


def call(name: str, *args: Any) -> Any:
    """The results of the driver's function `name`: None, one value, or a tuple.

    Raises CudaError when it fails, BackendUnavailable when there is no driver.
    """
    try:
        answer = _function(name)(*args)
    except RuntimeError as error:
        raise _unusable(name, error) from None
    if answer[0]:
        raise CudaError(f"{name}: {_reason(answer[0])}")
    return _results(answer)


def require_success(name: str, status: int) -> None:
    """Raise CudaError where the driver's function `name` has returned an error."""
    if status:
        raise CudaError(f"{name}: {_reason(status)}")


def call_for_memory(need: int, name: str, *args: Any) -> Any:
    """Call a function that takes `need` bytes: HeapExhausted when the device lacks them."""
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
        answer = _function(name)(*args)
    except RuntimeError as error:
        raise _unusable(name, error) from None
    return int(answer[0]), _results(answer)


@contextmanager
def beside_captures() -> Iterator[None]:
    """Within, calls of this thread are not captured, and do not invalidate a capture."""
    relaxed = bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = call("cuThreadExchangeStreamCaptureMode", relaxed)
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", before)


@cache
def _function(name: str) -> Callable[..., tuple[Any, ...]]:
    function: Callable[..., tuple[Any, ...]] = getattr(bindings(), name)
    return function


def _results(answer: tuple[Any, ...]) -> Any:
    """The results of a function, which follow its status."""
    if len(answer) == 2:
        return answer[1]
    return answer[1:] or None


def _unusable(name: str, error: RuntimeError) -> BackendUnavailable:
    """The bindings find no libcuda, or no such function in it."""
    return BackendUnavailable(
        f'{name}: no usable CUDA driver here ({error}); with device_id "cpu" cores compute'
    )


def _reason(status: int) -> str:
    driver = bindings()
    code = driver.CUresult(status)
    _, name = driver.cuGetErrorName(code)
    _, text = driver.cuGetErrorString(code)
    return f"{_text(name)} ({_text(text)})"


def _text(data: bytes | None) -> str:
    return data.decode() if data else "unknown error"
