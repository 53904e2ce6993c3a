"""Epilogs against torch in float64 and against masks built bit by bit."""

import re

import numpy as np
import pytest
import torch

from shardmath.arrays import dtypes, library_of
from shardmath.local import epilog
from shardmath.local.epilog import Extra, MatmulEpilog, Requirements, apply, requirements

SIZES = [(7, 8), (8, 9), (9, 7), (1, 9), (9, 1), (0, 7), (7, 0), (130, 33)]
DTYPES = ["float16", "bfloat16", "float32", "float64"]
VALUES = {
    "DEFAULT": 0, "ALLREDUCE": 1, "RELU": 2, "GELU": 32, "RELU_AUX": 130, "GELU_AUX": 160,
    "BIAS": 4, "RELU_BIAS": 6, "GELU_BIAS": 36, "RELU_AUX_BIAS": 134, "GELU_AUX_BIAS": 164,
    "DRELU": 136, "DRELU_BGRAD": 152, "DGELU": 192, "DGELU_BGRAD": 208, "BGRADA": 256,
    "BGRADB": 512,
}  # fmt: skip
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 2e-6, "float64": 1e-13}


@pytest.fixture(params=["small tiles", "large tiles"])
def _tiles(request, monkeypatch):
    if request.param == "small tiles":
        monkeypatch.setattr(epilog, "_TILE", 128)


