"""How scales of float8 operands travel to the ranks that multiply, if they can. Pure.

The scales of an operand are a matrix of lines x blocks of k, where lines are rows of op(A) or
columns of op(B). A rank counts blocks within its part. Where all parts begin and end at multiples
of 128, these are also blocks of the whole matrix, and travel as its elements do.

    a, b                    modes of the product
    tensor, tensor          tensor, tensor
    tensor or outer         outer, outer
    1 x 128 among them      vectors, vectors; squares for one operand of 128 x 128
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from shardmath.base.immutable import Immutable
from shardmath.base.integers import up
from shardmath.geometry import Layout, Spans
from shardmath.local.epilog import MatmulEpilog
from shardmath.local.float8 import BLOCK, Blocks
from shardmath.local.gpu import Matrix
from shardmath.local.gpu.scaled import GRAIN
from shardmath.machine import Machine
from shardmath.operators.matmul.gpu.reduction_choice import predicted
from shardmath.operators.matmul.problem import Problem
from shardmath.operators.matmul.scaling import OUTER, SQUARES, TENSOR, VECTORS
from shardmath.operators.matmul.strategy import Cost, Strategy, choose
from shardmath.redistribution import TransferPlan


class ScaleMoves(Immutable):
    """The moves of one operand's scales. `given` are the blocks of the scales that a rank has, and
    `blocks` those of the scales that travel, which may be of fewer lines.
    """

    given: Blocks
    blocks: Blocks
    transfer: TransferPlan

    @property
    def stay(self) -> bool:
        """Whether each rank needs just what it was given."""
        return self.given == self.blocks and self.transfer.stays


@lru_cache(maxsize=64)
def choose_strategy(
    problem: Problem, machine: Machine
) -> tuple[Strategy, Sequence[tuple[Strategy, Cost]]]:
    """The fastest strategy, and all candidates with their costs.

    For scaled operands it is one that multiplies the elements themselves. Where none can, or the
    one that the problem names cannot, it is a strategy for the numbers that elements stand for.
    """
    fused = [] if machine.multi_host else [predicted]
    strategy, compared = choose(problem, machine.rates, *fused)
    if problem.scaling is None:
        return strategy, compared
    candidates = [strategy, *(x for x, _ in compared if problem.strategy is None)]
    for candidate in candidates:
        if keeps_blocks(candidate) and problem.epilog not in _OF_NUMBERS:
            return candidate, compared
    return choose(problem.widened(), machine.rates)


_OF_NUMBERS = (MatmulEpilog.BGRADA, MatmulEpilog.BGRADB)  # these sum the numbers of an operand


def keeps_blocks(strategy: Strategy) -> bool:
    """Whether all ranks count blocks of k alike, before operands move and after."""
    problem = strategy.problem
    assert problem.scaling is not None
    k = problem.shape[2]
    for index, granularity in enumerate((problem.scaling.a, problem.scaling.b)):
        if granularity not in (VECTORS, SQUARES):
            continue
        transfer = strategy.transfers[index]
        if not all(_is_aligned(x, 1 - index, k) for x in (transfer.src, transfer.dst)):
            return False
    return True


def modes(strategy: Strategy) -> tuple[str, str]:
    """The modes of the scales of A and of B in the product."""
    scaling = strategy.problem.scaling
    assert scaling is not None
    given = (scaling.a, scaling.b)
    if given == (TENSOR, TENSOR):
        return "tensor", "tensor"
    if not {VECTORS, SQUARES} & set(given):
        return "outer", "outer"
    chosen = ["vectors", "vectors"]
    for index in (1, 0):  # the weights of a layer are B
        if given[index] == SQUARES and _keeps_lines(strategy, index):
            chosen[index] = "squares"
            break
    return chosen[0], chosen[1]


def scale_moves(strategy: Strategy, index: int) -> ScaleMoves | None:
    """The moves of the scales of op(A), index 0, or op(B); None for one scale for all."""
    scaling = strategy.problem.scaling
    assert scaling is not None
    granularity = (scaling.a, scaling.b)[index]
    if granularity == TENSOR:
        return None
    k = BLOCK if granularity != OUTER else None
    given = Blocks(BLOCK if granularity == SQUARES else 1, k)
    blocks = given if granularity != SQUARES or _keeps_lines(strategy, index) else Blocks(1, k)
    transfer = strategy.transfers[index]
    held, need = (_coarse(x, index, blocks) for x in (transfer.src, transfer.dst))
    return ScaleMoves(given, blocks, TransferPlan(held, need, 4))


def amax_transfer(size: int) -> TransferPlan:
    """Each rank's greatest value of D, one number, to all ranks."""
    shape = (size, 1)
    return TransferPlan(Layout.slab(shape, size, axis=0), Layout.replicated(shape, size), 4)


