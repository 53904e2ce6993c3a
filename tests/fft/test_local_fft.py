"""One rank's transforms: every engine against scipy in double precision, at any strides."""

from __future__ import annotations

import importlib
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.fft
import torch  # noqa: F401  (the engine of that name takes it from the loaded modules)

from shardmath.local import fft as local
from shardmath.local.fft import ADJOINTS, bound_transform, engine_for
from shardmath.local.trigonometric import SERIES

ENGINES = ("ducc0", "scipy", "scipy, what is public", "numpy", "torch")
SHAPE = (7, 8, 9)
HOWS = ["C", "F", "reversed", "padded", "unaligned"]
AXES = [(0,), (1,), (2,), (0, 2), (2, 1), (1, 2, 0)]
NORMS = {None: ("backward", "forward"), "ortho": ("ortho",) * 2, "forward": ("forward",) * 2}


def transform(*arguments, **how):
    bound_transform(*arguments, **how)()


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
    if how == "unaligned":
        room = np.zeros(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(SHAPE)
        room[...] = array
        return room
    if how == "padded":
        room = np.zeros((7, 8, 13), dtype)
        room[..., :9] = array
        return room[..., :9]
    return array


@pytest.fixture(params=ENGINES)
def engine(request, monkeypatch):
    if request.param == "scipy, what is public":
        monkeypatch.setattr(local, "_inner", lambda _: None)
    return request.param.partition(",")[0]


def like(array, dtype):
    """PlanMemory for a result, of which every other row is not to be touched."""
    shape = array.shape
    return np.full((2 * shape[0], *shape[1:]), 7, dtype)[::2]


def untouched(out):
    return (out.base[1::2] == 7).all()


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex(engine, how, dtype):
    for axes in AXES:
        for norm, scales in NORMS.items():
            for forward in (True, False):
                x = numbers(dtype, how)
                function = scipy.fft.fftn if forward else scipy.fft.ifftn
                want = function(x.astype("c16"), axes=axes, norm=scales[not forward])
                kept, out = x.copy(), like(want, dtype)
                how_to = {"kind": "C2C", "forward": forward, "norm": norm, "engine": engine}
                transform(x, axes, out=out, **how_to)
                assert (x == kept).all()
                assert untouched(out)
                tolerance = 1e-5 if dtype == "complex64" else 1e-13
                assert np.abs(out - want).max() <= tolerance * np.abs(want).max()
                transform(x, axes, out=x, **how_to)
                assert np.abs(x - want).max() <= tolerance * np.abs(want).max()


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_real_and_back(engine, how, dtype):
    for axes in AXES:
        x = numbers(dtype, how)
        kept = x.copy()
        want = scipy.fft.rfftn(x.astype("f8"), axes=axes)
        double = dtype == "float64"
        got = like(want, "complex128" if double else "complex64")
        transform(x, axes, out=got, kind="R2C", forward=True, norm=None, engine=engine)
        assert (x == kept).all()
        assert untouched(got)
        tolerance = 1e-13 if double else 1e-5
        assert np.abs(got - want).max() <= tolerance * np.abs(want).max()
        back = like(x, "float64" if double else "float32")
        how_to = {"kind": "C2R", "forward": False, "norm": "backward", "engine": engine}
        transform(got, axes, out=back, **how_to)
        assert untouched(back)
        assert np.abs(back - x).max() <= 10 * tolerance


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("name", ["ducc0", "scipy", "numpy"])
def test_cosines_and_sines(name, dtype, how):
    """Each order of memory has one scale for a kind and its axes; all five have all three."""
    turn, kinds = HOWS.index(how), [pair for pair in SERIES.items() if not pair[1].adjoint]
    for number, ((kind, series), axes) in enumerate(itertools.product(kinds, AXES)):
        scale = ("backward", "ortho", "forward")[(number + turn) % 3]
        x = numbers(dtype, how)
        function = getattr(scipy.fft, f"{series.function}n")
        words = {"orthogonalize": series.orthogonal, "axes": axes, "norm": scale}
        want = function(x.real.astype("f8"), series.type, **words)
        if x.dtype.kind == "c":
            want = want + 1j * function(x.imag.astype("f8"), series.type, **words)
        kept, out = x.copy(), like(want, dtype)
        how_to = {"kind": kind, "forward": True, "norm": scale, "engine": name}
        transform(x, axes, out=out, **how_to)
        assert (x == kept).all()
        assert untouched(out)
        tolerance = 1e-5 if dtype in ("float32", "complex64") else 1e-13
        assert np.abs(out - want).max() <= tolerance * np.abs(want).max()
        transform(x, axes, out=x, **how_to)
        assert np.abs(x - want).max() <= tolerance * np.abs(want).max()


@pytest.mark.parametrize("extents", [(7, 8, 9), (2, 3, 4), (3, 2, 1)])
def test_adjoints(engine, extents):
    """The inner product of one array and the transform of another is that of these, exchanged."""
    series = [kind for kind in SERIES if "adjoint" in kind]
    if engine == "torch" or 1 in extents:
        series = []  # torch has none; of one number there is no cosine transform of type 1
    for kind, axes, norm in itertools.product([*ADJOINTS, *series], AXES, NORMS):
        kinds = kind.removeprefix("adjoint "), kind
        real = kind in ADJOINTS
        half = tuple(n // 2 + 1 if axis == axes[-1] else n for axis, n in enumerate(extents))
        if kinds[0] == "R2C":
            spaces = (extents, "f8"), (half, "c16")
        elif kinds[0] == "C2R":
            spaces = (half, "c16"), (extents, "f8")
        else:
            spaces = ((extents, "f8"),) * 2
        rng = np.random.default_rng(5)
        one, other = (numbers_of(rng, *space) for space in spaces)
        to, back = like(other, other.dtype), like(one, one.dtype)
        for x, out, number in ((one, to, 0), (other, back, 1)):
            forward = number == 0 if kinds[0] == "R2C" else number == 1 if real else True
            way = norm or "backward"
            if real and number == 1:  # the directions have each other's scales
                way = {"backward": "forward", "forward": "backward"}.get(way, way)
            how_to = {"kind": kinds[number], "forward": forward, "norm": way, "engine": engine}
            transform(x.copy(), axes, out=out, **how_to)
        assert untouched(to) and untouched(back)
        found, wanted = np.vdot(to, other).real, np.vdot(one, back).real
        assert abs(found - wanted) <= 1e-12 * np.linalg.norm(to) * np.linalg.norm(other)


def numbers_of(rng, shape, dtype):
    values = rng.standard_normal(shape)
    return values + 1j * rng.standard_normal(shape) if dtype == "c16" else values


@pytest.mark.parametrize("engine", ["ducc0", "scipy"])
def test_written_where_they_are_told(monkeypatch, engine):
    monkeypatch.setattr(
        local._Transform, "_in_new_memory", lambda _: pytest.fail("a result of its own")
    )
    x, real = numbers("complex64", "padded"), numbers("float32", "F")
    how = {"norm": None, "engine": engine}
    transform(x, (0, 2), out=x, kind="C2C", forward=True, **how)
    half = np.empty((7, 8, 5), "complex64")
    transform(real, (0, 2), out=half, kind="R2C", forward=True, **how)
    transform(half, (0, 2), out=real, kind="C2R", forward=False, **how)


@pytest.mark.parametrize("installed", ["ducc0", "scipy", "numpy"])
def test_tensors_get_torch_and_arrays_what_is_installed(monkeypatch, installed):
    real = importlib.import_module

    def found(name):
        if name.startswith(("ducc0", "scipy")) and not name.startswith(installed):
            raise ImportError(name)
        return real(name)

    monkeypatch.setattr(local.importlib, "import_module", found)
    local._installed.cache_clear()
    try:
        assert engine_for("torch", "C2C") == "torch"
        assert engine_for("torch", "DCT2") == engine_for("numpy", "C2C") == installed
    finally:
        local._installed.cache_clear()


def test_ducc0_has_no_threads_for_a_fork_to_join():
    misc = importlib.import_module("ducc0.misc")
    misc.resize_thread_pool(2)
    assert local._inner.__wrapped__("ducc0") is not None
    assert misc.thread_pool_size() == 1


@pytest.mark.parametrize("engine", ["ducc0", "scipy"])
@pytest.mark.parametrize("changed", ["c2c", "r2c", "c2r"])
def test_inner_functions_of_another_kind_are_not_used(monkeypatch, changed, engine):
    inner = local._inner(engine)
    assert inner is not None, "it is tested"

    def takes_other_arguments():
        raise AssertionError("called with none")

    known = {name: getattr(inner, name) for name in ("c2c", "r2c", "c2r")}
    known["resize_thread_pool"] = lambda _: None
    other = SimpleNamespace(**known | {changed: takes_other_arguments})
    monkeypatch.setattr(local.importlib, "import_module", lambda _: other)
    assert local._inner.__wrapped__(engine) is None
