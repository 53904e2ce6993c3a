"""Power iteration in one program that JAX compiles, compared with JAX's own `shard_map`.

python -m shardmath run -n 4 examples/jax_programs.py

    ranks: one process each            shard_map: one process, one JAX device each
    r0 [rows of A] @ v ─┐              d0 [rows of A] @ v ─┐
    r1 [rows of A] @ v ─┼─ redistribute    d1 [rows of A] @ v ─┼─ lax.all_gather
    r2 [rows of A] @ v ─┘  -> v on all     d2 [rows of A] @ v ─┘  -> v on all
"""

from __future__ import annotations

import os

import numpy as np

import shardmath
from shardmath.distribution import Replicated, Slab, redistribute

EXTENT, STEPS = 60, 40


def main() -> None:
    """Iterate with all ranks, then in one process, and compare."""
    context = shardmath.initialize("cpu")
    # As many JAX devices in this process as there are ranks: only shard_map needs them.
    os.environ.update(
        JAX_PLATFORMS="cpu",
        XLA_FLAGS=f"--xla_force_host_platform_device_count={context.size}",
    )
    try:
        import jax
    except ImportError as reason:
        print(f"this example needs jax: {reason}")
        raise SystemExit(0) from None
    a = np.random.default_rng(3).random((EXTENT, EXTENT), dtype="float32")
    a += a.T
    rows = Slab.X.bind((EXTENT, 1))  # the shape tells JAX what this rank will have

    @jax.jit
    def by_ranks(own, v):
        def step(_, v):
            w = redistribute(own @ v, rows, Replicated())
            return w / jax.numpy.linalg.norm(w)

        return jax.lax.fori_loop(0, STEPS, step, v)

    own = jax.numpy.asarray(a[Slab.X.slices(context.rank, a.shape)])
    v = by_ranks(own, jax.numpy.ones((EXTENT, 1)))
    largest = float((v.T @ (a @ v))[0, 0])
    if context.rank == 0:
        print(f"largest eigenvalue {largest:.3f}, from {context.size} rank(s)")
    if context.rank == 0 and EXTENT % context.size == 0:  # shard_map splits evenly
        assert np.allclose(v, by_shards(jax, a, context.size), atol=1e-4)
        print("the same vector as by shard_map")
    assert np.isclose(largest, np.linalg.eigvalsh(a)[-1], rtol=1e-3)
    shardmath.finalize()


def by_shards(jax, a: np.ndarray, size: int) -> np.ndarray:
    """The same iteration on the devices of one process."""
    mesh = jax.sharding.Mesh(jax.devices()[:size], ("ranks",))
    split, everywhere = jax.sharding.PartitionSpec("ranks"), jax.sharding.PartitionSpec()

    def iterate(own, v):
        def step(_, v):
            w = jax.lax.all_gather(own @ v, "ranks", tiled=True)
            return w / jax.numpy.linalg.norm(w)

        return jax.lax.fori_loop(0, STEPS, step, v)

    program = jax.shard_map(
        iterate, mesh=mesh, in_specs=(split, everywhere), out_specs=everywhere, check_vma=False
    )
    return np.asarray(jax.jit(program)(a, jax.numpy.ones((EXTENT, 1))))


if __name__ == "__main__":
    main()
