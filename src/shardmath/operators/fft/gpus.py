"""Performing transforms on GPUs.

All transforms of a context are in one lane, and follow each other on any streams. Memory, plans of
cuFFT and the first launch of each kernel are prepared while the ranks agree, so that a failure on
one rank is raised on all before an element is touched.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from shardmath.context.context import Context
from shardmath.cuda import stream as streams
from shardmath.cuda.allocation import Constant
from shardmath.cuda.device import Device
from shardmath.cuda.driver import call
from shardmath.cuda.kernel import Argument, Kernel
from shardmath.cuda.stream import new_event, new_stream
from shardmath.handles.operand import Operand
from shardmath.local.gpu.fft import CuFFT, scale, turn
from shardmath.operators.fft.local_steps import LocalFFT, LocalStep, Scale, Turn, real_numbers
from shardmath.operators.fft.lowering import GPUPlan, Results, UserArrays, lowered
from shardmath.operators.fft.pushes import Signal, Start, tables
from shardmath.operators.lanes import LANES, Lane
from shardmath.operators.workspace import give_back
from shardmath.program.gpu_performing import Execution, Facts, Given, GPUPerformer
from shardmath.program.gpu_steps import GPUProgram, Launch, Memories
from shardmath.program.performing import Plan
from shardmath.program.rank_program import RankProgram, View
from shardmath.program.steps import Fused
from shardmath.symmetric.heap import Buffer

_SIGNALS, _BARRIER = 59, 58  # channels
_COUNTERS = 16 + 4 * 62  # bytes of struct Counters
_COPY_BYTES, _STAGES, _PREFETCH = 16 << 10, 12, 10
_BLOCKS = 32  # about as many blocks push, the same number to each peer
_FEW_BLOCKS = 16  # for one exchange of 4 or more ranks, where these divide it
_CLUSTER_SIZES = (16, 8)  # see docs/notebook/chunked-exchanges.md


class PushTables:
    """The tables of the kernel that pushes, on a device. Keep it while a launch may use it."""

    def __init__(self, device: Device, start: Start) -> None:
        chunks, rows = tables(start, _COPY_BYTES)
        self.count = len(chunks)
        self.blocks = push_blocks(start.size, two_exchanges=len(start.targets) > 1)
        self.chunks = Constant(device, chunks)
        self.rows = Constant(device, rows)


def push_blocks(size: int, *, two_exchanges: bool) -> int:
    """How many blocks push to so many ranks.

    One exchange hides behind transforms, and more blocks would take multiprocessors from these. The
    second of two exchanges has nothing to hide behind at its end.
    """
    few = not two_exchanges and size >= 4 and _FEW_BLOCKS % size == 0
    return _FEW_BLOCKS if few else max(1, _BLOCKS // size) * size


def cluster_size(blocks: int, holds: Callable[[int, int], bool]) -> int:
    """The largest cluster size for so many blocks that the device can hold, or 1.

    `holds(count, size)` says whether it can hold so many clusters of that size. Exchanges beside
    transforms are faster from blocks of one cluster, which run on neighbouring multiprocessors, and
    probably have their path to memory and to the links for themselves.
    """
    sizes = (size for size in _CLUSTER_SIZES if blocks % size == 0)
    return next((size for size in sizes if holds(blocks // size, size)), 1)


class PushStream:
    """The push stream of one context, and its kernels. Get it with `PushStream.of`.

    On this stream one kernel pushes chunks while the user's stream transforms; it holds a few
    multiprocessors as long as the exchanges last. The streams synchronise by counters in the GPU's
    memory, ranks by signals. All of these count up, and can be replayed in a graph. A wait that
    expires leaves the counters in an unknown state: then the context can do no more transforms.

        user's stream    transform 0, ready | transform 1, ready | wait, transform a | ...
        push stream      barrier |  push 0           | push 1, signal | ...
    """

    def __init__(self, context: Context) -> None:
        self._team = context.gpu_team
        device = self._team.device
        counters = context.heap.allocate(_COUNTERS)
        device.zero(counters.block.address, _COUNTERS)
        context.keep_for_kernels(counters)
        self._counters = counters.block.address
        self.stream = new_stream(self, device, first=True)
        self._fork, self._join = new_event(self), new_event(self)
        # Loaded now: to load one later could wait for a kernel that waits for it.
        for name in ("push", "signal_ready", "wait_for_chunk"):
            self._kernel(name).load()
        self._cluster_sizes: dict[int, int] = {}
        tail = struct.pack("QII", self._counters, _SIGNALS, 0)
        self._argument = Argument(self._team.packed() + tail)

    @classmethod
    def of(cls, context: Context) -> PushStream:
        """The push stream of a context. Local; raises HeapExhausted when it is made."""
        return context.cache("fft push stream", lambda: cls(context))

    def require_usable(self) -> None:
        """Raise the error that kernels have noted, and RankFailure after one was given up."""
        self._team.require_usable()

    def bind(
        self, tables: PushTables, sources: Sequence[int], targets: Sequence[Sequence[int]]
    ) -> Callable[[int], None]:
        """A function that forks the push stream from a stream, and launches the kernel that pushes.

        Exchange i begins at `sources[i]` in this rank's memory, and at `targets[i][rank]` in that
        of each rank. All ranks synchronise first: owners may still use these targets.
        """
        team, kernel = self._team, self._kernel("push")
        cluster = self._cluster_size(tables.blocks)
        one, two = (*targets, [0] * team.size)[:2]
        words = struct.pack(
            f"QQQII{2 + 2 * team.size}Q",
            *(self._counters, tables.chunks.address, tables.rows.address),
            *(tables.count, _SIGNALS, *(*sources, 0)[:2], *one, *two),
        )
        argument = Argument(team.packed() + words)

        def start(stream: int) -> None:
            call("cuEventRecord", self._fork, stream)
            call("cuStreamWaitEvent", self.stream, self._fork, 0)
            team.barrier(int(self.stream), channel=_BARRIER)
            kernel.launch(int(self.stream), tables.blocks, 32, argument, cluster=cluster)

        return start

    def signal_ready(self, stream: int) -> None:
        """Launch: the next chunks can be pushed, after all that is on `stream` so far."""
        self._kernel("signal_ready").launch(stream, 1, 1, self._argument, early=True)

    def wait_for_chunk(self, stream: int) -> None:
        """Launch: `stream` waits until every rank has signalled one more chunk."""
        self._kernel("wait_for_chunk").launch(stream, 1, 32, self._argument, early=True)

    def join(self, stream: int) -> None:
        """Make `stream` wait for the push stream."""
        call("cuEventRecord", self._join, self.stream)
        call("cuStreamWaitEvent", stream, self._join, 0)

    def _cluster_size(self, blocks: int) -> int:
        """The cluster size of so many blocks on this device."""
        if blocks not in self._cluster_sizes:
            holds = self._kernel("push").holds_clusters
            self._cluster_sizes[blocks] = cluster_size(
                blocks, lambda count, size: holds(count, size, 32)
            )
        return self._cluster_sizes[blocks]

    def _kernel(self, name: str) -> Kernel:
        defines = (f"COPY_BYTES={_COPY_BYTES}", f"STAGES={_STAGES}", f"PREFETCH={_PREFETCH}")
        return self._team.kernel("pipeline", name, defines, shared=_COPY_BYTES * _STAGES)


USE_GRAPHS = True  # whether an execution that comes again is replayed as one graph

_DECISIONS = {Results(False, False): 1, Results(True, False): 2, Results(True, True): 3}


class GPUTransforms(GPUPerformer):
    """Performs programs of transforms on GPUs. Workspace belongs to the lane, also for objects."""

    @property
    def replays(self) -> bool:
        return USE_GRAPHS

    def _lane(self, stream: int, decision: int) -> Lane:
        return Lane.numbered(self._context, LANES - 1)

    def _decide(self, plan: Plan, facts: Sequence[Facts]) -> int:
        wanted = ("b", plan.program.results["out"].order)  # "b" for arrays in both orders at once
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
        """Give back the workspace of all operations of the context. Local."""
        give_back(self._context)


class TransformProgram(GPUProgram):
    """The program of a transform: local transforms, and pushes beside them."""

    def __init__(
        self, context: Context, lane: Lane, program: RankProgram, *, forward: bool
    ) -> None:
        super().__init__(context, lane, program)
        self.forward = forward
        start = next((step.plan for _, step in self.steps if _starts(step)), None)
        self.tables = None if start is None else PushTables(self.device, start)
        self._factors: dict[Turn, Constant] = {}
        self._streams: set[int] = set()  # for which cuFFT has plans and a work area
        self._warmed_up = False  # whether all kernels beside pushes have been launched before
        self._graph_buffers: list[Buffer] = []  # what the user's graphs write to

    @property
    def check(self) -> Callable[[], None] | None:
        return None if self.tables is None else PushStream.of(self.context).require_usable

    @property
    def local(self) -> list[LocalStep]:
        """The steps of this rank alone."""
        return [step for _, step in self.steps if isinstance(step, LocalStep)]

    def prepare(self, own: Mapping[str, int], stream: int, span: tuple[int, int]) -> None:
        """See GPUProgram. Raises BackendUnavailable and CudaError where cuFFT has no plan."""
        super().prepare(own, stream, span)
        if stream not in self._streams:
            cufft = CuFFT.of(self.device)
            for step in self.local:
                if isinstance(step, LocalFFT):
                    cufft.prepare(step.kind, double=step.double, plan=step.plan, stream=stream)
                elif isinstance(step, Turn) and step not in self._factors:
                    self._factors[step] = Constant(self.device, step.factors)
            self._streams.add(stream)
        if self.tables is not None and not self._warmed_up:
            self._warm_up(own, stream, span)

    def _warm_up(self, own: Mapping[str, int], stream: int, span: tuple[int, int]) -> None:
        """Launch each local step once, into a result that nobody reads.

        The first launch of a kernel loads it, and loading may wait for all running kernels. It must
        not happen while the push stream's kernel runs, which waits for this stream.
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
        ends, cufft = self._ends(step, memories), CuFFT.of(self.device)
        named: dict[str, Any] = {"plan": step.plan, "double": step.double, "forward": self.forward}
        named["work_area"] = memories.stream
        return lambda stream: cufft.run(step.kind, *ends, stream, **named)

    def _scale(self, step: Scale, memories: Memories) -> Launch:
        one, two = real_numbers(step.source), real_numbers(step.target)
        given = *self._ends(step, memories), one.shape, (one.strides, two.strides)
        named: dict[str, Any] = {"dtypes": (one.dtype, two.dtype), "factor": step.factor}
        return lambda stream: scale(self.device, *given, stream, **named)

    def _turn(self, step: Turn, memories: Memories) -> Launch:
        source, target = step.source, step.target
        given = *self._ends(step, memories), target.shape, (source.strides, target.strides)
        named: dict[str, Any] = {"axis": step.axis, "dtypes": (source.dtype, target.dtype)}
        named |= {"length": step.factors.size, "factors": self._factors[step].address}
        return lambda stream: turn(self.device, *given, stream, **named)

    def _ends(self, step: LocalFFT | Scale | Turn, memories: Memories) -> tuple[int, int]:
        """The addresses of a step's source and target."""
        return memories.address(step.source), memories.address(step.target)

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
        Turn: _turn,
        Start: _start,
        Signal: _signal,
    }


def _starts(step: Any) -> bool:
    return isinstance(step, Fused) and isinstance(step.plan, Start)


def _view(memory: str, array: Operand) -> View:
    return View(memory, array.shape, array.strides, array.dtype, array.address % 16)
