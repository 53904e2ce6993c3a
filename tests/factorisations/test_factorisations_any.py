"""Factorisations and solutions of matrices split at random, on ranks, beside NumPy on the whole."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parent.parent / "distributed"))

import scipy.linalg
from matrices import general, hard, is_small, lapacks, positive, right_sides, singular
from split_arrays import array_of, drawn_cases, placed

from arrangements import distributions, part_of
from mistakes import heard
from shardmath import linalg
from shardmath.arrays import library_of
from shardmath.distributed import DistributedArray
from shardmath.distribution import Replicated, Slab
from shardmath.geometry import decode

SIZES = st.one_of(st.integers(0, 9), st.sampled_from([33, 64, 200]))


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
        draw(st.sampled_from([None, max(1, n // 6), max(1, n // 3), 32])),
    )
    return n, columns, split, words


def of_parts(context, whole, encoded, library):
    """This rank's part of an array, and its distribution."""
    distribution = decode(encoded[context.rank])
    part = np.array(part_of(whole, distribution, context.rank, context.size), whole.dtype)
    return array_of(context, part, library), distribution


def host(part):
    return library_of(part).on_host(part)


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
        refined(context, x, y, [of_x, of_y, of_solution], words, solution, split[3])
        again = linalg.solve(x, y, distributions=[of_x, of_y, of_solution], **words)
        assert host(again).tobytes() == host(made).tobytes()
        assert (host(x) == before[0]).all() and (host(y) == before[1]).all()
        with_global_view(context, split, library, (a, b), (want, solution), lower)


def refined(context, x, y, split, words, want, encoded):
    """By factors of a lower type: as exact as by those of the operands' type."""
    if want.dtype.name not in ("float64", "complex128"):
        return
    made = linalg.solve(x, y, distributions=split, factor_dtype="float32", **words)
    assert made.backward_error <= 2 * max(1, len(want)) ** 0.5 * np.finfo("float64").eps
    assert made.factor_dtype == {"float64": "float32", "complex128": "complex64"}[want.dtype.name]
    right(context, made.x, want, encoded, 1e3)


def with_global_view(context, split, library, operands, wants, lower):
    a, b = (
        placed(context, whole, one, library) for whole, one in zip(operands, split, strict=False)
    )
    factor = linalg.cholesky(a, lower)
    assert factor.distribution == a.distribution
    solution = linalg.solve(a, b, assume_a="pos", lower=lower, distributions=[Slab(0)])
    assert solution.distribution == Slab(0)
    of_arrays(context, [(factor, wants[0]), (solution, wants[1])], 300)


def of_arrays(context, pairs, growth):
    """Whether arrays are what is wanted, but for small errors."""
    for made, want in pairs:
        assert isinstance(made, DistributedArray)
        assert made.shape == want.shape
        part = part_of(want, made.distribution, context.rank, context.size)
        n = len(want)
        assert is_small(host(made.local) - part, want, n=n, dtype=want.dtype, growth=growth)


def general_matrices(context, cases):
    with context:
        for n, columns, split, (dtype, flag, library, block) in cases:
            a = (general(n, dtype) / max(n, 1) ** 0.5 + 2 * np.eye(n)).astype(dtype)
            b, options = right_sides(n, columns, dtype), {"block_size": block}
            x, of_x = of_parts(context, a, split[0], library)
            y, of_y = of_parts(context, b, split[1], library)
            before = host(x).copy(), host(y).copy()
            to_factor, to_solution = (decode(split[i][context.rank]) for i in (2, 3))
            three = {"distributions": [of_x, of_y, to_solution], "options": options}
            wants = wanted(a, b, flag)
            made = {
                "lu": linalg.lu_factor(x, distributions=[of_x, to_factor], options=options),
                "solve": linalg.solve(x, y, transposed=flag, **three),
                "triangular": linalg.solve_triangular(x, y, 2 * flag, True, flag, **three),
                "inv": linalg.inv(x, distributions=[of_x, to_factor], options=options),
                "det": linalg.det(x, distributions=of_x, options=options),
                "slogdet": linalg.slogdet(x, distributions=of_x, options=options),
                "direct": directly(context, x, y, [of_x, of_y], options, library),
            }
            refined(context, x, y, three["distributions"], {"transposed": flag, "options": options},
                    wants["solve"], split[3])  # fmt: skip
            right(context, made.pop("direct"), wants["direct"], split[1], 1e3)
            lu, pivots = made.pop("lu")
            assert host(pivots).tolist() == wants["pivots"].tolist()
            three["distributions"][0] = to_factor
            made["lu_solve"] = linalg.lu_solve((lu, pivots), y, int(flag), **three)
            size = 1e3
            for name in ("solve", "triangular", "lu_solve"):
                right(context, made[name], wants[name], split[3], size)
            right(context, lu, wants["lu"], split[2], size)
            right(context, made["inv"], wants["inv"], split[2], size)
            for name in ("det", "slogdet"):
                close = np.finfo(dtype).eps * 1e3 * max(n, 1)
                np.testing.assert_allclose(made[name], wants[name], rtol=close, atol=close)
            assert (host(x) == before[0]).all() and (host(y) == before[1]).all()
            views(context, split, library, a, b, wants, flag)


