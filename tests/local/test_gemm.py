"""One rank's product against NumPy's in wide types; small integers make every comparison exact."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from shardmath.local import gemm

FLOATS = ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
DTYPES = [*FLOATS, "float8_e4m3fn", "float8_e5m2", "int8", "uint16", "int32", "int64"]
KINDS = ["C", "F", "panel", "columns", "step", "negative"]
SIZES = [(7, 8, 9), (9, 7, 8), (1, 9, 7), (8, 1, 9), (7, 9, 1), (1, 1, 1), (17, 33, 26)]
SENTINEL = 42


def multiply(a, b, out=None, **how):
    """`out`, by default a new array of the accumulator's type, set by a bound call."""
    if out is None:
        out = np.empty((a.shape[0], b.shape[1]), gemm.accumulator_of(a.dtype, b.dtype))
    gemm.bind(a, b, out, **how)()
    return out


def as_dtype(name):
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def laid_out(values, dtype, kind):
    """`values` in the memory layout `kind`, amid sentinels: (view, the whole buffer)."""
    m, n = values.shape
    whole = np.full((2 * m + 3, 3 * n + 5), SENTINEL).astype(dtype)
    cut = {
        "C": lambda w: w[1 : m + 1].reshape(-1)[: m * n].reshape(m, n),
        "F": lambda w: w.reshape(-1)[3 : 3 + m * n].reshape(n, m).T,
        "panel": lambda w: w[1 : m + 1, 2 : n + 2],
        "columns": lambda w: w.reshape(-1)[: (m + 2) * n].reshape(n, m + 2)[:, 1 : m + 1].T,
        "step": lambda w: w[1 : 2 * m + 1 : 2, 2 : 3 * n + 2 : 3],
        "negative": lambda w: w[1 : m + 1, 2 : n + 2][::-1, ::-1],
    }[kind]
    view = cut(whole)
    assert np.shares_memory(view, whole) or view.size == 0
    view[...] = values.astype(dtype)
    return view, whole


def numbers(rng, shape, dtype):
    values = rng.integers(0 if np.dtype(dtype).kind == "u" else -2, 3, shape)
    if np.dtype(dtype).kind == "c":
        return values + 1j * rng.integers(-2, 3, shape)
    return values


@pytest.fixture(params=["small blocks", "large blocks"])
def _blocks(request, monkeypatch):
    if request.param == "small blocks":
        monkeypatch.setattr(gemm, "_CONVERTED", 4)
        monkeypatch.setattr(gemm, "_ADDED_ROWS", 3)
        monkeypatch.setattr(gemm, "_ADDED_BYTES", 100)


