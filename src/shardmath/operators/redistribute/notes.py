"""What each rank says of its arrays in an execution on GPUs, and what all conclude from it.

Pure, and the same on every rank: from the same notes all choose to push or to pull, and know who
lacks memory.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from shardmath.redistribution import Exposed, TransferPlan

__all__ = ["Note", "lacking", "pulls"]

_ALLOCATES, _RESULT_ON_HEAP = 1, 2
_HEAD = struct.Struct("<B3H")  # flags, and the bytes of each place


@dataclass(frozen=True)
class Note:
    """What a rank says of its arrays in one execution: where they are, if they are on the heap.

    `staging` is heap memory for a result in ordinary memory. `allocates`: the result is still to be
    made, on the heap or not.
    """

    operand: Exposed | None
    result: Exposed | None
    staging: Exposed | None
    allocates: bool
    on_heap: bool

    def pack(self) -> bytes:
        """The bytes that `unpack` takes."""
        parts = [
            b"" if each is None else each.pack()
            for each in (self.operand, self.result, self.staging)
        ]
        flags = _ALLOCATES * self.allocates + _RESULT_ON_HEAP * self.on_heap
        return _HEAD.pack(flags, *map(len, parts)) + b"".join(parts)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """What a peer packed."""
        flags, *lengths = _HEAD.unpack_from(data)
        at = _HEAD.size
        parts: list[Exposed | None] = []
        for length in lengths:
            parts.append(Exposed.unpack(data[at : at + length]) if length else None)
            at += length
        operand, result, staging = parts
        return cls(
            operand, result, staging, bool(flags & _ALLOCATES), bool(flags & _RESULT_ON_HEAP)
        )

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


def lacking(transfer: TransferPlan, notes: Sequence[Note]) -> list[int]:
    """The ranks that need staging, where not all of them have it; else none."""
    if pulls(transfer, notes):
        return []
    received = transfer.traffic.received
    staged = [r for r, note in enumerate(notes) if received[r] and not note.on_heap]
    return staged if any(notes[rank].staging is None for rank in staged) else []
