"""`redistribute` and `Redistribute`: a call, and an object planned once and executed often."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from shardmath.agreement import require_equal
from shardmath.arrays import ArraySpec, library_and_spec, library_of
from shardmath.collective_call import collective_call
from shardmath.context import Context, require_context
from shardmath.errors import InvalidRedistributeState
from shardmath.geometry import Distribution
from shardmath.operators.call_cache import CachedCall, cached_call
from shardmath.operators.lifecycle import Lifecycle, check_stream, log_plan, options_of
from shardmath.operators.redistribute.execution import HostExecution
from shardmath.operators.redistribute.problem import (
    Problem,
    RedistributeOptions,
    check,
    check_distributions,
    describe,
    misfit,
)
from shardmath.planning import HashedSpec, agree_plan
from shardmath.untraced import untraced, untraced_methods

if TYPE_CHECKING:
    from shardmath.operators.redistribute.device import DeviceExecution

__all__ = ["Redistribute", "redistribute"]


@untraced
@collective_call
def redistribute(
    operand: Any,
    /,
    input_distribution: Distribution,
    output_distribution: Distribution,
    *,
    sync_symmetric_memory: bool = True,
    options: RedistributeOptions | dict[str, Any] | None = None,
    stream: Any = None,
    out: Any = None,
) -> Any:
    """Change the distribution of an array; return this rank's part of it. Collective.

        y = redistribute(x, Slab.X, Slab.Y)

    `operand` is this rank's local array: any number of axes, any element type and strides. A `Box`
    is this rank's own; any other distribution is the same on all ranks. The result is `out` if
    given; otherwise a new array of the operand's library, in its memory order, and on the symmetric
    heap if the operand is there. `sync_symmetric_memory` is accepted for programs written for
    nvmath.distributed: agreement orders the ranks anyway.

    Raises the same error on all ranks, before anything is written. ValueError: library, dtype,
    number of axes or options differ between ranks; local shapes do not fit the distributions; boxes
    overlap or leave gaps; `out` has another library, dtype or shape, is read-only, or overlaps the
    operand. TypeError: a distribution, an option or a stream that is not one. RuntimeError: before
    `initialize`, or after the array was freed.
    Source: nvmath.distributed.distribution.redistribute; `out` is ours.
    """
    context = require_context()
    call = _Call(
        operand,
        source=input_distribution,
        target=output_distribution,
        options=options,
        stream=stream,
        out=out,
    )
    execution = _execution(context, temporary=True)
    cached: list[_CachedRedistribution] = []

    def described() -> tuple[HashedSpec, bytes]:
        cached.append(call.cached(context))
        return cached[0].spec, execution.read(operand, out, stream, cached[0].problem)

    problem, notes = agree_plan(context, "redistribute", described, check)
    cached[0].problem = problem
    call.log(context, problem)
    return execution.perform(problem, notes)


@untraced_methods
class Redistribute(Lifecycle):
    """A redistribution that is planned once and executed many times.

        with Redistribute(x, Slab.X, Slab.Y) as redistribution:
            redistribution.plan()
            y = redistribution.execute()

    Arguments and errors as `redistribute`. All methods but `reset_operand_unchecked`,
    `release_operand` and `free` are collective: an error on one rank is raised on all. After `free`
    they raise InvalidRedistributeState.
    Source: nvmath.distributed.distribution.Redistribute.
    """

    noun: ClassVar[str] = "Redistribute"
    invalid = InvalidRedistributeState

    @collective_call
    def __init__(
        self,
        operand: Any,
        /,
        input_distribution: Distribution,
        output_distribution: Distribution,
        *,
        options: RedistributeOptions | dict[str, Any] | None = None,
        stream: Any = None,
    ) -> None:
        context = require_context()
        call = _Call(
            operand,
            source=input_distribution,
            target=output_distribution,
            options=options,
            stream=stream,
        )
        self._execution = _execution(context)

        def described() -> tuple[HashedSpec, bytes]:
            spec = call.cached(context).spec
            self._execution.inspect(operand, None, stream)
            return spec, b""

        self._problem: Problem
        self._problem, _ = agree_plan(context, self.noun, described, check)
        super().__init__(context, {"operand": operand})
        call.log(context, self._problem)
        self._shape = library_of(operand).spec(operand).shape
        self._fitting: tuple[ArraySpec, ArraySpec | None] | None = None  # of the last execution
        self._spec = HashedSpec((self.number,))

    def explain(self) -> str:
        """A description of what moves, and how between hosts, in a few lines. Local."""
        hosts = len(set(self.context.hosts))
        if hosts == 1 or not self._problem.transfer.crosses:
            return self._problem.explain()
        packed = "packed by each rank, and " * (self.context.team is not None)
        return (
            f"{self._problem.explain()}\n"
            f"{hosts} hosts: {packed}read in place on the same host, by `get` from another"
        )

    @collective_call
    def plan(self, stream: Any = None) -> None:
        """Prepare for `execute`; a second call does nothing. Collective."""
        self._gather("plan", lambda: check_stream(stream))
        self._planned = True

    @collective_call
    def execute(
        self,
        stream: Any = None,
        release_workspace: bool = False,
        sync_symmetric_memory: bool = True,
        out: Any = None,
    ) -> Any:
        """The redistributed array: `out`, or a new one. Collective.

        With `release_workspace` the memory through which ordinary operands are read is freed.
        Raises RuntimeError before `plan` and after `release_operand`; errors of `out` as
        `redistribute`.
        """

        def described() -> tuple[HashedSpec, bytes]:
            self._require_ready()
            check_stream(stream)
            operand = self._operands["operand"]
            self._require_fit(
                library_of(operand, "operand").spec(operand),
                None if out is None else library_of(out, "out").spec(out),
            )
            note = self._execution.read(operand, out, stream, self._problem, self.number)
            return self._spec, note

        self._require_open()
        try:
            _, notes = agree_plan(
                self.context,
                f"{self.noun}.execute",
                described,
                lambda specs: require_equal(f"the {self.noun} object", specs),
            )
            return self._execution.perform(self._problem, notes, self.number)
        finally:
            self._execution.drop_arrays()
            if release_workspace:
                self._execution.release()

    @collective_call
    def reset_operand(self, operand: Any, *, stream: Any = None) -> None:
        """Execute on `operand` from now on; strides and memory may differ from before. Collective.

        Raises ValueError for None and for another dtype, device or shape, TypeError for another
        library.
        """

        def described() -> None:
            check_stream(stream)
            if operand is None:
                raise ValueError(
                    "reset_operand needs an operand; release_operand drops the old one"
                )
            spec = library_of(operand, "operand").spec(operand)
            if spec.library != self._problem.library:
                raise TypeError(
                    f"the operand is of {spec.library}, the plan is for {self._problem.library}"
                )
            self._check_shape(spec)
            self._execution.inspect(operand, None, stream)

        self._gather("reset_operand", described)
        self._set_operands(operand=operand)

    def reset_operand_unchecked(self, operand: Any, *, stream: Any = None) -> None:
        """As `reset_operand`, without agreement: `execute` finds what is wrong. Local."""
        self._require_alive()
        self._set_operands(operand=operand)

    def release_operand(self) -> None:
        """Drop the reference to the operand; then `reset_operand` must come first. Local."""
        self._require_alive()
        self._release_operands()

    def _require_fit(self, operand: ArraySpec, out: ArraySpec | None) -> None:
        """Raise ValueError unless such arrays are what the plan is for."""
        if (operand, out) == self._fitting:
            return
        self._check_shape(operand)
        wrong = None if out is None else misfit(self._problem, self.context.rank, out)
        if wrong:
            raise ValueError(wrong)
        self._fitting = operand, out

    def _check_shape(self, spec: ArraySpec) -> None:
        problem = self._problem
        given = (spec.library, spec.space, spec.dtype, spec.shape)
        expected = (problem.library, problem.space, problem.dtype, self._shape)
        for what, one, other in zip(
            ("library", "memory space", "dtype", "shape"), given, expected, strict=True
        ):
            if one != other:
                raise ValueError(f"the operand has {what} {one}, the plan is for {other}")

    def _release(self) -> None:
        self._execution.release()


def _execution(context: Context, *, temporary: bool = False) -> HostExecution | DeviceExecution:
    """What moves the elements: on cores or on GPUs. `temporary`: for one call only."""
    if context.team is None:
        return HostExecution(context, temporary=temporary)
    from shardmath.operators.redistribute.device import DeviceExecution

    return DeviceExecution(context, temporary=temporary)


class _CachedRedistribution(CachedCall):
    """`problem` is what was agreed on last time, likely the same again: what is prepared for it is
    in the notes to the peers, who see whether it holds.
    """

    problem: Problem | None = None


@dataclass(kw_only=True)
class _Call:
    """One rank's arguments."""

    operand: Any = field(kw_only=False)
    source: Any
    target: Any
    options: Any
    stream: Any
    out: Any = None

    def cached(self, context: Context) -> _CachedRedistribution:
        """The same for all calls with equal arguments. Raises what is wrong with them."""
        options = options_of(RedistributeOptions, self.options)
        check_stream(self.stream)
        spec = library_and_spec(self.operand, "operand")[1]
        out = None if self.out is None else library_and_spec(self.out, "out")[1]
        source, target = self.source, self.target
        check_distributions(source, target)
        return cached_call(
            context,
            _CachedRedistribution,
            (spec, source, target, options.blocking, out),
            lambda: describe(spec, source, target, options, out),
        )

    def log(self, context: Context, problem: Problem) -> None:
        """Tell the user's logger, or the package's, what was planned."""
        log_plan(context, options_of(RedistributeOptions, self.options).logger, problem)
