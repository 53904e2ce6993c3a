"""cuBLASLt as this package uses it: one product of column-major matrices, described once.

A `Product` owns the library's descriptors and the algorithms that its heuristics chose. It is kept
for the next product of the same `MatmulProblem`; addresses are arguments of `run`. The bindings are
those of nvmath-python or, where that is missing, `cublaslt`, for the library that torch brings.
"""

from __future__ import annotations

import statistics
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from hashlib import blake2b
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from shardmath.arrays import dtypes
from shardmath.base.lru_cache import LRUCache
from shardmath.cuda.device import Device
from shardmath.cuda.driver import call
from shardmath.cuda.packages import bindings_of
from shardmath.errors import BackendUnavailable
from shardmath.local.gpu import cublaslt

WORKSPACE = 32 << 20  # bytes that algorithms may use; what NVIDIA recommends for Hopper
_KEPT = 512  # products per process
_CANDIDATES = 8  # algorithms that can be timed
_TIMED = 5  # runs of each

_OPERATIONS = {"N": 0, "T": 1, "C": 2}


class MatrixLayout(NamedTuple):
    """A matrix as cuBLASLt describes it: `rows` x `columns`, stored by columns."""

    dtype: str
    rows: int
    columns: int
    leading: int
    alignment: int  # its address is a multiple of so many bytes, at most 256
    operation: str = "N"  # of an operand: N, T or C


class EpilogAttributes(NamedTuple):
    """An epilog of cuBLASLt: its number, and the leading dimension of the auxiliary matrix."""

    epilog: int = 1
    aux_leading: int = 0


class ScaleModes(NamedTuple):
    """Scales of eight-bit matrices: cuBLASLt's numbers of the modes of A's and B's, whether D has
    one, and whether its greatest absolute value is wanted.
    """

    a: int = 0
    b: int = 0
    d: bool = False
    amax: bool = False


class MatmulProblem(NamedTuple):
    """Everything that the algorithm for D = F(alpha op(A) op(B) + beta C) depends on."""

    m: int
    n: int
    k: int
    a: MatrixLayout
    b: MatrixLayout
    c: MatrixLayout
    d: MatrixLayout
    compute: int | None = None  # a MatmulComputeType; None for the usual one
    extras: EpilogAttributes = EpilogAttributes()
    processors: int = 0  # that it may use, 0 for all: the others are for work beside it
    scaled: ScaleModes | None = None


def product(device: Device, shape: MatmulProblem) -> Product | None:
    """The product of that shape on `device`, kept; None where cuBLASLt has no algorithm."""
    with _lock:
        return _products.made((device.ordinal, shape), lambda: Product.make(device, shape))


_lock = threading.RLock()
_products: LRUCache[tuple[int, MatmulProblem], Product | None] = LRUCache(_KEPT)


