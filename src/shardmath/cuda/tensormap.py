"""Descriptions of matrices for the copies by boxes that GPUs of capability 9.0 make.

A box has rows of 128 bytes, swizzled as the multiplying units read them, or of 64 bytes, swizzled
likewise. What lies beyond the matrix is read as zeros, and is not written.
"""

from __future__ import annotations

import struct
from functools import lru_cache

from shardmath.cuda.driver import bindings, call

__all__ = ["ALIGNMENT", "BOX_WIDTH", "NBYTES", "tensor_map"]

NBYTES = 128
ALIGNMENT = 16  # of the matrix's address, and of the bytes from one row to the next
BOX_WIDTH = 64  # elements of two bytes


@lru_cache(1024)
def tensor_map(
    address: int,
    dtype: str,
    width: int,
    height: int,
    pitch: int,
    box_height: int,
    box_width: int = BOX_WIDTH,
) -> bytes:
    """The struct `TensorMap` of `height` rows of `width` elements, `pitch` elements apart.

    `dtype` is "float16" or "bfloat16", `box_width` 64 or 32. Zeros where the matrix
    is empty: then it must not be used.
    """
    if not width or not height:
        return bytes(NBYTES)
    driver = bindings()
    swizzle = {
        64: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        32: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_64B,
    }[box_width]
    kinds = driver.CUtensorMapDataType
    kind = {
        "float16": kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        "bfloat16": kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    }[dtype]
    made = call(
        "cuTensorMapEncodeTiled",
        kind,
        2,
        address,
        [driver.cuuint64_t(width), driver.cuuint64_t(height)],
        [driver.cuuint64_t(2 * pitch)],
        [driver.cuuint32_t(box_width), driver.cuuint32_t(box_height)],
        [driver.cuuint32_t(1), driver.cuuint32_t(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return struct.pack("16Q", *(int(word) for word in made.opaque))
