"""The public functions on parts: one call each, and the errors for faults that the ranks found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.linalg import LinAlgError

from shardmath.arrays import library_of
from shardmath.base.collective_call import collective_call, settled
from shardmath.call.agreement import raising_on_all_ranks
from shardmath.call.driver import Operation, call
from shardmath.context.context import require_context
from shardmath.factorisations.cholesky import CHOLESKYS, SOLVE_POSITIVE_DEFINITE
from shardmath.factorisations.lu import DIAGONAL, INVERSE, LU_FACTORS, LU_SOLVE, SOLVE
from shardmath.factorisations.operands import SingularMatrix, not_finite
from shardmath.factorisations.operation import SOLVE_TRIANGULAR
from shardmath.factorisations.problem import FactorisationOptions
from shardmath.factorisations.steps import GOOD, NOT_FINITE_A, NOT_FINITE_B, NOT_PIVOTS
from shardmath.local.lapack import Precision
from shardmath.program.performing import Arguments

Distributions = Any  # of the operands, and of the result where it differs
Options = FactorisationOptions | dict[str, Any] | None

_NOT_FINITE = {NOT_FINITE_A: "a", NOT_FINITE_B: "b"}
_STRUCTURES = {
    "gen": "gen",
    "general": "gen",
    "pos": "pos",
    "positive definite": "pos",
    "lower triangular": "lower",
    "upper triangular": "upper",
}
_MINOR = "the leading minor of order {} is not positive: a is not positive definite"
PIVOT = "a is singular: pivot {} is 0"


class SignAndLogarithm(NamedTuple):
    """A determinant: its sign, and the logarithm of its absolute value."""

    sign: Any
    logabsdet: Any


@collective_call
def cholesky(
    a: Any,
    lower: bool = True,
    *,
    distributions: Distributions,
    check_finite: bool = True,
    precision: Precision = "full",
    options: Options = None,
) -> Any:
    """The Cholesky factor of a positive definite matrix: this rank's part of it. Collective.

        l = cholesky(a, distributions=Slab.X)                  # a = l @ l.T.conj()
        u = cholesky(a, lower=False, distributions=[Slab.X, Slab.Y])

    `a` is this rank's part of an n x n matrix of float32, float64, complex64 or complex128. Only
    the triangle that `lower` names is read; the other triangle of the factor is 0. `distributions`
    is that of `a`, or a pair, of `a` and of the factor. For a DistributedArray it is left out, or
    is that of the factor alone. `a` stays as it is.

    `precision` other than "full", for float32 and complex64, is that of the factors of all products
    but those within panels; sums are of the matrix's type. With "bfloat16" factors are rounded to
    that type. With "tf32x3" GPUs multiply each as two numbers of TF32, with errors of some 2^-21;
    on cores it is "full". GPUs do these fast; a solution is then refined, as by `solve(a, b,
    factor_dtype=...)`.

    Raises the same on all ranks. LinAlgError: `a` is not square, or a leading minor is not
    positive; its order is named. ValueError: NaN or infinity in `a`, unless `check_finite` is
    False; parts do not fit; no such `precision`. TypeError: another type. NotImplementedError: GPUs
    of several hosts. BackendUnavailable: without SciPy, or on GPUs without cuSOLVER. Source:
    scipy.linalg.cholesky, whose `lower` is False by default; numpy.linalg.cholesky's is True.
    """
    operation = _in_precision("cholesky", CHOLESKYS, precision)
    out, fault = _called(operation, (a,), distributions, (bool(lower), bool(check_finite)), options)
    require_good(fault, _MINOR)
    return out


@collective_call
def lu_factor(
    a: Any,
    *,
    distributions: Distributions,
    check_finite: bool = True,
    precision: Precision = "full",
    options: Options = None,
) -> tuple[Any, Any]:
    """The factors of P A = L U with partial pivoting: (lu, pivots). Collective.

        factors = lu_factor(a, distributions=Slab.X)
        x = lu_solve(factors, b, distributions=[Slab.X, Slab.X])

    `lu` is this rank's part of one matrix with U, and with L below its diagonal of ones. Every rank
    has all pivots, int32: row i was exchanged with row pivots[i], in that order. The factors of a
    singular matrix are returned, too; `lu_solve` raises for them. Arguments and errors as
    `cholesky`, except for minors. Source: scipy.linalg.lu_factor.
    """
    operation = _in_precision("lu_factor", LU_FACTORS, precision)
    lu, pivots, fault = _called(operation, (a,), distributions, (bool(check_finite),), options)
    require_good(fault)
    return lu, pivots


@collective_call
def lu_solve(
    lu_and_piv: tuple[Any, Any],
    b: Any,
    trans: int = 0,
    *,
    distributions: Distributions,
    check_finite: bool = True,
    options: Options = None,
) -> Any:
    """X of a @ X = b by the factors of `lu_factor`; of a.T, where `trans` is 1, or of a.T.conj(),
    where it is 2. Collective.

    `distributions` are those of lu, `b` and x, which may be left out where it is that of `b`.
    Raises SingularMatrix where a pivot is 0, ValueError for invalid pivots; otherwise as `solve`.
    Source: scipy.linalg.lu_solve.
    """
    lu, pivots = lu_and_piv
    flags = _op("lu_solve", trans), bool(check_finite)
    x, fault = _called(LU_SOLVE, (lu, pivots, b), distributions, flags, options)
    require_good(fault, PIVOT)
    return x


@collective_call
def solve(
    a: Any,
    b: Any,
    *,
    distributions: Distributions,
    lower: bool = False,
    check_finite: bool = True,
    assume_a: str = "gen",
    transposed: bool = False,
    options: Options = None,
) -> Any:
    """`shardmath.linalg.solve`, of parts, by factors of the operands' type. Collective."""
    kind = raising_on_all_ranks(require_context(), "solve", lambda: structure_of(assume_a))
    turned, check = bool(transposed), bool(check_finite)
    operation: Operation[Any] = SOLVE_TRIANGULAR
    flags: tuple[Any, ...] = "NT"[turned], kind == "lower", False, check
    if kind == "pos":
        operation, flags = SOLVE_POSITIVE_DEFINITE, (bool(lower), turned, check)
    elif kind == "gen":
        operation, flags = SOLVE, (turned, check)
    x, fault = _called(operation, (a, b), distributions, flags, options)
    require_good(fault, _MINOR if kind == "pos" else PIVOT)
    return x


