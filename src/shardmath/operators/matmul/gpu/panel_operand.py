"""One operand of a panel GEMM as its kernel sees it: m x k on the left, or k x n on the right.

What comes from peers is copied into a panel, in the order of `k_order.OperandSteps`; what this rank
has itself is read in place, if TMA can load boxes of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shardmath.arrays import dtypes
from shardmath.arrays.dtypes import HALVES
from shardmath.cuda.tensormap import ALIGNMENT, BOX_BYTES, NBYTES, tensor_map
from shardmath.geometry import Move
from shardmath.local.gpu import Matrix
from shardmath.operators.matmul.gpu.k_order import OperandSteps
from shardmath.operators.matmul.gpu.panel_schedule import TILE_ROWS

__all__ = ["SUMS_BYTES", "TILINGS", "PanelOperand", "Tiling"]

SUMS_BYTES = 1 << 17  # of a block's tile (kSumsBytes of panel_gemm.cuh)


@dataclass(frozen=True)
class Tiling:
    """How `kernel` cuts its work: tiles of TILE_ROWS x `width`, steps of `depth` indices of k,
    pipelined through `stages` of shared memory, by clusters of `cluster` blocks. Each block of a
    cluster loads a part of B's columns for all of them; with `splits_k`, a part of k where B's
    columns are contiguous. Reducing a tile's partial sums (stream-K's fixup) costs as much as
    `fixup_steps` steps.
    """

    kernel: str
    width: int
    depth: int
    cluster: int
    stages: int
    splits_k: bool
    fixup_steps: int

    @property
    def shared(self) -> int:
        """Bytes of shared memory: a step's row of an operand is one of a box."""
        return 1024 + self.stages * (TILE_ROWS + self.width) * BOX_BYTES


_HALF = Tiling("panel_gemm", 256, 64, 2, stages=4, splits_k=True, fixup_steps=40)
_DOUBLE = Tiling("panel_gemm_f64", 128, 16, 2, stages=6, splits_k=False, fixup_steps=10)
TILINGS = {**dict.fromkeys(HALVES, _HALF), "float64": _DOUBLE}


@dataclass(frozen=True, eq=False)
class PanelOperand:
    """Operand `index` (0: op(A), 1: op(B)) of this rank: `own` is its local array, `moves` bring
    what it needs, `place` is where that begins in `own` if nothing needs to move. All are oriented
    as the kernel takes them, on the right if `is_right`. `cache` lives as long as the plan.
    """

    index: int
    is_right: bool
    own: Matrix
    moves: tuple[Move, ...]
    place: tuple[int, int] | None
    shape: tuple[int, int]
    rank: int
    tiling: Tiling
    cache: dict[Any, Any] = field(repr=False)

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
    def remote_bytes(self) -> int:
        """Bytes from peers."""
        if self.place is not None:
            return 0
        return self.own.itemsize * sum(m.elements for m in self.moves if m.src != self.rank)

    def ring_key(self, move: Move) -> tuple[bool, int]:
        """Sorts moves by ring distance: no two ranks begin with the same source."""
        return move.src < self.rank, move.src

    @property
    def k_steps(self) -> OperandSteps:
        """Whom each step along k comes from, and where it lies."""
        loadable = self.place is not None or _is_loadable(self.own)
        key = ("k steps", self.index, self.is_right, loadable)
        if key not in self.cache:
            self.cache[key] = self._find_k_steps(loadable)
        k_steps: OperandSteps = self.cache[key]
        return k_steps

    def _find_k_steps(self, loadable: bool) -> OperandSteps:
        axis, step = self.k_axis, self.tiling.depth
        extent = self.shape[axis]
        if self.place is not None:
            return OperandSteps.local(axis, extent, step)
        return OperandSteps.of(
            self.moves, self.rank, axis=axis, extent=extent, step=step, loadable=loadable
        )

    @property
    def is_loadable(self) -> bool:
        """Whether what has to be read in place can be."""
        return self.place is None or _is_loadable(self.own_matrix())

    def panel(self, address: int) -> Matrix:
        """Memory for what is not read in place, in the order of the operand, lines aligned."""
        shape = [self.extent, self.extent]
        shape[self.k_axis] = self.k_steps.width
        unit = ALIGNMENT // self.own.itemsize
        pitch = -(-shape[0 if self.own.by_columns else 1] // unit) * unit
        strides = (1, pitch) if self.own.by_columns else (pitch, 1)
        return Matrix(address, shape[0], shape[1], *strides, self.own.dtype)

    def panel_bytes(self) -> int:
        """Of that memory."""
        panel = self.panel(0)
        lines = panel.columns if self.own.by_columns else panel.rows
        return panel.itemsize * lines * max(panel.row_stride, panel.column_stride)

    def panel_slice(self, panel: Matrix, lo: int, hi: int) -> Matrix:
        """Rows of a left panel, or columns of a right one, from `lo` to before `hi`."""
        whole = 0, self.k_steps.width
        return panel.part(whole, (lo, hi)) if self.is_right else panel.part((lo, hi), whole)

    def own_matrix(self) -> Matrix:
        """The part of the own array that is read in place; empty if none is."""
        if self.place is not None:
            (row, column), (rows, columns) = self.place, self.shape
            return self.own.part((row, row + rows), (column, column + columns))
        if not self.k_steps.reads_own:
            return self.own.part((0, 0), (0, 0))
        run = next(m for m in self.moves if m.src == self.rank).runs[1 - self.k_axis]
        ranges = [(run.src_start, run.src_start + run.length)] * 2
        ranges[self.k_axis] = 0, self.k_steps.source_ends[self.rank]
        return self.own.part(ranges[0], ranges[1])

    def encode_map(self, matrix: Matrix) -> bytes:
        """The struct `TensorMap` of the panel or of `own_matrix`, in the kernel's boxes."""
        if not matrix.size:
            return bytes(NBYTES)
        tiling = self.tiling
        pitch = max(abs(matrix.row_stride), abs(matrix.column_stride))
        extents = matrix.rows, matrix.columns
        width, height = extents if self.own.by_columns else extents[::-1]
        if self.along_k:
            box = tiling.width // tiling.cluster if self.is_right else TILE_ROWS
        else:
            shared = self.is_right and tiling.splits_k
            box = tiling.depth // tiling.cluster if shared else tiling.depth
        return tensor_map(matrix.address, matrix.dtype, width, height, pitch, box)


def _is_loadable(x: Matrix) -> bool:
    """Whether TMA can load boxes of it in place."""
    itemsize = dtypes.of(x.dtype).itemsize
    if (x.row_stride if x.by_columns else x.column_stride) != 1:
        return False
    pitch = x.column_stride if x.by_columns else x.row_stride
    width = x.rows if x.by_columns else x.columns
    aligned = x.address % ALIGNMENT == 0 and itemsize * pitch % ALIGNMENT == 0
    return pitch >= width and aligned
