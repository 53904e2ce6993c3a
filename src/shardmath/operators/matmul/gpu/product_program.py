"""The program of a product on one rank's GPU: binding the steps that only products have.

Fused steps are done at once, by an algorithm of cuBLASLt, a kernel or a collective, where the GPU
and the arrays allow it. Elsewhere the steps that they replace are performed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, ClassVar

from shardmath.arrays import dtypes
from shardmath.collectives.cells import DeviceCollectives
from shardmath.context.context import Context
from shardmath.cuda.driver import call
from shardmath.local.epilog import MatmulEpilog
from shardmath.local.gpu import Matrix, float8, scaled
from shardmath.local.gpu.blaslt import WORKSPACE
from shardmath.local.gpu.epilog import combine, copy, row_sums
from shardmath.local.gpu.fused_epilog import FusedEpilog, fused_epilog
from shardmath.local.gpu.gemm import has_algorithm, multiply
from shardmath.operators.lanes import Lane
from shardmath.operators.matmul.gpu.copy_engines import engine_copies
from shardmath.operators.matmul.gpu.panel_gemm import PanelGemm
from shardmath.operators.matmul.gpu.rank_plan import ALIGNMENT, RankPlan
from shardmath.operators.matmul.gpu.steps import (
    AddUp,
    ByEngines,
    Clear,
    Collective,
    EpilogProduct,
    Gemm,
    Greatest,
    LayOut,
    Name,
    OneKernel,
    PanelProduct,
    Push,
)
from shardmath.program.gpu_steps import GPUProgram, Launch, Memories, with_streams
from shardmath.program.rank_program import Peer, RankProgram
from shardmath.program.steps import (
    Convert,
    Dequantize,
    Fused,
    Memory,
    Quantize,
    SumLines,
    buffers_of,
)

# Compute types of cuBLASLt that sum faster or slower than the default.
_FAST_COMPUTE = frozenset({74, 75, 77, 78, 79})


class ProductProgram(GPUProgram):
    """One rank's program of a product, as its GPU can do it."""

    alignment = ALIGNMENT

    def __init__(
        self, context: Context, lane: Lane, program: RankProgram, rank_plan: RankPlan
    ) -> None:
        self._rank_plan = rank_plan
        compute = rank_plan.strategy.problem.compute
        self._compute = compute if compute in _FAST_COMPUTE else None
        self._device = lane.team.device
        a, b, d = (program.arrays[name].matrix for name in "abd")
        self._panel_gemm = PanelGemm(rank_plan, a, b, d, lane)
        super().__init__(context, lane, program)
        self._memories = memories_of(program, [step for _, step in self.steps])
        if any(isinstance(step, Fused) and isinstance(step.plan, PanelProduct)
               for _, step in self.steps):  # fmt: skip
            for name, memory in self._panel_gemm.memories.items():
                nbytes, shared = self._memories.get(name, memory)
                self._memories[name] = Memory(max(nbytes, memory.nbytes), shared)
        self._memories["blas"] = Memory(WORKSPACE)

    @property
    def memories(self) -> Mapping[str, Memory]:
        """The memories of the lane that the performed steps need."""
        return self._memories

    def performed(self, steps: Sequence[Any]) -> list[Any]:
        chosen: list[Any] = []
        for step in steps:
            plan = step.plan if isinstance(step, Fused) else None
            if isinstance(plan, EpilogProduct) and self._does_epilog(plan):
                chosen += plan.steps
            elif isinstance(plan, OneKernel | EpilogProduct) or (
                isinstance(plan, PanelProduct) and self._panel_gemm.unsupported
            ):
                chosen += self.performed(step.replaces)
            else:
                chosen.append(step)
        return chosen

    def _does_epilog(self, plan: EpilogProduct) -> bool:
        """Whether cuBLASLt has an algorithm for a product with its epilog."""
        (step,) = (step for step in plan.steps if isinstance(step, Gemm))
        x = {name: view.matrix for name, view in self.program.arrays.items()}
        return has_algorithm(
            self._device,
            x[step.left],
            x[step.right],
            x[step.target],
            c=x.get(step.addend),
            conj_a=step.conjugate[0],
            conj_b=step.conjugate[1],
            compute=self._compute,
            extras=_fused_epilog(step, x.__getitem__).extras,
        )

    # -- where things lie --------------------------------------------------------------------------

    def _matrix(self, name: Name, memories: Memories) -> Matrix:
        """A matrix of this rank, or of a peer."""
        peer = self.program.peers.get(name)
        if peer is None:
            view = self.program.arrays[name]
            return view.matrix._replace(address=memories.own[view.memory] + view.offset)
        address, (one, two) = self.peers_view(peer, memories)
        (top, bottom), (left, right) = peer.box
        item = dtypes.of(peer.dtype).itemsize
        shape = bottom - top, right - left
        return Matrix(address, *shape, one // item, two // item, peer.dtype)

    def _optional(self, name: Name, memories: Memories) -> Matrix | None:
        return self._matrix(name, memories) if name else None

    def _address(self, name: Name, memories: Memories) -> int:
        """The address of a matrix; 0 if there is none."""
        return self._matrix(name, memories).address if name else 0

    def _given(self, name: Name, memories: Memories) -> Matrix | None:
        """The array of that name, None where there is a number instead."""
        return self._matrix(name, memories) if name in self.program.arrays else None

    # -- moves -------------------------------------------------------------------------------------

    def _clear(self, step: Clear, memories: Memories) -> Launch | None:
        x = self._matrix(step.target, memories)
        x = x.transposed() if x.leading is None else x
        if not x.size:
            return None
        width = x.rows * x.itemsize
        if x.leading == x.rows:
            nbytes = width * x.columns
            return lambda stream: call("cuMemsetD8Async", x.address, 0, nbytes, stream)
        pitch = x.column_stride * x.itemsize
        given = x.address, pitch, 0, width, x.columns
        return lambda stream: call("cuMemsetD2D8Async", *given, stream)

    def _by_engines(self, step: Fused, memories: Memories) -> Launch | None:
        (move,) = step.replaces
        ends = self.ends(move, memories)
        copies = engine_copies(self.boxes(move, ends))
        if copies is None:
            return self.bound(move, memories)
        (target,) = ends.targets
        return lambda stream: copies.launch(stream, ends.sources, target)

    def _push(self, step: Push, memories: Memories) -> Launch:
        source = self._matrix(step.source, memories)
        addresses = [self._address(name, memories) for name in step.targets]
        nbytes, pushes = source.size * source.itemsize, self.lane.pushes
        return partial(pushes.push_to_all, source.address, addresses, nbytes)

    def _copy(self, step: Convert, memories: Memories) -> Launch:
        ends = self._matrix(step.target, memories), self._matrix(step.source, memories)
        return lambda stream: copy(self._device, stream, *ends)

    # -- arithmetic --------------------------------------------------------------------------------

    def _multiply(self, step: Gemm, memories: Memories) -> Launch:
        numbers = memories.numbers
        alpha = prod((numbers[name] for name in step.alpha), start=1.0 + 0.0j)
        beta = numbers[step.beta] if step.beta else complex(bool(step.addend))
        factors = [self._matrix(name, memories) for name in (step.left, step.right, step.target)]
        named: dict[str, Any] = {
            "workspace": memories.own["blas"],
            "c": self._optional(step.addend if step.addend != step.target else "", memories),
            "processors": self._device.processors - step.spare if step.spare else 0,
            "algorithms": self._rank_plan.algorithms,
        }
        if step.scales is None:
            inside = _fused_epilog(step, lambda name: self._matrix(name, memories))
            named |= {
                "alpha": alpha,
                "beta": beta,
                "conj_a": step.conjugate[0],
                "conj_b": step.conjugate[1],
                "compute": self._compute,
                "extras": inside.extras,
                "bias": inside.bias,
                "aux": inside.aux,
            }
            return lambda stream: multiply(self._device, *factors, stream=stream, **named)
        named |= {"alpha": alpha.real, "beta": beta.real}
        for name, scale in zip(("scale_a", "scale_b"), step.scales, strict=True):
            named[name] = scaled.Scale(scale.mode, self._address(scale.buffer, memories))
        if step.quantized is not None:
            words = (self._address(name, memories) for name in step.quantized)
            named["quantized"] = scaled.Quantized(*words)
        return lambda stream: scaled.multiply(self._device, *factors, stream=stream, **named)

    def _add_up(self, step: AddUp, memories: Memories) -> Launch:
        target, bias = self._matrix(step.target, memories), self._optional(step.bias, memories)
        parts = [self._matrix(name, memories) for name in step.parts]
        named: dict[str, Any] = {
            "alpha": memories.numbers[step.alpha] if step.alpha else 1.0,
            "beta": memories.numbers[step.beta] if step.beta else 1.0,
            "c": self._optional(step.addend, memories),
            "epilog": step.epilog,
            "bias": None if bias is None else (bias.address, bias.row_stride),
            "aux": self._optional(step.aux, memories),
            "unrounded": self._optional(step.unrounded, memories),
            "extra": step.extras,
        }
        return lambda stream: combine(self._device, stream, target, parts, **named)

    def _sum_lines(self, step: SumLines, memories: Memories) -> Launch:
        x, sums = self._matrix(step.source, memories), self._address(step.target, memories)
        x = x.transposed() if step.columns else x
        return lambda stream: row_sums(self._device, stream, x, sums, conjugate=step.conjugate)

    def _dequantize(self, step: Dequantize, memories: Memories) -> Launch:
        scales, factor = self._given(step.scale, memories), memories.numbers[step.scale].real
        ends = self._matrix(step.target, memories), self._matrix(step.source, memories)
        return lambda stream: float8.dequantize(
            self._device, stream, *ends, scales, step.blocks, factor=factor
        )

    def _lay_out(self, step: LayOut, memories: Memories) -> Launch:
        target, *others = (self._matrix(name, memories) for name in step.targets)
        scales = self._optional(step.source, memories)
        named: dict[str, Any] = {
            "factor": memories.numbers[step.number].real if step.number else 1.0,
            "known_rows": step.known,
            "also": others,
        }
        return lambda stream: float8.dequantize(
            self._device, stream, target, None, scales, step.blocks, **named
        )

    def _quantize(self, step: Quantize, memories: Memories) -> Launch:
        ends = self._matrix(step.target, memories), self._matrix(step.source, memories)
        scale = self._given(step.scale, memories)
        named: dict[str, Any] = {
            "factor": memories.numbers[step.scale].real,
            "scale": 0 if scale is None else scale.address,
            "amax": self._address(step.largest, memories),
        }
        return lambda stream: float8.quantize(self._device, stream, *ends, **named)

    def _greatest(self, step: Greatest, memories: Memories) -> Launch:
        addresses = [self._address(name, memories) for name in step.parts]
        target = self._address(step.target, memories)

        def run(stream: int) -> None:
            for start in range(0, len(addresses), float8.MOST_RANKS):
                some = addresses[start : start + float8.MOST_RANKS]
                float8.amax(self._device, stream, target, some)

        return run

    # -- fused steps -------------------------------------------------------------------------------

    def _add_by_collective(self, step: Fused, memories: Memories) -> Launch:
        plan: Collective = step.plan
        source, target = (self._matrix(name, memories) for name in (plan.source, plan.target))
        ends, dtype = (source.address, target.address), dtypes.of(source.dtype)
        collectives = collectives_of(self.context, self.lane)

        def run(stream: int) -> None:
            if plan.counts:
                collectives.reduce_scatter(*ends, plan.counts, dtype, "sum", stream)
            else:
                collectives.all_reduce(*ends, source.size, dtype, "sum", stream)

        return run

    def _multiply_panels(self, step: Fused, memories: Memories) -> Launch:
        """Multiply by `PanelGemm`, or by intervals where copy engines cannot bring panels."""
        a, b, d = (self._matrix(name, memories) for name in "abd")
        panel_gemm = PanelGemm(self._rank_plan, a, b, d, self.lane)
        places = [
            {src: self._place(name, src, memories) for src in {move.src for move in plan.moves}}
            for name, plan in zip("ab", self._rank_plan.operand_plans, strict=True)
        ]

        def run(stream: int) -> None:
            if not panel_gemm.run(places, stream):
                self.sequence(with_streams(step.replaces), memories)(stream)

        return run

    def _place(self, name: Name, src: int, memories: Memories) -> tuple[int, tuple[int, ...]]:
        """The address of a rank's part of op(A) or op(B), and its strides in bytes."""
        own = self._matrix(name, memories)
        if src != self.rank:
            return self.peers_view(Peer(name, src, own.dtype, ((0, 0), (0, 0))), memories)
        return own.address, (own.row_stride * own.itemsize, own.column_stride * own.itemsize)

    PERFORMERS: ClassVar[Mapping[type, Any]] = {
        **GPUProgram.PERFORMERS,
        Clear: _clear,
        ByEngines: _by_engines,
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
        PanelProduct: _multiply_panels,
    }


def memories_of(program: RankProgram, steps: Sequence[Any]) -> dict[str, Memory]:
    """The memories of the lane that these steps use, or that peers reach."""
    names = buffers_of(tuple(steps))
    names = {program.arrays[name].memory if name in program.arrays else name for name in names}
    names |= {view.memory for view in program.told.values() if view is not None}
    return {name: memory for name, memory in program.memories.items() if name in names}


def collectives_of(context: Context, lane: Lane) -> DeviceCollectives:
    """The collectives of a lane: operations in other lanes never wait for them. Collective when
    first asked for; raises HeapExhausted on all ranks.

    A large one takes up to half of each multiprocessor, so that two lanes' run at once. Those of
    three and more lanes have to begin in the same order on all ranks: see `DeviceCollectives`.
    """
    name = f"sums of lane {lane.number}"
    return context.cache(name, lambda: DeviceCollectives.separate(context))


def _fused_epilog(step: Gemm, matrix: Callable[[Name], Matrix]) -> FusedEpilog:
    """The epilog of a product, for cuBLASLt."""
    bias = (matrix(step.bias).address, matrix(step.bias).row_stride) if step.bias else None
    aux = matrix(step.aux) if step.aux else None
    if step.epilog is MatmulEpilog.DEFAULT:
        bias = aux = None
    inside = fused_epilog(step.epilog, matrix(step.target), bias=bias, aux=aux)
    assert inside is not None, "seen when the program was made"
    return inside
