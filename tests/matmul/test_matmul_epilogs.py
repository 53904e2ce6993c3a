"""Every epilog on every way to split D, against float64 NumPy on the whole matrices."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from arrangements import part_of
from shardmath.arrays import library_named
from shardmath.arrays.dtypes import to_numpy
from shardmath.geometry import BlockCyclic, Box, ProcessGrid, Replicated, Slab
from shardmath.linalg.advanced import MatmulEpilog, matmul, matrix_qualifiers_dtype

M, N, K = 13, 9, 11
# GELU's tanh is a few rounding errors off; the rest is exact, for operands are small integers.
TOLERANCE = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 3e-6, "float64": 1e-13}


def d_distribution(kind, rank, size):
    rows = next(r for r in (2, 3, 1) if size % r == 0)
    grid = ProcessGrid(shape=(rows, size // rows), layout=ProcessGrid.Layout.COL_MAJOR)
    bounds = [0, 0, 5, M, M][: size + 1] if size == 4 else np.linspace(0, M, size + 1).astype(int)
    return {
        "rows": Slab.X,
        "columns": Slab.Y,
        "blocks": BlockCyclic(grid, (2, 3), first_process=(rows - 1, 0)),
        "whole": Replicated(),
        "boxes": Box((int(bounds[rank]), 0), (int(bounds[rank + 1]), N)),
    }[kind]


KINDS = ("rows", "columns", "blocks", "whole", "boxes")
EPILOGS = [e.name for e in MatmulEpilog if e.name not in ("DEFAULT", "ALLREDUCE")]


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gelu_slope(x):
    u = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    du = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)
    return 0.5 * (1 + np.tanh(u)) + 0.5 * x * (1 - np.tanh(u) ** 2) * du


def packed(positive):
    """The mask of a boolean matrix, one bit at a time, its columns padded to 128 bits."""
    m, n = positive.shape
    mask = np.zeros(((m + 127) // 128 * 16, n), np.uint8)
    bits = np.packbits(positive, axis=0, bitorder="little")
    mask[: len(bits)] = bits
    return mask


def padded(x):
    return np.vstack([x, np.zeros((-len(x) % 8, x.shape[1]))])


class Whole:
    """The global matrices and what each epilog makes of them, in float64."""

    def __init__(self, seed, dtype):
        rng = np.random.default_rng(seed)
        self.a, self.b, self.c, bias, self.slopes = (
            rng.integers(-3, 4, shape).astype(to_numpy(dtype))
            for shape in ((M, K), (K, N), (M, N), (M, 1), (M, N))
        )
        self.bias = bias
        self.mask = rng.integers(0, 2, (M, N)).astype(bool)
        a, b, c, b1 = (x.astype(np.float64) for x in (self.a, self.b, self.c, bias))
        self.sums = 0.5 * (a @ b) + 2 * c
        self.biased = self.sums + b1

    def result(self, name):
        """(D, the output that D* and BGRAD make as a vector over M or N)."""
        x = self.biased if "BIAS" in name else self.sums
        if name.startswith("RELU"):
            return np.maximum(x, 0), None
        if name.startswith("GELU"):
            return gelu(x), None
        if name.startswith("DRELU"):
            d = np.where(self.mask, x, 0)
            return d, d.sum(1)
        if name.startswith("DGELU"):
            d = x * gelu_slope(self.slopes.astype(np.float64))
            return d, d.sum(1)
        return x, {
            "BGRADA": self.a.astype(np.float64).sum(1),
            "BGRADB": self.b.astype(np.float64).sum(0),
        }.get(name)


whole_matrices = cache(Whole)


def run_epilogs(context, kind, library_name, dtype, names):
    rank, size = context.rank, context.size
    library = library_named(library_name)
    whole = whole_matrices(5, dtype)
    d = d_distribution(kind, rank, size)
    tolerance = TOLERANCE[dtype]

    def mine(x):
        return part_of(x, d, rank, size)

    def given(x, order="C"):
        x = x.astype(to_numpy("uint8" if x.dtype == np.uint8 else dtype))
        return library.from_host(np.array(x, order=order))

    def close(got, want):
        return np.abs(got.astype(np.float64) - want).max(initial=0) <= tolerance * 40

    with context:
        for turn, name in enumerate(names):
            first, second = [(Slab.X, Slab.X), (Slab.Y, Slab.X), (Replicated(), Slab.Y)][turn % 3]
            a, b = (
                given(part_of(x, dist, rank, size))
                for x, dist in ((whole.a, first), (whole.b, second))
            )
            rows = part_of(whole.bias.repeat(N, 1), d, rank, size)[:, :1]
            if rows.shape[1] == 0:  # a rank with no column of D holds rows of it all the same
                rows = whole.bias[: len(rows)]
            inputs = {}
            if "BIAS" in name:
                inputs["bias"] = given(rows if turn % 2 else rows[:, 0])
            if name.startswith("DRELU"):
                inputs["relu_aux"] = given(packed(mine(whole.mask)), "F")
            if name.startswith("DGELU"):
                inputs["gelu_aux"] = given(padded(mine(whole.slopes).astype(float)), "F")
            result = matmul(
                a,
                b,
                given(mine(whole.c)),
                distributions=[first, second, d],
                alpha=0.5,
                beta=2,
                epilog=MatmulEpilog[name],
                epilog_inputs=inputs or None,
            )
            want, vector = whole.result(name)
            aux = {}
            if "_AUX" in name or "GRAD" in name:
                result, aux = result
                aux = {key: library.host_view(x) for key, x in aux.items()}
            assert close(library.host_view(result), mine(want)), name
            x = mine(whole.biased if "BIAS" in name else whole.sums)
            if name.endswith("_BGRAD") or name == "BGRADA":
                vector = mine(vector[:, None].repeat(N, 1))
            check_aux(name, aux, x, vector, close)


def check_aux(name, aux, x, vector, close):
    """`x`: this rank's input of the activation; `vector`: what a gradient is, or its rows of it."""
    if not ("_AUX" in name or "GRAD" in name):
        assert aux == {}
        return
    (key,) = aux
    got = aux[key]
    if "_AUX" in name:
        assert key == name.removesuffix("_BIAS").lower()
        want = packed(x > 0) if "RELU" in name else padded(x)
        assert got.shape == want.shape and got.flags.f_contiguous
        assert (got == want).all() if "RELU" in name else close(got, want), name
        return
    assert key == name.lower() and got.shape == (len(vector),)
    if vector.ndim == 2:  # equal columns, or none
        got = got[:, None].repeat(vector.shape[1], 1)
    assert close(got, vector), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 3, 4])
