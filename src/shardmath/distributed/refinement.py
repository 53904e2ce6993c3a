"""Solutions as accurate as the operands' type, from factors in a lower type and iterative
refinement.

    factors of A in float32, 2/3 n^3 operations      x = 0, r = b
    x = x + (float32: A^-1 r) ; r = b - A x          4 n^2 a turn, r in float64, until r is small

A turn multiplies the error by about cond(A) times the lower type's epsilon. Where that is not less
than 1, refinement does not converge, and the matrix is factorised in the operands' type after all.

Source: Langou, Langou, Luszczek, Kurzak, Buttari, Dongarra, "Exploiting the performance of 32 bit
floating point arithmetic in obtaining 64 bit accuracy", SC 2006; LAPACK's dsgesv and dsposv;
Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, chapter 12.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.linalg import LinAlgError

from shardmath.arrays import dtypes
from shardmath.arrays.base import HostArray
from shardmath.base import current
from shardmath.base.caller import caller_place
from shardmath.base.collective_call import collective_call
from shardmath.base.integers import slices
from shardmath.call.driver import Driver
from shardmath.context.agreement import require_equal
from shardmath.distributed import parts, reductions
from shardmath.distributed.given_parts import of_parts_too
from shardmath.distributed.manipulation import concat, of_one_type, tril, triu
from shardmath.distributed.movement import end_explanation
from shardmath.distributed.norms import diagonal, vector_norm
from shardmath.distributed.state import Distributed
from shardmath.factorisations import api
from shardmath.factorisations.lu import LU_FACTOR
from shardmath.factorisations.operands import require_equations, require_square
from shardmath.factorisations.problem import FactorisationOptions, dealt_columns, panel_width
from shardmath.geometry import Slab
from shardmath.local.lapack import Precision
from shardmath.operators.arguments import options_of
from shardmath.operators.matmul.forms import matmul as product_of_parts

_ROUNDED: Precision = "bfloat16"
_MOST_TURNS = 30  # as LAPACK's
# The types that factors can have; the first is the type in which they are stored.
_LOWER = {
    "float64": ("float32", "bfloat16"),
    "complex128": ("complex64", "float32", "bfloat16"),
}
_PLAIN = 1e30  # a matrix is scaled if its norm is larger, or less than the inverse
_SQUARED = 1e140  # squares of numbers up to this, and of their inverses, can be summed
_ROWS_AT_ONCE = 64  # that cores copy to another order at a time: they fill a cache line
_ROWS = Slab(0)

Solution = Callable[[Any], Any]  # computes A^-1 r, approximately, from r
Correction = Callable[[Any, HostArray], Any]  # the same, given the norms of r's columns


class RefinedSolution(NamedTuple):
    """A solution, and how accurate it is.

    `backward_error` is the largest ||b - A x|| / (||A|| ||x|| + ||b||) of the columns, in Frobenius
    and Euclidean norms: the least relative change of A and b for which x is the exact solution.
    `iterations` is the number of corrections of x, and `factor_dtype` the type of the factors: the
    operands' type where the lower one did not suffice.
    """

    x: Any
    backward_error: float
    iterations: int
    factor_dtype: str


@collective_call
def solve(
    a: Any,
    b: Any,
    *,
    distributions: Any = None,
    lower: bool = False,
    check_finite: bool = True,
    assume_a: str = "gen",
    transposed: bool = False,
    factor_dtype: Any = None,
    options: api.Options = None,
) -> Any:
    """X of a @ X = b, for any number of right-hand sides: this rank's part of it. Collective.

        x = solve(a, b, assume_a="pos", distributions=[Slab.X, Slab.X])
        x, backward_error, iterations, _ = solve(a, b, factor_dtype="float32", distributions=...)

    `a` is this rank's part of an n x n matrix, `b` of a vector or of a matrix of n rows, of the
    same type. `assume_a` says what a is, as in scipy.linalg.solve: "gen", which is factorised with
    partial pivoting; "pos", positive definite, of which only the triangle that `lower` names is
    read; "lower triangular" or "upper triangular". If `transposed`, it is a.T @ X = b.
    `distributions` are those of `a`, `b` and x, which may be left out where it is that of `b`; of
    DistributedArrays they are left out, or that of x alone.

    With `factor_dtype`, "float32" for operands of float64 or complex128, the factors are of that
    type, on GPUs by products of two numbers of TF32 in place of each; with "bfloat16", of float32
    by products of factors rounded to bfloat16. x is refined in the
    operands' type until its backward error is at most 2^-53, or not halved any more: a
    RefinedSolution. Where it is then above 2 sqrt(n) 2^-52, or there are no such factors, a
    RuntimeWarning says so, and x is that of factors in the operands' type.

    Raises SingularMatrix, a LinAlgError, where a pivot is 0, which is named; LinAlgError where a
    leading minor is not positive; ValueError for a `factor_dtype` that is not a lower type LAPACK
    has, or of a triangular matrix.
    Arguments and errors otherwise as `cholesky`. Sources: scipy.linalg.solve; LAPACK's dsgesv.
    """
    words: dict[str, Any] = {
        "lower": lower,
        "check_finite": check_finite,
        "assume_a": assume_a,
        "transposed": transposed,
        "options": options,
    }
    if factor_dtype is None:
        return api.solve(a, b, distributions=distributions, **words)
    return _of_parts_too(a, b, factor_dtype=factor_dtype, distributions=distributions, **words)


def _solve(a: Any, b: Any, *, factor_dtype: Any, **words: Any) -> RefinedSolution:
    a, b = of_one_type([a, b], inexact=True)
    end_explanation(lambda: f"solve of {a.layout} by factors of {factor_dtype}, and refinement")
    kind = a.element_type.name
    low = _agreed(a, b, kind, factor_dtype, words)
    how, vector = b.distribution, b.ndim == 1
    rows = (b[:, None] if vector else b).to(_ROWS)
    with np.errstate(all="ignore"):  # a solution that is not finite is refused
        system = _System(a, words)
        made = _refined(system, rows, low)
    if not isinstance(made, RefinedSolution):
        x = api.solve(a, rows, **words)
        file, line = caller_place()
        text = f"solve: {made}; x is by factors of {kind}"
        warnings.warn_explicit(text, RuntimeWarning, file, line)
        with np.errstate(all="ignore"):
            left = system.residual(rows, x)
            error = system.backward_error(_norms(rows, 0), _norms(x, 0), _norms(left, 0))
        made = RefinedSolution(x, error, 0, kind)
    x = made.x[:, 0] if vector else made.x
    return made._replace(x=x.to(how))


_of_parts_too = of_parts_too(_solve, ("a", "b"))


def _agreed(a: Any, b: Any, kind: str, factor_dtype: Any, words: dict[str, Any]) -> str:
    """The type of the factors, after all ranks have agreed on the call. Collective."""

    def describe() -> Any:
        structure = api.structure_of(words["assume_a"])
        if structure not in ("gen", "pos"):
            raise ValueError("factor_dtype is of factors, and a triangular matrix has none")
        require_equations(a.shape, b.shape)
        require_square("a", a.shape)
        known = _LOWER.get(kind, ())
        name = dtypes.of(factor_dtype).name
        if name not in known:
            raise ValueError(
                f"factor_dtype {name!r} of a matrix of {kind}: there are factors of "
                f"{' or '.join(map(repr, known)) or 'no lower type'}"
            )
        flags = structure, *(bool(words[name]) for name in ("lower", "transposed", "check_finite"))
        return name if name == _ROUNDED else known[0], flags

    def check(specs: list[Any]) -> str:
        require_equal("the arguments of solve", specs)
        name: str = specs[0][0]
        return name

    made: str = a.context.agree("solve, refined", describe, check)
    return made


def _refined(system: _System, b: Any, low: str) -> RefinedSolution | str:
    """The solution, or why factors of a lower type give none. Collective."""
    if not np.isfinite(system.norm):
        return "the norm of a is not finite"
    eps = float(np.finfo(system.kind).eps)
    x, left, error, turns = None, b, math.inf, 0
    of_left = of_b = _norms(b, 0)
    try:
        correct = system.correction(low)
        while True:
            step = correct(left, of_left)
            tried = step if x is None else x + step
            left = system.residual(b, tried)
            of_tried, of_left = np.split(_norms(concat([tried, left], 1), 0), 2)
            last, now = error, system.backward_error(of_b, of_tried, of_left)
            if now < error:
                x, error = tried, now
            if error <= eps / 2 or turns == _MOST_TURNS or not now < last / 2:
                break
            turns += 1
    except LinAlgError as mistake:
        return f"{mistake}, in {low}"
    if x is None or error > 2 * math.sqrt(b.shape[0]) * eps:
        return f"refinement by factors of {low} ends at a backward error of {error:.1e}"
    return RefinedSolution(x, error, turns, low)


class _System:
    """A X = B for right-hand sides split by rows: residuals, and corrections by factors of A.

    Of a positive definite A only a triangle T is read: A = T + T^H - D, where D is its diagonal.
    """

    def __init__(self, a: Any, words: dict[str, Any]) -> None:
        self.options = words["options"]
        self.lower = bool(words["lower"]) is not bool(words["transposed"])
        self.seen = a.T if words["transposed"] else a
        self.kind = dtypes.to_numpy(a.element_type)
        self.diagonal = None
        if api.structure_of(words["assume_a"]) == "pos":
            self.seen = (tril if self.lower else triu)(self.seen)
            self.diagonal = diagonal(self.seen).real.to(_ROWS)
        self.norm = float(_norms(self.seen, None))
        if self.diagonal is not None and self.norm:
            part = float(_norms(self.diagonal, None)) / self.norm
            self.norm *= math.sqrt(2 - part**2)

    def residual(self, b: Any, x: Any) -> Any:
        """B - A X. Collective."""
        if self.diagonal is None:
            return _minus_product(b, self.seen, x)
        left = _minus_product(b + self.diagonal[:, None] * x, self.seen, x)
        return _minus_product(left.conj(), self.seen.T, x.conj()).conj()

    def backward_error(self, b: HostArray, x: HostArray, left: HostArray) -> float:
        """The largest backward error of the columns, by the norms of B, X and B - A X; NaN if one
        is.
        """
        return float(np.where(left == 0, 0, left / (self.norm * x + b)).max(initial=0))

    def correction(self, low: str) -> Correction:
        """The function that computes A^-1 r from r, by factors of a lower type. Collective. Raises
        LinAlgError.

        Powers of 2 keep A and each column of r within the range of the type.
        """
        precision: Precision = _ROUNDED if low == _ROUNDED else "tf32x3"
        low = _LOWER[self.kind.name][0]
        plain = not self.norm or 1 / _PLAIN < self.norm < _PLAIN
        scale = 1.0 if plain else 0.5 ** math.frexp(self.norm)[1]
        columns = _in_columns(self.seen if plain else self.seen * scale, low)
        solved = self._factorised(columns, precision)

        def correct(r: Any, sizes: HostArray) -> Any:
            units = _units(sizes)
            step = solved((r / units).astype(low)).astype(self.kind)
            return step * (units * scale)

        return correct

    def _factorised(self, a: Any, precision: Precision) -> Solution:
        """The function that solves with A by its factors, which are dealt to the ranks for that."""
        n, context = a.shape[0], a.context
        machine = Driver.of(context, LU_FACTOR).machine
        width = options_of(FactorisationOptions, self.options).block_size
        width = width or panel_width(n, context.size, machine)
        dealt = dealt_columns(n, context.size, width)
        words = {"check_finite": False, "options": self.options}
        if self.diagonal is None:
            factors = api.lu_factor(a, distributions=dealt, precision=precision, **words)
            return lambda r: api.lu_solve(factors, r, **words)
        how = {"distributions": dealt, "precision": precision, **words}
        factor = api.cholesky(a, self.lower, **how)
        first, second = (0, 2) if self.lower else (2, 0)

        def solved(r: Any) -> Any:
            half = api.solve_triangular(factor, r, first, self.lower, **words)
            return api.solve_triangular(factor, half, second, self.lower, **words)

        return solved


def _in_columns(x: Any, dtype: str) -> Any:
    """The matrix in another type, in column-major order, in which its panels are read.

    GPUs keep the part of a row that shares a cache line with an element until its neighbours are
    copied, cores only that of a few rows.
    """
    part, library = x.local, x.library
    device, height = library.spec(part).device, part.shape[0]
    made = library.empty(part.shape, dtypes.of(dtype), "F", device)
    for rows in slices(height, _ROWS_AT_ONCE if device == "cpu" else max(1, height)):
        made[rows] = part[rows]
    return x.like(made, x.distribution, x.layout)


def _minus_product(c: Any, a: Any, x: Any) -> Any:
    """C - A X, split by rows. Collective."""
    how = [a.distribution, _ROWS, _ROWS]
    words: dict[str, Any] = {"distributions": how, "alpha": -1, "beta": 1}
    with current.within(c.context):
        local = product_of_parts(a.local, x.local, c.local, **words)
    return c.like(local, c.distribution, c.layout)


def _norms(x: Any, axis: int | None) -> HostArray:
    """The norm of all elements, or of each column, on every rank, even where its square would
    overflow. Collective.
    """
    norms = _host(vector_norm(x, axis=axis))
    if ((norms > 1 / _SQUARED) & (norms < _SQUARED)).all():
        return norms
    units = _units(_host(reductions.max(abs(x), axis))) if x.size else 1
    return np.asarray(_host(vector_norm(x / units, axis=axis)) * units)


def _units(sizes: HostArray) -> HostArray:
    """Powers of 2 near these numbers; 1 for 0 and for numbers that are not finite."""
    exponents = np.frexp(sizes)[1] - 1
    return np.where((sizes > 0) & np.isfinite(sizes), np.ldexp(1.0, exponents), 1)


def _host(x: Any) -> HostArray:
    """The elements of an array that every rank has whole."""
    assert isinstance(x, Distributed) and not x.layout.partitioned_axes, "on every rank"
    return parts.on_host(x.local)
