"""Triangular blocks solved by our kernel, on this computer's threads in place of a GPU's."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import scipy.linalg
from on_threads import compiled, source_of

from shardmath.local.gpu import Matrix, lapack, triangular

WORDS = "inline char* dynamic_shared() { return block_of_thread->shared; }\n"
RUN = """
typedef const SolveArgument* Argument;
extern "C" void solve(Argument argument, unsigned blocks, unsigned threads, unsigned late) {
    run_grid(blocks, threads, late, [=] { solve_triangular(*argument); });
}
"""


@pytest.fixture(scope="module", params=["float32", "complex128"])
def kernels(request, tmp_path_factory):
    """The type, and what stands for `triangular._kernel`; thread 3 always comes late."""
    text = source_of("solve_triangular.cu", "// -- numbers ---", words=WORDS)
    libraries = [
        compiled(tmp_path_factory.mktemp("solving"), text, ("numbers.cuh",), RUN,
                 ELEMENT=request.param, BY_ROWS=by_rows) for by_rows in (0, 1)
    ]  # fmt: skip

    def launched(device, dtype, by_rows):
        def launch(stream, blocks, threads, argument):
            libraries[by_rows].solve(argument.first, blocks, threads, 3)

        assert dtype == request.param
        return SimpleNamespace(launch=launch)

    return request.param, launched


def matrix_of(x):
    steps = (step // x.itemsize for step in x.strides)
    return Matrix(x.ctypes.data, *x.shape, *steps, x.dtype.name)


def random(shape, dtype):
    parts = np.random.default_rng(shape[0]).standard_normal((2, *shape))
    made = parts[0] + 1j * parts[1] if np.dtype(dtype).kind == "c" else parts[0]
    return made.astype(dtype)


@pytest.mark.parametrize(("n", "order"), [(1, "F"), (33, "C"), (65, "F")])
def test_solutions_are_those_of_scipy(kernels, n, order):
    """Of all triangles, with gaps between columns; nothing else is read or written."""
    dtype, launched = kernels
    columns = 1 + 16 // np.dtype(dtype).itemsize  # one more than a block has
    ops = "NTC" if np.dtype(dtype).kind == "c" else "NT"
    for lower, unit, op in itertools.product((True, False), (True, False), ops):
        whole = random((n, n), dtype) / n + 2 * np.eye(n, dtype=dtype)
        read = np.tril(whole) if lower else np.triu(whole)
        held = np.full((n + 2, n + 3), np.nan, dtype, order=order)
        a = held[:n, :n]
        below = np.tri(n, k=-unit)
        a[...] = np.where(below if lower else below.T, read, np.nan)
        given = np.full((n + 2, columns + 1), 77, dtype, order="F")
        b = given[1 : n + 1, :columns]
        b[...] = random((n, columns), dtype)
        want = scipy.linalg.solve_triangular(read, b, "NTC".index(op), lower, unit)
        assert triangular.takes(matrix_of(b))
        with patch.object(triangular, "_kernel", launched):
            lapack.solve_triangular(
                None, 0, matrix_of(a), matrix_of(b), workspace=0, lower=lower, op=op, unit=unit
            )
        error = abs(b - want).max()
        assert error <= 100 * np.finfo(dtype).eps * abs(want).max(), (lower, unit, op)
        assert (given[0] == 77).all() and (given[-1] == 77).all() and (given[:, -1] == 77).all()
