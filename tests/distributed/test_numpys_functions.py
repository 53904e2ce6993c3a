"""NumPy's functions beyond the standard, on arrays split at random and on the whole."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from hypothesis import strategies as st
from split_arrays import agree, drawn_cases, elements, placed, shapes, splits
from test_standard import LIBRARIES, axis_of, function_of, joined, plainly, with_axis_or_none

import shardmath
from shardmath.distribution import BlockCyclic, ProcessGrid, Replicated, Slab

DTYPES = ("bool", "int8", "int64", "float32", "float64", "complex128")


def two_axes(draw, shape):
    return tuple(draw(st.permutations(range(-len(shape), 0)))[:2])


def lettered(draw, shape):
    """Other operands for einsum, and the subscripts."""
    letters, extents = [], {}
    for number, extent in enumerate(shape):
        same = [letter for letter in letters if extents[letter] == extent]
        letters.append(draw(st.sampled_from(["abc"[number], "abc"[number], *same])))
        extents[letters[-1]] = extent
    terms = ["".join(letters)]
    for _ in range(draw(st.integers(0, 2))):
        terms.append("".join(draw(st.lists(st.sampled_from("abcde"), max_size=3, unique=True))))
    others = [tuple(extents.setdefault(letter, len(terms)) for letter in term)
              for term in terms[1:]]  # fmt: skip
    others = [tuple(1 if draw(st.integers(0, 7)) == 0 else n for n in one) for one in others]
    every = sorted({*"".join(terms)})
    kept = "".join(draw(st.permutations(every)))[: draw(st.integers(0, 3))]
    subscripts = ",".join(terms)
    how = draw(st.sampled_from(["explicit", "explicit", "implicit", "ellipsis"]))
    if how == "explicit":
        return others, [f"{subscripts} -> {kept}"], {}
    if how == "ellipsis" and shape:
        return [shape], ["...i,...i" if draw(st.booleans()) else "i...,i...->...i"], {}
    return others, [subscripts], {}


def counted(draw, shape):
    """Bins, which of the elements count, and weights."""
    bins = draw(st.sampled_from([1, 7, (-1.0, 0.0, 0.5, 2.0), (0, 3)]))
    words = {"bins": bins, "density": draw(st.none() | st.booleans())}
    if draw(st.booleans()):
        words["range"] = (-1, 2)
    return [shape] * draw(st.integers(0, 1)), [], words


def padded(draw, shape):
    mode = draw(st.sampled_from(["constant", "constant", "edge", "reflect", "symmetric", "wrap"]))
    if 0 in shape:
        mode = "constant"
    pairs = tuple((draw(st.integers(0, 3)), draw(st.integers(0, 9))) for _ in shape)
    width = draw(st.sampled_from([2, (1, 3), pairs, {-1: 2}]))
    words = {"mode": mode}
    if mode == "constant" and draw(st.booleans()):
        words["constant_values"] = draw(st.sampled_from([1, (0, 1)]))
    return [], [width], words


def ranked(draw, shape):
    """Axes, one, several or all, and whether they are kept."""
    axes = draw(
        st.none() | st.just(tuple(draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))))
    )
    if axes and draw(st.booleans()):
        axes = axes[0] - len(shape)
    return [], [], {"axis": axes, "keepdims": draw(st.booleans())}


def crossed(draw, shape):
    return [(*shape[:-1], 3)], [], {}


def factor(draw, shape):
    last = [(shape[-1], draw(st.integers(1, 4))), shape[-1:], (2, shape[-1], 3), ()]
    return [draw(st.sampled_from(last))], [], {}


def summed(draw, shape):
    axis = draw(st.none() | st.just(axis_of(draw, shape)))
    return [], [], {"axis": axis, "ddof": draw(st.integers(0, 1))}


def of_axes(draw, shape):
    axes = two_axes(draw, shape)
    return [], [draw(st.integers(-3, 3)), *(axes if draw(st.booleans()) else ())], {}


def extents(draw, shape):
    n = draw(st.none() | st.tuples(st.integers(2, 6), st.integers(2, 6)))
    return [], [], {"s": n, "axes": two_axes(draw, shape)}


def close_to(draw, shape):
    return [shape], [], {"atol": draw(st.sampled_from([0, 1])), "equal_nan": draw(st.booleans())}


CASES = {
    "allclose": close_to,
    "amax": with_axis_or_none,
    "amin": with_axis_or_none,
    "around": plainly(lambda draw, _: draw(st.integers(0, 2))),
    "array_equal": lambda draw, shape: ([draw(st.sampled_from([shape, shape[1:]]))], [], {}),
    "concatenate": joined,
    "copy": plainly(),
    "cross": crossed,
    "cumprod": with_axis_or_none,
    "cumsum": with_axis_or_none,
    "diagonal": of_axes,
    "dot": factor,
    "einsum": lettered,
    "empty_like": plainly(),
    "fft.fft2": extents,
    "fft.ifft2": extents,
    "fft.irfft2": extents,
    "fft.rfft2": extents,
    "full_like": plainly(lambda draw, _: draw(st.integers(0, 1))),
    "histogram": counted,
    "imag": plainly(),
    "isclose": close_to,
    "linalg.cross": crossed,
    "linalg.outer": lambda draw, shape: ([(draw(st.integers(0, 4)),)], [], {}),
    "median": ranked,
    "ndim": plainly(),
    "ones_like": plainly(),
    "outer": lambda draw, shape: ([(draw(st.integers(0, 4)),)], [], {}),
    "pad": padded,
    "ravel": plainly(),
    "real": plainly(),
    "shape": plainly(),
    "size": plainly(),
    "std": summed,
    "swapaxes": lambda draw, shape: ([], [*two_axes(draw, shape)], {}),
    "trace": of_axes,
    "transpose": plainly(lambda draw, shape: draw(st.permutations(range(len(shape))))),
    "unique": plainly(),
    "var": summed,
    "where": plainly(),
    "zeros_like": plainly(),
}
CALLS = {  # whose arguments come in another order
    "concatenate": lambda function, *arrays, **words: function(arrays, **words),
    "einsum": lambda function, *given: function(given[-1], *given[:-1]),
    "histogram": lambda function, a, *of_each, **words: function(
        a, weights=of_each[0] if of_each else None, **words
    ),
    "empty_like": lambda function, a: np.isnan(function(a)) & False,  # its elements are undefined
}
LEAST = {"einsum": 0, "ndim": 0, "shape": 0, "size": 0, "swapaxes": 2, "diagonal": 2, "trace": 2,
         "dot": 2}  # fmt: skip
MOST = {"cross": 2, "linalg.cross": 2, "linalg.outer": 1, "outer": 1}
FLOATING = ("dot", "linalg.cross", "cross", "std", "var", "fft.fft2", "fft.ifft2", "fft.rfft2",
            "fft.irfft2", "empty_like", "array_equal")  # fmt: skip
REAL = ("amax", "amin", "around", "histogram", "median", "unique", "fft.rfft2")


@st.composite
def calls(draw, size):
    """A function, a library, arrays (shape, dtype, split), arguments."""
    name = draw(st.sampled_from(sorted(CASES)))
    least = 2 if name.startswith("fft.") else LEAST.get(name, 1)
    shape = draw(shapes(least, MOST.get(name, 3)))
    if name.startswith("fft.") or name in ("amax", "amin", "dot"):
        shape = tuple(max(n, 2) for n in shape)
    if name.endswith("cross"):
        shape = (*shape[:-1], 3)
    more, args, words = CASES[name](draw, shape)
    library = draw(st.sampled_from(LIBRARIES if name not in ("cumprod", "std") else ("numpy",)))
    kinds = [t for t in DTYPES if t[0] == "f"] if name in FLOATING else DTYPES
    kinds = [t for t in kinds if t[0] != "c"] if name in REAL else kinds
    kinds = [t for t in kinds if t != "bool"] if library == "torch" else kinds
    if name in ("histogram", "around"):
        kinds = [t for t in kinds if t != "bool"]
    dtype = draw(st.sampled_from(kinds))
    arrays = [(one, dtype, draw(splits(one, size))) for one in (shape, *more)]
    return name, library, arrays, args, words


def compare(context, name, library, given_, args, words):
    """A call of NumPy's function with arrays, and with the whole of each."""
    whole = [elements(shape, dtype, seed) for seed, (shape, dtype, _) in enumerate(given_)]
    if name in ("median", "isclose", "allclose", "unique") and whole[0].dtype.kind == "f":
        whole[0].reshape(-1)[3::5] = np.nan
    arrays = [placed(context, *one, library) for one in zip(whole, (s for *_, s in given_),
                                                             strict=True)]  # fmt: skip
    function = function_of(np, name)
    call = CALLS.get(name, lambda function, *given, **words: function(*given, **words))
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            expected = call(function, *whole, *args, **words)
        except ValueError:  # subscripts that fit no operands
            with pytest.raises(ValueError):
                call(function, *arrays, *args, **words)
            return
        got = call(function, *arrays, *args, **words)
    if isinstance(expected, bool | int) or name == "shape":
        assert got == expected and type(got) is type(expected)
        return
    several = isinstance(expected, tuple)
    for one, other in zip(got, expected, strict=True) if several else [(got, expected)]:
        agree(one, other, close=True, strict=library == "numpy")


