"""What torch's allocator asks for segments: by address, as C++ does. On GPUs torch does it."""

import ctypes
import gc

import numpy as np

from mortal import on_ranks
from shardmath.handles.torch_pool import PoolAllocator

ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)


def test_segments_are_blocks_of_the_heap():
    def body(context):
        pool, heap = PoolAllocator.of(context), context.heap
        assert PoolAllocator.of(context) is pool
        allocate, free = ALLOCATE(pool.functions[0]), FREE(pool.functions[1])
        before = heap.used
        places = [allocate(nbytes, 0, None) for nbytes in (5000, 1 << 20)]
        for place, nbytes in zip(places, (5000, 1 << 20), strict=True):
            block = heap.find(place)
            assert block.address == place and block.nbytes >= nbytes
            ctypes.memset(place, 7, nbytes)
            assert (np.asarray(block.buffer())[:nbytes] == 7).all()
        gc.collect()
        assert heap.used >= before + 5000 + (1 << 20)  # nobody else refers to them
        assert allocate(1 << 60, 0, None) is None
        for place in places:
            free(place, 0, 0, None)
        heap.allocate(1)  # which takes back what was dropped
        assert heap.used < before + 5000

    on_ranks(1, body)
