"""Sums in one pass against NumPy's: the same bits."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from built import built_from_c
from shardmath.local import compiled_sum
from shardmath.local.reduction import Reduction, reduce_local

TYPES = ["float32", "float64", "complex64", "complex128", "int32", "uint32", "int64", "uint64"]


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    library = built_from_c(compiled_sum, "sum.c", tmp_path_factory.mktemp("sum"))
    return compiled_sum.functions_of(library)


@pytest.fixture
def add(functions, monkeypatch):
    monkeypatch.setattr(compiled_sum, "functions", lambda: functions)
    return compiled_sum.add


def operands(dtype, count, columns, rows=1):
    """Arrays whose rows begin anywhere: one element into a row that is longer by three."""
    rng = np.random.default_rng(count)
    bits = rng.integers(0, 256, (count, rows, (columns + 3) * np.dtype(dtype).itemsize), "u1")
    arrays = bits.view(dtype)
    if np.dtype(dtype).kind in "fc":  # no NaN, of which bits may differ
        arrays[...] = rng.standard_normal(arrays.shape) * 10.0 ** rng.integers(-9, 9, arrays.shape)
    return [array[:, 1 : columns + 1] for array in arrays]


def one_after_another(arrays):
    total = arrays[0].copy()
    for array in arrays[1:]:
        total = total + array
    return total


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_sums(add, dtype, count):
    for columns in (65536, 65537, 65551):
        inputs = operands(dtype, count, columns, rows=2)
        want = one_after_another(inputs)
        apart = operands(dtype, 2, columns, rows=2)
        assert add(inputs, [*apart, inputs[0]])  # into an input's own memory, too
        for got in (*apart, inputs[0]):
            assert got.tobytes() == want.tobytes()


def test_nothing_is_written_past_the_ends(add):
    inputs = operands("float32", 2, 65537)
    room = np.full((1, 65541), 7, "float32")
    assert add(inputs, [room[:, 2:65539]])
    assert (room[:, :2] == 7).all()
    assert (room[:, 65539:] == 7).all()


def test_what_is_left_to_numpy(add):
    def refused(inputs, output):
        kept = output.copy()
        assert not add(inputs, [output])
        assert output.tobytes() == kept.tobytes()

    long = operands("float32", 2, 65536)
    refused(operands("float32", 2, 100), np.zeros((1, 100), "float32"))
    refused(operands("int16", 2, 65536), np.zeros((1, 65536), "int16"))
    refused(operands("bool", 2, 65536), np.zeros((1, 65536), "bool"))
    refused(long, np.zeros((1, 65536), "float64"))
    refused(long, np.zeros((1, 65536), ">f4"))
    refused(long, np.zeros((1, 131072), "float32")[:, ::2])
    refused(long, np.zeros(65536 * 4 + 1, "u1")[1:].view("float32")[None])


@pytest.mark.parametrize("op", ["sum", "mean", "max", "product"])
def test_reductions_with_and_without_it(add, functions, monkeypatch, op):
    used = []

    def counted(*arguments):
        used.append(op)
        functions["float32"](*arguments)

    reduction = Reduction.of(op, "float32")
    inputs = operands("float32", 3, 70000)
    with_it, without = np.zeros((1, 70000), "float32"), np.zeros((1, 70000), "float32")
    monkeypatch.setattr(compiled_sum, "functions", lambda: {"float32": counted})
    reduce_local(reduction, inputs, [with_it])
    monkeypatch.setattr(compiled_sum, "functions", dict)
    reduce_local(reduction, inputs, [without])
    assert with_it.tobytes() == without.tobytes()
    assert used == (["sum"] if op == "sum" else [])


def test_another_library_is_not_used():
    assert compiled_sum.functions_of(ctypes.CDLL(None)) == {}
