"""One rank's dense linear algebra on its GPU: cuSOLVER, cuBLAS, and kernels of our own.

Matrices are in column-major order. Everything is put on a stream, and nothing waits for it: faults
of numbers are noted in `status`, the address of a word that becomes the least of all codes. The
host's `local/lapack.py` is the oracle. The bindings are those of nvmath-python's base package.
"""

from __future__ import annotations

import struct
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from shardmath.arrays.dtypes import to_numpy
from shardmath.base.integers import up
from shardmath.cuda.device import Device
from shardmath.cuda.driver import call
from shardmath.cuda.kernel import Argument, Kernel, kernel
from shardmath.cuda.packages import bindings_of
from shardmath.local.gpu import triangular
from shardmath.local.gpu.blaslt import WORKSPACE
from shardmath.local.gpu.matrix import Matrix
from shardmath.local.lapack import Op

_LETTERS = {"float32": "s", "float64": "d", "complex64": "c", "complex128": "z"}
DTYPES = tuple(_LETTERS)
_OPS = {"N": 0, "T": 1, "C": 2}
_THREADS, _WAVES = 256, 16
_CHUNK = 512  # kChunk
_EXCHANGING = 4  # blocks on each multiprocessor
_ALIGNMENT = 256  # of what a routine is given: its word, the rows that it has exchanged, its room
_REAL = {"float32": "float", "float64": "double"}  # types of panels of LU that our kernel takes
_ELEMENTS = {**_REAL, "complex64": "Complex<float>", "complex128": "Complex<double>"}
_PANEL_THREADS, _PANEL_BLOCKS = 384, 128  # rows of a block, and how many there are at most (kHeard)
_WIDTH = 32  # kWidth, of both kernels
_DIVIDING = 64  # threads of a block of `divide`
_PACKETS = 2 * (1 + _WIDTH) * 16  # bytes of a block's packets
_SOMEWHERE = 1 << 20  # an aligned address that nothing reads
KERNELS = (
    "check_finite", "conjugate", "set_identity", "keep_lower", "note_zeros", "begin", "least",
    "number_pivots", "exchange_rows",
)  # fmt: skip


@cache
def bindings() -> tuple[Any, Any]:
    """The bindings of cuSOLVER and cuBLAS. Raises BackendUnavailable, with the line to run."""
    what = "a factorisation on GPUs needs cuSOLVER and cuBLAS"
    cublas = bindings_of("nvmath.bindings.cublas", "get_cudart_version", what)
    bindings_of("nvmath.bindings.cusolver", "get_version", what)
    return import_module("nvmath.bindings.cusolverDn"), cublas


def load(device: Device, dtype: str) -> None:
    """Load libraries and kernels: to load them later may wait for all running kernels."""
    _solver(device)
    for beside in (False, True):
        _blas(device, beside)
    for name in KERNELS:
        _kernel(device, name, dtype).load()
    triangular.load(device, dtype)
    for name in ("factorise_columns", "bring_up") if dtype in _REAL else ():
        _panel_kernel(device, name, dtype).load()
    for name in ("factorise_diagonal", "divide"):
        _cholesky_kernel(device, name, dtype).load()


# -- factors ---------------------------------------------------------------------------------------


def room(device: Device, a: Matrix, *, pivots: bool) -> int:
    """The bytes of workspace that `lu` takes for `a`, or without `pivots` `cholesky`."""
    if not pivots:
        return WORKSPACE
    if blocks := blocks_of_lu(device, a):
        return WORKSPACE + _ALIGNMENT + blocks * _PACKETS
    return _room_of_rows(a) + _elements(device, a) * a.itemsize


