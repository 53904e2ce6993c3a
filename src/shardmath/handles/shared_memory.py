"""Heap memory that the ranks of a context allocate together: on all of them, or on none.

    rank 0   allocate, announce ┐           ┌ locations of all ─ addresses
                                ├ agreement ┤
    rank 1   allocate, announce ┘           └ locations of all ─ addresses

Whatever fails on one rank while it allocates is raised on all, before any of them has used the
memory of another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardmath.context.context import Context
from shardmath.symmetric.heap import Buffer, Location

__all__ = ["SharedMemory", "allocate_on_all_ranks"]


@dataclass(frozen=True)
class SharedMemory:
    """One buffer on every rank. This rank's is kept by `buffer`, and by nothing else.

    By rank: `locations` and `sizes` of all of them, and the `notes` that came with them.
    """

    buffer: Buffer
    locations: tuple[Location, ...]
    sizes: tuple[int, ...]
    notes: tuple[Any, ...]

    def addresses(self, context: Context) -> list[int]:
        """Where each rank's lies for this rank's cores or GPU; 0 where it has no address."""
        return [
            context.peer_address(rank, location, nbytes) or 0
            for rank, (location, nbytes) in enumerate(zip(self.locations, self.sizes, strict=True))
        ]


def allocate_on_all_ranks(
    context: Context,
    operation: str,
    allocate: Callable[[], tuple[Buffer, Any]],
    check: Callable[[Sequence[Any]], None] = lambda notes: None,
) -> SharedMemory:
    """What `allocate()` made on every rank: a buffer, and a note for the peers. Collective.

    A note is plain data. Peers may read and write the buffer as soon as they know of it, so
    `allocate` initializes it. `check(notes)`, given those of all ranks, is pure. Raises on all
    ranks what `allocate` raised on one, HeapExhausted for example, or what `check` raises.
    """
    made: list[Buffer] = []

    def describe() -> tuple[int, int, int, Any]:
        buffer, note = allocate()
        made.append(buffer)
        context.announce(buffer.block)
        location = buffer.block.location
        return location.segment, location.offset, buffer.block.nbytes, note

    def checked(found: list[tuple[int, int, int, Any]]) -> list[tuple[int, int, int, Any]]:
        check([note for *_, note in found])
        return found

    segments, offsets, sizes, notes = zip(*context.agree(operation, describe, checked), strict=True)
    return SharedMemory(made.pop(), tuple(map(Location, segments, offsets)), sizes, notes)
