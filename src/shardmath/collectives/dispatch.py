"""What a collective is: an operation of the driver on cores, and a call that agrees alike on GPUs.

On GPUs see `device_calls`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from shardmath.arrays import array_of
from shardmath.arrays.spec import ArraySpec
from shardmath.call.driver import Driver
from shardmath.collectives.descriptions import NO_ROOT, Call, call_spec
from shardmath.collectives.forms import Form
from shardmath.collectives.operand import Shape
from shardmath.context.context import Context
from shardmath.machine import Machine
from shardmath.program.performing import Arguments, Names
from shardmath.program.steps import Program

if TYPE_CHECKING:
    from shardmath.collectives.device_operand import DeviceOperand

__all__ = ["Collective", "perform", "perform_on_cores"]

P = TypeVar("P")


@dataclass(frozen=True)
class NoOptions:
    """The options of a collective: there are none, and the package's logger is told of plans."""

    logger: None = None


@dataclass(eq=False)
class Collective(Generic[P]):
    """A collective: an operation that ranks agree on. Its words are (ranks, rank, *words).

    `arguments(spec, size, *words)` are those of a call in normal form, for an `x` like that (None
    where it was left out) and so many ranks; it raises for wrong ones. `build` makes the plan of
    the specs of all ranks (`call_spec`), and `steps(plan, rank)` is what a rank does. Ranks for
    which `gives(rank, *words)` is false may leave `x` out; None where no rank may.
    """

    name: str
    arguments: Callable[..., tuple[Hashable, ...]]
    build: Callable[[list[Any]], P]
    steps: Callable[[P, int], Program]
    gives: Callable[..., bool] | None = None
    options: type[Any] = field(default=NoOptions, init=False)
    names: Names = field(init=False)

    def __post_init__(self) -> None:
        optional = () if self.gives is None else ("x",)
        self.names = Names(self.name, ("x",), ("out",), optional=optional)

    def describe(
        self, arrays: Mapping[str, ArraySpec | None], words: tuple[Any, ...], options: NoOptions
    ) -> tuple[Hashable, ...]:
        """See Operation, and `call_spec`."""
        x, out = arrays["x"], arrays["out"]
        into = None if out is None else (out.library, out.dtype, out.shape)
        size, rank, *own = words
        arguments = self.arguments(x, size, *own)
        if x is None:
            if self.gives is None or self.gives(rank, *own):
                raise ValueError(NO_ROOT)
            return (None, None, None, into, *arguments)
        return call_spec(x.library, x, into, arguments)

    def check(self, specs: Sequence[Any]) -> P:
        """See Operation."""
        return self.build(list(specs))

    def program(self, problem: P, machine: Machine, rank: int) -> Program:
        """See Operation."""
        return self.steps(problem, rank)

    def explain(self, problem: P, machine: Machine) -> str:
        """See Operation."""
        return f"{self.name}: {problem}"


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

    build, name, optional = collective.build, collective.name, collective.gives is not None
    gives = collective.gives is None or collective.gives(context.rank, *words)
    call = Call(name, words, describe, build, on_device, form, result, gives, optional)
    return perform_on_device(context, call, x, out)


def perform_on_cores(
    context: Context, collective: Collective[Any], words: tuple[Any, ...], x: Any, out: Any
) -> Any:
    """The result of a call on cores. Collective."""
    driver: Driver | None = context.caches.get(collective)
    arguments = Arguments((array_of(x),), (out,), (context.size, context.rank, *words))
    return (driver or Driver.of(context, collective)).call(arguments)