def body(context, cases):
    for case in cases:
        try:
            compare(context, *case)
        except Exception as error:
            error.add_note(str(case))
            raise


test_functions_of_numpy = drawn_cases(body, calls, 12, most=60, shrunk=False)


def follows(context):
    """How results are split, and what moves."""
    cyclic = BlockCyclic(ProcessGrid(shape=(2, 1)), (1, 6))
    with context:
        x = shardmath.random((4, 6), seed=0, distribution=Slab.X)
        stack = shardmath.random((4, 3, 3), seed=0, distribution=Slab.X)
        with shardmath.communication("forbid"):
            assert np.median(x, axis=1).distribution == Slab.X
            assert np.pad(x, ((0, 0), (2, 1))).distribution == Slab.X
            assert np.pad(x, ((0, 0), (2, 1)), "wrap").distribution == Slab.X
            assert np.pad(x.to(cyclic), ((0, 0), (2, 1))).shape == (4, 9)
            assert np.histogram(x)[0].distribution == Replicated()
            assert np.einsum("ij,ij->i", x, x).distribution == Slab.X
            assert np.einsum("bij,bjk->bik", stack, stack).distribution == Slab.X
            assert np.einsum("ij,kj->ik", x, x).distribution == Slab.X  # a product is asked for
            assert np.einsum("bii->b", stack).distribution == Slab.X
            for call in (
                lambda: np.median(x, axis=0),
                lambda: np.pad(x, ((3, 0), (0, 0))),
                lambda: np.pad(x, 1, "edge"),
            ):
                with pytest.raises(RuntimeError, match="is in force"):
                    call()
        assert "all_reduce of 10 counts" in shardmath.explain(np.histogram, x, range=(0, 1))
        edges = np.arange(3.0)
        assert int(np.histogram(x, edges)[0].sum()) == math.prod(x.shape)
        out = shardmath.zeros(4, distribution=Slab.X)
        assert np.median(x, axis=1, out=out) is out
        mistakes(x)


