"""Factorisations and solutions of matrices split at random, on ranks, beside NumPy on the whole."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parent.parent / "distributed"))

from matrices import hard, is_small, positive, right_sides
from split_arrays import examples, lists_of, placed

from arrangements import distributions, part_of
from mistakes import heard
from shardmath import linalg
from shardmath.arrays import library_named
from shardmath.distributed import DistributedArray, parts
from shardmath.distribution import Replicated, Slab
from shardmath.geometry import decode

SIZES = st.one_of(st.integers(0, 9), st.sampled_from([33, 64, 100, 200]))


@st.composite
def systems(draw, size):
    """A matrix, right-hand sides, how they are split, and what is asked for."""
    n = draw(SIZES)
    columns = draw(st.sampled_from([None, 0, 1, 3, 17]))
    right = (n,) if columns is None else (n, columns)
    split = [draw(distributions(shape, size)) for shape in ((n, n), right, (n, n), right)]
    words = (
        draw(st.sampled_from(["float32", "float64", "complex64", "complex128"])),
        draw(st.booleans()),
        draw(st.sampled_from(["numpy", "numpy", "torch"])),
        draw(st.sampled_from([None, 1, 7, 32])),
    )
    return n, columns, split, words


def of_parts(context, whole, encoded, library):
    """This rank's part of an array, and its distribution."""
    distribution = decode(encoded[context.rank])
    part = np.array(part_of(whole, distribution, context.rank, context.size), whole.dtype)
    return parts.on_device(part, library_named(library), "cpu"), distribution


def host(part):
    return np.asarray(part)


def right(context, made, want, encoded, growth):
    """Whether a part is that of `want`, and its error small."""
    part = part_of(want, decode(encoded[context.rank]), context.rank, context.size)
    assert host(made).shape == part.shape
    assert host(made).dtype == want.dtype
    assert is_small(host(made) - part, want, n=len(want), dtype=want.dtype, growth=growth)


def positive_definite(context, cases):
    with context:
        of_positive_definite(context, cases)


def of_positive_definite(context, cases):
    for n, columns, split, (dtype, lower, library, block) in cases:
        a, b = positive(n, dtype), right_sides(n, columns, dtype)
        options = {"block_size": block}
        x, of_x = of_parts(context, a, split[0], library)
        y, of_y = of_parts(context, b, split[1], library)
        before = host(x).copy(), host(y).copy()
        want = np.linalg.cholesky(a) if n else a
        want = want if lower else want.conj().T
        solution = np.linalg.solve(a, b) if b.size else b
        of_factor, of_solution = (decode(split[i][context.rank]) for i in (2, 3))
        made = linalg.cholesky(x, lower, distributions=[of_x, of_factor], options=options)
        right(
            context,
            made,
            want,
            split[2],
            growth=100,
        )
        words = {"assume_a": "pos", "lower": lower, "options": options}
        made = linalg.solve(x, y, distributions=[of_x, of_y, of_solution], **words)
        right(
            context,
            made,
            solution,
            split[3],
            growth=300,
        )
        again = linalg.solve(x, y, distributions=[of_x, of_y, of_solution], **words)
        assert host(again).tobytes() == host(made).tobytes()
        assert (host(x) == before[0]).all() and (host(y) == before[1]).all()
        with_global_view(context, split, library, (a, b), (want, solution), lower)


def with_global_view(context, split, library, operands, wants, lower):
    a, b = (
        placed(context, whole, one, library) for whole, one in zip(operands, split, strict=False)
    )
    factor = linalg.cholesky(a, lower)
    assert factor.distribution == a.distribution
    solution = linalg.solve(a, b, assume_a="pos", lower=lower, distributions=[Slab(0)])
    assert solution.distribution == Slab(0)
    for made, want in zip((factor, solution), wants, strict=True):
        assert isinstance(made, DistributedArray)
        assert made.shape == want.shape
        part = part_of(want, made.distribution, context.rank, context.size)
        n = len(want)
        assert is_small(host(made.local) - part, want, n=n, dtype=want.dtype, growth=300)


@settings(examples(5), phases=[Phase.generate])
@given(cases=lists_of(systems, most=8))
def test_positive_definite_matrices(contexts, cases):
    size, calls = cases
    contexts.run(positive_definite, calls, ranks=size)


