"""One rank's arrays of a product, read from its arguments, and the results that they make.

What can be wrong with them on one rank is raised here, before any rank has written anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardmath.arrays import library_of
from shardmath.arrays.base import share_memory
from shardmath.context import Context
from shardmath.cuda import stream as streams
from shardmath.cuda.driver import call
from shardmath.local.epilog import Extra, requirements
from shardmath.local.gpu.gemm import Algorithms
from shardmath.operators.matmul.arguments import Arguments
from shardmath.operators.matmul.gpu.rank_plan import Operands, Scales
from shardmath.operators.matmul.problem import Call, Problem, gradient_layouts
from shardmath.operators.matmul.scaling import scales_in_order
from shardmath.symmetric import device_array
from shardmath.symmetric.device_array import Blank, Result
from shardmath.symmetric.operand import Operand

__all__ = ["Results", "made_results", "read_operands"]

# Sums that are faster, or slower, and not the usual.
_FAST_COMPUTE = frozenset({74, 75, 77, 78, 79})
_D = "d"  # among results by name; no epilog's output has that name


@dataclass(frozen=True)
class Results:
    """Where one execution writes: D, and an epilog's outputs by name. The next ones are like
    `blanks`, where D has none if it is c.
    """

    d: Result
    extras: Mapping[str, Result]
    blanks: Mapping[str, Blank]

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


def made_results(context: Context, blanks: Mapping[str, Blank], c: Any, stream: int) -> Results:
    """New results: D, or c where there is no blank for it, and outputs that are zero where nothing
    will be written. Local. Raises HeapExhausted.
    """
    extras = {name: blank.make() for name, blank in blanks.items() if name != _D}
    if extras:
        assert context.team is not None, "a context of GPUs"
        context.team.device.activate()  # a thread's first call may be one that comes again
    for each in extras.values():
        nbytes = each.array.size * each.array.itemsize
        if nbytes:
            call("cuMemsetD8Async", each.array.address, 0, nbytes, stream)
    d = blanks[_D].make() if _D in blanks else device_array.result_in(context, c, "c")
    return Results(d, extras, blanks)


def read_operands(
    context: Context,
    problem: Problem,
    call_: Call,
    given: Arguments,
    algorithms: Algorithms,
) -> tuple[Operands, Results]:
    """The arrays of one execution, and its results. Local.

    Raises ValueError, UseAfterFree, HeapExhausted; RuntimeError where what is to be timed would be
    captured.
    """
    first = call_.operands[0]
    assert first is not None
    stream = device_array.stream_of(context, first, given.stream)
    if algorithms.timings is not None and streams.capturing(stream):
        raise RuntimeError(
            "plan(autotune=True) waits for its stream, which is being captured into a CUDA "
            "graph; plan before the capture"
        )
    a, b = (device_array.read(context, x, n) for x, n in ((given.a, "a"), (given.b, "b")))
    c = None if given.c is None else device_array.read(context, given.c, "c")
    inputs = {n: device_array.read(context, x, n) for n, x in (given.inputs or {}).items()}
    blanks = _blanks(context, problem, call_, given, (a, b, c))
    results = made_results(context, blanks, given.c, stream)
    out = results.d.array
    if call_.options.inplace:
        _require_apart(given, out, a, b)
        if algorithms.timings is not None:
            out = device_array.laid_out_alike(context, out)  # what is timed spoils it
    alpha, beta = given.scalars()
    compute = call_.options.compute_type
    operands = Operands(
        a=a.transposed() if call_.transpose[0] else a,
        b=b.transposed() if call_.transpose[1] else b,
        c=c,
        out=out,
        alpha=alpha,
        beta=beta,
        inputs=inputs,
        outputs={name: each.array for name, each in results.extras.items()},
        stream=stream,
        algorithms=algorithms,
        scales=_scales(context, problem, call_, given),
        compute=int(compute) if compute in _FAST_COMPUTE else None,
    )
    return operands, results


def _blanks(
    context: Context,
    problem: Problem,
    call_: Call,
    given: Arguments,
    arrays: Sequence[Operand | None],
) -> dict[str, Blank]:
    """How new results look: D, unless it is c, in the operands' order and memory."""

    def like(shape: Sequence[int], dtype: str, order: Any, *, on_heap: bool) -> Blank:
        return Blank(context, given.a, shape, dtype, order, on_heap=on_heap)

    m, n = problem.d.local_shape(context.rank)
    found = {}
    if not call_.options.inplace:
        a, b, c = call_.operands
        assert a is not None and b is not None
        column = c.order == "F" if c is not None else a.order == b.order == "F"
        on_heap = all(x.block is not None for x in arrays if x is not None)
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


def _scales(context: Context, problem: Problem, call_: Call, given: Arguments) -> Scales | None:
    """The scales of eight-bit matrices: those of a and b lie as op(A) and op(B)."""
    scaling = problem.scaling
    if scaling is None:
        return None
    numbers = given.numbers(scaling)
    arrays: list[Operand | None] = []
    for index, (number, scale) in enumerate(
        zip(numbers, scales_in_order(given.scales), strict=True)
    ):
        if number is not None or scale is None:
            arrays.append(None)
            continue
        array = device_array.read(context, scale, f"the scale of {'abcd'[index]}")
        transposed = index < 2 and call_.transpose[index] and len(array.shape) == 2
        arrays.append(array.transposed() if transposed else array)
    return Scales(tuple(1.0 if x is None else x for x in numbers), tuple(arrays))


def _require_apart(given: Arguments, out: Operand, a: Operand, b: Operand) -> None:
    """Raise ValueError when writing to c would change a or b."""
    library = library_of(given.c)
    if library.spec(given.c).device == "cpu":
        target = library.host_view(given.c)
        shared = any(share_memory(target, library.host_view(x)) for x in (given.a, given.b))
    else:
        shared = out.overlaps(a) or out.overlaps(b)
    if shared:
        raise ValueError("c shares memory with a or b, and options.inplace=True overwrites it")
