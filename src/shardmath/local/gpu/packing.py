"""Products in a lower precision than their type: factors packed by a kernel of ours, and multiplied
by cuBLASLt in one product of real numbers.

    C -= A B     pack A ─┐
                 pack B ─┴─ C -= (packed A)^T (packed B), summed in float32

Each row of A and each column of B becomes one packed line, contiguous in memory; a row of a complex
A becomes two, one for the real parts of the result and one for the imaginary ones.
`kernels/pack_factor.cu` shows the lines, and names the sources.
"""

from __future__ import annotations

import struct

from shardmath.arrays import dtypes
from shardmath.base.integers import up
from shardmath.cuda.device import Device
from shardmath.cuda.kernel import Argument, Kernel, kernel
from shardmath.local.gpu.gemm import multiply
from shardmath.local.gpu.matrix import Matrix
from shardmath.local.lapack import Precision

_THREADS, _LINES, _DEPTH = 256, 32, 64  # kThreads, kLines, kDepth
_PARTS = {"tf32x3": 3, "bfloat16": 1}  # of a packed line
_TYPES = {"tf32x3": "float32", "bfloat16": "bfloat16"}
_FILLED = 8  # numbers of a part of a line are a multiple of these
_TF32 = 77  # cuBLASLt's COMPUTE_32F_FAST_TF32


def load(device: Device, dtype: str, precision: Precision) -> None:
    """Load the kernel: to load it later may wait for all running kernels."""
    _kernel(device, dtype, precision).load()


def lines_of_each(dtype: str, *, right: bool) -> int:
    """How many packed lines a row of a left factor, or a column of a `right` one, becomes."""
    return 1 if right or not dtypes.of(dtype).real else 2


def packed_form(
    lines: int, depth: int, dtype: str, precision: Precision, *, right: bool
) -> tuple[tuple[int, int], str]:
    """The shape of a packed factor, (numbers of a line, packed lines), and its type. It lies in
    column-major order, at a multiple of 16 bytes.
    """
    numbers = _PARTS[precision] * _padded(depth, dtype)
    return (numbers, lines * lines_of_each(dtype, right=right)), _TYPES[precision]


def pack(
    device: Device,
    stream: int,
    x: Matrix,
    target: Matrix,
    *,
    precision: Precision,
    right: bool,
    conjugate: bool,
) -> None:
    """Put the packing of a factor, or of its complex conjugate, on `stream`: of a left one, or of
    the transpose of a `right` one, of float32 or complex64, with any strides that are not negative.
    `target` has its `packed_form`.
    """
    text = struct.pack("Q4q", x.address, x.rows, x.columns, x.row_stride, x.column_stride)
    pitch, padded = target.column_stride * target.itemsize, _padded(x.columns, x.dtype)
    text += struct.pack("Q2q2i", target.address, pitch, padded, right, conjugate)
    blocks = -(-x.rows // _LINES), -(-x.columns // _DEPTH)
    _kernel(device, x.dtype, precision).launch(stream, blocks, _THREADS, Argument(text))


def subtract_packed(
    device: Device, stream: int, target: Matrix, left: Matrix, right: Matrix, *, workspace: int
) -> None:
    """Put C -= A B on `stream`, of packed factors. The columns of C are contiguous, and its type is
    float32 or complex64.
    """
    address, rows, columns, _, leading, dtype = target
    if dtypes.of(dtype).real:
        target = Matrix(address, 2 * rows, columns, 1, 2 * leading, "float32")
    multiply(
        device,
        left.transposed(),
        right,
        target,
        stream=stream,
        workspace=workspace,
        alpha=-1.0,
        beta=1.0,
        compute=_TF32 if left.dtype == "float32" else None,
    )


def _padded(depth: int, dtype: str) -> int:
    """The numbers of a part of a packed line."""
    return up(2 * depth if dtypes.of(dtype).real else depth, _FILLED)


def _kernel(device: Device, dtype: str, precision: Precision) -> Kernel:
    defines = f"ELEMENT={dtype}", f"SPLIT={int(precision == 'tf32x3')}"
    return kernel(device, "pack_factor", "pack_factor", defines)
