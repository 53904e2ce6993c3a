"""Executing a transform on the ranks' GPUs: steps launched on the user's stream.

After the ranks have agreed, no process waits for another: GPUs do, by barriers on the stream. What
takes memory is made while agreeing, so want of it on one rank is an error on all before an element
is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardmath.arrays import library_of
from shardmath.context import DistributedContext
from shardmath.cuda import stream as streams
from shardmath.cuda.constant import beside_captures
from shardmath.local.gpu_fft import Transforms, scale
from shardmath.operators.fft.beside import Beside
from shardmath.operators.fft.local_steps import (
    Convert,
    Fourier,
    LocalStep,
    Scale,
    View,
)
from shardmath.operators.fft.pipeline import Pipeline
from shardmath.operators.fft.problem import Problem
from shardmath.operators.fft.stages import Exchange
from shardmath.operators.fft.ways import DevicePlan, boxes_of_copy, boxes_of_exchange, make_way
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
from shardmath.symmetric.heap import Block, Location
from shardmath.symmetric.team import Team

__all__ = ["Arrays", "DevicePlan", "execute", "note"]

_CHANNEL = 60  # of the barriers of transforms

Told = tuple[Any, ...]  # where a rank's shared places lie, and the strides of its result


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
                    double=_is_double(step),
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
        result = self._addresses["result"]
        self._addresses["result"] = spare.block.address - low
        for step in self._way.program.local:
            self._local(step)
        self._addresses["result"] = result
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
        """Launch everything. `told` is what `prepare` returned on every rank."""
        self._team.device.activate()
        program = self._way.program
        if isinstance(program, Pipeline):
            self._pipeline(program, told)
        else:
            for step in program.steps:
                if isinstance(step, Exchange):
                    self._exchange(step, told)
                else:
                    self._local(step)
        return self._result.give(self._context, self._stream)

    def _local(self, step: LocalStep) -> None:
        device, stream = self._team.device, self._stream
        target = self._address(step.target)
        if isinstance(step, Scale):
            view = _real(step.target)
            scale(
                device,
                target,
                target,
                view.shape,
                (view.strides, view.strides),
                stream,
                dtypes=(view.dtype, view.dtype),
                factor=step.factor,
            )
            return
        source = self._address(step.source)
        if isinstance(step, Fourier):
            self._transforms.run(
                step.kind,
                source,
                target,
                stream,
                double=_is_double(step),
                batches=step.batches,
                forward=self._problem.direction < 0,
            )
        elif isinstance(step, Convert):
            scale(
                device,
                source,
                target,
                step.source.shape,
                (step.source.strides, step.target.strides),
                stream,
                dtypes=(step.source.dtype, step.target.dtype),
                factor=1.0,
            )
        else:
            self._way.copier((step,), lambda: boxes_of_copy(step)).launch(
                stream, [source], [target]
            )

    def _exchange(self, step: Exchange, told: Sequence[Told]) -> None:
        """Move boxes between this rank's array and all ranks' arrays."""
        place = "result" if step.theirs is None else step.theirs[self._rank].place
        addresses, strides = self._everywhere(place, told)
        if step.theirs is not None:
            strides = [view.strides for view in step.theirs]
        copier = self._way.copier(
            (step, *strides), lambda: boxes_of_exchange(step, self._rank, strides)
        )
        own = self._address(step.own)
        if step.opens or step.pulls:
            # Before reusing what a peer may still use; before reading what a peer wrote.
            self._barrier()
        if step.pulls:
            copier.launch(self._stream, addresses, [own])
        else:
            copier.launch(self._stream, [own], addresses)
        # Before reading what a peer wrote; before reusing what a peer may still read.
        self._barrier()

    def _address(self, view: View) -> int:
        return self._addresses[view.place] + view.offset

    def _everywhere(
        self, place: str, told: Sequence[Told]
    ) -> tuple[list[int], list[Sequence[int]]]:
        """Where all ranks' arrays of that place begin for this GPU, and their strides."""
        notes = [each[self._way.program.shared.index(place)] for each in told]
        addresses = [
            self._addresses[place] if rank == self._rank else self._peer(rank, entry)
            for rank, entry in enumerate(notes)
        ]
        return addresses, [entry[4] for entry in notes]

    def _pipeline(self, program: Pipeline, told: Sequence[Told]) -> None:
        """Transforms on the user's stream, and exchanges beside them."""
        beside, stream = Beside.of(self._context), self._stream
        assert self._way.tables is not None, "made with the pipeline"
        targets = [self._everywhere(place, told)[0] for place in program.shared]
        sources = [self._addresses[place] for place in program.sources]
        beside.start(self._way.tables, stream, sources, targets)
        for steps in program.first:
            for step in steps:
                self._local(step)
            beside.ready(stream)
        for steps in program.second:
            beside.wait(stream)
            for step in steps:
                self._local(step)
            if program.returns:
                beside.ready(stream)
        if program.returns:
            beside.wait(stream)
        for step in program.last:
            self._local(step)
        beside.end(stream)

    def _peer(self, rank: int, entry: Sequence[Any]) -> int:
        """Where a rank's array begins for this GPU; 0 where it has no elements."""
        segment, offset, low, nbytes, _ = entry
        if nbytes == 0:
            return 0
        address = self._context.peer_address(rank, Location(segment, offset), nbytes)
        assert address is not None, "GPUs of one host reach each other"
        return address - int(low)

    def _barrier(self) -> None:
        self._team.barrier(self._stream, channel=_CHANNEL)


def _view(place: str, array: DeviceArray) -> View:
    return View(place, array.shape, array.strides, array.dtype, array.address % 16)


def _is_double(step: Fourier) -> bool:
    return "complex128" in (step.source.dtype, step.target.dtype)


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
