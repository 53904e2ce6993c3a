"""A small program that any launcher can start: `program.py [mpi | torch]`.

Every operator once, on uneven parts, checked against NumPy: first with the ranks as `initialize`
finds them, then, if a library is named, with its communicator.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import numpy as np

import shardmath
from shardmath import symmetric_memory
from shardmath.collectives import all_reduce
from shardmath.distribution import BlockCyclic, ProcessGrid, Replicated, Slab, redistribute
from shardmath.linalg.advanced import matmul

M, K, N = 7, 9, 8


def check(context: shardmath.DistributedContext) -> None:
    """Raise AssertionError unless all operators agree with NumPy."""
    rank, size = context.rank, context.size
    rng = np.random.default_rng(5)
    a, b = rng.standard_normal((M, K)), rng.standard_normal((K, N))
    a_slab, b_slab = redistribute(a, Replicated(), Slab.X), redistribute(b, Replicated(), Slab.X)
    assert a_slab.shape == Slab.X.shape(rank, (M, K))

    d = matmul(a_slab, b_slab, distributions=[Slab.X, Slab.X, Slab.Y])
    np.testing.assert_allclose(redistribute(d, Slab.Y, Replicated()), a @ b, rtol=1e-12)

    cyclic = BlockCyclic(ProcessGrid(shape=(1, size)), (2, 2))
    moved = redistribute(a_slab, Slab.X, cyclic)
    np.testing.assert_array_equal(redistribute(moved, cyclic, Replicated()), a)

    total = all_reduce(np.full(3, rank, np.int64))
    np.testing.assert_array_equal(total, np.full(3, size * (size - 1) // 2))

    mine = symmetric_memory.empty(5, dtype=np.float32)
    mine[:] = rank
    handle = symmetric_memory.rendezvous(mine)
    handle.barrier()
    successor = handle.get_buffer((rank + 1) % size, (5,), np.float32)
    np.testing.assert_array_equal(successor, np.full(5, (rank + 1) % size))
    handle.barrier()


def group(library: str) -> Any:
    """The communicator of all ranks, of a library that the launcher belongs to."""
    if library == "mpi":
        from mpi4py import MPI

        return MPI.COMM_WORLD
    import torch.distributed

    assert torch.distributed.is_initialized(), "initialize() has started it under torchrun"
    return torch.distributed.group.WORLD


def main() -> None:
    gc.disable()  # which the import of torch would begin hundreds of times
    passed = []
    for library in ["environment", *sys.argv[1:]]:
        if library == "environment":
            context = shardmath.initialize("cpu")
        else:
            context = shardmath.initialize("cpu", group(library))
        check(context)
        passed.append(f"{library} {context.rank} of {context.size}")
        shardmath.finalize()
    # In one piece, so that the ranks' lines cannot mix.
    sys.stdout.write("; ".join(passed) + "\n")


if __name__ == "__main__":
    main()
