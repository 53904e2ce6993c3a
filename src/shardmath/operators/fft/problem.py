"""The transform that all ranks have agreed on, from the description of each rank's call. Pure.

`describe` turns one rank's call into plain data, and raises for what that rank alone can see is
wrong. `check` turns all ranks' descriptions into one `Problem`, or raises the same error on every
rank where they do not fit together.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from shardmath import geometry
from shardmath.arrays import ArraySpec, dtypes, library_named
from shardmath.base.immutable import Immutable
from shardmath.context.agreement import require_equal
from shardmath.errors import BindDistributionError
from shardmath.geometry import Distribution, Layout, Slab
from shardmath.local.fft import ADJOINTS, COMPLETING, HALVING, Kind, Norm, keeps_shape
from shardmath.local.trigonometric import SERIES
from shardmath.operators.facts import ArrayFacts, agreed_facts, require_fits
from shardmath.operators.fft.options import COMPARED, FFTDirection, FFTOptions
from shardmath.operators.layouts import bind_layout, infer_layout, result_order

_NORMS = (None, "backward", "ortho", "forward")


class Problem(Immutable):
    """The transform that all ranks have agreed on.

    `source` and `target` are the layouts of operand and result. Of the transformed `axes`, real
    transforms change the length of the last. `order` is the memory order of results, `device` the
    memory of operands: "cpu" or "cuda". `half_precision`: R2C of float16 gives complex32.
    `blocking`: a call returns when the result is there.
    """

    kind: Kind
    direction: FFTDirection
    norm: Norm
    axes: tuple[int, ...]
    source: Layout
    target: Layout
    library: str
    device: str
    dtype: str
    order: Literal["C", "F"]
    inplace: bool
    half_precision: bool = False
    blocking: bool = False

    @property
    def result(self) -> str:
        """The name of the result's type."""
        if self.kind in HALVING:
            return "complex32" if self.half_precision else dtypes.of(self.dtype).complex
        if self.kind in SERIES:
            return dtypes.accumulator(self.dtype).name
        return dtypes.of(self.dtype).real if self.kind in COMPLETING else self.dtype

    @property
    def widened(self) -> Problem:
        """This problem with its dtypes replaced by ones that the FFT libraries of cores support."""
        if self.kind in SERIES:
            return replace(self, dtype=self.result)
        if "complex32" not in (self.dtype, self.result):
            return self
        dtype = "complex64" if self.dtype == "complex32" else self.dtype
        return replace(self, dtype=dtype, half_precision=False)

    def __str__(self) -> str:
        axes = ", ".join(map(str, self.axes))
        fourier = f"fft {self.kind} {self.direction.name.lower()}"
        return (
            f"{self.kind if self.kind in SERIES else fourier}, norm {self.norm}, axes {axes}, "
            f"{self.library} {self.dtype} -> {self.result}\n"
            f"  from {self.source}\n"
            f"    to {self.target}"
        )


# (operand, input distribution, output distribution or None, axes, norm, kind, direction, options,
# out, local shape of an adjoint's result), where an array is ArrayFacts.
Description = tuple[Any, ...]


def describe(
    operand: ArraySpec,
    distribution: Any,
    axes: Any,
    norm: Any,
    kind: Kind,
    direction: FFTDirection,
    options: FFTOptions,
    out: ArraySpec | None,
    result_shape: tuple[int, ...] | None = None,
) -> Description:
    """The call in plain data. Raises ValueError, or TypeError for a distribution that is none."""
    given, wanted = _distribution_pair(distribution)
    for side in (given, wanted):
        if side is not None and side.ndim not in (None, operand.ndim):
            raise ValueError(
                f"distribution: {side!r} has ndim {side.ndim}, the operand has ndim {operand.ndim}"
            )
    if norm not in _NORMS:
        raise ValueError(f'norm is None, "backward", "ortho" or "forward", not {norm!r}')
    if options.inplace and out is not None:
        raise ValueError(
            "options.inplace=True writes to the operand: pass no out=, or inplace=False"
        )
    if options.halves:
        _require_complex32(operand)
    return (
        ArrayFacts.of(operand),
        given.encode(),
        None if wanted is None else wanted.encode(),
        _axes(axes, operand.ndim),
        norm,
        kind,
        int(direction),
        options.compared(),
        None if out is None else ArrayFacts.of(out),
        result_shape,
    )


