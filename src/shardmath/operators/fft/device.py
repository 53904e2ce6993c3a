"""Executing a transform on the ranks' GPUs: steps launched on the user's stream.

After the ranks have agreed, no process waits for another: GPUs do, by barriers on the stream. What
takes memory is made while agreeing, so want of it on one rank is an error on all before an element
is touched. Transforms of a context have one lane, and follow each other on any streams.
"""

from __future__ import annotations

import struct
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from shardmath import wire
from shardmath.arrays import ArraySpec, library_of
from shardmath.context import Context
from shardmath.cuda import stream as streams
from shardmath.cuda.driver import beside_captures
from shardmath.operators.fft import rank_plan
from shardmath.operators.fft.launching import Launch
from shardmath.operators.fft.preparation import prepare
from shardmath.operators.fft.problem import Problem, described_kind
from shardmath.operators.fft.push_stream import PushStream
from shardmath.operators.fft.rank_plan import DevicePlan, Results
from shardmath.operators.lanes import LANES, Lane
from shardmath.operators.replay import ReplayCache
from shardmath.symmetric.allocation import block_at, block_of
from shardmath.symmetric.device_array import (
    Blank,
    Result,
    read,
    require_device,
    result_in,
    stream_of,
)
from shardmath.symmetric.exposed import Exposed
from shardmath.symmetric.fingerprint import fingerprint

if TYPE_CHECKING:
    from shardmath.operators.fft.call import Call, NewArray

__all__ = ["Execution"]

_NUMBER = struct.Struct("<I")  # of the execution to replay, 0 for a new one
_NOTE = struct.Struct("<I??")  # and whether peers reach the result, and find it packed


@dataclass(frozen=True)
class _Agreed:
    """What a replay needs: the launch, and where all ranks' shared buffers lie, packed.

    `flags` are the end of this rank's note.
    """

    launch: Launch
    exposed: tuple[bytes, ...]
    flags: bytes