def directly(context, x, y, split, options, library):
    """By a DirectSolver, in copies of the operands; x is left in that of b."""
    a, b = (array_of(context, host(one).copy(), library) for one in (x, y))
    made = linalg.direct_solver(a, b, distributions=split, options=options)
    assert made is b
    lu, _ = linalg.lu_factor(x, distributions=split[0], options=options)
    assert host(a).tobytes() == np.ascontiguousarray(host(lu)).tobytes()
    return made


def wanted(a, b, flag):
    """What SciPy and NumPy have."""
    n = len(a)
    lu, pivots = scipy.linalg.lu_factor(a)
    seen = a.T if flag else a
    triangle = np.tril(a, -1) + np.eye(n) if flag else np.tril(a)
    solution = np.linalg.solve(seen, b).astype(a.dtype) if b.size else b
    triangular = np.linalg.solve(triangle.conj().T if flag else triangle, b) if b.size else b
    return {
        "lu": lu.astype(a.dtype),
        "pivots": pivots,
        "solve": solution,
        "lu_solve": solution,
        "direct": (np.linalg.solve(a, b) if b.size else b).astype(a.dtype),
        "triangular": triangular.astype(a.dtype),
        "inv": np.linalg.inv(a),
        "det": np.linalg.det(a),
        "slogdet": np.linalg.slogdet(a),
    }


def views(context, split, library, a, b, wants, flag):
    """The same of arrays that know how they are split, by NumPy's names too."""
    x, y = placed(context, a, split[0], library), placed(context, b, split[1], library)
    factors = linalg.lu_factor(x)
    pairs = [
        (linalg.solve(x, y, transposed=flag), wants["solve"]),
        (linalg.lu_solve(factors, y, int(flag)), wants["solve"]),
        (linalg.inv(x, distributions=[Slab(1)]), wants["inv"]),
    ]
    if library == "numpy":
        pairs.append((np.linalg.inv(x), wants["inv"]))
        close = {"rtol": 1e-2, "atol": 1e-5}
        np.testing.assert_allclose(complex(np.linalg.det(x)), wants["det"], **close)
    made = [complex(one) for one in x.__array_namespace__().linalg.slogdet(x)]
    np.testing.assert_allclose(made, wants["slogdet"], rtol=1e-2, atol=1e-3)
    of_arrays(context, pairs, 1e3)


# In units of the matrix's norm. Tensor cores truncate sums: each addition may lose 2^-23 of them.
MOST_ERROR = {"full": 2.0**-20, "tf32x3": 2.0**-15, "bfloat16": 2.0**-8}


def in_precisions(context, cases):
    """The factors of (n, block size) whose products are in some precision, and errors too large."""
    wrong = []
    for (n, block), dtype in product(cases, ("float32", "complex64")):
        a, one = positive(n, dtype), {"options": {"block_size": block}}
        part = np.array(part_of(a, Slab.X, context.rank, context.size))
        for precision, most in MOST_ERROR.items():
            one |= {"distributions": [Slab.X, Replicated()], "precision": precision}
            with context:
                factor = linalg.cholesky(part, **one)
                lu, pivots = linalg.lu_factor(part, **one)
            product_of_lu = (np.tril(lu, -1) + np.eye(n)) @ np.triu(lu)
            for row, other in list(enumerate(pivots))[::-1]:
                product_of_lu[[row, other]] = product_of_lu[[other, row]]
            for made in (factor @ factor.conj().T, product_of_lu):
                error = np.linalg.norm(made - a) / np.linalg.norm(a)
                least = 2.0**-16 if precision == "bfloat16" and n > 2 * block else 0
                if not least <= error <= most:
                    wrong.append((n, block, dtype, precision, error))
    return wrong


def test_factors_by_products_in_a_lower_precision(contexts):
    assert contexts.run(in_precisions, [(1, 16), (65, 16)], ranks=2) == [[]] * 2


test_positive_definite_matrices = drawn_cases(positive_definite, systems, 4, most=5, shrunk=False)


test_general_matrices = drawn_cases(general_matrices, systems, 4, most=5, shrunk=False)


def hard_general(context):
    """The residual of a solution is small beside ||A|| ||x|| and what elements have grown by, and
    A = P L U beside ||L|| ||U||.
    """
    failed = []
    for name, a, _ in hard():
        n, whole = len(a), Replicated()
        b, options = right_sides(n, 2, "float64"), {"block_size": 5}
        with context:
            lu, pivots = linalg.lu_factor(a, distributions=whole, options=options)
            x = linalg.solve(a, b, distributions=[whole, whole], options=options)
        lower, upper = np.tril(lu, -1) + np.eye(n), np.triu(lu)
        exchanged = a.copy()
        for row, other in enumerate(pivots):
            exchanged[[row, other]] = exchanged[[other, row]]
        if not is_small(exchanged - lower @ upper, lower, upper, n=n, dtype="float64", growth=1):
            failed.append((name, "factors"))
        if not is_small(a @ x - b, lower, upper, x, n=n, dtype="float64", growth=3):
            failed.append((name, "solution"))
        if not (np.abs(lower) <= 1).all():
            failed.append((name, "pivots"))
    return failed


