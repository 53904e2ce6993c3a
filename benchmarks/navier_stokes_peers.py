"""The equations of `examples/navier_stokes.py` with mpi4py-fft and with Dask, for `arrays.py`.

    mpiexec -n 2 python benchmarks/navier_stokes_peers.py mpi4py-fft 64 4
    python benchmarks/navier_stokes_peers.py dask 64 4

64 points along each axis, 4 steps. Prints the mean seconds of a step after the first, the
processor seconds of all processes and threads, and the energy at the end. Both do what our
example does: real transforms of the same arrays, four times nine a step, and products point by
point; mpi4py-fft on two processes, Dask on two threads.
"""

import json
import os
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

DT, VISCOSITY, WORKERS = 0.01, 1 / 1600, 2
RUNGE_KUTTA = ((1 / 6, 0.5), (1 / 3, 0.5), (1 / 3, 1), (1 / 6, 0))


def main(peer: str, n: int, steps: int) -> None:
    start, step, energy = {"mpi4py-fft": by_mpi4py_fft, "dask": by_dask}[peer](n)
    v = step(start())
    begun, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps - 1):
        v = step(v)
    spent = (time.perf_counter() - begun, time.process_time() - cpu)
    found = energy(v, spent[1])
    if found is not None:
        seconds, cpu = spent[0] / (steps - 1), found[1] / (steps - 1)
        print(json.dumps({"seconds": seconds, "cpu": float(cpu), "energy": float(found[0])}))


def vortex(xp, x, y, z):
    return [
        xp.sin(x) * xp.cos(y) * xp.cos(z),
        -xp.cos(x) * xp.sin(y) * xp.cos(z),
        0 * (x + y + z),
    ]


def cross(xp, a, b):
    return xp.stack([a[i] * b[j] - a[j] * b[i] for i, j in ((1, 2), (2, 0), (0, 1))])


def stepping(change, keep):
    """A step of Runge and Kutta's fourth order; `keep` computes what is to be kept of it."""

    def step(v):
        start = ahead = v
        for weight, reach in RUNGE_KUTTA:
            slope = DT * change(ahead)
            v, ahead = v + weight * slope, start + reach * slope
        return keep(v)

    return step


def by_mpi4py_fft(n):
    from mpi4py import MPI
    from mpi4py_fft import PFFT, newDistArray

    world = MPI.COMM_WORLD
    transform = PFFT(world, [n] * 3, dtype=np.float64)
    waves_in, points_in = newDistArray(transform, True), newDistArray(transform, False)
    points_here, waves_here = transform.local_slice(False), transform.local_slice(True)
    wave = np.fft.fftfreq(n, 1 / n), np.fft.fftfreq(n, 1 / n), np.fft.rfftfreq(n, 1 / n)
    k = np.stack(np.meshgrid(*(w[s] for w, s in zip(wave, waves_here, strict=True)), indexing="ij"))
    k2, kept, ik = (k * k).sum(axis=0), (abs(k) < n / 3).all(axis=0), 1j * k
    along = k / np.maximum(k2, 1)
    angles = [np.arange(n)[s] * (2 * np.pi / n) for s in points_here]

    def to_points(v):
        made = np.empty((3, *points_in.shape))
        for i in range(3):
            waves_in[:] = v[i]
            made[i] = transform.backward(waves_in, points_in)
        return made

    def to_waves(u):
        made = np.empty((3, *waves_in.shape), complex)
        for i in range(3):
            points_in[:] = u[i]
            made[i] = transform.forward(points_in, waves_in)
        return made

    def change(v):
        force = to_waves(cross(np, to_points(v), to_points(cross(np, ik, v)))) * kept
        return force - along * (force * k).sum(axis=0) - VISCOSITY * k2 * v

    def keep(v):
        world.barrier()
        return v

    def energy(v, cpu):
        totals = world.reduce(np.array([(to_points(v) ** 2).sum() / n**3 / 2, cpu]))
        return None if world.rank else totals

    x, y, z = np.meshgrid(*angles, indexing="ij", sparse=True)
    return lambda: to_waves(np.stack(vortex(np, x, y, z))), stepping(change, keep), energy


def by_dask(n):
    import dask
    import dask.array as da

    dask.config.set(scheduler="threads", num_workers=WORKERS)
    half = -(-n // WORKERS)

    def to_points(v):
        v = da.fft.ifftn(v, axes=(1,)).rechunk((3, half, n, -1))
        return da.fft.irfftn(v, s=(n, n), axes=(2, 3))

    def to_waves(u):
        u = da.fft.rfftn(u, axes=(2, 3)).rechunk((3, n, half, -1))
        return da.fft.fftn(u, axes=(1,))

    wave = np.fft.fftfreq(n, 1 / n), np.fft.fftfreq(n, 1 / n), np.fft.rfftfreq(n, 1 / n)
    k = da.from_array(np.stack(np.meshgrid(*wave, indexing="ij")), (3, n, half, -1)).persist()
    k2, kept = (k * k).sum(axis=0).persist(), (abs(k) < n / 3).all(axis=0).persist()
    along, ik = (k / da.maximum(k2, 1)).persist(), (1j * k).persist()

    def change(v):
        force = to_waves(cross(da, to_points(v), to_points(cross(da, ik, v))))
        force = force * kept
        return force - along * (force * k).sum(axis=0) - VISCOSITY * k2 * v

    x, y, z = np.ix_(*[np.arange(n) * (2 * np.pi / n)] * 3)
    u = da.from_array(np.stack(vortex(np, x, y, z)), (3, half, n, n))

    def energy(v, cpu):
        return (to_points(v) ** 2).sum().compute() / n**3 / 2, cpu

    return (
        lambda: to_waves(u).persist(),
        stepping(change, lambda v: v.rechunk((3, n, half, -1)).persist()),
        energy,
    )


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
