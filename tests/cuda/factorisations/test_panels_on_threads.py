"""LU of panels by our kernel, on this computer's threads in place of a GPU's.

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
typedef const PanelArgument* Argument;
extern "C" void factorise(Argument argument, unsigned blocks, unsigned threads, unsigned late) {
    run_grid(blocks, threads, late, [=] { factorise_columns(*argument); });
}
extern "C" void bring(Argument argument, unsigned blocks, unsigned threads, unsigned late) {
    run_grid(blocks, threads, late, [=] { bring_up(*argument); });
}
"""


@pytest.fixture(scope="module", params=lapack._REAL)
def panel_kernel(request, tmp_path_factory):
    """The type, and what stands for `lapack._panel_kernel`; thread 3 always comes late."""
    text = source_of("panel_lu.cu", "// -- candidates ---")
    defines = {"ELEMENT": lapack._REAL[request.param], "THREADS": THREADS}
    library = compiled(tmp_path_factory.mktemp("panels"), text, (), RUN, **defines)
    functions = {"factorise_columns": library.factorise, "bring_up": library.bring}

    def launched(device, name, dtype):
        def launch(stream, blocks, threads, argument):
            functions[name](argument.first, blocks, threads, 3)

        return SimpleNamespace(launch=launch)

    return request.param, launched


def gemm(dtype):
    def at(address, leading, rows, columns):
        words = ctypes.c_ubyte * (dtype.itemsize * (leading * (columns - 1) + rows))
        steps = dtype.itemsize, dtype.itemsize * leading
        return np.ndarray((rows, columns), dtype, words.from_address(address), 0, steps)

    def multiply(handle, a_op, b_op, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc):
        assert (a_op, b_op, at(alpha, 1, 1, 1), at(beta, 1, 1, 1)) == (0, 0, -1, 1)
        at(c, ldc, m, n)[...] -= at(a, lda, m, k) @ at(b, ldb, k, n)

    return multiply


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
    blas = SimpleNamespace(
        set_stream=lambda *_: None,
        set_workspace=lambda *_: None,
        dgemm=gemm(np.dtype("float64")),
        sgemm=gemm(np.dtype("float32")),
    )
    with patch.multiple(
        lapack,
        WORKSPACE=0,
        _PANEL_THREADS=THREADS,
        _panel_kernel=launched,
        _blas=lambda *_: None,
        bindings=lambda: (None, blas),
        note_zeros=note_zeros,
        call=lambda name, place, byte, nbytes, stream: ctypes.memset(place, byte, nbytes),
    ):
        assert lapack.blocks_of_lu(DEVICE, x)
        room = lapack.room(DEVICE, "getrf", x)
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
