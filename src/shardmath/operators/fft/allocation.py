"""Operands whose memory is large enough for the result, so that a transform can be done in place.

A real operand and its complex result differ in size, and so do the parts of different
distributions. An operand from `allocate_operand` has a block of the symmetric heap of its own, as
large as the larger of the two; only such an operand is extended beyond its own elements.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from logging import Logger
from types import ModuleType
from typing import Any, Literal

from shardmath.arrays import ArraySpec, dtypes, library_of, library_of_package
from shardmath.arrays.spec import order_of, packed_strides
from shardmath.collective_call import collective_call
from shardmath.context import Context, require_context
from shardmath.operators.fft.options import FFTDirection, FFTOptions
from shardmath.operators.fft.problem import Problem, check, describe, kind_of
from shardmath.symmetric.allocation import array_on, block_of
from shardmath.symmetric.heap import Block

__all__ = ["allocate_operand", "in_place_array"]


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
    """An uninitialised operand of local `shape` on the symmetric heap. Collective.

    Its memory has room for the result of the transform over all axes, in the same distribution or
    in the transposed slab, or in the second of a pair: with options.inplace=True the result is
    written there. `package` is the module numpy or torch, on GPUs torch or cupy; `input_dtype` None
    means float32 for R2C, otherwise complex64. `memory_space` is None, or where the ranks compute:
    "cpu" or "cuda".

    Raises on all ranks ValueError for another package or memory space, a dtype that `fft_type`
    rules out, or shapes that do not fit the distribution; HeapExhausted when a rank lacks memory.
    Source: nvmath.distributed.fft.allocate_operand.
    """
    context = require_context()
    device = "cpu" if context.team is None else context.team.device.name

    def requested() -> tuple[Any, ...]:
        space = device.partition(":")[0]
        if memory_space not in (None, space):
            raise ValueError(f'memory_space is "{space}" on these ranks, not {memory_space!r}')
        return _requested(
            tuple(map(int, shape)), package, input_dtype, distribution, fft_type, device
        )

    kinds = context.agree("allocate_operand", requested, _problems)
    first = kinds[0]
    nbytes = max(_bytes(problem, context.rank) for problem in kinds)
    made: list[Any] = []

    def allocate() -> None:
        buffer = context.heap.allocate(nbytes)
        library = library_of_package(package)
        local = first.source.local_shape(context.rank)
        made.append(array_on(buffer, library, dtypes.of(first.dtype), local, packed_strides(local)))
        _operand_blocks(context).add(buffer.block)

    context.agree("allocate_operand, memory", allocate, lambda _: None)
    if logger is not None:
        logger.info("allocated an operand of %d bytes on rank %d", nbytes, context.rank)
    return made[0]


def _requested(
    local: tuple[int, ...],
    package: ModuleType,
    input_dtype: Any,
    distribution: Any,
    fft_type: Any,
    device: str,
) -> tuple[Any, ...]:
    """The calls that the operand may be for, each described."""
    library = library_of_package(package)
    if device != "cpu" and library.name == "numpy":
        raise ValueError("numpy has no arrays on GPUs; there, package is torch or cupy")
    dtype = dtypes.of(_default_dtype(fft_type) if input_dtype is None else input_dtype)
    spec = ArraySpec(library.name, dtype.name, local, packed_strides(local), device, dtype.itemsize)
    kind = kind_of(dtype.name, fft_type)
    direction = FFTDirection.INVERSE if kind == "C2R" else FFTDirection.FORWARD
    return tuple(
        describe(spec, distribution, None, None, kind, direction, options, None)
        for options in (
            FFTOptions(last_axis_parity="odd"),
            FFTOptions(last_axis_parity="even"),
            FFTOptions(last_axis_parity="odd", redistribute=False),
        )
    )


def in_place_array(context: Context, operand: Any, problem: Problem) -> Any:
    """The result of a transform in place: the operand, or another array in its memory.

    Raises RuntimeError when the operand's memory is too small for it, or not contiguous.
    """
    library = library_of(operand)
    spec = library.spec(operand)
    shape = problem.target.local_shape(context.rank)
    if (spec.shape, spec.dtype) == (shape, problem.result):
        return operand
    found = block_of(context, operand)
    owner: object = None
    dtype = dtypes.of(problem.result)
    need = math.prod(shape) * dtype.itemsize
    if found is not None and found[1] == 0 and found[0] in _operand_blocks(context):
        have, owner = found[0].nbytes, found[0].buffer()
    else:
        if order_of(spec.shape, spec.strides) == "strided":
            raise RuntimeError(
                f"options.inplace=True: the operand, of strides {spec.strides}, is not contiguous, "
                f"and the result has another shape, {shape}; use an operand from "
                "allocate_operand, or inplace=False"
            )
        have = spec.nbytes
    if need > have:
        raise RuntimeError(
            f"options.inplace=True: the result takes {need:,} bytes, the operand has {have:,}; use "
            "an operand from allocate_operand, or inplace=False"
        )
    if owner is None:
        owner = _RawMemory(library.pointer(operand), have, spec.device, operand)
    return array_on(owner, library, dtype, shape, packed_strides(shape))


class _RawMemory:
    """The memory of an array as bytes, for the array interfaces of hosts and GPUs; keeps the array.

    `device` is "cpu" or like "cuda:0".
    """

    def __init__(self, address: int, nbytes: int, device: str, keep: object) -> None:
        self.keep = keep
        self.device = device
        interface = "__array_interface__" if device == "cpu" else "__cuda_array_interface__"
        vars(self)[interface] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def _problems(specs: list[tuple[Any, ...]]) -> list[Problem]:
    """What may be asked of the operand: there may be no transposed slab, or no even result."""
    found: list[Problem] = []
    for option in range(len(specs[0])):
        try:
            found.append(check([each[option] for each in specs]))
        except ValueError:
            if option == 0:
                raise
    return found


def _bytes(problem: Problem, rank: int) -> int:
    operand = problem.source.local_shape(rank), problem.dtype
    result = problem.target.local_shape(rank), problem.result
    return max(math.prod(shape) * dtypes.of(dtype).itemsize for shape, dtype in (operand, result))


def _operand_blocks(context: Context) -> weakref.WeakSet[Block]:
    """The blocks of operands from `allocate_operand`, of one operand each."""
    blocks: weakref.WeakSet[Block] = context.cache("fft operands", weakref.WeakSet)
    return blocks


def _default_dtype(fft_type: str | None) -> str:
    return "float32" if fft_type == "R2C" else "complex64"
