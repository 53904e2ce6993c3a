"""What takes memory or time before an execution is launched on a GPU: buffers, plans of cuFFT, and
the first launch of each kernel.

All of it is done while the ranks agree: what fails on one rank is raised on all, before an element
is touched.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardmath.context.context import Context
from shardmath.cuda import stream as streams
from shardmath.handles.device_array import Result
from shardmath.handles.exposed import Exposed
from shardmath.handles.operand import Operand
from shardmath.local.gpu.fft import CuFFT
from shardmath.operators.fft.launching import Launch, is_double
from shardmath.operators.fft.local_steps import LocalFFT, View
from shardmath.operators.fft.program import UserArrays
from shardmath.operators.fft.push_stream import PushStream
from shardmath.operators.fft.rank_plan import DevicePlan, RankPlan, Results
from shardmath.operators.lanes import Lane
from shardmath.symmetric.heap import Location

__all__ = ["Prepared", "prepare"]


@dataclass(frozen=True)
class Prepared:
    """One execution that is ready for its launch. Holds its arrays."""

    launch: Launch
    operand: Operand
    result: Result

    def exposed(self) -> tuple[bytes, ...]:
        """Where each shared buffer lies, packed for the peers."""
        return tuple(self._exposed(buffer).pack() for buffer in self.launch.plan.program.shared)

    def _exposed(self, buffer: str) -> Exposed:
        if buffer != "result":
            block = self.launch.lane.buffer(f"fft {buffer}", 0).block
            return Exposed(block.location, block.nbytes, 0, ())
        array = self.result.array
        if array.size == 0:
            return Exposed(Location(0, 0), 0, 0, array.strides)
        assert array.block is not None, "peers reach all results"
        self.launch.context.announce(array.block)
        return array.exposed


def prepare(
    context: Context,
    lane: Lane,
    stream: int,
    plan: DevicePlan,
    operand: Operand,
    result: Result,
    results: Results,
) -> Prepared:
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
    rank_plan = plan.rank_plan(device, context.rank, arrays, results)
    addresses = {"operand": operand.address, "result": array.address}
    addresses |= _buffers(lane, rank_plan)
    forward = plan.problem.direction < 0
    launch = Launch(context, rank_plan, addresses, lane, forward, stream)
    if stream not in rank_plan.streams:
        _plan_transforms(rank_plan, stream)
    if rank_plan.tables is not None and not rank_plan.warmed_up:
        _warm_up(launch, stream, array.span)
    return Prepared(launch, operand, result)


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
