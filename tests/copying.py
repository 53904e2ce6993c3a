"""Copies of boxes as the kernel performs them, between memories of bytes in this process."""

from __future__ import annotations

import itertools

import numpy as np

__all__ = ["copy_boxes"]


def copy_boxes(boxes, sources, target):
    """Units of contiguous bytes from memories to one memory; each is (bytes, where it begins)."""
    raw, origin = target
    for box in boxes:
        memory, start = sources[box.source]
        for index in itertools.product(*map(range, box.shape)):
            one = start + box.source_offset + int(np.dot(index, box.source_strides))
            two = origin + box.target_offset + int(np.dot(index, box.target_strides))
            assert 0 <= one <= memory.size - box.unit and 0 <= two <= raw.size - box.unit
            raw[two : two + box.unit] = memory[one : one + box.unit]