@collective_call
def solve_triangular(
    a: Any,
    b: Any,
    trans: int | str = 0,
    lower: bool = False,
    unit_diagonal: bool = False,
    *,
    distributions: Distributions,
    check_finite: bool = True,
    options: Options = None,
) -> Any:
    """X of a @ X = b for a triangular `a`; of a.T, where `trans` is 1 or "T", or of a.T.conj(),
    where it is 2 or "C". Collective.

    The other triangle is not used, nor is the diagonal with `unit_diagonal`, which takes it for
    ones. Raises SingularMatrix where a 0 is on the diagonal, which is named. Arguments and errors
    otherwise as `solve`. Source: scipy.linalg.solve_triangular.
    """
    flags = _op("solve_triangular", trans), bool(lower), bool(unit_diagonal), bool(check_finite)
    x, fault = _called(SOLVE_TRIANGULAR, (a, b), distributions, flags, options)
    require_good(fault, PIVOT)
    return x


@collective_call
def inv(
    a: Any, *, distributions: Distributions, check_finite: bool = True, options: Options = None
) -> Any:
    """The inverse of a matrix: this rank's part of it. Collective.

    Solving with it costs more, and loses more digits, than `solve`, or `lu_factor` and `lu_solve`.
    Raises SingularMatrix where a pivot is 0. Arguments and errors otherwise as `cholesky`. Source:
    scipy.linalg.inv, numpy.linalg.inv.
    """
    out, fault = _called(INVERSE, (a,), distributions, (bool(check_finite),), options)
    require_good(fault, PIVOT)
    return out


@collective_call
def slogdet(
    a: Any, *, distributions: Distributions, check_finite: bool = True, options: Options = None
) -> SignAndLogarithm:
    """The sign of the determinant, and the logarithm of its absolute value, on every rank:
    (0, -inf) for a singular matrix. Collective.

    The sign of a complex determinant is a complex number of absolute value 1. Arguments and errors
    as `lu_factor`. Source: numpy.linalg.slogdet.
    """
    mantissa, exponent = _determinant(a, distributions, check_finite, options)
    size = abs(mantissa)
    if not size:
        return SignAndLogarithm(mantissa, size.dtype.type(-np.inf))
    logarithm = np.log(np.float64(size)) + exponent * np.log(2.0)
    return SignAndLogarithm(mantissa / size, size.dtype.type(logarithm))


