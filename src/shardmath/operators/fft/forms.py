"""The forms of a transform: four functions, and `FFT`, planned once and executed often.

All read their arguments inside the agreement that a call begins with, so a mistake on one rank is
raised on all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from shardmath.agreement import require_equal
from shardmath.arrays import ArraySpec
from shardmath.call.agreement import HashedSpec, agree_plan
from shardmath.collective_call import collective_call
from shardmath.context import require_context
from shardmath.errors import InvalidFFTState, ShardmathError
from shardmath.geometry import Layout
from shardmath.local.fft import Kind, Norm
from shardmath.lru_cache import LRUCache
from shardmath.operators.fft.call import CachedTransform, Call, execute, make_plan, spec_of
from shardmath.operators.fft.options import FFTDirection, FFTOptions
from shardmath.operators.lifecycle import Lifecycle, check_stream
from shardmath.operators.workspace import give_back
from shardmath.untraced import untraced, untraced_methods

if TYPE_CHECKING:
    from shardmath.operators.fft.host import Plan
    from shardmath.operators.fft.rank_plan import DevicePlan

__all__ = ["FFT", "fft", "ifft", "irfft", "rfft"]

_MAX_SPECS = 16  # of calls of one object

Options = FFTOptions | dict[str, Any] | None


@untraced
@collective_call
def fft(
    operand: Any,
    /,
    *,
    distribution: Any,
    sync_symmetric_memory: bool = True,
    options: Options = None,
    stream: Any = None,
    axes: Any = None,
    norm: Norm = None,
    out: Any = None,
) -> Any:
    """The Fourier transform of a complex array that is split across ranks. Collective.

        y = fft(x, distribution=Slab.X)

    `operand` is this rank's part: complex64, complex128 or torch's complex32, any strides, in
    ordinary memory or on the symmetric heap; it is left as it was. `distribution` says which part,
    or is a pair that says it of operand and result: boxes (each rank's own) or any others. `axes`
    are transformed, by default all; the others are batches. A single axis of an array that has no
    other is transformed on one rank. `norm` None scales neither direction; "backward", "ortho" and
    "forward" are NumPy's. `sync_symmetric_memory` is accepted for programs written for
    nvmath.distributed: agreement orders the ranks anyway.

    On GPUs the work is put on `stream`, by default the array library's current one, and the call
    returns when it is there; for an operand in host memory it returns when all is done. It can be
    captured in a CUDA graph, whose replays need the workspace that the context had then.

    Returns this rank's part of the result: `out` if given, which may be the operand, and otherwise
    a new array of the operand's library, in its memory order, and on the heap if the operand is
    there. It is in the operand's distribution, unless the options or a pair say otherwise.

    Raises the same on all ranks, before an element is written. ValueError: a real operand; library,
    dtype, axes, norm or options differ between ranks; an unknown norm or axis; an empty transformed
    axis; local shapes do not fit the distribution; `out` does not fit. TypeError: a
    distribution, an option or a stream that is not one. RuntimeError: before `initialize`, after
    the array was freed, or when an operand in place is too small for the result.
    Source: nvmath.distributed.fft.fft; `axes`, `norm`, `out` and pairs of distributions are ours.
    """
    call = Call(operand, distribution, axes, norm, options, stream, out=out)
    return _transform("fft", call)


@untraced
@collective_call
def ifft(
    operand: Any,
    /,
    *,
    distribution: Any,
    sync_symmetric_memory: bool = True,
    options: Options = None,
    stream: Any = None,
    axes: Any = None,
    norm: Norm = None,
    out: Any = None,
) -> Any:
    """The inverse of `fft`. Collective.

    Not divided by the number of elements, unless `norm` says so. Arguments and errors as `fft`.
    Source: nvmath.distributed.fft.ifft.
    """
    call = Call(operand, distribution, axes, norm, options, stream, out=out)
    return _transform("ifft", call)


@untraced
@collective_call
def rfft(
    operand: Any,
    /,
    *,
    distribution: Any,
    sync_symmetric_memory: bool = True,
    options: Options = None,
    stream: Any = None,
    axes: Any = None,
    norm: Norm = None,
    out: Any = None,
) -> Any:
    """The transform of a real array; the last of `axes` is halved, n // 2 + 1. Collective.

    float32 gives complex64, float64 complex128. float16 and bfloat16 are computed in float32 and
    give complex64; float16 tensors give complex32 with options.halves=True. Else as `fft`;
    RuntimeError for a complex operand. A box of the operand does not fit the result: give a pair
    of boxes. Source: nvmath.distributed.fft.rfft.
    """
    call = Call(operand, distribution, axes, norm, options, stream, out=out)
    return _transform("rfft", call)


@untraced
@collective_call
def irfft(
    operand: Any,
    /,
    *,
    distribution: Any,
    sync_symmetric_memory: bool = True,
    options: Options = None,
    stream: Any = None,
    axes: Any = None,
    norm: Norm = None,
    out: Any = None,
) -> Any:
    """The inverse of `rfft`: a real array from a hermitian one. Collective.

    The last of `axes` has m hermitian elements, and 2 (m - 1) real ones in the result, or one more
    with options.last_axis_parity="odd". Else as `ifft`. Source: nvmath.distributed.fft.irfft.
    """
    call = Call(operand, distribution, axes, norm, options, stream, out=out)
    return _transform("irfft", call)


_FUNCTIONS: dict[str, tuple[Kind, FFTDirection]] = {
    "fft": ("C2C", FFTDirection.FORWARD),
    "ifft": ("C2C", FFTDirection.INVERSE),
    "rfft": ("R2C", FFTDirection.FORWARD),
    "irfft": ("C2R", FFTDirection.INVERSE),
}


def _transform(name: str, call: Call) -> Any:
    context = require_context()
    call.kind, call.direction = _FUNCTIONS[name]
    plan, notes = agree_plan(
        context,
        name,
        lambda: (call.describe(context).spec, call.note(context)),
        lambda specs: make_plan(context, tuple(specs)),
    )
    call.log(context, plan)
    return execute(context, plan, notes, call)


@untraced_methods
class FFT(Lifecycle):
    """A transform that is planned once and executed many times. Collective to make.

        with FFT(x, distribution=Slab.X) as transform:
            transform.plan()
            y = transform.execute(direction="forward")

    The kind of transform is that of the operand's dtype, or `options.fft_type`; arguments and
    errors otherwise as `fft`. All methods but `reset_operand_unchecked`, `release_operand`, `free`
    and `explain` are collective: an error on one rank is raised on all. After `free` they raise
    InvalidFFTState, a RuntimeError.
    Source: nvmath.distributed.fft.FFT.
    """

    noun: ClassVar[str] = "FFT"
    invalid: ClassVar[type[ShardmathError]] = InvalidFFTState

    @collective_call
    def __init__(
        self,
        operand: Any,
        /,
        *,
        distribution: Any,
        options: Options = None,
        stream: Any = None,
        axes: Any = None,
        norm: Norm = None,
    ) -> None:
        context = require_context()
        self._fixed = {"options": options, "axes": axes, "norm": norm}
        call = Call(operand=operand, distribution=distribution, stream=stream, **self._fixed)
        self._plan: Plan | DevicePlan
        self._plan, _ = agree_plan(
            context,
            self.noun,
            lambda: (call.describe(context).spec, call.note(context)),
            lambda specs: make_plan(context, tuple(specs)),
        )
        super().__init__(context, {"operand": operand, "distribution": distribution})
        self._specs: LRUCache[CachedTransform, HashedSpec] = LRUCache(_MAX_SPECS)
        self._checked: ArraySpec | None = None  # the operand of the last execution
        call.log(context, self._plan)

    @property
    def input_layout(self) -> Layout:
        """Which part of the operand every rank holds."""
        return self._plan.problem.source

    @property
    def output_layout(self) -> Layout:
        """Which part of the result every rank holds."""
        return self._plan.problem.target

    def explain(self) -> str:
        """The steps, predicted bytes and times, and the passes over memory. Local."""
        return self._plan.explain()

    @collective_call
    def plan(self, *, stream: Any = None) -> None:
        """Prepare for `execute`; a second call does nothing. Collective."""
        self._gather("plan", lambda: check_stream(stream))
        self._planned = True

    @collective_call
    def execute(
        self,
        *,
        direction: FFTDirection | int | str | None = None,
        stream: Any = None,
        release_workspace: bool = False,
        sync_symmetric_memory: bool = True,
        out: Any = None,
    ) -> Any:
        """The transform of the operand: `out`, or what `fft` returns. Collective.

        `direction` None is forward, except for C2R, which only has an inverse. With
        `release_workspace` the context frees the workspace that it keeps for operations. Raises
        RuntimeError before `plan` and after `release_operand`, ValueError for a direction that the
        transform does not have.
        """
        calls: list[Call] = []

        def described() -> tuple[HashedSpec, bytes]:
            self._require_ready()
            call = self._call(stream=stream, direction=direction, out=out)
            self._check(call.spec)
            calls.append(call)
            return self._spec(call.describe(self.context)), call.note(self.context)

        self._require_open()
        plan, notes = agree_plan(self.context, f"{self.noun}.execute", described, self._make_plan)
        try:
            return execute(self.context, plan, notes, calls[0])
        finally:
            if release_workspace:
                give_back(self.context)

    @collective_call
    def reset_operand(self, operand: Any, *, distribution: Any = None, stream: Any = None) -> None:
        """Execute on `operand` from now on; `distribution` None keeps the present one. Collective.

        Strides, memory and distribution may differ from before. Raises ValueError for None and for
        another dtype or global shape, TypeError for another library.
        """
        held = self._operands["distribution"] if distribution is None else distribution

        def described() -> tuple[HashedSpec, bytes]:
            self._require_alive()
            if operand is None:
                raise ValueError(
                    "reset_operand needs an operand; release_operand drops the old one"
                )
            self._check(spec_of(operand, "operand"))
            call = self._call(operand=operand, distribution=held, stream=stream)
            return self._spec(call.describe(self.context)), b""

        self._require_open()
        plan, _ = agree_plan(
            self.context, f"{self.noun}.reset_operand", described, self._make_similar_plan
        )
        self._plan = plan
        self._set_operands(operand=operand, distribution=held)

    def reset_operand_unchecked(
        self, operand: Any, *, distribution: Any = None, stream: Any = None
    ) -> None:
        """As `reset_operand`, without agreement: `execute` finds what is wrong. Local."""
        self._require_alive()
        self._set_operands(operand=operand)
        if distribution is not None:
            self._set_operands(distribution=distribution)

    def release_operand(self) -> None:
        """Drop the reference to the operand; then `reset_operand` must come first. Local."""
        self._require_alive()
        held = self._operands["distribution"]
        self._release_operands()
        self._operands["distribution"] = held

    def _call(self, **changes: Any) -> Call:
        return Call(**{**self._operands, **self._fixed, "kind": None, **changes})

    def _spec(self, cached: CachedTransform) -> HashedSpec:
        """This object, and a call of it, for agreement."""
        return self._specs.made(cached, lambda: HashedSpec((self.number, cached.description)))

    def _check(self, spec: ArraySpec) -> None:
        """Raise unless arrays like this can take the place of the operand."""
        if spec is self._checked:
            return
        problem = self._plan.problem
        if spec.library != problem.library:
            raise TypeError(f"the operand is of {spec.library}, the plan is for {problem.library}")
        given = (spec.space, spec.dtype, spec.ndim)
        expected = (problem.device, problem.dtype, problem.source.ndim)
        names = ("device", "dtype", "number of axes")
        for what, one, other in zip(names, given, expected, strict=True):
            if one != other:
                raise ValueError(f"the operand has {what} {one}, the plan is for {other}")
        self._checked = spec

    def _make_plan(self, specs: list[Any]) -> Plan | DevicePlan:
        require_equal("the FFT object", [number for number, _ in specs])
        return make_plan(self.context, tuple(description for _, description in specs))

    def _make_similar_plan(self, specs: list[Any]) -> Plan | DevicePlan:
        """The plan of these specs, if it is for the same global array as the present one."""
        plan = self._make_plan(specs)
        given, expected = (each.problem.source.global_shape for each in (plan, self._plan))
        if given != expected:
            raise ValueError(f"the operand has global shape {given}, the plan is for {expected}")
        return plan
