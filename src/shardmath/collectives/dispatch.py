"""A collective as an operation of the driver. On GPUs its calls run ahead: see `gpu_calls`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from shardmath.arrays import array_of
from shardmath.arrays.spec import ArraySpec
from shardmath.base.immutable import Immutable
from shardmath.call.driver import Driver, driver_of
from shardmath.collectives.forms import OnGPUs
from shardmath.collectives.operand import kind_of
from shardmath.context.context import Context
from shardmath.machine import Machine
from shardmath.program.performing import Arguments, Names
from shardmath.program.steps import Program

if TYPE_CHECKING:
    from shardmath.collectives.background import Work
    from shardmath.collectives.gpu_calls import CollectivePerformer

P = TypeVar("P")

_NO_ROOT = "the root of a broadcast passes an array, not None"


class NoOptions(Immutable):
    """The options of a collective: there are none. Plans are logged to the package's logger."""

    logger: None = None


@dataclass(eq=False)
class Collective(Generic[P]):
    """A collective as an operation. The words of its calls are (ranks, rank, *words).

    `arguments(spec, size, *words)` are a call's arguments in normal form, where `spec` is that of
    `x`, None if it was left out; it raises for wrong ones. `build(specs)` makes the plan, and
    `steps(plan, rank)` is the program of a rank on cores. Ranks for which `gives(rank, *words)` is
    false may leave `x` out; with None, no rank may.

    A rank's spec is (kind, dtype, shape, out, *arguments), where the kind is the library of `x`
    and where its memory is, and `out` is None or (kind, dtype, shape).
    """

    name: str
    arguments: Callable[..., tuple[Hashable, ...]]
    build: Callable[[list[Any]], P]
    steps: Callable[[P, int], Program]
    gpus: OnGPUs
    gives: Callable[..., bool] | None = None
    options: type[Any] = field(default=NoOptions, init=False)
    names: Names = field(init=False)

    def __post_init__(self) -> None:
        optional = () if self.gives is None else ("x",)
        self.names = Names(self.name, ("x",), ("out",), optional=optional)

    def describe(
        self, arrays: Mapping[str, ArraySpec | None], words: tuple[Any, ...], options: NoOptions
    ) -> tuple[Hashable, ...]:
        """See Operation, and the class."""
        x, out = arrays["x"], arrays["out"]
        into = None if out is None else (kind_of(out), out.dtype, out.shape)
        size, rank, *own = words
        arguments = self.arguments(x, size, *own)
        if x is not None:
            return (kind_of(x), x.dtype, x.shape, into, *arguments)
        if self.gives is None or self.gives(rank, *own):
            raise ValueError(_NO_ROOT)
        return (None, None, None, into, *arguments)

    def check(self, specs: Sequence[Any]) -> P:
        """See Operation."""
        return self.build(list(specs))

    def program(self, problem: P, machine: Machine, rank: int) -> Program:
        """See Operation."""
        return self.steps(problem, rank)

    def explain(self, problem: P, machine: Machine) -> str:
        """See Operation."""
        return f"{self.name}: {problem}"

    def on_gpus(self, context: Context, names: Names, *, kept: bool) -> CollectivePerformer:
        """See Operation."""
        from shardmath.collectives.gpu_calls import CollectivePerformer

        return CollectivePerformer(context, names, self.gpus)

    def driver(self, context: Context) -> type[Driver]:
        """See Operation."""
        if context.team is None:
            return Driver
        from shardmath.collectives.gpu_calls import GPUCalls

        return GPUCalls


def perform(
    context: Context, collective: Collective[Any], words: tuple[Any, ...], x: Any, out: Any
) -> Any:
    """The result of a call. Collective."""
    driver: Driver | None = None if context.derivatives else context.caches.get(collective)
    if driver is None:
        driver = driver_of(context, collective)
    size, rank = context.size, context.rank
    return driver.call(Arguments((array_of(x),), (out,), (size, rank, *words)))


def in_background(function: Callable[..., Any], context: Any, x: Any, **words: Any) -> Work[Any]:
    """The handle of a call that goes on beside the program. Collective."""
    from shardmath.collectives.background import start

    return start(function, context, x, **words)