def _distribution_pair(distribution: Any) -> tuple[Distribution, Distribution | None]:
    """(input, output) of a distribution, whose output is None, or of a pair of them.

    Raises ValueError for a sequence of another length, TypeError for anything else.
    """
    if isinstance(distribution, Distribution):
        return distribution, None
    if isinstance(distribution, Sequence) and not isinstance(distribution, str):
        if len(distribution) != 2:
            raise ValueError(
                f"distribution is one, or a pair (input, output), not {len(distribution)}"
            )
        if all(isinstance(one, Distribution) for one in distribution):
            return distribution[0], distribution[1]
    raise TypeError(
        "distribution is one such as Slab.X, or a pair such as (Box, Box) for input and output, "
        f"not {distribution!r}"
    )


def kind_of(dtype: str, asked: str | None) -> Kind:
    """The kind of transform of an operand of `dtype`; `asked` is options.fft_type.

    Raises ValueError when there is none, or when it is not the one asked for.
    """
    known = require_transformed(dtype)
    natural: Kind = "R2C" if known.complex else "C2C"
    if asked is None:
        return natural
    if (asked == "R2C") != (natural == "R2C"):
        instead = "call rfft, or pass x + 0j" if natural == "R2C" else "take its real part"
        raise ValueError(
            f"the operand has dtype {dtype}, which a {asked} transform does not take: {instead}"
        )
    return asked


def require_transformed(dtype: str) -> dtypes.DType:
    """The type of that name. Raises ValueError where there are no transforms of it."""
    known = dtypes.of(dtype)
    if not (known.complex or known.real):
        names = ", ".join(dtypes.names(lambda row: row.complex or row.real))
        raise ValueError(
            f"the operand has dtype {dtype}; transforms take {names}{dtypes.advice(dtype)}"
        )
    return known


def check(descriptions: Sequence[Description]) -> Problem:
    """The problem that all ranks' descriptions make. Raises ValueError where they do not fit."""
    operands, inputs, outputs, axes, norms, kinds, directions, options, outs, results = zip(
        *descriptions, strict=True
    )
    facts = agreed_facts("the operand", operands)
    for what, values in (
        ("the kind of transform", kinds),
        ("direction", directions),
        ("axes", axes),
        ("norm", norms),
        *zip((f"options.{name}" for name in COMPARED), zip(*options, strict=True), strict=True),
        ("whether a pair of distributions is given", [output is not None for output in outputs]),
    ):
        require_equal(what, values)
    source = infer_layout("distribution", inputs, [x.shape for x in facts])
    agreed = dict(zip(COMPARED, options[0], strict=True))
    if kinds[0] in ADJOINTS:
        target = _result_of_adjoint(source, outputs, results, axes[0], kinds[0])
    else:
        shape = _result_shape(source.global_shape, axes[0], kinds[0], agreed["last_axis_parity"])
        if outputs[0] is None:
            wanted = _default_output(inputs, source, axes[0], kinds[0], agreed["redistribute"])
        else:
            wanted = outputs
        target = bind_layout("the result's distribution", wanted, shape)
    first = facts[0]
    problem = Problem(
        kind=kinds[0],
        direction=FFTDirection(directions[0]),
        norm=norms[0],
        axes=tuple(axes[0]),
        source=source,
        target=target,
        library=first.library,
        device=first.space,
        dtype=first.dtype,
        order=result_order([x.order for x in facts]),
        inplace=agreed["inplace"],
        half_precision=agreed["halves"],
        blocking=agreed["blocking"] is True,
    )
    for rank, out in enumerate(outs):
        if out is not None:
            result = first._replace(dtype=problem.result, shape=target.local_shape(rank))
            require_fits(rank, out, result)
    return problem


