"""Arithmetic on cores: steps that one rank performs on its own, and products of what peers have.

Binding a step works out addresses, checks and constants; what is bound is called each time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np

from shardmath.arrays import Library
from shardmath.arrays.base import HostArray, raw_view
from shardmath.base.compiled import CompiledStep
from shardmath.context.context import Context
from shardmath.geometry.moves import shared_part
from shardmath.local import epilog, gemm
from shardmath.local.compiled_sum import address_for
from shardmath.local.epilog import MatmulEpilog
from shardmath.local.float8 import dequantize, quantize
from shardmath.local.reduction import bind_reduction
from shardmath.program import two_shots
from shardmath.program.cores_blocks import Calls, run
from shardmath.program.numbers import Numbers, real
from shardmath.program.offers import Offers
from shardmath.program.panels import Piece, Source, intervals
from shardmath.program.performing import Known
from shardmath.program.steps import (
    Axpby,
    Combine,
    Convert,
    Dequantize,
    Finish,
    Largest,
    Move,
    Multiply,
    Product,
    Program,
    Quantize,
    Step,
    SumLines,
)
from shardmath.redistribution import Transfer, TransferPlan
from shardmath.redistribution.bound_copies import bind_moves, pairs

_PANEL_ELEMENTS = 4 << 20  # of one gathered panel: 32 MiB in float64
_KEPT_PANEL = 64 << 10  # bytes of one that stays for the next call
_WHOLE_ELEMENTS = 128 << 20  # of all that is brought together for a library's product

ArrayOf = Callable[[int], HostArray]  # the array of a rank, in memory that can be read here


def fused(program: Program) -> Program:
    """The program with moves that bring nothing but factors of products as parts of these."""
    products = [step for step in program.steps if isinstance(step, Multiply)]
    factors = {name for product in products for name in (product.left, product.right)}
    used = Counter(name for step in program.steps for name in buffers_of(step))
    used.subtract(name for product in products for name in buffers_of(product))
    moved = {
        step.target: step
        for step in program.steps
        if isinstance(step, Move)
        and step.target in factors
        and used[step.target] == 1  # by the move
        and _is_factor(step, program)
    }
    steps: list[Step] = []
    for index, step in enumerate(program.steps):
        if isinstance(step, Multiply):
            rounding = program.steps[index + 1 : index + 3]
            only = step.target in program.scratch and _rounds(step.target, rounding)
            moves = moved.get(step.left), moved.get(step.right)
            steps.append(Product(step, moves, rounding if only else ()))
        elif isinstance(step, Move) and step.target in moved:
            continue
        elif not (steps and isinstance(steps[-1], Product) and step in steps[-1].rounding):
            steps.append(step)
    workspace = {name: x for name, x in program.workspace.items() if name not in moved}
    return replace(program, steps=tuple(steps), workspace=workspace)


def _is_factor(move: Move, program: Program) -> bool:
    """Whether a move brings a matrix of the program's own."""
    is_matrix = isinstance(move.transfer, TransferPlan) and move.transfer.dst.ndim == 2
    return is_matrix and move.target in program.workspace


def buffers_of(step: object) -> set[str]:
    """The names of all buffers that a step reads or writes, among other words."""
    if isinstance(step, str):
        return {step}
    if isinstance(step, Step):
        step = tuple(vars(step).values())
    return (
        {name for part in step for name in buffers_of(part)} if isinstance(step, tuple) else set()
    )


def _rounds(sums: str, steps: Sequence[Step]) -> bool:
    """Whether all that these do to the sums is to multiply by a number, and to round."""
    if len(steps) != 2:
        return False
    scaled, finished = steps
    return (
        isinstance(scaled, Axpby)
        and (scaled.target, scaled.addend) == (sums, "")
        and isinstance(finished, Finish)
        and (finished.source, finished.epilog) == (sums, MatmulEpilog.DEFAULT)
    )


# -- one rank's arithmetic -------------------------------------------------------------------------


