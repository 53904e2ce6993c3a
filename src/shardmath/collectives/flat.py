"""Contiguous elements on a GPU: what the kernels of collectives read and write.

Of an operand in host memory they are a copy on the heap, which is copied back at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from shardmath.arrays import DType, Library, library_of
from shardmath.arrays.dtypes import of as dtype_of
from shardmath.arrays.dtypes import to_numpy
from shardmath.collectives.operand import Shape
from shardmath.cuda.driver import call
from shardmath.cuda.kernel import ReadyLaunch
from shardmath.symmetric.heap import Buffer

if TYPE_CHECKING:
    from shardmath.symmetric.team import Team

__all__ = ["DirectLaunch", "Flat", "Launch", "is_numpy"]

# Of the addresses of an operand and a result; the stream. What was put there, None for nothing.
Launch = Callable[[int, int, int], ReadyLaunch | None]


@dataclass(frozen=True)
class DirectLaunch:
    """The one launch of a call, with its addresses; `launch` takes any others, `ready` was put.

    `in_place`: the result may lie where the operand does.
    """

    source: int
    target: int
    launch: Launch
    in_place: bool
    ready: ReadyLaunch | None


class Owner(Protocol):
    """The operand whose elements, or whose result's, lie on the GPU."""

    @property
    def library(self) -> Library:
        """What its arrays are of."""
        ...

    @property
    def on_host(self) -> bool:
        """Whether it is in host memory."""
        ...

    @property
    def team(self) -> Team:
        """The ranks' GPUs."""
        ...


class Flat:
    """Elements in C order on the GPU, as an array of the operand's library or as a buffer."""

    def __init__(self, operand: Owner, memory: Any, dtype: DType, shape: Shape) -> None:
        self._operand = operand
        self._memory = memory
        self._dtype = dtype
        self._shape = shape
        self.pointer: int = (
            memory.block.address if isinstance(memory, Buffer) else operand.library.pointer(memory)
        )

    @property
    def end(self) -> int:
        """The address after the last element."""
        return self.pointer + prod(self._shape) * self._dtype.itemsize

    def array(self) -> Any:
        """Its elements: of the library, or of NumPy for operands in host memory, after waiting."""
        if not self._operand.on_host:
            return self._memory
        host = np.empty(self._shape, to_numpy(self._dtype))
        self._operand.team.synchronize(0)
        if host.nbytes:
            call("cuMemcpyDtoH", host.ctypes.data, self.pointer, host.nbytes)
        return host

    def cast_to(self, dtype: str) -> Flat:
        """These elements, in another type when they are read."""
        known = dtype_of(dtype)
        if known == self._dtype:
            return self
        return _Cast(self, known)


class _Cast(Flat):
    def __init__(self, flat: Flat, dtype: DType) -> None:
        self._wide, self._as = flat, dtype

    def array(self) -> Any:
        array = self._wide.array()
        return library_of(array).cast(array, self._as)


def is_numpy(x: Any) -> bool:
    """Whether `x` is in host memory as NumPy has it."""
    return isinstance(x, np.ndarray)
