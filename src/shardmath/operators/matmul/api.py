"""The call: read the arguments, agree, find the plan, run it, give the result back as it came.

A plan is what all ranks have agreed on and what this rank does for it; it holds no operand, and is
kept for the next call that looks the same on every rank. alpha and beta are not part of it: they
travel with each call, and must be equal on all ranks.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shardmath.agreement import require_equal
from shardmath.arrays import ArraySpec, Library, library_of
from shardmath.arrays.base import HostArray, share_memory
from shardmath.context import DistributedContext
from shardmath.geometry import Distribution
from shardmath.local.epilog import MatmulEpilog
from shardmath.operators.lifecycle import check_stream, options_of
from shardmath.operators.matmul import host
from shardmath.operators.matmul.options import MatmulOptions, MatmulPlanPreferences
from shardmath.operators.matmul.problem import Call, Facts, Problem, check, check_operands, describe
from shardmath.operators.matmul.strategy import CORES, Cost, Strategy, choose
from shardmath.planning import agree_plan
from shardmath.symmetric.allocation import block_of, empty_on_heap
from shardmath.symmetric.heap import Block

__all__ = ["Arguments", "Plan", "agree_on_operands", "agree_on_plan", "run"]

_SCALARS = struct.Struct("<dddd")


class Arguments(NamedTuple):
    """One rank's arguments as they were given, read once into what the layers below understand.

    Raises ValueError or TypeError, on this rank, for what cannot be read.
    """

    a: Any
    b: Any
    c: Any
    distributions: Any
    alpha: Any = None
    beta: Any = None
    qualifiers: Any = None
    scales: Any = None
    options: Any = None
    epilog: Any = None
    inputs: Any = None
    preferences: Any = None
    stream: Any = None

    def scalars(self) -> tuple[complex, complex]:
        """The numbers alpha, 1 by default, and beta, 0 by default."""
        return (
            1.0 if self.alpha is None else scalar("alpha", self.alpha),
            0.0 if self.beta is None else scalar("beta", self.beta),
        )

    def facts(self) -> Facts:
        """What to tell the peers of this call."""
        return describe(self.call())

    def call(self) -> Call:
        """The call with specs in place of arrays."""
        operands = tuple(
            None if x is None else library_of(x, name).spec(x)
            for name, x in (("a", self.a), ("b", self.b), ("c", self.c))
        )
        if operands[0] is None or operands[1] is None:
            raise ValueError("matmul needs both a and b")
        transpose, conjugate = _qualifiers(self.qualifiers)
        if self.scales is not None:
            raise ValueError(f"quantization_scales want float8 operands, not {operands[0].dtype}")
        check_stream(self.stream)
        options_of(MatmulPlanPreferences, self.preferences, "preferences").check()
        options = options_of(MatmulOptions, self.options)
        options.check_kinds()  # before anything is looked up by their values
        alpha, beta = self.scalars()
        return Call(
            operands=operands,
            distributions=_distributions(self.distributions),
            complex_scalars=(isinstance(alpha, complex), isinstance(beta, complex)),
            has_beta=self.beta is not None,
            transpose=transpose,
            conjugate=conjugate,
            options=options,
            epilog=_epilog(self.epilog),
            inputs=_input_specs(self.inputs),
        )


@dataclass(frozen=True)
class Plan:
    """What the ranks agreed on, and what this rank does."""

    strategy: Strategy
    compared: tuple[tuple[Strategy, Cost], ...]
    share: host.Share

    @property
    def problem(self) -> Problem:
        """The product."""
        return self.strategy.problem

    def explain(self) -> str:
        """What was chosen, its steps, and what it was compared with, predicted by counting."""
        costs = {id(each): cost for each, cost in self.compared}
        forced = f", as options.strategy={self.problem.strategy!r} asks" * bool(
            self.problem.strategy
        )
        lines = [
            str(self.problem),
            f"chosen: {self.strategy}{forced}; predicted {costs[id(self.strategy)]}",
        ]
        lines += [f"  {i}. {step}" for i, step in enumerate(self.strategy.steps(), 1)]
        others = [entry for entry in self.compared if entry[0] is not self.strategy]
        if others:
            lines.append("compared with")
            lines += [f"  {each!s:<34} {cost}" for each, cost in others]
        return "\n".join(lines)


def agree_on_operands(context: DistributedContext, arguments: Arguments) -> Facts:
    """Agree that the operands fit, before an epilog is known. Collective."""

    def described() -> tuple[Facts, tuple[complex, complex]]:
        return arguments.facts(), arguments.scalars()

    def check(specs: list[Any]) -> Facts:
        require_equal("(alpha, beta)", [scalars for _, scalars in specs])
        return check_operands([facts for facts, _ in specs], context.rank)

    return context.agree("Matmul", described, check)


def agree_on_plan(context: DistributedContext, arguments: Arguments) -> tuple[Plan, Call]:
    """The plan for these arguments, and the call as read. Collective.

    Raises the same error on every rank when the arguments of one are wrong, or do not fit together.
    """
    calls: list[Call] = []

    def described() -> tuple[Facts, bytes]:
        calls.append(arguments.call())
        return describe(calls[0]), b""

    def build(specs: list[Any]) -> Plan:
        strategy, compared = choose(check(specs), CORES)
        return Plan(strategy, tuple(compared), host.Share(strategy, context.rank))

    plan, _ = agree_plan(context, "matmul", described, build)
    if calls[0].options.logger is not None:
        calls[0].options.logger.info("%s", plan.explain())
    return plan, calls[0]


def run(
    context: DistributedContext,
    operation: str,
    arguments: Arguments,
    ready: Callable[[], tuple[Plan, Call]],
) -> Any:
    """Execute a plan on arguments that it was made for: D, or (D, outputs of the epilog).
    Collective.

    `ready()` is the plan, and the call that the arguments make. What it raises on one rank is
    raised on all, as is want of memory, before any element has been written.
    """
    made: list[tuple[Any, host.Execution]] = []

    def prepare() -> bytes:
        plan, call = ready()
        out, operands = _operands(context, plan, call, arguments)
        made.append((out, host.Execution(context, plan.share, operands, operation)))
        return _packed(operands.alpha, operands.beta) + made[0][1].prepare()

    notes = context.gather(operation, prepare)
    require_equal("(alpha, beta)", [_unpacked(note) for note in notes])
    shown = [note[_SCALARS.size :] for note in notes]
    out, execution = made[0]
    with context.executing(operation):
        aux = execution.run(shown)
    epilog = execution.problem.epilog
    if not (epilog.makes_aux or epilog.makes_bgrad):
        return out
    library = library_of(arguments.a)
    return out, {name: library.from_host(array) for name, array in aux.items()}


def _operands(
    context: DistributedContext, plan: Plan, call: Call, arguments: Arguments
) -> tuple[Any, host.Operands]:
    """D, in the library of a, and all arrays as the execution sees them.

    Raises UseAfterFree for a freed operand, ValueError when D is c and cannot be written to or
    overlaps a or b, HeapExhausted when D finds no room.
    """
    library = library_of(arguments.a)
    a, b = library.host_view(arguments.a), library.host_view(arguments.b)
    c = None if arguments.c is None else library.host_view(arguments.c)
    blocks = [None if x is None else _block(context, x) for x in (a, b, c)]
    alpha, beta = arguments.scalars()
    if call.options.inplace:
        out, target = arguments.c, library.host_view(arguments.c, writable=True)
        if share_memory(target, a) or share_memory(target, b):
            raise ValueError("c shares memory with a or b, and options.inplace=True overwrites it")
    else:
        out = _result(context, plan, library, call, None not in blocks[: 2 + (c is not None)])
        target = library.host_view(out, writable=True)
    return out, host.Operands(
        a=a.T if call.transpose[0] else a,
        b=b.T if call.transpose[1] else b,
        c=c,
        out=target,
        alpha=alpha,
        beta=beta,
        blocks=(blocks[0], blocks[1]),
        inputs={name: library.host_view(x) for name, x in (arguments.inputs or {}).items()},
    )


def scalar(name: str, value: Any) -> float | complex:
    """Alpha or beta as a Python number. Raises ValueError for what is none."""
    is_complex = isinstance(value, complex) or "complex" in str(getattr(value, "dtype", ""))
    try:
        if not isinstance(value, (str, bytes)):
            return complex(value) if is_complex else float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(f"{name} is a number, not {value!r}")


def _packed(alpha: complex, beta: complex) -> bytes:
    return _SCALARS.pack(alpha.real, alpha.imag, beta.real, beta.imag)


def _unpacked(note: bytes) -> tuple[complex, complex]:
    numbers = _SCALARS.unpack_from(note)
    return complex(*numbers[:2]), complex(*numbers[2:])


def _qualifiers(
    given: Any,
) -> tuple[tuple[bool, bool, bool], tuple[bool, bool, bool]]:
    if given is None:
        return (False, False, False), (False, False, False)
    entries = np.asarray(given)
    names = entries.dtype.names or ()
    if entries.shape not in ((2,), (3,)) or not {"is_transpose", "is_conjugate"} <= set(names):
        raise ValueError(
            "qualifiers is an array of two or three entries of matrix_qualifiers_dtype, for a, b "
            f"and c; given was {given!r}"
        )
    flags = [(bool(e["is_transpose"]), bool(e["is_conjugate"])) for e in entries]
    flags += [(False, False)] * (3 - len(flags))
    (ta, ca), (tb, cb), (tc, cc) = flags
    return (ta, tb, tc), (ca, cb, cc)


def _distributions(given: Any) -> tuple[Distribution, ...]:
    found = tuple(given) if isinstance(given, (list, tuple, Sequence)) else ()
    known = len(found) == 3
    for each in found:
        known = known and isinstance(each, Distribution)
    if not known:
        raise ValueError(
            "distributions holds three Distribution objects, for a, b and the result, not "
            f"{given!r}"
        )
    return found


def _epilog(given: Any) -> MatmulEpilog:
    if given is None:
        return MatmulEpilog.DEFAULT
    try:
        return MatmulEpilog(given)
    except ValueError:
        raise ValueError(f"epilog is a MatmulEpilog, not {given!r}") from None


def _input_specs(inputs: Any) -> tuple[tuple[str, ArraySpec], ...]:
    if inputs is None:
        return ()
    if not isinstance(inputs, Mapping):
        raise TypeError(f"epilog_inputs is a dictionary of arrays, not {type(inputs).__name__}")
    unnamed = [name for name in inputs if not isinstance(name, str)]
    if unnamed:
        raise TypeError(f"the names of epilog_inputs are strings, not {unnamed[0]!r}")
    return tuple((name, library_of(x, name).spec(x)) for name, x in sorted(inputs.items()))


def _block(context: DistributedContext, host_array: HostArray) -> Block | None:
    """Where an array lies on the heap: of its memory, since a lazy tensor is read from a copy."""
    found = block_of(context, host_array)
    return None if found is None else found[0]


def _result(
    context: DistributedContext, plan: Plan, library: Library, call: Call, on_heap: bool
) -> Any:
    """A new local part of D, in column-major order if the operands are, on the heap if they are."""
    a, b, c = call.operands
    assert a is not None and b is not None
    column = c.order == "F" if c is not None else a.order == b.order == "F"
    order: Any = "F" if column else "C"
    shape = plan.problem.d.local_shape(context.rank)
    if on_heap:
        return empty_on_heap(context, library, shape, plan.problem.result, order)
    return library.empty(shape, plan.problem.result, order)
