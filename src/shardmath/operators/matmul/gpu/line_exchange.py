"""Lines of an operand that every rank sends to all others, beside the products of those it has.

Every rank has room for all lines and their scales, where peers write. A barrier before says that
nobody reads what was there, one behind a round that its lines have come. Large parts are moved by
the copy engines, one copy behind the other on a stream of their own, and the barriers are on yet
another: neither waits for a product, nor a copy for a barrier. Small parts are pushed by a kernel.
"""

from __future__ import annotations

from shardmath.cuda.driver import call
from shardmath.geometry import shared_part
from shardmath.geometry.integers import up
from shardmath.local.float8 import BLOCK
from shardmath.local.gpu import Matrix, scaled
from shardmath.local.gpu.scaled import GRAIN, Scale
from shardmath.operators.lanes import Lane
from shardmath.operators.matmul.gpu.gather import Gather
from shardmath.operators.matmul.gpu.rank_plan import Operands, RankPlan
from shardmath.operators.matmul.gpu.rounds import Rounds, Stage
from shardmath.operators.matmul.gpu.scale_layouts import ScaleLayouts, scale_layout
from shardmath.operators.published import PublishedMatrices, matrix_of

__all__ = ["LINES", "LINE_SCALES", "LineExchange", "fill_behind"]

LINES, LINE_SCALES = "lines", "line scales"  # what peers write, by name


