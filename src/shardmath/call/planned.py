"""Objects that are planned once and executed many times: the class that operators' classes extend.

All methods but `reset_operand_unchecked`, `release_operand` and `free` are collective, and an error
on one rank is raised on all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar
from weakref import WeakMethod

from shardmath.arrays import ArraySpec, library_of
from shardmath.base.collective_call import collective_call
from shardmath.base.untraced import untraced_methods
from shardmath.call.agreement import HashedSpec, agree
from shardmath.call.driver import Driver, Operation
from shardmath.context.agreement import require_equal
from shardmath.context.context import require_context
from shardmath.operators.lifecycle import Lifecycle, check_stream, options_of
from shardmath.program.performing import Arguments, Known, Plan, Turn
from shardmath.program.steps import LocalArray, SplitArray


@untraced_methods
class Planned(Lifecycle):
    """An operation on arrays like those that it was made with.

    They have to be `alike` in these facts; what else is the same, an execution's spec says. It is
    the object's number, where its plan is the only one.
    """

    alike: ClassVar[tuple[str, ...]] = ("memory space", "dtype", "shape")
    keeps_workspace: ClassVar[bool] = True  # of its own, until it is released

    @collective_call
    def __init__(self, operation: Operation[Any], arguments: Arguments) -> None:
        context = require_context()
        self._driver = Driver(context, operation, kept=self.keeps_workspace)
        self._driver.agreed = WeakMethod(self._agreed_plan)
        turn, agreement, _ = agree(context, self.noun, self._described, self._build, arguments)
        names = operation.names.operands
        super().__init__(context, dict(zip(names, arguments.operands, strict=True)))
        self._like = {
            name: library_of(x).spec(x)
            for name, x in zip(names, arguments.operands, strict=True)
            if x is not None
        }
        self._words = arguments.words
        self._options = options_of(operation.options, arguments.options)
        self._driver.performer.number = self.number
        self._execution = f"{self.noun}.execute"
        self._own_spec = HashedSpec((self.number,))
        if agreement.plan is not None:
            self._use(agreement.plan, self._spec_as(turn.spec))

    def _build(self, specs: list[Any]) -> Plan | None:
        """The plan that all ranks' first specs make, None where that takes another method."""
        return self._driver.build(specs)

    def _use(self, plan: Plan, spec: HashedSpec) -> None:
        """Execute this plan from now on, and expect it in executions of that spec. Local."""
        self._plan = self._driver.expect(spec, plan)
        self._driver.log(self._options, plan)

    def _described(self, arguments: Arguments) -> Turn:
        check_stream(arguments.stream)
        self._driver.numbers(arguments)
        spec = self._driver.spec(arguments)
        self._driver.performer.inspect(arguments)
        return Turn(arguments, Known(spec, None, lasting=False), spec)

    def explain(self) -> str:
        """A description of what is done, in a few lines. Local."""
        return self._plan.explain()

    @collective_call
    def plan(self, stream: Any = None) -> None:
        """Prepare for `execute`; a second call does nothing. Collective."""
        self._gather("plan", lambda: check_stream(stream))
        self._planned = True

    def _execute(
        self,
        results: tuple[Any, ...],
        stream: Any,
        words: tuple[Any, ...] = (),
        *,
        release_workspace: bool,
    ) -> Any:
        """The results; those that are None are new. Collective.

        `words` are those of this execution, where it may be another than the last.
        """
        self._require_open()
        driver = self._driver
        try:
            if self._planned and self._has_operands:
                given = driver.again(self._execution_arguments(results, stream, words))
                if given is not None:
                    return given
            turn, agreement, payloads = agree(
                self.context,
                self._execution,
                self._described_execution,
                self._agreed_plan,
                results,
                stream,
                words,
            )
            return driver.perform(turn, agreement, payloads)
        finally:
            if release_workspace:
                driver.performer.release()

    def _described_execution(
        self, results: tuple[Any, ...], stream: Any, words: tuple[Any, ...]
    ) -> Turn:
        if self._freed or not (self._planned and self._has_operands):
            self._require_ready()
        arguments = self._execution_arguments(results, stream, words)
        return self._driver.ready(arguments, self._execution_spec)

    def _execution_arguments(
        self, results: tuple[Any, ...], stream: Any, words: tuple[Any, ...]
    ) -> Arguments:
        """The arguments of an execution."""
        options = self._options if words else None
        return Arguments(tuple(self._operands.values()), results, words, options, stream)

    def _agreed_plan(self, specs: list[Any]) -> Plan:
        """The plan of an execution, from all ranks' specs."""
        require_equal(f"the {self.noun} object", specs)
        return self._plan

    def _spec_as(self, described: HashedSpec) -> HashedSpec:
        """The spec of an execution that has been described so."""
        return self._own_spec

    def _execution_spec(self, arguments: Arguments) -> HashedSpec:
        """The spec of an execution. Raises ValueError unless such arrays are what the plan is for,
        TypeError for operands of another library.
        """
        names = self._driver.operation.names
        for name, x in zip(names.operands, arguments.operands, strict=True):
            if x is not None:
                self._check_like(name, library_of(x, name).spec(x))
        for name, x in zip(names.results, arguments.results, strict=True):
            if x is None:
                continue
            like, result = next(iter(self._like.values())), self._plan.program.results[name]
            wrong = misfit(name, library_of(x, name).spec(x), like, result, self.context.rank)
            if wrong:
                raise ValueError(wrong)
        return self._own_spec

    def _check_like(self, name: str, spec: ArraySpec) -> None:
        like = self._like[name]
        if spec.library != like.library:
            raise TypeError(f"the {name} is of {spec.library}, the plan is for {like.library}")
        for what in self.alike:
            one, other = _fact(spec, what), _fact(like, what)
            if one != other:
                raise ValueError(f"the {name} has {what} {one}, the plan is for {other}")

    @collective_call
    def _reset(self, operands: Mapping[str, Any], stream: Any) -> None:
        """Execute on these from now on. Collective."""

        def described() -> None:
            check_stream(stream)
            for name, x in operands.items():
                self._require_given(name, x)
                self._check_like(name, library_of(x, name).spec(x))
            results = (None,) * len(self._plan.program.results)
            self._driver.performer.inspect(
                Arguments(tuple(operands.values()), results, stream=stream)
            )

        self._gather("reset_operand", described)
        self._set_operands(**operands)

    def _require_given(self, name: str, operand: Any) -> None:
        """Raise unless there is an operand to be reset to."""
        if operand is None:
            raise ValueError(f"reset_operand needs an {name}; release_operand drops the old one")

    def _release(self) -> None:
        self._driver.forget()
        self._driver.performer.release()


def misfit(
    name: str, spec: ArraySpec, like: ArraySpec, result: SplitArray | LocalArray, rank: int
) -> str:
    """What is wrong with an array given for a result on `rank`, in words; "" if nothing.

    Results are of the library and in the memory of the operand, whose spec is `like`.
    """
    expected = {
        "library": like.library,
        "memory space": like.space,
        "dtype": result.dtype,
        "shape": result.local_shape(rank),
    }
    for what, other in expected.items():
        one = _fact(spec, what)
        if one != other:
            return f"{name} has {what} {one}, the result has {other}"
    return ""


def _fact(spec: ArraySpec, what: str) -> Any:
    return getattr(spec, "space" if what == "memory space" else what)
