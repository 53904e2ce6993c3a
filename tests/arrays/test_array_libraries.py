"""Libraries: the same memory seen from both sides, and nothing imported on the way."""

import subprocess
import sys
import types
import weakref

import numpy as np
import pytest
import torch

from built import module_from_c
from shardmath.arrays import (
    dtypes,
    libraries,
    library_named,
    library_of,
    library_of_package,
    raw_view,
)

LIBRARY = libraries()
NUMPY, TORCH = LIBRARY["numpy"], LIBRARY["torch"]


def numbers(shape, name):
    """Small integers, exact in every type."""
    count = int(np.prod(shape))
    return (np.arange(count) % 2 if name == "bool" else np.arange(count) % 7).reshape(shape)


def strided(library, shape, name):
    """Every kind of stride that the library has, as (label, array)."""
    big = library.empty((2 * shape[0], 3 * shape[1]), name)
    yield "C", library.empty(shape, name)
    yield "F", library.empty(shape, name, "F")
    yield "panel", big[: shape[0], : shape[1]]
    yield "step", big[::2, 2::3]
    if library is NUMPY:
        yield "negative", big[::-2, 2::3][:, ::-1]


@pytest.mark.parametrize("name", dtypes.NAMES)
@pytest.mark.parametrize(
    "library", [LIBRARY[name] for name in ("numpy", "torch")], ids=lambda library: library.name
)
@pytest.mark.parametrize("shape", [(7, 8), (9, 1), (0, 7), (1, 1)])
def test_host_view_is_the_same_memory(library, shape, name):
    for label, x in strided(library, shape, name):
        host, spec = library.host_view(x, writable=True), library.spec(x)
        assert library_of(x) is library
        assert (host.dtype, host.shape) == (dtypes.to_numpy(name), tuple(shape)), label
        assert spec.shape == shape and spec.dtype == name
        if host.size > 1:
            assert host.strides == tuple(s * spec.itemsize for s in spec.strides), label
            assert host.ctypes.data == library.pointer(x), label
        host[...] = numbers(shape, name)
        seen = np.array(x.tolist()).reshape(shape)  # read by the library's own means
        np.testing.assert_array_equal(seen.astype(complex), numbers(shape, name), label)


@pytest.mark.parametrize("name", dtypes.NAMES)
@pytest.mark.parametrize(
    "library", [LIBRARY[name] for name in ("numpy", "torch")], ids=lambda library: library.name
)
def test_from_host_shares_memory_and_keeps_the_owner(library, name):
    class Owned(np.ndarray):
        """An ndarray that a weak reference can watch."""

    owner = np.zeros(4 * 99, np.uint8).view(Owned)[: 9 * dtypes.of(name).itemsize]
    watch = weakref.ref(owner)
    host = np.ndarray((3, 3), dtypes.to_numpy(name), buffer=owner, order="F")
    x = library.from_host(host)
    assert library.spec(x).order == "F" and library.spec(x).dtype == name
    assert library.pointer(x) == owner.ctypes.data
    host[...] = numbers((3, 3), name)
    del owner, host
    assert watch() is not None
    np.testing.assert_array_equal(np.array(x.tolist()).astype(complex), numbers((3, 3), name))
    del x
    assert watch() is None


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("name", [*dtypes.NAMES, "complex32"])
@pytest.mark.parametrize(
    "library", [LIBRARY[name] for name in ("numpy", "torch")], ids=lambda library: library.name
)
def test_arrays_on_memory_are_made_of_its_owner_which_they_keep(
    library, name, compiled, monkeypatch
):
    class Owner:
        """What arrays keep alive, as a block of the heap does."""

        def __init__(self, memory):
            self.memory, self.__array_interface__ = memory, memory.__array_interface__

    monkeypatch.setenv("SHARDMATH_COMPILED", str(int(compiled)))
    itemsize = dtypes.of(name).itemsize
    for shape, strides in (
        ((7, 9), (9, 1)),
        ((3, 5), (1, 4)),
        ((8,), (3,)),
        ((), ()),
        ((0, 4), (4, 1)),
    ):
        make = library.viewer(name, shape, strides, "cpu")
        for _ in range(2):
            memory = np.zeros(64 * itemsize, np.uint8)
            owner = Owner(memory)
            watch = weakref.ref(owner)
            x = make(owner, memory.ctypes.data)
            del owner
            spec = library.spec(x)
            assert (spec.dtype, spec.shape) == (name, shape)
            if spec.size:
                assert spec.strides == strides and library.pointer(x) == memory.ctypes.data
            part = x[:1] if shape else x
            del x
            assert watch() is not None
            library.host_view(part)[...] = 1
            assert memory.any() == bool(spec.size)
            del part
            assert watch() is None


def test_a_capsule_of_which_nobody_makes_an_array_lets_the_owner_go(tmp_path):
    built = module_from_c(dtypes, "dlpack.c", "_dlpack", tmp_path)
    memory = np.zeros(9, "f4")
    owner = type("Owner", (), {})()
    watch = weakref.ref(owner)
    for wrong in (("f", 32, -1, (9,), (1,)), (2, 32, -1, (9,), ()), (2, 32, -1, (9,), ("1",))):
        with pytest.raises(TypeError):
            built.capsule(*wrong, owner, memory.ctypes.data)
    capsule = built.capsule(2, 32, -1, (9,), (1,), owner, memory.ctypes.data)
    del owner
    assert watch() is not None
    del capsule
    assert watch() is None


