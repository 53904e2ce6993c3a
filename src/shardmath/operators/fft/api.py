"""The forms of a transform: four functions, and `FFT`, planned once and executed often."""

from __future__ import annotations

from typing import Any, ClassVar, Generic

from shardmath.arrays import Array, library_of
from shardmath.base.collective_call import collective_call, differentiable
from shardmath.base.untraced import untraced_methods
from shardmath.call.agreement import HashedSpec, agree
from shardmath.call.driver import call
from shardmath.call.planned import Planned
from shardmath.context.agreement import require_equal
from shardmath.errors import InvalidFFTState, ShardmathError
from shardmath.geometry import Layout
from shardmath.local.fft import Norm
from shardmath.operators.fft.operation import FFT_OF_ANY_KIND, OPERATIONS
from shardmath.operators.fft.options import FFTDirection, Options
from shardmath.program.performing import Arguments, Plan, Turn


@differentiable
def fft(
    operand: Array,
    /,
    *,
    distribution: Any = None,
    sync_symmetric_memory: bool = True,
    options: Options = None,
    stream: Any = None,
    axes: Any = None,
    norm: Norm = None,
    out: Any = None,
) -> Array:
    """The Fourier transform of a complex array that is split across ranks. Collective.

        y = fft(x, distribution=Slab.X)

    `operand` is this rank's part: complex64, complex128 or torch's complex32, any strides, in
    ordinary memory or on the symmetric heap; it is left as it was. `distribution` says which part
    that is, or is a pair of distributions, of operand and result: boxes (each rank's own) or any
    others. A DistributedArray gives one, and `distribution` is then that of the result. `axes` are
    transformed, by default all; the others are batches. The axis of a vector is transformed on one
    rank. `norm` None scales neither direction; "backward", "ortho" and "forward" are NumPy's.
    `sync_symmetric_memory` is accepted for programs written for nvmath.distributed: agreement
    orders the ranks anyway.

    On GPUs the call puts its work on `stream`, by default the array library's current one, and
    returns; for an operand in host memory it returns when the work is done. It can be captured in a
    CUDA graph, whose replays need the workspace that the context had then.

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
    words = _words(distribution, axes, norm)
    made: Array = call(OPERATIONS["fft"], Arguments((operand,), (out,), words, options, stream))
    return made


@differentiable
def ifft(
    operand: Array,
    /,
    *,
    distribution: Any = None,
    sync_symmetric_memory: bool = True,
    options: Options = None,
    stream: Any = None,
    axes: Any = None,
    norm: Norm = None,
    out: Any = None,
) -> Array:
    """The inverse of `fft`. Collective.

    Not divided by the number of elements, unless `norm` says so. Arguments and errors as `fft`.
    Source: nvmath.distributed.fft.ifft.
    """
    words = _words(distribution, axes, norm)
    made: Array = call(OPERATIONS["ifft"], Arguments((operand,), (out,), words, options, stream))
    return made


@differentiable
def rfft(
    operand: Array,
    /,
    *,
    distribution: Any = None,
    sync_symmetric_memory: bool = True,
    options: Options = None,
    stream: Any = None,
    axes: Any = None,
    norm: Norm = None,
    out: Any = None,
) -> Array:
    """The transform of a real array; the last of `axes` is halved, n // 2 + 1. Collective.

    float32 gives complex64, float64 complex128. float16 and bfloat16 are computed in float32 and
    give complex64; float16 tensors give complex32 with options.halves=True. Else as `fft`;
    RuntimeError for a complex operand. A box of the operand does not fit the result: give a pair
    of boxes. Source: nvmath.distributed.fft.rfft.
    """
    words = _words(distribution, axes, norm)
    made: Array = call(OPERATIONS["rfft"], Arguments((operand,), (out,), words, options, stream))
    return made


@differentiable
def irfft(
    operand: Array,
    /,
    *,
    distribution: Any = None,
    sync_symmetric_memory: bool = True,
    options: Options = None,
    stream: Any = None,
    axes: Any = None,
    norm: Norm = None,
    out: Any = None,
) -> Array:
    """The inverse of `rfft`: a real array from a hermitian one. Collective.

    The last of `axes` has m hermitian elements, and 2 (m - 1) real ones in the result, or one more
    with options.last_axis_parity="odd". Else as `ifft`. Source: nvmath.distributed.fft.irfft.
    """
    words = _words(distribution, axes, norm)
    made: Array = call(OPERATIONS["irfft"], Arguments((operand,), (out,), words, options, stream))
    return made


@untraced_methods
class FFT(Planned, Generic[Array]):
    """A transform that is planned once and executed many times. Collective to make.

        with FFT(x, distribution=Slab.X) as transform:
            transform.plan()
            y = transform.execute(direction="forward")

    The kind of transform is that of the operand's dtype, or `options.fft_type`; arguments and
    errors otherwise as `fft`. All methods but `reset_operand_unchecked`, `release_operand`, `free`
    and `explain` are collective: an error on one rank is raised on all. After `free` they raise
    InvalidFFTState, a RuntimeError. Source: nvmath.distributed.fft.FFT.
    """

    noun: ClassVar[str] = "FFT"
    alike: ClassVar[tuple[str, ...]] = ("memory space", "dtype", "ndim")
    invalid: ClassVar[type[ShardmathError]] = InvalidFFTState

    def __init__(
        self,
        operand: Array,
        /,
        *,
        distribution: Any,
        options: Options = None,
        stream: Any = None,
        axes: Any = None,
        norm: Norm = None,
    ) -> None:
        words = _words(distribution, axes, norm)
        super().__init__(FFT_OF_ANY_KIND, Arguments((operand,), (None,), words, options, stream))

    @property
    def input_layout(self) -> Layout:
        """Which part of the operand every rank holds."""
        layout: Layout = self._plan.problem.source
        return layout

    @property
    def output_layout(self) -> Layout:
        """Which part of the result every rank holds."""
        layout: Layout = self._plan.problem.target
        return layout

    def plan(self, *, stream: Any = None) -> None:  # type: ignore[override]  # as nvmath's
        """Prepare for `execute`; a second call does nothing. Collective."""
        super().plan(stream)

    @collective_call
    def execute(
        self,
        *,
        direction: FFTDirection | int | str | None = None,
        stream: Any = None,
        release_workspace: bool = False,
        sync_symmetric_memory: bool = True,
        out: Any = None,
    ) -> Array:
        """The transform of the operand: `out`, or what `fft` returns. Collective.

        `direction` None is forward, except for C2R, which only has an inverse. With
        `release_workspace` the object's workspace is freed. Raises RuntimeError before `plan`
        and after `release_operand`, ValueError for a direction that the transform does not have.
        """
        words = (*self._words[:3], direction)
        made: Array = self._execute((out,), stream, words, release_workspace=release_workspace)
        return made

    @collective_call
    def reset_operand(
        self, operand: Array, *, distribution: Any = None, stream: Any = None
    ) -> None:
        """Execute on `operand` from now on; `distribution` None keeps the present one. Collective.

        Strides, memory and distribution may differ from before. Raises ValueError for None and for
        another dtype or global shape, TypeError for another library.
        """
        held = self._words[0] if distribution is None else distribution
        words = (held, *self._words[1:])
        self._require_open()

        def described() -> Turn:
            self._require_alive()
            self._require_given("operand", operand)
            arguments = Arguments((operand,), (None,), words, self._options, stream)
            return self._described(arguments, self._execution_spec)

        _, agreement, _ = agree(
            self.context, f"{self.noun}.reset_operand", described, self._similar_plan
        )
        self._plan, self._words = agreement.plan, words
        self._set_operands(operand=operand)

    def reset_operand_unchecked(
        self, operand: Array, *, distribution: Any = None, stream: Any = None
    ) -> None:
        """Execute on `operand` from now on; the next `execute` finds what is wrong. Local."""
        self._require_alive()
        self._set_operands(operand=operand)
        if distribution is not None:
            self._words = (distribution, *self._words[1:])

    def release_operand(self) -> None:
        """Drop the reference to the operand; then `reset_operand` must come first. Local."""
        self._require_alive()
        self._release_operands()

    def _release(self) -> None:
        if self.context.team is None:  # on GPUs it is the workspace of all transforms
            super()._release()

    # -- executions agree on the whole description: the operand may lie differently each time ------

    def _execution_spec(self, arguments: Arguments) -> HashedSpec:
        (operand,) = arguments.operands
        self._check_like("operand", library_of(operand, "the operand").spec(operand))
        return self._spec_as(self._driver.spec(arguments))

    def _spec_as(self, described: HashedSpec) -> HashedSpec:
        return HashedSpec((self.number, described.spec))

    def _agreed_plan(self, specs: list[Any]) -> Plan:
        require_equal(f"the {self.noun} object", [number for number, _ in specs])
        return self._driver.build([description for _, description in specs])

    def _similar_plan(self, specs: list[Any]) -> Plan:
        """The plan of these specs, if it is for the same global array as the present one."""
        plan = self._agreed_plan(specs)
        given, expected = (one.problem.source.global_shape for one in (plan, self._plan))
        if given != expected:
            raise ValueError(f"the operand has global shape {given}, the plan is for {expected}")
        return plan


def _words(distribution: Any, axes: Any, norm: Any) -> tuple[Any, ...]:
    """The words of a call in no direction. Lists become tuples, by which calls are recognised."""
    held, chosen = (tuple(x) if type(x) is list else x for x in (distribution, axes))
    return held, chosen, norm, None
