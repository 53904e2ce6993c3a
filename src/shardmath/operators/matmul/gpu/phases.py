"""A GPU performs the phases of a product: each step of its program is put on a stream.

This process waits for nobody after `prepare` has been agreed on. Strided boxes are moved by the
copy engines where rows are long enough and a product runs beside them, since they take no
multiprocessor from it; all else by one launch of a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any, ClassVar, NamedTuple

from shardmath.arrays import dtypes
from shardmath.collectives.cells import DeviceCollectives
from shardmath.context.context import Context
from shardmath.cuda.driver import call
from shardmath.geometry import Move
from shardmath.handles.operand import Exposed
from shardmath.local.epilog import MatmulEpilog
from shardmath.local.gpu import Matrix, float8, scaled
from shardmath.local.gpu.blaslt import WORKSPACE
from shardmath.local.gpu.epilog import combine, copy, row_sums
from shardmath.local.gpu.fused_epilog import FusedEpilog, fused_epilog
from shardmath.local.gpu.gemm import has_algorithm, multiply
from shardmath.operators.lanes import Lane
from shardmath.operators.matmul.gpu.copy_engines import EngineCopies, engine_copies
from shardmath.operators.matmul.gpu.lowering import lowered
from shardmath.operators.matmul.gpu.panel_gemm import PanelGemm
from shardmath.operators.matmul.gpu.rank_plan import (
    ALIGNMENT,
    AddressTable,
    Operands,
    Place,
    RankPlan,
    matrix_of,
)
from shardmath.operators.matmul.gpu.steps import (
    AddUp,
    Clear,
    Collective,
    EpilogProduct,
    Fetched,
    Gather,
    Gemm,
    Greatest,
    LayOut,
    Name,
    OneKernel,
    Packed,
    PanelProduct,
    Peer,
    ProductProgram,
    Push,
    View,
)
from shardmath.program.steps import (
    Await,
    Convert,
    Dequantize,
    Fused,
    Memory,
    On,
    Quantize,
    Record,
    SumLines,
    Synchronise,
)
from shardmath.redistribution.box_copies import BoxCopies
from shardmath.redistribution.boxes import Box
from shardmath.redistribution.copies import StridedCopy
from shardmath.redistribution.copies import lowered as lowered_move
from shardmath.redistribution.delivery import fetch
from shardmath.symmetric.heap import Location

# What peers may read, and what they write, in the order in which ranks tell each other.
_PUBLISHED = (
    *("a", "b", "c", "sums", "reduced", "vector", "scales a", "scales b", "amax"),
    *("lines", "line scales"),
)
_MOST_SOURCES = 96  # of one launch


class _Chosen(NamedTuple):
    """A program, the steps of it that this GPU performs, and the memory that these need."""

    program: ProductProgram
    steps: tuple[Any, ...]
    memories: dict[str, Memory]


class Phases:
    """One execution on one rank: `prepare`, tell the peers, `bind`.

    `addition_order` is the order of products that one collective adds up, "" where peers read them.
    """

    def __init__(
        self,
        context: Context,
        rank_plan: RankPlan,
        operands: Operands,
        lane: Lane,
        *,
        addition_order: str = "",
    ) -> None:
        self._context = context
        self._rank_plan = rank_plan
        self._operands = operands
        self._lane = lane
        self._device = lane.team.device
        self._arrays, self._numbers = operands.arrays, operands.values
        self._panel_gemm: PanelGemm | None = None
        lying = operands.lying()
        chosen: _Chosen = rank_plan.programs.made(
            (lying, addition_order),
            lambda: self._chosen(lowered(rank_plan, lying, addition_order)),
        )
        self._program, self._steps, self._memories = chosen
        self._buffers = self._program.buffers
        self._bound: dict[Name, Matrix] = {}
        self._bases: dict[str, int] = {}
        self._peers: list[dict[str, Exposed | None]] = []
        self._stream = 0

    # -- which steps -------------------------------------------------------------------------------

    def _chosen(self, program: ProductProgram) -> _Chosen:
        steps = tuple(self._performed(program, program.steps))
        return _Chosen(program, steps, program.memories_of(steps))

    def _performed(self, program: ProductProgram, steps: Sequence[Any]) -> list[Any]:
        """The steps; one that is fused has become how it is done here, or what it replaces."""
        found: list[Any] = []
        for step in steps:
            if not isinstance(step, Fused):
                found.append(step)
            elif isinstance(step.plan, Collective):
                found.append(step.plan)
            elif isinstance(step.plan, EpilogProduct) and self._does_epilog(program, step.plan):
                found += step.plan.steps
            elif isinstance(step.plan, PanelProduct) and not self._made_panel_gemm().unsupported:
                found.append(step)  # where copy engines do not suit, that is seen later
            else:
                assert isinstance(step.plan, (OneKernel, EpilogProduct, PanelProduct)), step
                found += self._performed(program, step.replaces)
        return found

    def _does_epilog(self, program: ProductProgram, plan: EpilogProduct) -> bool:
        """Whether cuBLASLt has an algorithm for the product with that epilog."""
        (step,) = (step for step in plan.steps if isinstance(step, Gemm))
        x = {name: view.matrix for name, view in program.buffers.items() if isinstance(view, View)}
        found = _fused_epilog(step, x.__getitem__)
        return has_algorithm(
            self._device,
            x[step.left],
            x[step.right],
            x[step.target],
            c=x[step.addend] if step.addend else None,
            conj_a=step.conjugate[0],
            conj_b=step.conjugate[1],
            compute=self._operands.compute,
            extras=found.extras,
        )

    def _made_panel_gemm(self) -> PanelGemm:
        out = matrix_of(self._operands.out)
        return PanelGemm(self._rank_plan, self._operands, self._lane, out)

    # -- prepare -----------------------------------------------------------------------------------

    def prepare(self) -> tuple[bytes, ...]:
        """Take all memory. Local.

        Returns where peers find what they reach. Raises HeapExhausted; nothing has been written.
        """
        lane, panels = self._lane, {}
        if any(isinstance(step, Fused) for step in self._steps):
            self._panel_gemm = self._made_panel_gemm()
            self._panel_gemm.prepare()
            panels = self._panel_gemm.panels
        for name, memory in self._memories.items():
            nbytes = max(memory.nbytes, panels.get(name, 0))
            if memory.shared:
                lane.buffer(name, nbytes)
            else:
                lane.private(name, nbytes)
        lane.private("blas", WORKSPACE)
        self._bases = {name: lane.address(name) for name in self._memories}
        for name, array in self._arrays.items():
            self._bases[name] = array.address - array.address % ALIGNMENT
        published = self._program.published
        return tuple(self._exposed(n).pack() if n in published else b"" for n in _PUBLISHED)

    def _exposed(self, name: str) -> Exposed:
        """Where peers find what this rank has published under a name."""
        buffer, first = self._program.published[name]
        view = self._buffers[buffer]
        assert isinstance(view, View), "in a memory of this rank"
        if view.memory in self._arrays:
            array = self._arrays[view.memory]
            assert array.block is not None, "on the heap"
            self._context.announce(array.block)
            return array.exposed
        x = view.matrix
        steps = x.row_stride * x.itemsize, x.column_stride * x.itemsize
        origin = -sum(start * step for start, step in zip(first, steps, strict=True))
        block = self._lane.buffer(view.memory, 0).block
        return Exposed(block.location, x.size * x.itemsize, origin, steps)

    @staticmethod
    def collectives(context: Context, lane: Lane) -> DeviceCollectives:
        """The collectives of a lane: operations in other lanes never wait for them. Collective,
        when asked for first; raises HeapExhausted on all ranks.

        Large ones take up to half of each multiprocessor, so those of two lanes find room at once;
        of three lanes and more they are to begin in the same order on all ranks (see
        `DeviceCollectives`).
        """
        name = f"sums of lane {lane.number}"
        made: DeviceCollectives = context.cache(name, lambda: DeviceCollectives.separate(context))
        return made

    # -- run ---------------------------------------------------------------------------------------

    def bind(self, places: Sequence[Sequence[Exposed | None]]) -> Callable[[int], None]:
        """A function that puts everything on a stream, after which D and the epilog's outputs are
        there. All ranks' published matrices lie in these `places`.
        """
        peers = [dict(zip(_PUBLISHED, own, strict=True)) for own in places]
        bound: dict[Name, Matrix] = {}

        def run(stream: int) -> None:
            self._peers, self._bound, self._stream = peers, bound, stream
            self._perform(self._steps, stream)

        return run

    def _perform(self, steps: Sequence[Any], stream: int) -> None:
        for step in steps:
            if isinstance(step, On):
                beside = int(self._lane.stream(step.stream))
                self.PERFORMERS[type(step.step)](self, step.step, beside)
            else:
                self.PERFORMERS[type(step)](self, step, stream)

    def _matrix(self, name: Name) -> Matrix:
        """Where a buffer lies."""
        found = self._bound.get(name)
        if found is None:
            buffer = self._buffers[name]
            if isinstance(buffer, View):
                address = self._bases[buffer.memory] + buffer.matrix.address
                found = buffer.matrix._replace(address=address)
            else:
                found = self._peers_matrix(buffer)
            self._bound[name] = found
        return found

    def _peers_matrix(self, peer: Peer) -> Matrix:
        assert peer.box is not None, "moves say what is read"
        address, (row, column) = self._place(peer)
        item = dtypes.of(peer.dtype).itemsize
        whole = Matrix(address, 0, 0, row // item, column // item, peer.dtype)
        return whole.part(*peer.box)

    def _place(self, buffer: View | Peer) -> Place:
        """The address of a buffer's element (0, 0), and its strides in bytes."""
        if isinstance(buffer, View):
            x, item = buffer.matrix, buffer.matrix.itemsize
            strides = x.row_stride * item, x.column_stride * item
            return self._bases[buffer.memory] + x.address, strides
        exposed = self._peers[buffer.rank][buffer.name]
        assert exposed is not None, "published"
        address = self._context.peer_address(buffer.rank, exposed.location, exposed.nbytes)
        assert address is not None, "ranks of one host have an address for each other's memory"
        if buffer.parcel is not None:
            return address + buffer.parcel[0], buffer.parcel[1]
        return address + exposed.origin, exposed.strides

    def _optional(self, name: Name) -> Matrix | None:
        return self._matrix(name) if name else None

    def _bias(self, name: Name) -> tuple[int, int] | None:
        """The address of a bias, and how many elements apart its elements are."""
        return (self._matrix(name).address, self._matrix(name).row_stride) if name else None

    # -- order -------------------------------------------------------------------------------------

    def _synchronise(self, _: Synchronise, stream: int) -> None:
        self._lane.barrier(stream)

    def _record(self, step: Record, stream: int) -> None:
        call("cuEventRecord", self._lane.event(step.event), stream)

    def _await(self, step: Await, stream: int) -> None:
        call("cuStreamWaitEvent", stream, self._lane.event(step.event), 0)

    # -- moves -------------------------------------------------------------------------------------

    def _clear(self, step: Clear, stream: int) -> None:
        x = self._matrix(step.target)
        x = x.transposed() if x.leading is None else x
        if not x.size:
            return
        width = x.rows * x.itemsize
        if x.leading == x.rows:
            call("cuMemsetD8Async", x.address, 0, width * x.columns, stream)
        else:
            pitch = x.column_stride * x.itemsize
            call("cuMemsetD2D8Async", x.address, pitch, 0, width, x.columns, stream)

    def _gather(self, step: Gather, stream: int) -> None:
        target, cache = self._matrix(step.target), self._rank_plan.cache
        strides = target.row_stride * target.itemsize, target.column_stride * target.itemsize
        sources = {src: self._place(self._buffers[name]) for src, name in step.sources}
        is_beside = stream != self._stream
        from_strides = tuple((src, found) for src, (_, found) in sources.items())
        key = (step.name, strides, from_strides, is_beside)
        if key not in cache:
            found = [
                lowered_move(move, target.itemsize, sources[move.src][1], strides)
                for move in sorted(step.moves, key=_ring_order)
            ]
            cache[key] = (engine_copies(found) if is_beside else None) or self._boxes(found)
        made = cache[key]
        if isinstance(made, EngineCopies):
            addresses = [sources.get(rank, (0, ()))[0] for rank in range(max(sources) + 1)]
            made.launch(stream, addresses, target.address)
            return
        for ranks, boxes in made:
            boxes.launch(stream, [sources[rank][0] for rank in ranks], [target.address])

    def _boxes(self, found: Sequence[StridedCopy]) -> list[tuple[list[int], BoxCopies]]:
        """Launches from the memories of these ranks each, since one has room for so many."""
        ranks, launches = list(dict.fromkeys(each.src for each in found)), []
        for start in range(0, len(ranks), _MOST_SOURCES):
            number = {rank: at for at, rank in enumerate(ranks[start : start + _MOST_SOURCES])}
            boxes = [
                Box.of(replace(each, src=number[each.src]), 0)
                for each in found
                if each.src in number
            ]
            launches.append((list(number), BoxCopies(self._device, boxes)))
        return launches

    def _pack(self, step: Packed, stream: int) -> None:
        address, strides = self._place(self._buffers[step.source])
        key, cache = ("packing", step.source, strides), self._rank_plan.cache
        if key not in cache:
            boxes = [Box.of(each, 0) for each in step.outbox.packing(strides)]
            cache[key] = BoxCopies(self._device, boxes)
        cache[key].launch(stream, [address], [self._matrix(step.target).address])

    def _fetch(self, step: Fetched, stream: int) -> None:
        nowhere = Exposed(Location(0, 0), 0, 0, ())
        outboxes = [(exposed[step.name] or nowhere).location for exposed in self._peers]
        room = self._matrix(step.target).address
        fetch(self._context, step.fetches, outboxes, room, stream)

    def _push(self, step: Push, stream: int) -> None:
        source, targets = self._matrix(step.source), map(self._matrix, step.targets)
        addresses = [target.address for target in targets]
        nbytes = source.size * source.itemsize
        self._lane.pushes.push_to_all(source.address, addresses, nbytes, stream)

    def _copy(self, step: Convert, stream: int) -> None:
        copy(self._device, stream, self._matrix(step.target), self._matrix(step.source))

    # -- arithmetic --------------------------------------------------------------------------------

    def _multiply(self, step: Gemm, stream: int) -> None:
        target, operands = self._matrix(step.target), self._operands
        alpha = prod((self._numbers[name] for name in step.alpha), start=1.0 + 0.0j)
        beta = self._numbers[step.beta] if step.beta else complex(bool(step.addend))
        c = self._matrix(step.addend) if step.addend not in ("", step.target) else None
        given: dict[str, Any] = {
            "stream": stream,
            "workspace": self._lane.address("blas"),
            "c": c,
            "processors": self._device.processors - step.spare if step.spare else 0,
            "algorithms": operands.algorithms,
        }
        left, right = self._matrix(step.left), self._matrix(step.right)
        if step.scales is None:
            inside = _fused_epilog(step, self._matrix)
            multiply(
                self._device,
                left,
                right,
                target,
                alpha=alpha,
                beta=beta,
                conj_a=step.conjugate[0],
                conj_b=step.conjugate[1],
                compute=operands.compute,
                extras=inside.extras,
                bias=inside.bias,
                aux=inside.aux,
                **given,
            )
            return
        scales = [
            scaled.Scale(each.mode, self._matrix(each.buffer).address if each.buffer else 0)
            for each in step.scales
        ]
        quantized = None
        if step.quantized is not None:
            words = (self._matrix(name).address if name else 0 for name in step.quantized)
            quantized = scaled.Quantized(*words)
        scaled.multiply(
            self._device,
            left,
            right,
            target,
            scale_a=scales[0],
            scale_b=scales[1],
            alpha=alpha.real,
            beta=beta.real,
            quantized=quantized,
            **given,
        )

    def _add_up(self, step: AddUp, stream: int) -> None:
        combine(
            self._device,
            stream,
            self._matrix(step.target),
            [self._matrix(name) for name in step.parts],
            alpha=self._numbers[step.alpha] if step.alpha else 1.0,
            beta=self._numbers[step.beta] if step.beta else 1.0,
            c=self._optional(step.addend),
            epilog=step.epilog,
            bias=self._bias(step.bias),
            aux=self._optional(step.aux),
            unrounded=self._optional(step.unrounded),
            extra=step.extras,
        )

    def _sum_lines(self, step: SumLines, stream: int) -> None:
        x, sums = self._matrix(step.source), self._matrix(step.target).address
        x = x.transposed() if step.columns else x
        row_sums(self._device, stream, x, sums, conjugate=step.conjugate)

    def _dequantize(self, step: Dequantize, stream: int) -> None:
        scales = self._matrix(step.scale) if step.scale in self._buffers else None
        factor = self._numbers[step.scale].real
        elements, target = self._matrix(step.source), self._matrix(step.target)
        float8.dequantize(
            self._device, stream, target, elements, scales, step.blocks, factor=factor
        )

    def _lay_out(self, step: LayOut, stream: int) -> None:
        target, *others = (self._matrix(name) for name in step.targets)
        float8.dequantize(
            self._device,
            stream,
            target,
            None,
            self._optional(step.source),
            step.blocks,
            factor=self._numbers[step.number].real if step.number else 1.0,
            known_rows=step.known,
            also=others,
        )

    def _quantize(self, step: Quantize, stream: int) -> None:
        float8.quantize(
            self._device,
            stream,
            self._matrix(step.target),
            self._matrix(step.source),
            factor=self._numbers[step.scale].real,
            scale=self._matrix(step.scale).address if step.scale in self._buffers else 0,
            amax=self._matrix(step.largest).address if step.largest else 0,
        )

    def _greatest(self, step: Greatest, stream: int) -> None:
        addresses, target = [self._matrix(name).address for name in step.parts], step.target
        for start in range(0, len(addresses), float8.MOST_RANKS):
            some = addresses[start : start + float8.MOST_RANKS]
            float8.amax(self._device, stream, self._matrix(target).address, some)

    # -- what several steps are done by ------------------------------------------------------------

    def _add_by_collective(self, step: Collective, stream: int) -> None:
        source, target = self._matrix(step.source), self._matrix(step.target)
        dtype, collectives = dtypes.of(source.dtype), self.collectives(self._context, self._lane)
        if not step.counts:
            collectives.all_reduce(
                source.address, target.address, source.size, dtype, "sum", stream
            )
        else:
            collectives.reduce_scatter(
                source.address, target.address, step.counts, dtype, "sum", stream
            )

    def _multiply_panels(self, step: Fused, stream: int) -> None:
        """By the kernel for it; where copy engines do not suit, one interval after the other."""
        assert self._panel_gemm is not None
        if not self._panel_gemm.run(self._places, stream):
            self._perform(step.replaces, stream)

    def _places(self, index: int) -> AddressTable:
        """Where each rank's part of an operand lies."""
        name, rank = "ab"[index], self._rank_plan.rank
        own, dtype = self._buffers[name], self._arrays[name].dtype
        return lambda src: self._place(own if src == rank else Peer(name, src, dtype))

    PERFORMERS: ClassVar[dict[type, Callable[[Phases, Any, int], None]]] = {
        Synchronise: _synchronise,
        Record: _record,
        Await: _await,
        Clear: _clear,
        Gather: _gather,
        Packed: _pack,
        Fetched: _fetch,
        Push: _push,
        Convert: _copy,
        Gemm: _multiply,
        AddUp: _add_up,
        SumLines: _sum_lines,
        Dequantize: _dequantize,
        LayOut: _lay_out,
        Quantize: _quantize,
        Greatest: _greatest,
        Collective: _add_by_collective,
        Fused: _multiply_panels,
    }


def _fused_epilog(step: Gemm, matrix: Callable[[Name], Matrix]) -> FusedEpilog:
    """How a product is told of its epilog."""
    bias = (matrix(step.bias).address, matrix(step.bias).row_stride) if step.bias else None
    aux = matrix(step.aux) if step.aux else None
    if step.epilog is MatmulEpilog.DEFAULT:
        bias = aux = None
    found = fused_epilog(step.epilog, matrix(step.target), bias=bias, aux=aux)
    assert found is not None, "seen when the program was made"
    return found


def _ring_order(move: Move) -> tuple[bool, int]:
    """From the next rank on to this one's own: no two ranks begin with the same."""
    return move.src <= move.dst, move.src
