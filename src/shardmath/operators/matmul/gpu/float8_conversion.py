"""The ends of a product of eight-bit floats: numbers in place of elements, and elements of D again.

Operands whose blocks of scales cannot be multiplied as they are, and an eight-bit C, are turned
into float32 first. An eight-bit D is rounded last, when alpha, beta C and the epilog have been
applied; the greatest absolute value of all ranks' parts is found on the way.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from shardmath.arrays.dtypes import FLOAT8
from shardmath.cuda.device import Device
from shardmath.cuda.driver import call
from shardmath.handles.operand import Operand
from shardmath.local.float8 import Blocks
from shardmath.local.gpu import Matrix, float8
from shardmath.local.gpu.scaled import Quantized
from shardmath.operators.lanes import Lane
from shardmath.operators.matmul.gpu.rank_plan import Operands, RankPlan, Scales
from shardmath.operators.matmul.scaling import TENSOR, blocks_of
from shardmath.operators.published import PublishedMatrices, matrix_of

__all__ = ["DequantizedOperands", "QuantizedResult", "scales_as"]

_TENSOR = Blocks(None, None)


class _Step(NamedTuple):
    """One matrix that is turned into numbers."""

    out: Matrix
    elements: Matrix
    scales: Matrix | None
    blocks: Blocks
    factor: float

    def launch(self, device: Device, stream: int) -> None:
        float8.dequantize(
            device, stream, self.out, self.elements, self.scales, self.blocks, factor=self.factor
        )


class DequantizedOperands:
    """What of an execution's operands is turned into numbers. `operands` are those afterwards.

    Takes memory of the lane: raises HeapExhausted.
    """

    def __init__(self, rank_plan: RankPlan, operands: Operands, lane: Lane) -> None:
        self.operands = operands
        self._multi_host = rank_plan.multi_host
        self._steps: list[_Step] = []
        scaling = rank_plan.strategy.problem.scaling
        if scaling is None or operands.scales is None:
            return
        if not rank_plan.multiplies_elements:
            self.operands = replace(
                self.operands,
                a=self._dequantized(operands.a, 0, scaling.a, operands.scales, lane),
                b=self._dequantized(operands.b, 1, scaling.b, operands.scales, lane),
            )
        c = operands.c
        if c is not None and c.dtype in FLOAT8 and operands.beta != 0:
            dequantized = self._dequantized(c, 2, TENSOR, operands.scales, lane)
            self.operands = replace(self.operands, c=dequantized)

    def _dequantized(
        self, array: Operand, index: int, granularity: str, scales: Scales, lane: Lane
    ) -> Operand:
        elements = matrix_of(array)
        name, nbytes = f"numbers {'abc'[index]}", 4 * elements.size
        block = (
            None if self._multi_host else lane.buffer(name, nbytes).block
        )  # peers may read it there
        address = lane.private(name, nbytes) if block is None else block.address
        order = "F" if elements.by_columns else "C"
        shape = elements.rows, elements.columns
        out = Matrix.packed(address, shape, "float32", order)
        blocks = _TENSOR if granularity == TENSOR else blocks_of(granularity, index)
        held = scales.arrays[index]
        matrix = None if held is None else scales_as(held, blocks.shape(*shape))
        self._steps.append(_Step(out, elements, matrix, blocks, scales.numbers[index]))
        strides = (4 * out.row_stride, 4 * out.column_stride)
        return Operand(out.address, shape, strides, "float32", block)

    def launch(self, device: Device, stream: int) -> None:
        """Put them on `stream`."""
        for step in self._steps:
            step.launch(device, stream)


def scales_as(array: Operand, shape: tuple[int, int]) -> Matrix:
    """The scales of op(A) or op(B) as a matrix of `shape`: an array of one axis fits one of its."""
    rows, columns = shape
    if len(array.shape) == 2:
        return matrix_of(array)._replace(rows=rows, columns=columns)
    step = 0 if not array.shape else array.strides[0] // 4
    return Matrix(array.address, rows, columns, step, step, "float32")


class QuantizedResult:
    """An eight-bit D of one execution."""

    def __init__(
        self,
        rank_plan: RankPlan,
        operands: Operands,
        lane: Lane,
        published: PublishedMatrices,
        size: int,
    ) -> None:
        scaling = rank_plan.strategy.problem.scaling
        assert scaling is not None
        self._operands = operands
        self._lane = lane
        self._device = lane.team.device
        self._stream = operands.stream
        self._published = published
        self._size = size
        self._wants_amax = scaling.amax
        self._rank_plan = rank_plan
        self._words = size if rank_plan.rounds is not None else 1  # a word for each product of D
        self._out = matrix_of(operands.out)

    def prepare(self) -> None:
        """Take memory for numbers, for a number's place, and for the greatest value."""
        self._lane.private("numbers d", 4 * self._out.size)
        self._lane.private("scale d", 4)
        if self._wants_amax:
            self._published.made("amax", (1, self._words), "float32", "C")
            self._published.make_room("amax", lambda: [("", self._rank_plan.amax_moves)], 4)

    def begin(self) -> None:
        """To be put on the stream before anything of D."""
        if self._wants_amax:
            call("cuMemsetD32Async", self._amax_address, 0, self._words, self._stream)

    @property
    def numbers(self) -> Matrix:
        """Memory for D before it is rounded."""
        shape, order = (self._out.rows, self._out.columns), "F" if self._out.by_columns else "C"
        return Matrix.packed(self._lane.address("numbers d"), shape, "float32", order)

    @property
    def _amax_address(self) -> int:
        return self._published.own("amax").address

    def as_part_of_product(self) -> Quantized:
        """How products themselves are to make D; puts its scale where it can be read."""
        amax = self._amax_address if self._wants_amax else 0
        if self._given is None and self._number == 1:
            return Quantized(0, amax)
        float8.dequantize(
            self._device,
            self._stream,
            Matrix.packed(self._lane.address("scale d"), (1, 1), "float32", "C"),
            None,
            self._given,
            _TENSOR,
            factor=self._number,
        )
        return Quantized(self._lane.address("scale d"), amax)

    @property
    def _given(self) -> Matrix | None:
        assert self._operands.scales is not None
        array = self._operands.scales.arrays[3]
        return None if array is None else scales_as(array, (1, 1))

    @property
    def _number(self) -> float:
        assert self._operands.scales is not None
        return self._operands.scales.numbers[3]

    def finish(self, source: Matrix) -> None:
        """Round numbers to D."""
        given = self._given
        float8.quantize(
            self._device,
            self._stream,
            self._out,
            source,
            factor=self._number,
            scale=0 if given is None else given.address,
            amax=self._amax_address if self._wants_amax else 0,
        )

    @property
    def finds_amax(self) -> bool:
        """Whether peers read what this rank has found."""
        return self._wants_amax

    def complete(self) -> None:
        """The greatest of all ranks' values. To be put behind a barrier."""
        target = self._operands.outputs["result_amax"]
        places = self._published.reach("amax", "", self._rank_plan.amax_moves, self._stream)
        first = [places(rank)[0] for rank in range(self._size)]
        each = [address + 4 * word for address in first for word in range(self._words)]
        for start in range(0, len(each), float8.MOST_RANKS):
            some = each[start : start + float8.MOST_RANKS]
            float8.amax(self._device, self._stream, target.address, some)
