"""Kernels of test_device_verbs.py in Triton. Imports Triton."""

import triton
import triton.language as tl

from shardmath import symm_triton as symm


@triton.jit
def verbs(memory, part, nbytes, out, BLOCK: tl.constexpr):
    """Every rank sends to the one on its right, and reads what the one on its left has."""
    rank = symm.rank(memory)
    size = symm.size(memory)
    right = (rank + 1) % size
    left = (rank + size - 1) % size
    mine = symm.peer(memory, rank, tl.uint8)
    theirs = symm.peer(memory, right, tl.uint8)
    other = symm.peer(memory, left, tl.uint8)
    symm.put(theirs + part, mine, nbytes, BLOCK)
    fine = symm.put_signal(memory, right, 0)
    fine = symm.wait_signal(memory, left, 0) and fine
    symm.get(mine + 2 * part, other, nbytes, BLOCK)
    value = tl.full([], 0, tl.int64)
    for i in range(3):
        fine = symm.put_value(memory, right, 1, 1000 * i + rank) and fine
        came, value = symm.wait_value(memory, left, 1)
        fine = came and fine
        fine = symm.put_signal(memory, left, 2) and fine
        fine = symm.wait_signal(memory, right, 2) and fine
    for i in range(20):
        fine = symm.barrier(memory, 3 + i % 2) and fine
    tl.store(out, value)
    tl.store(out + 1, fine.to(tl.int64))


@triton.jit
def meet(memory, out):
    """What verbs.cu's kernel of that name does, with which it can meet."""
    rank = symm.rank(memory)
    size = symm.size(memory)
    right = (rank + 1) % size
    left = (rank + size - 1) % size
    tl.store(symm.peer(memory, right, tl.int64), 100 + rank)
    symm.put_signal(memory, right, 5)
    fine = symm.wait_signal(memory, left, 5)
    value = tl.load(symm.peer(memory, rank, tl.int64), volatile=True)
    tl.store(out, tl.where(fine, value, 0))
    symm.barrier(memory, 6)


@triton.jit
def wait_for(memory, kind, src, out):
    came = tl.full([], 1, tl.int1)
    if kind == 0:
        came = symm.barrier(memory, 9)
    elif kind == 1:
        came = symm.wait_signal(memory, src, 9)
    elif kind == 2:
        came, _ = symm.wait_value(memory, src, 10)
    else:
        own = symm.peer(memory, symm.rank(memory), tl.int64)
        came = symm.wait(memory, own + 16, 1, src)
    tl.store(out, came.to(tl.int64))


@triton.jit
def give(memory, kind, dst):
    if kind == 0:
        symm.barrier(memory, 9)
    elif kind == 1:
        symm.put_signal(memory, dst, 9)
    elif kind == 2:
        symm.put_value(memory, dst, 10, 1)
    else:
        symm.signal(symm.peer(memory, dst, tl.int64) + 16, 1)


@triton.jit
def misuse(memory, kind, out):
    fine = tl.full([], 0, tl.int1)
    if kind == 0:
        fine = symm.barrier(memory, 1 << 20)
    elif kind == 1:
        fine = symm.put_signal(memory, symm.size(memory), 0)
    elif kind == 2:
        fine = symm.wait_signal(memory, -1, 0)
    elif kind == 3:
        fine = symm.peer(memory, symm.size(memory) + 3, tl.int64).to(tl.int64) != 0
    else:
        fine = symm.put_value(memory, 0, -1, 1)
    tl.store(out, fine.to(tl.int64))
