"""Calls on GPUs that come again on arrays that look the same: each is one compiled call.

What `cuda/launch.c` makes again was made before by `device_calls`, which makes it whenever
something is not as it was: another stream, an array that is not aligned, a peer that is far behind,
a report of a kernel. Without a compiler at installation it always does.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from typing import Any

from shardmath.arrays import Library
from shardmath.arrays.spec import ArraySpec
from shardmath.collectives.device import DeviceCollectives
from shardmath.compiled import extension
from shardmath.context import Context
from shardmath.cuda import stream as streams
from shardmath.cuda.driver import require_success
from shardmath.cuda.kernel import ReadyLaunch

__all__ = ["Repeats"]

_UNIT = 16  # bytes: addresses are multiples of it
_NAME = "shardmath.cuda._launch"


class Repeats:
    """The compiled calls of one context, by what identifies them."""

    def __init__(self, context: Context, compiled: Any) -> None:
        team = context.team
        assert team is not None, "a context of GPUs"
        self.calls: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}
        self.team, self.board, self.heap = team, context.board, context.heap
        collectives = DeviceCollectives.of(context)
        assert isinstance(collectives, DeviceCollectives), "ranks of one host"
        self.order = collectives.order
        self._place = collectives.addresses_place
        self._compiled = compiled

    @classmethod
    def of(cls, context: Context) -> Repeats | None:
        """The context's; None where nothing was compiled."""
        if context.repeats is None:
            compiled = extension(_NAME)
            if compiled is None:
                return None
            context.repeats = cls(context, compiled)
        found: Repeats = context.repeats
        return found

    def keep(
        self,
        call: Hashable,
        operand: tuple[Library, ArraySpec, Any],
        result: tuple[ArraySpec, Any],
        launch: ReadyLaunch,
        tag: int,
        *,
        in_place: bool,
    ) -> None:
        """Let a call be made again that was this launch, from the operand to the result.

        Both are given by their specs and arrays, of which is kept how they look.
        """
        library, spec, x = operand
        like, made = result
        torch = sys.modules.get("torch")
        if library.name != "torch" or torch is None or type(x) is not torch.Tensor:
            return
        if type(made) is not torch.Tensor or not x.is_contiguous() or not made.is_contiguous():
            return
        calls = self.board.calls
        listed = (0, 0, 1, tag, ()) if calls is None else calls.places(tag)
        device = self.team.device
        kernel = (*launch.parts, self._place)
        repeat = self._compiled.Repeat(
            torch.Tensor,
            (x.dtype, x.shape, x.get_device(), spec.nbytes),
            (made.dtype, made.shape, made.get_device(), like.nbytes),
            in_place,
            _UNIT - 1,
            (kernel[0], device.context_address, *kernel[1:]),
            self.team.report_address,
            listed,
        )
        new = (tuple(made.shape), made.dtype, made.device)
        for is_new in (False, True):
            self.calls[call, x.dtype, x.shape, is_new] = repeat, new

    def make(self, call: tuple[Any, ...], x: Any, out: Any) -> Any:
        """The result of a call that comes again; None where it is another, and nothing was done.

        `call` is the operation and its other arguments.
        """
        try:
            found = self.calls.get((call, x.dtype, x.shape, out is None))
        except (AttributeError, TypeError):  # no array, or an argument that has no hash
            return None
        if found is None:
            return None
        team, board, operation = self.team, self.board, call[0]
        stream = streams.current("torch", team.device)
        usable = board.failure is None and not team.broken and not self.heap.freed
        if not usable or not self.order.continues(stream):
            return None
        board.enter(operation)
        if operation != board.operation:
            board.operation = operation
        repeat, (shape, dtype, device) = found
        if out is None:
            out = sys.modules["torch"].empty(shape, dtype=dtype, device=device)
        status = repeat.go(x, out, stream)
        if status is None:
            return None
        require_success("cuLaunchKernel", status)
        return out