def bind_arithmetic(step: Step, arrays: Mapping[str, HostArray], numbers: Numbers) -> Calls:
    """The calls that perform a step on this rank's buffers alone."""
    if isinstance(step, Axpby):
        return _bind_axpby(step, arrays, numbers)
    if isinstance(step, Finish):
        return _bind_finish(step, arrays)
    assert isinstance(step, SumLines | Convert | Dequantize | Quantize | Largest), step
    source, target = arrays[step.source], arrays[step.target]
    bound: Callable[[], object]
    if isinstance(step, SumLines):
        bound = partial(_sum_lines, step, source, target)
    elif isinstance(step, Convert):
        bound = partial(round_into, source, target)
    elif isinstance(step, Largest):
        bound = partial(_largest, source, target)
    elif isinstance(step, Quantize):
        bound = partial(quantize, source, real(numbers, step.scale), target)
    else:
        shape = step.blocks.shape(*source.shape)
        if numbers.get(step.scale) is None:
            scales = arrays[step.scale]
        else:
            scales = np.full(shape, real(numbers, step.scale), np.float32)
        bound = partial(dequantize, source, scales.reshape(shape), step.blocks, target)
    return [bound]


def _bind_axpby(step: Axpby, arrays: Mapping[str, HostArray], numbers: Numbers) -> Calls:
    target, alpha = arrays[step.target], numbers[step.alpha]
    bound: Calls = []
    if alpha != 1:
        bound.append(CompiledStep(np.multiply, target, np.asarray(alpha, target.dtype), target))
    if step.addend and numbers[step.beta] != 0:
        beta = np.asarray(numbers[step.beta], target.dtype)
        bound.append(partial(add_times, target, beta, arrays[step.addend]))
    return bound


def add_times(target: HostArray, number: HostArray, addend: HostArray) -> None:
    """Add `addend` times a number to `target`."""
    np.add(target, number * addend, out=target)


def _bind_finish(step: Finish, arrays: Mapping[str, HostArray]) -> Calls:
    source, target = arrays[step.source], arrays[step.target]
    if step.epilog is MatmulEpilog.DEFAULT:
        return [] if source is target else [partial(np.copyto, target, source, "unsafe")]
    return [
        partial(
            epilog.apply,
            step.epilog,
            source,
            {name: arrays[name] for name in step.inputs},
            dtype=step.extras,
            out=target,
            outputs={name: arrays[buffer] for name, buffer in step.outputs},
        )
    ]


def _sum_lines(step: SumLines, source: HostArray, target: HostArray) -> None:
    array = source.conj() if step.conjugate else source
    target[...] = epilog.column_sums(array) if step.columns else epilog.row_sums(array)


def _largest(source: HostArray, target: HostArray) -> None:
    target[...] = np.abs(source).max(initial=0.0)


# -- what takes part of all ranks' arrays ----------------------------------------------------------


