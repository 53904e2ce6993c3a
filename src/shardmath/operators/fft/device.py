"""Executing a transform on the ranks' GPUs: steps launched on the user's stream.

After the ranks have agreed, no process waits for another: GPUs do, by barriers on the stream. What
takes memory is made while agreeing, so want of it on one rank is an error on all before an element
is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardmath.arrays import library_of
from shardmath.context import DistributedContext
from shardmath.cuda import stream as streams
from shardmath.cuda.constant import beside_captures
from shardmath.cuda.graph import Graph
from shardmath.local.gpu_fft import Transforms
from shardmath.operators.fft.beside import Beside
from shardmath.operators.fft.launching import Launch, Told, is_double
from shardmath.operators.fft.local_steps import (
    Fourier,
    View,
)
from shardmath.operators.fft.problem import Problem
from shardmath.operators.fft.ways import DevicePlan, make_way
from shardmath.operators.workspace import Workspace
from shardmath.symmetric.allocation import block_of
from shardmath.symmetric.device_array import (
    DeviceArray,
    Result,
    new_result,
    read,
    require_device,
    result_in,
    stream_of,
)
from shardmath.symmetric.heap import Block
from shardmath.symmetric.team import Team

__all__ = ["Arrays", "DevicePlan", "execute", "note"]


@dataclass(frozen=True)
class Arrays:
    """One rank's arrays for one execution; `out` is the user's array for the result, if any."""

    operand: Any
    out: Any
    stream: Any


def note(context: DistributedContext, operand: Any, out: Any) -> bytes:
    """For the peers: whether this rank's result will lie in symmetric memory, and whether it will
    be packed there. Local.

    Raises ValueError for an array on another GPU, UseAfterFree.
    """
    for array, name in ((operand, "the operand"), (out, "out")):
        if array is not None:
            require_device(context, library_of(array).spec(array), name)
    given = operand if out is None else out
    library = library_of(given)
    spec = library.spec(given)
    on_host = spec.device == "cpu"  # then it is on the heap meanwhile
    nothing = out is not None and spec.size == 0
    reachable = on_host or nothing or block_of(context, given) is not None
    dense = out is None or on_host or (spec.order != "strided" and library.pointer(out) % 16 == 0)
    order = spec.order if out is not None and not on_host else "both"
    return bytes([reachable, dense]) + order.encode()


def _reach(notes: Sequence[bytes], problem: Problem) -> tuple[bool, bool]:
    """Whether all results are reachable, and packed in the problem's order as well."""
    reachable = all(text[0] for text in notes)
    wanted = (b"both", problem.order.encode())
    return reachable, reachable and all(text[1] and text[2:] in wanted for text in notes)


def execute(
    context: DistributedContext,
    plan: DevicePlan,
    notes: Sequence[bytes],
    arrays: Callable[[], Arrays],
) -> Any:
    """The transform of the operand: the array given for it, or a new one. Collective.

    `notes` are all ranks'. Returns when all is launched, for an operand in host memory when all is
    done. Raises on all ranks what `arrays` raises on one, and HeapExhausted when one lacks memory.
    """
    made: list[_Execution] = []

    def prepare() -> Told:
        with beside_captures():  # memory and plans are no part of what is captured
            made.append(_Execution(context, plan, _reach(notes, plan.problem), arrays()))
            return made[0].prepare()

    told = context.agree("fft, memory", prepare, list)
    with context.executing("fft"):
        return made[0].run(told)


