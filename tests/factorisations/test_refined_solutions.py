"""Solutions by factors of a lower type: of hard matrices, of any scale, and what cannot be done."""

from __future__ import annotations

import warnings

import ml_dtypes
import numpy as np
import pytest
from matrices import general, hard, positive, right_sides, singular

import shardmath
from mistakes import heard
from shardmath import linalg
from shardmath.distribution import Replicated, Slab
from shardmath.local import lapack

EPS = np.finfo("float64").eps
WHOLE = [Replicated(), Replicated()]


def solved(a, b, factor_dtype="float32", **words):
    """The solution, and the first word of what was said of it."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        made = linalg.solve(a, b, factor_dtype=factor_dtype, distributions=WHOLE, **words)
    return made, [str(one.message) for one in said]


def backward_error(a, b, x):
    left = np.linalg.norm(b - a @ x, axis=0)
    scale = np.linalg.norm(a) * np.linalg.norm(x, axis=0) + np.linalg.norm(b, axis=0)
    return (left / scale).max()


def of_hard(context, factor_dtype):
    """(name, the type of the factors, whether it was said to be another than asked for, whether x
    is as exact as by factors of float64.)
    """
    found = []
    for name, a, is_positive in hard():
        b = right_sides(len(a), 3, "float64")
        for structure in ("gen", "pos") if is_positive else ("gen",):
            with context:
                words = {"assume_a": structure, "options": {"block_size": 16}}
                made, said = solved(a, b, factor_dtype, **words)
                plain = linalg.solve(a, b, assume_a=structure, distributions=WHOLE)
            error = backward_error(a, b, made.x)
            assert abs(error - made.backward_error) <= EPS
            limit = max(2 * len(a) ** 0.5 * EPS, 2 * backward_error(a, b, plain))
            found.append((name, structure, made.factor_dtype, len(said), bool(error <= limit)))
    return found


@pytest.mark.parametrize("factor_dtype", ["float32", "bfloat16"])
def test_hard_matrices_refined(contexts, factor_dtype):
    first, *others = contexts.run(of_hard, factor_dtype, ranks=3)
    assert others == [first] * 2
    assert {row[-1] for row in first} == {True}
    assert all((kind == "float64") == (said == 1) for _, _, kind, said, _ in first)
    by = {(name, structure): kind for name, structure, kind, *_ in first}
    easy = by["a circle of rows", "gen"], by["second differences", "pos"]
    assert easy == (factor_dtype,) * 2, by
    assert by["Hilbert 12", "pos"] == "float64"


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_numbers_are_rounded_to_the_nearest_of_bfloat16(dtype):
    x = np.asfortranarray(general(31, dtype)[::2])
    x[0] = np.arange(1, 32) * 2.0**-7 + 1 + 2.0**-8  # each between two
    numbers = np.ascontiguousarray(x).view("float32")
    want = numbers.astype(ml_dtypes.bfloat16).astype("float32")
    assert np.ascontiguousarray(lapack.rounded(x)).view("float32").tolist() == want.tolist()


def of_scales(context):
    """A and b of any size, of which the norm can be held."""
    a, b = general(40, "complex128"), right_sides(40, 5, "complex128")
    a += 10 * np.eye(40)
    b[:, 1] = 0
    made = {}
    with context:
        for of_a, of_b in ((1, 1), (1e120, 1), (1e-120, 1e-120), (1, 1e-250), (1e180, 1e-100)):
            result, said = solved(of_a * a, of_b * b)
            want = np.linalg.solve(a, b) * of_b / of_a
            close = np.abs(result.x - want).max() <= 1e-10 * np.abs(want).max()
            made[of_a, of_b] = bool(close), result.factor_dtype, said
        result, said = solved(1e307 * a, b)
        made["large"] = result.factor_dtype, "norm of a is not finite" in said[0]
        rows = shardmath.from_global(a, Slab.Y), shardmath.from_global(b, Slab.X)
        with shardmath.communication("forbid"):  # of operands that are not split alike
            x = linalg.solve(*rows, factor_dtype=np.complex64, distributions=[Slab.Y]).x
            whole = shardmath.from_global(a @ a.conj().T, Slab.X)
            linalg.solve(whole, rows[1], assume_a="pos", factor_dtype="float32")
        assert x.distribution == Slab.Y
        numbers = shardmath.from_global(np.diag([2, 4, 8]), Slab.X)
        made["integers"] = linalg.solve(numbers, numbers[0], factor_dtype="float32").x.tolist()
    return made


def test_any_scale(contexts):
    first, second = contexts.run(of_scales, ranks=2)
    assert first == second
    assert first.pop("large") == ("complex128", True)
    assert first.pop("integers") == [1, 0, 0]
    assert first == dict.fromkeys(first, (True, "complex64", []))


def mistaken(context):
    n, own = 12, context.rank == 1
    a, b = positive(n, "float64"), right_sides(n, 2, "float64")
    infinite = np.where(np.eye(n) == 0, a, np.inf)

    def call(x=a, y=b, factor_dtype="float32", how=WHOLE, **words):
        return lambda: linalg.solve(x, y, factor_dtype=factor_dtype, distributions=how, **words)

    table = {
        "float16": call(factor_dtype="float16"),
        "the same type": call(factor_dtype="float64"),
        "no type": call(factor_dtype=3),
        "complex factors": call(factor_dtype="complex64"),
        "no lower type": call(a.astype("f4"), b.astype("f4")),
        "triangular": call(assume_a="lower triangular"),
        "structure": call(assume_a="banded"),
        "one rank: type": call(factor_dtype="float64" if own else "float32"),
        "one rank: structure": call(assume_a="pos" if own else "gen"),
        "one rank: factors": call(factor_dtype=None if own else "float32"),
        "rows of b": call(y=b[:5]),
        "not square": call(a[:, :5]),
        "one distribution": call(how=WHOLE[:1]),
        "not finite": call(infinite),
        "singular": call(singular(n)),
        "not positive": call(-a, assume_a="pos"),
    }
    said = {}
    with context, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, action in table.items():
            said[name] = heard(action)
            made = call()()
            assert backward_error(a, b, made.x) <= EPS, name
    return said


def test_mistakes_of_refinement(contexts):
    first, second = contexts.run(mistaken, ranks=2)
    assert first == second
    words = {
        "float16": "'float16' of a matrix of float64: there are factors of 'float32' or 'bfloat16'",
        "the same type": "'float64' of a matrix of float64",
        "complex factors": "'complex64' of a matrix of float64",
        "no lower type": "no lower type",
        "triangular": "triangular matrix has none",
        "structure": "banded",
        "rows of b": "and b has 5 rows",
        "not square": "a is 12 x 5",
        "one distribution": "distributions holds one for each of a, b",
        "not finite": "a has NaN or infinite",
        "singular": "pivot 12",
        "not positive": "order 1",
    }
    heard_of = {name: words.get(name, "") in text for name, (_, text) in first.items()}
    assert heard_of == dict.fromkeys(first, True)
    assert {kind for kind, _ in first.values()} == {"ValueError"}


def turns(context):
    b, found = right_sides(96, None, "float64"), []
    for kind, factor_dtype in (("float64", "float32"), ("complex128", "bfloat16")):
        a, b = general(96, kind), right_sides(96, None, kind)
        if factor_dtype == "bfloat16":
            a += 20 * np.eye(96)
        with context:
            made, said = solved(a, b, factor_dtype)
        found.append((made.iterations, said, bool(made.backward_error <= EPS / 2)))
    return found


@pytest.mark.parametrize("ranks", [1, 4])
def test_turns_are_few(contexts, ranks):
    for made in contexts.run(turns, ranks=ranks):
        for most, (count, said, exact) in zip((5, 10), made, strict=True):
            assert 1 <= count <= most
            assert not said
            assert exact