class Binding:
    """Binds the steps of one call: `hosts` are this rank's buffers, `offers` all ranks'."""

    def __init__(
        self,
        context: Context,
        hosts: Mapping[str, HostArray],
        offers: Offers,
        known: Known,
        factors: dict[Multiply, tuple[Factor, Factor]] | None = None,
    ) -> None:
        self._context = context
        self._hosts = self.hosts = hosts
        self._offers = offers
        self._known = known
        self._factors = {} if factors is None else factors  # whose memory has an address here

    def between(self, hosts: Mapping[str, HostArray]) -> Binding:
        """A binding of the same steps, where these buffers are elsewhere."""
        factors = {
            multiply: pair
            for multiply, pair in self._factors.items()
            if not {multiply.left, multiply.right} & set(hosts)
        }
        hosts = {**self._hosts, **hosts}
        return Binding(self._context, hosts, self._offers, self._known, factors)

    def bind(self, step: Step) -> Calls:
        """The calls that perform a step."""
        if isinstance(step, Product):
            read = self._read_by(step)
            return self._when_reached(read, lambda: self._product(step))
        if isinstance(step, Combine):
            if two_shots.takes(step, self._hosts[step.source].nbytes):
                return self._in_two_shots(step)
            read = [(step.source, src) for src in step.sources(self._context.rank)]
            combine = self._combine if step.reduction is None else self._reduce
            return self._when_reached(read, lambda: combine(step))
        return bind_arithmetic(step, self._hosts, self._known.numbers)

    def _read_by(self, step: Product) -> list[tuple[str, int]]:
        """The buffers that its moves read, and of which ranks."""
        rank = self._context.rank
        moves = [move for move in step.moves if move]
        return [(move.source, src) for move in moves for src in move.transfer.sources(rank)]

    def _when_reached(self, read: Sequence[tuple[str, int]], made: Callable[[], Calls]) -> Calls:
        """Calls bound now, or at each run where some ranks' arrays are copied here first."""
        if all(self._offers.has_address(name, rank) for name, rank in read):
            return made()
        return [lambda: run(made())]

    def _reached(
        self, name: str, shape: Callable[[int], tuple[int, ...]], transfer: Transfer | None = None
    ) -> ArrayOf:
        """Every rank's array in a buffer, of which `shape` says each one's shape."""
        own = self._hosts[name]
        hosts = {self._context.rank: own}

        def array(rank: int) -> HostArray:
            if rank not in hosts:
                window = self._offers.window(name, rank, transfer)
                hosts[rank] = window.array(shape(rank), own.dtype)
            return hosts[rank]

        return array

    def _reduce(self, step: Combine) -> Calls:
        """The calls that combine in one shot, where a rank needs it, what every rank has whole."""
        assert step.reduction is not None, "one shot"
        return [bind_reduction(step.reduction, self._inputs(step), self._hosts[step.target])]

    def payload_sum(self, step: Step) -> tuple[int, int, int] | None:
        """How compiled code adds up what all ranks have sent along, if this step alone reads that.

        The address of a function, bytes of the result, and where they begin in each payload; see
        direct.c. None where NumPy adds, from where the payloads are put.
        """
        if not isinstance(step, Combine) or step.reduction is None:
            return None
        reduction, offers, target = step.reduction, self._offers, self._hosts[step.target]
        ranks = step.sources(self._context.rank)
        if not all(offers.sent(step.source, src) for src in ranks):
            return None
        inputs, dtype = self._inputs(step), target.dtype
        begins = {
            int(x.ctypes.data) - offers.window(step.source, src).address
            for src, x in zip(ranks, inputs, strict=True)
        }
        packed = all(x.flags.c_contiguous and x.dtype == dtype for x in (*inputs, target))
        plain = reduction.op == "sum" and reduction.accumulator == reduction.dtype
        if not (packed and plain and target.nbytes and len(begins) == 1):
            return None
        address = address_for(dtype)
        return None if address is None else (address, target.nbytes, begins.pop())

    def _inputs(self, step: Combine) -> list[HostArray]:
        """The parts of all ranks' arrays that one shot combines."""
        array, rank = self._reached(step.source, step.held.local_shape), self._context.rank
        spans = step.needed.spans(rank)
        cut: tuple[Any, ...] = (
            *(slice(span.start, span.start + span.length) for span in spans),
            ...,
        )
        return [array(src)[cut] for src in step.sources(rank)]

    def _in_two_shots(self, step: Combine) -> Calls:
        own, target = self._hosts[step.source], self._hosts[step.target]
        return two_shots.bind(self._context, step, own, target, self._offers.raw(step.source))

    def _combine(self, step: Combine) -> Calls:
        rank, source, target = (
            self._context.rank,
            self._hosts[step.source],
            self._hosts[step.target],
        )
        weight = None
        if step.weight:
            weight = np.asarray(self._known.numbers[step.weight], target.dtype)
            if weight == 0:
                return []
        sums = target if target.dtype == source.dtype else np.empty(target.shape, source.dtype)
        bound: Calls = [partial(sums.fill, 0)] if weight is None else []
        array = self._reached(step.source, step.held.local_shape)
        for src in step.sources(rank):
            boxes = shared_part(step.held, step.needed, src=src, dst=rank)
            for theirs, own in pairs(boxes, array, sums):
                if weight is not None:
                    bound.append(partial(add_times, own, weight, theirs))
                else:
                    bound.append(CompiledStep(np.add, own, theirs, own))
        if sums is not target:
            bound.append(partial(np.copyto, target, sums, "unsafe"))
        return bound

    def _factor(self, name: str, move: Move | None, axis: int) -> Factor:
        rank = self._context.rank
        if move is None:
            return Factor.own(rank, _matrix(self._hosts[name]), axis)
        transfer = move.transfer
        array = self._reached(move.source, transfer.source_shape, transfer)
        return Factor.moved(rank, move, array, self._hosts[move.source].dtype, axis)

    def _factors_of(self, step: Product) -> tuple[Factor, Factor]:
        factors = self._factors.get(step.multiply)
        if factors is None:
            left = self._factor(step.multiply.left, step.moves[0], 1)
            right = self._factor(step.multiply.right, step.moves[1], 0)
            factors = left, right
            if all(self._offers.has_address(name, src) for name, src in self._read_by(step)):
                self._factors[step.multiply] = factors
        return factors

    def _product(self, step: Product) -> Calls:
        """The calls that multiply, in panels gathered each time, and round if that is all."""
        multiply, out = step.multiply, _matrix(self._hosts[step.multiply.target])
        left, right = self._factors_of(step)
        numbers = self._known.numbers
        rounding = [
            call for one in step.rounding for call in bind_arithmetic(one, self._hosts, numbers)
        ]
        if not left.source.extent or not out.size:
            return [partial(out.fill, 0), *rounding]
        left.keep_small()
        right.keep_small()
        gathered = [*left.copies, *right.copies]
        plain = [*_bind_product(multiply, left, right, out), *rounding]
        rounded = self._rounded(step, left, right)
        if rounded is None:
            return [*gathered, *plain]
        library: Library = self._known.arrays.library

        def multiplied() -> None:
            if not library.matmul(left.whole(), right.whole(), rounded):
                run(plain)
            left.forget()
            right.forget()

        return [*gathered, multiplied]

    def _rounded(self, step: Product, left: Factor, right: Factor) -> HostArray | None:
        """Where a product of the user's library may go that rounds; None if it would not do."""
        if not step.rounding or left.copied + right.copied > _WHOLE_ELEMENTS:
            return None
        scaled, finished = step.rounding
        assert isinstance(scaled, Axpby) and isinstance(finished, Finish)
        target = self._hosts[finished.target]
        narrow = left.dtype == right.dtype == target.dtype
        return target if narrow and self._known.numbers[scaled.alpha] == 1 else None