def test_hard_matrices(contexts):
    assert contexts.run(hard_general, ranks=3) == [[]] * 3


def determinants(context):
    """Those that no number of their type holds, and those of singular matrices."""
    whole = Replicated()
    large, small = 1e9 * np.eye(60), 1e-9 * np.eye(60)
    with context:
        return [
            *(float(linalg.det(a, distributions=whole)) for a in (large, small, singular(9))),
            *(tuple(map(float, linalg.slogdet(a, distributions=whole)))
              for a in (large, small, -singular(9), np.empty((0, 0)))),
        ]  # fmt: skip


def test_determinants_beyond_the_type(contexts):
    logarithm = 60 * 9 * np.log(10)
    for made in contexts.run(determinants, ranks=2):
        assert made[:3] == [np.inf, 0, 0]
        np.testing.assert_allclose(made[3:5], [(1, logarithm), (1, -logarithm)], rtol=1e-14)
        assert made[5:] == [(0, -np.inf), (1, 0)]


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


def of_lapack(context):
    """What fails of the ratios that LAPACK holds below 30, in the norm of the largest sum of a
    column, and which pivots that are 0 are not named.
    """
    failed, n, threshold = [], 50, 30 * np.finfo("float64").eps / 2
    one = {"distributions": Replicated(), "options": {"block_size": 7}}
    two = one | {"distributions": [Replicated()] * 2}
    x = right_sides(n, 3, "float64")
    size = lambda a: np.abs(a).sum(0).max(initial=0)  # noqa: E731
    for name, a, is_positive in lapacks(n):
        b = a @ x
        with context:
            zero = scipy.linalg.lapack.dgetrf(a)[2]
            if zero:
                said = heard(lambda a=a, b=b: linalg.solve(a, b, **two))
                failed += [] if f"pivot {zero} is 0" in said[1] else [(name, said)]
                continue
            lu, pivots = linalg.lu_factor(a, **one)
            lower, upper = np.tril(lu, -1) + np.eye(n), np.triu(lu)
            product = lower @ upper
            for row, other in list(enumerate(pivots))[::-1]:
                product[[row, other]] = product[[other, row]]
            ratios = {"lu": size(product - a) / size(a) / n}
            got = linalg.solve(a, b, **two)
            ratios["solve"] = size(a @ got - b) / (size(a) * size(got))
            if is_positive:
                factor = linalg.cholesky(a, **one)
                ratios["cholesky"] = size(factor @ factor.T - a) / size(a) / n
                got = linalg.solve(a, b, assume_a="pos", **two)
                ratios["positive"] = size(a @ got - b) / (size(a) * size(got))
        failed += [(name, what) for what, ratio in ratios.items() if not ratio < threshold]
    return failed


def test_matrices_of_lapacks_tests(contexts):
    assert contexts.run(of_lapack, ranks=3) == [[]] * 3


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
    general_words = {"distributions": [whole, whole], "options": {"block_size": 4}}
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
        "singular": (lambda: linalg.solve(singular(n), b, **general_words), b),
        "singular, inv": (lambda: linalg.inv(singular(n), **one), b),
        "singular, factors": (lambda: linalg.lu_solve(
            linalg.lu_factor(singular(n), **one), b, **general_words), b),
        "singular, triangle": (lambda: linalg.solve_triangular(
            np.triu(singular(n)), b, **general_words), b),
        "pivots": (lambda: linalg.lu_solve(
            (a, np.full(n, n if own else 0, "i4")), b, **general_words), b),
        "other pivots": (lambda: linalg.lu_solve((a, np.arange(n)), b, **general_words), b),
        "rounded": (lambda: linalg.lu_factor(a, precision="bfloat16", **one), a),
        "precision": (lambda: linalg.cholesky(a, precision="float16" if own else "full", **one), a),
        "trans": (lambda: linalg.lu_solve((a, np.arange(n)), b, 3, **general_words), b),
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
        "too many distributions": "for 2 results",
        "structure": "banded",
        "singular": "pivot 12",
        "singular, inv": "pivot 12",
        "singular, factors": "pivot 12",
        "singular, triangle": "pivot 12",
        "pivots": "pivots name rows",
        "other pivots": "int64",
        "trans": "not 3",
        "rounded": "float32 or complex64",
        "precision": "one of full, tf32x3, bfloat16, not 'float16'",
    }
    assert {
        name: words.get(name, "") in text for name, (_, text) in first.items()
    } == dict.fromkeys(first, True)
    kinds = {name: kind for name, (kind, _) in first.items() if kind != "ValueError"}
    types = ("integers", "no distribution", "other pivots", "rounded")
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