def test_zero_strides_pass_for_reading_only():
    x, t = np.broadcast_to(np.float32(3), (7, 8)), torch.tensor(3.0).expand(7, 8)
    for library, array in ((NUMPY, x), (TORCH, t)):
        host = library.host_view(array)
        assert host.strides == (0, 0) and (host == 3).all()
        with pytest.raises(ValueError, match=r"^c is (read-only|an expanded view), and the call"):
            library.host_view(array, writable=True, name="c")
    with pytest.raises(ValueError, match=r"^out is a broadcast view"):
        NUMPY.host_view(np.lib.stride_tricks.as_strided(np.zeros(3), (2, 3), (0, 8)), writable=True)


def test_tensors_with_flags_are_resolved():
    z = torch.tensor([1 + 2j, 3 - 4j])
    assert TORCH.host_view(z.conj()).tolist() == [1 - 2j, 3 + 4j]
    assert TORCH.host_view(z.conj().imag).tolist() == [-2.0, 4.0]
    for lazy in (z.conj(), z.conj().imag):
        with pytest.raises(ValueError, match=r"^out is a lazy"):
            TORCH.host_view(lazy, writable=True)
    weight = torch.nn.Parameter(torch.ones(3))
    assert library_of(weight) is TORCH
    TORCH.host_view(weight)[1] = 5
    assert weight.tolist() == [1, 5, 1] and weight.requires_grad


@pytest.mark.parametrize(
    ("host", "message"),
    [
        (np.zeros(4)[::-1], "negative strides"),
        (np.broadcast_to(1.0, (3,)), "read-only"),
        (np.zeros(4, "V12"), "no data type"),
        (np.zeros(4, ">f8"), "no data type"),
    ],
)
def test_torch_says_what_it_cannot_hold(host, message):
    with pytest.raises(ValueError, match=message):
        TORCH.from_host(host)


@pytest.mark.parametrize(
    "thing", [[1, 2], 3.0, np.float64(3), np.ma.zeros(3), None, memoryview(b"")]
)
def test_no_array_of_ours_is_a_value_error_that_names_both(thing):
    with pytest.raises(ValueError, match=rf"numpy or cupy or torch.*{type(thing).__name__}"):
        library_of(thing)


@pytest.mark.parametrize(
    ("thing", "advice"),
    [
        ([1, 2], r"got list; pass numpy.asarray\(x\)$"),
        (range(3), r"asarray\(x\)$"),
        (np.ma.zeros(3), r"pass x.filled\(value\), or x.data$"),
        (None, "got NoneType$"),
        (types.SimpleNamespace(local=0, distribution=0), "pass x.local, this rank's part"),
    ],
)
def test_what_makes_an_array_of_it_is_said(thing, advice):
    with pytest.raises(ValueError, match=advice):
        library_of(thing)


def test_packages_and_names():
    assert library_of_package(np) is NUMPY is library_named("numpy")
    assert library_of_package(torch) is TORCH is library_named("torch")
    for bad in (types, "numpy", None, np.linalg):
        with pytest.raises(ValueError, match="numpy or cupy or torch"):
            library_of_package(bad)
    with pytest.raises(ValueError, match=r"numpy or cupy or torch.*'jax'"):
        library_named("jax")
    assert NUMPY.default_dtype().name == "float64" and TORCH.default_dtype().name == "float32"


def test_subclasses_are_seen_as_their_library():
    class Mine(np.ndarray):
        pass

    host = NUMPY.host_view(np.zeros(3).view(Mine))
    assert type(host) is np.ndarray
    assert type(NUMPY.host_view(np.zeros((2, 2)).view(np.matrix))) is np.ndarray


@pytest.mark.parametrize("dtype", ["u1", "f2", "f4", "f8", "c8", "c16", "V12", "S3", "M8[s]", "g"])
@pytest.mark.parametrize("cut", [np.s_[:, :], np.s_[::-2, 1::3], np.s_[:0], np.s_[:1, :1]])
def test_raw_views_move_the_bits(dtype, cut):
    size = np.dtype(dtype).itemsize
    source = np.random.default_rng(1).integers(0, 256, (7, 9 * size), np.uint8).view(dtype)
    target = np.full((7, 9 * size), 0xA5, np.uint8).view(dtype)
    expected = target.copy().view(np.uint8).reshape(7, 9, size)
    expected[cut] = source.view(np.uint8).reshape(7, 9, size)[cut]
    raw = raw_view(target[cut])
    assert (raw.strides, raw.shape) == (target[cut].strides, target[cut].shape)
    raw[...] = raw_view(source[cut])
    np.testing.assert_array_equal(target.view(np.uint8).reshape(7, 9, size), expected)


@pytest.mark.parametrize(
    "code",
    [
        "import shardmath.arrays",
        "import numpy, shardmath.arrays as s; s.library_of(numpy.ones(3)).spec(numpy.ones(3))",
        "import shardmath.arrays as s; s.dtypes.of('bfloat16')\n"
        "try: s.library_of([])\nexcept ValueError: pass",
    ],
)
def test_no_library_is_imported(code):
    check = "import sys; print([m for m in ('torch', 'ml_dtypes', 'scipy') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{check}"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_a_missing_ml_dtypes_is_said_with_the_pip_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    dtypes._native.cache_clear()  # a process that has found it once looks no further
    t = torch.zeros(3, dtype=torch.bfloat16)
    assert TORCH.spec(t).dtype == "bfloat16"
    with pytest.raises(ImportError, match="pip install 'ml_dtypes"):
        TORCH.host_view(t)
