"""Data types: one name for each, whatever library spells it."""

import sys

import ml_dtypes
import numpy as np
import pytest
import torch

from shardmath.arrays import DType, dtypes

NAMES = [
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]


@pytest.mark.parametrize("name", NAMES)
def test_every_spelling_of_a_type_is_one_type(name):
    host = np.dtype(getattr(ml_dtypes, name, None) or name)
    native = getattr(torch, name)
    assert dtypes.to_numpy(name) == host
    assert {dtypes.of(x) for x in (name, host, host.type, native, dtypes.of(name))} == {
        dtypes.of(name)
    }
    assert dtypes.of(name).name == name
    assert dtypes.of(name).itemsize == host.itemsize == native.itemsize
    assert str(dtypes.of(name)) == name


def test_kinds():
    assert list(dtypes.NAMES) == NAMES
    kinds = {name: dtypes.of(name).kind for name in NAMES}
    assert [n for n in NAMES if kinds[n] == "f"] == [n for n in NAMES if "float" in n]
    assert [n for n in NAMES if kinds[n] == "c"] == ["complex64", "complex128"]
    assert [n for n in NAMES if kinds[n] == "u"] == ["uint8", "uint16", "uint32", "uint64"]
    assert [n for n in NAMES if kinds[n] == "i"] == ["int8", "int16", "int32", "int64"]
    assert kinds["bool"] == "b"


@pytest.mark.parametrize("name", NAMES)
def test_sums_are_taken_in_at_least_float32(name):
    narrow = name in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
    assert dtypes.accumulator(name).name == ("float32" if narrow else name)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (float, "float64"),
        (int, "int64"),
        (complex, "complex128"),
        (bool, "bool"),
        ("f4", "float32"),
    ],
)
def test_python_and_short_names(given, name):
    assert dtypes.of(given).name == name


def test_complex32_is_a_pair_of_halves_that_can_be_moved():
    pair = np.dtype([("real", "f2"), ("imag", "f2")])
    for given in ("complex32", pair, torch.complex32):
        assert dtypes.of(given) == DType("complex32", 4, "V")
    assert dtypes.to_numpy("complex32") == pair
    assert "complex32" not in dtypes.NAMES


@pytest.mark.parametrize("text", ["V12", "S3", "M8[ns]", ">f8", "longdouble", "U2"])
def test_an_unknown_numpy_type_is_opaque_and_comes_back(text):
    dtype = dtypes.of(np.dtype(text))
    assert dtype == DType(np.dtype(text).str, np.dtype(text).itemsize, "V")
    assert dtypes.to_numpy(dtype) == np.dtype(text)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "None is not a data type"),
        ("no such type", "'no such type' is not a data type"),
        (object, "Python objects cannot be read by other processes"),
        (torch.qint8, "torch.qint8 is not supported; supported are bool, int8"),
        (ml_dtypes.int4, r"pass x.view\('V1'\)"),
        (np.dtype([("x", "f4"), ("y", "i2")]), r"pass x.view\('V6'\)"),
        (np.dtype("S0"), "its elements have no bytes"),
        (np.dtype(("f4", (2,))), r"pass x.view\('V8'\)"),
        (3.5, "3.5 is not a data type"),
    ],
)
def test_what_is_no_plain_type_is_a_value_error(given, said):
    with pytest.raises(ValueError, match=said):
        dtypes.of(given)


@pytest.mark.parametrize(
    ("dtype", "advice"),
    [
        (">f8", "x.astype('float64')"),
        (">i2", "x.astype('int16')"),
        (">c16", "x.astype('complex128')"),
        ("float64", ""),
        ("<f16", "float128: convert it, for example to float64"),
        (">f16", "float128: convert it, for example to float64"),
        ("<c32", "complex256: convert it, for example to complex128"),
        ("uint8", "convert it, for example to float64"),
        ("bool", "convert it, for example to float64"),
        (">M8[s]", ""),
        ("<U3", ""),
        ("|V12", ""),
        ("bfloat16", ""),
    ],
)
def test_what_makes_a_type_of_it_to_compute_with(dtype, advice):
    if sys.byteorder == "little":
        said = dtypes.advice(dtype)
        assert said.endswith(advice) and bool(said) == bool(advice)
