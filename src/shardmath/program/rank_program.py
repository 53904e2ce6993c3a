"""A program as one rank's GPU performs it: steps over arrays that lie in named memories. Pure data.

    operand ── transform ──► work ── move ──► "receive 0" of all ranks ── transform ──► out

Memories are the user's arrays, and memory of the lane. Ranks tell each other where the memories lie
that peers reach.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from typing import Any, Literal

from shardmath.arrays import dtypes
from shardmath.arrays.spec import packed_strides
from shardmath.base.immutable import Immutable
from shardmath.local.gpu import Matrix
from shardmath.program.steps import Memory

USERS = ("operand", "out")  # memories; they begin at the element with index 0 along every axis


class View(Immutable, words="{memory} {dtype} {shape}"):
    """An array in a memory: strides in bytes from the element with index 0 along every axis.

    That element is `offset` bytes into the memory, and `misalignment` is its address modulo 16;
    memory of the lane is aligned to 16 bytes.
    """

    memory: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    misalignment: int = 0
    offset: int = 0

    def part(self, axis: int, first: int, last: int) -> View:
        """The indices first, ..., last - 1 of an axis."""
        step = first * self.strides[axis]
        shape = (*self.shape[:axis], last - first, *self.shape[axis + 1 :])
        return replace(
            self,
            shape=shape,
            offset=self.offset + step,
            misalignment=(self.misalignment + step) % 16,
        )

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return dtypes.of(self.dtype).itemsize

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @classmethod
    def of(cls, memory: str, x: Matrix) -> View:
        """A matrix whose address counts from where the memory begins."""
        strides = x.row_stride * x.itemsize, x.column_stride * x.itemsize
        return cls(memory, (x.rows, x.columns), strides, x.dtype, offset=x.address)

    @cached_property
    def matrix(self) -> Matrix:
        """A view of two axes as a matrix, whose address counts from where the memory begins."""
        (rows, columns), item = self.shape, self.itemsize
        one, two = (stride // item for stride in self.strides)
        return Matrix(self.offset, rows, columns, one, two, self.dtype)

    @property
    def end(self) -> int:
        """The bytes that this array, whose strides are not negative, needs of its memory."""
        if not self.size:
            return self.offset
        last = sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))
        return self.offset + last + self.itemsize


def packed(
    memory: str, shape: Sequence[int], dtype: str, axes: Sequence[int] | Literal["C", "F"] = "C"
) -> View:
    """A view without gaps; `axes` are "C", "F", or all axes from the slowest in memory on."""
    fastest_first = axes if isinstance(axes, str) else axes[::-1]
    strides = packed_strides(shape, dtypes.of(dtype).itemsize, fastest_first)
    return View(memory, tuple(shape), strides, dtype)


def lane_memories(
    views: Iterable[View], users: Collection[str], shared: Collection[str]
) -> dict[str, Memory]:
    """The memories of the lane that hold these views; those of `users` are not the lane's."""
    memories: dict[str, Memory] = {}
    for view in views:
        name = view.memory
        if name not in users:
            nbytes = max(view.end, memories.get(name, Memory(0)).nbytes)
            memories[name] = Memory(nbytes, name in shared)
    return memories


class Copy(Immutable, words="copy {source} to {target.memory}"):
    """Copy the bits of one array to another of the same shape, both on this rank."""

    source: View
    target: View


class Peer(Immutable):
    """A box of a matrix that `rank` shares under this name: rows and columns, each (first, end).

    A `parcel` is (offset, strides) in bytes within the shared memory; without one, the rank tells
    how its matrix lies.
    """

    name: str
    rank: int
    dtype: str
    box: tuple[tuple[int, int], tuple[int, int]]
    parcel: tuple[int, tuple[int, ...]] | None = None


class RankProgram(Immutable):
    """One rank's steps, in order. Steps of `program.steps` name `arrays`; others hold views.

    A `Move` pushes into arrays of its target if peers reach that, and otherwise pulls from its
    source; with `pulls` no move pushes. Ranks tell each other where what is `shared` lies, in this
    order: the first of one rank corresponds to the first of another. A shared name is that of a
    memory, in which arrays of the lane lie without gaps in memory `order`, or one of `told`: an
    array whose strides are told, too, or None if the rank shares nothing. `peers` are matrices of
    other ranks, by name.
    """

    steps: tuple[Any, ...]
    arrays: Mapping[str, View] = field(repr=False)
    memories: Mapping[str, Memory] = field(repr=False, default_factory=dict)
    shared: tuple[str, ...] = ()
    order: Literal["C", "F"] = "C"
    told: Mapping[str, View | None] = field(repr=False, default_factory=dict)
    peers: Mapping[str, Peer] = field(repr=False, default_factory=dict)
    pulls: bool = False

    def pushes(self, target: str) -> bool:
        """Whether a move to that array pushes into what peers share."""
        return not self.pulls and self.shared_name(target) in self.shared

    def shared_name(self, array: str) -> str:
        """The name under which peers reach an array, or its memory, if they do."""
        return array if array in self.shared else self.arrays[array].memory

    def __str__(self) -> str:
        return "\n".join(map(str, self.steps))
