"""Scales of float8 operands, where products read them and as cuBLASLt wants them.

Scales of an operand that is gathered in panels travel as the elements do, and are laid out for each
interval of k. Those of lines that all ranks exchange are laid out by the rank that has them, in
the memory of those who multiply.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from shardmath.geometry import Move
from shardmath.geometry.integers import up
from shardmath.local.float8 import BLOCK, Blocks
from shardmath.local.gpu import Matrix, float8
from shardmath.local.gpu.scaled import GRAIN, Scale
from shardmath.operators.lanes import Lane
from shardmath.operators.matmul.gpu.float8_conversion import scales_as
from shardmath.operators.matmul.gpu.gather import Gather
from shardmath.operators.matmul.gpu.panels import Interval
from shardmath.operators.matmul.gpu.rank_plan import Operands, RankPlan
from shardmath.operators.matmul.gpu.scale_moves import ScaleMoves
from shardmath.operators.published import PublishedMatrices

__all__ = ["ScaleLayouts", "scale_layout"]


class _Source(NamedTuple):
    """What an operand's scales are made from: a matrix, lines first, of which `blocks` is what one
    number is for, and what they are multiplied by.
    """

    matrix: Matrix | None
    blocks: Blocks
    number: float


class ScaleLayouts:
    """The scales of both operands, in one execution on one rank."""

    def __init__(
        self,
        rank_plan: RankPlan,
        operands: Operands,
        lane: Lane,
        published: PublishedMatrices,
        gather: Gather,
    ) -> None:
        assert operands.scales is not None
        self._rank_plan = rank_plan
        self._given = operands.scales
        self._factors = operands.ab
        self._lane = lane
        self._device = lane.team.device
        self._stream = operands.stream
        self._published = published
        self._gather = gather

    # -- prepare -----------------------------------------------------------------------------------

    def prepare_published(self) -> None:
        """Memory for this rank's scales, where peers read them. Raises HeapExhausted."""
        for index, moves in enumerate(self._rank_plan.scale_moves):
            if moves is not None and not self._stays(index):
                rows, columns = moves.transfer.src.local_shape(self._rank_plan.rank)
                self._published.made(f"scales {'ab'[index]}", (rows, columns), "float32", "F")

    def prepare(self, index: int, lines: int, intervals: Sequence[Interval]) -> None:
        """Memory for the scales of an operand of so many lines, by interval of k."""
        moves, name = self._rank_plan.scale_moves[index], "ab"[index]
        if moves is not None and not self._stays(index):
            rows, columns = moves.transfer.dst.local_shape(self._rank_plan.rank)
            self._lane.private(f"come scales {name}", 4 * rows * columns)
            parts = partial(self._parts, index)
            self._published.make_room(f"scales {name}", parts, 4)
        laid = sum(self.layout(index, lines, each.hi - each.lo).size for each in intervals)
        self._lane.private(f"laid scales {name}", 4 * laid + 256)

    def _parts(self, index: int) -> list[tuple[str, Sequence[Move]]]:
        return [("", self._rank_plan.scales_into(index))]

    def layout(self, index: int, lines: int, deep: int) -> Matrix:
        """The scales of so many lines and indices of k as cuBLASLt wants them, lines first."""
        return scale_layout(self._rank_plan.modes[index], lines, deep)

    # -- run ---------------------------------------------------------------------------------------

    def show(self) -> None:
        """Put this rank's scales where peers read them, before the barrier that lets them."""
        for index, moves in enumerate(self._rank_plan.scale_moves):
            if moves is None or self._stays(index):
                continue
            name = f"scales {'ab'[index]}"
            out = self._published.own(name)
            same = moves.given == moves.blocks
            blocks = Blocks(1 if same else moves.given.rows, 1)
            self._fill([out], _Source(self._matrix(index, moves), blocks, 1.0))
            self._published.publish(name, self._stream)

    def lay_out(
        self, index: int, lines: int, known: int, intervals: Sequence[Interval]
    ) -> list[Scale]:
        """The scales of each interval, where its product reads them, of `lines` of which this rank
        knows the first.
        """
        mode = self._rank_plan.modes[index]
        if mode == "tensor":
            return [Scale(mode, self._given.address(index))] * len(intervals)
        source, scales = self._source(index, self._come(index)), []
        address = up(self._lane.address(f"laid scales {'ab'[index]}"), GRAIN)
        for each in intervals:
            laid = self.layout(index, lines, each.hi - each.lo)._replace(address=address)
            address += 4 * laid.size
            scales.append(Scale(mode, self._laid(mode, laid, source, known, each)))
            if mode == "outer":  # the same for all of k
                return scales * len(intervals)
        return scales

    def send(self, index: int, places: Sequence[Matrix], stream: int) -> None:
        """Write this rank's own scales of an operand, in this layout, to several places."""
        source = self._source(index, self._come(index))
        mode, deep = self._rank_plan.modes[index], self._rank_plan.operand_plans[index].extent
        known = -(-deep // BLOCK)
        published = [each.part((0, each.rows), (0, min(each.columns, known))) for each in places]
        self._fill(published, _in_layout(mode, source), stream=stream)

    # -- where scales come from --------------------------------------------------------------------

    def _stays(self, index: int) -> bool:
        """Whether no rank reads another's scales of an operand from where they are shown."""
        rounds, moves = self._rank_plan.rounds, self._rank_plan.scale_moves[index]
        return (rounds is not None and rounds.index == index) or moves is None or moves.stay

    def _matrix(self, index: int, moves: ScaleMoves) -> Matrix:
        """This rank's scales of an operand, lines first."""
        array, held = self._factors[index], self._given.arrays[index]
        lines, k = array.shape if index == 0 else array.shape[::-1]
        shape = moves.given.shape(lines, k)
        assert held is not None, "scales of several blocks are an array"
        matrix = scales_as(held, shape if index == 0 else shape[::-1])
        return matrix if index == 0 else matrix.transposed()

    def _come(self, index: int) -> Matrix | None:
        """The scales that this rank needs of an operand, lines first; None where one is for all."""
        moves = self._rank_plan.scale_moves[index]
        if moves is None or self._stays(index):
            return None if moves is None else self._matrix(index, moves)
        name, rank = f"scales {'ab'[index]}", self._rank_plan.rank
        rows, columns = moves.transfer.dst.local_shape(rank)
        come = Matrix.packed(self._lane.address(f"come {name}"), (rows, columns), "float32", "F")
        found = self._rank_plan.scales_into(index)
        places = self._published.reach(name, "", found, self._stream)
        self._gather.copy(name, found, places, come)
        return come

    def _source(self, index: int, come: Matrix | None) -> _Source:
        moves, number = self._rank_plan.scale_moves[index], self._given.numbers[index]
        if moves is not None:
            return _Source(come, moves.given if self._stays(index) else moves.blocks, number)
        if self._given.arrays[index] is not None:
            come = Matrix(self._given.address(index), 1, 1, 0, 0, "float32")
        return _Source(come, Blocks(None, None), number)

    # -- laying out --------------------------------------------------------------------------------

    def _laid(self, mode: str, laid: Matrix, source: _Source, known: int, each: Interval) -> int:
        """Where an interval's scales are: in `laid`, or where they lie already."""
        if mode == "squares":
            known = -(-known // BLOCK)
        if source.matrix is not None and source.blocks.columns is not None:
            first, part = each.lo // BLOCK, source.matrix
            source = source._replace(matrix=part.part((0, part.rows), (first, part.columns)))
        laid = laid.part((0, laid.rows), (0, min(laid.columns, -(-(each.hi - each.lo) // BLOCK))))
        found = _in_layout(mode, source)
        plain = source.number == 1 and found.blocks.rows == 1
        if plain and source.matrix is not None and _lies_as(source.matrix, laid):
            return source.matrix.address
        self._fill([laid], found, known)
        return laid.address

    def _fill(
        self,
        places: Sequence[Matrix],
        source: _Source,
        known: int | None = None,
        stream: int | None = None,
    ) -> None:
        float8.dequantize(
            self._device,
            self._stream if stream is None else stream,
            places[0],
            None,
            source.matrix,
            source.blocks,
            factor=source.number,
            known_rows=known,
            also=places[1:],
        )


def scale_layout(mode: str, lines: int, deep: int) -> Matrix:
    """The form of the scales of so many lines and indices of k, lines first, at address 0."""
    blocks = -(-deep // BLOCK)
    if mode == "tensor":
        return Matrix.packed(0, (1, 1), "float32", "F")
    if mode == "outer":
        return Matrix.packed(0, (up(lines, 4), 1), "float32", "F")
    if mode == "vectors":
        return Matrix.packed(0, (lines, blocks), "float32", "F")
    return Matrix(0, -(-lines // BLOCK), up(blocks, 4), up(blocks, 4), 1, "float32")


def _in_layout(mode: str, source: _Source) -> _Source:
    """The same with blocks counted in numbers of the form, not in lines and indices of k."""
    rows, columns = source.blocks
    lines = None if rows is None else 1 if mode == "squares" else rows
    return source._replace(blocks=Blocks(lines, None if columns is None else 1))


def _lies_as(x: Matrix, wanted: Matrix) -> bool:
    """Whether the wanted columns of a matrix of scales can be read in place."""
    steps = (
        x.rows == 1 or x.row_stride == wanted.row_stride,
        wanted.columns == 1 or x.column_stride == wanted.column_stride,
    )
    has_all = x.rows == wanted.rows and x.columns >= wanted.columns
    return has_all and all(steps) and x.address % GRAIN == 0
