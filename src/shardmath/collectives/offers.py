"""What a rank lets its peers read during one call, and how they find it.

An offer is a note in the exchange that agrees on the call. Few bytes are the payload of that.
More are staged on the heap, in a double buffer: a half is written again only in the second
call after, whose predecessor's exchange every peer has entered, and so has read what was there; no
rank waits at the end of a call. Large operands are lent: read where they lie (zero copy), or from a
copy on the heap; then the owner waits for its readers at the end of the call.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from shardmath.arrays.base import HostArray, raw_view
from shardmath.context.context import Context
from shardmath.symmetric.heap import Buffer, Location

__all__ = [
    "INLINE",
    "INLINE_BYTES",
    "NOTHING",
    "Offer",
    "offer",
    "read_offers",
    "wait_for_readers",
]

INLINE_BYTES = 2 << 10  # sent along
_STAGED_BYTES = 1 << 20  # staged; above, lent
_LENT_IN_PLACE_BYTES = 64 << 10  # below, a copy costs less than waiting for readers
_WHERE = struct.Struct("<cqq")
INLINE, _STAGED, _LENT = b"i", b"s", b"l"
NOTHING = b""


class Offer:
    """What one rank offers: the `note` to send; it keeps a lent copy alive."""

    def __init__(self, note: bytes, lent: Buffer | None = None) -> None:
        self.note = note
        self._lent = lent


class _DoubleBuffer:
    """Staging for operands of one context; see the module."""

    def __init__(self, context: Context) -> None:
        self._halves: list[Buffer | None] = [None, None]
        self._current = 0
        context.keep_for_readers(self._halves)

    def next(self, context: Context, nbytes: int) -> Buffer:
        """Memory for one call. An exchange must pass between two calls of this."""
        self._current ^= 1
        half = self._halves[self._current]
        if half is None or half.block.nbytes < nbytes:
            # No peer reads the old half any more; see the module's docstring.
            self._halves[self._current] = None
            room = 1 << max(nbytes - 1, (64 << 10) - 1).bit_length()
            half = self._halves[self._current] = context.allocate_shared(room)
        return half


def offer(context: Context, flat: HostArray, location: Location | None) -> Offer:
    """Offer the elements of `flat`; `location` is where they lie when that is on the heap. Local.

    Raises HeapExhausted when a copy has no room. Must be followed by an exchange of the notes.
    """
    if context.size == 1:
        return Offer(NOTHING)
    if location is not None and flat.nbytes > _LENT_IN_PLACE_BYTES:
        return Offer(_WHERE.pack(_LENT, location.segment, location.offset))
    if flat.nbytes <= _STAGED_BYTES:
        staging: _DoubleBuffer = context.cache(
            "collectives staging", lambda: _DoubleBuffer(context)
        )
        buffer, kind = staging.next(context, flat.nbytes), _STAGED
    else:
        buffer, kind = context.allocate_shared(flat.nbytes), _LENT
    memory = np.asarray(buffer)[: flat.nbytes].view(raw_view(flat).dtype)
    np.copyto(memory, raw_view(flat))
    where = buffer.block.location
    return Offer(_WHERE.pack(kind, where.segment, where.offset), buffer)


def read_offers(
    context: Context,
    notes: Sequence[bytes],
    payloads: Sequence[bytes],
    sizes: Sequence[int],
    own: HostArray | None,
    dtype: np.dtype[np.generic],
    parts: Sequence[tuple[int, int]] | None = None,
) -> list[HostArray]:
    """Every rank's elements, `sizes` of them, as arrays on the memory where they lie.

    `own` stands for this rank's, unless it was sent along. A rank that offered nothing has none.
    What has no address here is copied, and of that only the elements from `parts[rank][0]` to
    `parts[rank][1]`, if given.
    """
    found: list[HostArray] = []
    for rank, (note, size) in enumerate(zip(notes, sizes, strict=True)):
        if note == INLINE:
            found.append(np.frombuffer(payloads[rank], dtype))
        elif rank == context.rank and own is not None:
            found.append(own)
        elif note == NOTHING or size == 0:
            found.append(np.empty(0, dtype))
        else:
            _, segment, offset = _WHERE.unpack(note)
            item = dtype.itemsize
            pieces = None if parts is None else [(parts[rank][0] * item, parts[rank][1] * item)]
            memory = context.read_bytes(rank, Location(segment, offset), size * item, pieces)
            found.append(memory.view(dtype))
    return found


def wait_for_readers(context: Context, notes: Sequence[bytes]) -> None:
    """Before reusing what a peer may still read: end a call in which anything was lent.

    What is staged needs no such end among ranks of one host: they read it even when its owner has
    ended. From another host a rank that has ended cannot be read.
    """
    kept = (_LENT, _STAGED) if context.multi_host else (_LENT,)
    if any(note[:1] in kept for note in notes):
        context.board.barrier(context.board.operation)
