"""Heat spreads in a plate whose rows are split over the ranks: one-sided puts between neighbours.

python -m shardmath run -n 4 examples/heat.py

            +------------------+
            |   halo           |   written by the rank above
    rank r  |   own rows       |   the first row goes into the halo of the rank above,
            |                  |   the last into that of the rank below
            |   halo           |
            +------------------+

A step needs no barrier. A rank puts its edges, signals both neighbours, and waits for theirs. When
it has read its halos, a second signal tells the neighbours that they may write them again.
"""

from __future__ import annotations

import numpy as np

import shardmath
from shardmath import symmetric_memory
from shardmath.collectives import all_reduce
from shardmath.distribution import Slab

SHAPE = (50, 37)  # 4 divides neither, and does not have to
STEPS = 200
FILLED, READ = 0, 1  # channels


def main() -> None:
    """Compare with the same steps on the whole plate, in one process."""
    context = shardmath.initialize("cpu")
    plate = np.zeros(SHAPE)
    plate[10:20, 5:15] = 1.0

    own = plate[Slab.X.slices(context.rank, SHAPE)]
    found = spread(context, own)
    heat = all_reduce(found.sum())  # a number per rank: the heat that its rows hold

    expected = plate
    for _ in range(STEPS):
        expected = stepped(np.pad(expected, ((1, 1), (0, 0))))
    assert np.allclose(found, expected[Slab.X.slices(context.rank, SHAPE)], atol=1e-14)
    if context.rank == 0:
        print(f"{STEPS} steps of a plate of {SHAPE[0]} x {SHAPE[1]} on {context.size} rank(s)")
        print(f"heat left: {float(heat):.6f} of {plate.sum():.0f}")
        print(f"in one process: {expected.sum():.6f}")
    shardmath.finalize()


def spread(context: shardmath.DistributedContext, own: np.ndarray) -> np.ndarray:
    """Return the own rows after all steps."""
    rows, columns = own.shape
    u = symmetric_memory.empty(rows + 2, columns, dtype=np.float64)
    u[:] = 0.0  # beyond the plate it stays cold
    u[1:-1] = own
    handle = symmetric_memory.rendezvous(u)  # ranks may have different numbers of rows
    above, below = context.rank - 1, context.rank + 1
    neighbours = [rank for rank in (above, below) if 0 <= rank < context.size]
    for step in range(STEPS):
        for rank in neighbours:
            if step:
                handle.wait_signal(rank, READ)  # before overwriting what it may still read
            if rank == above:
                last = Slab.X.shape(above, SHAPE)[0] + 1
                handle.put(u[1], above, last * columns)
            else:
                handle.put(u[rows], below, 0)
            handle.put_signal(rank, FILLED)
        for rank in neighbours:
            handle.wait_signal(rank, FILLED)
        u[1:-1] = stepped(u)
        for rank in neighbours:
            handle.put_signal(rank, READ)
    handle.barrier()
    return u[1:-1].copy()


def stepped(u: np.ndarray) -> np.ndarray:
    """One explicit step on all rows but the first and the last; the sides of the plate are cold."""
    wide = np.pad(u, ((0, 0), (1, 1)))
    around = wide[:-2, 1:-1] + wide[2:, 1:-1] + wide[1:-1, :-2] + wide[1:-1, 2:]
    return u[1:-1] + 0.2 * (around - 4 * u[1:-1])


if __name__ == "__main__":
    main()
