"""Executing a transform on the ranks' GPUs: steps launched on the user's stream.

After the ranks have agreed, no process waits for another: GPUs do, by barriers on the stream. What
takes memory is made while agreeing, so want of it on one rank is an error on all before an element
is touched. Transforms of a context have one lane, and follow each other on any streams.
"""

from __future__ import annotations

import struct
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from shardmath import wire
from shardmath.arrays import ArraySpec, library_of
from shardmath.context import Context
from shardmath.cuda import stream as streams
from shardmath.cuda.driver import beside_captures
from shardmath.local.gpu.fft import Transforms
from shardmath.operators.fft import rank_plan
from shardmath.operators.fft.launching import Launch, Told, is_double
from shardmath.operators.fft.local_steps import Fourier, View
from shardmath.operators.fft.overlap import Beside
from shardmath.operators.fft.problem import Problem, kind_in
from shardmath.operators.fft.program import Ends
from shardmath.operators.fft.rank_plan import DevicePlan, RankPlan, Results
from shardmath.operators.lanes import LANES, Lane
from shardmath.operators.replay import ReplayCache
from shardmath.symmetric.allocation import block_at, block_of
from shardmath.symmetric.device_array import (
    Blank,
    DeviceArray,
    Result,
    read,
    require_device,
    result_in,
    stream_of,
)
from shardmath.symmetric.fingerprint import fingerprint

if TYPE_CHECKING:
    from shardmath.operators.fft.call import Call, NewArray

__all__ = ["DevicePlan", "Execution"]

_NUMBER = struct.Struct("<I")  # of an execution, 0 for one that is like no earlier one
_NOTE = struct.Struct("<I??")  # and whether the result is within reach, and packed


@dataclass(frozen=True)
class _Agreed:
    """What an execution does on this rank, and what all ranks have told for it.

    `said` is the end of this rank's note.
    """

    way: RankPlan
    addresses: Mapping[str, int]
    told: tuple[bytes, ...]
    said: bytes


