"""Redistribution as an operation: description, check, program and explanation. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from logging import Logger
from typing import Any, Literal

from shardmath.arrays import ArraySpec
from shardmath.base.immutable import Immutable
from shardmath.base.untraced import constant_to_compiler
from shardmath.context.agreement import require_equal
from shardmath.geometry import Distribution, Layout
from shardmath.machine import Machine
from shardmath.operators.arguments import check_common
from shardmath.operators.facts import ArrayFacts, agreed_facts, require_fits
from shardmath.operators.layouts import bind_layout, infer_layout, result_order
from shardmath.program.performing import Names
from shardmath.program.steps import LocalArray, Program, SplitArray, moved
from shardmath.redistribution import TransferPlan
from shardmath.redistribution.plan import Transfer


@constant_to_compiler
@dataclass(frozen=True)
class RedistributeOptions:
    """`logger` is told what each call plans; without one, a logger below "shardmath" is told of
    each plan once. `blocking`: True, or "auto" for operands in host memory.

    A call that does not block returns when its work has been put on the stream.

    Raises TypeError where `logger` is not a logging.Logger, ValueError for another `blocking`.
    Source: nvmath.distributed.distribution.RedistributeOptions.
    """

    logger: Logger | None = None
    blocking: Literal[True, "auto"] = "auto"

    def __post_init__(self) -> None:
        check_common(self)


class Problem(Immutable):
    """The redistribution that all ranks have agreed on.

    `transfer` is what moves; `library` and `dtype` are the arrays', and `order` the memory order of
    results. `blocking`: a call returns when the result is there.
    """

    transfer: Transfer
    library: str
    dtype: str
    order: Literal["C", "F"]
    blocking: bool


class Redistribution:
    """The operation: `operand` in one distribution, `out` in another."""

    names = Names(
        "redistribute",
        ("operand",),
        ("out",),
        separate="the operand: a redistribution cannot be done in place",
    )
    options = RedistributeOptions

    def describe(
        self,
        arrays: Mapping[str, ArraySpec | None],
        words: tuple[Any, ...],
        options: RedistributeOptions,
    ) -> tuple[Any, ...]:
        """(operand, input distribution, output distribution, blocking, out).

        An array is ArrayFacts, and a distribution what it encodes to. Raises TypeError for what is
        not a distribution.
        """
        operand, out = arrays["operand"], arrays["out"]
        assert operand is not None, "required"
        source, target = self.encoded(words)
        facts = None if out is None else ArrayFacts.of(out)
        return ArrayFacts.of(operand), source, target, options.blocking, facts

    def encoded(self, words: tuple[Any, ...]) -> tuple[Any, Any]:
        """The layouts of operand and result as a rank describes them, in plain data."""
        for name, given in zip(("input_distribution", "output_distribution"), words, strict=True):
            if not isinstance(given, Distribution):
                raise TypeError(f"{name} is a distribution such as Slab.X or a Box, not {given!r}")
        source, target = words
        return source.encode(), target.encode()

    def layouts(
        self, sources: Sequence[Any], targets: Sequence[Any], shapes: Sequence[Sequence[int]]
    ) -> tuple[Layout, Layout]:
        """The layouts of operand and result, from what all ranks have `encoded`; `shapes` are the
        operand's parts. Raises ValueError where these do not fit together.
        """
        src = infer_layout("input_distribution", sources, shapes)
        return src, bind_layout("output_distribution", targets, src.global_shape)

    def transfer(
        self,
        sources: Sequence[Any],
        targets: Sequence[Any],
        shapes: Sequence[Sequence[int]],
        itemsize: int,
    ) -> Transfer:
        """The transfer of elements of `itemsize` bytes. Other arguments and errors as `layouts`."""
        return TransferPlan(*self.layouts(sources, targets, shapes), itemsize)

    def check(self, specs: Sequence[Any]) -> Problem:
        """See Operation. Raises ValueError where descriptions do not fit."""
        operands, sources, targets, blocking, outs = zip(*specs, strict=True)
        facts = agreed_facts("the operand", operands)
        require_equal("options.blocking", blocking)
        first = facts[0]
        transfer = self.transfer(sources, targets, [x.shape for x in facts], first.itemsize)
        for rank, out in enumerate(outs):
            if out is not None:
                require_fits(rank, out, first._replace(shape=transfer.result_shape(rank)))
        order = result_order([x.order for x in facts])
        return Problem(transfer, first.library, first.dtype, order, blocking[0] is True)

    def operands(self, problem: Problem) -> Mapping[str, Layout]:
        """See Operation."""
        transfer = problem.transfer
        return {"operand": transfer.src} if isinstance(transfer, TransferPlan) else {}

    def program(self, problem: Problem, machine: Machine, rank: int) -> Program:
        """One move."""
        out, steps = self.result(problem, rank), moved(problem.transfer, "operand", "out")
        return Program(steps, results={"out": out}, blocking=problem.blocking)

    def result(self, problem: Problem, rank: int) -> SplitArray | LocalArray:
        """The result of `rank`."""
        assert isinstance(problem.transfer, TransferPlan), "between layouts"
        return SplitArray(problem.transfer.dst, problem.dtype, problem.order)

    def explain(self, problem: Problem, machine: Machine) -> str:
        """The moves, the predicted time, and how data travels between hosts."""
        assert isinstance(problem.transfer, TransferPlan), "between layouts"
        milliseconds = problem.transfer.seconds(machine.rates) * 1e3
        text = (
            f"{problem.transfer.explain()}\n"
            f"{problem.library} {problem.dtype}, results in {problem.order} order; "
            f"predicted: {milliseconds:.3g} ms"
        )
        if not machine.multi_host or not problem.transfer.crosses:
            return text
        packed = "packed by each rank, and " * (machine.kind == "cuda")
        return (
            f"{text}\n{machine.host_count} hosts: {packed}read in place on the same host, by "
            "`get` from another"
        )


REDISTRIBUTE = Redistribution()