def test_epilogs(contexts, kind, size):
    for library, dtype in (("numpy", "float64"), ("torch", "float32")):
        contexts.run(run_epilogs, kind, library, dtype, EPILOGS, ranks=size)


@pytest.mark.parametrize(
    ("library", "dtype"), [("numpy", "float16"), ("numpy", "bfloat16"), ("torch", "bfloat16")]
)
def test_epilogs_of_halves(contexts, library, dtype):
    contexts.run(run_epilogs, "blocks", library, dtype, EPILOGS, ranks=4)


def run_allreduce(context, with_c, inplace):
    """ALLREDUCE gives every rank the whole result, and sums every rank's beta C."""
    rank, size = context.rank, context.size
    rng = np.random.default_rng(7)
    a, b = rng.standard_normal((M, K)), rng.standard_normal((K, N))
    each = rng.standard_normal((size, M, N))
    done = 0
    with context:
        for first in (Slab.X, Slab.Y, Replicated()):
            for second in (Slab.X, Slab.Y, Replicated()):
                c = each[rank].copy()
                d = matmul(
                    part_of(a, first, rank, size),
                    part_of(b, second, rank, size),
                    *([c] if with_c else []),
                    distributions=[first, second, Slab.Y],
                    alpha=0.5,
                    beta=3 if with_c else None,
                    epilog=MatmulEpilog.ALLREDUCE,
                    options={"inplace": inplace},
                )
                want = 0.5 * a @ b + (3 * each.sum(0) if with_c else 0)
                np.testing.assert_allclose(d, want, rtol=0, atol=1e-12)
                assert (d is c) == inplace
                assert inplace or (c == each[rank]).all()
                done += 1
    return done


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize(
    ("with_c", "inplace"), [(False, False), (True, False), (True, True)], ids=["", "c", "in place"]
)
def test_allreduce(contexts, size, with_c, inplace):
    assert contexts.run(run_allreduce, with_c, inplace, ranks=size) == [9] * size


def run_qualified_gradients(context):
    """BGRADA sums rows of op(A), BGRADB columns of op(B), whatever the qualifiers say: those rows
    that a rank has of D, and all columns.
    """
    rank, size = context.rank, context.size
    rng = np.random.default_rng(1)
    a = rng.standard_normal((K, M)) + 1j * rng.standard_normal((K, M))
    b = rng.standard_normal((N, K)) + 1j * rng.standard_normal((N, K))
    qualifiers = np.zeros(3, matrix_qualifiers_dtype)
    qualifiers[:2]["is_transpose"] = 1
    qualifiers[:2]["is_conjugate"] = 1
    grid = BlockCyclic(ProcessGrid(shape=(size, 1)), (2, 4))
    with context:
        for name, vector in (("bgrada", a.conj().sum(0)), ("bgradb", b.conj().sum(1))):
            for kind in KINDS:
                of_d = d_distribution(kind, rank, size)
                d, aux = matmul(
                    part_of(a, grid, rank, size),
                    part_of(b, Slab.Y, rank, size),
                    distributions=[grid, Slab.Y, of_d],
                    qualifiers=qualifiers,
                    epilog=MatmulEpilog[name.upper()],
                )
                want = part_of(a.conj().T @ b.conj().T, of_d, rank, size)
                np.testing.assert_allclose(d, want, atol=1e-12)
                if name == "bgrada":  # the rows that this rank has of D, as columns of it
                    rows = part_of(vector[:, None].repeat(N, 1), of_d, rank, size)
                    assert aux[name].shape == rows.shape[:1], kind
                    np.testing.assert_allclose(
                        aux[name][:, None].repeat(rows.shape[1], 1), rows, atol=1e-12
                    )
                else:
                    np.testing.assert_allclose(aux[name], vector, atol=1e-12)


def test_gradients_of_transposed_conjugates(contexts):
    contexts.run(run_qualified_gradients, ranks=3)
