"""How each collective goes: every rank says what it was called with, all agree, it is performed.

On the host the exchange that agrees also tells where operands can be read. On GPUs see
`device_calls`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from shardmath.arrays.base import HostArray
from shardmath.arrays.spec import ArraySpec
from shardmath.collectives.offers import Offer, offer, read_offers, wait_for_readers
from shardmath.collectives.operand import Operand, Output, OutputSpec, Shape, output_spec
from shardmath.collectives.twoshot import Parts
from shardmath.context import Context
from shardmath.planning import agree_plan

if TYPE_CHECKING:
    from shardmath.collectives.device_operand import DeviceOperand

__all__ = ["Call", "Met", "Shown", "lend", "perform", "said_of"]


Shown = tuple[Operand, Offer | Parts]  # what peers can read, and the note that says where


def lend(context: Context, operand: Operand, out: HostArray | None) -> Shown:
    """Let the peers read the operand, also while this rank writes into `out`."""
    operand = operand.apart(out)
    return operand, offer(context, operand.flat, operand.location)


class Call(NamedTuple):
    """A collective and the arguments of one call, but for `x` and `out`.

    `say(spec)` is what the arguments come to for an `x` like that, for all ranks to compare; it
    raises for wrong ones. `build` makes the plan of what all ranks say (`said_of`), as for
    `agree_plan`. `on_host(met, plan)` and `on_device(operand, plan)` give the result. `show` lets
    peers read an operand on the host.
    """

    operation: str
    arguments: tuple[Any, ...]
    say: Callable[[ArraySpec], tuple[Hashable, ...]]
    build: Callable[[list[Any]], Any]
    on_host: Callable[[Met, Any], Any]
    on_device: Callable[[DeviceOperand, Any], Any]
    show: Callable[[Context, Operand, HostArray | None], Shown] = lend


@dataclass(frozen=True)
class Met:
    """A call on the host when all have agreed: the ranks' notes say where operands can be read."""

    context: Context
    operand: Operand
    shown: Offer | Parts
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


def said_of(
    kind: str, spec: ArraySpec, out: OutputSpec, said: tuple[Hashable, ...]
) -> tuple[Hashable, ...]:
    """What a rank says of a call; `kind` is the library of `x`, and where its memory is."""
    return (kind, spec.dtype, spec.shape, out, *said)


def perform(context: Context, call: Call, x: Any, out: Any) -> Any:
    """The result of a call. Collective."""
    if context.team is not None:
        from shardmath.collectives.device_calls import perform_on_device

        return perform_on_device(context, call, x, out)
    own: list[Shown] = []

    def describe() -> tuple[Hashable, bytes]:
        operand = Operand.of(x, context)
        spec, said = operand.spec, call.say(operand.spec)
        into, view = output_spec(out, context)
        own.append(call.show(context, operand, view))
        return said_of(spec.library, spec, into, said), own[0][1].note

    plan, notes = agree_plan(context, call.operation, describe, call.build)
    ((operand, shown),) = own
    with context.executing(call.operation):
        return call.on_host(Met(context, operand, shown, notes, out), plan)
