"""Large reductions in pieces: one launch that sends, combines and hands out.

The kernel is `kernels/pieces.cu`. It waits for the peers' kernels and for nothing else: there is no
barrier before it or after it. A block takes less than half of a multiprocessor.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from shardmath.arrays.dtypes import DType
from shardmath.collectives.slices import UNIT, chunked
from shardmath.cuda.kernel import Argument, ReadyLaunch
from shardmath.symmetric.team import Team

__all__ = ["Reduced", "inbox_bytes", "launch_pieces", "reduction_defines", "words_bytes"]

_TO_ALL = (8 << 10, 8, 4, 3)  # PIECE, STAGES, AHEAD, TILES: less than half of the shared memory
_TO_ONE = (16 << 10, 4, 2, 2)
_MOST_BLOCKS = 132  # one on each multiprocessor of an H200
_THREADS = 256 + 32 + 32
_WORDS_ALIGNMENT = 128
_SLICE_BYTES = 64 << 20  # that one launch combines on a rank


@dataclass(frozen=True)
class Reduced:
    """What one launch reduces on one rank; all by rank, in bytes and addresses.

    `slices` are what this rank has of every rank's slice, `nbytes` of them; `results` is where this
    rank's slice goes in the results of all ranks, or in this rank's alone.
    """

    slices: tuple[int, ...]
    nbytes: tuple[int, ...]
    results: tuple[int, ...]

    @classmethod
    def everywhere(
        cls,
        source: int,
        targets: Sequence[int],
        nbytes: int,
        *,
        rank: int,
        most: int = _SLICE_BYTES,
    ) -> list[Reduced]:
        """All of an array for all ranks, each of which combines a slice of at most `most` bytes."""
        return [
            cls(
                tuple([source + part.start for part in parts]),
                tuple([part.nbytes for part in parts]),
                tuple([target + parts[rank].start for target in targets]),
            )
            for parts in chunked(nbytes, len(targets), _SLICE_BYTES)
        ]

    @classmethod
    def scattered(cls, source: int, target: int, sizes: Sequence[int]) -> list[Reduced]:
        """A part for each rank, which lie one after the other; this rank's goes to `target`."""
        starts = [source + sum(sizes[:rank]) for rank in range(len(sizes))]
        return [
            cls(
                tuple([start + at for start in starts]),
                tuple([max(0, min(size - at, _SLICE_BYTES)) for size in sizes]),
                (target + at,),
            )
            for at in range(0, max(sizes), _SLICE_BYTES)
        ]

    @property
    def whole(self) -> bool:
        """Whether all is in whole packets."""
        return not any(word % UNIT for word in (*self.slices, *self.nbytes, *self.results))


def inbox_bytes(reduced: Reduced) -> int:
    """Memory that each rank needs for what its peers send."""
    return len(reduced.nbytes) * -(-max(reduced.nbytes) // UNIT) * UNIT


def words_bytes(size: int) -> int:
    """Memory, zeros at first, that each of `size` ranks needs for words."""
    return _MOST_BLOCKS * -(-8 * (1 + 2 * size) // _WORDS_ALIGNMENT) * _WORDS_ALIGNMENT


def launch_pieces(
    team: Team,
    reduced: Reduced,
    dtype: DType,
    operation: str,
    *,
    words: Sequence[int],
    inboxes: Sequence[int],
) -> ReadyLaunch:
    """The launch that reduces. `words` and `inboxes` are the ranks' memory, by address."""
    rotated = [(team.rank + step) % team.size for step in range(1, team.size + 1)]
    count, most = len(reduced.results), max(reduced.nbytes)
    packed = (
        *(words[rank] for rank in rotated),
        *(inboxes[rank] for rank in rotated),
        *(reduced.results[rank if count > 1 else 0] for rank in rotated),
        *(count, most, *reduced.slices, *reduced.nbytes),
    )
    argument = Argument(team.packed() + struct.pack(f"{len(packed)}Q", *packed))
    piece, stages, ahead, tiles = _TO_ALL if count > 1 else _TO_ONE
    defines = (
        *reduction_defines(dtype, operation, reduced.whole),
        *(f"PIECE={piece}", f"STAGES={stages}", f"AHEAD={ahead}", f"TILES={tiles}"),
    )
    kernel = team.kernel("pieces", "pieces", defines, shared=piece * (stages + tiles))
    return kernel.ready(min(_MOST_BLOCKS, -(-most // piece)), _THREADS, argument)


def reduction_defines(dtype: DType, operation: str, whole: bool) -> tuple[str, ...]:
    """What kernels that combine elements are compiled with."""
    element = "boolean" if dtype.name == "bool" else dtype.name
    return f"ELEMENT={element}", f"OPERATION={operation}", f"WHOLE={whole:d}"