def packed(positive):
    """The mask of a boolean matrix, one bit at a time."""
    m, n = positive.shape
    rows = (m + 127) // 128 * 16
    mask = np.zeros((rows, n), np.uint8, "F")
    for i in range(m):
        for j in range(n):
            mask[i // 8, j] |= int(positive[i, j]) << (i % 8)
    return mask


def oracle(which, acc, bias, mask, pre):
    """(D, aux) in float64, by torch; `mask` is boolean, `pre` the input of the forward GELU."""
    x = torch.from_numpy(acc.astype(np.float64))
    if "BIAS" in which.name:
        x = x + torch.from_numpy(bias.astype(np.float64)).reshape(-1, 1)
    aux = {}
    if which.name.startswith("RELU"):
        if "AUX" in which.name:
            aux["relu_aux"] = packed(x.numpy() > 0)
        x = torch.relu(x)
    if which.name.startswith("GELU"):
        if "AUX" in which.name:
            aux["gelu_aux"] = np.zeros((-(-len(x) // 8) * 8, x.shape[1]))
            aux["gelu_aux"][: len(x)] = x
        x = torch.nn.functional.gelu(x, approximate="tanh")
    if which.name.startswith("DRELU"):
        x = torch.where(torch.from_numpy(mask), x, 0)
    if which.name.startswith("DGELU"):
        at = torch.from_numpy(pre.astype(np.float64)).requires_grad_()
        torch.nn.functional.gelu(at, approximate="tanh").backward(x)
        x = at.grad
    if which.name.endswith("_BGRAD"):
        aux[which.name.lower()] = x.sum(1).numpy()
    return x.numpy(), aux


def test_values_and_flags():
    assert {e.name: e.value for e in MatmulEpilog} == VALUES
    assert {e.name for e in MatmulEpilog if e.has_bias} == {n for n in VALUES if "BIAS" in n}
    flags = {e.name: (e.activation, e.gradient, e.makes_aux, e.needs_aux) for e in MatmulEpilog}
    for name, flag in flags.items():
        own = next((f for f in ("relu", "gelu") if name.startswith(f.upper())), None)
        back = next((f for f in ("relu", "gelu") if name.startswith(f"D{f.upper()}")), None)
        made = f"{own}_aux" if "AUX" in name else None
        assert flag == (own, back, made, back and f"{back}_aux"), name
    assert {e.name: e.makes_bgrad for e in MatmulEpilog if e.makes_bgrad} == {
        "DRELU_BGRAD": "drelu_bgrad",
        "DGELU_BGRAD": "dgelu_bgrad",
        "BGRADA": "bgrada",
        "BGRADB": "bgradb",
    }


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("which", MatmulEpilog, ids=lambda e: e.name)
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("order", ["C", "F", "strided"])
def test_every_epilog(which, name, order):
    for m, n in SIZES:
        rng = np.random.default_rng(7)
        dtype, wide = dtypes.to_numpy(name), dtypes.to_numpy(dtypes.accumulator(name))
        acc = np.asarray(rng.standard_normal((m, n)) * 3, wide, "F" if order == "F" else "C")
        acc[::3] = np.abs(acc[::3])
        whole = np.full((2 * m + 1, n + 2), 42, dtype)
        out = whole[1 : 2 * m : 2, 1 : n + 1] if order == "strided" else None
        bias, mask = rng.standard_normal(m).astype(dtype), rng.random((m, n)) < 0.5
        pre = np.asfortranarray(np.full((-(-m // 8) * 8, n), np.nan, dtype))
        pre[:m] = rng.standard_normal((m, n)) * 3
        expected, expected_aux = oracle(which, acc, bias, mask, pre[:m])
        inputs = {"bias": bias, "relu_aux": packed(mask), "gelu_aux": pre}
        given = {k: v.copy() for k, v in inputs.items()}
        before = acc.copy()
        got, aux = apply(which, acc, inputs, dtype=name, out=out)
        np.testing.assert_array_equal(acc, before)
        for key, value in given.items():
            assert value.tobytes() == inputs[key].tobytes()
        assert got.dtype == dtype and got.shape == (m, n)
        assert out is None or got is out
        rtol = TOLERANCE[name]
        np.testing.assert_allclose(got.astype("f8"), expected, rtol, rtol)
        whole[1 : 2 * m : 2, 1 : n + 1] = 42
        assert (whole == 42).all()
        assert aux.keys() == expected_aux.keys()
        for key, value in aux.items():
            assert value.shape == expected_aux[key].shape
            if key == "relu_aux":
                np.testing.assert_array_equal(value, expected_aux[key])
            elif key == "gelu_aux":
                assert value.dtype == dtype
                np.testing.assert_allclose(value.astype("f8"), expected_aux[key], rtol, rtol)
            else:  # a share that ranks add before rounding
                assert value.dtype == wide
                tight = 1e-5 if wide == "f4" else 1e-12
                np.testing.assert_allclose(value, expected_aux[key], tight, 10 * tight)


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("function", ["RELU", "GELU"])
def test_what_the_forward_pass_keeps_serves_the_backward_pass(name, function):
    rng, wide = np.random.default_rng(8), dtypes.to_numpy(dtypes.accumulator(name))
    x = (rng.standard_normal((19, 21)) * 2).astype(dtypes.to_numpy(name)).astype(wide)
    grad = rng.standard_normal((19, 21)).astype(wide)
    _, aux = apply(MatmulEpilog[f"{function}_AUX"], x, {}, dtype=name)
    (needed,) = requirements(MatmulEpilog[f"D{function}"], 19, 21, name).inputs
    spec = library_of(aux[needed.name]).spec(aux[needed.name])
    assert needed.mismatch(spec.dtype, spec.shape, spec.strides) is None
    got, _ = apply(MatmulEpilog[f"D{function}"], grad, aux, dtype=str(wide))
    at = torch.from_numpy(x.astype("f8")).requires_grad_()
    forward = (
        torch.relu(at) if function == "RELU" else torch.nn.functional.gelu(at, approximate="tanh")
    )
    forward.backward(torch.from_numpy(grad.astype("f8")))
    np.testing.assert_allclose(got, at.grad.numpy(), 1e-5, 1e-5)


def test_results_may_replace_the_sums():
    acc = np.array([[-1.0, 2.0], [3.0, -4.0]])
    got, _ = apply(MatmulEpilog.RELU, acc, {}, dtype="float64", out=acc)
    assert got is acc and acc.tolist() == [[0, 2], [3, 0]]
    assert apply(MatmulEpilog.DEFAULT, acc, {}, dtype="float64", out=acc)[0] is acc
    assert acc.tolist() == [[0, 2], [3, 0]]


@pytest.mark.parametrize("wide", ["float32", "float64"])
def test_ends_of_the_number_line(wide):
    inf, big = np.inf, float(np.finfo(wide).max)
    x = np.array([[np.nan, inf, big, -big, 100, -100, 0.0, -0.0]], wide)
    relu, aux = apply(MatmulEpilog.RELU_AUX, x, {}, dtype=wide)
    np.testing.assert_array_equal(relu, np.array([[np.nan, inf, big, 0, 100, 0, 0, 0]], wide))
    assert aux["relu_aux"][0].tolist() == [0, 1, 1, 0, 1, 0, 0, 0]
    gelu, aux = apply(MatmulEpilog.GELU_AUX, x, {}, dtype=wide)
    np.testing.assert_array_equal(gelu, np.array([[np.nan, inf, big, 0, 100, 0, 0, 0]], wide))
    with np.errstate(over="raise", divide="raise"):
        slope, _ = apply(MatmulEpilog.DGELU, np.ones_like(x), aux, dtype=wide)
    np.testing.assert_allclose(slope, [[np.nan, 1, 1, 0, 1, 0, 0.5, 0.5]], 1e-15, 1e-30)
    ends = np.array([[inf, -inf, np.nan, 5.0]], wide)
    masked, _ = apply(
        MatmulEpilog.DRELU, ends, {"relu_aux": np.zeros((16, 4), np.uint8)}, dtype=wide
    )
    np.testing.assert_array_equal(masked, np.zeros((1, 4)))


def test_bias_may_be_a_column_and_complex():
    acc = np.arange(6, dtype="c16").reshape(2, 3)
    for bias in (np.array([1j, 2]), np.array([[1j], [2]])):
        got, _ = apply(MatmulEpilog.BIAS, acc, {"bias": bias}, dtype="complex128")
        np.testing.assert_array_equal(got, acc + np.array([[1j], [2]]))


@pytest.mark.parametrize("name", [*DTYPES, "complex64", "int32"])
@pytest.mark.parametrize("shape", [*SIZES, (3, 5000)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_row_and_column_sums(name, shape, order):
    dtype, wide = dtypes.to_numpy(name), dtypes.to_numpy(dtypes.accumulator(name))
    a = np.asarray(np.random.default_rng(9).integers(-3, 4, shape), order=order).astype(dtype)
    for got, axis in ((epilog.row_sums(a), 1), (epilog.column_sums(a), 0)):
        assert got.dtype == wide
        np.testing.assert_array_equal(got, a.astype(complex).sum(axis))


@pytest.mark.parametrize(
    ("which", "inputs", "outputs"),
    [
        ("DEFAULT", (), ()),
        ("ALLREDUCE", (), ()),
        ("RELU_BIAS", (Extra("bias", ((130,), (130, 1)), "float16"),), ()),
        ("RELU_AUX", (), (Extra("relu_aux", ((32, 9),), "uint8", True),)),
        ("GELU_AUX", (), (Extra("gelu_aux", ((136, 9),), "float16", True),)),
        (
            "DRELU_BGRAD",
            (Extra("relu_aux", ((32, 9),), "uint8", True),),
            (Extra("drelu_bgrad", ((130,),), "float16"),),
        ),
        ("BGRADA", (), (Extra("bgrada", ((130,),), "float16"),)),
        ("BGRADB", (), (Extra("bgradb", ((9,),), "float16"),)),
    ],
)
def test_requirements(which, inputs, outputs):
    assert requirements(MatmulEpilog[which], 130, 9, "float16") == Requirements(inputs, outputs)


@pytest.mark.parametrize("name", ["complex64", "complex128", "int32"])
@pytest.mark.parametrize("which", MatmulEpilog, ids=lambda e: e.name)
def test_activations_want_real_floats(which, name):
    if "RELU" in which.name or "GELU" in which.name:
        with pytest.raises(ValueError, match=rf"{which.name}.*{name}"):
            requirements(which, 7, 8, name)
    else:
        requirements(which, 7, 8, name)


@pytest.mark.parametrize(
    ("dtype", "shape", "strides", "message"),
    [
        ("uint8", (16, 9), (1, 16), None),
        ("uint8", (16, 9), (1, 99), None),
        ("int8", (16, 9), (1, 16), "dtype int8.*uint8"),
        ("uint8", (1, 9), (1, 1), r"shape \(1, 9\).*\(16, 9\)"),
        ("uint8", (16, 9), (9, 1), "contiguous columns"),
    ],
)
def test_misfits_are_told(dtype, shape, strides, message):
    (extra,) = requirements(MatmulEpilog.DRELU, 7, 9, "float32").inputs
    told = extra.mismatch(dtype, shape, strides)
    assert told is None if message is None else re.search(message, told)
