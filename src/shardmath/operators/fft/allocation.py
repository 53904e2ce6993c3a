"""Operands whose memory is large enough for the result, so that a transform can be done in place.

A real operand and its complex result differ in size, and so do the parts of different
distributions. An operand from `allocate_operand` has memory of its own, as large as the larger of
the two: a block of the symmetric heap, or ordinary memory of the host for an operand that ranks
carry to their GPUs and back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from logging import Logger
from types import ModuleType
from typing import Any, Literal

from shardmath.arrays import ArraySpec, Library, dtypes, library_of_package
from shardmath.arrays.spec import packed_strides
from shardmath.base.collective_call import collective_call
from shardmath.base.log import package_logger
from shardmath.context.context import require_context
from shardmath.handles.allocation import array_on
from shardmath.operators.arguments import check_logger
from shardmath.operators.fft.options import FFTDirection, FFTOptions
from shardmath.operators.fft.problem import Problem, check, describe, kind_of
from shardmath.operators.in_place import room_for_operand


@collective_call
def allocate_operand(
    shape: Sequence[int],
    package: ModuleType,
    *,
    input_dtype: Any = None,
    distribution: Any,
    memory_space: Literal["cpu", "cuda"] | None = None,
    fft_type: Literal["C2C", "C2R", "R2C"] | None = None,
    logger: Logger | None = None,
) -> Any:
    """An uninitialised operand of local `shape`. Collective.

    Its memory has room for the result of the transform over all axes, in the same distribution or
    in the transposed slab, or in the second of a pair: with options.inplace=True the result is
    written there. `package` is the module numpy, torch or cupy; `input_dtype` None means complex64
    for C2C and C2R, otherwise what the package defaults to: float64, or torch's default type.
    `memory_space` is "cpu", "cuda", or None: where the ranks compute, if the package has arrays
    there, otherwise where it has some. An operand where the ranks compute is on the symmetric heap;
    one in host memory, of ranks that compute on GPUs, is carried there and back by each transform.

    Raises on all ranks ValueError for another package or memory space, a dtype that `fft_type`
    rules out, or shapes that do not fit the distribution; HeapExhausted or MemoryError when a rank
    lacks memory. Source: nvmath.distributed.fft.allocate_operand.
    """
    context = require_context()
    device = "cpu" if context.team is None else context.team.device.name

    def requested() -> tuple[Any, ...]:
        check_logger(logger)
        where = _place(library_of_package(package), memory_space, device)
        return _requested(
            tuple(map(int, shape)), package, input_dtype, distribution, fft_type, where
        )

    kinds = context.agree("allocate_operand", requested, _problems)
    first = kinds[0]
    nbytes = max(_bytes(problem, context.rank) for problem in kinds)

    def allocate() -> Any:
        memory = room_for_operand(context, nbytes, on_heap=first.device == device.partition(":")[0])
        library = library_of_package(package)
        local = first.source.local_shape(context.rank)
        return array_on(memory, library, dtypes.of(first.dtype), local, packed_strides(local))

    operand = context.on_all_ranks("allocate_operand, memory", allocate)
    (logger or package_logger()).info(
        "allocated an operand of %d bytes on rank %d", nbytes, context.rank
    )
    return operand


def _place(library: Library, space: str | None, device: str) -> str:
    """The device that the operand lies on, for ranks that compute on `device`.

    Raises ValueError where the library has no arrays there, or the ranks no such memory.
    """
    computes = device.partition(":")[0]
    if space is None:
        space = computes if computes in library.spaces else library.spaces[0]
    if space not in library.spaces:
        names = " or ".join(f'"{name}"' for name in library.spaces)
        raise ValueError(f"memory_space of {library.name} arrays is {names}, not {space!r}")
    if space == "cuda" and computes == "cpu":
        raise ValueError(
            'memory_space "cuda": these ranks compute on cores; initialize with the index of a '
            "CUDA device"
        )
    return device if space == computes else "cpu"


def _requested(
    local: tuple[int, ...],
    package: ModuleType,
    input_dtype: Any,
    distribution: Any,
    fft_type: Any,
    device: str,
) -> tuple[Any, ...]:
    """The descriptions of the calls that the operand may be for."""
    library = library_of_package(package)
    default = "complex64" if fft_type in ("C2C", "C2R") else library.default_dtype()
    dtype = dtypes.of(default if input_dtype is None else input_dtype)
    spec = ArraySpec(library.name, dtype.name, local, packed_strides(local), device, dtype.itemsize)
    kind = kind_of(dtype.name, fft_type)
    direction = FFTDirection.INVERSE if kind == "C2R" else FFTDirection.FORWARD
    return tuple(
        describe(spec, distribution, None, None, kind, direction, options, None)
        for options in (
            FFTOptions(),
            FFTOptions(last_axis_parity="odd"),
            FFTOptions(last_axis_parity="odd", redistribute=False),
        )
    )


def _problems(specs: list[tuple[Any, ...]]) -> list[Problem]:
    """The problems of the calls that are possible: there may be no transposed slab, or no result of
    even or odd extent. Raises the error of the default transform where no call is possible.
    """
    problems: list[Problem] = []
    refused: list[ValueError] = []
    for option in range(len(specs[0])):
        try:
            problems.append(check([spec[option] for spec in specs]))
        except ValueError as error:
            refused.append(error)
    if not problems:
        raise refused[0]
    return problems


def _bytes(problem: Problem, rank: int) -> int:
    operand = problem.source.local_shape(rank), problem.dtype
    result = problem.target.local_shape(rank), problem.result
    return max(math.prod(shape) * dtypes.of(dtype).itemsize for shape, dtype in (operand, result))
