"""LU and Cholesky factors of panels by our kernels, on this computer's threads in place of a GPU's.

The host's code launches it; cuBLAS is NumPy. A block has 64 rows here, so that a panel of 100 rows
has two.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import scipy.linalg
from on_threads import aligned, compiled, source_of

from shardmath.local.gpu import Matrix, lapack

THREADS, BLOCKS, FIRST, GOOD = 64, 3, 1000, 1 << 62
DEVICE = SimpleNamespace(processors=BLOCKS, activate=lambda: None)
RUN = """
extern "C" void run_{name}(const PanelArgument* argument, unsigned blocks, unsigned threads) {{
    run_grid(blocks, threads, 3, [=] {{ {name}(*argument); }});
}}
"""


def kernels_of(folder, text, names, element):
    """What stands for a kernel of `lapack`'s, by device, name and type; thread 3 comes late."""
    run = "".join(RUN.format(name=name) for name in names)
    library = compiled(folder, text, (), run, ELEMENT=element, THREADS=THREADS)

    def launched(device, name, dtype):
        def launch(stream, blocks, threads, argument):
            getattr(library, f"run_{name}")(argument.first, blocks, threads)

        return SimpleNamespace(launch=launch)

    return launched


@pytest.fixture(scope="module", params=lapack._REAL)
def panel_kernel(request, tmp_path_factory):
    """The type, and what stands for `lapack._panel_kernel`."""
    text = source_of("panel_lu.cu", "// -- candidates ---")
    names, element = ("factorise_columns", "bring_up"), lapack._REAL[request.param]
    return request.param, kernels_of(tmp_path_factory.mktemp("panels"), text, names, element)


@pytest.fixture(scope="module", params=["float64", "complex64"])
def cholesky_kernel(request, tmp_path_factory):
    """The type, and what stands for `lapack._cholesky_kernel`."""
    text = source_of("panel_cholesky.cu")
    names, element = ("factorise_diagonal", "divide"), lapack._ELEMENTS[request.param]
    return request.param, kernels_of(tmp_path_factory.mktemp("panels"), text, names, element)


def gemm(name):
    dtype = np.dtype(name)

    def at(address, leading, rows, columns):
        words = ctypes.c_ubyte * (dtype.itemsize * (leading * (columns - 1) + rows))
        steps = dtype.itemsize, dtype.itemsize * leading
        return np.ndarray((rows, columns), dtype, words.from_address(address), 0, steps)

    def multiply(handle, a_op, b_op, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc):
        assert (a_op, at(alpha, 1, 1, 1), at(beta, 1, 1, 1)) == (0, -1, 1) and b_op in (0, 2)
        right = at(b, ldb, n, k).conj().T if b_op else at(b, ldb, k, n)
        at(c, ldc, m, n)[...] -= at(a, lda, m, k) @ right

    return multiply


BLAS = SimpleNamespace(
    set_stream=lambda *_: None,
    set_workspace=lambda *_: None,
    **{f"{letter}gemm": gemm(dtype) for dtype, letter in lapack._LETTERS.items()},
)
WITHOUT_GPU = {"_blas": lambda *_: None, "bindings": lambda: (None, BLAS)}


def note_zeros(device, stream, a, *, status, first):
    status.append(first)


def factors_of(panel_kernel, a):
    """A panel's factors and pivots. Sentinels lie around all that is written."""
    name, launched = panel_kernel
    (height, width), gap = a.shape, 5
    held = np.full((width, height + gap), 77, name)  # by columns, with a gap behind each
    held[:, :height] = a.T
    x = Matrix(held.ctypes.data, height, width, 1, height + gap, name)
    pivots, noted = np.full(width + 1, -9, np.int32), []
    with patch.multiple(
        lapack,
        **WITHOUT_GPU,
        WORKSPACE=0,
        _PANEL_THREADS=THREADS,
        _panel_kernel=launched,
        note_zeros=note_zeros,
        call=lambda name, place, byte, nbytes, stream: ctypes.memset(place, byte, nbytes),
    ):
        assert lapack.blocks_of_lu(DEVICE, x)
        room = lapack.room(DEVICE, x, pivots=True)
        workspace = aligned(room + 64, 0xA5)
        words = {"pivots": pivots.ctypes.data, "status": noted, "first": FIRST}
        lapack.lu(DEVICE, 0, x, workspace=workspace.ctypes.data, **words)
    assert (held[:, height:] == 77).all() and pivots[-1] == -9
    assert (workspace[room:] == 0xA5).all() and noted == [FIRST]
    return held[:, :height].T, pivots[:-1] - FIRST


