"""The layout, in bytes, of the structs of `kernels/symm.cuh`, which the ranks' GPUs share.

The host and Triton read and write them without C++. The header says what the members mean; a test
compares the two.
"""

from __future__ import annotations

# Pad: its channels follow it.
FAILED = 0
PAD_BYTES = 16
PAD_ALIGNMENT = 16

# Channel: bytes for each rank, as all its members are arrays over the ranks.
SIGNAL = 0
BARRIER = 16
ROUND = 24
SENT = 32
TAKEN = 40
CHANNEL_BYTES = 48

# Team and SymmetricMemory: two ints, `rank` and `size`, come first.
TEAM_CHANNELS = 8
TEAM_TIMEOUT = 16
TEAM_STATUS = 24
TEAM_PADS = 32  # 8 bytes for each rank
TEAM_BUFFERS = 32  # and 8 bytes for each rank: behind the pads

# Status: one Late for each rank, of three words: operation, expected, seen. Behind them, the
# address of the words that say, for each rank, whether it sends no more.
LATE = 8
LATE_BYTES = 24


def gone_place(size: int) -> int:
    """The byte of `Status` with the address of those words, in a team of `size` ranks."""
    return LATE + LATE_BYTES * size


# Operation.
OF_BARRIER = 1
OF_SIGNAL = 2
OF_COLLECTIVE = 3
OF_USER = 4
OF_FLAG = 5
NO_CHANNEL = 6
NO_PEER = 7
WRONG_RANKS = 8
OF_PRODUCT = 9
OF_SHARD = 10
MISMATCH = 11
MISFIT = 12
OF_WORD = 13
NO_ROOM = 14
BAD_ROWS = 15
OTHER_ROWS = 16


def pad_bytes(size: int, channels: int) -> int:
    """Bytes of one rank's `Pad`, with its channels, in a team of `size` ranks."""
    return PAD_BYTES + CHANNEL_BYTES * size * channels
