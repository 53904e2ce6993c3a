"""JAX's arrays are taken and given back where they lie, and its compiled programs call us."""

from __future__ import annotations

import importlib
import importlib.util
import os

import numpy as np
import pytest

from ranks import Pool, with_context
from shardmath import fft
from shardmath.collectives import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter
from shardmath.context.context import require_context
from shardmath.distribution import BlockCyclic, ProcessGrid, Replicated, Slab, redistribute
from shardmath.linalg.advanced import MatmulEpilog, matmul, matrix_qualifiers_dtype

X, Y = Slab.X, Slab.Y
ROWS, COLUMNS, BATCH = 7, 4, 6  # rows are uneven
OF_A, OF_B = X.bind((ROWS, COLUMNS)), Y.bind((COLUMNS, BATCH))
OF_D = X.bind((ROWS, BATCH))


def flags():
    made = np.zeros(3, matrix_qualifiers_dtype)
    made["is_transpose"][1] = True
    return made


# Each takes this rank's rows of A, its columns of B and an array that all ranks have.
CALLS = {
    "matmul": lambda a, b, w: matmul(a, b, distributions=[OF_A, OF_B, OF_D]),
    "matmul of a weight": lambda a, b, w: matmul(a, w, distributions=[X, Replicated(), X]),
    "matmul with qualifiers": lambda a, b, w: matmul(
        a, w.T, distributions=[X, Replicated(), X], qualifiers=flags()
    ),
    "matmul with c and a bias": lambda a, b, w: matmul(
        a,
        w,
        a[:, :3],
        beta=0.5,
        distributions=[X, Replicated(), X],
        epilog=MatmulEpilog.RELU_BIAS,
        epilog_inputs={"bias": a[:, 0]},
    ),
    "redistribute": lambda a, b, w: redistribute(a, OF_A, Y),
    "redistribute cyclic": lambda a, b, w: redistribute(
        w,
        Replicated(),
        BlockCyclic(ProcessGrid(shape=(2, 1), layout=ProcessGrid.Layout.ROW_MAJOR), (1, 3)),
    ),
    "fft": lambda a, b, w: fft.fft(a + 0j, distribution=(OF_A, Y), norm="ortho"),
    "ifft": lambda a, b, w: fft.ifft(b + 1j, distribution=Y, axes=[0]),
    "rfft": lambda a, b, w: fft.rfft(a, distribution=OF_A),
    "irfft": lambda a, b, w: fft.irfft(a + 0j, distribution=X, axes=[1]),
    "dct": lambda a, b, w: fft.dct(a, distribution=X),
    "idct": lambda a, b, w: fft.idct(a, 3, distribution=X),
    "dctn": lambda a, b, w: fft.dctn(a, axes=[0, 1], distribution=(OF_A, Y)),
    "idctn": lambda a, b, w: fft.idctn(a, axes=[1], distribution=X, norm="ortho"),
    "dst": lambda a, b, w: fft.dst(a, 4, distribution=X),
    "idst": lambda a, b, w: fft.idst(b, axis=0, distribution=Y),
    "dstn": lambda a, b, w: fft.dstn(a, axes=[1], distribution=X),
    "idstn": lambda a, b, w: fft.idstn(a, axes=[1], distribution=X),
    "all_gather": lambda a, b, w: all_gather(b, axis=-1),
    "reduce_scatter": lambda a, b, w: reduce_scatter(w, axis=-1),
    "reduce_scatter with counts": lambda a, b, w: reduce_scatter(w, counts=[1, 3], op="max"),
    "all_to_all": lambda a, b, w: all_to_all(w, axis=1),
    "all_to_all with counts": lambda a, b, w: all_to_all(
        w, send_counts=[1, 3], receive_counts=[[1, 1], [3, 3]][require_context().rank]
    ),
    "broadcast": lambda a, b, w: broadcast(b, root=1),
    "all_reduce": lambda a, b, w: all_reduce(x=w, op="mean"),
    "all_reduce of integers": lambda a, b, w: all_reduce((w * 9).astype("int32"), op="max"),
    "all_reduce of bfloat16": lambda a, b, w: all_reduce(w.astype("bfloat16")),
}


def operands(context):
    a = np.sin(np.arange(ROWS * COLUMNS, dtype="f4")).reshape(ROWS, COLUMNS)
    b = np.cos(np.arange(COLUMNS * BATCH, dtype="f4")).reshape(COLUMNS, BATCH)
    own = [x[split.slices(context.rank)] for x, split in ((a, OF_A), (b, OF_B))]
    return [np.ascontiguousarray(x) for x in own] + [a[:4, :3] * (1 + context.rank)]


