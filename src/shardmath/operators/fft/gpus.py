"""Transforms on the ranks' GPUs: what performs their programs there, in stages or in chunks.

Which buffers peers reach depends on where all ranks' results lie. Transforms of a context have one
lane, and follow each other on any streams. What takes memory or time before a launch, buffers,
plans of cuFFT and the first launch of each kernel, is done while the ranks agree: what fails on one
rank is raised on all, before an element is touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardmath.context.context import Context
from shardmath.cuda import stream as streams
from shardmath.cuda.driver import beside_captures
from shardmath.handles.device_array import Result
from shardmath.handles.operand import Exposed, Operand
from shardmath.local.gpu.fft import CuFFT
from shardmath.operators.fft import rank_plan
from shardmath.operators.fft.launching import Launch, is_double
from shardmath.operators.fft.local_steps import LocalFFT, View
from shardmath.operators.fft.program import UserArrays
from shardmath.operators.fft.push_stream import PushStream
from shardmath.operators.fft.rank_plan import DevicePlan, RankPlan, Results
from shardmath.operators.lanes import LANES, Lane
from shardmath.operators.workspace import give_back
from shardmath.program import gpu_performing
from shardmath.program.gpu_performing import Execution, ExposedArrays, Facts, GPUPerformer, Ready
from shardmath.program.performing import Plan
from shardmath.program.steps import Fused
from shardmath.symmetric.heap import Location

__all__ = ["GPUTransforms"]

_DECISIONS = {Results(False, False): 1, Results(True, False): 2, Results(True, True): 3}


class GPUTransforms(GPUPerformer):
    """Performs programs of transforms on GPUs. Workspace is the lane's, not an object's."""

    @property
    def replays(self) -> bool:
        """See GPUPerformer."""
        return rank_plan.USE_GRAPHS

    @property
    def _lane(self) -> Lane:
        return Lane.numbered(self._context, LANES - 1)

    def _decide(self, plan: Plan, facts: Sequence[Facts]) -> int:
        wanted = ("b", plan.program.results["out"].order)  # both, where the array has no other
        reachable = all(each.result for each in facts)
        packed = all(each.packed and each.order in wanted for each in facts)
        return _DECISIONS[Results(reachable, reachable and packed)]

    def _ready(self, execution: Execution, decision: int, *, allocate: bool) -> Ready | None:
        (step,) = execution.plan.program.steps
        assert isinstance(step, Fused), "as the operation makes it"
        plan: DevicePlan = step.plan
        results = next(each for each, number in _DECISIONS.items() if number == decision)
        _, stream, operand, result = execution
        context, lane = self._context, self._lane
        with beside_captures():  # memory and plans are no part of what is captured
            launch = _prepared(context, lane, stream, plan, operand, result, results)
            places = tuple(
                _exposed(launch, buffer, result.array).pack()
                for buffer in launch.plan.program.shared
            )

        def bind(all_places: Sequence[ExposedArrays]) -> gpu_performing.Launch:
            exposed = [[each for each in places if each is not None] for places in all_places]
            lane.team.device.activate()

            def run(stream: int) -> None:
                launch.run(stream, exposed)

            return run

        pushes = launch.plan.tables is not None
        return Ready(places, bind, PushStream.of(context).require_usable if pushes else None)

    def release(self) -> None:
        """Give back the workspace, which is that of all operations of the context. Local."""
        give_back(self._context)


def _prepared(
    context: Context,
    lane: Lane,
    stream: int,
    plan: DevicePlan,
    operand: Operand,
    result: Result,
    results: Results,
) -> Launch:
    """An execution of `plan` with these arrays, on `stream`. Local.

    Raises HeapExhausted, and BackendUnavailable or CudaError where cuFFT has no plan.
    """
    device, array = lane.team.device, result.array
    overlap = operand.overlaps(array)
    in_place = (operand.address, operand.strides, operand.dtype) == (
        array.address,
        array.strides,
        array.dtype,
    )
    arrays = UserArrays(_view("operand", operand), _view("result", array), overlap, in_place)
    own = plan.rank_plan(device, context.rank, arrays, results)
    addresses = {"operand": operand.address, "result": array.address}
    addresses |= _buffers(lane, own)
    forward = plan.problem.direction < 0
    launch = Launch(context, own, addresses, lane, forward, stream)
    if stream not in own.streams:
        _plan_transforms(own, stream)
    if own.tables is not None and not own.warmed_up:
        _warm_up(launch, stream, array.span)
    return launch


def _exposed(launch: Launch, buffer: str, result: Operand) -> Exposed:
    """Where peers find a buffer that is shared."""
    if buffer != "result":
        block = launch.lane.buffer(f"fft {buffer}", 0).block
        return Exposed(block.location, block.nbytes, 0, ())
    if result.size == 0:
        return Exposed(Location(0, 0), 0, 0, result.strides)
    assert result.block is not None, "peers reach all results"
    launch.context.announce(result.block)
    return result.exposed


def _view(buffer: str, array: Operand) -> View:
    return View(buffer, array.shape, array.strides, array.dtype, array.address % 16)


def _buffers(lane: Lane, plan: RankPlan) -> dict[str, int]:
    """The addresses of the buffers of a plan, in the lane's workspace."""
    found: dict[str, int] = {}
    for buffer, nbytes in plan.program.buffers.items():
        name = f"fft {buffer}"
        if buffer in plan.program.on_heap:
            found[buffer] = lane.buffer(name, nbytes).block.address
        else:
            found[buffer] = lane.private(name, nbytes)
    return found


def _plan_transforms(plan: RankPlan, stream: int) -> None:
    """Make cuFFT's plans, and their work area for this stream."""
    cufft = CuFFT.of(plan.device)
    for step in plan.program.local:
        if isinstance(step, LocalFFT):
            cufft.prepare(step.kind, double=is_double(step), plan=step.plan, stream=stream)
    plan.streams.add(stream)


def _warm_up(launch: Launch, stream: int, span: tuple[int, int]) -> None:
    """Launch each local step once, into a result that nobody reads, of that `span`.

    The first launch of a kernel loads it, and loading may wait for all that runs: it must not
    happen while the push stream's kernel runs, which waits for this stream.
    """
    context, lane, plan = launch.context, launch.lane, launch.plan
    PushStream.of(context)
    low, high = span
    spare = context.heap.allocate(high - low)
    trial = replace(launch, addresses={**launch.addresses, "result": spare.block.address - low})
    with lane.section(stream):
        for step in plan.program.local:
            trial.local(stream, step)
    if streams.capturing(stream):
        plan.graph_buffers.append(spare)  # each replay of the graph will write there
    else:
        lane.team.synchronize(stream)
    plan.warmed_up = True
