"""Descriptors of matrices for the tensor copies of GPUs of capability 9.0, box by box.

A box has rows of 128 bytes, swizzled as the multiplying units read them. Elements beyond the matrix
are read as zeros.
"""

from __future__ import annotations

import struct
from functools import lru_cache

from shardmath.arrays import dtypes
from shardmath.cuda.driver import bindings, call

NBYTES = 128
ALIGNMENT = 16  # of the matrix's address and of its row pitch, in bytes
BOX_BYTES = 128  # of a row of a box


@lru_cache(1024)
def tensor_map(
    address: int,
    dtype: str,
    width: int,
    height: int,
    pitch: int,
    box_height: int,
) -> bytes:
    """The struct `TensorMap` of `height` rows of `width` elements, `pitch` elements apart.

    `dtype` is a floating type, of 16, 32 or 64 bits. All zeros for an empty matrix, for which it
    must not be used.
    """
    if not width or not height:
        return bytes(NBYTES)
    driver = bindings()
    kind = getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{dtype.upper()}")
    itemsize = dtypes.of(dtype).itemsize
    made = call(
        "cuTensorMapEncodeTiled",
        kind,
        2,
        address,
        [driver.cuuint64_t(width), driver.cuuint64_t(height)],
        [driver.cuuint64_t(itemsize * pitch)],
        [driver.cuuint32_t(BOX_BYTES // itemsize), driver.cuuint32_t(box_height)],
        [driver.cuuint32_t(1), driver.cuuint32_t(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return struct.pack("16Q", *(int(word) for word in made.opaque))


def require_aligned(**addresses: int) -> None:
    """Raise ValueError for a matrix, given by its name, whose address is not aligned for boxes."""
    for name, address in addresses.items():
        if address % ALIGNMENT:
            raise ValueError(f"{name} lies at {address:#x}, which is no multiple of {ALIGNMENT}")