def random_panel(height, width, dtype):
    return np.random.default_rng(height).standard_normal((height, width)).astype(dtype)


@pytest.mark.parametrize("shape", [(100, 66), (192, 1), (33, 33), (1, 1)])
def test_factors_and_pivots_are_lapacks(panel_kernel, shape):
    a = random_panel(*shape, panel_kernel[0])
    made, pivots = factors_of(panel_kernel, a)
    want, wanted = scipy.linalg.lu_factor(a)
    assert pivots.tolist() == wanted[: shape[1]].tolist()
    assert abs(made - want).max() <= 50 * shape[1] * np.finfo(a.dtype).eps * abs(want).max()


def test_equal_sizes_zeros_and_nan(panel_kernel):
    """Of equal sizes the first is the pivot; a column of zeros stays; a NaN is never chosen."""
    height, width = 150, 5
    a = random_panel(height, width, panel_kernel[0])
    a[:, 0] = np.where(np.arange(height) % 2, -1, 1)
    a[:, 3] = a[:, 0]
    made, pivots = factors_of(panel_kernel, a)
    assert pivots[0] == 0 and (made[3:, 3] == 0).all() and pivots[3] == 3
    a[7, 1] = np.nan
    made, pivots = factors_of(panel_kernel, a)
    assert pivots[1] != 7 and np.isnan(made[7, 1]) and (pivots >= np.arange(width)).all()


def test_which_panels_it_takes():
    for dtype, rows, columns, blocks in [
        ("float64", 32768, 512, 86), ("float32", 512, 512, 2), ("float64", 128 * 384, 1, 128),
        ("float64", 128 * 384 + 1, 1, 0), ("complex64", 512, 512, 0), ("float64", 511, 512, 0),
    ]:  # fmt: skip
        a = Matrix.packed(0, (rows, columns), dtype, "F")
        assert lapack.blocks_of_lu(SimpleNamespace(processors=132), a) == blocks
    assert lapack.blocks_of_lu(SimpleNamespace(processors=10), a._replace(rows=4000)) == 0


def cholesky_factor_of(cholesky_kernel, a):
    """A panel after `lapack.cholesky`, and what was noted. Sentinels lie above the diagonal, and
    between the columns.
    """
    name, launched = cholesky_kernel
    (height, width), gap = a.shape, 3
    held = np.full((width, height + gap), 77, name)
    held[:, :height] = np.where(np.tri(height, width, dtype=bool), a, 77).T
    x = Matrix(held.ctypes.data, height, width, 1, height + gap, name)
    status = np.full(1, GOOD)
    with patch.multiple(lapack, _cholesky_kernel=launched, _DIVIDING=THREADS, **WITHOUT_GPU):
        lapack.cholesky(DEVICE, 0, x, workspace=0, status=status.ctypes.data, first=FIRST)
    above = ~np.tri(height, width, dtype=bool)
    if width <= lapack._WIDTH:
        assert (held[:, :height].T[above] == 77).all()
    assert (held[:, height:] == 77).all()
    return np.tril(held[:, :height].T), int(status[0])


def definite(n, dtype):
    """A positive definite matrix."""
    rng = np.random.default_rng(n)
    x = rng.standard_normal((n, n)) + 1j * rng.standard_normal((n, n))
    x = (x if dtype.startswith("complex") else x.real).astype(dtype)
    return x @ x.conj().T + n * np.eye(n, dtype=dtype)


@pytest.mark.parametrize("shape", [(150, 70), (65, 1), (32, 32), (33, 33), (1, 1), (96, 96)])
def test_cholesky_factors_are_lapacks(cholesky_kernel, shape):
    dtype, (n, width) = cholesky_kernel[0], shape
    a = definite(n, dtype)
    made, noted = cholesky_factor_of(cholesky_kernel, a[:, :width])
    want = np.linalg.cholesky(a)[:, :width]
    assert noted == GOOD
    assert abs(made - want).max() <= 20 * n * np.finfo(dtype).eps * abs(want).max()


@pytest.mark.parametrize(("order", "value"), [(1, -1.0), (3, 0.0), (32, -2.0), (33, -1), (70, 0)])
def test_the_first_minor_that_is_not_positive_is_noted(cholesky_kernel, order, value):
    a = np.eye(80, dtype=cholesky_kernel[0])
    a[order - 1, order - 1] = value
    a[75, 75] = -1
    assert cholesky_factor_of(cholesky_kernel, a)[1] == FIRST + order
