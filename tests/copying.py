"""Copies of boxes as the kernel performs them, between memories of bytes in this process."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import as_strided

__all__ = ["copy_boxes"]


def copy_boxes(boxes, sources, target):
    """Units of contiguous bytes from memories to one memory; each is (bytes, where it begins)."""
    for box in boxes:
        memory, start = sources[box.source]
        taken = _units(memory, start + box.source_offset, box, box.source_strides)
        raw, origin = target
        _units(raw, origin + box.target_offset, box, box.target_strides)[...] = taken


def _units(memory, start, box, strides):
    """The bytes of a box in a memory, which must hold all of them."""
    if 0 in box.shape or not box.unit:
        return np.zeros((*box.shape, box.unit), np.uint8)
    ends = [(n - 1) * step for n, step in zip(box.shape, strides, strict=True)]
    assert start + sum(min(end, 0) for end in ends) >= 0
    assert start + sum(max(end, 0) for end in ends) + box.unit <= memory.size
    return as_strided(memory[start:], (*box.shape, box.unit), (*strides, 1))
