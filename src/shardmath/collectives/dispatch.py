"""Dispatch of a collective: every rank describes its call, all agree on a plan, it is executed.

On cores the driver does that, with `OnCores` to perform it: the exchange that agrees carries few
elements, and tells where more can be read. On GPUs see `device_calls`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from shardmath.arrays import Library, array_of, dtypes
from shardmath.arrays.base import HostArray
from shardmath.arrays.spec import ArraySpec
from shardmath.call.agreement import Agreement
from shardmath.call.driver import Driver
from shardmath.collectives.descriptions import NO_ROOT, Call, call_spec
from shardmath.collectives.forms import Form
from shardmath.collectives.offers import (
    INLINE,
    INLINE_BYTES,
    NOTHING,
    Offer,
    offer,
    read_offers,
    wait_for_readers,
)
from shardmath.collectives.operand import (
    Operand,
    Output,
    Shape,
    output_spec,
    view_at_address,
)
from shardmath.collectives.twoshot import Staged
from shardmath.context.context import Context
from shardmath.machine import Machine
from shardmath.program.performing import Arguments, Names, Plan, Turn
from shardmath.program.steps import Program

if TYPE_CHECKING:
    from shardmath.collectives.device_operand import DeviceOperand

__all__ = [
    "AgreedCall",
    "Collective",
    "Offered",
    "offer_operand",
    "perform",
    "perform_on_cores",
]

P = TypeVar("P")

Offered = tuple[Operand, Offer | Staged]  # what peers can read, and the note that says where


def offer_operand(
    context: Context, operand: Operand, turn: Turn, target: HostArray | None
) -> Offered:
    """Let the peers read the operand, also while this rank writes into `target`."""
    operand = operand.without_alias(target)
    return operand, offer(context, operand.flat, operand.location)


@dataclass(frozen=True)
class NoOptions:
    """The options of a collective: there are none, and the package's logger is told of plans."""

    logger: None = None


@dataclass(eq=False)
class Collective(Generic[P]):
    """A collective, as ranks agree on it; on cores it is an operation of the driver.

    `arguments(spec, size, *words)` are those of a call in normal form, for an `x` like that (None
    where it was left out) and so many ranks; it raises for wrong ones. `build` makes the plan of
    the specs of all ranks (`call_spec`). `on_host(agreed, plan)` gives the result. `offer` lets
    peers read what is too long to be sent along; ranks for which `gives(rank, words)` is false let
    them read nothing.
    """

    name: str
    arguments: Callable[..., tuple[Hashable, ...]]
    build: Callable[[list[Any]], P]
    on_host: Callable[[AgreedCall, P], Any]
    offer: Callable[[Context, Operand, Turn, HostArray | None], Offered] = offer_operand
    gives: Callable[[int, tuple[Any, ...]], bool] | None = None
    optional: bool = False
    options: type[Any] = field(default=NoOptions, init=False)
    names: Names = field(init=False)

    def __post_init__(self) -> None:
        optional = ("x",) if self.optional else ()
        self.names = Names(self.name, ("x",), ("out",), optional=optional)

    def describe(
        self, arrays: Mapping[str, ArraySpec | None], words: tuple[Any, ...], options: NoOptions
    ) -> tuple[Hashable, ...]:
        """See Operation, and `call_spec`."""
        x, out = arrays["x"], arrays["out"]
        into = None if out is None else (out.library, out.dtype, out.shape)
        arguments = self.arguments(x, *words)
        if x is None:
            return (None, None, None, into, *arguments)
        return call_spec(x.library, x, into, arguments)

    def check(self, specs: Sequence[Any]) -> P:
        """See Operation."""
        return self.build(list(specs))

    def program(self, problem: P, machine: Machine, rank: int) -> Program:
        """No steps: `OnCores` performs a collective as it is."""
        return Program((), results={})

    def explain(self, problem: P, machine: Machine) -> str:
        """See Operation."""
        return f"{self.name}: {problem}"

    def on_cores(self, context: Context, names: Names, *, kept: bool) -> OnCores:
        """See Operation."""
        return OnCores(context, self)


class _Arrays(NamedTuple):
    """One rank's arrays: `x`, if there is one, and the array for the result, if it was given."""

    operand: Operand | None
    target: HostArray | None


