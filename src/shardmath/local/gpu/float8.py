"""Launches of kernels/float8.cu: numbers from eight-bit elements and scales, and back.

The host's `local/float8.py` is the oracle.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from shardmath.cuda.device import Device
from shardmath.cuda.kernel import Argument, kernel
from shardmath.local.float8 import Blocks
from shardmath.local.gpu.matrix import NO_MATRIX, Matrix

MOST_RANKS = 64  # kRanks
_THREADS = 256
_RUN = 4  # kRun
_WAVES = 16  # the most blocks for each multiprocessor; a block then does several parts


def dequantize(
    device: Device,
    stream: int,
    out: Matrix,
    elements: Matrix | None,
    scales: Matrix | None,
    blocks: Blocks,
    *,
    factor: float = 1.0,
    known_rows: int | None = None,
    also: Sequence[Matrix] = (),
) -> None:
    """Put out = elements x scales x factor on `stream`, in float32, and the same in `also`.

    Without `elements` these are ones, as are `scales`. Rows from `known_rows` on become zeros; by
    default there are none.
    """
    if not out.size:
        return
    element = "float8_e4m3fn" if elements is None else elements.dtype
    rows, columns = (extent or 1 << 62 for extent in blocks)
    text = struct.pack("qq", out.rows, out.columns)
    text += b"".join(NO_MATRIX if x is None else x.argument for x in (elements, scales))
    known = out.rows if known_rows is None else known_rows
    text += struct.pack("qqqfi", rows, columns, known, factor, out.by_columns)
    text += b"".join(x.argument for x in (out, *also))
    defines = (f"ELEMENT={element}", f"OUTS={1 + len(also)}")
    launched = kernel(device, "float8", "dequantize", defines)
    launched.launch(stream, _blocks(device, out.size), _THREADS, Argument(text))


def quantize(
    device: Device,
    stream: int,
    out: Matrix,
    source: Matrix,
    *,
    factor: float,
    scale: int = 0,
    amax: int = 0,
) -> None:
    """Put out = source x factor x the number at address `scale`, if any, on `stream`, rounded.

    `source` is of float32. The bits at address `amax`, if any, become those of the greatest
    absolute value of `source` if that is greater.
    """
    if not out.size:
        return
    text = struct.pack("qq", out.rows, out.columns) + source.argument + out.argument
    text += struct.pack("QQfi", scale, amax, factor, out.by_columns)
    launched = kernel(device, "float8", "quantize", (f"ELEMENT={out.dtype}",))
    launched.launch(stream, _blocks(device, out.size // _RUN + 1), _THREADS, Argument(text))


def amax(device: Device, stream: int, out: int, addresses: Sequence[int]) -> None:
    """Put at address `out` the greatest of the numbers at some addresses, none of them negative."""
    assert len(addresses) <= MOST_RANKS, "addresses for which there is room"
    text = struct.pack("Qq", out, len(addresses))
    text += struct.pack(f"{MOST_RANKS}Q", *addresses, *[0] * (MOST_RANKS - len(addresses)))
    kernel(device, "float8", "amax").launch(stream, 1, 32, Argument(text))


def _blocks(device: Device, threads: int) -> int:
    return min(-(-threads // _THREADS), device.processors * _WAVES)
