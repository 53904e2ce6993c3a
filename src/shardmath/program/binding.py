"""Steps bound to memory on cores: what a rank reads of all ranks' arrays, and what it writes.

Binding a step works out addresses, copies and constants; what is bound is called each time.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from functools import partial

import numpy as np

from shardmath.arrays import Library
from shardmath.arrays.base import HostArray
from shardmath.base.compiled import CompiledStep
from shardmath.base.immutable import Immutable
from shardmath.base.recorder import spanned
from shardmath.context.context import Context
from shardmath.geometry.moves import shared_part
from shardmath.local import epilog, gemm
from shardmath.local.compiled_sum import address_for
from shardmath.local.epilog import MatmulEpilog
from shardmath.local.fft import HALVING, engine_for
from shardmath.local.float8 import dequantize, quantize
from shardmath.local.reduction import bind_reduction
from shardmath.program import two_shots
from shardmath.program.factors import ArrayOf, Factor, Source, intervals
from shardmath.program.notes import Numbers, real
from shardmath.program.offers import Offers
from shardmath.program.passes import Blocks, Pass
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
    Transform,
)
from shardmath.redistribution import Transfer, Window
from shardmath.redistribution.bound_copies import Calls, pairs, part_of, run

_CAPITAL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_PANEL_ELEMENTS = 4 << 20  # of one gathered panel: 32 MiB in float64
_WHOLE_ELEMENTS = 128 << 20  # of all that is brought together for a library's product
_SHARED_BYTES = 8 << 20  # of a move, from which on the threads of a rank share it


# -- one rank's arithmetic -------------------------------------------------------------------------


def bind_arithmetic(step: Step, arrays: Mapping[str, HostArray], numbers: Numbers) -> Calls:
    """The calls that perform a step on this rank's buffers alone."""
    return [spanned(call, named(step)) for call in _bind_arithmetic(step, arrays, numbers)]


def named(step: Step) -> str:
    """What a trace calls a step: the words of its class."""
    return _CAPITAL.sub(" ", type(step).__name__).lower()


def _bind_arithmetic(step: Step, arrays: Mapping[str, HostArray], numbers: Numbers) -> Calls:
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


def round_into(source: HostArray, target: HostArray) -> None:
    """Write the numbers of `source` to `target`, which has another precision, each rounded once.

    Numbers that are too large become infinite, as on GPUs. An array of complex32 is a NumPy array
    of pairs.
    """
    with np.errstate(over="ignore"):
        if target.dtype.names is not None:
            target["real"], target["imag"] = source.real, source.imag
        elif source.dtype.names is not None:
            target.real, target.imag = source["real"], source["imag"]
        else:
            target[...] = source


# -- steps that take part of all ranks' arrays -----------------------------------------------------