class _Execution:
    """The state of one execution on one rank."""

    def __init__(
        self,
        context: DistributedContext,
        plan: DevicePlan,
        reach: tuple[bool, bool],
        arrays: Arrays,
    ) -> None:
        assert context.team is not None, "a context of GPUs"
        self._context = context
        self._team: Team = context.team
        self._rank = context.rank
        self._plan = plan
        self._problem = plan.problem
        self._reach = reach
        self._arrays = arrays
        self._transforms = Transforms.of(self._team.device)

    # -- memory ------------------------------------------------------------------------------------

    def prepare(self) -> Told:
        """Make all memory and plans; what peers have to know of it."""
        context = self._context
        given = self._arrays.operand
        library = library_of(given)
        self._stream = stream_of(context, library.spec(given), self._arrays.stream)
        self._operand = read(context, given)
        self._result = self._made_result(given)
        result = self._result.array
        operand_view, result_view = _view("operand", self._operand), _view("result", result)
        overlap = self._operand.overlaps(result)
        same = (self._operand.address, self._operand.strides, self._operand.dtype) == (
            result.address,
            result.strides,
            result.dtype,
        )
        device, rank = self._team.device, self._rank
        self._way = self._plan.way(
            (rank, device, *self._reach, operand_view, result_view, overlap, same),
            lambda: make_way(
                self._plan, device, rank, self._reach, operand_view, result_view, overlap, same
            ),
        )
        self._place_all()
        for step in self._way.program.local:
            if isinstance(step, Fourier):
                self._transforms.prepare(
                    step.kind,
                    double=is_double(step),
                    batches=step.batches,
                    stream=self._stream,
                )
        if self._way.tables is not None and not self._way.warm:
            self._warm()
        return self._tell()

    def _warm(self) -> None:
        """Launch once all that runs beside the second stream, with results that nobody reads.

        A kernel that is launched for the first time is loaded first, and that may wait for all that
        runs: it must not happen while a kernel runs that waits for this stream.
        """
        Beside.of(self._context)
        low, high = self._result.array.span
        spare = Workspace.of(self._context).buffer("fft warm", high - low)
        launch = self._launch(self._addresses | {"result": spare.block.address - low})
        for step in self._way.program.local:
            launch.local(self._stream, step)
        if not streams.capturing(self._stream):
            self._team.synchronize(self._stream)
            del spare
            Workspace.of(self._context).drop("fft warm")
        self._way.warm = True

    def _made_result(self, given: Any) -> Result:
        context, problem = self._context, self._problem
        if self._arrays.out is not None:
            return result_in(context, self._arrays.out)
        return new_result(
            context,
            given,
            problem.target.local_shape(self._rank),
            problem.result,
            problem.order,
            on_heap=self._operand.block is not None,
        )

    def _place_all(self) -> None:
        """An address for every place of the program."""
        workspace = Workspace.of(self._context)
        self._blocks: dict[str, Block] = {}
        self._addresses = {
            "operand": self._operand.address,
            "result": self._result.array.address,
        }
        for place, nbytes in self._way.program.places.items():
            block = workspace.buffer(f"fft {place}", nbytes).block
            self._blocks[place] = block
            self._addresses[place] = block.address

    def _tell(self) -> Told:
        """(segment, offset, first byte, bytes, strides) of every shared place."""
        told: list[Any] = []
        for place in self._way.program.shared:
            if place == "result":
                array = self._result.array
                if array.size == 0:
                    told.append((0, 0, 0, 0, array.strides))
                    continue
                assert array.block is not None, "all results are within reach"
                low, high = array.span
                block, start = array.block, array.address - array.block.address + low
                entry = (start, low, high - low, array.strides)
            else:
                block = self._blocks[place]
                entry = (0, 0, block.nbytes, ())
            self._context.announce(block)
            at = block.location
            told.append((at.segment, at.offset + entry[0], *entry[1:]))
        return tuple(told)

    # -- steps -------------------------------------------------------------------------------------

    def run(self, told: Sequence[Told]) -> Any:
        """Launch everything. `told` is what `prepare` returned on every rank.

        What is launched again between the same addresses is one CUDA graph from the second time on.
        """
        team, way, stream = self._team, self._way, self._stream
        team.device.activate()
        team.check()
        launch = self._launch(self._addresses)
        if streams.capturing(stream):
            launch.all(stream, told)
        else:
            key = (stream, tuple(self._addresses.values()))
            replay = way.replay(key, list(told))
            if replay is None:
                launch.all(stream, told)
            elif replay.graph is None:
                replay.graph = Graph(team.device, lambda own: launch.all(own, told))
                replay.graph.launch(stream)
            else:
                replay.graph.launch(stream)
        return self._result.give(self._context, stream)

    def _launch(self, addresses: Mapping[str, int]) -> Launch:
        forward = self._problem.direction < 0
        return Launch(self._context, self._way, addresses, forward, self._stream)


def _view(place: str, array: DeviceArray) -> View:
    return View(place, array.shape, array.strides, array.dtype, array.address % 16)
