"""A vortex decays: the Navier-Stokes equations in a cube, by Fourier transforms and Runge-Kutta.

Points are split along x, waves along y: each transform takes one exchange, all else is local.
"""

from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

import shardmath
from shardmath import fft
from shardmath.distribution import Slab


def main(n=32, steps=10, dt=0.01, viscosity=1 / 1600) -> None:
    """Compare the energy of the Taylor-Green vortex with what mpi4py-fft's program finds."""
    context, cross = shardmath.initialize("cpu"), partial(np.cross, axis=0)
    to_waves = partial(fft.rfft, axes=(1, 2, 3), norm="backward", distribution=Slab.Z)
    to_points = partial(fft.irfft, axes=(1, 2, 3), norm="backward", distribution=Slab.Y)
    angle = shardmath.arange(n, distribution=Slab.X) * (2 * np.pi / n)
    x, y, z = np.meshgrid(angle, angle.numpy(), angle.numpy(), indexing="ij")
    u = [np.sin(x) * np.cos(y) * np.cos(z), -np.cos(x) * np.sin(y) * np.cos(z), 0 * x]
    along_y = shardmath.distributed.fft.fftfreq(n, 1 / n, distribution=Slab.X)
    waves = np.fft.fftfreq(n, 1 / n), along_y, np.fft.rfftfreq(n, 1 / n)
    k = np.stack(np.meshgrid(*waves, indexing="ij"))
    k2, kept, ik = (k * k).sum(axis=0), (abs(k) < n / 3).all(axis=0), 1j * k
    along = k / np.maximum(k2, 1)
    v = to_waves(np.stack(u))
    for _ in range(steps):
        start = ahead = v
        for weight, reach in (1 / 6, 0.5), (1 / 3, 0.5), (1 / 3, 1), (1 / 6, 0):
            force = kept * to_waves(cross(to_points(ahead), to_points(cross(ik, ahead))))
            slope = dt * (force - along * (force * k).sum(axis=0) - viscosity * k2 * ahead)
            v, ahead = v + weight * slope, start + reach * slope
    energy = (to_points(v) ** 2).sum().item() / n**3 / 2
    swirl = (to_points(cross(ik, v)) ** 2).sum(axis=0)[:, :, n // 8].numpy(root=0)
    if context.rank == 0:
        print(f"{n}^3 points on {context.size} rank(s), {steps} steps: energy {energy:.9f}")
        assert (n, steps) != (32, 10) or abs(energy - 0.124953118) < 1e-9
        Path("build").mkdir(exist_ok=True)
        shades = np.uint8(255 * swirl / swirl.max())
        Image.fromarray(shades).resize((512, 512)).save("build/navier_stokes.png")
    shardmath.finalize()


if __name__ == "__main__":
    main()
