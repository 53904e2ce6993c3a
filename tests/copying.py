"""Copies that are bound and made at once, and copies of boxes as the kernel makes them."""

from __future__ import annotations

import numpy as np

from shardmath.redistribution.bound_copies import bind, bind_array, bind_moves

__all__ = ["copy_array", "copy_boxes", "copy_moves", "perform"]


def perform(copies, sources, destination):
    """Bind strided copies and make them, in order."""
    for copy in bind(copies, sources, destination):
        copy()


def copy_array(source, target):
    """Copy the bits of one array to another, at any strides."""
    for copy in bind_array(source, target):
        copy()


def copy_moves(moves, source, destination, *, rank=0):
    """Execute moves into a local array of `rank`; `source(r)` is rank r's."""
    for copy in bind_moves(moves, source, destination, rank=rank):
        copy()


def copy_boxes(boxes, sources, target):
    """Units of contiguous bytes from memories to one memory; each is (bytes, where it begins), of
    which the bytes are any buffer.
    """
    for box in boxes:
        memory, start = sources[box.src]
        taken = _units(memory, start + box.src_offset, box, box.src_strides)
        raw, origin = target
        _units(raw, origin + box.dst_offset, box, box.dst_strides)[...] = taken


def _units(memory, start, box, strides):
    """The bytes of a box in a memory, which must hold all of them."""
    if 0 in box.shape or not box.unit:
        return np.zeros((*box.shape, box.unit), np.uint8)
    ends = [(n - 1) * step for n, step in zip(box.shape, strides, strict=True)]
    assert start + sum(min(end, 0) for end in ends) >= 0
    assert start + sum(max(end, 0) for end in ends) + box.unit <= len(memory)
    return np.ndarray((*box.shape, box.unit), np.uint8, memory, start, (*strides, 1))
