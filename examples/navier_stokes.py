"""A vortex decays: the Navier-Stokes equations in a cube, by Fourier transforms and Runge-Kutta.

Points are split along x, waves along y: each transform is one exchange, all else each rank's own.
"""

import sys
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

import shardmath
from shardmath.distribution import Slab
from shardmath.fft import irfft, rfft


def main(n=32, steps=10, dt=0.01, viscosity=1 / 1600) -> None:
    """Compare the energy of the Taylor-Green vortex with what mpi4py-fft's program finds."""
    context, cube = shardmath.initialize("cpu"), {"axes": (1, 2, 3), "norm": "backward"}
    to_waves = partial(rfft, distribution=Slab.Z, **cube)
    to_points = partial(irfft, distribution=Slab.Y, **cube)
    angle = shardmath.arange(n, distribution=Slab.X) * (2 * np.pi / n)
    x, y, z = angle[:, None, None], angle.numpy()[:, None], angle.numpy()
    u = np.sin(x) * np.cos(y) * np.cos(z), -np.cos(x) * np.sin(y) * np.cos(z), 0 * (x + y + z)
    along_y = shardmath.distributed.fft.fftfreq(n, 1 / n, distribution=Slab.X)
    waves = np.fft.fftfreq(n, 1 / n), along_y, np.fft.rfftfreq(n, 1 / n)
    k = np.stack(np.meshgrid(*waves, indexing="ij"))
    k2, kept, ik = (k * k).sum(axis=0), (abs(k) < n / 3).all(axis=0), 1j * k
    along = k / np.maximum(k2, 1)

    def cross(a, b):
        return np.stack([a[i] * b[j] - a[j] * b[i] for i, j in ((1, 2), (2, 0), (0, 1))])

    def change(v):
        force = to_waves(cross(to_points(v), to_points(cross(ik, v)))) * kept
        return force - along * (force * k).sum(axis=0) - viscosity * k2 * v

    v = to_waves(np.stack(u))
    for _ in range(steps):
        start = ahead = v
        for weight, reach in (1 / 6, 0.5), (1 / 3, 0.5), (1 / 3, 1), (1 / 6, 0):
            slope = dt * change(ahead)
            v, ahead = v + weight * slope, start + reach * slope
    energy = (to_points(v) ** 2).sum().item() / n**3 / 2
    vortices = (to_points(cross(ik, v)) ** 2).sum(axis=0)[:, :, n // 8].numpy(root=0)
    if context.rank == 0:
        print(f"{n}^3 points on {context.size} rank(s), {steps} steps: energy {energy:.9f}")
        assert (n, steps) != (32, 10) or abs(energy - 0.124953118) < 1e-9
        Path("build").mkdir(exist_ok=True)
        shades = np.uint8(255 * vortices / vortices.max())
        Image.fromarray(shades).resize((512, 512)).save("build/navier_stokes.png")
    shardmath.finalize()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
