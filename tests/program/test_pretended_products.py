"""Products on pretended GPUs, of one host and of two: the host's bodies, and all but CUDA itself.

What ranks tell each other of their arrays, what they decide, and which results are new, is the
package's own; launches are NumPy's.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from draws import drawn

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent.parent / "matmul"))

import matmul_cases as cases
import test_float8_products
import test_matmul_any
import test_matmul_epilogs
import test_repeated_products
from hypothesis import given
from pretended import pretended_gpu
from pretended_products import products_at_once

from arrangements import part_of
from shardmath.arrays import library_named
from shardmath.distribution import Replicated, Slab
from shardmath.handles.allocation import empty_on_heap
from shardmath.linalg.advanced import Matmul, MatmulEpilog, matmul
from shardmath.operators.matmul.gpu import product_program

X, Y, R = Slab.X, Slab.Y, Replicated()
SPLITS = {"gather": (X, X, X), "add": (Y, X, X), "share": (Y, X, R), "move": (X, Y, Y)}


def on_gpus(context, module, body, *args):
    context.barrier()
    with pretended_gpu(context), products_at_once():
        result = getattr(sys.modules[module], body)(context, *args)
        context.board.barrier("done")
    return result


@drawn(28, shrunk=False)
@given(case=cases.cases())
def test_any_product(ranks, case):
    if case.library == "numpy":
        body = test_matmul_any.__name__, "run_case"
        kinds = ranks.run(on_gpus, *body, case.plain(), ranks=case.size)
        assert len(set(kinds)) == 1


@pytest.mark.parametrize("kind", ["rows", "columns", "blocks"])
def test_epilogs(ranks, kind):
    body = test_matmul_epilogs.__name__, "run_epilogs"
    names = list(test_matmul_epilogs.EPILOGS)
    ranks.run(on_gpus, *body, kind, "numpy", "float64", names, ranks=4)


@pytest.mark.parametrize("inplace", [False, True])
def test_every_ranks_c_is_added(ranks, inplace):
    ranks.run(on_gpus, test_matmul_epilogs.__name__, "run_allreduce", True, inplace, ranks=3)


@pytest.mark.parametrize("layout", ["rows of a", "columns of b"])
def test_products_of_scaled_elements(ranks, layout):
    table = test_float8_products.all_cases()[::9]
    body = test_float8_products.__name__, "table"
    assert ranks.run(on_gpus, *body, "numpy", layout, (48, 64, 96), table, ranks=4) == [[]] * 4


@pytest.mark.parametrize("form", ["object", "function"])
@pytest.mark.parametrize("splits", ["gather", "blocks"])
@pytest.mark.parametrize("where", ["heap", "ordinary"])
def test_a_repeated_product_is_one_exchange(ranks, where, splits, form):
    body = test_repeated_products.__name__, "exchanges"
    for counts in ranks.run(on_gpus, *body, where, splits, form, ranks=3):
        assert counts[2:] == [1] * 3


def change(context, where, splits):
    """Wrong results of calls that come again, of which one rank's arrays then are others."""
    wrong, dists, numpy = [], SPLITS[splits], library_named("numpy")

    def made(index, order="C"):
        part = part_of(np.ones((12, 12)), dists[index], context.rank, context.size)
        if where == "ordinary":
            return np.array(part, order=order)
        return empty_on_heap(context, numpy, part.shape, "float64", order)

    a, b, c, other = made(0), made(1), made(2), made(0, "F")
    extras = {"epilog": MatmulEpilog.BGRADA}
    for x in (a, b, other):
        x[...] = 1
    with context, Matmul(a, b, distributions=dists) as product:
        product.plan()
        for turn in range(24):
            late = turn % 8 == 7 and turn // 8 == context.rank
            product.reset_operands_unchecked(a=other if late else a)
            a[...], other[...] = turn, turn
            context.barrier()
            d = product.execute()
            added, sums = matmul(other if late else a, b, distributions=dists, **extras)
            c[...] = 1
            named = {"beta": turn, "options": {"inplace": True}}
            same = matmul(a, b, c, distributions=dists, **named)
            right = [(x == 12 * turn).all() for x in (d, added, sums["bgrada"])]
            right += [same is c, (c == 13 * turn).all()]
            wrong += [(turn, right)] * (not all(right))
    return wrong


@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("where", ["heap", "ordinary"])
def test_a_call_comes_again_and_a_ranks_arrays_are_others(ranks, where, splits):
    assert ranks.run(on_gpus, __name__, "change", where, splits, ranks=3) == [[]] * 3


def plan_again(context):
    """Whether a plan that is tuned multiplies by algorithms of its own, where all else is as it
    was.
    """
    used, plain = [], product_program.multiply

    def multiply(*args, algorithms, **named):
        used.append(algorithms)
        plain(*args, algorithms=algorithms, **named)

    a, b = (part_of(np.ones((12, 12)), Slab.X, context.rank, context.size) for _ in "ab")
    a, b = a.copy(), b.copy()
    with (
        context,
        patch.object(product_program, "multiply", multiply),
        Matmul(a, b, distributions=[Slab.X] * 3) as product,
    ):
        product.plan()
        product.execute()
        first = used[-1]
        product.plan(autotune=True)
        right = bool((product.execute() == 12).all())
    return used[-1] is not first, right


def test_a_tuned_plan_has_its_own_algorithms(ranks):
    assert ranks.run(on_gpus, __name__, "plan_again", ranks=2) == [(True, True)] * 2