def check_calls(context, jax):
    """Calls with JAX's arrays, and their compiled programs, beside those with NumPy's."""
    import ml_dtypes  # noqa: F401 - which names bfloat16 to NumPy

    given = operands(context)
    arrays = [jax.numpy.asarray(x) for x in given]
    for name, call in CALLS.items():
        expected = call(*given)
        for program in (call, jax.jit(call)):
            made = program(*arrays)
            assert isinstance(made, jax.Array), name
            assert (made.dtype, made.shape) == (expected.dtype, expected.shape), name
            np.testing.assert_allclose(
                np.asarray(made, "c16"), expected.astype("c16"), rtol=1e-4, atol=1e-5, err_msg=name
            )
    public = {name.split()[0] for name in CALLS}
    rules = importlib.import_module("shardmath.interchange.jax_programs").RULES
    assert public == rules.keys()  # a rule without a case is not known to be right


def check_memory(jax):
    """Nothing is copied: neither operands nor new results, small and large."""
    calls = importlib.import_module("shardmath.interchange.calls")
    for count in (1, 7, 1000, 1 << 18):
        x = jax.numpy.ones(count)
        assert calls.borrowed(x).ctypes.data == x.unsafe_buffer_pointer()
        for _ in range(3):
            host = all_reduce(calls.borrowed(x))
            assert calls.returned(host, x).unsafe_buffer_pointer() == host.ctypes.data


def check_order(context, jax):
    """Calls stay in their order in loops, branches, and from program to program."""
    lax, jnp = jax.lax, jax.numpy

    @jax.jit
    def iterate(x):
        def step(n, x):
            larger = all_reduce(x, op="max") + n
            return lax.cond(n % 2 == 0, lambda y: all_reduce(y) / 2, lambda y: y, larger)

        return lax.fori_loop(0, 6, step, x)

    x = own = np.full(3, context.rank, "f4")
    for n in range(6):
        own = all_reduce(own, op="max") + np.float32(n)
        own = all_reduce(own) / 2 if n % 2 == 0 else own
    np.testing.assert_allclose(iterate(jnp.asarray(x)), own)

    @jax.jit
    def unused(x):
        all_reduce(x * 7)  # whose result is not used: the call is made all the same
        return all_gather(x)

    assert unused(jnp.ones(2) * context.rank).tolist() == [0, 0, 1, 1]

    @jax.jit
    def late(x):
        for _ in range(30):
            x = jnp.tanh(x @ x)
        return x

    # A program that waits on one rank only. Calls outside wait for it there, with any arrays.
    outside = {
        "NumPy": lambda: all_reduce(np.full(2, 5.0)).tolist() == [10, 10],
        "JAX": lambda: all_reduce(jnp.full(2, 5.0)).tolist() == [10, 10],
        "a barrier": lambda: context.barrier() is None,
    }
    program = jax.jit(lambda x: all_reduce(x[0, :2] * 0 + 1))
    program(jnp.ones((500, 500)))
    for name, call in outside.items():
        pending = jnp.ones((500, 500))
        first = program(late(pending) if context.rank == 0 else pending)
        assert (name, call(), first.tolist()) == (name, True, [2, 2])


def check_mistakes(context, jax):
    """What is raised; the context is as good as before."""
    x = jax.numpy.ones((3, 4))
    while_tracing = {
        "pass distributions that are bound": lambda x: redistribute(x, X, Y),
        "out= is not for calls that JAX": lambda x: all_reduce(x, out=x),
        "async_op= is not for": lambda x: all_reduce(x, async_op=True),
        "send_counts and receive_counts": lambda x: all_to_all(x, send_counts=[1, 2]),
        "a backward pass|backward passes": lambda x: matmul(
            x, x, distributions=[X, Y, X], epilog=MatmulEpilog.RELU_AUX
        ),
        "JVP": jax.grad(lambda x: all_reduce(x).sum()),
        "vmap": jax.vmap(all_reduce),
    }
    for text, call in while_tracing.items():
        with pytest.raises((ValueError, NotImplementedError), match=text):
            jax.jit(call)(x)
    with pytest.raises(ValueError, match="read-only"):
        all_reduce(x, out=x)
    with pytest.raises(Exception, match="the shapes of parts"):
        jax.jit(all_gather)(x[context.rank :]).block_until_ready()
    assert jax.jit(all_reduce)(x).tolist() == all_reduce(x).tolist() == [[2.0] * 4] * 3


def of_jax(context):
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax = importlib.import_module("jax")
    with context:
        check_calls(context, jax)
        check_memory(jax)
        check_order(context, jax)
        check_mistakes(context, jax)
    return True


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed")
def test_arrays_and_programs_of_jax():
    with Pool(2, with_context) as ranks:
        assert ranks.run(of_jax, ranks=2, timeout=300) == [True] * 2
