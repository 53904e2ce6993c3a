"""Specs: what is said of shape, strides and order, checked against NumPy's own flags."""

import itertools

import numpy as np
import pytest
import torch

from shardmath.arrays import ArraySpec, library_of
from shardmath.arrays.spec import order_of

FLAGS = {(True, True): "both", (True, False): "C", (False, True): "F", (False, False): "strided"}


@pytest.mark.parametrize("shape", list(itertools.product([0, 1, 7], repeat=3)))
@pytest.mark.parametrize("axes", list(itertools.permutations(range(3))))
def test_order_is_numpys_contiguity(shape, axes):
    array = np.empty(np.array(shape)[list(axes)], np.int16).transpose(np.argsort(axes))
    assert array.shape == shape
    flags = array.flags
    assert library_of(array).spec(array).order == FLAGS[flags.c_contiguous, flags.f_contiguous]


@pytest.mark.parametrize(
    ("shape", "strides", "order"),
    [
        ((), (), "both"),
        ((9,), (1,), "both"),
        ((9,), (2,), "strided"),
        ((9,), (-1,), "strided"),
        ((9,), (0,), "strided"),
        ((7, 8), (8, 1), "C"),
        ((7, 8), (1, 7), "F"),
        ((7, 8), (9, 1), "strided"),
        ((7, 8), (1, 8), "strided"),
        ((7, 1), (1, 99), "both"),
        ((1, 8), (-5, 1), "both"),
        ((1, 1), (3, 0), "both"),
        ((0, 8), (77, 5), "both"),
        ((2, 1, 3), (3, 1000, 1), "C"),
    ],
)
def test_order_ignores_axes_without_steps(shape, strides, order):
    assert order_of(shape, strides) == order


def test_specs_are_equal_and_printed_in_one_line():
    x = np.zeros((8, 7), np.float32).T
    spec = library_of(x).spec(x)
    assert spec == ArraySpec("numpy", "float32", (7, 8), (1, 7), "cpu", 4)
    assert (spec.ndim, spec.size, spec.nbytes) == (2, 56, 224)
    assert str(spec) == "numpy float32 (7, 8) order F on cpu"
    assert "\n" not in repr(spec)
    t = torch.zeros((8, 7), dtype=torch.bfloat16).T
    assert library_of(t).spec(t) == ArraySpec("torch", "bfloat16", (7, 8), (1, 7), "cpu", 2)
    assert hash(library_of(t).spec(t)) == hash(library_of(t).spec(t.clone()))


def test_a_tensor_elsewhere_has_a_device_and_no_host_view():
    class Elsewhere:
        layout, dtype, device = "torch.strided", torch.float32, torch.device("cuda", 0)
        shape = (2, 3)

        def stride(self):
            return (3, 1)

        def data_ptr(self):
            return 4096

    library = library_of(torch.empty(0))
    assert library.spec(Elsewhere()) == ArraySpec("torch", "float32", (2, 3), (3, 1), "cuda:0", 4)
    with pytest.raises(ValueError, match=r"is on cuda:0.*x\.cpu"):
        library.host_view(Elsewhere())


@pytest.mark.parametrize(
    "bad",
    [
        np.zeros(4, [("a", "i2"), ("b", "f4")])["b"],
        torch.zeros(3).to_sparse(),
        torch.zeros(3, device="meta"),
        np.zeros(3, object),
    ],
)
def test_unsupported_memory_is_a_value_error(bad):
    with pytest.raises(ValueError, match=r"strides of|no strided memory|not supported"):
        library_of(bad).spec(bad)
