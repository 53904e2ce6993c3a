"""What ranks under mpiexec do together, through whatever transport the environment names.

`far_program.py apart`: as if they were on two machines.
"""

from __future__ import annotations

import sys

import numpy as np

import shardmath
from shardmath import symmetric_memory
from shardmath.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from shardmath.distribution import BlockCyclic, ProcessGrid, Slab, redistribute
from shardmath.linalg.advanced import matmul


def check(context: shardmath.DistributedContext, longest: int = 300_001) -> None:
    """Raise AssertionError unless all agree with NumPy, with up to `longest` elements on a rank.

    By default those are more than one stage of a sum, 2 MiB.
    """
    rank, size = context.rank, context.size
    for length in (7, 30_000, longest):
        parts = [np.random.default_rng(r).standard_normal(length) for r in range(size)]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        assert (all_reduce(parts[rank]) == total).all()
        assert (all_gather(parts[rank]) == np.concatenate(parts)).all()
        counts = [length // size + (r < length % size) for r in range(size)]
        low = sum(counts[:rank])
        cut = slice(low, low + counts[rank])
        assert (reduce_scatter(parts[rank]) == total[cut]).all()
        assert (all_to_all(parts[rank]) == np.concatenate([part[cut] for part in parts])).all()

    a, b = np.random.default_rng(9).standard_normal((2, 37, 37))
    rows = Slab.X.shape(rank, (37, 37))[0]
    low = sum(Slab.X.shape(r, (37, 37))[0] for r in range(rank))
    mine_a, mine_b = a[low : low + rows].copy(), b[low : low + rows].copy()
    cyclic = BlockCyclic(ProcessGrid(shape=(1, size)), (2, 2))
    back = redistribute(redistribute(mine_a, Slab.X, cyclic), cyclic, Slab.X)
    assert (back == mine_a).all()
    d = matmul(mine_a, mine_b, distributions=[Slab.X, Slab.X, Slab.X])
    np.testing.assert_allclose(d, (a @ b)[low : low + rows], rtol=1e-12)

    array = symmetric_memory.empty(5, dtype=np.float32)
    array[:] = rank
    handle = symmetric_memory.rendezvous(array)
    handle.barrier()
    found = np.empty(5, np.float32)
    handle.get(found, (rank + 1) % size)
    assert (found == (rank + 1) % size).all()
    handle.barrier()
    symmetric_memory.put_signal(np.full(3, 10 + rank, np.float32), handle, (rank + 1) % size)
    symmetric_memory.wait_signal(handle, (rank - 1) % size)
    assert array.tolist() == [10 + (rank - 1) % size] * 3 + [rank] * 2


def stand_apart() -> None:
    """Let every second rank take itself for one of another machine."""
    from mpi4py import MPI

    from shardmath.transport import mesh

    machine = MPI.COMM_WORLD.rank % 2
    mesh.host_identity = lambda: f"machine {machine}"
    mesh.socket.gethostname = lambda: f"machine{machine}.local"


if __name__ == "__main__":
    if "apart" in sys.argv:
        stand_apart()
    check(shardmath.initialize("cpu"))
    sys.stdout.write(shardmath.get_context()._runtime.transport.name + "\n")
