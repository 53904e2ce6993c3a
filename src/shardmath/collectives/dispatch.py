"""Dispatch of a collective: every rank describes its call, all agree on a plan, it is executed.

On the host the exchange that agrees also tells where operands can be read. On GPUs see
`device_calls`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from shardmath.arrays.base import HostArray
from shardmath.arrays.spec import ArraySpec
from shardmath.call.agreement import agree
from shardmath.collectives.offers import Offer, offer, read_offers, wait_for_readers
from shardmath.collectives.operand import Operand, Output, OutputSpec, Shape, output_spec
from shardmath.collectives.twoshot import Staged
from shardmath.context import Context

if TYPE_CHECKING:
    from shardmath.collectives.device_operand import DeviceOperand

__all__ = ["AgreedCall", "Call", "Offered", "call_spec", "offer_operand", "perform"]


Offered = tuple[Operand, Offer | Staged]  # what peers can read, and the note that says where


def offer_operand(context: Context, operand: Operand, out: HostArray | None) -> Offered:
    """Let the peers read the operand, also while this rank writes into `out`."""
    operand = operand.without_alias(out)
    return operand, offer(context, operand.flat, operand.location)


class Call(NamedTuple):
    """A collective and the arguments of one call, but for `x` and `out`.

    `describe(spec)` is the arguments in normal form for an `x` like that, for all ranks to compare;
    it raises for wrong ones. `build` makes the plan of the specs of all ranks (`call_spec`), as for
    `agree_plan`. `on_host(agreed, plan)` and `on_device(operand, plan)` give the result. `offer`
    lets peers read an operand on the host. `result(operand, plan)`, for a call on GPUs in which a
    rank's arguments say what all ranks' are, is the dtype and shape of this rank's result; None
    where its ranks meet all the same.
    """

    operation: str
    arguments: tuple[Any, ...]
    describe: Callable[[ArraySpec], tuple[Hashable, ...]]
    build: Callable[[list[Any]], Any]
    on_host: Callable[[AgreedCall, Any], Any]
    on_device: Callable[[DeviceOperand, Any], Any]
    offer: Callable[[Context, Operand, HostArray | None], Offered] = offer_operand
    result: Callable[[DeviceOperand, Any], tuple[str, Shape] | None] | None = None


@dataclass(frozen=True)
class AgreedCall:
    """A call on the host when all have agreed: the ranks' notes tell where operands can be read."""

    context: Context
    operand: Operand
    offered: Offer | Staged
    notes: Sequence[bytes]
    out: Any

    def result(self, shape: Shape, dtype: str) -> Output:
        """What receives the result."""
        return Output.of(self.out, self.operand.library, shape, dtype)

    def read(
        self, sizes: Sequence[int], parts: Sequence[tuple[int, int]] | None = None
    ) -> list[HostArray]:
        """Every rank's elements; see `read_offers`."""
        flat = self.operand.flat
        return read_offers(self.context, self.notes, sizes, flat, flat.dtype, parts)

    def finish(self, result: Output) -> Any:
        """The array of the result, after all peers have read what they need here."""
        wait_for_readers(self.context, self.notes)
        return result.finish()


def call_spec(
    kind: str, spec: ArraySpec, out: OutputSpec, arguments: tuple[Hashable, ...]
) -> tuple[Hashable, ...]:
    """A rank's spec of a call; `kind` is the library of `x`, and where its memory is."""
    return (kind, spec.dtype, spec.shape, out, *arguments)


def perform(context: Context, call: Call, x: Any, out: Any) -> Any:
    """The result of a call. Collective."""
    if context.team is not None:
        from shardmath.collectives.device_calls import perform_on_device

        return perform_on_device(context, call, x, out)
    own, agreement, _ = agree(
        context, call.operation, _describe_on_host, call.build, context, call, x, out
    )
    with context.executing(call.operation):
        agreed = AgreedCall(context, own.operand, own.offered, agreement.notes, out)
        return call.on_host(agreed, agreement.plan)


class _HostCall(NamedTuple):
    """A call on the host as this rank describes it, and what its peers can read."""

    spec: Hashable
    operand: Operand
    offered: Offer | Staged
    payload: bytes = b""

    @property
    def note(self) -> bytes:
        """Where peers can read it."""
        return self.offered.note


def _describe_on_host(context: Context, call: Call, x: Any, out: Any) -> _HostCall:
    operand = Operand.of(x, context)
    spec, arguments = operand.spec, call.describe(operand.spec)
    into, view = output_spec(out, context)
    offered = call.offer(context, operand, view)
    return _HostCall(call_spec(spec.library, spec, into, arguments), *offered)
