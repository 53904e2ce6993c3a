"""Heat in a plate: the run is saved in the middle, and continues on one rank fewer.

python -m shardmath run -n 4 examples/checkpoint.py
"""

from __future__ import annotations

import os
import shutil
import tempfile

import shardmath
from shardmath.distribution import Slab

SHAPE, SAVED, MORE = (50, 37), 60, 40


def main() -> None:
    """Compare with the plate of a run that did not stop."""
    context = shardmath.initialize("cpu")
    folder = f"{tempfile.gettempdir()}/plate-{os.getppid()}"  # this job's
    plate = shardmath.random(SHAPE, seed=1, distribution=Slab.X)
    spread(plate, SAVED)
    shardmath.save(folder, {"plate": plate, "step": SAVED})
    spread(plate, MORE)
    expected = plate.numpy()

    fewer = context.split(0 if context.rank < max(1, context.size - 1) else None)
    if fewer is not None:  # as another program would, later
        with fewer:
            state = shardmath.load(folder, distribution=Slab.Y)
            spread(state["plate"], MORE)
            assert abs(state["plate"].numpy() - expected).max() < 1e-14
        if fewer.rank == 0:
            print(f"{state['step']} steps on {context.size} rank(s), {MORE} more on {fewer.size}")
            shutil.rmtree(folder)
    shardmath.finalize()


def spread(x: shardmath.DistributedArray, steps: int) -> None:
    """Take explicit steps; it is cold around the plate."""
    for _ in range(steps):
        u = x.halo(1)
        x.local[...] = (x.local + u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]) / 5


if __name__ == "__main__":
    main()