def _require_complex32(operand: ArraySpec) -> None:
    """Raise ValueError for an operand whose transform cannot be complex32."""
    if not library_named(operand.library).offers("complex32"):
        raise ValueError(
            f"options.halves=True asks for complex32, which {operand.library} does not have: use "
            "torch tensors, or leave it out for complex64"
        )
    if operand.dtype not in ("float16", "complex32"):
        raise ValueError(
            f"options.halves=True takes float16 and complex32, and the operand has dtype "
            f"{operand.dtype}"
        )


def _axes(axes: Any, ndim: int) -> tuple[int, ...]:
    """The axes to transform, none negative. Raises ValueError for anything else than axes."""
    if ndim == 0:
        raise ValueError("the operand has no axes; a transform needs at least one")
    if axes is None:
        return tuple(range(ndim))
    try:
        listed = [operator.index(axes)] if hasattr(axes, "__index__") else list(axes)
        numbers = [operator.index(axis) for axis in listed]
    except TypeError:
        raise ValueError(f"axes is None, an axis or a sequence of axes, not {axes!r}") from None
    chosen = tuple(axis + ndim if axis < 0 else axis for axis in numbers)
    if not chosen or not all(0 <= axis < ndim for axis in chosen):
        raise ValueError(f"axes {axes!r} are not axes of an operand of {ndim} axes")
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"axes {axes!r} name an axis twice")
    return chosen


def _result_shape(
    shape: tuple[int, ...], axes: Sequence[int], kind: Kind, parity: str
) -> tuple[int, ...]:
    for axis in axes:
        if shape[axis] == 0:
            raise ValueError(f"axis {axis} of the global shape {shape} is empty: no transform")
        if kind in SERIES and not SERIES[kind].period(shape[axis]):
            raise ValueError(
                f"axis {axis} of the global shape {shape} has extent 1: a DCT of type 1 takes 2"
            )
    last, result = axes[-1], list(shape)
    if kind == "R2C":
        result[last] = shape[last] // 2 + 1
    elif kind == "C2R":
        result[last] = 2 * (shape[last] - 1) + (parity == "odd")
        if result[last] == 0:
            raise ValueError(
                f"axis {last} of the global shape {shape} has hermitian length 1, from which no "
                'real axis of even length comes; use last_axis_parity="odd"'
            )
    return tuple(result)


def _result_of_adjoint(
    source: Layout, outputs: Sequence[Any], shapes: Sequence[Any], axes: Sequence[int], kind: Kind
) -> Layout:
    """The layout of the operand of the transform whose adjoint this is."""
    target = infer_layout("the result's distribution", outputs, shapes)
    real, halved = (source, target) if kind in HALVING else (target, source)
    if _result_shape(real.global_shape, axes, "R2C", "") != halved.global_shape:
        raise ValueError(
            f"{kind}: global shapes {source.global_shape} of the operand and "
            f"{target.global_shape} of the result do not belong to one transform"
        )
    return target


def _default_output(
    inputs: Sequence[Any], source: Layout, axes: Sequence[int], kind: Kind, redistribute: bool
) -> Sequence[Any]:
    """The output's distributions, encoded, where only those of the input are given."""
    given = [geometry.decode(distribution) for distribution in inputs]
    if any(distribution.per_rank for distribution in given):
        if not keeps_shape(kind):
            raise BindDistributionError(
                f"distribution: a box of the operand does not fit a {kind} result; give a pair of "
                "boxes (input, output)"
            )
        return inputs
    if redistribute or not set(source.partitioned_axes) & set(axes):
        return [(*distribution.encode()[:-1], None) for distribution in given]
    split = _slab_axis(source)
    if split is None or source.ndim == 1:
        raise BindDistributionError(
            f"distribution: redistribute=False gives the transposed slab of a slab; {given[0]!r} "
            "has none: give a pair of distributions (input, output)"
        )
    return [Slab(1 if split == 0 else 0).encode()] * len(inputs)


def _slab_axis(layout: Layout) -> int | None:
    """The axis along which the layout is a slab; None if it is no slab."""
    for axis in layout.partitioned_axes:
        if layout.same_as(Layout.slab(layout.global_shape, layout.size, axis=axis)):
            return axis
    return None