def hard_positive(context):
    """||A - L L^H|| is small however badly A is conditioned, and so is the residual of a solution,
    beside ||A|| ||x||.
    """
    failed = []
    for name, a in (case[:2] for case in hard() if case[2]):
        n, whole = len(a), Replicated()
        b = right_sides(n, 2, "float64")
        options = {"block_size": 5}
        with context:
            factor = linalg.cholesky(a, distributions=whole, options=options)
            x = linalg.solve(a, b, assume_a="pos", distributions=[whole, whole], options=options)
        if not is_small(a - factor @ factor.T, a, n=n, dtype="float64", growth=1):
            failed.append((name, "factor"))
        if not is_small(a @ x - b, a, x, n=n, dtype="float64", growth=1):
            failed.append((name, "solution"))
    return failed


def test_hard_positive_definite_matrices(contexts):
    assert contexts.run(hard_positive, ranks=3) == [[]] * 3


def mistaken(context):
    """What is raised, after which operands are as they were, and the next call is right."""
    n = 12
    a, b = positive(n, "float64"), right_sides(n, 2, "float64")
    nan, minor = a.copy(), a.copy()
    nan[7, 3] = np.inf
    minor[8, 8] = -1
    whole = Replicated()
    one = {"distributions": whole, "options": {"block_size": 4}}
    two = {"assume_a": "pos", "distributions": [whole, whole], "options": {"block_size": 4}}
    own = context.rank == 1
    table = {
        "not positive": (lambda: linalg.cholesky(minor, **one), minor),
        "not positive, solve": (lambda: linalg.solve(minor, b, **two), minor),
        "not finite": (lambda: linalg.cholesky(nan, **one), nan),
        "b not finite": (lambda: linalg.solve(a, nan, **two), nan),
        "not square": (lambda: linalg.cholesky(a[:5], **one), a),
        "rows of b": (lambda: linalg.solve(a, b[:5], **two), b),
        "one rank: dtype": (lambda: linalg.cholesky(a.astype("f4") if own else a, **one), a),
        "integers": (lambda: linalg.cholesky(np.eye(3, dtype=int), **one), a),
        "a vector": (lambda: linalg.cholesky(b[0], **one), b),
        "another type of b": (lambda: linalg.solve(a, b.astype("f4"), **two), b),
        "one rank: lower": (lambda: linalg.cholesky(a, not own, **one), a),
        "one rank: no array": (lambda: linalg.cholesky(None if own else a, **one), a),
        "too many distributions": (
            lambda: linalg.cholesky(a, distributions=[whole] * 3), a),
        "no distribution": (lambda: linalg.cholesky(a, distributions=[3]), a),
        "block size": (lambda: linalg.cholesky(
            a, distributions=whole, options={"block_size": 0 if own else 4}), a),
        "structure": (lambda: linalg.solve(a, b, **(two | {"assume_a": "banded"})), a),
    }  # fmt: skip
    said = {}
    with context:
        for name, (call, operand) in table.items():
            before = operand.copy()
            said[name] = heard(call)
            assert operand.tobytes() == before.tobytes(), name
            factor = linalg.cholesky(a, **one)
            assert is_small(a - factor @ factor.T, a, n=n, dtype="float64"), name
    return said


def test_mistakes_are_the_same_error_on_all_ranks(contexts):
    first, second = contexts.run(mistaken, ranks=2)
    assert first == second
    words = {
        "not positive": "order 9",
        "not positive, solve": "order 9",
        "not finite": "a has NaN",
        "b not finite": "b has NaN",
        "not square": "5 x 12",
        "rows of b": "5 rows",
        "integers": "int64",
        "another type of b": "float32",
        "too many distributions": "3",
        "structure": "banded",
    }
    assert {
        name: words.get(name, "") in text for name, (_, text) in first.items()
    } == dict.fromkeys(first, True)
    kinds = {name: kind for name, (kind, _) in first.items() if kind != "ValueError"}
    types = ("integers", "no distribution")
    assert kinds == dict.fromkeys(types, "TypeError")


def raised(context):
    """The class of an error is NumPy's, and SciPy's, and the call after it is right."""
    a = -np.eye(4)
    with context:
        for _ in range(3):
            with pytest.raises(np.linalg.LinAlgError):
                linalg.cholesky(a, distributions=Replicated())
        return linalg.cholesky(-a, distributions=Replicated()).tolist() == np.eye(4).tolist()


def test_errors_are_numpys(contexts):
    assert contexts.run(raised, ranks=2) == [True, True]
    assert linalg.LinAlgError is np.linalg.LinAlgError