def scale_layout(mode: str, lines: int, deep: int) -> Matrix:
    """The form of the scales of so many lines and indices of k, lines first, at address 0; those of
    mode tensor have none.
    """
    blocks = -(-deep // BLOCK)
    if mode == "outer":
        return Matrix.packed(0, (up(lines, 4), 1), "float32", "F")
    if mode == "vectors":
        return Matrix.packed(0, (lines, blocks), "float32", "F")
    return Matrix(0, -(-lines // BLOCK), up(blocks, 4), up(blocks, 4), 1, "float32")


def blocks_in_layout(mode: str, blocks: Blocks) -> Blocks:
    """The blocks of scales laid out in `mode`, in rows and columns of the laid out matrix."""
    rows, columns = blocks
    lines = None if rows is None else 1 if mode == "squares" else rows
    return Blocks(lines, None if columns is None else 1)


def lies_as(x: Matrix, wanted: Matrix) -> bool:
    """Whether scales lie as `wanted` in their first columns, so that they are read in place."""
    steps = (
        x.rows == 1 or x.row_stride == wanted.row_stride,
        wanted.columns == 1 or x.column_stride == wanted.column_stride,
    )
    has_all = x.rows == wanted.rows and x.columns >= wanted.columns
    return has_all and all(steps) and x.address % GRAIN == 0


def _keeps_lines(strategy: Strategy, index: int) -> bool:
    """Whether all ranks count blocks of 128 lines alike."""
    transfer = strategy.transfers[index]
    layouts = transfer.src, transfer.dst
    return all(_is_aligned(x, index, x.global_shape[index]) for x in layouts)


def _is_aligned(layout: Layout, axis: int, extent: int) -> bool:
    """Whether all parts with elements consist of whole blocks of 128 of the axis."""
    return all(
        part.start % BLOCK == 0
        and part.period % BLOCK == 0
        and (part.stop % BLOCK == 0 or part.stop == extent)
        and (part.period == 0 or part.block % BLOCK == 0)
        for rank, part in enumerate(layout.column(axis))
        if 0 not in layout.local_shape(rank)
    )


def _coarse(layout: Layout, index: int, blocks: Blocks) -> Layout:
    """The layout of scales of such blocks, lines first, for a layout of elements."""
    lines, k = layout.global_shape[index], layout.global_shape[1 - index]
    shape = blocks.shape(lines, k)
    empty = [0 in layout.local_shape(rank) for rank in range(layout.size)]
    columns = []
    for axis, unit in ((index, blocks.rows), (1 - index, blocks.columns)):
        whole = Spans.interval(0, 1)
        columns.append(
            [
                Spans.interval(0, 0) if nothing else whole if unit is None else _divided(part, unit)
                for part, nothing in zip(layout.column(axis), empty, strict=True)
            ]
        )
    return Layout.product(shape, columns, size=layout.size)


def _divided(part: Spans, unit: int) -> Spans:
    """Aligned spans, counted in blocks of `unit` indices."""
    block = -(-part.block // unit)
    return Spans(part.start // unit, block, part.period // unit, -(-part.stop // unit))
