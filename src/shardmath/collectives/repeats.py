"""Calls on GPUs that come again on arrays that look the same: each is one compiled call.

What `cuda/launch.c` makes again was made before by `device_calls`, which makes it whenever
something is not as it was: another stream, an array that is not aligned, a peer that is far behind,
a report of a kernel. Without a compiler at installation it always does.

A call that does not run ahead meets first, as `device_calls` does, and is launched if all ranks
say what they said before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from shardmath.arrays import Library, libraries
from shardmath.arrays.spec import ArraySpec
from shardmath.base.compiled import extension
from shardmath.call.agreement import HashedSpec, agree
from shardmath.collectives.ahead import tag_of_agreement
from shardmath.collectives.device import DeviceCollectives
from shardmath.collectives.device_operand import DeviceOperand
from shardmath.context.context import Context
from shardmath.cuda.driver import require_success
from shardmath.cuda.kernel import ReadyLaunch

__all__ = ["Meeting", "Repeats"]

_KEPT = 1024  # entries
_UNIT = 16  # bytes: addresses are multiples of it
_NAME = "shardmath.cuda._launch"


@dataclass(frozen=True, eq=False)
class Meeting:
    """What a rank says in a call that meets, the plan that followed, and what makes another call.

    `build` and `on_device` are those of the collective's `Call`.
    """

    note: ClassVar[bytes] = b""  # peers are told nothing else
    payload: ClassVar[bytes] = b""
    last: ClassVar[None] = None

    spec: HashedSpec
    plan: Any
    build: Callable[[list[Any]], Any]
    on_device: Callable[[DeviceOperand, Any], Any]


class _Entry(NamedTuple):
    """A call that may come again: compiled, what makes a new result, and its meeting, if any."""

    repeat: Any
    new: Callable[[Any], Any]
    meeting: Meeting | None


class Repeats:
    """The compiled calls of one context, by what identifies them."""

    def __init__(self, context: Context, compiled: Any) -> None:
        team = context.team
        assert team is not None, "a context of GPUs"
        self.calls: dict[Hashable, _Entry] = {}
        self._team, self._board, self._heap = team, context.board, context.heap
        collectives = DeviceCollectives.of(context)
        assert isinstance(collectives, DeviceCollectives), "ranks of one host"
        self._order = collectives.order
        self._place = collectives.addresses_place
        self._compiled = compiled

    @classmethod
    def of(cls, context: Context) -> Repeats | None:
        """The context's; None where nothing was compiled."""
        if context.repeats is None:
            compiled = None if context.multi_host else extension(_NAME)
            if compiled is None:
                return None
            context.repeats = cls(context, compiled)
        found: Repeats = context.repeats
        return found

    def keep(
        self,
        call: tuple[Any, ...],
        operand: tuple[Library, ArraySpec, Any],
        result: tuple[ArraySpec, Any],
        launch: ReadyLaunch,
        tag: int,
        *,
        in_place: bool,
        meeting: Meeting | None,
    ) -> None:
        """Let a call be made again that was this launch, from the operand to the result.

        Both are given by their specs and arrays, of which is kept how they look. `meeting` is None
        for a call that runs ahead.
        """
        library, spec, x = operand
        like, made = result
        torch = sys.modules.get("torch")
        if library.name != "torch" or torch is None or type(x) is not torch.Tensor:
            return
        if type(made) is not torch.Tensor or not x.is_contiguous() or not made.is_contiguous():
            return
        calls = self._board.calls
        lists = meeting is None and calls is not None
        listed = calls.places(tag) if lists and calls is not None else (0, 0, 1, tag, ())
        function, *grid = launch.parts
        repeat = self._compiled.Repeat(
            torch.Tensor,
            (x.dtype, x.shape, x.get_device(), spec.nbytes),
            (made.dtype, made.shape, made.get_device(), like.nbytes),
            in_place,
            _UNIT - 1,
            (function, self._team.device.context_address, *grid, self._place),
            self._team.report_address,
            listed,
        )
        new: Callable[[Any], Any] = torch.empty_like
        if (x.dtype, x.shape) != (made.dtype, made.shape):
            shape, dtype, device = tuple(made.shape), made.dtype, made.device
            new = lambda _: torch.empty(shape, dtype=dtype, device=device)  # noqa: E731
        entry = _Entry(repeat, new, meeting)
        if len(self.calls) >= _KEPT:
            self.calls.clear()
        for is_new in (False, True):
            self.calls[call, x.dtype, x.shape, is_new] = entry

    def make(self, context: Context, call: tuple[Any, ...], x: Any, out: Any) -> Any:
        """The result of a call that comes again; None where it is another, and nothing was done.

        `call` is the operation and its other arguments.
        """
        try:
            entry = self.calls.get((call, x.dtype, x.shape, out is None))
        except (AttributeError, TypeError):  # no array, or an argument that has no hash
            return None
        stream = libraries()["torch"].stream(self._team.device.ordinal)
        usable = self._board.failure is None and not self._team.broken and not self._heap.freed
        if entry is None or not usable or not self._order.continues(stream):
            return None
        if entry.meeting is None:
            self._board.enter(call[0])
            return self._launched(entry, call[0], x, out, stream)
        if entry.repeat.fits(x, out):
            return self._met(context, entry, entry.meeting, call, (x, out, stream))
        return None

    def _launched(self, entry: _Entry, operation: str, x: Any, out: Any, stream: int) -> Any:
        """The result, None where nothing was done after all."""
        if operation != self._board.operation:
            self._board.operation = operation
        if out is None:
            out = entry.new(x)
        status = entry.repeat.go(x, out, stream)
        if status is None:
            return None
        require_success("cuLaunchKernel", status)
        return out

    def _met(
        self,
        context: Context,
        entry: _Entry,
        meeting: Meeting,
        call: tuple[Any, ...],
        arrays: tuple[Any, Any, int],
    ) -> Any:
        """The result when all ranks have met: launched if they say what they said before."""
        (x, out, stream), operation = arrays, call[0]
        _, agreement, _ = agree(context, operation, _same, meeting.build, meeting)
        with context.executing(operation):
            if agreement.plan is meeting.plan:
                result = self._launched(entry, operation, x, out, stream)
                if result is not None:
                    return result
            else:
                self.calls.pop((call, x.dtype, x.shape, out is None), None)
            operand = DeviceOperand(context, x, out, tag=tag_of_agreement(agreement))
            return meeting.on_device(operand, agreement.plan)


def _same(meeting: Meeting) -> Meeting:
    return meeting