class OnCores:
    """Performs one collective on cores: the driver's performer."""

    number, repeat, direct = 0, None, None

    def __init__(self, context: Context, collective: Collective[Any]) -> None:
        self._context = context
        self._collective = collective

    def inspect(self, arguments: Arguments) -> None:
        """See Performer."""
        self.read(arguments)

    def read(self, arguments: Arguments) -> _Arrays:
        """See Performer. Raises ValueError for what is not in host memory, and where there is no
        array on a rank that gives one; UseAfterFree.
        """
        (x,), (out,) = arguments.operands, arguments.results
        operand = None if x is None else Operand.of(x, self._context)
        if operand is None and self._gives(arguments.words):
            raise ValueError(NO_ROOT)
        return _Arrays(operand, output_spec(out, self._context)[1])

    def without_memory(self, arrays: _Arrays) -> _Arrays:
        """See Performer."""
        operand, target = arrays
        return _Arrays(
            None if operand is None else operand.without_memory(),
            None if target is None else view_at_address(target),
        )

    def prepare(self, turn: Turn, plan: Plan | None) -> None:
        """See Performer."""
        context, gives, (operand, target) = self._context, self._collective.gives, turn.known.arrays
        if operand is None or (gives and not gives(context.rank, turn.arguments.words)):
            turn.note = NOTHING
        elif operand.spec.nbytes <= INLINE_BYTES:
            turn.note, turn.payload = INLINE, operand.view.tobytes()
        else:
            operand = operand.for_one_call()
            turn.held = operand, offered = self._collective.offer(context, operand, turn, target)
            turn.note = offered.note

    def perform(self, turn: Turn, agreement: Agreement[Any], plan: Plan) -> tuple[Any, ...]:
        """See Performer."""
        operand, target = turn.known.arrays
        offered = None
        if turn.held is not None:
            operand, offered = turn.held
        out = turn.arguments.results[0]
        agreed = AgreedCall(
            self._context, operand, offered, agreement.notes, turn.payloads, out, target
        )
        return (self._collective.on_host(agreed, plan.problem),)

    def release(self) -> None:
        """See Performer."""

    def _gives(self, words: tuple[Any, ...]) -> bool:
        gives = self._collective.gives
        return gives is None or gives(self._context.rank, words)


class AgreedCall(NamedTuple):
    """A call on cores when all have agreed: the ranks' notes tell where operands can be read.

    `offered` is None where this rank's elements were sent along, or are not needed; `payloads` are
    what was sent along. `out` is the user's array for the result, and `target` what NumPy sees of
    it.
    """

    context: Context
    operand: Operand | None
    offered: Offer | Staged | None
    notes: Sequence[bytes]
    payloads: Sequence[bytes]
    out: Any
    target: HostArray | None

    def result(self, library: Library, shape: Shape, dtype: str) -> Output:
        """What receives the result."""
        return Output.of(self.out, self.target, library, shape, dtype)

    def read(
        self, sizes: Sequence[int], dtype: str, parts: Sequence[tuple[int, int]] | None = None
    ) -> list[HostArray]:
        """Every rank's elements; see `read_offers`."""
        notes, operand = self.notes, self.operand
        own = None if operand is None or self.offered is None else operand.flat
        native = dtypes.to_numpy(dtype) if operand is None else operand.view.dtype
        return read_offers(self.context, notes, self.payloads, sizes, own, native, parts)

    def finish(self, result: Output) -> Any:
        """The array of the result, after all peers have read what they need here."""
        wait_for_readers(self.context, self.notes)
        return result.finish()


def perform(
    context: Context,
    collective: Collective[Any],
    words: tuple[Any, ...],
    x: Any,
    out: Any,
    on_device: Callable[[DeviceOperand, Any], Any],
    form: Form,
    result: Callable[[DeviceOperand, Any], tuple[str, Shape] | None] | None = None,
) -> Any:
    """The result of a call on GPUs; see `Call`. Collective."""
    from shardmath.collectives.device_calls import perform_on_device

    def describe(spec: ArraySpec | None) -> tuple[Hashable, ...]:
        return collective.arguments(spec, context.size, *words)

    gives = collective.gives is None or collective.gives(context.rank, (context.size, *words))
    build, name = collective.build, collective.name
    call = Call(name, words, describe, build, on_device, form, result, gives, collective.optional)
    return perform_on_device(context, call, x, out)


def perform_on_cores(
    context: Context, collective: Collective[Any], words: tuple[Any, ...], x: Any, out: Any
) -> Any:
    """The result of a call on cores. Collective."""
    driver: Driver | None = context.caches.get(collective)
    arguments = Arguments((array_of(x),), (out,), (context.size, *words))
    return (driver or Driver.of(context, collective)).call(arguments)
