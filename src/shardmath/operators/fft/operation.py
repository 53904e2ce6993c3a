"""A Fourier transform as an operation: description, check, program and explanation. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardmath.arrays import ArraySpec, dtypes
from shardmath.context.context import Context
from shardmath.geometry import Layout
from shardmath.local.fft import HALVING, Kind
from shardmath.local.trigonometric import Series
from shardmath.machine import Machine
from shardmath.operators.fft.options import FFTDirection, FFTOptions, direction_of
from shardmath.operators.fft.passes import cores_steps
from shardmath.operators.fft.problem import (
    Description,
    Problem,
    check,
    describe,
    kind_of,
    require_transformed,
)
from shardmath.operators.fft.strategy import ON_GPUS, ON_GPUS_OF_HOSTS, choose
from shardmath.program.performing import Names, Performer
from shardmath.program.steps import Fused, Program, SplitArray, Step


class FourierTransform:
    """The operation of a function, or of objects, where the operand's type decides on the `kind`.

    Its words are (distribution or pair of them, axes, norm, direction or None).
    """

    options = FFTOptions

    def __init__(
        self, name: str, kind: Kind | None = None, direction: FFTDirection | None = None
    ) -> None:
        self.names = Names(name, ("operand",), ("out",))
        self._kind, self._direction = kind, direction

    def describe(
        self, arrays: Mapping[str, ArraySpec | None], words: tuple[Any, ...], options: FFTOptions
    ) -> Description:
        """See `problem.describe`. Raises RuntimeError for `rfft` of a complex operand, too."""
        operand, (distribution, axes, norm, direction) = arrays["operand"], words
        assert operand is not None, "required"
        kind = self._kind_of(operand.dtype, options)
        way = self._direction_of(kind, direction)
        return describe(operand, distribution, axes, norm, kind, way, options, arrays["out"])

    check = staticmethod(check)

    def operands(self, problem: Problem) -> Mapping[str, Layout]:
        """See Operation."""
        return {"operand": problem.source}

    def program(self, problem: Problem, machine: Machine, rank: int) -> Program:
        """On cores, passes over memory; on GPUs, one fused step for all stages. The same on all
        ranks.
        """
        steps: tuple[Step, ...]
        workspace: dict[str, SplitArray] = {}
        if machine.kind == "cpu":
            steps, workspace = cores_steps(choose(problem.widened), problem)
        else:
            from shardmath.operators.fft.lowering import GPUPlan

            model = ON_GPUS_OF_HOSTS if machine.multi_host else ON_GPUS
            steps = (Fused(GPUPlan(problem, choose(problem, model), machine.hosts)),)
        results = {"out": SplitArray(problem.target, problem.result, problem.order)}
        in_place = {"out": "operand"} if problem.inplace else {}
        return Program(steps, results, workspace, blocking=problem.blocking, in_place=in_place)

    def explain(self, problem: Problem, machine: Machine) -> str:
        """The strategy with predicted bytes and times, and the program."""
        program = self.program(problem, machine, 0)
        if machine.kind == "cuda":
            return str(program)
        return f"{choose(problem.widened)}\n{program}"

    def on_gpus(self, context: Context, names: Names, *, kept: bool) -> Performer:
        """The class that performs these programs there."""
        from shardmath.operators.fft.gpus import GPUTransforms

        return GPUTransforms(context, names, kept=kept)

    def _kind_of(self, dtype: str, options: FFTOptions) -> Kind:
        asked = options.fft_type
        if self._kind is None:
            return kind_of(dtype, asked)
        if asked not in (None, self._kind):
            raise ValueError(f"options.fft_type is {asked}, and the call is {self._kind}")
        if self._kind == "R2C" and dtypes.of(dtype).real:
            raise RuntimeError(f"the operand has dtype {dtype}; rfft takes a real one: call fft")
        return kind_of(dtype, self._kind)

    def _direction_of(self, kind: Kind, direction: Any) -> FFTDirection:
        only = {"R2C": FFTDirection.FORWARD, "C2R": FFTDirection.INVERSE}.get(kind)
        if direction is None:
            return self._direction or only or FFTDirection.FORWARD
        given = direction_of(direction)
        if only not in (None, given):
            raise ValueError(f"a {kind} transform has no direction {given.name}")
        return given


class AdjointTransform(FourierTransform):
    """The operation of the adjoint of `rfft` or `irfft`, which computes its gradient.

    Its words are (pair of distributions, axes, norm, local shape of the result): that of `rfft` has
    an even or an odd extent, which the operand does not tell.
    """

    def describe(
        self, arrays: Mapping[str, ArraySpec | None], words: tuple[Any, ...], options: FFTOptions
    ) -> Description:
        """See `problem.describe`."""
        operand, (distribution, axes, norm, shape) = arrays["operand"], words
        assert operand is not None and self._kind is not None, "required"
        require_transformed(operand.dtype)
        direction = FFTDirection.FORWARD if self._kind in HALVING else FFTDirection.INVERSE
        given = operand, distribution, axes, norm, self._kind, direction, options
        return describe(*given, arrays["out"], shape)


class TrigonometricTransform(FourierTransform):
    """The operation of `dct`, `dst`, an inverse or an adjoint, also along several axes.

    Its words are (distribution or pair of them, axes, norm, type, orthogonalize, extents). The
    inverse of type II is type III, and the other way round, with the scale of the other direction.
    """

    def describe(
        self, arrays: Mapping[str, ArraySpec | None], words: tuple[Any, ...], options: FFTOptions
    ) -> Description:
        """See `problem.describe`. Raises NotImplementedError for extents other than the array's."""
        operand, (distribution, axes, norm, number, orthogonalize, extents) = (
            arrays["operand"],
            words,
        )
        assert operand is not None, "required"
        name = self.names.operation
        if type(number) is not int or not 1 <= number <= 4:
            raise ValueError(f"type of {name} is 1, 2, 3 or 4, not {number!r}")
        if orthogonalize not in (None, True, False):
            raise ValueError(f"orthogonalize is None, True or False, not {orthogonalize!r}")
        if extents is not None:
            raise NotImplementedError(
                f"{name} pads and cuts, by n or s, only a DistributedArray: make one of the parts, "
                "shardmath.array(part, distribution)"
            )
        if options.fft_type or options.halves:
            raise ValueError(f"{name} takes no options.fft_type and options.halves: leave them out")
        require_transformed(operand.dtype)
        orthogonal = norm == "ortho" if orthogonalize is None else bool(orthogonalize)
        scale: Any = "backward" if norm is None else norm
        if name.startswith("i"):
            number = {2: 3, 3: 2}.get(number, number)
            scale = {"backward": "forward", "forward": "backward"}.get(scale, scale)
        function, _, adjoint = name.removeprefix("i").partition("_")
        kind = Series(function, number, orthogonal, bool(adjoint)).kind
        given = operand, distribution, axes, scale, kind, FFTDirection.FORWARD, options
        return describe(*given, arrays["out"])


TRIGONOMETRIC = ("dct", "idct", "dct_adjoint", "dst", "idst", "dst_adjoint")
FFT_OF_ANY_KIND = FourierTransform("FFT")
OPERATIONS = {
    "fft": FourierTransform("fft", "C2C", FFTDirection.FORWARD),
    "ifft": FourierTransform("ifft", "C2C", FFTDirection.INVERSE),
    "rfft": FourierTransform("rfft", "R2C", FFTDirection.FORWARD),
    "irfft": FourierTransform("irfft", "C2R", FFTDirection.INVERSE),
    "rfft_adjoint": AdjointTransform("rfft_adjoint", "adjoint R2C"),
    "irfft_adjoint": AdjointTransform("irfft_adjoint", "adjoint C2R"),
    **{name: TrigonometricTransform(name) for name in TRIGONOMETRIC},
}
