"""The kernels of factorisations, on this computer's threads in place of a GPU's.

The host's code launches them, one after the other; cuBLAS is NumPy. Blocks have few threads here,
so that a panel of 150 rows has several, and few exchanges of rows are made as one permutation.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import scipy.linalg

from shardmath.cuda.compile import KERNELS
from shardmath.local.gpu import Matrix, lapack

THREADS, CHUNK, FIRST = 32, 64, 1000
GOOD = 1 << 62
PROCESSORS = {1: 3, 2: 2}  # by the number of rows of a thread
WORDS = Path(__file__).parent.parent / "collectives" / "device_threads.hh"

PACKETS = """
struct Packet { uint64 low, high; };
inline Packet load_packet(const Packet* packet) {
    sched_yield();
    Packet p;
    _mm_store_si128((__m128i*)&p, _mm_load_si128((const __m128i*)packet));
    return p;
}
inline void store_packet(Packet* packet, Packet p) {
    _mm_store_si128((__m128i*)packet, _mm_loadu_si128((const __m128i*)&p));
}
inline uint64 bits_of(double x) { return std::bit_cast<uint64>(x); }
inline uint32 bits_of(float x) { return std::bit_cast<uint32>(x); }
"""
RUN = """
extern "C" void run_%(name)s_%(number)d(const %(argument)s* argument, unsigned blocks, unsigned n) {
    launch(blocks, n, [=] { %(name)s(*argument); });
}
"""
ARGUMENTS = {
    "factors": {"exchange_rows": "ExchangeArgument", "solve_few": "TriangleArgument"},
    "panel_lu": {"factorise_columns": "ColumnsArgument", "bring_up": "BringArgument"},
}


def on_threads(text):
    """A kernel's source for the host."""
    before, _, after = text.partition("// -- words ---")
    if after:
        text = before + PACKETS + after.partition("// -- rows ---")[2].partition("\n")[2]
    text = text.replace(f"kChunk = {lapack._CHUNK};", f"kChunk = {CHUNK};")
    return re.sub(r"__shared__ (\w+) (\w+);", r"\1& \2 = *(\1*)block_of_thread->shared;", text)


CASES = ("float64", 1), ("float32", 2), ("complex128", 1)  # a type, and rows of a thread


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The kernels of all cases, as one library."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler here")
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "elements.cuh").write_text(ELEMENTS)
    for name in ("matrix.cuh", "numbers.cuh", "permutation.cuh"):
        (folder / name).write_text((KERNELS / name).read_text())
    text = [f'#include "{WORDS}"', '#include "numbers.cuh"', '#include "permutation.cuh"']
    for number, (dtype, rows) in enumerate(CASES):
        for name, value in (("ELEMENT", dtype), ("THREADS", THREADS), ("ROWS", rows)):
            text += [f"#undef {name}", f"#define {name} {value}"]
        for file, kernels in ARGUMENTS.items():
            source = on_threads((KERNELS / f"{file}.cu").read_text()).replace('extern "C"', "")
            words = [{"name": x, "argument": y, "number": number} for x, y in kernels.items()]
            text += [f"namespace {file}_{number} {{", source, *(RUN % each for each in words), "}"]
    source, made = folder / "all.cc", folder / "all.so"
    source.write_text("\n".join(text))
    command = [compiler, "-std=c++20", "-O0", "-w", "-shared", "-fPIC", "-pthread", "-msse2"]
    subprocess.run([*command, str(source), "-o", str(made)], check=True)
    return ctypes.CDLL(str(made))


@pytest.fixture(params=range(len(CASES)), ids=lambda each: "{}-{}".format(*CASES[each]))
def library(request, compiled):
    """The type, how many rows a thread has, and the kernels for both, by their names."""
    return *CASES[request.param], lambda name: getattr(compiled, f"run_{name}_{request.param}")


ELEMENTS = """
#pragma once
#include <bit>
namespace shardmath {
template <class Real> struct complex_of { Real real, imag; };
typedef float float32;
typedef double float64;
typedef complex_of<float> complex64;
typedef complex_of<double> complex128;
typedef int int32;
typedef unsigned uint32;
typedef long long int64;
typedef unsigned long long uint64;
}
"""


