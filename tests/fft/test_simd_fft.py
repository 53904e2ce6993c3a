"""The compiled transforms of many lines against NumPy's, for both widths of vectors."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest

from built import built_from_c
from shardmath.local import simd_fft

# Lengths, and the shapes around them: whole groups of lanes, and some left over.
LENGTHS = [1, 2, 3, 4, 5, 6, 8, 10, 15, 16, 20, 36, 45, 64, 100, 160, 256, 2048]
AROUND = [(17,), (3, 13), (1, 32), (37, 1)]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return built_from_c(simd_fft, "simd_fft.c", tmp_path_factory.mktemp("simd_fft"))


@pytest.fixture(params=[32, 64])
def simd(library, request):
    loaded = simd_fft.transforms(library, request.param)
    if loaded is None:
        pytest.skip(f"no vectors of {request.param} bytes here")
    return loaded


def numbers(shape, dtype):
    rng = np.random.default_rng(7)
    made = rng.standard_normal(shape)
    return (made + 1j * rng.standard_normal(shape) if dtype[0] == "c" else made).astype(dtype)


def stored(array, how):
    """The same elements in C or Fortran order, with room between rows, or backwards."""
    if how == "F":
        return np.asfortranarray(array)
    if how == "padded":
        room = np.full((*array.shape[:-1], array.shape[-1] + 3), 7, array.dtype)
        room[..., :-3] = array
        return room[..., :-3]
    return array[::-1].copy()[::-1] if how == "reversed" else array


def cases():
    for length in LENGTHS:
        for around in AROUND if length < 300 else AROUND[:1]:
            for axis in range(len(around) + 1):
                yield (*around[:axis], length, *around[axis:]), axis


def oracle(x, axis, kind, forward, length):
    if kind == "R2C":
        return np.fft.rfft(x, axis=axis)
    if kind == "C2R":
        return np.fft.irfft(x, length, axis=axis, norm="forward")
    return np.fft.fft(x, axis=axis) if forward else np.fft.ifft(x, axis=axis, norm="forward")


@pytest.mark.parametrize("how", ["C", "F", "padded", "reversed"])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", ["C2C", "R2C", "C2R"])
def test_against_numpy(simd, kind, double, how):
    real, wide = ("float64", "complex128") if double else ("float32", "complex64")
    taken, made = (real if kind == "R2C" else wide), (real if kind == "C2R" else wide)
    reached = set()
    for shape, axis in cases():
        length, half = shape[axis], list(shape)
        half[axis] = length // 2 + 1
        x = stored(numbers(half if kind == "C2R" else shape, taken), how)
        for forward in (True, False) if kind == "C2C" else (kind == "R2C",):
            want = oracle(
                x.astype("c16" if taken == wide else "f8"),
                axis,
                kind,
                forward,
                length,
            )
            out = stored(np.full(want.shape, 7, made), "padded")
            how_to = {"kind": kind, "forward": forward, "divisor": 4.0}
            if not simd.transform(x, (axis,), out=out, **how_to):
                assert (out == 7).all()
                continue
            reached.add(length)
            assert (out.base[..., -3:] == 7).all()
            error = np.linalg.norm(4 * out - want) / np.linalg.norm(want)
            assert error <= 3 * np.finfo(made).eps, (shape, axis, forward)
            if kind == "C2C":
                kept = x.copy()
                simd.transform(x, (axis,), out=x, **how_to)
                assert (x == out).all()
                x[...] = kept
    assert reached == {n for n in LENGTHS if kind == "C2C" or n % 2 == 0}


def test_several_axes(simd):
    for axes in ((0, 2), (2, 1), (1, 2, 0)):
        x = numbers((20, 18, 24), "float32")
        want = np.fft.rfftn(x.astype("f8"), axes=axes)
        half = np.empty(want.shape, "complex64")
        assert simd.transform(x, axes, out=half, kind="R2C", forward=True, divisor=1.0)
        assert np.abs(half - want).max() <= 1e-5 * np.abs(want).max()
        back, count = np.empty_like(x), np.prod([x.shape[axis] for axis in axes])
        assert simd.transform(half, axes, out=back, kind="C2R", forward=False, divisor=float(count))
        assert np.abs(back - x).max() <= 1e-5


def test_lines_are_apart(simd):
    """What is in a line changes no other line, and the ends of half a spectrum count as real."""
    x = numbers((33, 40), "float32")
    wild, out, other = x.copy(), np.empty((33, 21), "c8"), np.empty((33, 21), "c8")
    wild[5] = np.nan
    wild[17] *= 1e30
    simd.transform(x, (1,), out=out, kind="R2C", forward=True, divisor=1.0)
    simd.transform(wild, (1,), out=other, kind="R2C", forward=True, divisor=1.0)
    calm = [row for row in range(33) if row not in (5, 17)]
    assert (out[calm] == other[calm]).all()
    back, again = np.empty_like(x), np.empty_like(x)
    other[...] = out
    other.imag[:, 0] = 3
    other.imag[:, -1] = np.nan
    simd.transform(out, (1,), out=back, kind="C2R", forward=False, divisor=1.0)
    simd.transform(other, (1,), out=again, kind="C2R", forward=False, divisor=1.0)
    assert (back == again).all()


def test_what_is_left_to_libraries(simd):
    def refused(x, out=None, kind="C2C", axes=(0,)):
        out = np.full_like(x, 7) if out is None else out
        assert not simd.transform(x, axes, out=out, kind=kind, forward=True, divisor=1.0)
        assert (out == 7).all()

    refused(numbers((7, 64), "c8"))
    refused(numbers((4, 2, 2, 8), "c8"))
    refused(numbers((8, 0), "c8"))
    refused(numbers((0, 64), "c8"))
    refused(numbers((4096, 16), "c8"))
    refused(numbers((64, simd.width // 16 - 1), "c16"))
    refused(numbers((8, 64), "c8"), axes=(0, 1), out=np.full((8, 64), 7, "c16"))
    refused(numbers((8, 64), "c16").astype(">c16"))
    refused(numbers((15, 64), "f8"), out=np.full((8, 64), 7, "c16"), kind="R2C")
    room = np.zeros(64 * 64 * 8 + 1, np.uint8)[1:].view("c8").reshape(64, 64)
    refused(room)


def test_threads_have_work_space_of_their_own(simd):
    arrays = [numbers((64, n, 32), "c16") * (i + 1) for i, n in enumerate((160, 160, 8))]
    wants = [np.fft.fft(array, axis=1) for array in arrays]
    made = [np.empty_like(array) for array in arrays]

    def work(index):
        for _ in range(20):
            how_to = {"kind": "C2C", "forward": True, "divisor": 1.0}
            simd.transform(arrays[index], (1,), out=made[index], **how_to)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for got, want in zip(made, wants, strict=True):
        assert np.abs(got - want).max() <= 1e-12 * np.abs(want).max()


def test_other_libraries_and_processors(library):
    assert simd_fft.transforms(ctypes.CDLL(None)) is None
    assert simd_fft.transforms(library, 128) is None
