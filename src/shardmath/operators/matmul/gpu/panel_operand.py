"""A factor of a product on arrival, as its kernel sees it: rows x k on the left, k x columns on the
right.

What comes from peers lies in a panel, in the order of `depth.Lines`; what is here is read where the
caller has it, if boxes of it can be loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shardmath.arrays import dtypes
from shardmath.cuda.tensormap import ALIGNMENT, BOX_BYTES, NBYTES, tensor_map
from shardmath.geometry import Move
from shardmath.local.gpu import Matrix
from shardmath.operators.matmul.gpu.k_order import Lines
from shardmath.operators.matmul.gpu.panel_schedule import TILE_ROWS

__all__ = ["SUMS_BYTES", "TILINGS", "PanelOperand", "Tiling"]

SUMS_BYTES = 1 << 17  # of a block's tile (kSumsBytes of panel_gemm.cuh)


@dataclass(frozen=True)
class Tiling:
    """How a kernel cuts its work: tiles of TILE_ROWS x `width`, steps of `depth` indices of k, by
    clusters of `cluster` blocks. Blocks of a cluster share out the columns that they load;
    `shares_depth`: or k, where a factor's rows lie across. Adding up sums of several blocks takes
    as long as `sharing` steps.
    """

    file: str
    width: int
    depth: int
    cluster: int
    stages: int
    shares_depth: bool
    sharing: int

    @property
    def shared(self) -> int:
        """Bytes of shared memory: a step's row of a factor is one of a box."""
        return 1024 + self.stages * (TILE_ROWS + self.width) * BOX_BYTES


_HALVES = Tiling("panel_gemm", 256, 64, 2, stages=4, shares_depth=True, sharing=40)
_DOUBLES = Tiling("panel_gemm_f64", 128, 16, 2, stages=6, shares_depth=False, sharing=10)
TILINGS = {"float16": _HALVES, "bfloat16": _HALVES, "float64": _DOUBLES}


@dataclass(frozen=True, eq=False)
class PanelOperand:
    """Factor `index` (0: op(A), 1: op(B)) of this rank: `own` is its local array, `moves` bring
    what it needs, `place` is where that lies in `own` if nothing needs to move. All are oriented as
    the kernel takes them, on the right if `is_right`. `kept` lives as long as the product's plan.
    """

    index: int
    is_right: bool
    own: Matrix
    moves: tuple[Move, ...]
    place: tuple[int, int] | None
    shape: tuple[int, int]
    rank: int
    tiling: Tiling
    kept: dict[Any, Any] = field(repr=False)

    @property
    def k_axis(self) -> int:
        """Which of its axes is k."""
        return 0 if self.is_right else 1

    @property
    def along_k(self) -> bool:
        """Whether neighbours in memory are neighbours along k."""
        return self.own.by_columns == (self.k_axis == 0)

    @property
    def extent(self) -> int:
        """Rows on the left, columns on the right."""
        return self.shape[1 - self.k_axis]

    @property
    def remote(self) -> int:
        """Bytes from peers."""
        if self.place is not None:
            return 0
        return self.own.itemsize * sum(m.elements for m in self.moves if m.src != self.rank)

    def turn(self, move: Move) -> tuple[bool, int]:
        """From the next rank on: no two ranks begin with the same."""
        return move.src < self.rank, move.src

    @property
    def lines(self) -> Lines:
        """Where it has its steps along k."""
        loadable = self.place is not None or _is_loadable(self.own)
        key = ("lines", self.index, self.is_right, loadable)
        if key not in self.kept:
            self.kept[key] = self._lines(loadable)
        lines: Lines = self.kept[key]
        return lines

    def _lines(self, loadable: bool) -> Lines:
        axis, step = self.k_axis, self.tiling.depth
        extent = self.shape[axis]
        if self.place is not None:
            return Lines.here(axis, extent, step)
        return Lines.of(
            self.moves, self.rank, axis=axis, extent=extent, step=step, loadable=loadable
        )

    @property
    def fits(self) -> bool:
        """Whether what lies here, and must be read where it lies, can be."""
        return self.place is None or _is_loadable(self.lying())

    def panel(self, address: int) -> Matrix:
        """Memory for what is not read where it lies, in the order of the operand, lines aligned."""
        shape = [self.extent, self.extent]
        shape[self.k_axis] = self.lines.width
        unit = ALIGNMENT // self.own.itemsize
        pitch = -(-shape[0 if self.own.by_columns else 1] // unit) * unit
        strides = (1, pitch) if self.own.by_columns else (pitch, 1)
        return Matrix(address, shape[0], shape[1], *strides, self.own.dtype)

    def nbytes(self) -> int:
        """Of that memory."""
        panel = self.panel(0)
        lines = panel.columns if self.own.by_columns else panel.rows
        return panel.itemsize * lines * max(panel.row_stride, panel.column_stride)

    def across(self, panel: Matrix, lo: int, hi: int) -> Matrix:
        """Some rows of a left panel, or columns of a right one."""
        whole = 0, self.lines.width
        return panel.part(whole, (lo, hi)) if self.is_right else panel.part((lo, hi), whole)

    def lying(self) -> Matrix:
        """What is read in the own array, k from its first index there on; empty if nothing is."""
        if self.place is not None:
            (row, column), (rows, columns) = self.place, self.shape
            return self.own.part((row, row + rows), (column, column + columns))
        if not self.lines.own:
            return self.own.part((0, 0), (0, 0))
        run = next(m for m in self.moves if m.src == self.rank).runs[1 - self.k_axis]
        ranges = [(run.src_start, run.src_start + run.length)] * 2
        ranges[self.k_axis] = 0, self.lines.ends[self.rank]
        return self.own.part(ranges[0], ranges[1])

    def map(self, matrix: Matrix) -> bytes:
        """The struct `TensorMap` of its panel or of what lies here, in the kernel's boxes."""
        if not matrix.size:
            return bytes(NBYTES)
        tiling = self.tiling
        pitch = max(abs(matrix.row_stride), abs(matrix.column_stride))
        extents = matrix.rows, matrix.columns
        width, height = extents if self.own.by_columns else extents[::-1]
        if self.along_k:
            box = tiling.width // tiling.cluster if self.is_right else TILE_ROWS
        else:
            shared = self.is_right and tiling.shares_depth
            box = tiling.depth // tiling.cluster if shared else tiling.depth
        return tensor_map(matrix.address, matrix.dtype, width, height, pitch, box)


def _is_loadable(x: Matrix) -> bool:
    """Whether boxes of it can be loaded where it lies."""
    itemsize = dtypes.of(x.dtype).itemsize
    if (x.row_stride if x.by_columns else x.column_stride) != 1:
        return False
    pitch = x.column_stride if x.by_columns else x.row_stride
    width = x.rows if x.by_columns else x.columns
    aligned = x.address % ALIGNMENT == 0 and itemsize * pitch % ALIGNMENT == 0
    return pitch >= width and aligned
