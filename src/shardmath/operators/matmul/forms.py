"""The two forms of a matrix product: `matmul`, one call, and `Matmul`, planned once.

Both read their arguments inside the agreement, so that a mistake on one rank is raised on all. The
function reuses the plan of an earlier call that looked the same on every rank; an object keeps its
own plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal, overload

from shardmath.arrays import Array, library_of
from shardmath.base.collective_call import collective_call, differentiable, require_function
from shardmath.base.untraced import untraced_methods
from shardmath.call.agreement import HashedSpec, agree
from shardmath.call.driver import call
from shardmath.call.planned import Planned
from shardmath.context.agreement import checked, require_equal
from shardmath.errors import InvalidMatmulState, ShardmathError
from shardmath.geometry import Distribution
from shardmath.local.epilog import MatmulEpilog
from shardmath.operators.matmul.description import Description, arguments_of, place_of
from shardmath.operators.matmul.operation import MATMUL, given_results
from shardmath.operators.matmul.options import MatmulOptions, MatmulPlanPreferences
from shardmath.operators.matmul.problem import check_operands
from shardmath.operators.matmul.scaling import merged
from shardmath.operators.workspace import give_back
from shardmath.program.performing import Arguments, Plan, Turn

_E = MatmulEpilog
_WithOutputs = Literal[
    _E.RELU_AUX,
    _E.RELU_AUX_BIAS,
    _E.GELU_AUX,
    _E.GELU_AUX_BIAS,
    _E.DRELU_BGRAD,
    _E.DGELU_BGRAD,
    _E.BGRADA,
    _E.BGRADB,
]
_SCALES, _INPUTS = "quantization_scales", "epilog_inputs"


@overload
def matmul(
    a: Array,
    b: Any,
    /,
    c: Any = None,
    *,
    distributions: Sequence[Distribution] | None = None,
    alpha: Any = None,
    beta: Any = None,
    epilog: _WithOutputs,
    epilog_inputs: Mapping[str, Any] | None = None,
    qualifiers: Any = None,
    quantization_scales: Any = None,
    options: MatmulOptions | Mapping[str, Any] | None = None,
    preferences: MatmulPlanPreferences | Mapping[str, Any] | None = None,
    stream: Any = None,
) -> tuple[Array, dict[str, Array]]: ...


@overload
def matmul(
    a: Array,
    b: Any,
    /,
    c: Any = None,
    *,
    distributions: Sequence[Distribution] | None = None,
    alpha: Any = None,
    beta: Any = None,
    epilog: Any = None,
    epilog_inputs: Mapping[str, Any] | None = None,
    qualifiers: Any = None,
    quantization_scales: Any = None,
    options: MatmulOptions | Mapping[str, Any] | None = None,
    preferences: MatmulPlanPreferences | Mapping[str, Any] | None = None,
    stream: Any = None,
) -> Array: ...


@differentiable
def matmul(
    a: Any,
    b: Any,
    /,
    c: Any = None,
    *,
    distributions: Sequence[Distribution] | None = None,
    alpha: Any = None,
    beta: Any = None,
    epilog: Any = None,
    epilog_inputs: Mapping[str, Any] | None = None,
    qualifiers: Any = None,
    quantization_scales: Any = None,
    options: MatmulOptions | Mapping[str, Any] | None = None,
    preferences: MatmulPlanPreferences | Mapping[str, Any] | None = None,
    stream: Any = None,
) -> Any:
    """F(alpha op(a) @ op(b) + beta c), where F is the epilog. Collective.

        y = matmul(x, w, distributions=[Slab.X, Slab.Y, Slab.X])

    a (m, k), b (k, n) and c (m, n) are this rank's parts of global matrices, in any order or
    strides, on the symmetric heap or not. `distributions` are those of a, b and the result, in any
    combination; c is split as the result. They are left out where all operands are
    DistributedArrays, which know theirs; the result is one, too. `qualifiers` (an array of
    `matrix_qualifiers_dtype` for a, b, c) transposes or conjugates a and b. float16, bfloat16,
    float32, float64, complex64 and complex128 are summed in at least float32. alpha is 1 by
    default; beta has no default, and c requires it. `MatmulEpilog` lists the epilogs with their
    inputs and outputs.

    float8_e4m3fn and float8_e5m2, at most one operand of the latter, take `quantization_scales`
    (see MatmulQuantizationScales), which also scales a float8 result. The result has the type that
    `options.result_type` names, by default that of c, or of a without c. A number too large for a
    float8 result becomes the greatest that it can hold.

    Returns this rank's part of the result, in the library of a, on the heap if all operands are;
    with an epilog that has outputs, or options.result_amax, (result, dictionary of outputs by
    name).

    Raises, on every rank, ValueError or TypeError for arguments that are wrong on one rank or do
    not fit together (CollectiveMismatch, a ValueError, where ranks differ), UseAfterFree for a
    freed operand, RuntimeError before `initialize`; c is then as it was.
    Source: nvmath.distributed.linalg.advanced.matmul.
    """
    arguments = arguments_of(
        a,
        b,
        c,
        distributions=distributions,
        alpha=alpha,
        beta=beta,
        qualifiers=qualifiers,
        quantization_scales=quantization_scales,
        options=options,
        epilog=epilog,
        epilog_inputs=epilog_inputs,
        preferences=preferences,
        stream=stream,
    )
    return given_results(call(MATMUL, arguments))


@untraced_methods
class Matmul(Planned):
    """A matrix product that is planned once and executed many times. Collective to make.

        with Matmul(a, b, distributions=[Slab.X, Slab.Y, Slab.X]) as product:
            product.plan()
            d = product.execute()

    The arguments are those of `matmul`; an epilog is given to `plan`. The object refers to its
    operands: the next `execute` sees what has been written into them, and `reset_operands` replaces
    them by others of the same library, dtype and shape. As a context manager the object is freed at
    the end.

    Errors are raised on every rank, as by `matmul`; InvalidMatmulState, a RuntimeError, after
    `free`. Source: nvmath.distributed.linalg.advanced.Matmul.
    """

    noun: ClassVar[str] = "Matmul"
    invalid: ClassVar[type[ShardmathError]] = InvalidMatmulState
    keeps_workspace = False  # all objects share that of the context

    @collective_call
    def __init__(
        self,
        a: Any,
        b: Any,
        /,
        c: Any = None,
        *,
        distributions: Sequence[Distribution],
        alpha: Any = None,
        beta: Any = None,
        qualifiers: Any = None,
        quantization_scales: Any = None,
        options: MatmulOptions | Mapping[str, Any] | None = None,
        stream: Any = None,
    ) -> None:
        self._asked: dict[str, Any] = {
            "distributions": distributions,
            "qualifiers": qualifiers,
            "options": options,
            "alpha": alpha,
            "beta": beta,
        }
        operands = {"a": a, "b": b, "c": c, _SCALES: quantization_scales, _INPUTS: None}
        arguments = arguments_of(**operands, **self._asked, stream=stream)
        super().__init__(MATMUL, arguments)
        self._kept: Arguments | None = None  # the arguments of the next execution, if known
        self._description: Description = self._driver.spec(arguments).spec
        self._operands = operands
        self._plans = 0

    def _build(self, specs: list[Any]) -> None:
        """Compare the operands alone: the epilog comes with `plan`."""
        check_operands(specs)

    @collective_call
    def plan(  # type: ignore[override]
        self,
        *,
        preferences: MatmulPlanPreferences | Mapping[str, Any] | None = None,
        epilog: Any = None,
        epilog_inputs: Mapping[str, Any] | None = None,
        stream: Any = None,
        autotune: bool = False,
    ) -> None:
        """Agree on how to compute, with an epilog and its inputs if given. Collective.

        With `autotune`, the same on all ranks, the algorithms that cuBLASLt proposes on GPUs are
        timed on the operands, which stay as they are. This plan keeps the fastest, and `explain`
        lists them; ranks with the same product choose the same one. Timing waits for the stream. A
        further call plans anew.

        Raises ValueError or TypeError on every rank, as `matmul` does.
        """

        def described() -> bytes:
            self._require_operands()
            return bytes([bool(autotune)])

        told = self._gather("plan", described)
        same = partial(require_equal, "autotune")
        tunes = checked(self.context.board, same, [text == b"\1" for text in told])
        asked = {"epilog": epilog, "preferences": preferences}
        arguments = self._arguments(epilog_inputs=epilog_inputs, stream=stream, **asked)
        turn, agreement, _ = agree(
            self.context, "matmul", self._described, self._driver.build, arguments
        )
        plan: Plan = agreement.plan
        if tunes:
            plan = self._tuned(arguments, plan)
        self._asked.update(asked)
        self._set_operands(epilog_inputs=epilog_inputs)
        self._description, self._planned = turn.spec.spec, True
        self._plans += 1
        self._own_spec = HashedSpec((self.number, self._plans))
        self._use(plan, self._own_spec)

    def _tuned(self, arguments: Arguments, plan: Plan) -> Plan:
        """A copy of the plan whose products have been timed on the arguments. Collective.

        On cores there is nothing to choose: the plan itself is returned.
        """
        context, driver = self.context, self._driver
        if context.team is None:
            return plan
        from shardmath.operators.matmul import gpu

        def ready() -> Turn:
            known = driver.known(arguments, driver.spec)
            return Turn(arguments, known)

        assert isinstance(driver.performer, gpu.Products)
        own, operation = replace(plan, kept={}), f"Matmul.plan #{self.number}"
        timed = gpu.tuned(context, driver.performer, operation, ready, own)
        explain = partial(MATMUL.explain, plan.problem, driver.machine, timed)
        return replace(own, explain=explain)

    def explain(self) -> str:
        """The chosen strategy, its steps, predicted bytes, flops and time, and the alternatives.

        Local. Raises RuntimeError before `plan`.
        """
        self._require_alive()
        if not self._planned:
            raise RuntimeError("this Matmul is not planned yet; call plan() before explain()")
        return super().explain()

    @collective_call
    def execute(self, *, release_workspace: bool = False, stream: Any = None) -> Any:
        """The product, as `matmul` returns it; a new result each time, or c if in place.
        Collective.

        `release_workspace` frees the workspace that the context keeps for operations.
        """
        result = given_results(self._execute((), stream, release_workspace=False))
        if release_workspace:
            require_function()
            give_back(self.context)
        return result

    @collective_call
    def reset_operands(
        self,
        *,
        a: Any = None,
        b: Any = None,
        c: Any = None,
        alpha: Any = None,
        beta: Any = None,
        quantization_scales: Any = None,
        epilog_inputs: Mapping[str, Any] | None = None,
        stream: Any = None,
    ) -> None:
        """Use other operands, of the same library, dtype and shape, from now on. Collective.

        Operands that are None stay; after `release_operands` all arrays must be given. Strides may
        differ. Raises ValueError (TypeError for another library) on every rank, and then changes
        nothing.
        """
        given = self._given(a, b, c, alpha, beta, quantization_scales, epilog_inputs)

        def described() -> None:
            if not given:
                raise ValueError("reset_operands was given nothing to reset")
            changed = {**given, _SCALES: merged(given.get(_SCALES), self._operands[_SCALES])}
            self._require_complete(given)
            self._require_same_library(given)
            arguments = self._arguments(**changed, stream=stream)
            self._driver.known(self._brief(arguments), lambda _: self._fitting(arguments))

        self._gather("reset_operands", described)
        self._take(given)

    def reset_operands_unchecked(
        self,
        *,
        a: Any = None,
        b: Any = None,
        c: Any = None,
        alpha: Any = None,
        beta: Any = None,
        quantization_scales: Any = None,
        epilog_inputs: Mapping[str, Any] | None = None,
        stream: Any = None,
    ) -> None:
        """Execute on these operands from now on; `execute` raises what does not fit. Local."""
        self._require_alive()
        self._take(self._given(a, b, c, alpha, beta, quantization_scales, epilog_inputs))

    def release_operands(self) -> None:
        """Drop the references to all arrays; `reset_operands` must be given all of them. Local."""
        self._require_alive()
        self._release_operands()

    def _execution_spec(self, arguments: Arguments) -> HashedSpec:
        return self._fitting(self._arguments())

    def _fitting(self, arguments: Arguments) -> HashedSpec:
        """The spec of an execution. Raises ValueError unless the plan is for such a call."""
        self._require_alike(self._driver.spec(arguments).spec)
        return self._own_spec

    def _execution_arguments(
        self, results: tuple[Any, ...], stream: Any, words: tuple[Any, ...]
    ) -> Arguments:
        """See Planned. The plan has taken the words in."""
        if self._kept is None or self._operands[_SCALES] is not None:  # scales may change in place
            self._kept = self._brief(self._arguments())
        return self._kept if stream is None else self._kept._replace(stream=stream)

    def _brief(self, arguments: Arguments) -> Arguments:
        """The arguments that an execution of the latest plan still looks at: arrays, numbers, and
        the words about them.
        """
        return arguments._replace(words=(self._plans, *arguments.words[3:-1]), options=None)

    def _set_operands(self, **operands: Any) -> None:
        super()._set_operands(**operands)
        self._kept = None

    def _release_operands(self) -> None:
        super()._release_operands()
        self._kept = None

    def _arguments(self, **changes: Any) -> Arguments:
        return arguments_of(**{**self._operands, **self._asked, **changes})

    def _take(self, given: Mapping[str, Any]) -> None:
        self._asked.update({name: given[name] for name in ("alpha", "beta") if name in given})
        held = {name: x for name, x in given.items() if name in self._operands}
        if _SCALES in held:
            held[_SCALES] = merged(held[_SCALES], self._operands[_SCALES])
        self._set_operands(**held)

    @staticmethod
    def _given(*values: Any) -> dict[str, Any]:
        names = ("a", "b", "c", "alpha", "beta", _SCALES, _INPUTS)
        pairs = zip(names, values, strict=True)
        return {name: value for name, value in pairs if value is not None}

    def _require_complete(self, given: Mapping[str, Any]) -> None:
        if "c" in given and not self._description.has_c:
            raise ValueError("c is given, and this Matmul was made without c")
        if self._has_operands:
            return
        first = self._description
        optional = {"c": first.has_c, _INPUTS: first.inputs, _SCALES: first.scales}
        needed = ["a", "b", *(name for name, was_given in optional.items() if was_given)]
        missing = [name for name in needed if name not in given]
        if missing:
            raise ValueError(
                f"the operands were released; reset_operands needs {', '.join(missing)} too"
            )

    def _require_same_library(self, given: Mapping[str, Any]) -> None:
        expected = self._description.operands[0][0]
        for name in sorted({"a", "b", "c"} & set(given)):
            place = place_of(library_of(given[name], name).spec(given[name]))
            if place != expected:
                raise TypeError(f"{name} is {place}; this Matmul was made for {expected}")

    def _require_alike(self, later: Description) -> None:
        """Raise ValueError unless operands of a later call can replace those of the plan."""
        first = self._description
        if later is first:
            return
        for name, new, old in zip("abc", later.operands, first.operands, strict=True):
            if new != old:
                raise ValueError(
                    f"{name} has dtype {new[1]} and shape {new[2]}; this Matmul was made for "
                    f"{old[1]} and {old[2]}"
                )
        if later.scales != first.scales:
            raise ValueError(
                f"quantization_scales are {later.scales}; this Matmul was made for {first.scales}"
            )
        new_inputs = [(name, fact[:3]) for name, fact in later.inputs]
        if new_inputs != [(name, fact[:3]) for name, fact in first.inputs]:
            raise ValueError(
                f"epilog_inputs are {new_inputs}; this Matmul was planned for {first.inputs}"
            )
