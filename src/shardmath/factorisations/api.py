"""The public functions on parts: a call each, and what is raised of what the ranks have found."""

from __future__ import annotations

from typing import Any, NoReturn

from numpy.linalg import LinAlgError

from shardmath.base.collective_call import collective_call, settled
from shardmath.call.driver import Operation, call
from shardmath.context.context import require_context
from shardmath.factorisations.cholesky import CHOLESKY, SOLVE_POSITIVE_DEFINITE
from shardmath.factorisations.problem import FactorisationOptions
from shardmath.factorisations.steps import GOOD, NOT_FINITE_A, NOT_FINITE_B
from shardmath.program.performing import Arguments

Distributions = Any  # of the operands, and of the result where that has another
Options = FactorisationOptions | dict[str, Any] | None

_NOT_FINITE = {NOT_FINITE_A: "a", NOT_FINITE_B: "b"}
_STRUCTURES: dict[str, Operation[Any]] = {
    "pos": SOLVE_POSITIVE_DEFINITE,
    "positive definite": SOLVE_POSITIVE_DEFINITE,
}
_MINOR = "the leading minor of order {} is not positive: a is not positive definite"
_PIVOT = "a is singular: pivot {} is 0"


@collective_call
def cholesky(
    a: Any,
    lower: bool = True,
    *,
    distributions: Distributions,
    check_finite: bool = True,
    options: Options = None,
) -> Any:
    """The Cholesky factor of a positive definite matrix: this rank's part of it. Collective.

        l = cholesky(a, distributions=Slab.X)                  # a = l @ l.T.conj()
        u = cholesky(a, lower=False, distributions=[Slab.X, Slab.Y])

    `a` is this rank's part of an n x n matrix of float32, float64, complex64 or complex128, of
    which only the triangle that `lower` names is read; the other triangle of the factor is 0.
    `distributions` is that of `a`, or a pair, of `a` and of the factor. Of a DistributedArray it is
    left out, or that of the factor alone. `a` stays as it is.

    Raises the same on all ranks. LinAlgError: a leading minor is not positive; its order is named.
    ValueError: NaN or infinity in `a`, unless `check_finite` is False; `a` is not square; parts do
    not fit. TypeError: another type. NotImplementedError: parts on GPUs. BackendUnavailable:
    without SciPy. Source: scipy.linalg.cholesky, whose `lower` is False by default;
    numpy.linalg.cholesky's is True.
    """
    out, fault = _called(CHOLESKY, (a,), distributions, (bool(lower), bool(check_finite)), options)
    _require_good(fault, _MINOR)
    return out


@collective_call
def solve(
    a: Any,
    b: Any,
    *,
    distributions: Distributions,
    lower: bool = False,
    check_finite: bool = True,
    assume_a: str,
    options: Options = None,
) -> Any:
    """X of a @ X = b, for any number of right-hand sides: this rank's part of it. Collective.

        x = solve(a, b, assume_a="pos", distributions=[Slab.X, Slab.X])

    `a` is this rank's part of an n x n matrix, `b` of a vector or of a matrix of n rows, of the
    same type. `assume_a` says what a is, as in scipy.linalg.solve: "pos" is positive definite. Then
    only the triangle that `lower` names is read. `distributions` are those of `a`, `b` and x; that
    of x may be left out where it is that of `b`. Arguments and errors otherwise as `cholesky`.
    Source: scipy.linalg.solve.
    """
    if assume_a not in _STRUCTURES:
        named = ", ".join(map(repr, _STRUCTURES))
        _refuse("solve", ValueError(f"assume_a is one of {named}, not {assume_a!r}"))
    flags = bool(lower), bool(check_finite)
    x, fault = _called(_STRUCTURES[assume_a], (a, b), distributions, flags, options)
    _require_good(fault, _MINOR)
    return x


def _refuse(operation: str, mistake: Exception) -> NoReturn:
    """Raise a mistake of this rank's on all ranks. Collective."""

    def describe() -> bytes:
        raise mistake

    require_context().gather(operation, describe)
    raise AssertionError("a mistake was sent")


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


def _require_good(fault: Any, otherwise: str) -> None:
    """Raise, on all ranks, what one of them has found; `otherwise` of the number that it names."""
    code = int(fault[0])
    if code == GOOD:
        return
    if code in _NOT_FINITE:
        raise settled(ValueError(f"{_NOT_FINITE[code]} has NaN or infinite elements"))
    raise settled(LinAlgError(otherwise.format(code)))
