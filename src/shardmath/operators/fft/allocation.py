"""Operands whose memory is large enough for the result, so that a transform can be done in place.

A real operand and its complex result differ in size, and so do the parts of different
distributions. An operand from `allocate_operand` has memory of its own, as large as the larger of
the two: a block of the symmetric heap, or ordinary memory of the host for what ranks with GPUs
carry there and back. Only such an operand is extended beyond its own elements.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Sequence
from logging import Logger
from types import ModuleType
from typing import Any, Literal

import numpy as np

from shardmath.arrays import ArraySpec, Library, dtypes, library_of, library_of_package
from shardmath.arrays.base import HostArray
from shardmath.arrays.spec import order_of, packed_strides
from shardmath.collective_call import collective_call
from shardmath.context import Context, require_context
from shardmath.operators.fft.options import FFTDirection, FFTOptions
from shardmath.operators.fft.problem import Problem, check, describe, kind_of
from shardmath.operators.lifecycle import check_logger
from shardmath.symmetric.allocation import array_on, block_of
from shardmath.symmetric.heap import Block, Buffer
from shardmath.untraced import untraced

__all__ = ["allocate_operand", "in_place_array"]

_LOGGER = logging.getLogger(__name__)


@untraced
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
    there, otherwise where it has some. What lies where the ranks compute is on the symmetric heap;
    what lies in host memory while they compute on GPUs is carried there and back by each transform.

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
    made: list[Any] = []

    def allocate() -> None:
        memory = _new_memory(context, nbytes, on_heap=first.device == device.partition(":")[0])
        library = library_of_package(package)
        local = first.source.local_shape(context.rank)
        made.append(array_on(memory, library, dtypes.of(first.dtype), local, packed_strides(local)))

    context.agree("allocate_operand, memory", allocate, lambda _: None)
    (logger or _LOGGER).info("allocated an operand of %d bytes on rank %d", nbytes, context.rank)
    return made[0]


def _place(library: Library, space: str | None, device: str) -> str:
    """The device that the operand lies on, for ranks that compute on `device`.

    Raises ValueError where the library has no arrays there, or the ranks no such memory.
    """
    computes = device.partition(":")[0]
    if space is None:
        space = computes if computes in library.spaces else library.spaces[0]
    if space not in library.spaces:
        names = " or ".join(f'"{each}"' for each in library.spaces)
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
    """The calls that the operand may be for, each described."""
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


def in_place_array(context: Context, operand: Any, problem: Problem) -> Any:
    """The result of a transform in place: the operand, or another array in its memory, which is
    packed in the order of results.

    Raises RuntimeError when the operand's memory is too small for it, or not contiguous.
    """
    library = library_of(operand)
    spec = library.spec(operand)
    shape = problem.target.local_shape(context.rank)
    if (spec.shape, spec.dtype) == (shape, problem.result):
        return operand
    dtype = dtypes.of(problem.result)
    need = math.prod(shape) * dtype.itemsize
    owner, have = _memory_of(context, library, operand, spec)
    if owner is None:
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
    return array_on(owner, library, dtype, shape, packed_strides(shape, axes=problem.order))


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
    """What may be asked of the operand: there may be no transposed slab, and no even or no odd
    result. Raises ValueError, as the default transform does, where nothing may be.
    """
    found: list[Problem] = []
    refused: list[ValueError] = []
    for option in range(len(specs[0])):
        try:
            found.append(check([each[option] for each in specs]))
        except ValueError as error:
            refused.append(error)
    if not found:
        raise refused[0]
    return found


def _bytes(problem: Problem, rank: int) -> int:
    operand = problem.source.local_shape(rank), problem.dtype
    result = problem.target.local_shape(rank), problem.result
    return max(math.prod(shape) * dtypes.of(dtype).itemsize for shape, dtype in (operand, result))


def _new_memory(context: Context, nbytes: int, *, on_heap: bool) -> Buffer | HostArray:
    """Memory for one operand: on the heap, or ordinary memory of the host. Local."""
    if on_heap:
        buffer = context.heap.allocate(nbytes)
        _operand_blocks(context).add(buffer.block)
        return buffer
    memory = np.empty(max(nbytes, 1), np.uint8)  # a byte at least has an address of its own
    _operands_on_host(context)[memory.ctypes.data] = memory
    return memory


def _memory_of(
    context: Context, library: Library, operand: Any, spec: ArraySpec
) -> tuple[object, int]:
    """The memory that was made for the operand, if it starts there, and its bytes; else (None, 0).

    Raises UseAfterFree.
    """
    found = block_of(context, operand)
    if found is not None:
        block, offset = found
        known = offset == 0 and block in _operand_blocks(context)
        return (block.buffer(), block.nbytes) if known else (None, 0)
    if spec.device != "cpu":
        return None, 0
    address = library.pointer(operand) if spec.size else library.anchor(operand)
    memory = _operands_on_host(context).get(address)
    return (None, 0) if memory is None else (memory, memory.nbytes)


def _operand_blocks(context: Context) -> weakref.WeakSet[Block]:
    """The blocks of operands from `allocate_operand`, of one operand each."""
    blocks: weakref.WeakSet[Block] = context.cache("fft operands", weakref.WeakSet)
    return blocks


def _operands_on_host(context: Context) -> weakref.WeakValueDictionary[int, HostArray]:
    """The ordinary memory of operands from `allocate_operand`, by address: what has died has none,
    so whatever starts at an address that is here lies in that memory.
    """
    known: weakref.WeakValueDictionary[int, HostArray]
    known = context.cache("fft operands on the host", weakref.WeakValueDictionary)
    return known
