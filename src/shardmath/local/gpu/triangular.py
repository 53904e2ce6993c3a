"""Solutions of a triangular block for a few right-hand sides, by a kernel of ours.

cuBLAS needs many launches for a block of some 512 rows, and each waits for the one before. The
kernel needs one: rows wait for each other at barriers of a block of threads.
"""

from __future__ import annotations

import struct

from shardmath.arrays import dtypes
from shardmath.cuda.device import Device
from shardmath.cuda.kernel import Argument, Kernel, kernel
from shardmath.local.gpu.matrix import Matrix
from shardmath.local.lapack import Op

_ROWS = 1024  # kRows
_COLUMNS = 64  # for more, cuBLAS is chosen
_BYTES, _OF_STEP = 16, 64  # of a row of B in a block of threads; of a row of A in a step
_WARP = 32


def takes(b: Matrix) -> bool:
    """Whether the kernel is to solve for these right-hand sides."""
    return b.rows <= _ROWS and b.columns <= _COLUMNS


def load(device: Device, dtype: str) -> None:
    """Load the kernels: to load them later may wait for all running kernels."""
    for by_rows in (False, True):
        _kernel(device, dtype, by_rows).load()


def solve(
    device: Device, stream: int, a: Matrix, b: Matrix, *, lower: bool, op: Op, unit: bool
) -> None:
    """Put B = op(A)^-1 B on `stream` for a triangular A, of any strides; `takes` says for which B.
    The other triangle of A is not read, nor, with `unit`, the diagonal, which is taken for ones.
    """
    t = a if op == "N" else a.transposed()
    if lower is not (op == "N"):  # an upper triangle, from its last row and column on a lower one
        t, b = _backward(t, columns=True), _backward(b, columns=False)
    by_rows = abs(t.column_stride) < abs(t.row_stride)
    text = struct.pack("Q2q", t.address, t.row_stride, t.column_stride)
    text += struct.pack("Q2q", b.address, b.row_stride, b.column_stride)
    text += struct.pack("4i", b.rows, b.columns, unit, op == "C")
    blocks = -(-b.columns // (_BYTES // b.itemsize))
    threads = -(-b.rows // _WARP) * _WARP
    _kernel(device, b.dtype, by_rows).launch(stream, blocks, threads, Argument(text))


def _backward(x: Matrix, *, columns: bool) -> Matrix:
    """The matrix with rows, and `columns`, in the opposite order."""
    start = (x.rows - 1) * x.row_stride + columns * (x.columns - 1) * x.column_stride
    return x._replace(
        address=x.address + start * x.itemsize,
        row_stride=-x.row_stride,
        column_stride=-x.column_stride if columns else x.column_stride,
    )


def _kernel(device: Device, dtype: str, by_rows: bool) -> Kernel:
    defines = f"ELEMENT={dtype}", f"BY_ROWS={int(by_rows)}"
    shared = _ROWS * _BYTES
    if by_rows:
        shared += _ROWS * (_OF_STEP + dtypes.of(dtype).itemsize)
    return kernel(device, "solve_triangular", "solve_triangular", defines, shared=shared)