def launched(library, device, kernel_name, *_):
    """A kernel of the library, in place of `lapack`'s."""

    def launch(stream, blocks, threads, argument):
        text = np.frombuffer(argument.first, np.uint8).copy()
        place = ctypes.c_void_p(text.ctypes.data)
        library(kernel_name)(place, blocks, threads)

    return SimpleNamespace(launch=launch)


def view(x):
    whole = np.ctypeslib.as_array(
        (ctypes.c_ubyte * (x.itemsize * ((x.columns - 1) * x.column_stride + x.rows))).from_address(
            x.address
        )
    )
    steps = x.itemsize, x.itemsize * x.column_stride
    return np.ndarray((x.rows, x.columns), x.dtype, whole, 0, steps)


def subtract_product(device, stream, c, a, b, *, blas, beside):
    if c.size and a.size:
        view(c)[...] -= view(a) @ view(b)


def note_zeros(device, stream, a, *, status, first):
    zeros = np.flatnonzero(view(a).diagonal() == 0)
    if len(zeros):
        status[0] = min(status[0], first + zeros[0] + 1)


def factors_of(library, a):
    """LU factors of a panel, its pivots and what is noted, where sentinels lie around."""
    dtype, rows, kernels = library
    device = device_of(rows)
    height, width = a.shape
    held = np.full((width, height + 5), 77, dtype)  # column-major, with a gap behind each column
    held[:, :height] = a.T
    x = Matrix(held.ctypes.data, height, width, 1, height + 5, dtype)
    pivots, status = np.full(width + 1, -9, np.int32), np.array([GOOD])
    with patch.multiple(
        lapack,
        _PANEL_THREADS=THREADS,
        _panel_kernel=partial(launched, kernels),
        subtract_product=subtract_product,
        note_zeros=note_zeros,
        call=lambda name, place, byte, nbytes, stream: ctypes.memset(place, byte, nbytes),
    ):
        room = lapack.room_of_lu(device, x)
        packets = np.full(room + 32, 0xA5, np.uint8)
        start = -packets.ctypes.data % 16
        words = {"workspace": packets.ctypes.data + start, "blas": 0, "first": FIRST}
        lapack.lu(device, 0, x, pivots=pivots.ctypes.data, status=status, **words)
    assert (held[:, height:] == 77).all() and pivots[-1] == -9
    assert (packets[start + room :] == 0xA5).all() and (packets[:start] == 0xA5).all()
    return held[:, :height].T, pivots[:-1] - FIRST, int(status[0])


def device_of(rows):
    return SimpleNamespace(processors=PROCESSORS[rows], activate=lambda: None)


def tallest(rows):
    """The height of a panel for which a thread has so many rows, and all blocks have some."""
    return PROCESSORS[rows] * THREADS * rows - 3


def of_one_launch(dtype, rows):
    """The number of columns that one launch factorises."""
    return lapack._ROW_BYTES // (rows * np.dtype(dtype).itemsize)


def random_panel(rng, height, width, dtype):
    a = rng.standard_normal((height, width))
    if np.dtype(dtype).kind == "c":
        a = a + 1j * rng.standard_normal(a.shape)
    return a.astype(dtype)


def test_factors_and_pivots_are_lapacks(library):
    dtype, rows, _ = library
    rng = np.random.default_rng(rows)
    two_launches = of_one_launch(dtype, rows) + 1
    for height, width in ((tallest(rows), two_launches), (tallest(rows) - THREADS * rows, 1)):
        a = random_panel(rng, height, width, dtype)
        made, pivots, noted = factors_of(library, a)
        want, wanted = scipy.linalg.lu_factor(a)
        assert pivots.tolist() == wanted[:width].tolist() and noted == GOOD
        tolerance = 50 * width * np.finfo(dtype).eps
        assert abs(made - want).max() <= tolerance * abs(want).max()


def test_equal_sizes_zeros_and_nan(library):
    """Of equals the first is the pivot; a column of zeros is left as it is, and noted."""
    dtype, rows, _ = library
    height, width = tallest(rows), 5
    a = random_panel(np.random.default_rng(0), height, width, dtype)
    a[:, 0] = np.where(np.arange(height) % 2, -1, 1)
    a[:, 3] = a[:, 0]
    made, pivots, noted = factors_of(library, a)
    assert pivots[0] == 0
    if np.dtype(dtype).kind == "f":  # what is left of column 3 is exactly 0
        assert noted == FIRST + 4 and (made[3:, 3] == 0).all()
    a[7, 1] = np.nan
    made, pivots, _ = factors_of(library, a)
    assert ((pivots >= np.arange(width)) & (pivots < height)).all() and np.isnan(made).any()


