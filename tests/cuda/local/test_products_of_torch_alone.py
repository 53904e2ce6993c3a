"""Products by our bindings of cuBLASLt, which serve where nvmath-python is not installed."""

from __future__ import annotations

import ctypes
import importlib
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from shardmath.distribution import Slab
from shardmath.linalg.advanced import MatmulEpilog, matmul
from shardmath.local.gpu import blaslt, cublaslt

TYPES = {"bfloat16": 2e-2, "float32": 1e-4, "float64": 1e-9, "complex64": 1e-4}


def test_numbers_are_those_of_nvmath():
    theirs = pytest.importorskip("nvmath.bindings.cublasLt")
    for ours in (
        cublaslt.MatmulDescAttribute,
        cublaslt.MatmulPreferenceAttribute,
        cublaslt.ReductionScheme,
    ):
        kind = getattr(theirs, ours.__name__)
        assert {each.name: int(getattr(kind, each.name)) for each in ours} == {
            each.name: int(each) for each in ours
        }
    for name in ("desc", "preference"):
        kind = "MatmulDescAttribute" if name == "desc" else "MatmulPreferenceAttribute"
        dtype_of = f"get_matmul_{name}_attribute_dtype"
        for each in getattr(cublaslt, kind):
            there = getattr(theirs, dtype_of)(getattr(getattr(theirs, kind), each.name))
            assert np.dtype(getattr(cublaslt, dtype_of)(each)).itemsize == np.dtype(there).itemsize
    size = np.dtype(theirs.matmul_heuristic_result_dtype).itemsize
    assert cublaslt.matmul_heuristic_result_dtype.itemsize == size


def products(context, size):
    """The types whose products are others than torch's."""
    torch = importlib.import_module("torch")
    torch.cuda.set_device(context.device_id)
    wrong = []
    blaslt._products.clear()
    with patch.object(blaslt, "bindings", lambda: cublaslt), context:
        blaslt._handle.cache_clear()
        for name, error in TYPES.items():
            there = {"dtype": getattr(torch, name), "device": f"cuda:{context.device_id}"}
            torch.manual_seed(1)
            a, b = torch.randn(40 * size, 24, **there), torch.randn(24, 32 * size, **there)
            bias = torch.randn(40 * size, **there)
            own_a = a[Slab.X.slices(context.rank, a.shape)]
            own_b = b[Slab.Y.slices(context.rank, b.shape)]
            relu = {} if name == "complex64" else {"epilog": MatmulEpilog.RELU_BIAS}
            words = relu and {**relu, "epilog_inputs": {"bias": bias}}
            y = matmul(own_a, own_b, distributions=[Slab.X, Slab.Y, Slab.Y], **words)
            right = a @ own_b
            right = torch.relu(right + bias[:, None]) if relu else right
            if not torch.allclose(y, right, rtol=error, atol=10 * error):
                wrong.append(name)
    blaslt._products.clear()
    blaslt._handle.cache_clear()
    return wrong


def test_products(gpus, size):
    assert gpus.run(products, size, ranks=size) == [[]] * size


STUB = """
#include <stdint.h>
#include <string.h>
size_t cublasLtGetVersion(void) { return 130100; }
int cublasLtMatmulDescCreate(void **made, int compute, int scale) {
    static int told[2];
    told[0] = compute, told[1] = scale, *made = told;
    return 0;
}
int cublasLtMatmulDescSetAttribute(void *desc, int which, const void *value, size_t nbytes) {
    return which == 12 && nbytes == 8 && *(const int64_t *)value == 1LL << 40 ? 0 : 7;
}
int cublasLtMatmul(void *handle, void *desc, void *alpha, void *a, void *al, void *b, void *bl,
                   void *beta, void *c, void *cl, void *d, void *dl, void *algo, void *work,
                   size_t size, void *stream) {
    void *given[] = {handle, desc, alpha, a, al, b, bl, beta, c, cl, d, dl, algo, work,
                     (void *)size, stream};
    for (uintptr_t n = 0; n < 16; n++)
        if (given[n] != (void *)((n + 1) << 40)) return 15;
    return 0;
}
"""


def test_arguments_arrive_as_they_are(tmp_path: Path, monkeypatch):
    """Needs no GPU: the library is a stub."""
    compiler = pytest.importorskip("setuptools._distutils.ccompiler").new_compiler()
    source = tmp_path / "stub.c"
    source.write_text(STUB)
    try:
        objects = compiler.compile([str(source)], str(tmp_path), extra_preargs=["-fPIC", "-w"])
        compiler.link_shared_object(objects, str(tmp_path / "stub.so"))
    except Exception as error:
        pytest.skip(f"there is no C compiler: {error}")
    library = ctypes.CDLL(str(tmp_path / "stub.so"))
    monkeypatch.setattr(cublaslt, "_library", lambda: library)
    assert cublaslt.get_version() == 130100
    desc = cublaslt.matmul_desc_create(68, 14)
    assert list((ctypes.c_int * 2).from_address(desc)) == [68, 14]
    attribute, value = cublaslt.MatmulDescAttribute.EPILOGUE_AUX_LD, np.array([1 << 40])
    cublaslt.matmul_desc_set_attribute(desc, attribute, value.ctypes.data, 8)
    with pytest.raises(RuntimeError, match="INVALID_VALUE"):
        cublaslt.matmul_desc_set_attribute(desc, attribute, value.ctypes.data, 4)
    given = [number + 1 << 40 for number in range(16)]
    cublaslt.matmul(*given)
    with pytest.raises(RuntimeError, match="NOT_SUPPORTED"):
        cublaslt.matmul(*given[::-1])