def check(a, b, c, *, kinds, dtypes, accumulate, conj=(False, False)):
    """A product of values laid out as told equals NumPy's, and touches nothing around `out`."""
    (x, _), (y, _), (out, whole) = map(laid_out, (a, b, c), dtypes, kinds)
    inside = np.zeros(whole.shape, bool)
    offset = out.ctypes.data - whole.ctypes.data
    marks = np.ndarray(
        out.shape, bool, inside, offset // out.itemsize, [s // out.itemsize for s in out.strides]
    )
    marks[...] = True
    result = multiply(x, y, out, accumulate=accumulate, conj_a=conj[0], conj_b=conj[1])
    expected = (a.conj() if conj[0] else a) @ (b.conj() if conj[1] else b)
    expected = c + expected if accumulate else expected
    assert result is out
    np.testing.assert_array_equal(out.astype(np.complex128), expected)
    assert (whole[~inside].astype(np.complex128) == SENTINEL).all()


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("accumulate", [False, True])
def test_every_layout_of_every_operand(name, accumulate):
    dtype, rng = as_dtype(name), np.random.default_rng(1)
    m, k, n = 9, 7, 8
    a, b, c = (numbers(rng, shape, dtype) for shape in ((m, k), (k, n), (m, n)))
    for kinds in itertools.product(KINDS, repeat=3):
        check(a, b, c, kinds=kinds, dtypes=(dtype,) * 3, accumulate=accumulate)


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_every_dtype_and_size(name, size):
    (m, k, n), dtype, rng = size, as_dtype(name), np.random.default_rng(2)
    a, b, c = (numbers(rng, shape, dtype) for shape in ((m, k), (k, n), (m, n)))
    wide = np.dtype("f4") if dtype.itemsize < 4 and name not in ("int8", "uint16") else dtype
    for accumulate, kinds in itertools.product([False, True], ["CCC", "FCF", "CFC"]):
        check(a, b, c, kinds=kinds, dtypes=(dtype, dtype, wide), accumulate=accumulate)


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("name", ["complex64", "complex128", "float32"])
@pytest.mark.parametrize("conj", list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize("accumulate", [False, True])
def test_conjugates(name, conj, accumulate):
    rng = np.random.default_rng(3)
    a, b, c = (numbers(rng, shape, name) for shape in ((9, 7), (7, 8), (9, 8)))
    for kinds in itertools.product(["C", "F", "step"], repeat=3):
        check(a, b, c, kinds=kinds, dtypes=(name,) * 3, accumulate=accumulate, conj=conj)


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize(
    "names",
    [
        ("float32", "float64", "float64"),
        ("bfloat16", "float16", "float32"),
        ("bfloat16", "float32", "bfloat16"),
        ("float32", "complex64", "complex128"),
        ("float64", "float64", "float32"),
        ("int32", "float64", "float64"),
        ("int8", "int8", "float32"),
    ],
)
def test_mixed_types(names):
    rng, types = np.random.default_rng(4), [as_dtype(name) for name in names]
    a, b, c = map(numbers, [rng] * 3, [(9, 7), (7, 8), (9, 8)], types)
    for accumulate in (False, True):
        check(a, b, c, kinds="CFC", dtypes=types, accumulate=accumulate)


@pytest.mark.parametrize("shape", list(itertools.product([0, 3], repeat=3)))
@pytest.mark.parametrize("name", ["float16", "float64", "int64"])
def test_empty_extents(shape, name):
    m, k, n = shape
    a, b = np.ones((m, k), name), np.ones((k, n), name)
    for accumulate, order in itertools.product([False, True], "CF"):
        out = np.full((m, n), 5, name, order)
        multiply(a, b, out, accumulate=accumulate)
        assert (out == k + 5 * accumulate).all()


def test_the_result_has_the_accumulators_type():
    narrow = [("float16", "f4"), ("bfloat16", "f4"), ("float8_e5m2", "f4")]
    for name, acc in [*narrow, ("f4", "f4"), ("c8", "c8"), ("i1", "i1")]:
        ones = np.ones((2, 3), as_dtype(name))
        assert multiply(ones, ones.T).dtype == acc


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_halves_are_summed_in_float32_and_rounded_once(name):
    dtype, rng = as_dtype(name), np.random.default_rng(5)
    a = rng.standard_normal((5, 3000)).astype(dtype)
    b = rng.standard_normal((3000, 6)).astype(dtype)
    exact = a.astype("f8") @ b.astype("f8")
    sums = multiply(a, b)
    np.testing.assert_allclose(sums, exact, rtol=0, atol=2e-4)
    rounded = multiply(a, b, np.empty((5, 6), dtype))
    np.testing.assert_array_equal(rounded, sums.astype(dtype))


@pytest.mark.parametrize("name", FLOATS)
def test_nan_and_infinity_spread(name):
    dtype = as_dtype(name)
    a = np.array([[np.nan, 1], [np.inf, 1], [1, 1]]).astype(dtype)
    b = np.array([[1, 0], [1, 1]]).astype(dtype)
    with np.errstate(invalid="ignore"):
        wide = np.result_type(dtype, "f4")
        np.testing.assert_array_equal(multiply(a, b), a.astype(wide) @ b.astype(wide))


def test_integers_wrap_as_in_numpy():
    a = np.full((3, 4), 100, np.int8)
    np.testing.assert_array_equal(multiply(a, a.T), a @ a.T)


@pytest.mark.parametrize(
    ("a", "b", "more", "message"),
    [
        (np.ones((2, 3)), np.ones((2, 3)), {}, "do not multiply"),
        (np.ones((2, 3)), np.ones((3, 2)), {"out": np.zeros((3, 3))}, "out has shape"),
        (np.ones((2, 3)), np.ones((3, 2), "c16"), {"out": np.zeros((2, 2))}, "cannot hold"),
        (np.ones((2, 3)), np.ones((3, 2)), {"out": np.zeros((2, 2), "i8")}, "cannot hold"),
        (np.ones((2, 3)), np.ones((3, 2)), {"out": np.zeros((2, 2), "M8[s]")}, "cannot hold"),
        (np.ones((2, 3)), np.ones((3, 2), "M8[s]"), {}, "no numbers"),
    ],
)
def test_what_does_not_fit_is_a_value_error(a, b, more, message):
    before = None if "out" not in more else more["out"].copy()
    with pytest.raises(ValueError, match=message):
        multiply(a, b, **more)
    if before is not None:
        np.testing.assert_array_equal(more["out"], before)
