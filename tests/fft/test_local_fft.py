"""One rank's transforms: every engine against scipy in double precision, at any strides."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.fft
import torch  # noqa: F401  (the engine of that name takes it from the loaded modules)

from shardmath.local import fft as local
from shardmath.local.fft import engine_for, transform

ENGINES = ("scipy", "numpy", "torch")
SHAPE = (7, 8, 9)
AXES = [(0,), (1,), (2,), (0, 2), (2, 1), (1, 2, 0)]
NORMS = {None: ("backward", "forward"), "ortho": ("ortho",) * 2, "forward": ("forward",) * 2}


def numbers(dtype, how):
    rng = np.random.default_rng(5)
    array = rng.standard_normal(SHAPE)
    if np.dtype(dtype).kind == "c":
        array = array + 1j * rng.standard_normal(SHAPE)
    array = array.astype(dtype)
    if how == "F":
        return np.asfortranarray(array)
    if how == "reversed":
        return array[::-1, :, ::-1].copy()[::-1, :, ::-1]
    if how == "padded":
        room = np.zeros((7, 8, 13), dtype)
        room[..., :9] = array
        return room[..., :9]
    return array


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("how", ["C", "F", "reversed", "padded"])
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex(engine, how, dtype):
    for axes in AXES:
        for norm, scales in NORMS.items():
            for forward in (True, False):
                x = numbers(dtype, how)
                function = scipy.fft.fftn if forward else scipy.fft.ifftn
                want = function(x.astype("c16"), axes=axes, norm=scales[not forward])
                got = transform(x, axes, kind="C2C", forward=forward, norm=norm, engine=engine)
                assert got.dtype == dtype
                assert got.shape == want.shape
                tolerance = 1e-5 if dtype == "complex64" else 1e-13
                assert np.abs(got - want).max() <= tolerance * np.abs(want).max()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("how", ["C", "F", "reversed", "padded"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_real_and_back(engine, how, dtype):
    for axes in AXES:
        x = numbers(dtype, how)
        kept = x.copy()
        want = scipy.fft.rfftn(x.astype("f8"), axes=axes)
        got = transform(x, axes, kind="R2C", forward=True, norm=None, engine=engine)
        assert (x == kept).all()
        assert got.dtype == ("complex128" if dtype == "float64" else "complex64")
        tolerance = 1e-13 if dtype == "float64" else 1e-5
        assert np.abs(got - want).max() <= tolerance * np.abs(want).max()
        length = x.shape[axes[-1]]
        back = transform(
            got, axes, kind="C2R", forward=False, norm="backward", length=length, engine=engine
        )
        assert back.dtype == ("float64" if dtype == "float64" else "float32")
        assert np.abs(back - x).max() <= 10 * tolerance


def test_scipy_works_in_the_memory_that_it_is_given():
    x = numbers("complex128", "padded")
    assert np.shares_memory(
        transform(x, (0,), kind="C2C", forward=True, norm=None, engine="scipy"), x
    )


def test_tensors_get_torch_and_arrays_what_is_installed(monkeypatch):
    assert engine_for("torch") == "torch"
    assert engine_for("numpy") == "scipy"

    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(local.importlib, "import_module", missing)
    local._installed.cache_clear()
    try:
        assert engine_for("numpy") == "numpy"
    finally:
        local._installed.cache_clear()
