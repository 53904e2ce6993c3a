"""Transforms on the ranks' GPUs: what performs their programs there.

Which memory peers reach depends on where all ranks' results lie. Transforms of a context have one
lane, and follow each other on any streams. What takes memory or time before a launch, memory, plans
of cuFFT and the first launch of each kernel, is done while the ranks agree: what fails on one rank
is raised on all, before an element is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from shardmath.context.context import Context
from shardmath.cuda import stream as streams
from shardmath.handles.operand import Operand
from shardmath.local.gpu.fft import CuFFT, scale
from shardmath.operators.fft.local_steps import LocalFFT, LocalStep, Scale
from shardmath.operators.fft.lowering import GPUPlan, Results, UserArrays, lowered
from shardmath.operators.fft.push_stream import PushStream, PushTables
from shardmath.operators.fft.pushes import Signal, Start
from shardmath.operators.lanes import LANES, Lane
from shardmath.operators.workspace import give_back
from shardmath.program.gpu_performing import Execution, Facts, Given, GPUPerformer
from shardmath.program.gpu_steps import GPUProgram, Launch, Memories
from shardmath.program.performing import Plan
from shardmath.program.rank_program import RankProgram, View
from shardmath.program.steps import Fused
from shardmath.symmetric.heap import Buffer

USE_GRAPHS = True  # whether an execution that comes again is replayed as one graph

_DECISIONS = {Results(False, False): 1, Results(True, False): 2, Results(True, True): 3}


class GPUTransforms(GPUPerformer):
    """Performs programs of transforms on GPUs. Workspace is the lane's, not an object's."""

    @property
    def replays(self) -> bool:
        return USE_GRAPHS

    def _lane(self, stream: int, decision: int) -> Lane:
        return Lane.numbered(self._context, LANES - 1)

    def _decide(self, plan: Plan, facts: Sequence[Facts]) -> int:
        wanted = ("b", plan.program.results["out"].order)  # both, where the array has no other
        reachable = all(rank.result for rank in facts)
        packed = all(rank.packed and rank.order in wanted for rank in facts)
        return _DECISIONS[Results(reachable, reachable and packed)]

    def _program(self, execution: Execution, given: Given, decision: int) -> GPUProgram:
        (step,) = execution.plan.program.steps
        assert isinstance(step, Fused), "as the operation makes it"
        plan: GPUPlan = step.plan
        results = next(key for key, number in _DECISIONS.items() if number == decision)
        operand, out = execution.operand, execution.result.array
        sides = [(x.address, x.strides, x.dtype) for x in (operand, out)]
        arrays = UserArrays(
            *(_view("operand", operand), _view("out", out)),
            overlap=operand.overlaps(out),
            in_place=sides[0] == sides[1],
        )
        chunking = plan.chunking

        def make() -> GPUProgram:
            program = lowered(plan, self._context.rank, arrays, results, chunking)
            forward = plan.problem.direction < 0
            return TransformProgram(self._context, execution.lane, program, forward=forward)

        return self._programs.made((execution.plan, arrays, results, chunking), make)

    def release(self) -> None:
        """Give back the workspace, which is that of all operations of the context. Local."""
        give_back(self._context)


class TransformProgram(GPUProgram):
    """The program of a transform: local transforms, and what is pushed beside them."""

    def __init__(
        self, context: Context, lane: Lane, program: RankProgram, *, forward: bool
    ) -> None:
        super().__init__(context, lane, program)
        self.forward = forward
        start = next((step.plan for _, step in self.steps if _starts(step)), None)
        self.tables = None if start is None else PushTables(self.device, start)
        self._streams: set[int] = set()  # for which cuFFT has plans and a work area
        self._warmed_up = False  # whether all kernels beside pushes have been launched before
        self._graph_buffers: list[Buffer] = []  # what the user's graphs write to

    @property
    def check(self) -> Callable[[], None] | None:
        return None if self.tables is None else PushStream.of(self.context).require_usable

    @property
    def local(self) -> list[LocalStep]:
        """The steps that this rank does alone."""
        return [step for _, step in self.steps if isinstance(step, LocalStep)]

    def prepare(self, own: Mapping[str, int], stream: int, span: tuple[int, int]) -> None:
        """See GPUProgram. Raises BackendUnavailable and CudaError where cuFFT has no plan."""
        super().prepare(own, stream, span)
        if stream not in self._streams:
            cufft = CuFFT.of(self.device)
            for step in self.local:
                if isinstance(step, LocalFFT):
                    cufft.prepare(step.kind, double=step.double, plan=step.plan, stream=stream)
            self._streams.add(stream)
        if self.tables is not None and not self._warmed_up:
            self._warm_up(own, stream, span)

    def _warm_up(self, own: Mapping[str, int], stream: int, span: tuple[int, int]) -> None:
        """Launch each local step once, into a result that nobody reads.

        The first launch of a kernel loads it, and loading may wait for all that runs: it must not
        happen while the push stream's kernel runs, which waits for this stream.
        """
        PushStream.of(self.context)
        low, high = span
        spare = self.context.heap.allocate(high - low)
        memories = Memories({**own, "out": spare.block.address - low}, (), stream)
        with self.lane.section(stream):
            for step in self.local:
                launch = self.bound(step, memories)
                if launch is not None:
                    launch(stream)
        if streams.capturing(stream):
            self._graph_buffers.append(spare)  # each replay of the graph will write there
        else:
            self.lane.team.synchronize(stream)
        self._warmed_up = True

    # -- local transforms --------------------------------------------------------------------------

    def _transform(self, step: LocalFFT, memories: Memories) -> Launch:
        source, target = memories.address(step.source), memories.address(step.target)
        cufft, forward, work_area = CuFFT.of(self.device), self.forward, memories.stream

        def launch(stream: int) -> None:
            cufft.run(
                step.kind,
                source,
                target,
                stream,
                double=step.double,
                plan=step.plan,
                forward=forward,
                work_area=work_area,
            )

        return launch

    def _scale(self, step: Scale, memories: Memories) -> Launch:
        one, two = _real(step.source), _real(step.target)
        addresses = memories.address(step.source), memories.address(step.target)

        def launch(stream: int) -> None:
            scale(
                self.device,
                *addresses,
                one.shape,
                (one.strides, two.strides),
                stream,
                dtypes=(one.dtype, two.dtype),
                factor=step.factor,
            )

        return launch

    # -- pushes ------------------------------------------------------------------------------------

    def _start(self, step: Fused, memories: Memories) -> Launch:
        start: Start = step.plan
        tables, pushing = self.tables, PushStream.of(self.context)
        assert tables is not None, "made with the program"
        sources = [memories.own[name] for name in start.sources]
        targets = [
            [self.reached(peer, name, memories)[0] for peer in range(start.size)]
            for name in start.targets
        ]
        return pushing.bind(tables, sources, targets)

    def _signal(self, step: Fused, memories: Memories) -> Launch:
        launch: Launch = getattr(PushStream.of(self.context), step.plan.verb)
        return launch

    PERFORMERS: ClassVar[Mapping[type, Any]] = {
        **GPUProgram.PERFORMERS,
        LocalFFT: _transform,
        Scale: _scale,
        Start: _start,
        Signal: _signal,
    }


def _starts(step: Any) -> bool:
    return isinstance(step, Fused) and isinstance(step.plan, Start)


def _view(memory: str, array: Operand) -> View:
    return View(memory, array.shape, array.strides, array.dtype, array.address % 16)


def _real(view: View) -> View:
    """The real numbers that an array consists of."""
    if not view.dtype.startswith("complex"):
        return view
    size = view.itemsize // 2
    return replace(
        view,
        shape=(*view.shape, 2),
        strides=(*view.strides, size),
        dtype=f"float{8 * size}",
    )