@collective_call
def det(
    a: Any, *, distributions: Distributions, check_finite: bool = True, options: Options = None
) -> Any:
    """The determinant of a matrix, on every rank: a number of its type, infinite where that is too
    small for it. Collective.

    Arguments and errors as `lu_factor`. Source: scipy.linalg.det, numpy.linalg.det.
    """
    mantissa, exponent = _determinant(a, distributions, check_finite, options)
    with np.errstate(over="ignore", under="ignore"):
        if isinstance(mantissa, np.complexfloating):
            parts = np.ldexp(mantissa.real, exponent), np.ldexp(mantissa.imag, exponent)
            return type(mantissa)(complex(*parts))
        return np.ldexp(mantissa, exponent)


def structure_of(assume_a: str) -> str:
    """Which of "gen", "pos", "lower", "upper" a matrix is. Raises ValueError for another word."""
    if assume_a not in _STRUCTURES:
        named = ", ".join(map(repr, _STRUCTURES))
        raise ValueError(f"assume_a is one of {named}, not {assume_a!r}")
    return _STRUCTURES[assume_a]


def _determinant(
    a: Any, distributions: Distributions, check_finite: bool, options: Options
) -> tuple[Any, int]:
    """The determinant as a number between 1/2 and 1 in size, or 0, and a power of 2."""
    flags = (bool(check_finite),)
    diagonal, pivots, fault = _called(DIAGONAL, (a,), distributions, flags, options)
    require_good(fault)
    numbers, rows = (library_of(x).on_host(x) for x in (diagonal, pivots))
    product, exponent = numbers.dtype.type(1), 0
    if np.count_nonzero(rows != np.arange(len(rows))) % 2:
        product = -product
    for number in numbers:  # scaled each time: neither too large nor too small in between
        product = product * number
        _, shift = np.frexp(abs(product))
        product = type(product)(product * np.float64(2.0) ** -float(shift))
        exponent += int(shift)
    return product, exponent


def _op(operation: str, trans: int | str) -> str:
    """The letter of `trans`. Collective where that is wrong."""
    letters = {0: "N", 1: "T", 2: "C", "N": "N", "T": "T", "C": "C"}

    def letter() -> str:
        if trans not in letters:
            raise ValueError(f"trans is 0, 1, 2, 'N', 'T' or 'C', not {trans!r}")
        return letters[trans]

    return raising_on_all_ranks(require_context(), operation, letter)


def _in_precision(
    name: str, operations: Mapping[Precision, Operation[Any]], precision: Precision
) -> Operation[Any]:
    """The operation whose products have that precision. Collective where there is none."""

    def operation() -> Operation[Any]:
        if precision not in operations:
            raise ValueError(f"precision is one of {', '.join(operations)}, not {precision!r}")
        return operations[precision]

    return raising_on_all_ranks(require_context(), name, operation)


def _called(
    operation: Operation[Any],
    operands: tuple[Any, ...],
    distributions: Distributions,
    flags: tuple[Any, ...],
    options: Options,
) -> Any:
    """The results of an operation. Collective."""
    if isinstance(distributions, list):
        distributions = tuple(distributions)
    results = (None,) * len(operation.names.results)
    return call(operation, Arguments(operands, results, (distributions, flags), options))


def require_good(fault: Any, otherwise: str = "") -> None:
    """Raise, on all ranks, the error for a fault that one of them has found. `otherwise` is the
    message where the fault is the number of a minor or pivot; without one those are ignored.
    """
    code = int(fault[0])
    if code == NOT_PIVOTS:
        raise settled(ValueError("pivots name rows that do not exist: pass those of lu_factor"))
    if code == GOOD or (code > 0 and not otherwise):
        return
    if code in _NOT_FINITE:
        raise settled(not_finite(_NOT_FINITE[code]))
    raised = SingularMatrix if otherwise == PIVOT else LinAlgError
    raise settled(raised(otherwise.format(code)))
