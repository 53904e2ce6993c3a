"""Systems of equations on distributed arrays: Cholesky and LU factors, solutions, inverses,
determinants.

Results are split as the last operand, or as `distributions` says; pivots and determinants are whole
on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from shardmath.base import current
from shardmath.call.agreement import raising_on_all_ranks
from shardmath.call.driver import Driver
from shardmath.distributed import dense
from shardmath.distributed.decompositions import of_square_stacks, replicated
from shardmath.distributed.elementwise import all_distributed
from shardmath.distributed.manipulation import broadcast_to, of_one_type
from shardmath.distributed.movement import agreed_layout, end_explanation, in_place_of
from shardmath.distributed.state import Distributed
from shardmath.factorisations import api
from shardmath.factorisations.cholesky import CHOLESKY, SOLVE_POSITIVE_DEFINITE
from shardmath.factorisations.lu import DIAGONAL, INVERSE, LU_FACTOR, SOLVE
from shardmath.factorisations.operands import require_equations, require_matrix, require_square
from shardmath.factorisations.operation import Factorisation
from shardmath.factorisations.problem import FactorisationOptions, Problem
from shardmath.geometry import Layout, unbound
from shardmath.operators.arguments import options_of
from shardmath.operators.layouts import distributions_of, distributions_of_results


def cholesky(x: Any, /, *, upper: bool = False) -> Any:
    """The lower factor L of a positive definite matrix L L^H, or, with `upper`, the factor L^H,
    split as the matrix. Collective. Raises as `shardmath.linalg.cholesky`.
    """
    if x.ndim > 2:
        return of_square_stacks("cholesky", [x], partial(dense.cholesky, upper=upper))
    return _like_last(api.cholesky, x, not upper)


def solve(x1: Any, x2: Any, /) -> Any:
    """The solution x of x1 @ x = x2, split as x2. Collective. Raises as `shardmath.linalg.solve`.

    One of the operands may be an array that is the same on all ranks.
    """
    x1, x2 = all_distributed((x1, x2))
    if max(x1.ndim, x2.ndim) <= 2:
        return _like_last(api.solve, x1, x2)
    is_vector = x2.ndim == 1
    right = x2[:, None] if is_vector else x2
    stack = np.broadcast_shapes(x1.shape[:-2], right.shape[:-2])
    pair = [broadcast_to(x, (*stack, *x.shape[-2:])) for x in (x1, right)]
    made = of_square_stacks("solve", pair)
    return made[..., 0] if is_vector else made


def inv(x: Any, /) -> Any:
    """The inverse of a matrix, split as it is. Collective. Raises as `shardmath.linalg.inv`."""
    if x.ndim > 2:
        return of_square_stacks("inv", [x])
    return _like_last(api.inv, x)


def det(x: Any, /, **words: Any) -> Any:
    """The determinant of a matrix. Collective. Raises as `shardmath.linalg.det`."""
    if x.ndim > 2:
        return of_square_stacks("det", [x])
    return _of_one(api.det, x, **words)[0]


def slogdet(x: Any, /, **words: Any) -> api.SignAndLogarithm:
    """The sign of a determinant, and the logarithm of its absolute value. Collective. Raises as
    `shardmath.linalg.slogdet`.
    """
    if x.ndim > 2:
        return api.SignAndLogarithm(*of_square_stacks("slogdet", [x]))
    return api.SignAndLogarithm(*_of_one(api.slogdet, x, **words))


def _of_one(function: Callable[..., Any], x: Any, **words: Any) -> list[Any]:
    """The numbers that a function computes from the parts of a matrix, on every rank."""
    require_matrix("x", x.shape)
    (a,) = of_one_type([x], inexact=True)
    end_explanation(lambda: _explained(function, [a], a.layout, words))
    with current.within(a.context):
        made = function(a.local, distributions=a.distribution, **words)
    return [
        replicated(a, np.asarray(one)) for one in (made if isinstance(made, tuple) else (made,))
    ]


def _like_last(
    function: Callable[..., Any], /, *given: Any, distributions: Any = None, **words: Any
) -> Any:
    """The result of a function on parts, split as its last operand, or as `distributions` says. Of
    several results that is the first; the others are whole on every rank.
    """
    split = [x for x in given if isinstance(x, Distributed)]
    more = given[len(split) :]
    require_matrix("a", split[0].shape)
    arrays = of_one_type(split, inexact=True)
    last, context = arrays[-1], arrays[-1].context

    def wanted() -> Any:
        return distributions_of_results(distributions_of(distributions)[1], 1)[0]

    target, layout = raising_on_all_ranks(context, function.__name__, wanted), last.layout
    if target is None:
        target = last.distribution
    else:
        layout = agreed_layout(target, last.shape, context)
    local = in_place_of(lambda: _explained(function, arrays, layout, words), last, layout)
    if local is None:
        words["distributions"] = [*(x.distribution for x in arrays), target]
        with current.within(context):
            local = function(*(x.local for x in arrays), *more, **words)
    first, *others = local if isinstance(local, tuple) else (local,)
    results = [last.like(first, unbound(target), layout)]
    results += map(last.everywhere, others)
    return tuple(results) if others else results[0]


def _lu_factor(a: Any, /, **words: Any) -> Any:
    end_explanation(lambda: _explained(api.lu_factor, [a], a.layout, words))
    return _like_last(api.lu_factor, a, **words)


def _lu_solve(lu_and_piv: Any, b: Any, trans: int = 0, **words: Any) -> Any:
    lu, pivots = lu_and_piv
    on_all = pivots.local if isinstance(pivots, Distributed) else pivots

    def lu_solve(factors: Any, right: Any, **all_words: Any) -> Any:
        return api.lu_solve((factors, on_all), right, trans, **all_words)

    return _like_last(lu_solve, lu, b, **words)


def _explained(
    function: Callable[..., Any], arrays: Sequence[Any], layout: Layout, words: Mapping[str, Any]
) -> str:
    """What a call does whose result has that layout: for a factorisation, how it goes by panels.
    Local. Raises LinAlgError for shapes, ValueError and TypeError for options.
    """
    a, *right = arrays
    text = f"{function.__name__} of {a.layout}"
    if function is api.solve:
        planned = _SOLUTIONS.get(api.structure_of(words.get("assume_a", "gen")))
    else:
        planned = _FACTORISATIONS.get(function)
    if planned is None:
        return text
    operation, flags = planned
    require_square("a", a.shape)
    for b in right:
        require_equations(a.shape, b.shape)
    width = options_of(FactorisationOptions, words.get("options")).block_size
    element, sides = a.element_type, right[0].layout if right else None
    problem = Problem(a.layout, sides, layout, element.name, element.itemsize, "C", flags, width)
    return f"{text}\n{operation.summary(problem, Driver.of(a.context, operation).machine)}"


# What explanations are of: operations, and flags, which here make no difference.
_FACTORISATIONS: Mapping[Callable[..., Any], tuple[Factorisation, tuple[bool, ...]]] = {
    api.cholesky: (CHOLESKY, (True, True)),
    api.lu_factor: (LU_FACTOR, (True,)),
    api.inv: (INVERSE, (True,)),
    api.det: (DIAGONAL, (True,)),
    api.slogdet: (DIAGONAL, (True,)),
}
_SOLUTIONS = {
    "gen": (SOLVE, (False, True)),
    "pos": (SOLVE_POSITIVE_DEFINITE, (True, False, True)),
}

FUNCTIONS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    api.cholesky: partial(_like_last, api.cholesky),
    api.solve: partial(_like_last, api.solve),
    api.solve_triangular: partial(_like_last, api.solve_triangular),
    api.inv: partial(_like_last, api.inv),
    api.lu_factor: _lu_factor,
    api.lu_solve: _lu_solve,
    api.det: det,
    api.slogdet: slogdet,
}
