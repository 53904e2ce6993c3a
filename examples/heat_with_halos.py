"""Heat spreads on a torus that is split along both axes: each part with its neighbours' rims.

python -m shardmath run -n 4 examples/heat_with_halos.py

Heat that leaves on one side comes in on the other. One call of `halo` does what puts and signals do
step by step in heat.py.
"""

from __future__ import annotations

import numpy as np

import shardmath
from shardmath.distribution import BlockNonCyclic, ProcessGrid

SHAPE = (50, 37)  # parts may be uneven
STEPS = 200


def main() -> None:
    """Compare with the same steps on the whole plate, in one process."""
    context = shardmath.initialize("cpu")
    rows = 2 if context.size % 2 == 0 else 1
    shape = rows, context.size // rows
    grid = ProcessGrid(shape=shape, layout=ProcessGrid.Layout.ROW_MAJOR)
    x = shardmath.zeros(SHAPE, distribution=BlockNonCyclic(grid))
    x[10:20, 5:15] = 1.0
    expected = x.numpy()

    u = None
    for _ in range(STEPS):
        u = x.halo(1, periodic=True, out=u)
        around = u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]
        x.local[...] += 0.2 * (around - 4 * x.local)

    for _ in range(STEPS):
        around = sum(np.roll(expected, shift, axis) for shift in (1, -1) for axis in (0, 1))
        expected += 0.2 * (around - 4 * expected)
    assert np.allclose(x.numpy(), expected, atol=1e-14)
    heat = x.sum()
    if context.rank == 0:
        print(f"{STEPS} steps of a torus of {SHAPE[0]} x {SHAPE[1]} on {context.size} rank(s)")
        print(f"heat, of which none is lost: {heat:.6f}")
    shardmath.finalize()


if __name__ == "__main__":
    main()