class Execution:
    """One rank's part in one execution of a call: made while agreeing, then performed.

    It does not refer to the call, which refers to it: both go as soon as nobody needs them, and the
    arrays with them. Raises ValueError for an array on another GPU, UseAfterFree, HeapExhausted.
    """

    def __init__(self, context: Context, call: Call) -> None:
        assert context.team is not None, "a context of GPUs"
        self._context = context
        self._team = context.team
        self._rank = context.rank
        self._lane = Lane.numbered(context, LANES - 1)
        self._replays: ReplayCache[_Agreed] = context.cache("fft replays", ReplayCache)
        self._stream = stream_of(context, call.spec, call.stream)
        self._place = self._placed(call)
        self._fresh = self._made_early(call)
        self._key = self._key_to(call)
        self._replay = None if self._key is None else self._replays.find(self._key)
        self._said = b"" if self._replay is None else self._replay.agreed.said

    def note(self, call: Call) -> bytes:
        """For the peers: the number of the execution that this is like, whether the result will lie
        in symmetric memory, and whether it will be packed there.
        """
        if self._replay is not None:
            return _NUMBER.pack(self._replay.number) + self._said
        inplace, spec = call.read_options.inplace, call.spec
        require_device(self._context, spec, "the operand")
        on_host = spec.device == "cpu"  # then it is on the heap meanwhile
        on_heap = self._lies_on_heap(call.operand, spec)
        if call.out is not None:
            assert call.out_spec is not None, "the spec of out"
            spec = call.out_spec
            require_device(self._context, spec, "out")
            on_heap = self._lies_on_heap(call.out, spec) or spec.size == 0
        dense, order = True, "both"
        if inplace and kind_in(call.description) != "C2C":
            dense = False  # it is another array, in the same memory
        elif (inplace or call.out is not None) and not on_host:
            given = call.operand if call.out is None else call.out
            dense = spec.order != "strided" and library_of(given).pointer(given) % 16 == 0
            order = spec.order
        note = _NOTE.pack(0, on_host or on_heap, dense) + order.encode()
        self._said = note[_NUMBER.size :]
        return note

    def perform(self, call: Call, plan: DevicePlan, notes: Sequence[bytes]) -> Any:
        """The transform of the operand: the array given for it, or a new one. Collective.

        `notes` are all ranks'. Returns when all is launched, for an operand in host memory when all
        is done. Raises on all ranks HeapExhausted when one lacks memory, ValueError for an `out`
        that cannot be written to, RuntimeError where an operand in place is too small.
        """
        context = self._context
        if self._replay is not None and len({text[: _NUMBER.size] for text in notes}) == 1:
            with context.executing("fft"):
                return self._again(call, plan.problem)
        number = self._replays.next_number()

        def prepare() -> bytes:
            with beside_captures():  # memory and plans are no part of what is captured
                return wire.encode(self._prepare(call, plan, _results(notes, plan.problem)))

        told = tuple(context.gather("fft, memory", prepare))
        with context.executing("fft"):
            return self._anew(plan.problem, told, number)

    # -- the same again ----------------------------------------------------------------------------

    def _placed(self, call: Call) -> Hashable | None:
        """How the user's arrays look and lie; None for a call that cannot come again.

        Arrays in host memory are carried to another place each time, and what is captured is not
        launched now.
        """
        if not rank_plan.GRAPHS or streams.capturing(self._stream):
            return None
        return fingerprint(self._context, call.operand, call.out)

    def _key_to(self, call: Call) -> Hashable | None:
        """What makes two executions on this rank the same; None for one that is like no other.

        A new result is a part of it: peers write it.
        """
        fresh = self._fresh
        if self._place is None or (fresh is None and _makes_new(call)):
            return None
        return call.cached, self._place, fresh and fresh.place, self._stream

    def _again(self, call: Call, problem: Problem) -> Any:
        """Launch what all ranks launched in an earlier execution."""
        replay = self._replay
        assert replay is not None, "found for the note"
        agreed = replay.agreed
        if agreed.way.tables is not None:
            Beside.of(self._context).require_usable()
        replay.launch(
            (),  # peers write the result: where it lies is part of the key
            self._stream,
            lambda own: self._launch(problem, agreed.way, agreed.addresses).all(
                own, _decoded(agreed.told)
            ),
        )
        if self._fresh is not None:
            return self._fresh.give(self._context, self._stream)
        return call.target(self._context, problem)

    def _anew(self, problem: Problem, told: tuple[bytes, ...], number: int) -> Any:
        team, way = self._team, self._way
        team.device.activate()
        team.check()
        if way.tables is not None:
            Beside.of(self._context).require_usable()
        with self._lane.entered(self._stream):
            self._launch(problem, way, self._addresses).all(self._stream, _decoded(told))
        result = self._result.give(self._context, self._stream)
        if self._key is None and streams.capturing(self._stream):
            self._lane.keep(way)  # the graph reads its tables
        if self._key is not None:
            agreed = _Agreed(way, self._addresses, told, self._said)
            self._replays.keep(self._key, number, agreed, self._lane)
        return result

    def _launch(self, problem: Problem, way: RankPlan, addresses: Mapping[str, int]) -> Launch:
        forward = problem.direction < 0
        return Launch(self._context, way, addresses, self._lane, forward, self._stream)

    # -- memory ------------------------------------------------------------------------------------

    def _lies_on_heap(self, array: Any, spec: ArraySpec) -> bool:
        """Raises UseAfterFree."""
        if not spec.size:
            return block_of(self._context, array) is not None
        return block_at(self._context, spec, library_of(array).pointer(array)) is not None

    def _made_early(self, call: Call) -> Result | None:
        """A new result like the last one for such an operand, if there was one."""
        if self._place is None or not _makes_new(call):
            return None
        last = call.cached.new_results.find(self._place)
        return None if last is None else last[1].make()

    def _made_result(self, call: Call, problem: Problem) -> Result:
        context = self._context
        out = call.target(context, problem)
        if out is not None:
            return result_in(context, out)
        form: NewArray = (problem.target.local_shape(self._rank), problem.result, problem.order)
        last = None if self._place is None else call.cached.new_results.find(self._place)
        if self._fresh is None or last is None or last[0] != form:
            on_heap = call.spec.device == "cpu" or self._lies_on_heap(call.operand, call.spec)
            blank = Blank(context, call.operand, *form, on_heap=on_heap)
            if self._place is not None:
                call.cached.new_results.keep(self._place, (form, blank))
            self._fresh = blank.make()
            self._key = self._key_to(call)
        return self._fresh

    def _prepare(self, call: Call, plan: DevicePlan, results: Results) -> Told:
        """Make all memory and plans; what peers have to know of it."""
        context = self._context
        self._operand = read(context, call.operand)
        self._result = self._made_result(call, plan.problem)
        result = self._result.array
        overlap = self._operand.overlaps(result)
        same = (self._operand.address, self._operand.strides, self._operand.dtype) == (
            result.address,
            result.strides,
            result.dtype,
        )
        ends = Ends(_view("operand", self._operand), _view("result", result), overlap, same)
        self._way = plan.way(self._team.device, self._rank, ends, results)
        self._place_all()
        if self._stream not in self._way.streams:
            self._prepare_transforms()
        if self._way.tables is not None and not self._way.warm:
            self._warm(plan.problem)
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

    def _warm(self, problem: Problem) -> None:
        """Launch once all that runs beside the second stream, with results that nobody reads.

        A kernel that is launched for the first time is loaded first, and that may wait for all that
        runs: it must not happen while a kernel runs that waits for this stream.
        """
        Beside.of(self._context)
        low, high = self._result.array.span
        spare = self._context.heap.allocate(high - low)
        addresses = self._addresses | {"result": spare.block.address - low}
        launch = self._launch(problem, self._way, addresses)
        with self._lane.entered(self._stream):
            for step in self._way.program.local:
                launch.local(self._stream, step)
        if streams.capturing(self._stream):
            self._way.kept.append(spare)  # each replay of the graph will write there
        else:
            self._team.synchronize(self._stream)
        self._way.warm = True

    def _place_all(self) -> None:
        """An address for every place of the program."""
        self._addresses = {
            "operand": self._operand.address,
            "result": self._result.array.address,
        }
        program = self._way.program
        for place, nbytes in program.places.items():
            name = f"fft {place}"
            if place in program.on_heap:
                self._addresses[place] = self._lane.buffer(name, nbytes).block.address
            else:
                self._addresses[place] = self._lane.private(name, nbytes)

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
                self._context.announce(block)
            else:
                block = self._lane.buffer(f"fft {place}", 0).block
                entry = (0, 0, block.nbytes, ())
            at = block.location
            told.append((at.segment, at.offset + entry[0], *entry[1:]))
        return tuple(told)


@lru_cache(maxsize=64)
def _decoded(told: tuple[bytes, ...]) -> list[Told]:
    return [wire.decode(text) for text in told]


def _makes_new(call: Call) -> bool:
    """Whether the result is an array that the user has not seen."""
    return call.out is None and not call.read_options.inplace


def _results(notes: Sequence[bytes], problem: Problem) -> Results:
    """What all ranks say of their results."""
    flags = [_NOTE.unpack_from(text) for text in notes]
    reachable = all(flag[1] for flag in flags)
    wanted = (b"both", problem.order.encode())
    orders = [text[_NOTE.size :] for text in notes]
    dense = all(flag[2] for flag in flags) and all(order in wanted for order in orders)
    return Results(reachable, reachable and dense)


def _view(place: str, array: DeviceArray) -> View:
    return View(place, array.shape, array.strides, array.dtype, array.address % 16)