class Product:
    """One product on one device."""

    def __init__(self, device: Device, shape: MatmulProblem) -> None:
        self._device = device
        self._handle = _handle(device)
        self._lt = lt = bindings()
        operand = dtypes.of(shape.a.dtype)
        scale = operand.scalars[0]
        self._scale = _numbered(scale)
        self._descriptor = lt.matmul_desc_create(shape.compute or operand.computes[0], scale)
        undo = [(lt.matmul_desc_destroy, self._descriptor)]
        self._layouts = []
        for side in (shape.a, shape.b, shape.c, shape.d):
            rows, columns, leading = side.rows, side.columns, side.leading
            layout = lt.matrix_layout_create(_number(side.dtype), rows, columns, leading)
            self._layouts.append(layout)
            undo.append((lt.matrix_layout_destroy, layout))
        weakref.finalize(self, _destroy, undo).atexit = False
        self._set("TRANSA", _OPERATIONS[shape.a.operation])
        self._set("TRANSB", _OPERATIONS[shape.b.operation])
        self._describe(shape)
        self._problem = shape
        self._algorithms: Any = None

    @classmethod
    def make(cls, device: Device, shape: MatmulProblem) -> Product | None:
        """A new one with its algorithm; None where there is none."""
        device.activate()
        product = cls(device, shape)
        return product if product._choose(shape) else None

    def run(
        self,
        stream: int,
        a: int,
        b: int,
        c: int,
        d: int,
        *,
        alpha: complex,
        beta: complex,
        workspace: int,
        bias: int = 0,
        aux: int = 0,
        algorithm: int = 0,
        scales: Sequence[int] = (),
    ) -> None:
        """Put it on `stream`. `workspace` has WORKSPACE bytes. D may be C.

        `scales` are addresses, or 0: of the scales of A, of B, of D, and of D's greatest value.
        `algorithm` is the number of one that the heuristics named, in their order, fastest first.
        """
        self._device.activate()
        if bias:
            self._set("BIAS_POINTER", bias)
        if aux:
            self._set("EPILOGUE_AUX_POINTER", aux)
        for name, address in zip(_SCALE_POINTERS, scales, strict=False):
            self._set(name, address)
        scalars = (alpha, beta) if self._scale.kind == "c" else (alpha.real, beta.real)
        alphas, betas = np.array(scalars, self._scale)[:, None]
        left, right, addend, result = self._layouts
        self._lt.matmul(
            self._handle,
            self._descriptor,
            alphas.ctypes.data,
            *(a, left, b, right),
            betas.ctypes.data,
            *(c, addend, d, result),
            self._algorithms[algorithm : algorithm + 1]["algo"].ctypes.data,
            workspace,
            WORKSPACE,
            stream,
        )

    def times(self, stream: int, launch: Callable[[int], None]) -> list[float]:
        """The median seconds of each algorithm that the heuristics named; waits for the stream.

        `launch(algorithm)` runs this product with it.
        """
        self._device.activate()
        events = [call("cuEventCreate", 0) for _ in range(_TIMED + 1)]
        medians = []
        for algorithm in range(len(self._algorithms)):
            launch(algorithm)  # loads its kernel
            for event in events:
                call("cuEventRecord", event, stream)
                launch(algorithm)
            call("cuEventSynchronize", events[-1])
            taken = [float(call("cuEventElapsedTime", *two)) for two in pairwise(events)]
            medians.append(statistics.median(taken) * 1e-3)
        for event in events:
            call("cuEventDestroy", event)
        return medians

    @cached_property
    def signature(self) -> bytes:
        """A digest of the product and its algorithms: equal where both are."""
        text = repr(self._problem).encode() + self._algorithms["algo"].tobytes()
        return blake2b(text, digest_size=16).digest()

    def _describe(self, shape: MatmulProblem) -> None:
        extras = shape.extras
        if extras.epilog != 1:
            self._set("EPILOGUE", extras.epilog)
        if extras.aux_leading:
            self._set("EPILOGUE_AUX_LD", extras.aux_leading)
        if shape.processors:
            self._set("SM_COUNT_TARGET", shape.processors)
        if shape.scaled is not None:
            self._set("A_SCALE_MODE", shape.scaled.a)
            self._set("B_SCALE_MODE", shape.scaled.b)
            # The choice depends on which pointers are set, not on their values.
            there = (bool(shape.scaled.a), bool(shape.scaled.b), shape.scaled.d, shape.scaled.amax)
            for name, is_there in zip(_SCALE_POINTERS, there, strict=True):
                if is_there:
                    self._set(name, _SOMEWHERE)

    def _choose(self, shape: MatmulProblem) -> bool:
        lt, names = self._lt, self._lt.MatmulPreferenceAttribute
        preference = lt.matmul_preference_create()
        try:
            # Parts of k are added in the compute type, not rounded to D's type before.
            reduction = int(lt.ReductionScheme.COMPUTE_TYPE)
            wanted = {"MAX_WORKSPACE_BYTES": WORKSPACE, "REDUCTION_SCHEME_MASK": reduction}
            for name, side in zip("ABCD", (shape.a, shape.b, shape.c, shape.d), strict=True):
                wanted[f"MIN_ALIGNMENT_{name}_BYTES"] = side.alignment
            for name, value in wanted.items():
                which = getattr(names, name)
                text = np.array([value], lt.get_matmul_preference_attribute_dtype(which))
                lt.matmul_preference_set_attribute(preference, which, text.ctypes.data, text.nbytes)
            results = np.zeros(_CANDIDATES, lt.matmul_heuristic_result_dtype)
            count = np.zeros(1, np.int32)
            try:
                lt.matmul_algo_get_heuristic(
                    self._handle,
                    self._descriptor,
                    *self._layouts,
                    preference,
                    _CANDIDATES,
                    results.ctypes.data,
                    count.ctypes.data,
                )
            except Exception as error:  # of a class of the bindings' own
                if "NOT_SUPPORTED" in str(error) or "INVALID_VALUE" in str(error):
                    return False
                raise
        finally:
            lt.matmul_preference_destroy(preference)
        self._algorithms = results[: int(count[0])]
        return bool(count[0])

    def _set(self, name: str, value: int) -> None:
        which = getattr(self._lt.MatmulDescAttribute, name)
        text = np.array([value], self._lt.get_matmul_desc_attribute_dtype(which))
        self._lt.matmul_desc_set_attribute(self._descriptor, which, text.ctypes.data, text.nbytes)


_SCALE_POINTERS = ("A_SCALE_POINTER", "B_SCALE_POINTER", "D_SCALE_POINTER", "AMAX_D_POINTER")
_SOMEWHERE = 1 << 20  # an aligned address that nothing reads


def _number(dtype: str) -> int:
    number = dtypes.of(dtype).number
    assert number is not None, f"cuBLASLt has no {dtype}"
    return number


def _numbered(number: int) -> np.dtype[Any]:
    return dtypes.to_numpy(dtypes.numbered(number))


def _destroy(undo: list[tuple[Any, int]]) -> None:
    for destroy, what in undo:
        destroy(what)


@cache
def bindings() -> Any:
    """The module `nvmath.bindings.cublasLt`, or `cublaslt`. Raises BackendUnavailable, with the
    line to run.
    """
    what = "a matrix product on GPUs needs cuBLASLt"
    try:
        return bindings_of("nvmath.bindings.cublasLt", "get_version", what)
    except BackendUnavailable as missing:
        try:
            cublaslt.get_version()
        except OSError:
            raise missing from None
    return cublaslt


@cache
def _handle(device: Device) -> Any:
    """The library's handle for a device, for the life of the process."""
    device.activate()
    return bindings().create()
