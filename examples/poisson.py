"""Poisson's equation in a periodic box: one transform, a division, and the transform back.

    python -m shardmath run -n 4 examples/poisson.py

        u'' = f   becomes   -|k|^2 U = F   for every wave k

    slabs along x        slabs along y            slabs along x

         f    -- rfft -->    F
                             | / -|k|^2
                             U    -- irfft -->        u

The waves stay in slabs along y: the division needs no neighbours, so no exchange is spent on
bringing them back.
"""

from __future__ import annotations

import time

import numpy as np

import shardmath
from shardmath import fft
from shardmath.collectives import all_reduce
from shardmath.distribution import Slab

SHAPE = (60, 45, 50)
WAVES = (60, 45, 26)  # of a real transform
STAY = {"redistribute": False}


def main() -> None:
    """Solve for a known u, and measure the largest error of any rank."""
    context = shardmath.initialize("cpu")
    x, y, z = coordinates(Slab.X.slices(context.rank, SHAPE))
    u = np.sin(x) * np.cos(2 * y) * np.sin(3 * z) + np.cos(4 * x + y)
    f = -14 * np.sin(x) * np.cos(2 * y) * np.sin(3 * z) - 17 * np.cos(4 * x + y)

    solve(f, context.rank)  # once without the clock: the first transform loads scipy
    context.barrier()
    start = time.perf_counter()
    found = solve(f, context.rank)
    seconds = time.perf_counter() - start

    error = all_reduce(np.abs(found - u).max(initial=0.0), op="max")
    energy = all_reduce((found**2).sum()) / np.prod(SHAPE)
    if context.rank == 0:
        print(f"{SHAPE[0]} x {SHAPE[1]} x {SHAPE[2]} points on {context.size} rank(s)")
        print(f"solved in {seconds * 1e3:.0f} ms; mean of u^2 is {energy:.6f}")
    assert error < 1e-12
    shardmath.finalize()


def solve(f: np.ndarray, rank: int) -> np.ndarray:
    """Return this rank's part of u, of mean 0, whose Laplacian is f: both in slabs along x."""
    waves = fft.rfft(f, distribution=Slab.X, options=STAY)
    squares = sum(k * k for k in wave_numbers(Slab.Y.slices(rank, WAVES)))
    waves = np.divide(waves, -squares, out=np.zeros_like(waves), where=squares > 0)
    return fft.irfft(waves, distribution=Slab.Y, options=STAY, norm="backward")


def coordinates(part: tuple[slice, ...]) -> list[np.ndarray]:
    """Return x, y and z of a part of the points, ready to be broadcast."""
    lines = [np.arange(extent) * (2 * np.pi / extent) for extent in SHAPE]
    return list(np.ix_(*(line[piece] for line, piece in zip(lines, part, strict=True))))


def wave_numbers(part: tuple[slice, ...]) -> list[np.ndarray]:
    """Return the wave numbers along each axis, of a part of the waves, ready to be broadcast."""
    nx, ny, nz = SHAPE
    lines = [np.fft.fftfreq(nx, 1 / nx), np.fft.fftfreq(ny, 1 / ny), np.fft.rfftfreq(nz, 1 / nz)]
    return list(np.ix_(*(line[piece] for line, piece in zip(lines, part, strict=True))))


if __name__ == "__main__":
    main()
