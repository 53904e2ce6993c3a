"""Executing a transform on the ranks' GPUs: steps launched on the user's stream.

After the ranks have agreed, no process waits for another: GPUs do, by barriers on the stream. What
takes memory is made while agreeing, so want of it on one rank is an error on all before an element
is touched.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardmath.arrays import library_of
from shardmath.context import DistributedContext
from shardmath.cuda import stream as streams
from shardmath.cuda.constant import beside_captures
from shardmath.cuda.graph import Graph
from shardmath.local.gpu_fft import Transforms
from shardmath.operators.fft import ways
from shardmath.operators.fft.again import Known, Memory, key_of
from shardmath.operators.fft.beside import Beside
from shardmath.operators.fft.launching import Launch, Told, is_double
from shardmath.operators.fft.local_steps import (
    Fourier,
    View,
)
from shardmath.operators.fft.problem import Problem, kind_in
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

if TYPE_CHECKING:
    from shardmath.operators.fft.call import Call

__all__ = ["DevicePlan", "execute", "key_of", "note"]


_NOTE = struct.Struct("<I??")


def note(context: DistributedContext, call: Call) -> bytes:
    """For the peers: the number of the execution that this call is like, whether its result will
    lie in symmetric memory, and whether it will be packed there. Local.

    Raises ValueError for an array on another GPU, UseAfterFree.
    """
    known = Memory.of(context).find(call.key)
    if known is not None:
        return (
            _NOTE.pack(known.number, *_NOTE.unpack_from(known.said)[1:]) + known.said[_NOTE.size :]
        )
    inplace, operand, out, spec = call.read_options.inplace, call.operand, call.out, call.spec
    require_device(context, spec, "the operand")
    on_heap = block_of(context, operand) is not None  # or raises UseAfterFree
    on_host = spec.device == "cpu"  # then it is on the heap meanwhile
    if out is not None:
        spec = library_of(out).spec(out)
        require_device(context, spec, "out")
        on_heap = spec.size == 0 or block_of(context, out) is not None
    dense, order = True, "both"
    if inplace and kind_in(call.description) != "C2C":
        dense = False  # it is another array, in the same memory
    elif (inplace or out is not None) and not on_host:
        given = operand if out is None else out
        dense = spec.order != "strided" and library_of(given).pointer(given) % 16 == 0
        order = spec.order
    return _NOTE.pack(0, on_host or on_heap, dense) + order.encode()


def _reach(notes: Sequence[bytes], problem: Problem) -> tuple[bool, bool]:
    """Whether all results are reachable, and packed in the problem's order as well."""
    flags = [_NOTE.unpack_from(text) for text in notes]
    reachable = all(flag[1] for flag in flags)
    wanted = (b"both", problem.order.encode())
    orders = [text[_NOTE.size :] for text in notes]
    dense = all(flag[2] for flag in flags) and all(order in wanted for order in orders)
    return reachable, reachable and dense


def execute(
    context: DistributedContext,
    plan: DevicePlan,
    notes: Sequence[bytes],
    call: Call,
) -> Any:
    """The transform of the operand: the array given for it, or a new one. Collective.

    `notes` are all ranks'. Returns when all is launched, for an operand in host memory when all is
    done. Raises on all ranks HeapExhausted when one lacks memory, ValueError for an `out` that
    cannot be written to, RuntimeError where an operand in place is too small for the result.
    """
    numbers = {_NOTE.unpack_from(text)[0] for text in notes}
    if len(numbers) == 1 and 0 not in numbers:
        with context.executing("fft"):
            return _again(context, call, plan.problem)
    made: list[_Execution] = []
    number = Memory.of(context).next()

    def prepare() -> Told:
        with beside_captures():  # memory and plans are no part of what is captured
            made.append(_Execution(context, plan, _reach(notes, plan.problem), call))
            return made[0].prepare()

    told = context.agree("fft, memory", prepare, list)
    with context.executing("fft"):
        return made[0].run(told, number)


def _again(context: DistributedContext, call: Call, problem: Problem) -> Any:
    """Launch what all ranks launched before, in the execution of one number."""
    known, team = Memory.of(context).find(call.key), context.team
    assert known is not None and team is not None, "found for the note"
    team.check()
    if known.way.tables is not None:
        Beside.of(context).require_usable()
    *_, stream = call.key
    known.graph.launch(stream)
    return call.target(context, problem)


class _Execution:
    """The state of one execution on one rank."""

    def __init__(
        self,
        context: DistributedContext,
        plan: DevicePlan,
        reach: tuple[bool, bool],
        call: Call,
    ) -> None:
        assert context.team is not None, "a context of GPUs"
        self._context = context
        self._team: Team = context.team
        self._rank = context.rank
        self._plan = plan
        self._problem = plan.problem
        self._reach = reach
        self._call = call

    # -- memory ------------------------------------------------------------------------------------

    def prepare(self) -> Told:
        """Make all memory and plans; what peers have to know of it."""
        context = self._context
        given = self._call.operand
        library = library_of(given)
        self._stream = stream_of(context, library.spec(given), self._call.stream)
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
            (rank, device, self._plan.cuts, *self._reach, operand_view, result_view, overlap, same),
            lambda: make_way(
                self._plan, device, rank, self._reach, operand_view, result_view, overlap, same
            ),
        )
        self._place_all()
        if self._stream not in self._way.streams:
            self._prepare_transforms()
        if self._way.tables is not None and not self._way.warm:
            self._warm()
        return self._tell()

    def _prepare_transforms(self) -> None:
        """Make cuFFT's plans, and their work area for this stream."""
        transforms = Transforms.of(self._team.device)
        for step in self._way.program.local:
            if isinstance(step, Fourier):
                transforms.prepare(
                    step.kind, double=is_double(step), batches=step.batches, stream=self._stream
                )
        self._way.streams.add(self._stream)

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
        out = self._call.target(context, problem)
        if out is not None:
            return result_in(context, out)
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

    def run(self, told: Sequence[Told], number: int) -> Any:
        """Launch everything. `told` is what `prepare` returned on every rank, in the execution of
        that number.

        What is launched again between the same addresses is one CUDA graph from the second time on.
        """
        team, way, stream = self._team, self._way, self._stream
        team.device.activate()
        team.check()
        if way.tables is not None:
            Beside.of(self._context).require_usable()
        launch = self._launch(self._addresses)
        replay = None
        if ways.GRAPHS and not streams.capturing(stream):
            replay = way.replay((stream, tuple(self._addresses.values())), list(told))
        if replay is None:
            launch.all(stream, told)
        else:
            if replay.graph is None:
                replay.graph = Graph(team.device, lambda own: launch.all(own, told))
            blocks = {f"fft {place}": block for place, block in self._blocks.items()}
            known = Known(number, self._call.said, way, replay.graph, blocks)
            Memory.of(self._context).keep(self._call.key, known)
            replay.graph.launch(stream)
        return self._result.give(self._context, stream)

    def _launch(self, addresses: Mapping[str, int]) -> Launch:
        forward = self._problem.direction < 0
        return Launch(self._context, self._way, addresses, forward, self._stream)


def _view(place: str, array: DeviceArray) -> View:
    return View(place, array.shape, array.strides, array.dtype, array.address % 16)
