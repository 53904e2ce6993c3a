"""Products of eight-bit factors with their scales: what comes is multiplied as it is.

cuBLASLt wants both factors along k, and all at multiples of 16 bytes. What lies so is used in
place; the rest comes, or is copied, into memory that is padded along k with zeros. A result that
does not suit is computed in padded memory too, whose last lines nobody reads. Scales travel as the
elements do, and are laid out for each interval of k as its product wants them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

from shardmath.cuda.driver import call
from shardmath.geometry import Move
from shardmath.local.epilog import MatmulEpilog
from shardmath.local.float8 import BLOCK, FLOAT8, Blocks
from shardmath.local.gpu import Matrix, float8, scaled
from shardmath.local.gpu.blaslt import WORKSPACE
from shardmath.local.gpu.epilog import finish
from shardmath.local.gpu.scaled import GRAIN, Scale, up
from shardmath.operators.lanes import Lane
from shardmath.operators.matmul.gpu.ending import Ending
from shardmath.operators.matmul.gpu.feeding import Interval
from shardmath.operators.matmul.gpu.gathering import Gathering
from shardmath.operators.matmul.gpu.numbers import scales_as
from shardmath.operators.matmul.gpu.scale_moves import ScaleMoves
from shardmath.operators.matmul.gpu.share import Operands, Share
from shardmath.operators.matmul.scaling import Scaling
from shardmath.operators.showing import Places, Showcase, matrix_of

__all__ = ["ScaledProducts"]

# Where each rank's part of factor 0 or 1 lies, for moves by their name, put on a stream.
Source = Callable[[int, str, Sequence[Move], Any], Places]


class ScaledProducts:
    """The products of one execution on one rank."""

    def __init__(
        self,
        share: Share,
        operands: Operands,
        lane: Lane,
        shown: Showcase,
        ending: Ending,
    ) -> None:
        self._share = share
        self._problem = share.strategy.problem
        self._operands = operands
        self._lane = lane
        self._device = lane.team.device
        self._stream = operands.stream
        self._shown = shown
        self._ending = ending
        self._out = matrix_of(operands.out)
        self._blocks = bool({"vectors", "squares"} & set(share.modes))
        self._gathering = Gathering(lane, self._stream, share.kept)

    # -- prepare -----------------------------------------------------------------------------------

    def prepare_scales(self) -> None:
        """Memory for this rank's scales, where peers read them. Raises HeapExhausted."""
        for index, found in enumerate(self._share.scale_moves):
            if found is not None and not found.stay:
                rows, columns = found.transfer.src.local_shape(self._share.rank)
                self._shown.made(f"scales {'ab'[index]}", (rows, columns), "float32", "F")

    def prepare(self) -> None:
        """Memory for factors, for scales as products want them, and for the product."""
        self._lane.buffer("blas", WORKSPACE)
        if not self._is_direct:
            self._lane.buffer("product", 4 * self._padded.size)
        for index, feed in enumerate(self._share.feeds):
            name, lines = "ab"[index], self._lines(index)
            if feed.gathers:
                room = up(self._share.schedule[1], GRAIN) + GRAIN
                self._lane.buffer(f"panel {name}", room * lines)
                self._shown.make_room(name, partial(self._share.parts, index), 1)
            elif not self._in_place(index):
                self._lane.buffer(f"packed {name}", up(feed.extent, GRAIN) * lines)
            found = self._share.scale_moves[index]
            if found is not None and not found.stay:
                rows, columns = found.transfer.dst.local_shape(self._share.rank)
                self._lane.buffer(f"come scales {name}", 4 * rows * columns)
                self._shown.make_room(f"scales {name}", partial(self._scale_parts, index), 4)
            laid = sum(self._laid(index, interval).size for interval in self._intervals)
            self._lane.buffer(f"laid scales {name}", 4 * laid + 256)

    def _scale_parts(self, index: int) -> list[tuple[str, tuple[Move, ...]]]:
        return [("", self._share.scales_into(index))]

    # -- where things lie --------------------------------------------------------------------------

    @property
    def _intervals(self) -> list[Interval]:
        return self._share.schedule[0]

    @cached_property
    def _target(self) -> Matrix:
        """What the products are to give: sums for peers, D itself, or nothing yet."""
        return self._out if self._ending.sums is None else self._ending.sums

    @cached_property
    def _gives_result(self) -> bool:
        """Whether products give D itself: nothing follows that cuBLASLt could not do."""
        operands, problem, c = self._operands, self._problem, self._operands.c
        several = len(self._intervals) > 1
        dtype = self._out.dtype
        if self._target is not self._out or operands.alpha == 0 or problem.sums_c:
            return False
        if problem.epilog is not MatmulEpilog.DEFAULT or (several and dtype != "float32"):
            return False
        adds = c is not None and operands.beta != 0
        if dtype in FLOAT8:
            known = dtype == "float8_e4m3fn" or dtype in self._scaling.given
            return known and not adds and set(self._share.modes) == {"tensor"}
        if not adds or c is None:
            return True
        addend = matrix_of(c)
        addend = addend if self._out.leading is not None else addend.transposed()
        leading = addend.leading
        aligned = leading is not None and not (leading * addend.itemsize | addend.address) % GRAIN
        return aligned and addend.dtype == dtype

    @property
    def _scaling(self) -> Scaling:
        assert self._problem.scaling is not None
        return self._problem.scaling

    @cached_property
    def _is_direct(self) -> bool:
        """Whether products are written to the target where it lies."""
        if self._target is self._out and not self._gives_result:
            return False
        return scaled.takes_result(self._target, blocks=self._blocks)

    @cached_property
    def _padded(self) -> Matrix:
        """Memory for a product that the target cannot take: float32, in the order of D."""
        rows, columns = up(self._target.rows, GRAIN), up(self._target.columns, GRAIN)
        order = "F" if self._out.by_columns else "C"
        return Matrix.packed(0, (rows, columns), "float32", order)

    def _lines(self, index: int) -> int:
        """Rows of op(A), columns of op(B), in the memory of a factor."""
        product = self._target if self._is_direct else self._padded
        return (product.rows, product.columns)[index]

    def _own(self, index: int) -> Matrix:
        """This rank's own part of a factor that needs no gathering; lines are its columns."""
        feed, array = self._share.feeds[index], matrix_of(self._operands.factors[index])
        assert feed.place is not None, feed
        (row, column), (rows, columns) = feed.place, feed.shape(0, feed.extent)
        part = array.part((row, row + rows), (column, column + columns))
        return part.transposed() if index == 0 else part

    def _in_place(self, index: int) -> bool:
        """Whether a factor is multiplied where it lies."""
        feed = self._share.feeds[index]
        return (
            not feed.gathers and self._lines(index) == feed.width and scaled.fits(self._own(index))
        )

    # -- run ---------------------------------------------------------------------------------------

    def show_scales(self) -> None:
        """Put this rank's scales where peers read them, before the barrier that lets them."""
        for index, found in enumerate(self._share.scale_moves):
            if found is None or found.stay:
                continue
            name = f"scales {'ab'[index]}"
            out = self._shown.own(name)
            source = self._given_scales(index, found)
            same = found.given == found.blocks
            blocks = Blocks(1 if same else found.given.rows, 1)
            float8.numbers(self._device, self._stream, out, None, source, blocks)
            self._shown.publish(name, self._stream)

    def run(self, source: Source) -> list[Matrix] | None:
        """Put the products on the stream; what is to be finished, None if that is D."""
        target, quantized = self._target, None
        if not self._is_direct:
            target = self._padded._replace(address=self._lane.address("product"))
        elif self._gives_result and self._ending.quantizing is not None:
            quantized = self._ending.quantizing.as_part_of_product()
        scales = [self._lay_scales(index) for index in (0, 1)]
        packed = [self._packed(index) for index in (0, 1)]
        with self._gathering.beside(len(self._intervals) > 1):
            for number, interval in enumerate(self._intervals):
                a, b = (
                    self._factor(index, number, interval, packed[index], source) for index in (0, 1)
                )
                self._gathering.arrive(number)
                pair = scales[0][number], scales[1][number]
                self._product(a.transposed(), b, target, pair, number, quantized)
                self._gathering.used(number)
        if self._gives_result and self._is_direct:
            return None
        wanted = target.part((0, self._target.rows), (0, self._target.columns))
        if self._target is self._out:
            return [wanted]
        if not self._is_direct:
            finish(self._device, self._stream, self._target, [wanted])
        return [self._target]

    def _product(
        self,
        a: Matrix,
        b: Matrix,
        target: Matrix,
        scales: tuple[Scale, Scale],
        number: int,
        quantized: scaled.Quantized | None,
    ) -> None:
        """One interval's product, added to those before it."""
        operands, c = self._operands, None
        assert operands.scales is not None
        alpha, beta = 1.0, float(number > 0)
        if self._gives_result and self._is_direct:
            alpha = operands.alpha.real
            if number == 0 and operands.c is not None and operands.beta != 0:
                beta, c = operands.beta.real, matrix_of(operands.c)
        if set(self._share.modes) == {"tensor"}:
            alpha *= operands.scales.numbers[0] * operands.scales.numbers[1]
        scaled.multiply(
            self._device,
            a,
            b,
            target,
            scale_a=scales[0],
            scale_b=scales[1],
            stream=self._stream,
            workspace=self._lane.address("blas"),
            alpha=alpha,
            beta=beta,
            c=c,
            quantized=quantized,
            algorithms=operands.algorithms,
        )

    # -- factors -----------------------------------------------------------------------------------

    def _factor(
        self, index: int, number: int, interval: Interval, packed: Matrix | None, source: Source
    ) -> Matrix:
        """A factor's indices of one interval, its lines as columns."""
        lo, hi = interval.lo, interval.hi
        if packed is not None:
            last = up(hi, GRAIN) if hi == self._share.feeds[index].extent else hi
            return packed.part((lo, min(last, packed.rows)), (0, packed.columns))
        feed, name, lines = self._share.feeds[index], "ab"[index], self._lines(index)
        if interval.after is not None:
            self._gathering.leave(interval.after)
        address = self._lane.address(f"panel {name}") + up(interval.offset, GRAIN) * lines
        part, moves = f"{name} {number}", feed.gathering(lo, hi)
        places = source(index, part, moves, self._gathering.stream)
        return self._filled(part, moves, index, places, address, hi - lo)

    def _packed(self, index: int) -> Matrix | None:
        """A factor that needs no gathering, in place or copied; None for one that comes."""
        feed, name = self._share.feeds[index], "ab"[index]
        if feed.gathers:
            return None
        if self._in_place(index):
            return self._own(index)
        address, array = self._lane.address(f"packed {name}"), self._operands.factors[index]
        own = array.address, array.strides
        return self._filled(f"{name} own", feed.moves, index, lambda _: own, address, feed.extent)

    def _filled(
        self, name: str, moves: Sequence[Move], index: int, places: Places, address: int, k: int
    ) -> Matrix:
        """Memory that `moves` fill with `k` indices of a factor, and zeros behind them."""
        lines, width, deep = self._lines(index), self._share.feeds[index].width, up(k, GRAIN)
        made = Matrix(address, deep, lines, 1, deep, self._scaling.given[index])
        if deep != k and width:
            call("cuMemsetD2D8Async", address + k, deep, 0, deep - k, width, self._stream)
        part = made.part((0, k), (0, width))
        self._gathering.copy(name, moves, places, part.transposed() if index == 0 else part)
        return made

    # -- scales ------------------------------------------------------------------------------------

    def _given_scales(self, index: int, found: ScaleMoves) -> Matrix:
        """This rank's scales of a factor, lines first."""
        scales, array = self._operands.scales, self._operands.factors[index]
        assert scales is not None
        held = scales.arrays[index]
        lines, k = array.shape if index == 0 else array.shape[::-1]
        shape = found.given.shape(lines, k)
        assert held is not None, "scales of several blocks are an array"
        matrix = scales_as(held, shape if index == 0 else shape[::-1])
        return matrix if index == 0 else matrix.transposed()

    def _come_scales(self, index: int, found: ScaleMoves) -> Matrix:
        """The scales that this rank needs of a factor, lines first."""
        if found.stay:
            return self._given_scales(index, found)
        name, rank = f"scales {'ab'[index]}", self._share.rank
        rows, columns = found.transfer.dst.local_shape(rank)
        come = Matrix.packed(self._lane.address(f"come {name}"), (rows, columns), "float32", "F")
        moves = self._share.scales_into(index)
        places = self._shown.reach(name, "", moves, self._stream)
        self._gathering.copy(name, moves, places, come)
        return come

    def _laid(self, index: int, interval: Interval) -> Matrix:
        """The form of an interval's scales as cuBLASLt wants them, lines first."""
        mode, lines, deep = self._share.modes[index], self._lines(index), interval.hi - interval.lo
        blocks = -(-deep // BLOCK)
        if mode == "tensor":
            return Matrix.packed(0, (1, 1), "float32", "F")
        if mode == "outer":
            return Matrix.packed(0, (up(lines, 4), 1), "float32", "F")
        if mode == "vectors":
            return Matrix.packed(0, (lines, blocks), "float32", "F")
        return Matrix(0, -(-lines // BLOCK), up(blocks, 4), up(blocks, 4), 1, "float32")

    def _lay_scales(self, index: int) -> list[Scale]:
        """The scales of each interval, where its product reads them."""
        mode, found, scales = self._share.modes[index], self._share.scale_moves[index], []
        given = self._operands.scales
        assert given is not None
        if mode == "tensor":
            return [Scale(mode, given.address(index))] * len(self._intervals)
        source = None if found is None else self._come_scales(index, found)
        number = given.numbers[index]
        if found is None and given.arrays[index] is not None:
            source = Matrix(given.address(index), 1, 1, 0, 0, "float32")
        unit = Blocks(None, None) if found is None else found.blocks
        address = up(self._lane.address(f"laid scales {'ab'[index]}"), 16)
        known = self._share.feeds[index].width
        if mode == "squares":
            known = -(-known // BLOCK)
        for interval in self._intervals:
            laid = self._laid(index, interval)._replace(address=address)
            address += 4 * laid.size
            lines = None if unit.rows is None else 1 if mode == "squares" else unit.rows
            blocks = Blocks(lines, None if unit.columns is None else 1)
            part = source
            if source is not None and unit.columns is not None:
                first = interval.lo // BLOCK
                part = source.part((0, source.rows), (first, source.columns))
            deep = min(laid.columns, -(-(interval.hi - interval.lo) // BLOCK))
            laid = laid.part((0, laid.rows), (0, deep))
            if part is not None and number == 1 and blocks.rows == 1 and _lies_as(part, laid):
                laid = part
            else:
                float8.numbers(
                    self._device,
                    self._stream,
                    laid,
                    None,
                    part,
                    blocks,
                    factor=number,
                    known_rows=known,
                )
            scales.append(Scale(mode, laid.address))
            if mode == "outer":  # the same for all of k
                return scales * len(self._intervals)
        return scales


def _lies_as(x: Matrix, wanted: Matrix) -> bool:
    """Whether the wanted columns of a matrix of scales can be read where they lie."""
    steps = (
        x.rows == 1 or x.row_stride == wanted.row_stride,
        wanted.columns == 1 or x.column_stride == wanted.column_stride,
    )
    has_all = x.rows == wanted.rows and x.columns >= wanted.columns
    return has_all and all(steps) and x.address % GRAIN == 0
