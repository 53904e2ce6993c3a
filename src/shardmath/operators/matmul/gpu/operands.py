"""One rank's arrays of a product, read from its arguments, and the results that they make.

What can be wrong with them on one rank is raised here, before any rank has written anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardmath.context.context import Context
from shardmath.cuda.driver import call
from shardmath.handles import device_array
from shardmath.handles.device_array import Result, ResultTemplate
from shardmath.handles.operand import Operand
from shardmath.local.epilog import INPUTS, Extra, requirements
from shardmath.local.gpu.gemm import Algorithms
from shardmath.operators.lanes import Lane
from shardmath.operators.matmul.gpu.rank_plan import Operands, Scales
from shardmath.operators.matmul.problem import Problem, gradient_layouts
from shardmath.operators.matmul.program import SCALES
from shardmath.operators.matmul.scaling import TENSOR
from shardmath.program.numbers import Numbers, real

__all__ = ["Results", "blanks_of", "made_results", "operands_of"]

# Sums that are faster, or slower, and not the usual.
_FAST_COMPUTE = frozenset({74, 75, 77, 78, 79})
_D = "d"  # among results by name; no epilog's output has that name


@dataclass(frozen=True)
class Results:
    """Where one execution writes: D, and an epilog's outputs by name. The next ones are like
    `templates`, where D has none if it is c.
    """

    d: Result
    extras: Mapping[str, Result]
    templates: Mapping[str, ResultTemplate]

    @property
    def carried(self) -> int:
        """The bytes of a D that is better copied to its place."""
        return self.templates[_D].carried if _D in self.templates else 0

    @property
    def place(self) -> tuple[int, ...]:
        """Where they lie."""
        return self.d.address, *(each.address for each in self.extras.values())

    def give(self, context: Context, stream: int) -> Any:
        """The user's arrays: D, or (D, outputs of the epilog)."""
        out = self.d.give(context, stream)
        if not self.extras:
            return out
        return out, {name: each.give(context, stream) for name, each in self.extras.items()}

    def operands(self, like: Operands, stream: int) -> Operands:
        """The operands of an execution like an earlier one, on `stream`, with these results."""
        outputs = {name: each.array for name, each in self.extras.items()}
        return replace(like, out=self.d.array, outputs=outputs, stream=stream)


def made_results(
    context: Context,
    templates: Mapping[str, ResultTemplate],
    c: Any,
    stream: int,
    lane: Lane | None = None,
) -> Results:
    """New results: D, or c where there is no template for it, and outputs that are zero where
    nothing will be written. Local. Raises HeapExhausted.

    D may be written to memory of the `lane`, and copied.
    """
    extras = {name: template.make() for name, template in templates.items() if name != _D}
    if extras:
        assert context.team is not None, "a context of GPUs"
        context.team.device.activate()  # a thread's first call may be one that comes again
    for each in extras.values():
        nbytes = each.array.size * each.array.itemsize
        if nbytes:
            call("cuMemsetD8Async", each.array.address, 0, nbytes, stream)
    template = templates.get(_D)
    if template is None:
        d = device_array.result_in(context, c, "c")
    else:
        d = template.through(None if lane is None else lane.room(template.carried))
    return Results(d, extras, templates)


def blanks_of(
    context: Context,
    problem: Problem,
    a: Any,
    arrays: Mapping[str, Operand],
    *,
    inplace: bool,
) -> dict[str, ResultTemplate]:
    """How new results of a product of these arrays look: D, unless it is c, in the operands' order
    and memory, and the outputs of the epilog. They are of the library of `a`.
    """

    def like(shape: Sequence[int], dtype: str, order: Any, *, on_heap: bool) -> ResultTemplate:
        return ResultTemplate(context, a, shape, dtype, order, on_heap=on_heap)

    m, n = problem.d.local_shape(context.rank)
    found = {}
    if not inplace:
        column = all(arrays[x].order == "F" for x in (["c"] if "c" in arrays else ["a", "b"]))
        on_heap = all(arrays[x].block is not None for x in ("a", "b", "c") if x in arrays)
        found[_D] = like((m, n), problem.result, "F" if column else "C", on_heap=on_heap)
    made_of = [*requirements(problem.epilog, m, n, problem.extras).outputs]
    if problem.scaling is not None and problem.scaling.amax:
        made_of.append(Extra("result_amax", ((1,),), "float32"))
    for extra in made_of:
        shape = extra.shape
        if extra.name == problem.epilog.makes_bgrad:
            _, _, need = gradient_layouts(problem)
            shape = (need.local_shape(context.rank)[0],)
        found[extra.name] = like(shape, extra.dtype, "F", on_heap=False)
    return found


def operands_of(
    context: Context,
    problem: Problem,
    arrays: Mapping[str, Operand],
    numbers: Numbers,
    results: Results,
    stream: int,
    algorithms: Algorithms,
) -> Operands:
    """The arrays of one execution. Local. Raises HeapExhausted where algorithms are to be timed."""
    out = results.d.array
    inplace = "c" in arrays and arrays["c"].address == out.address
    if algorithms.timings is not None and inplace:
        out = device_array.laid_out_alike(context, out)  # what is timed spoils it
    a, b = (
        arrays[name].transposed() if turned else arrays[name]
        for name, turned in zip("ab", problem.transpose, strict=True)
    )
    alpha, beta = numbers["alpha"], numbers["beta"]
    assert alpha is not None and beta is not None, "they have defaults"
    return Operands(
        a=a,
        b=b,
        c=arrays.get("c"),
        out=out,
        alpha=alpha,
        beta=beta,
        inputs={name: arrays[name] for name in INPUTS if name in arrays},
        outputs={name: each.array for name, each in results.extras.items()},
        stream=stream,
        algorithms=algorithms,
        scales=_scales(context, problem, arrays, numbers),
        compute=problem.compute if problem.compute in _FAST_COMPUTE else None,
    )


def _scales(
    context: Context, problem: Problem, arrays: Mapping[str, Operand], numbers: Numbers
) -> Scales | None:
    """The scales of eight-bit matrices: those of a and b lie as op(A) and op(B)."""
    scaling = problem.scaling
    if scaling is None:
        return None
    whole = (scaling.a == TENSOR, scaling.b == TENSOR, scaling.c, scaling.d)
    found: list[Operand | None] = []
    values = []
    for index, (name, is_whole) in enumerate(zip(SCALES, whole, strict=True)):
        known = numbers[name] is not None and is_whole
        values.append(real(numbers, name) if known else 1.0)
        array = None if known else arrays.get(name)
        if array is None and not known and numbers[name] is not None:  # of one row, in host memory
            one = np.full((1, 1), real(numbers, name), np.float32)
            array = device_array.read(context, one, name)
        if array is not None and index < 2 and problem.transpose[index] and len(array.shape) == 2:
            array = array.transposed()
        found.append(array)
    return Scales(tuple(values), tuple(found))