def test_square_ends_of_matrices(library):
    dtype, rows, _ = library
    if rows > 1:
        pytest.skip("a panel of few rows has one a thread")
    for n in (1, 2, of_one_launch(dtype, rows) + 1):
        a = random_panel(np.random.default_rng(n), n, n, dtype)
        made, pivots, noted = factors_of(library, a)
        wanted = scipy.linalg.lu_factor(a)[1]
        assert pivots.tolist() == wanted.tolist() and noted == GOOD
        lower, upper = np.tril(made, -1) + np.eye(n), np.triu(made)
        permuted = a.copy()
        for row, other in enumerate(pivots):
            permuted[[row, other]] = permuted[[other, row]]
        assert abs(lower @ upper - permuted).max() <= 10 * n * np.finfo(dtype).eps * abs(a).max()


def column_major(x, gap=3):
    """A copy of a matrix with a gap behind each column, and where it lies."""
    held = np.full((x.shape[1], x.shape[0] + gap), 77, x.dtype)
    held[:, : x.shape[0]] = x.T
    place = Matrix(held.ctypes.data, *x.shape, 1, x.shape[0] + gap, x.dtype.name)
    return held, held[:, : x.shape[0]].T, place


def test_a_few_right_hand_sides(library):
    """Every triangle, as SciPy solves with it: the other one is not read."""
    dtype, rows, kernels = library
    rng = np.random.default_rng(0)
    for number, (n, columns) in enumerate([(1, 1), (31, 3), (70, 2)]):
        for lower, op in ((True, "N"), (False, "N"), (True, "C"), (False, "T")):
            unit = (number + lower) % 2 == 0
            a = random_panel(rng, n, n, dtype) / n + 2 * np.eye(n, dtype=dtype)
            b = random_panel(rng, n, columns, dtype)
            read = np.tril(np.ones((n, n), bool), -unit)
            hidden = np.where(read if lower else read.T, a, np.nan).astype(dtype)
            kept, _, triangle = column_major(hidden)
            whole, made, x = column_major(b)
            with patch.object(lapack, "_kernel", partial(launched, kernels)):
                words = {"lower": lower, "op": op, "unit": unit}
                lapack.solve_triangular(device_of(rows), 0, triangle, x, blas=0, **words)
            trans = {"N": 0, "T": 1, "C": 2}[op]
            want = scipy.linalg.solve_triangular(a, b, trans, lower, unit)
            assert abs(made - want).max() <= 20 * n * np.finfo(dtype).eps * abs(want).max()
            assert (whole[:, n:] == 77).all() and (kept[:, n:] == 77).all()


def test_exchanges_of_rows(library):
    """Those of several chunks, forward and back; none where one is no row of the matrix."""
    dtype, rows, kernels = library
    if rows > 1:
        pytest.skip("no matter how many rows a thread of panels has")
    rng, n = np.random.default_rng(0), 2 * CHUNK + 18
    a = random_panel(rng, n, 2, dtype)
    pivots = np.array([rng.integers(i, n) for i in range(n)], np.int32) + FIRST
    whole, made, x = column_major(a)
    status = np.array([GOOD])
    words = {"first": FIRST, "status": status.ctypes.data, "code": 5}
    with patch.multiple(lapack, _kernel=partial(launched, kernels), _CHUNK=CHUNK):
        lapack.exchange_rows(device_of(rows), 0, x, pivots.ctypes.data, n, backward=False, **words)
        want = a.copy()
        for row, other in enumerate(pivots - FIRST):
            want[[row, other]] = want[[other, row]]
        assert (made == want).all()
        lapack.exchange_rows(device_of(rows), 0, x, pivots.ctypes.data, n, backward=True, **words)
        assert (made == a).all() and status[0] == GOOD
        pivots[n - 3] = FIRST + n
        lapack.exchange_rows(device_of(rows), 0, x, pivots.ctypes.data, n, backward=False, **words)
    assert (made == a).all() and status[0] == 5 and (whole[:, n:] == 77).all()