def mistakes(x):
    for call, error, words in (
        (lambda: np.einsum("ij,jk", x), ValueError, "names 2 operands, and 1 are given"),
        (lambda: np.einsum("ijk", x), ValueError, "'ijk' does not fit .* 2 axes"),
        (lambda: np.einsum("i2", x), ValueError, "letters from a to z"),
        (lambda: np.einsum("ij->ik", x), ValueError, "no operand has 'k'"),
        (lambda: np.einsum("ij->ii", x), ValueError, "a letter twice"),
        (lambda: np.einsum("...j->j", x), ValueError, "leaves out the axes of the ellipsis"),
        (lambda: np.einsum("ij,ij", x, x.T), ValueError, "'i' has 4 elements .* and 6"),
        (lambda: np.einsum(x, [0, 1]), NotImplementedError, "einsum with lists of axes"),
        (lambda: np.einsum("ij", x, dtype="f4"), NotImplementedError, "'dtype'"),
        (lambda: np.histogram(x, "auto"), NotImplementedError, "histogram_bin_edges"),
        (lambda: np.histogram(x, [2, 1]), ValueError, "monotonically"),
        (lambda: np.histogram(x / 0), ValueError, "not finite"),
        (lambda: np.histogram(x, weights=x[0]), ValueError, "weights of shape"),
        (lambda: np.median(x + 1j), TypeError, "no order"),
        (lambda: np.median(x, axis=2), ValueError, "axis 2 is out of range"),
        (lambda: np.pad(x, -1), ValueError, "must not be negative"),
        (lambda: np.pad(x[:0], 1, "edge"), ValueError, "axis 0 has no elements"),
        (lambda: np.pad(x, 1, "linear_ramp"), NotImplementedError, "np.concatenate"),
        (lambda: np.pad(x, 1, constant_value=1), NotImplementedError, "constant_value=1"),
        (lambda: np.unique(x, return_counts=True), NotImplementedError, "unique_counts"),
        (lambda: np.unique(x, axis=0), NotImplementedError, "along an axis"),
        (lambda: np.tile(x, -1), ValueError, "repetitions must be"),
        (lambda: np.nansum(x), NotImplementedError, r"use np.where\(np.isnan\(x\), 0, x\).sum"),
        (lambda: np.linalg.eig(x), NotImplementedError, r"np\.linalg\.eig of"),
        (lambda: np.linalg.inv(x[0]), np.linalg.LinAlgError, r"shape \(6,\)"),
    ):
        with np.errstate(all="ignore"), pytest.raises(error, match=words):
            call()


def test_how_results_are_split(contexts):
    contexts.run(follows, ranks=2)
