"""Systems of equations on arrays that know how they are split: Cholesky and LU factors, solutions,
inverses, determinants.

Results are split as the last operand is, or as `distributions` has it; what every rank gets,
pivots and determinants, is an array of which every rank has all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from shardmath.distributed.decompositions import of_square_stacks, replicated
from shardmath.distributed.layouts import listed, unbound
from shardmath.distributed.manipulation import broadcast_to, of_one_type
from shardmath.distributed.movement import agreed_layout, end_explanation, in_place_of, within
from shardmath.distributed.state import Distributed
from shardmath.factorisations import api
from shardmath.geometry import Layout, Replicated


def cholesky(x: Any, /, *, upper: bool = False) -> Any:
    """The lower factor L of a positive definite matrix L L^H, or, `upper`, the factor L^H, split as
    the matrix. Collective. Raises as `shardmath.linalg.cholesky`.
    """
    if x.ndim > 2:
        compute = lambda a: (np.linalg.cholesky(a, upper=upper),)  # noqa: E731
        return of_square_stacks("cholesky", [x], compute)[0]
    return _like_last(api.cholesky, x, not upper)


def solve(x1: Any, x2: Any, /) -> Any:
    """The solution x of x1 @ x = x2, split as x2. Collective.

    Raises as `shardmath.linalg.solve`.
    """
    if max(x1.ndim, x2.ndim) <= 2:
        return _like_last(api.solve, x1, x2)
    is_vector = x2.ndim == 1
    right = x2[:, None] if is_vector else x2
    stack = np.broadcast_shapes(x1.shape[:-2], right.shape[:-2])
    pair = [broadcast_to(x, (*stack, *x.shape[-2:])) for x in (x1, right)]
    (made,) = of_square_stacks("solve", pair, lambda a, b: (np.linalg.solve(a, b),))
    return made[..., 0] if is_vector else made


def inv(x: Any, /) -> Any:
    """The inverse of a matrix, split as it is. Collective. Raises as `shardmath.linalg.inv`."""
    if x.ndim > 2:
        return of_square_stacks("inv", [x], lambda a: (np.linalg.inv(a),))[0]
    return _like_last(api.inv, x)


def det(x: Any, /, **words: Any) -> Any:
    """The determinant of a matrix. Collective. Raises as `shardmath.linalg.det`."""
    if x.ndim > 2:
        return of_square_stacks("det", [x], lambda a: (np.linalg.det(a),))[0]
    (a,) = of_one_type([x], inexact=True)
    end_explanation(lambda: f"det of {a.layout}")
    made = within(a.context, lambda: api.det(a.local, distributions=a.distribution, **words))
    return replicated(a, np.asarray(made))


def slogdet(x: Any, /, **words: Any) -> api.SignAndLogarithm:
    """The sign of a determinant, and the logarithm of its absolute value. Collective. Raises as
    `shardmath.linalg.slogdet`.
    """
    if x.ndim > 2:
        return api.SignAndLogarithm(*of_square_stacks("slogdet", [x], np.linalg.slogdet))
    (a,) = of_one_type([x], inexact=True)
    end_explanation(lambda: f"slogdet of {a.layout}")
    made = within(a.context, lambda: api.slogdet(a.local, distributions=a.distribution, **words))
    return api.SignAndLogarithm(*(replicated(a, np.asarray(one)) for one in made))


def _like_last(
    function: Callable[..., Any], /, *given: Any, distributions: Any = None, **words: Any
) -> Any:
    """The result of a function on parts, split as its last operand is, or as is said."""
    split = [x for x in given if isinstance(x, Distributed)]
    more = given[len(split) :]
    arrays = of_one_type(split, inexact=True)
    last, context = arrays[-1], arrays[-1].context
    (target,) = listed(distributions) or [last.distribution]
    layout = last.layout if distributions is None else agreed_layout(target, last.shape, context)
    local = in_place_of(lambda: f"{function.__name__} of {arrays[0].layout}", last, layout)
    if local is None:
        words["distributions"] = [*(x.distribution for x in arrays), target]
        local = within(context, lambda: function(*(x.local for x in arrays), *more, **words))
    return last.like(local, unbound(target), layout)


def _lu_factor(a: Any, /, *, distributions: Any = None, **words: Any) -> tuple[Any, Any]:
    (a,) = of_one_type([a], inexact=True)
    pivots: list[Any] = []

    def factors(part: Any, **all_words: Any) -> Any:
        lu, exchanged = api.lu_factor(part, **all_words)
        pivots.append(exchanged)
        return lu

    end_explanation(lambda: f"lu_factor of {a.layout}")
    lu = _like_last(factors, a, distributions=distributions, **words)
    everywhere = Layout.replicated((a.shape[0],), a.context.size)
    return lu, a.like(pivots[0], Replicated(), everywhere)


def _lu_solve(lu_and_piv: Any, b: Any, trans: int = 0, **words: Any) -> Any:
    lu, pivots = lu_and_piv
    whole = pivots.local if isinstance(pivots, Distributed) else pivots

    def solved(factors: Any, right: Any, **all_words: Any) -> Any:
        return api.lu_solve((factors, whole), right, trans, **all_words)

    return _like_last(solved, lu, b, **words)


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
