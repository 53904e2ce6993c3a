"""What each rank says of its arrays in a move on GPUs, and what all conclude from it.

Pure, and the same on every rank: from the same notes all choose to push or to pull, and know who
lacks memory.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, Self

from shardmath.arrays.spec import packed_strides
from shardmath.program.steps import Move, Program
from shardmath.redistribution import Exposed, TransferPlan

__all__ = [
    "Note",
    "OneMove",
    "ResultLayout",
    "pulls",
    "ranks_without_staging",
    "staging_strides",
]

_ALLOCATES, _RESULT_ON_HEAP, _MADE_C, _MADE_F = 1, 2, 4, 8
_HEAD = struct.Struct("<B4H")  # flags, and the bytes of each part

ResultLayout = tuple[tuple[int, ...], Literal["C", "F"]]  # the shape and order of a new result


@dataclass(frozen=True)
class OneMove:
    """A program that is one move, as GPUs see it: into a result of that dtype and memory order."""

    operation: str
    transfer: TransferPlan
    dtype: str
    order: Literal["C", "F"]
    blocking: bool

    @classmethod
    def of(cls, program: Program, operation: str) -> Self:
        """The template of a program's one move: GPUs perform no other program so far."""
        (move,) = (step for step in program.steps if isinstance(step, Move))
        result = program.results[move.target]
        return cls(operation, move.transfer, result.dtype, result.order, program.blocking)


@dataclass(frozen=True)
class Note:
    """What a rank says of its arrays in one execution: where they are, if they are on the heap.

    `staging` is heap memory for a result in ordinary memory. `allocates`: the result is still to be
    made, on the heap or not. `made`: it was made in expectation of the plan of the last such call.
    """

    operand: Exposed | None
    result: Exposed | None
    staging: Exposed | None
    allocates: bool
    on_heap: bool
    made: ResultLayout | None

    @staticmethod
    def packed(
        operand: bytes,
        result: bytes,
        staging: bytes,
        *,
        allocates: bool,
        on_heap: bool,
        made: ResultLayout | None,
    ) -> bytes:
        """The bytes that `unpack` takes; places are packed already, b"" where there is none."""
        flags, shape = _ALLOCATES * allocates + _RESULT_ON_HEAP * on_heap, b""
        if made is not None:
            flags += _MADE_C if made[1] == "C" else _MADE_F
            shape = struct.pack(f"<{len(made[0])}q", *made[0])
        sizes = len(operand), len(result), len(staging), len(shape)
        return b"".join((_HEAD.pack(flags, *sizes), operand, result, staging, shape))

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """What a peer packed."""
        flags, *lengths = _HEAD.unpack_from(data)
        at = _HEAD.size
        parts: list[bytes] = []
        for length in lengths:
            parts.append(data[at : at + length])
            at += length
        *places, shape = parts
        operand, result, staging = (Exposed.unpack(each) if each else None for each in places)
        made: ResultLayout | None = None
        if flags & (_MADE_C | _MADE_F):
            extents = struct.unpack(f"<{len(shape) // 8}q", shape)
            made = extents, "C" if flags & _MADE_C else "F"
        return cls(
            operand, result, staging, bool(flags & _ALLOCATES), bool(flags & _RESULT_ON_HEAP), made
        )

    def lacks_result(self, made: ResultLayout) -> bool:
        """Whether the result is still to be made: there is none, or it is not like `made`."""
        return self.allocates or self.made not in (None, made)

    @property
    def place(self) -> Exposed | None:
        """Where peers push to."""
        return self.result if self.on_heap else self.staging


def pulls(transfer: TransferPlan, notes: Sequence[Note]) -> bool:
    """Whether ranks pull: some result cannot be pushed to, and all operands can be read."""
    sent, received = transfer.traffic
    pushed_to = all(note.on_heap or not n for note, n in zip(notes, received, strict=True))
    read_from = all(note.operand or not n for note, n in zip(notes, sent, strict=True))
    return not pushed_to and read_from


def ranks_without_staging(move: OneMove, notes: Sequence[Note]) -> list[int]:
    """The ranks that need staging, where not all of them have it; else none."""
    transfer = move.transfer
    if pulls(transfer, notes):
        return []
    received = transfer.received
    staged = [r for r, note in enumerate(notes) if received[r] and not note.on_heap]
    return staged if any(not _fits(move, r, notes[r].staging) for r in staged) else []


def staging_strides(move: OneMove, rank: int) -> tuple[int, ...]:
    """Those of a packed result in bytes, as staging has it."""
    shape = move.transfer.dst.local_shape(rank)
    return packed_strides(shape, move.transfer.itemsize, move.order)


def _fits(move: OneMove, rank: int, staging: Exposed | None) -> bool:
    """Whether it is for this problem: a rank may have expected another."""
    if staging is None or staging.strides != staging_strides(move, rank):
        return False
    shape = move.transfer.dst.local_shape(rank)
    return staging.nbytes == prod(shape) * move.transfer.itemsize
