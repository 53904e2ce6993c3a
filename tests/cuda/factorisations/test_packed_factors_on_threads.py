"""Factors of products packed by our kernel, on this computer's threads in place of a GPU's."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
from gpu_arithmetic import near_tf32, packed_factor
from on_threads import NONE, aligned, compiled, source_of

from shardmath.arrays.dtypes import to_numpy
from shardmath.local.gpu import Matrix, packing

WORDS = """
inline u32 bfloat16_pair(float first, float second) {
    const auto half = [](float x) {
        const u32 bits = __float_as_uint(x);
        return x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fff;
    };
    return half(first) | half(second) << 16;
}
"""
RUN = """
typedef const PackArgument* Argument;
extern "C" void pack(Argument argument, unsigned x, unsigned y, unsigned threads, unsigned late) {
    for (unsigned at = 0; at < y; ++at)
        run_grid(x, threads, late, [=] { blockIdx.y = at, pack_factor(*argument); });
}
"""
KINDS = [*itertools.product(("float32", "complex64"), ("tf32x3", "bfloat16"))]


@pytest.fixture(scope="module", params=KINDS, ids=str)
def kernel(request, tmp_path_factory):
    """(dtype, precision, what stands for `packing._kernel`)."""
    dtype, precision = request.param
    folder, split = tmp_path_factory.mktemp("packing"), int(precision == "tf32x3")
    text = source_of("pack_factor.cu", "// -- numbers ---", words=WORDS)
    library = compiled(folder, text, ("numbers.cuh",), RUN, ELEMENT=dtype, SPLIT=split)

    def launch(stream, blocks, threads, argument):
        library.pack(argument.first, *blocks, threads, NONE)

    def launched(device, *given):
        assert given == request.param
        return SimpleNamespace(launch=launch)

    return dtype, precision, launched


def packed_by(kernel, x, *, right, conjugate):
    """What the kernel makes of a matrix where it lies; nothing else is written."""
    dtype, precision, launched = kernel
    shape, kind = packing.packed_form(*x.shape, dtype, precision, right=right)
    made = aligned(np.prod(shape) * to_numpy(kind).itemsize + 64, 0xA5)
    steps = (step // x.itemsize for step in x.strides)
    source = Matrix(x.ctypes.data, *x.shape, *steps, dtype)
    target = Matrix.packed(made.ctypes.data, shape, kind, "F")
    with patch.object(packing, "_kernel", launched):
        packing.pack(None, 0, source, target, precision=precision, right=right, conjugate=conjugate)
    assert (made[-64:] == 0xA5).all()
    return made[:-64].view(to_numpy(kind)).reshape(shape[::-1]).T


def matrix(shape, dtype):
    x = np.random.default_rng(3).standard_normal((*shape, 2)).astype("float32")
    return x.view("complex64")[..., 0] if dtype == "complex64" else x[..., 0].copy()


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(1, 1), (33, 70), (5, 64)])
def test_lines_are_those_of_numpy(kernel, shape, order):
    """Of rows, of columns, with gaps behind each."""
    dtype, precision, _ = kernel
    held = matrix((shape[0] + 3, shape[1] + 5), dtype)
    x = np.asarray(held, order=order)[: shape[0], : shape[1]]
    for right, conjugate in ((False, False), (True, dtype == "complex64")):
        want = packed_factor(x.conj() if conjugate else x, precision, right=right)
        made = packed_by(kernel, x, right=right, conjugate=conjugate)
        assert made.astype("float32").tolist() == want.astype("float32").tolist()


def test_numbers_that_are_not_finite_are_seen(kernel):
    dtype = kernel[0]
    x = np.full((2, 3), 2.0**-149 + 1, dtype)
    nan = np.array([0x7FFFFFFF], "u4").view("f4")[0]  # as GPUs make it
    x[0, 1], x[1, 2] = np.inf, nan
    made = packed_by(kernel, x, right=True, conjugate=False).astype("float32")
    assert [not np.isfinite(line).all() for line in made.T] == [True, True]
    assert np.isnan(made[:, 1]).any() and np.isinf(made[:, 0]).any()


def test_products_of_two_numbers_have_nearly_all_digits():
    a, b = matrix((40, 200), "float32"), matrix((200, 30), "float32")
    made = packed_factor(a, "tf32x3", right=False).T.astype("f8")
    made = made @ packed_factor(b.T.copy(), "tf32x3", right=True).astype("f8")
    a, b = a.astype("f8"), b.astype("f8")
    assert (abs(made - a @ b) <= 3 * 2.0**-22 * (abs(a) @ abs(b))).all()
    assert (near_tf32(np.float32([1 + 2.0**-11, 1 + 3 * 2.0**-11])) == [1, 1 + 2.0**-9]).all()
