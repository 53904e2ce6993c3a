"""Launches of kernels/epilog.cu: sums of parts, alpha and beta, epilogs, copies in any strides.

The host's `local/epilog.py` is the oracle: the same functions of the same inputs, in the
accumulator's type, rounded once.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from shardmath.arrays import dtypes
from shardmath.cuda.device import Device
from shardmath.cuda.driver import call
from shardmath.cuda.kernel import Argument, kernel
from shardmath.local.epilog import MatmulEpilog
from shardmath.local.gpu.matrix import NO_MATRIX, Matrix

_THREADS, _COLUMNS, _ROWS = 256, 4, 8
_WAVES = 16  # the most blocks for each multiprocessor; a block then does several tiles
_SIDE = 32
_RUN = 8  # kRun
_NONE = "identity"  # the kernel's function that does nothing


def combine(
    device: Device,
    stream: int,
    d: Matrix,
    parts: Sequence[Matrix],
    *,
    alpha: complex = 1.0,
    beta: complex = 0.0,
    c: Matrix | None = None,
    epilog: MatmulEpilog = MatmulEpilog.DEFAULT,
    bias: tuple[int, int] | None = None,
    aux: Matrix | None = None,
    unrounded: Matrix | None = None,
    conjugate: bool = False,
    extra: str = "",
) -> None:
    """Put d = F(alpha (parts[0] + parts[1] + ...) + beta c) on `stream`.

    All have d's shape; the parts are of one type. `bias` is the address of an element for each row
    and their distance in elements; `aux` is what the epilog reads or makes, of which a made mask
    must be zero where it has no row of d. `unrounded`, of the accumulator's type, gets d before it
    is rounded; it may be one of the parts. `conjugate` conjugates the parts. `extra` is the type of
    a bias and of GELU's aux, if not d's.
    """
    if d.size == 0:
        return
    part = parts[0].dtype if parts else dtypes.accumulator(d.dtype).name
    room = max(8, 1 << (len(parts) - 1).bit_length())
    defines = (
        f"ELEMENT={d.dtype}",
        *([f"EXTRA={extra}"] if extra else []),
        f"PART={part}",
        f"ADDEND={c.dtype if c is not None else d.dtype}",
        f"PARTS={room}",
        f"BIAS={epilog.has_bias:d}",
        f"ACTIVATION={epilog.activation or _NONE}",
        f"GRADIENT={epilog.gradient or _NONE}",
        f"KEEP_AUX={bool(epilog.makes_aux):d}",
        f"PLAIN={_is_plain(parts, alpha, beta, c, conjugate=conjugate):d}",
        f"HALVES={dtypes.of(extra or d.dtype).itemsize <= 2 >= d.itemsize:d}",
    )
    text = struct.pack("qq", d.rows, d.columns)
    text += b"".join(NO_MATRIX if x is None else x.argument for x in (d, c, aux, unrounded))
    text += struct.pack("Qq", *(bias or (0, 0)))
    text += struct.pack("dddd", alpha.real, alpha.imag, beta.real, beta.imag)
    runs = _lies_in_runs(d, [x for x in (*parts, c, unrounded) if x is not None], aux)
    text += struct.pack("iiii", len(parts), conjugate, d.by_columns, 0)
    text += b"".join(x.argument for x in parts) + NO_MATRIX * (room - len(parts))
    if runs:
        elements = _RUN * _THREADS * (4 if dtypes.of(part).itemsize == 2 else 1)
        blocks = min(-(-d.size // elements), device.processors * _WAVES)
        launched = kernel(device, "epilog", "epilog_runs", defines)
        launched.launch(stream, blocks, _THREADS, Argument(text), early=True)
        return
    groups = -(-d.rows // _ROWS)
    fast, slow = (groups, d.columns) if d.by_columns else (d.columns, groups)
    tiles = -(-fast // _THREADS) * -(-slow // _COLUMNS)
    blocks = min(tiles, device.processors * _WAVES)
    kernel(device, "epilog", "epilog", defines).launch(stream, blocks, _THREADS, Argument(text))


def row_sums(device: Device, stream: int, x: Matrix, sums: int, *, conjugate: bool = False) -> None:
    """Put the sums of the rows of `x` at address `sums`, in the accumulator's type, on `stream`."""
    if not x.rows:
        return
    wide = dtypes.accumulator(x.dtype).name
    switches = ("PARTS=1", "BIAS=0", f"ACTIVATION={_NONE}", f"GRADIENT={_NONE}", "KEEP_AUX=0")
    defines = (f"ELEMENT={wide}", f"PART={x.dtype}", f"ADDEND={wide}", *switches)
    text = struct.pack("qq", x.rows, x.columns) + x.argument
    text += struct.pack("Qqii", sums, 1, conjugate, x.by_columns)
    blocks = min(-(-x.rows // _SIDE), device.processors * _WAVES)
    launched = kernel(device, "epilog", "row_sums", defines)
    launched.launch(stream, blocks, _SIDE * _SIDE, Argument(text))


def _is_plain(
    parts: Sequence[Matrix], alpha: complex, beta: complex, c: Matrix | None, *, conjugate: bool
) -> bool:
    """Whether the sum is just the first part."""
    return len(parts) == 1 and alpha == 1 and (c is None or beta == 0) and not conjugate


def _lies_in_runs(d: Matrix, others: Sequence[Matrix], aux: Matrix | None) -> bool:
    """Whether 8 elements lie side by side, aligned to 16 bytes, everywhere in all matrices.

    With an auxiliary matrix, whose columns are contiguous, only along columns: 8 bits are a byte.
    """
    if aux is not None and not d.by_columns:
        return False
    masks = aux is not None and aux.dtype == "uint8"
    for x in (d, *others, *([] if aux is None or masks else [aux])):
        if x.itemsize == 1:  # fewer than 16 bytes
            return False
        line = x if d.by_columns else x.transposed()
        aligned = x.address % 16 == 0 and (line.column_stride * x.itemsize) % 16 == 0
        if line.row_stride != 1 or not aligned:
            return False
    return (d.rows if d.by_columns else d.columns) % _RUN == 0


def copy(device: Device, stream: int, target: Matrix, source: Matrix) -> None:
    """Put a copy on `stream`, between matrices of one shape and type; the target has no gaps."""
    same = (target.row_stride, target.column_stride) == (source.row_stride, source.column_stride)
    if same and target.size:
        call(
            "cuMemcpyDtoDAsync",
            target.address,
            source.address,
            target.size * target.itemsize,
            stream,
        )
    else:
        combine(device, stream, target, [source])