class LineExchange:
    """The exchange of one execution on one rank."""

    def __init__(
        self,
        rank_plan: RankPlan,
        rounds: Rounds,
        operands: Operands,
        lane: Lane,
        published: PublishedMatrices,
        gather: Gather,
    ) -> None:
        self._rank_plan = rank_plan
        self._rounds = rounds
        self._rank = rank_plan.rank
        self._mode = rank_plan.modes[rounds.index]
        self._k = rank_plan.operand_plans[rounds.index].extent
        self._padded_k = up(self._k, GRAIN)  # elements of a line in memory, with those that pad it
        self._lane = lane
        self._published = published
        self._gather = gather
        self._stream = operands.stream
        self._array = operands.ab[rounds.index]
        own = matrix_of(self._array)
        self.own = own if rounds.index else own.transposed()  # lines as columns
        self._suits = scaled.fits(self.own) and self.own.leading == self.own.rows

    def prepare(self, lines: int) -> None:
        """Memory for all lines, of which a product reads so many. Raises HeapExhausted."""
        self._published.made(LINES, (self._padded_k, lines), self.own.dtype, "F")
        if self._mode != "tensor":
            layout = self._layout(lines)
            order = "C" if self._mode == "squares" else "F"
            self._published.made(LINE_SCALES, (layout.rows, layout.columns), "float32", order)
        if not self._suits:
            self._lane.buffer("own lines", self._padded_k * self.own.columns)

    def send(self, scales: ScaleLayouts) -> None:
        """Put on the streams: this rank's lines and their scales, to all ranks. Afterwards `own`
        are these lines as a product takes them.
        """
        own = self.own = self.own if self._suits else self._packed()
        if not self._rounds.cuts:
            self._lane.barrier(self._stream)  # before writing what a peer may still read
            self._send_scales(scales, self._stream)
            everywhere = [self._place(rank) for rank in range(len(self._rounds.lines))]
            self._lane.pushes.push_to_all(own.address, everywhere, own.size, self._stream)
            self._lane.barrier(self._stream)  # before reading what peers wrote
            return
        side, copies = (int(self._lane.stream(name)) for name in ("side", "copies"))
        self._follow(side, self._stream, "begun")
        self._lane.barrier(side)  # before writing what a peer may still read
        self._follow(copies, side, "free")
        self._send_scales(scales, side)
        for number in range(1, self._rounds.count + 1):
            to = self._place(self._rounds.target(self._rank, number))
            if own.size:
                call("cuMemcpyAsync", to, own.address, own.size, copies)
            if number in self._rounds.cuts:
                self._follow(side, copies, f"sent {number}")
                self._lane.barrier(side)  # before reading what peers wrote
                call("cuEventRecord", self._lane.event(f"come {number}"), side)

    def await_round(self, number: int) -> None:
        """What follows on the products' stream comes after a round that products follow on."""
        if number:
            call("cuStreamWaitEvent", self._stream, self._lane.event(f"come {number}"), 0)

    def end(self) -> None:
        """What follows on the products' stream comes after all rounds."""
        self.await_round(self._rounds.count)

    def lines(self, stage: Stage) -> Matrix:
        """Those of a stage that have come, as columns."""
        all_lines = self._published.own(LINES)
        return all_lines.part((0, all_lines.rows), (stage.lo, stage.hi))

    def scale(self, stage: Stage) -> Scale:
        """Their scales, which have come; those of tensors all ranks know."""
        own = self._published.own(LINE_SCALES)
        return Scale(self._mode, own.address + 4 * self._offset(stage.lo))

    def _packed(self) -> Matrix:
        """This rank's lines in memory of the lane."""
        problem, index, rank = self._rank_plan.strategy.problem, self._rounds.index, self._rank
        layout = (problem.a, problem.b)[index]
        address, lines = self._lane.address("own lines"), self.own.columns
        made = Matrix(address, self._padded_k, lines, 1, self._padded_k, self.own.dtype)
        part = made.part((0, self._k), (0, lines))
        fill_behind(made, part, self._stream)
        moves = shared_part(layout, layout, src=rank, dst=rank)
        place = self._array.address, self._array.strides
        into = part if index else part.transposed()
        self._gather.copy("own lines", moves, lambda _: place, into)
        return made

    # -- where things lie --------------------------------------------------------------------------

    def _layout(self, lines: int) -> Matrix:
        return scale_layout(self._mode, lines, self._k)

    def _offset(self, line: int) -> int:
        """Where the scales of a stage begin whose first line is this one."""
        if self._mode == "outer":
            return line
        layout = self._layout(BLOCK)
        return (
            line * layout.columns if self._mode == "vectors" else line // BLOCK * layout.row_stride
        )

    def _place(self, rank: int) -> int:
        """Where this rank's lines lie at another."""
        return (
            self._published.place(LINES, rank)[0] + self._rounds.starts[self._rank] * self._padded_k
        )

    def _send_scales(self, scales: ScaleLayouts, stream: int) -> None:
        own = self._rounds.lines[self._rank]
        if self._mode == "tensor" or not own:
            return
        peers = [
            rank
            for rank in range(len(self._rounds.lines))
            if rank != self._rank or not self._rounds.cuts
        ]
        places = [self._scales_place(rank, own) for rank in peers]
        scales.send(self._rounds.index, places, stream)

    def _scales_place(self, rank: int, own: int) -> Matrix:
        """Where the scales of this rank's lines lie at another: within those of their stage."""
        first = self._rounds.starts[self._rank]
        address, (row, column) = self._published.place(LINE_SCALES, rank)
        stage = next(x for x in self._rounds.stages(rank) if x.lo <= first < x.hi)
        layout = (
            self._layout(own)._replace(rows=own) if self._mode == "outer" else self._layout(own)
        )
        at = self._offset(stage.lo)
        if self._mode == "squares":
            at, row, column = self._offset(first), layout.row_stride * 4, 4
        else:
            at += first - stage.lo
            if self._rounds.cuts:  # stages lie one behind the other
                column = 4 * (stage.hi - stage.lo)
        return layout._replace(
            address=address + 4 * at, row_stride=row // 4, column_stride=column // 4
        )

    def _follow(self, stream: int, other: int, name: str) -> None:
        """What follows on one stream comes after what is on the other."""
        event = self._lane.event(name)
        call("cuEventRecord", event, other)
        call("cuStreamWaitEvent", stream, event, 0)


def fill_behind(x: Matrix, part: Matrix, stream: int) -> None:
    """Put zeros behind each line of `part`, the first elements of the columns of `x`."""
    if part.rows < x.rows and part.columns:
        behind = x.address + part.rows
        call("cuMemsetD2D8Async", behind, x.rows, 0, x.rows - part.rows, part.columns, stream)
