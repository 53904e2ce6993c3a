"""Repeated calls on GPUs, on arrays that look the same: each is one compiled call.

`cuda/launch.c` repeats a call that `gpu_calls` has made. Whenever something has changed `gpu_calls`
makes it again: the stream is another, an array is not aligned, a peer is far behind, or a kernel
has reported. Where no compiler was there at installation, it makes every call.

If a host has to know what its peers send, it looks into their lists, and launches if they send what
they sent the last time. Calls in which ranks meet are not repeated so.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

from shardmath.arrays import Library
from shardmath.arrays.spec import ArraySpec
from shardmath.base.collective_call import Call, this_thread
from shardmath.base.compiled import extension
from shardmath.base.recorder import this_process
from shardmath.call.compiled import Lying, direct_calls, seen_in, shared_by_calls, watches_of
from shardmath.call.driver import with_derivatives
from shardmath.collectives.cells import DeviceCollectives
from shardmath.context.context import Context
from shardmath.cuda.driver import require_success
from shardmath.cuda.kernel import ReadyLaunch
from shardmath.program.performing import Names
from shardmath.symmetric.calls import packed

_KEPT = 1024  # entries
_UNIT = 16  # bytes: addresses are multiples of it
_NAME = "shardmath.cuda._launch"
_PUBLIC = "shardmath.collectives."  # modules of the public functions
_X = Names("", ("x",), ())


# A call; the class, dtype and shape of x; whether out is new.
_Key = tuple[tuple[Any, ...], type, Any, Any, bool]
End = Callable[[Context, Any, Any], tuple[Any, bool]]


class _Entry(NamedTuple):
    """A call that may be repeated: what compiled code knows of it, what makes a new result, and
    what gives the current stream of a GPU.

    Compiled code may have listed the call without launching it: `end(context, x, out)` then gives
    the result, and whether the peers have listed the same as before. None if that cannot be. With
    `counted`, each call may have other counts.
    """

    repeat: Any
    new: Callable[..., Any]
    stream: Callable[[int], int]
    end: End | None
    counted: bool


class Repeats:
    """The compiled calls of one context, by what identifies them."""

    def __init__(self, context: Context, compiled: Any) -> None:
        team = context.gpu_team
        self.calls: dict[_Key, _Entry] = {}
        self._context = weakref.ref(context)  # it keeps this
        self._team, self._board, self._heap = team, context.board, context.heap
        collectives = DeviceCollectives.of(context)
        assert isinstance(collectives, DeviceCollectives), "ranks of one host"
        self._order = collectives.order
        self._place = collectives.addresses_place
        self._collectives = collectives
        self._compiled = compiled

    @classmethod
    def of(cls, context: Context) -> Repeats | None:
        """The compiled calls of a context; None if nothing was compiled."""
        if context.repeats is None:
            compiled = None if context.multi_host else extension(_NAME)
            if compiled is None:
                return None
            context.repeats = cls(context, compiled)
        repeats: Repeats = context.repeats
        return repeats

    def keep(
        self,
        call: tuple[Any, ...],
        operand: tuple[Library, ArraySpec, Any],
        result: tuple[ArraySpec, Any],
        launch: ReadyLaunch,
        listed: tuple[int, Sequence[int]],
        others: Sequence[Sequence[int]] | None,
        end: End,
        *,
        in_place: bool,
        given: bool,
        new: bool,
        counted: bool,
    ) -> None:
        """Let a call be repeated that was this launch, from the operand to the result.

        Of both arrays only their looks are kept. `listed` are the tag and the words with which the
        call is listed. If the launch depends on what the peers list, `others` has all ranks' words,
        and `end` follows if they list other words, or are late. The call may be repeated with an
        array for the result (`given`), without one (`new`), and with other counts along the first
        axis (`counted`), see `make_counted`.
        """
        library, spec, x = operand
        like, made = result
        attributes = library.attributes()
        if attributes is None or {type(x), type(made)} != {attributes.kind}:
            return
        if not {spec.order, like.order} <= {"C", "both"}:
            return
        calls = self._board.calls
        places = (0, 0, 0, 1, 0, b"", ()) if calls is None else calls.places(*listed)
        function, blocks, threads, argument = launch.parts
        sizes, counts = (spec.nbytes, like.nbytes), (0,) * 7
        if counted:
            (function, blocks, threads), counts = self._collectives.counted()
            width = spec.itemsize * prod(spec.shape[1:])
            sizes = width, width
        repeat = self._compiled.Repeat(
            attributes,
            (x, sizes[0]),
            (made, sizes[1]),
            in_place,
            _UNIT - 1,
            (function, self._team.device.context_address, blocks, threads, argument, self._place),
            self._team.report_address,
            places,
            counts,
            None if others is None else self._of_peers(others),
        )
        alike = (spec.dtype, spec.shape) == (like.dtype, like.shape)
        quick = attributes.like if alike and not counted else None
        make, end_of = quick or _maker(library, like), None if others is None else end
        entry = _Entry(repeat, make, attributes.stream, end_of, counted)
        if len(self.calls) >= _KEPT:
            self.forget()
        shape = x.shape[1:] if counted else x.shape
        for is_new, may_come in ((False, given), (True, new)):
            if may_come:
                self.calls[call, type(x), x.dtype, shape, is_new] = entry

    def forget(self) -> None:
        """Drop all calls."""
        self.calls.clear()
        context = self._context()
        if context is not None:
            context.again.clear()

    def _of_peers(self, words: Sequence[Sequence[int]]) -> bytes:
        """The words of all ranks but this one, packed, given those of all."""
        return b"".join(packed(each) for r, each in enumerate(words) if r != self._board.rank)

    def make(self, call: tuple[Any, ...], x: Any, out: Any) -> Any:
        """The result of a repeated call; None if the call is another, and then nothing was done.

        `call` is the operation and its other arguments.
        """
        try:
            key = self._named(call), type(x), x.dtype, x.shape, out is None
            entry = self.calls.get(key)
        except (AttributeError, TypeError):  # no array, or an argument that has no hash
            return None
        return None if entry is None else self._made(key, entry, x, out)

    def make_counted(
        self,
        call: tuple[Any, ...],
        x: Any,
        out: Any,
        sent: Sequence[int],
        expected: Sequence[int] | None,
    ) -> Any:
        """As `make`, for a call with counts to and from all ranks, which may differ each time."""
        try:
            key = self._named(call), type(x), x.dtype, x.shape[1:], out is None
            entry = self.calls.get(key)
        except (AttributeError, TypeError):
            return None
        return None if entry is None else self._made(key, entry, x, out, sent, expected)

    def _named(self, call: tuple[Any, ...]) -> tuple[Any, ...]:
        """The call, with the name that ranks compare: it tells which operands have derivatives."""
        context = self._context()
        if context is None or not context.derivatives:
            return call
        operation, *words = call
        return with_derivatives(operation, _X, context.derivatives), *words

    def _made(self, key: _Key, entry: _Entry, x: Any, out: Any, *counts: Any) -> Any:
        """The result; None if nothing was done after all."""
        stream = entry.stream(self._team.device.ordinal)
        this_process.on_stream(stream)
        usable = self._board.failure is None and not self._team.broken and not self._heap.freed
        if not usable or not self._order.continues(stream):
            return None
        operation = key[0][0]
        self._board.enter(operation)
        if operation != self._board.operation:
            self._board.operation = operation
        result = entry.new(x, *counts[1:]) if out is None else out
        status = entry.repeat.go(x, result, stream, *counts)
        if status is None:
            return None
        context = self._context()
        if entry.end is not None and status == self._compiled.LISTED and context is not None:
            result, same = entry.end(context, x, out)
            if not same:
                self.calls.pop(key, None)
            return result
        require_success("cuLaunchKernel", status)
        call = this_thread.call
        if call is not None and context is not None and key not in context.again:
            context.again[key] = True  # it has been looked at
            if entry.end is None and not entry.counted:
                call.repeat = partial(self._remember, operation, entry, x, out)
        return result

    def _remember(
        self, operation: str, entry: _Entry, x: Any, out: Any, call: Call, rounds: int
    ) -> None:
        """Let direct.c make the public call that has just returned, on any such arrays, without
        entering its function. This holds only if the function is a collective's.
        """
        function, context, compiled = call[0], self._context(), direct_calls()
        public = function.__name__ == operation and function.__module__.startswith(_PUBLIC)
        if not public or context is None or compiled is None:
            return
        rounds_of = self._board.compiled(ahead=True)
        seen = seen_in(compiled, call, lying=Lying.CONTIGUOUS)
        if rounds_of is None or seen is None:
            return
        made, _, arrays, objects = seen
        numbers = {id(array): number for number, array in enumerate(arrays)}
        used = [numbers.get(id(array)) for array in (x, x if out is None else out)]
        if None in used or {*used} != {*numbers.values()} or any(_differs(x) for x in objects):
            return
        if len(context.again) >= _KEPT:
            context.again.clear()
        context.again[function] = True  # such calls are looked for wherever their arrays lie
        context.again[made] = (
            *(watches_of(function, arrays), shared_by_calls(context, None, rounds_of)),
            *(entry.repeat.go, entry.new if out is None else None, *used, entry.stream),
            *(self._team.device.ordinal, self._order, self._team, operation),
            *(require_success, objects),
        )


def _differs(x: Any) -> bool:
    """Whether an object may differ from one that equals it, or is a context."""
    return isinstance(x, Context) or type(x).__hash__ is None


def _maker(library: Library, like: ArraySpec) -> Callable[..., Any]:
    """A function that makes arrays like a result: `new(x)`, or `new(x, counts)` where the first
    extent is the sum of those counts.
    """
    make, rows = library.maker(like.shape, like.dtype, "C", like.device), like.shape[1:]

    def new(_: Any, counts: Sequence[int] | None = None) -> Any:
        if counts is None:
            return make()
        return library.empty((sum(counts), *rows), like.dtype, "C", like.device)

    return new
