"""How many bytes of signal slots a rank brings to its next rendezvous: a setting of the process.

It must be equal on all ranks, which the rendezvous checks.
"""

from __future__ import annotations

from shardmath.geometry.integers import index

__all__ = ["SLOT_BYTES", "PadSetting", "change_pad_setting", "pad_setting"]

SLOT_BYTES = 4


class PadSetting(type):
    """Makes `signal_pad_size` of the class the setting for later ones, of a handle its own."""

    _setting = 9216  # 32 blocks of 72 ranks' slots, torch's figure

    @property
    def signal_pad_size(cls) -> int:
        """Bytes of signal slots that each rank gets at its next rendezvous; equal on all ranks."""
        return PadSetting._setting

    @signal_pad_size.setter
    def signal_pad_size(cls, nbytes: int) -> None:
        change_pad_setting(nbytes)


def pad_setting() -> int:
    """Bytes of signal slots that this rank brings to its next rendezvous."""
    return PadSetting._setting


def change_pad_setting(nbytes: int) -> None:
    """Set it. Raises ValueError when it is not a positive multiple of 4."""
    size = index(nbytes, "the size of a signal pad")
    if size <= 0 or size % SLOT_BYTES:
        raise ValueError(f"a signal pad has a positive multiple of {SLOT_BYTES} bytes, not {size}")
    PadSetting._setting = size