def cholesky(
    device: Device, stream: int, a: Matrix, *, workspace: int, status: int, first: int
) -> None:
    """Put the Cholesky factor of a panel on `stream`, in place: L of the block A1 at its top, of
    which the lower triangle is read, and X L^-H of the rows X below. The order of the first leading
    minor of A1 that is not positive is noted, counted from `first`.

    The left half of the columns is factorised, then subtracted from the right half, and so on in
    each half (Toledo, "Locality of reference in LU decomposition with partial pivoting", SIAM J.
    Matrix Anal. Appl. 18, 1997), down to the columns of kernels/panel_cholesky.cu.
    """
    if not a.size:
        return
    if a.columns <= _WIDTH:
        text = struct.pack("q2Qq2I", a.leading or 1, a.address, status, first, a.rows, a.columns)
        argument, height = Argument(text), a.rows - a.columns
        _cholesky_kernel(device, "factorise_diagonal", a.dtype).launch(stream, 1, _WIDTH, argument)
        if height:
            blocks = -(-height // _DIVIDING)
            _cholesky_kernel(device, "divide", a.dtype).launch(stream, blocks, _DIVIDING, argument)
        return
    half, noted = up(a.columns // 2, _WIDTH), {"workspace": workspace, "status": status}
    left, right, lower = (0, half), (half, a.columns), (half, a.rows)
    cholesky(device, stream, a.part((0, a.rows), left), first=first, **noted)
    c, x, y = a.part(lower, right), a.part(lower, left), a.part(right, left)
    _subtract(device, stream, c, x, y, a.leading, op="C", workspace=workspace)
    cholesky(device, stream, c, first=first + half, **noted)


def lu(
    device: Device,
    stream: int,
    a: Matrix,
    *,
    workspace: int,
    pivots: int,
    status: int,
    first: int,
) -> None:
    """Put A = P L U on `stream`, in place. `pivots`, int32, get the row that each is exchanged
    with, counted from `first`; the first pivot that is 0 is noted, counted so from 1.
    """
    if not a.size:
        return
    if blocks_of_lu(device, a):
        _lu_of_panel(device, stream, a, workspace=workspace, pivots=pivots, first=first)
    else:
        rows, buffer = workspace + _ALIGNMENT, workspace + _room_of_rows(a)
        device.activate()
        library, handle = bindings()[0], _solver(device)
        library.set_stream(handle, stream)
        given = a.rows, a.columns, a.address, a.leading, buffer, rows, workspace
        getattr(library, _LETTERS[a.dtype] + "getrf")(handle, *given)
        found = {"count": min(a.rows, a.columns), "rows": rows, "pivots": pivots}
        _words(device, stream, "number_pivots", status, number=first, **found)
    note_zeros(device, stream, a, status=status, first=first)


def blocks_of_lu(device: Device, a: Matrix) -> int:
    """How many blocks of our kernel hold the rows of a panel; 0 if cuSOLVER factorises it."""
    blocks = -(-a.rows // _PANEL_THREADS)
    fits = a.columns <= a.rows and blocks <= min(device.processors, _PANEL_BLOCKS)
    return blocks if fits and a.dtype in _REAL else 0


def _lu_of_panel(
    device: Device, stream: int, a: Matrix, *, workspace: int, pivots: int, first: int
) -> None:
    """Factorise a panel by kernels/panel_lu.cu, and products with the columns to the right:

    columns 0 .. 31 ─ exchange rows, divide ─ subtract ─ columns 32 .. 63 ─ exchange rows, ...
    """
    names = "factorise_columns", "bring_up"
    factorise, bring_up = (_panel_kernel(device, name, a.dtype) for name in names)
    moves = workspace + WORKSPACE
    packets, leading = moves + _ALIGNMENT, a.leading or 1
    device.activate()
    call("cuMemsetD8Async", packets, 0, blocks_of_lu(device, a) * _PACKETS, stream)
    for lo in range(0, a.columns, _WIDTH):
        hi = min(lo + _WIDTH, a.columns)
        here, below, right = a.part((lo, a.rows), (0, 1)), (hi, a.rows), (hi, a.columns)
        text = struct.pack("q4Q", leading, here.address, pivots + 4 * lo, moves, packets)
        argument = Argument(text + struct.pack("4i", here.rows, hi - lo, lo, first + lo))
        factorise.launch(stream, -(-here.rows // _PANEL_THREADS), _PANEL_THREADS, argument)
        if hi - lo < a.columns:
            bring_up.launch(stream, a.columns - (hi - lo), _WIDTH, argument)
        c, left, upper = a.part(below, right), a.part(below, (lo, hi)), a.part((lo, hi), right)
        _subtract(device, stream, c, left, upper, leading, workspace=workspace)


def _subtract(
    device: Device,
    stream: int,
    c: Matrix,
    x: Matrix,
    y: Matrix,
    leading: int | None,
    *,
    op: Op = "N",
    workspace: int,
) -> None:
    """Put C = C - X op(Y) on `stream`: parts of one panel, whose columns are `leading` elements
    apart.
    """
    if not c.size:
        return
    plus = np.ones(1, to_numpy(c.dtype))
    minus = -plus
    shape = _OPS["N"], _OPS[op], c.rows, c.columns, x.columns
    factors = minus.ctypes.data, x.address, leading, y.address, leading
    given = *shape, *factors, plus.ctypes.data, c.address, leading
    _called_blas(device, stream, "gemm", c.dtype, *given, workspace=workspace, beside=True)


def _room_of_rows(a: Matrix) -> int:
    """The bytes at the beginning of the workspace that are ours and not the routine's."""
    return _ALIGNMENT + up(4 * a.columns, _ALIGNMENT)


def _elements(device: Device, a: Matrix) -> int:
    """The elements of workspace that cuSOLVER takes for a matrix that may lie anywhere."""
    return _asked(device, _LETTERS[a.dtype], (a.rows, a.columns), a.leading or 1)


@cache
def _asked(device: Device, letter: str, shape: tuple[int, int], leading: int) -> int:
    device.activate()
    ask = getattr(bindings()[0], f"{letter}getrf_buffer_size")
    return int(ask(_solver(device), *shape, _SOMEWHERE, leading))


# -- solutions -------------------------------------------------------------------------------------


def solve_triangular(
    device: Device,
    stream: int,
    a: Matrix,
    b: Matrix,
    *,
    workspace: int,
    beside: bool = False,
    lower: bool,
    op: Op = "N",
    unit: bool = False,
    right: bool = False,
) -> None:
    """Put B = op(A)^-1 B for a triangular A on `stream`, or B = B op(A)^-1 where A is to the
    `right`. See `local.lapack`.

    `workspace` has WORKSPACE bytes. A call `beside` others, on another stream at the same time,
    uses another handle of cuBLAS. For a few columns a kernel of ours takes its place.
    """
    if not b.size:
        return
    if not right and triangular.takes(b):
        triangular.solve(device, stream, a, b, lower=lower, op=op, unit=unit)
        return
    one = np.ones(1, to_numpy(b.dtype))
    flags = int(right), int(not lower), _OPS[op], int(unit)
    matrices = one.ctypes.data, a.address, a.leading, b.address, b.leading
    given = *flags, b.rows, b.columns, *matrices
    _called_blas(device, stream, "trsm", b.dtype, *given, workspace=workspace, beside=beside)


def _called_blas(
    device: Device,
    stream: int,
    routine: str,
    dtype: str,
    *given: Any,
    workspace: int,
    beside: bool,
) -> None:
    device.activate()
    library, handle = bindings()[1], _blas(device, beside)
    library.set_stream(handle, stream)
    library.set_workspace(handle, workspace, WORKSPACE)
    getattr(library, _LETTERS[dtype] + routine)(handle, *given)


# -- kernels ---------------------------------------------------------------------------------------


def check_finite(device: Device, stream: int, a: Matrix, *, status: int, code: int) -> None:
    """Note `code` where an element of A, of any strides, is NaN or infinite."""
    x = a if a.by_columns else a.transposed()
    _each(device, stream, "check_finite", x, status=status, code=code)


def conjugate(device: Device, stream: int, a: Matrix) -> None:
    """Every element becomes its complex conjugate."""
    if a.dtype.startswith("complex"):
        _each(device, stream, "conjugate", a)


def set_identity(device: Device, stream: int, a: Matrix, first: int) -> None:
    """A becomes columns of the identity, from column `first` of it on."""
    _each(device, stream, "set_identity", a, first=first)


def clear(device: Device, stream: int, a: Matrix) -> None:
    """Every element of A, of any strides, becomes 0."""
    x = a if a.by_columns else a.transposed()
    _each(device, stream, "keep_lower", x, first=x.rows)  # all of it is above that diagonal


def keep_lower(device: Device, stream: int, a: Matrix, first: int) -> None:
    """Elements above the diagonal, which begins in row `first`, become 0."""
    _each(device, stream, "keep_lower", a, first=first)


def note_zeros(device: Device, stream: int, a: Matrix, *, status: int, first: int) -> None:
    """Note the first 0 on the diagonal, counted from `first` + 1."""
    corner = a._replace(rows=min(a.rows, a.columns), columns=1)
    if corner.size:
        text = _text(corner, first, status, 0)
        _kernel(device, "note_zeros", a.dtype).launch(stream, 1, _THREADS, Argument(text))


def begin(device: Device, stream: int, status: int, number: int) -> None:
    """Put the first status, `number`, on `stream`."""
    _words(device, stream, "begin", status, number=number)


def least(device: Device, stream: int, target: int, words: int, count: int) -> None:
    """Put the least of `count` words of 8 bytes at `target`."""
    _words(device, stream, "least", target, words=words, count=count)


def exchange_rows(
    device: Device,
    stream: int,
    a: Matrix,
    pivots: int,
    count: int,
    *,
    first: int,
    backward: bool,
    status: int,
    code: int,
) -> None:
    """Exchange rows of A as `count` numbers at `pivots` say, counted from `first`: row i with the
    i-th, from the last on if `backward`. Where one is no row, `code` is noted, and none are.
    """
    if not a.size:
        return
    exchanging = _kernel(device, "exchange_rows", a.dtype)
    blocks = min(a.columns, device.processors * _EXCHANGING)
    starts = range(0, count, _CHUNK)
    for start in reversed(starts) if backward else starts:
        text = struct.pack("6q", a.rows, a.columns, first, a.address, a.leading or 1, pivots)
        text += struct.pack("2qiiQq", count, start, backward, 0, status, code)
        exchanging.launch(stream, blocks, _CHUNK, Argument(text))


def _each(
    device: Device,
    stream: int,
    name: str,
    a: Matrix,
    *,
    first: int = 0,
    status: int = 0,
    code: int = 0,
) -> None:
    """Launch a kernel that visits every element."""
    if a.size:
        blocks = min(-(-a.size // _THREADS), device.processors * _WAVES)
        text = _text(a, first, status, code)
        _kernel(device, name, a.dtype).launch(stream, blocks, _THREADS, Argument(text))


def _text(a: Matrix, first: int, status: int, code: int) -> bytes:
    return (
        struct.pack("3q", a.rows, a.columns, first) + a.argument + struct.pack("Qq", status, code)
    )


def _words(
    device: Device,
    stream: int,
    name: str,
    status: int,
    *,
    words: int = 0,
    count: int = 0,
    number: int = 0,
    rows: int = 0,
    pivots: int = 0,
) -> None:
    """Launch a kernel that visits a few words."""
    text = struct.pack("2Q2q2Q", status, words, count, number, rows, pivots)
    threads = _THREADS if name == "number_pivots" else 1
    _kernel(device, name, "float64").launch(stream, 1, threads, Argument(text))


def _kernel(device: Device, name: str, dtype: str) -> Kernel:
    return kernel(device, "factors", name, (f"ELEMENT={dtype}",))


def _panel_kernel(device: Device, name: str, dtype: str) -> Kernel:
    defines = f"ELEMENT={_REAL[dtype]}", f"THREADS={_PANEL_THREADS}"
    return kernel(device, "panel_lu", name, defines)


def _cholesky_kernel(device: Device, name: str, dtype: str) -> Kernel:
    defines = f"ELEMENT={_ELEMENTS[dtype]}", f"THREADS={_DIVIDING}"
    return kernel(device, "panel_cholesky", name, defines)


@cache
def _solver(device: Device) -> Any:
    """The handle of cuSOLVER for a device, for the life of the process."""
    device.activate()
    return bindings()[0].create()


@cache
def _blas(device: Device, beside: bool) -> Any:
    """One of cuBLAS's two handles for a device, for the life of the process."""
    device.activate()
    return bindings()[1].create()