def _bind_product(multiply: Multiply, left: Factor, right: Factor, out: HostArray) -> Calls:
    """The calls that set `out` to the product of two factors. Panels are gathered each time."""
    cuts = intervals(left.source, right.source)
    conj_a, conj_b = multiply.conjugate

    def bound(lo: int, hi: int) -> Callable[[], object]:
        a, b = left.matrix(lo, hi), right.matrix(lo, hi)
        return gemm.bind(a, b, out, accumulate=lo > 0, conj_a=conj_a, conj_b=conj_b)

    def in_panels() -> None:
        for lo, hi in cuts:
            bound(lo, hi)()
        left.forget()
        right.forget()

    if left.gathers or right.gathers:
        return [in_panels]
    return [bound(lo, hi) for lo, hi in cuts]


def _matrix(array: HostArray) -> HostArray:
    """A vector as a matrix of one column."""
    return array if array.ndim == 2 else array[:, np.newaxis]


class Factor:
    """Dense matrices of one factor of a product, interval by interval of k."""

    def __init__(self, rank: int, source: Source, array: ArrayOf, dtype: np.dtype[Any]) -> None:
        self._rank = rank
        self.source = source
        self.dtype = dtype
        self._array = array
        self._filled = (0, 0)
        self._panel = np.empty((0, 0), dtype)
        self.copies: Calls = []  # what fills the one panel that stays

    @classmethod
    def own(cls, rank: int, array: HostArray, axis: int) -> Factor:
        """A matrix of this rank's own, whose axis `axis` is k."""
        rows, columns = array.shape
        source = Source.own((rows, columns), rank, axis=axis)
        return cls(rank, source, lambda _: array, array.dtype)

    @classmethod
    def moved(
        cls, rank: int, move: Move, array: ArrayOf, dtype: np.dtype[Any], axis: int
    ) -> Factor:
        """The factor that a move brings from all ranks' arrays."""
        source = Source.plan(move.transfer, rank, axis=axis, panel_elements=_PANEL_ELEMENTS)
        return cls(rank, source, array, dtype)

    @property
    def copied(self) -> int:
        """Elements that `whole` copies."""
        return 0 if len(self.source.bounds) <= 1 else self.source.extent * self.source.width

    def whole(self) -> HostArray:
        """All of k: where it lies, if it is one matrix there, or in one panel; else copied."""
        ends = sorted(self.source.bounds)
        first = self.matrix(0, ends[0])
        if len(ends) == 1:
            return first
        across = first.shape[1 - self.source.axis]
        shape = (ends[-1], across) if self.source.axis == 0 else (across, ends[-1])
        order: Literal["C", "F"] = "F" if abs(first.strides[0]) < abs(first.strides[1]) else "C"
        made = np.empty(shape, first.dtype, order)
        for lo, hi in zip([0, *ends], ends, strict=False):
            part = self._cut(lo, hi, slice(None))
            raw_view(made)[part] = raw_view(self.matrix(lo, hi))
        return made

    def matrix(self, lo: int, hi: int) -> HostArray:
        """Indices lo to hi of k: in a peer's memory, or in the panel that holds them."""
        for piece in self.source.pieces:
            if piece.lo <= lo < piece.hi:
                return self._piece(piece, lo, hi)
        if not self._filled[0] <= lo < self._filled[1]:
            self._fill(lo // self.source.panel * self.source.panel)
        return self._panel[self._cut(lo - self._filled[0], hi - self._filled[0], slice(None))]

    @property
    def gathers(self) -> bool:
        """Whether panels are gathered anew each time, into memory of that time."""
        return bool(self.source.panel) and not self.copies

    def keep_small(self) -> None:
        """Bind what gathers a factor that is one small panel; `copies` are to be run each time."""
        source = self.source
        nbytes = source.extent * source.width * self.dtype.itemsize
        if self.gathers and source.panel >= source.extent and nbytes <= _KEPT_PANEL:
            self._filled, self._panel = (0, source.extent), self._room(source.extent)
            moves = source.gather_moves(0, source.extent)
            self.copies = bind_moves(moves, self._array, self._panel, rank=self._rank)

    def forget(self) -> None:
        """Drop the panel: what it was gathered from has changed."""
        if not self.copies:
            self._filled, self._panel = (0, 0), self._panel[:0, :0].copy()

    def _room(self, extent: int) -> HostArray:
        width = self.source.width
        shape = (extent, width) if self.source.axis == 0 else (width, extent)
        return np.empty(shape, self.dtype)

    def _piece(self, piece: Piece, lo: int, hi: int) -> HostArray:
        start = piece.k + lo - piece.lo
        across = slice(piece.other, piece.other + self.source.width)
        return self._array(piece.src)[self._cut(start, start + hi - lo, across)]

    def _fill(self, lo: int) -> None:
        source = self.source
        hi = min(lo + source.panel, source.extent)
        if self._panel.shape[source.axis] != hi - lo:
            self._panel = self._room(hi - lo)
        moves = source.gather_moves(lo, hi)
        for copy in bind_moves(moves, self._array, self._panel, rank=self._rank):
            copy()
        self._filled = (lo, hi)

    def _cut(self, lo: int, hi: int, across: slice) -> tuple[slice, slice]:
        return (slice(lo, hi), across) if self.source.axis == 0 else (across, slice(lo, hi))


def round_into(source: HostArray, target: HostArray) -> None:
    """Write the numbers of `source` to `target`, of another width, each rounded once: of half
    precision, in which no library computes. An array of complex32 is a NumPy array of pairs.

    What is too large becomes infinite, as on GPUs.
    """
    with np.errstate(over="ignore"):
        if target.dtype.names is not None:
            target["real"], target["imag"] = source.real, source.imag
        elif source.dtype.names is not None:
            target.real, target.imag = source["real"], source["imag"]
        else:
            target[...] = source