class Binding(Immutable, eq=False):
    """Binds the steps of a program to the arrays of one call: this rank's buffers by name, `hosts`,
    and the `offers` of all ranks.

    `blocks` caches the blocks of passes, by the number of the step, and `factors` the factors of
    products that lie in memory with an address here.
    """

    context: Context
    program: Program
    library: Library
    numbers: Numbers
    hosts: Mapping[str, HostArray]
    offers: Offers
    blocks: dict[int, Blocks]
    factors: dict[Multiply, tuple[Factor, Factor]] = field(default_factory=dict)

    def between(self, hosts: Mapping[str, HostArray]) -> Binding:
        """A binding of the same steps, where these buffers are elsewhere."""
        factors = {
            multiply: pair
            for multiply, pair in self.factors.items()
            if not {multiply.left, multiply.right} & set(hosts)
        }
        return replace(self, hosts={**self.hosts, **hosts}, factors=factors)

    def bind(self, number: int) -> Calls:
        """The calls that perform the step of that number."""
        step, rank = self.program.steps[number], self.context.rank
        if isinstance(step, Move | Transform):
            blocks = self.blocks.get(number)
            if blocks is None:
                blocks = self.blocks[number] = self._blocks_of(step)
            read = [(step.source, src) for src in step.transfer.sources(rank) if src != rank]
            return self._when_reached(read, partial(self._pass, step, blocks))
        if isinstance(step, Product):
            return self._when_reached(self._read_by(step), partial(self._product, step))
        if isinstance(step, Combine):
            source, target = self.hosts[step.source], self.hosts[step.target]
            if two_shots.takes(step, source.nbytes):
                notes = self.offers.raw(step.source)
                return two_shots.bind(self.context, step, source, target, notes)
            read = [(step.source, src) for src in step.sources(rank)]
            combine = self._combine if step.reduction is None else self._reduce
            return self._when_reached(read, partial(combine, step))
        return bind_arithmetic(step, self.hosts, self.numbers)

    def _when_reached(self, read: Sequence[tuple[str, int]], made: Callable[[], Calls]) -> Calls:
        """The calls of `made()`, bound now. If a peer's array has no address they are bound in each
        run, in which the array is copied here once it may be read.
        """
        if all(self.offers.has_address(name, rank) for name, rank in read):
            return made()
        return [lambda: run(made())]

    # -- moves and transforms ----------------------------------------------------------------------

    def _blocks_of(self, step: Move | Transform) -> Blocks:
        """The blocks of a pass. A move is one, unless the threads of the rank share it."""
        program, rank = self.program, self.context.rank
        buffer = program.workspace.get(step.target) or program.results.get(step.target)
        order = "C" if buffer is None else buffer.order  # scratch has none of its own
        if step.target in program.transposed:
            order = "C" if order == "F" else "F"
        if isinstance(step, Move):
            cut = self.context.threads > 1 and self.hosts[step.target].nbytes >= _SHARED_BYTES
            itemsize = step.transfer.itemsize
            return Blocks(step.transfer, rank, order=order, itemsize=itemsize, cut=cut)
        itemsize = self.hosts[step.target if step.kind in HALVING else step.source].itemsize
        return Blocks(
            step.transfer, rank, axes=step.axes, kind=step.kind, order=order, itemsize=itemsize
        )

    def _pass(self, step: Move | Transform, blocks: Blocks) -> Calls:
        """The calls that move or transform what comes from all ranks."""
        transfer, rank, target = step.transfer, self.context.rank, self.hosts[step.target]
        source = self.hosts.get(step.source, target)  # a rank may have nothing to give
        windows = {}
        for src in () if blocks.stays else transfer.sources(rank):
            if src == rank:
                windows[src] = Window.of(source)
            else:
                windows[src] = self.offers.window(step.source, src, transfer)
        if isinstance(step, Move):
            return Pass(self.context, blocks, source, target, windows).bound()
        transform = engine_for(self.library.name, step.kind), step.forward, step.norm
        return Pass(self.context, blocks, source, target, windows, *transform).bound()

    # -- what is combined --------------------------------------------------------------------------

    def _reached(
        self, name: str, shape: Callable[[int], tuple[int, ...]], transfer: Transfer | None = None
    ) -> ArrayOf:
        """Every rank's array in a buffer; `shape(rank)` is its shape."""
        own = self.hosts[name]
        hosts = {self.context.rank: own}

        def array(rank: int) -> HostArray:
            if rank not in hosts:
                window = self.offers.window(name, rank, transfer)
                hosts[rank] = window.array(shape(rank), own.dtype)
            return hosts[rank]

        return array

    def _reduce(self, step: Combine) -> Calls:
        """The calls that combine in one shot: the part that this rank needs of what all have."""
        assert step.reduction is not None, "one shot"
        inputs, ranks, own = self._inputs(step), step.sources(self.context.rank), self.context.rank
        read = {src: x.nbytes for src, x in zip(ranks, inputs, strict=True) if src != own}
        reduce = bind_reduction(step.reduction, inputs, self.hosts[step.target])
        return [spanned(reduce, "reduce", read=read)]

    def payload_sum(self, step: Step) -> tuple[int, int, int] | None:
        """How compiled code adds up the payloads of all ranks, if this step alone reads them.

        (the address of a function, bytes of the result, where they begin in each payload), see
        direct.c. None if NumPy adds them, from where they are received.
        """
        if not isinstance(step, Combine) or step.reduction is None:
            return None
        reduction, offers, target = step.reduction, self.offers, self.hosts[step.target]
        ranks = step.sources(self.context.rank)
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
        """The parts of all ranks' arrays that this rank combines."""
        array, rank = self._reached(step.source, step.held.local_shape), self.context.rank
        cuts = [slice(x.start, x.start + x.length) for x in step.needed.spans(rank)]
        return [part_of(array(src), cuts) for src in step.sources(rank)]

    def _combine(self, step: Combine) -> Calls:
        rank, source, target = self.context.rank, self.hosts[step.source], self.hosts[step.target]
        weight = None
        if step.weight:
            weight = np.asarray(self.numbers[step.weight], target.dtype)
            if weight == 0:
                return []
        sums = target if target.dtype == source.dtype else np.empty(target.shape, source.dtype)
        bound: Calls = [partial(sums.fill, 0)] if weight is None else []
        array = self._reached(step.source, step.held.local_shape)
        for src in step.sources(rank):
            boxes = shared_part(step.held, step.needed, src=src, dst=rank)
            for theirs, own in pairs(boxes, array, sums):
                add: Callable[[], object] = CompiledStep(np.add, own, theirs, own)
                if weight is not None:
                    add = partial(add_times, own, weight, theirs)
                read = {src: theirs.nbytes} if src != rank else {}
                bound.append(spanned(add, "add", read=read))
        if sums is not target:
            bound.append(partial(np.copyto, target, sums, "unsafe"))
        return bound

    # -- products ----------------------------------------------------------------------------------

    def _read_by(self, step: Product) -> list[tuple[str, int]]:
        """(buffer, rank) of all that the moves of a product read."""
        rank = self.context.rank
        moves = [move for move in step.moves if move]
        return [(move.source, src) for move in moves for src in move.transfer.sources(rank)]

    def _factor(self, name: str, move: Move | None, axis: int) -> Factor:
        """One factor of a product, whose axis `axis` is k."""
        rank = self.context.rank
        if move is None:
            own = _matrix(self.hosts[name])
            rows, columns = own.shape
            source = Source.own((rows, columns), rank, axis=axis)
            return Factor(rank, source, lambda _: own, own.dtype)
        transfer, dtype = move.transfer, self.hosts[move.source].dtype
        source = Source.plan(transfer, rank, axis=axis, panel_elements=_PANEL_ELEMENTS)
        return Factor(
            rank, source, self._reached(move.source, transfer.source_shape, transfer), dtype
        )

    def _factors_of(self, step: Product) -> tuple[Factor, Factor]:
        factors = self.factors.get(step.multiply)
        if factors is None:
            left = self._factor(step.multiply.left, step.moves[0], 1)
            right = self._factor(step.multiply.right, step.moves[1], 0)
            factors = left, right
            if all(self.offers.has_address(name, src) for name, src in self._read_by(step)):
                self.factors[step.multiply] = factors
        return factors

    def _product(self, step: Product) -> Calls:
        """The calls that multiply, and also round if nothing else is left to do."""
        multiply, out = step.multiply, _matrix(self.hosts[step.multiply.target])
        left, right = self._factors_of(step)
        numbers = self.numbers
        rounding = [
            call for one in step.rounding for call in bind_arithmetic(one, self.hosts, numbers)
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

        multiply_and_round = spanned(self.library.matmul, "multiply")

        def multiplied() -> None:
            if not multiply_and_round(left.whole(), right.whole(), rounded):
                run(plain)
            left.forget()
            right.forget()

        return [*gathered, multiplied]

    def _rounded(self, step: Product, left: Factor, right: Factor) -> HostArray | None:
        """The buffer for a product that the user's library rounds; None if that is no use."""
        if not step.rounding or left.copied + right.copied > _WHOLE_ELEMENTS:
            return None
        scaled, finished = step.rounding
        assert isinstance(scaled, Axpby) and isinstance(finished, Finish)
        target = self.hosts[finished.target]
        narrow = left.dtype == right.dtype == target.dtype
        return target if narrow and self.numbers[scaled.alpha] == 1 else None


def _bind_product(multiply: Multiply, left: Factor, right: Factor, out: HostArray) -> Calls:
    """The calls that set `out` to the product of two factors. They gather panels in each run."""
    cuts = intervals(left.source, right.source)
    conj_a, conj_b = multiply.conjugate

    def bound(lo: int, hi: int) -> Callable[[], object]:
        a, b = left.matrix(lo, hi), right.matrix(lo, hi)
        product = gemm.bind(a, b, out, accumulate=lo > 0, conj_a=conj_a, conj_b=conj_b)
        return spanned(
            product, "multiply", read=Counter(left.read(lo, hi)) + Counter(right.read(lo, hi))
        )

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