class Execution:
    """One rank's part in one execution of a call: prepared while agreeing, then launched.

    It does not refer to the call, which refers to it: without a cycle both are freed as soon as
    nobody needs them, and the arrays with them. Raises ValueError for an array on another GPU,
    UseAfterFree, HeapExhausted.
    """

    def __init__(self, context: Context, call: Call) -> None:
        assert context.team is not None, "a context of GPUs"
        self._context = context
        self._team = context.team
        self._rank = context.rank
        self._lane = Lane.numbered(context, LANES - 1)
        self._replays: ReplayCache[_Agreed] = context.cache("fft replays", ReplayCache)
        self._stream = stream_of(context, call.spec, call.stream)
        self._fingerprint = self._fingerprint_of(call)
        self._new_result = self._allocate_early(call)
        self._key = self._make_key(call)
        self._replay = None if self._key is None else self._replays.find(self._key)
        self._flags = b"" if self._replay is None else self._replay.agreed.flags

    def note(self, call: Call) -> bytes:
        """For the peers: the number of the execution to replay, whether the result will lie in
        symmetric memory, and whether it will be packed there.
        """
        if self._replay is not None:
            return _NUMBER.pack(self._replay.number) + self._flags
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
        if inplace and described_kind(call.description) != "C2C":
            dense = False  # it is another array, in the same memory
        elif inplace or call.out is not None:
            given = call.operand if call.out is None else call.out
            order = spec.order
            if on_host:  # what is carried there is packed
                order = "C" if order == "strided" else order
            else:
                dense = order != "strided" and library_of(given).pointer(given) % 16 == 0
        note = _NOTE.pack(0, on_host or on_heap, dense) + order.encode()
        self._flags = note[_NUMBER.size :]
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
                return self._run_replay(call, plan.problem)
        number = self._replays.next_number()

        def prepared() -> bytes:
            with beside_captures():  # memory and plans are no part of what is captured
                return wire.encode(self._prepare(call, plan, _results(notes, plan.problem)))

        exposed = tuple(context.gather("fft, memory", prepared))
        with context.executing("fft"):
            return self._execute(exposed, number)

    # -- replays -----------------------------------------------------------------------------------

    def _fingerprint_of(self, call: Call) -> Hashable | None:
        """Of the user's arrays; None for a call that cannot be replayed.

        Arrays in host memory are copied to other addresses each time, and a call that the user
        captures is not launched now.
        """
        if not rank_plan.USE_GRAPHS or streams.capturing(self._stream):
            return None
        return fingerprint(self._context, call.operand, call.out)

    def _make_key(self, call: Call) -> Hashable | None:
        """The key under which this execution can be replayed; None for one that cannot be.

        The address of a new result is a part of it: peers write there.
        """
        made = self._new_result
        if self._fingerprint is None or (made is None and _allocates(call)):
            return None
        return call.cached, self._fingerprint, made and made.place, self._stream

    def _run_replay(self, call: Call, problem: Problem) -> Any:
        """Launch what all ranks launched in an earlier execution."""
        replay = self._replay
        assert replay is not None, "found for the note"
        agreed = replay.agreed
        if agreed.launch.plan.tables is not None:
            PushStream.of(self._context).require_usable()
        replay.launch(
            (),  # peers write the result: where it lies is part of the key
            self._stream,
            lambda own: agreed.launch.run(own, _unpacked(agreed.exposed)),
        )
        if self._new_result is not None:
            return self._new_result.give(self._context, self._stream)
        return call.target(self._context, problem)

    def _execute(self, exposed: tuple[bytes, ...], number: int) -> Any:
        launch = self._prepared.launch
        self._team.device.activate()
        self._team.check()
        if launch.plan.tables is not None:
            PushStream.of(self._context).require_usable()
        with self._lane.section(self._stream):
            launch.run(self._stream, _unpacked(exposed))
        result = self._prepared.result.give(self._context, self._stream)
        if self._key is None and streams.capturing(self._stream):
            self._lane.keep(launch.plan)  # the graph reads its tables
        if self._key is not None:
            agreed = _Agreed(launch, exposed, self._flags)
            self._replays.keep(self._key, number, agreed, self._lane)
        return result

    # -- memory ------------------------------------------------------------------------------------

    def _lies_on_heap(self, array: Any, spec: ArraySpec) -> bool:
        """Raises UseAfterFree."""
        if not spec.size:
            return block_of(self._context, array) is not None
        return block_at(self._context, spec, library_of(array).pointer(array)) is not None

    def _allocate_early(self, call: Call) -> Result | None:
        """A new result like the last one for such an operand, if there was one."""
        if self._fingerprint is None or not _allocates(call):
            return None
        last = call.cached.new_results.find(self._fingerprint)
        return None if last is None else last[1].make()

    def _allocate_result(self, call: Call, problem: Problem) -> Result:
        context = self._context
        out = call.target(context, problem)
        if out is not None:
            return result_in(context, out)
        form: NewArray = (problem.target.local_shape(self._rank), problem.result, problem.order)
        last = (
            None if self._fingerprint is None else call.cached.new_results.find(self._fingerprint)
        )
        if self._new_result is None or last is None or last[0] != form:
            on_heap = call.spec.device == "cpu" or self._lies_on_heap(call.operand, call.spec)
            blank = Blank(context, call.operand, *form, on_heap=on_heap)
            if self._fingerprint is not None:
                call.cached.new_results.keep(self._fingerprint, (form, blank))
            self._new_result = blank.make()
            self._key = self._make_key(call)
        return self._new_result

    def _prepare(self, call: Call, plan: DevicePlan, results: Results) -> tuple[bytes, ...]:
        """Make all memory and plans. Returns where the shared buffers lie, for the peers."""
        operand = read(self._context, call.operand)
        result = self._allocate_result(call, plan.problem)
        self._prepared = prepare(
            self._context, self._lane, self._stream, plan, operand, result, results
        )
        return self._prepared.exposed()


@lru_cache(maxsize=64)
def _unpacked(exposed: tuple[bytes, ...]) -> list[list[Exposed]]:
    """Where the shared buffers of all ranks lie."""
    return [[Exposed.unpack(each) for each in wire.decode(text)] for text in exposed]


def _allocates(call: Call) -> bool:
    """Whether the result is a new array."""
    return call.out is None and not call.read_options.inplace


def _results(notes: Sequence[bytes], problem: Problem) -> Results:
    """What all ranks say of their results."""
    flags = [_NOTE.unpack_from(text) for text in notes]
    reachable = all(flag[1] for flag in flags)
    wanted = (b"both", problem.order.encode())
    orders = [text[_NOTE.size :] for text in notes]
    dense = all(flag[2] for flag in flags) and all(order in wanted for order in orders)
    return Results(reachable, reachable and dense)
