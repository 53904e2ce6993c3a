"""Which of cuBLASLt's algorithms the ranks use, from what each has timed: pure.

Ranks whose products look alike have the same algorithms, and choose the same one, the one whose
slowest rank is fastest: so replicas of a result keep the same bits.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

__all__ = ["fastest", "notes", "packed", "unpacked"]

Timings = Mapping[bytes, Sequence[float]]  # by a product's signature: seconds of each algorithm

_HEAD = struct.Struct("<16sI")


def packed(timings: Timings) -> bytes:
    """What a rank tells the others."""
    return b"".join(
        _HEAD.pack(signature, len(seconds)) + struct.pack(f"<{len(seconds)}d", *seconds)
        for signature, seconds in timings.items()
    )


def unpacked(text: bytes) -> dict[bytes, list[float]]:
    """What a rank has told."""
    found: dict[bytes, list[float]] = {}
    at = 0
    while at < len(text):
        signature, count = _HEAD.unpack_from(text, at)
        at += _HEAD.size
        found[signature] = list(struct.unpack_from(f"<{count}d", text, at))
        at += 8 * count
    return found


def fastest(ranks: Sequence[Timings]) -> dict[bytes, int]:
    """By signature, the number of the algorithm to use, on all ranks that have this product."""
    chosen = {}
    for signature in dict.fromkeys(signature for timings in ranks for signature in timings):
        timed = [timings[signature] for timings in ranks if signature in timings]
        slowest = [max(seconds) for seconds in zip(*timed, strict=True)]
        chosen[signature] = slowest.index(min(slowest))
    return chosen


def notes(own: Timings, chosen: Mapping[bytes, int]) -> list[str]:
    """What `explain` says of this rank's products, a line each."""
    lines = []
    for signature, seconds in own.items():
        number = chosen[signature]
        lines.append(
            f"autotuned: algorithm {number + 1} of {len(seconds)} takes "
            f"{seconds[number] * 1e6:.1f} us here, the one named first {seconds[0] * 1e6:.1f} us"
        )
    return lines or ["autotuned: no product of cuBLASLt to time"]
