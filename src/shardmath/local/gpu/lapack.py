"""One rank's dense linear algebra on its GPU: cuSOLVER, cuBLAS, and kernels of ours.

LU of a panel is `kernels/panel_lu.cu`: a few columns by one launch, and products with these:

    columns 0 .. 31 ─ exchange rows, divide ─ subtract ─ columns 32 .. 63 ─ exchange rows ─ ...

Matrices are in column-major order. All is put on a stream, and nothing waits for it: what is wrong
with numbers goes to `status`, the address of a word that becomes the least of all that is noted.
The host's `local/lapack.py` is the oracle. The bindings are nvmath-python's base package.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from shardmath.arrays.dtypes import to_numpy
from shardmath.cuda.device import Device
from shardmath.cuda.driver import call
from shardmath.cuda.kernel import Argument, Kernel, kernel
from shardmath.cuda.packages import bindings_of
from shardmath.geometry.integers import up
from shardmath.local.gpu.blaslt import WORKSPACE
from shardmath.local.gpu.matrix import Matrix
from shardmath.local.lapack import Op

_LETTERS = {"float32": "s", "float64": "d", "complex64": "c", "complex128": "z"}
DTYPES = tuple(_LETTERS)
_OPS = {"N": 0, "T": 1, "C": 2}
_THREADS, _WAVES = 256, 16
_CHUNK = 512  # kChunk
_EXCHANGING = 4  # blocks on each multiprocessor
_TALL, _TOGETHER = 512, 2  # kTall and kTogether
_FEW = 512  # right-hand sides up to which the kernel that solves for a few is the faster way
_ALIGNMENT = 256  # of what a routine is given: its word, and its room
_PANEL_THREADS = 384  # kThreads: of so many, no register of a row is spilled
_ROW_BYTES = 256  # of the rows that a thread has of columns: 64 registers
_PACKET_BYTES = 16
_SOMEWHERE = 1 << 20  # an aligned address that nothing reads
KERNELS = (
    "check_finite", "conjugate", "set_identity", "keep_lower", "note_zeros", "begin", "least",
    "note_info", "exchange_rows", "solve_few",
)  # fmt: skip


@cache
def bindings() -> tuple[Any, Any]:
    """The bindings of cuSOLVER and cuBLAS. Raises BackendUnavailable, with the line to run."""
    what = "a factorisation on GPUs needs cuSOLVER and cuBLAS"
    cublas = bindings_of("nvmath.bindings.cublas", "get_cudart_version", what)
    bindings_of("nvmath.bindings.cusolver", "get_version", what)
    return import_module("nvmath.bindings.cusolverDn"), cublas


def load(device: Device, dtype: str, panels: Iterable[Matrix] = ()) -> None:
    """Load what is used: to load it later may wait for all that runs. `panels` get LU factors."""
    _solver(device)
    for beside in (False, True):
        _blas(device, beside)
    for name in KERNELS:
        _kernel(device, name, dtype).load()
    for rows in {_Columns.of(device, panel).rows for panel in panels}:
        for name in ("factorise_columns", "bring_up"):
            _panel_kernel(device, name, dtype, rows).load()


# -- Cholesky's factor -----------------------------------------------------------------------------


def room_of_cholesky(device: Device, a: Matrix) -> int:
    """The bytes of workspace that `cholesky` takes for a matrix like that."""
    return _ALIGNMENT + _elements(device, a) * a.itemsize


def cholesky(
    device: Device, stream: int, a: Matrix, *, workspace: int, status: int, first: int
) -> None:
    """Put A = L L^H on `stream`, in place, of the lower triangle. The order of the first leading
    minor that is not positive is noted, counted from `first`.
    """
    if not a.size:
        return
    elements, buffer = _elements(device, a), workspace + _ALIGNMENT
    device.activate()
    library, handle = bindings()[0], _solver(device)
    library.set_stream(handle, stream)
    given = 0, a.columns, a.address, a.leading, buffer, elements, workspace
    getattr(library, _LETTERS[a.dtype] + "potrf")(handle, *given)
    _words(device, stream, "note_info", status, number=first, info=workspace)


def _elements(device: Device, a: Matrix) -> int:
    """The elements of workspace that potrf takes, for a matrix that may lie anywhere."""
    return _room(device, _LETTERS[a.dtype] + "potrf", a.columns, a.leading or 1)


@cache
def _room(device: Device, routine: str, n: int, leading: int) -> int:
    device.activate()
    ask = getattr(bindings()[0], f"{routine}_buffer_size")
    return int(ask(_solver(device), 0, n, _SOMEWHERE, leading))


# -- LU factors of a panel -------------------------------------------------------------------------


class _Columns(NamedTuple):
    """How many columns of a panel are factorised by a launch, and how many `rows` a thread has."""

    rows: int
    width: int

    @classmethod
    def of(cls, device: Device, panel: Matrix) -> _Columns:
        """As many as there can be where a block of each multiprocessor has some rows."""
        rows = 1
        while -(-panel.rows // (rows * _PANEL_THREADS)) > device.processors:
            rows *= 2
        width = _ROW_BYTES // (rows * panel.itemsize)
        if not width:
            raise ValueError(f"{panel.rows} rows of {panel.dtype} are more than a panel can have")
        return cls(rows, width)

    def blocks(self, height: int) -> int:
        """The blocks that have so many rows."""
        return -(-height // (self.rows * _PANEL_THREADS))


def room_of_lu(device: Device, a: Matrix) -> int:
    """The bytes of workspace that `lu` takes for a panel like that: packets of its blocks."""
    columns = _Columns.of(device, a)
    packets = 1 + columns.width * a.itemsize // 8
    return 2 * columns.blocks(a.rows) * packets * _PACKET_BYTES


def lu(
    device: Device,
    stream: int,
    a: Matrix,
    *,
    workspace: int,
    blas: int,
    beside: bool = False,
    pivots: int,
    status: int,
    first: int,
) -> None:
    """Put A = P L U on `stream`, in place, of a panel that is no wider than high. `pivots`, int32,
    get the row that each is exchanged with, counted from `first`; the first pivot that is 0 is
    noted, counted so from 1.

    `workspace` has `room_of_lu` bytes; `blas` and `beside` are as for `solve_triangular`.
    """
    if not a.size:
        return
    columns, leading = _Columns.of(device, a), a.leading or 1
    factorise, bring_up = (
        _panel_kernel(device, name, a.dtype, columns.rows)
        for name in ("factorise_columns", "bring_up")
    )
    device.activate()
    call("cuMemsetD8Async", workspace, 0, room_of_lu(device, a), stream)
    for lo in range(0, a.columns, columns.width):
        width = min(columns.width, a.columns - lo)
        hi, row, place = lo + width, first + lo, pivots + 4 * lo
        here = a.part((lo, a.rows), (lo, hi))
        text = struct.pack("2q3Q", here.rows, leading, here.address, place, workspace)
        text += struct.pack("4i", row, width, lo, 0)
        factorise.launch(stream, columns.blocks(here.rows), _PANEL_THREADS, Argument(text))
        if width < a.columns:
            text = struct.pack("q2Q4i", leading, a.part((lo, hi), (0, 1)).address, place, row, lo,
                               width, 0)  # fmt: skip
            bring_up.launch(stream, a.columns - width, columns.width, Argument(text))
        below, beyond = (hi, a.rows), (hi, a.columns)
        factors = a.part(below, (lo, hi)), a.part((lo, hi), beyond)
        subtract_product(device, stream, a.part(below, beyond), *factors, blas=blas, beside=beside)
    note_zeros(device, stream, a, status=status, first=first)


def _panel_kernel(device: Device, name: str, dtype: str, rows: int) -> Kernel:
    defines = f"ELEMENT={dtype}", f"THREADS={_PANEL_THREADS}", f"ROWS={rows}"
    return kernel(device, "panel_lu", name, defines)


# -- solutions and products -----------------------------------------------------------------------


def solve_triangular(
    device: Device,
    stream: int,
    a: Matrix,
    b: Matrix,
    *,
    blas: int,
    beside: bool = False,
    lower: bool,
    op: Op = "N",
    unit: bool = False,
    right: bool = False,
) -> None:
    """Put B = op(A)^-1 B for a triangular A on `stream`, or B = B op(A)^-1 where A is to the
    `right`. See `local.lapack`.

    At `blas` are WORKSPACE bytes for cuBLAS. What is `beside` other calls, on another stream at the
    same time, has another handle.
    """
    if not b.size:
        return
    if not right and b.rows <= _TALL and b.columns <= _FEW:
        text = struct.pack("2Q2q", a.address, b.address, a.leading or 1, b.leading or 1)
        text += struct.pack("5ii", b.rows, b.columns, int(lower), _OPS[op], int(unit), 0)
        blocks, threads = -(-b.columns // _TOGETHER), up(b.rows, 32)
        _kernel(device, "solve_few", b.dtype).launch(stream, blocks, threads, Argument(text))
        return
    one = np.ones(1, to_numpy(b.dtype))
    flags = int(right), int(not lower), _OPS[op], int(unit)
    matrices = one.ctypes.data, a.address, a.leading, b.address, b.leading
    routine = _blas_routine(device, stream, _LETTERS[b.dtype] + "trsm", blas, beside=beside)
    routine(*flags, b.rows, b.columns, *matrices)


def subtract_product(
    device: Device,
    stream: int,
    c: Matrix,
    a: Matrix,
    b: Matrix,
    *,
    blas: int,
    beside: bool = False,
) -> None:
    """Put C -= A B on `stream`, of a small product, which cuBLAS plans by itself, in no time.
    `blas` and `beside` are as for `solve_triangular`.
    """
    if not (c.size and a.size):
        return
    one = np.ones(1, to_numpy(c.dtype))
    minus = -one
    routine = _blas_routine(device, stream, _LETTERS[c.dtype] + "gemm", blas, beside=beside)
    factors = minus.ctypes.data, a.address, a.leading, b.address, b.leading
    none = _OPS["N"]
    shape = c.rows, c.columns, a.columns
    routine(none, none, *shape, *factors, one.ctypes.data, c.address, c.leading)


def _blas_routine(
    device: Device, stream: int, name: str, workspace: int, *, beside: bool
) -> Callable[..., object]:
    """A routine of cuBLAS, whose calls go to `stream`."""
    device.activate()
    library, handle = bindings()[1], _blas(device, beside)
    library.set_stream(handle, stream)
    library.set_workspace(handle, workspace, WORKSPACE)
    return partial(getattr(library, name), handle)


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


def keep_lower(device: Device, stream: int, a: Matrix, first: int) -> None:
    """What is above the diagonal becomes 0, which begins in row `first`."""
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
    info: int = 0,
) -> None:
    """Launch a kernel that visits a few words."""
    text = struct.pack("2Q2qQ", status, words, count, number, info)
    _kernel(device, name, "float64").launch(stream, 1, 1, Argument(text))


def _kernel(device: Device, name: str, dtype: str) -> Kernel:
    return kernel(device, "factors", name, (f"ELEMENT={dtype}",))


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
