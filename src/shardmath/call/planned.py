"""Objects that are planned once and executed many times: the class that operators' classes extend.

An object is made with operands, planned, executed, reset, freed. It owns what its plan needs, never
its operands: it only refers to them until they are reset or released. All methods but
`reset_operand_unchecked`, `release_operand` and `free` are collective. An error on one rank is
raised on all, since the state is checked within the agreement with which a call begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self
from weakref import WeakMethod

from shardmath.arrays import ArraySpec, library_of
from shardmath.base.collective_call import collective_call, require_function
from shardmath.base.untraced import untraced_methods
from shardmath.call.agreement import HashedSpec, agree
from shardmath.call.driver import Driver, Operation
from shardmath.context.agreement import require_equal
from shardmath.context.context import require_context
from shardmath.errors import ShardmathError
from shardmath.operators.arguments import check_stream, options_of
from shardmath.operators.facts import ArrayFacts
from shardmath.program.performing import Arguments, Known, Plan, Turn


@untraced_methods
class Planned:
    """An operation on arrays like those that it was made with.

    A subclass names itself (`noun`) and the error that a freed object raises (`invalid`). `context`
    is the one it was made in, and `number` is its name there, the same on all ranks. `_operands`
    are the operands by name, None for those that were released or never given. If it `overwrites`,
    results are written to operands.

    Later operands have to be `alike` the first in these facts. The spec of an execution is the
    object's number, unless the subclass has more than one plan.
    """

    noun: ClassVar[str]
    invalid: ClassVar[type[ShardmathError]]
    alike: ClassVar[tuple[str, ...]] = ("memory space", "dtype", "shape")
    keeps_workspace: ClassVar[bool] = True  # its own, until that is released

    @collective_call
    def __init__(self, operation: Operation[Any], arguments: Arguments) -> None:
        context = require_context()
        self._driver = Driver(context, operation, kept=self.keeps_workspace)
        self._driver.agreed = WeakMethod(self._agreed_plan)
        turn, agreement, _ = agree(context, self.noun, self._described, self._build, arguments)
        names = operation.names.operands
        # The ranks have agreed on the object: from now on it exists on all of them.
        self.context = context
        self.number = context.next_shared_id()
        self._operands: dict[str, Any] = dict(zip(names, arguments.operands, strict=True))
        self._has_operands = True
        self._planned = self._freed = False
        self._like = {
            name: library_of(x).spec(x)
            for name, x in zip(names, arguments.operands, strict=True)
            if x is not None
        }
        self._words = arguments.words
        self._options = options_of(operation.options, arguments.options)
        self.overwrites = getattr(self._options, "inplace", False)
        self._driver.performer.number = self.number
        self._execution = f"{self.noun}.execute"
        self._own_spec = HashedSpec((self.number,))
        if agreement.plan is not None:
            self._use(agreement.plan, self._spec_as(turn.spec))

    def __repr__(self) -> str:
        state = "freed" if self._freed else "planned" if self._planned else "not planned"
        return f"<{self.noun} #{self.number}, {state}>"

    def __enter__(self) -> Self:
        self._require_alive()
        return self

    def __exit__(self, *_: object) -> None:
        self.free()

    def free(self) -> None:
        """Free what the plan holds. Local. A second call does nothing; other methods raise then."""
        if not self._freed:
            self._freed = True
            self._release()
            self._release_operands()

    def _build(self, specs: list[Any]) -> Plan | None:
        """The plan for all ranks' first specs; None where another method plans."""
        return self._driver.build(specs)

    def _use(self, plan: Plan, spec: HashedSpec) -> None:
        """Execute this plan from now on, and expect it in executions with that spec. Local."""
        self._plan = self._driver.expect(spec, plan)
        self._driver.log(self._options, plan)

    def _described(
        self, arguments: Arguments, spec_of: Callable[[Arguments], HashedSpec] | None = None
    ) -> Turn:
        """A call that is described and not performed, by `spec_of` or as all calls are."""
        check_stream(arguments.stream)
        self._driver.numbers(arguments)
        spec = (spec_of or self._driver.spec)(arguments)
        self._driver.performer.inspect(arguments)
        return Turn(arguments, Known(spec, None, lasting=False))

    def explain(self) -> str:
        """What is done, in a few lines. Local."""
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
        """The results; those given as None are new arrays. Collective.

        `words` are those of this execution, where they may differ from the last one's.
        """
        self._require_open()
        driver = self._driver
        try:
            if self._planned and self._has_operands:
                made = driver.again(self._execution_arguments(results, stream, words))
                if made is not None:
                    return made
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
                require_function()
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
        """The spec of an execution of the call that was described by this spec."""
        return self._own_spec

    def _execution_spec(self, arguments: Arguments) -> HashedSpec:
        """The spec of an execution. Raises ValueError for arrays that the plan is not for,
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
            shape = result.local_shape(self.context.rank)
            made = ArrayFacts.of(like)._replace(dtype=result.dtype, shape=shape)
            wrong = ArrayFacts.of(library_of(x, name).spec(x)).misfit(name, made)
            if wrong:
                raise ValueError(wrong)
        return self._own_spec

    def _check_like(self, name: str, spec: ArraySpec) -> None:
        like = self._like[name]
        if spec.library != like.library:
            raise TypeError(
                f"the {name} is of {spec.library}, the plan is for {like.library}; "
                f"make a new {self.noun} for it"
            )
        for what in self.alike:
            one, other = (getattr(x, what.removeprefix("memory ")) for x in (spec, like))
            if one != other:
                raise ValueError(
                    f"the {name} has {what} {one}, the plan is for {other}; "
                    f"make a new {self.noun} for it"
                )

    @collective_call
    def _reset(self, operands: Mapping[str, Any], stream: Any) -> None:
        """Execute on these operands from now on. Collective."""

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
        """Raise ValueError unless there is a new operand."""
        if operand is None:
            raise ValueError(
                f"reset_operand needs an array for {name}, not None: to drop the old one, call "
                f"release_operand"
            )

    def _release(self) -> None:
        """Free what the plan holds."""
        self._driver.forget()
        self._driver.performer.release()

    def _release_operands(self) -> None:
        """Drop the references to the operands."""
        self._operands = dict.fromkeys(self._operands)
        self._has_operands = False
        self._driver.forget_public()

    def _set_operands(self, **operands: Any) -> None:
        """Refer to these operands from now on."""
        self._operands.update(operands)
        self._has_operands = True
        self._driver.forget_public()

    @property
    def held(self) -> tuple[Any, ...]:
        """The operands that this object refers to."""
        return tuple([x for x in self._operands.values() if x is not None])

    def _gather(self, method: str, describe: Callable[[], bytes | None]) -> list[bytes]:
        """All ranks' `describe()` for a method. Collective. Raises if this object was freed."""
        self._require_open()

        def described() -> bytes:
            self._require_alive()
            return describe() or b""

        return self.context.gather(f"{self.noun}.{method} #{self.number}", described)

    def _require_open(self) -> None:
        """Raise unless the context is open. Call it before an agreement."""
        try:
            self.context.require_open()
        except RuntimeError:
            self._require_alive()  # what was freed says so, even when its context has ended
            raise

    def _require_alive(self) -> None:
        if self._freed:
            raise self.invalid(f"this {self.noun} was freed; make a new one")

    def _require_ready(self) -> None:
        """Raise unless it can be executed."""
        self._require_alive()
        if not self._planned:
            raise RuntimeError(f"this {self.noun} is not planned yet; call plan() before execute()")
        self._require_operands()

    def _require_operands(self) -> None:
        """Raise unless there are operands."""
        if not self._has_operands:
            raise RuntimeError(
                f"this {self.noun} has no operands: they were released; reset them first"
            )
