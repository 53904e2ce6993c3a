"""Matmul: planned once, executed many times, reset, released and freed."""

from __future__ import annotations

import logging

import matmul_cases as cases
import numpy as np
import pytest
import torch

from arrangements import part_of
from shardmath.distribution import Slab
from shardmath.errors import CollectiveMismatch, InvalidMatmulState, UseAfterFree
from shardmath.handles.allocation import allocate_symmetric_memory, free_symmetric_memory
from shardmath.linalg.advanced import Matmul, MatmulEpilog, MatmulOptions
from shardmath.operators.workspace import Workspace, give_back

M, N, K = 9, 7, 8
XXX = [Slab.X, Slab.X, Slab.X]


class Operands:
    """This rank's parts of random a, b, c in Slab.X, and what the whole product is."""

    def __init__(self, context, seed=0, dtype="float64"):
        self.rank, self.size = context.rank, context.size
        rng = np.random.default_rng(seed)
        self.whole = [cases.random_matrix(rng, shape, dtype) for shape in ((M, K), (K, N), (M, N))]
        self.a, self.b, self.c = (np.array(self.part(x)) for x in self.whole)

    def part(self, x):
        return part_of(x, Slab.X, self.rank, self.size)

    def want(self, alpha=1, beta=0):
        a, b, c = self.whole
        return self.part(alpha * a @ b + beta * c)


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)


def raised(call, *args, **named):
    """(type name, message) of what a call raises."""
    try:
        call(*args, **named)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def see_contents_and_reset(context):
    x, y = Operands(context, 0), Operands(context, 1)
    with context, Matmul(x.a, x.b, x.c, distributions=XXX, alpha=2, beta=3) as mm:
        assert "not planned" in repr(mm)
        mm.plan()
        assert "planned" in repr(mm)
        first = mm.execute()
        close(first, x.want(2, 3))
        x.a[...], x.b[...] = y.a, y.b  # the object refers to its operands
        second = mm.execute()
        close(second, x.part(2 * y.whole[0] @ y.whole[1] + 3 * x.whole[2]))
        close(first, x.want(2, 3))  # each result is new
        mm.reset_operands(c=y.c)
        close(mm.execute(), y.want(2, 3))
        mm.reset_operands(alpha=-1.0, beta=0)
        close(mm.execute(), y.want(-1, 0))
        strided = np.zeros((2 * len(y.a), K))[::2]
        strided[...] = x.part(x.whole[0])
        mm.reset_operands(a=strided, b=np.asfortranarray(x.part(x.whole[1])), alpha=1, beta=1)
        close(mm.execute(), x.part(x.whole[0] @ x.whole[1] + y.whole[2]))
        for turn in range(20):
            y = Operands(context, 2 + turn)
            x.b[...], y.c[...] = y.b, 0
            mm.reset_operands(a=y.a, b=x.b, c=y.c)
            close(mm.execute(), y.want())
    return repr(mm)


@pytest.mark.parametrize("size", [1, 3])
def test_many_executions(contexts, size):
    for text in contexts.run(see_contents_and_reset, ranks=size):
        assert "freed" in text


def overwrite_c(context):
    x = Operands(context)
    kept = x.c.copy()
    with context, Matmul(x.a, x.b, x.c, distributions=XXX, beta=1, options={"inplace": True}) as mm:
        mm.plan()
        assert mm.execute() is x.c
        assert mm.execute() is x.c
    close(x.c, 2 * x.want() + kept)


def test_in_place_accumulates(contexts):
    contexts.run(overwrite_c, ranks=2)


def release_and_free(context):
    x, y = Operands(context, 0), Operands(context, 1)
    said = {}
    with context:
        mm = Matmul(x.a, x.b, x.c, distributions=XXX, alpha=2, beta=1)
        said["explain before plan"] = raised(mm.explain)
        said["execute before plan"] = raised(mm.execute)
        mm.plan()
        mm.release_operands()
        said["execute released"] = raised(mm.execute)
        said["plan released"] = raised(mm.plan)
        said["reset without b"] = raised(mm.reset_operands, a=y.a, c=y.c)
        said["reset nothing"] = raised(mm.reset_operands)
        mm.reset_operands(a=y.a, b=y.b, c=y.c)
        close(mm.execute(), y.want(2, 1))  # alpha and beta are kept
        mm.free()
        mm.free()
        for name in ("plan", "execute", "reset_operands", "explain", "release_operands"):
            said[f"{name} freed"] = raised(getattr(mm, name))
        said["unchecked freed"] = raised(mm.reset_operands_unchecked, a=y.a)
        said["enter freed"] = raised(mm.__enter__)
        context.barrier()  # nobody waits
    return said


def test_release_and_free(contexts):
    first, second = contexts.run(release_and_free, ranks=2)
    kinds = {name: kind for name, (kind, _) in first.items()}
    freed = {name for name in kinds if name.endswith("freed")}
    assert {kinds.pop(name) for name in freed} == {"InvalidMatmulState"}
    assert kinds == {
        "explain before plan": "RuntimeError",
        "execute before plan": "RuntimeError",
        "execute released": "RuntimeError",
        "plan released": "RuntimeError",
        "reset without b": "ValueError",
        "reset nothing": "ValueError",
    }
    assert first == second
    assert issubclass(InvalidMatmulState, RuntimeError)
    assert "b too" in first["reset without b"][1]


def refuse_other_operands(context, culprit):
    """What each bad reset raises, when `culprit` makes it (None: all do)."""
    x = Operands(context)
    bad = culprit in (None, context.rank)
    said = []
    resets = [
        {"a": x.a.astype(np.float32)},
        {"a": np.zeros((len(x.a) + 1, K))},
        {"a": np.zeros((len(x.a), K, 1))},
        {"b": torch.from_numpy(x.b)},
        {"c": x.c},
        {"alpha": "two"},
        {"alpha": 1j},
        {"epilog_inputs": {"bias": np.zeros(3)}},
        {"quantization_scales": {"a": 1.0}},
        {"a": [[1.0]]},
        {"a": x.a, "stream": object()},
    ]
    with context, Matmul(x.a, x.b, distributions=XXX) as mm:
        mm.plan()
        for reset in resets:
            said.append(raised(mm.reset_operands, **(reset if bad else {"alpha": 5})))
            close(mm.execute(), x.want())  # nothing was reset, on any rank
        said.append(raised(mm.execute, stream=object() if bad else None))
        mm.reset_operands_unchecked(a=x.a.astype(np.float32) if bad else x.a)
        said.append(raised(mm.execute))
        mm.reset_operands_unchecked(a=x.a)
        said.append(raised(mm.reset_operands, alpha=float(context.rank)))
        said.append(raised(mm.execute))
        mm.reset_operands(alpha=1)
        close(mm.execute(), x.want())
    return said


@pytest.mark.parametrize("culprit", [None, 1])
def test_resets_that_do_not_fit(contexts, culprit):
    said = contexts.run(refuse_other_operands, culprit, ranks=3)
    assert said[0] == said[1] == said[2]
    assert [kind for kind, _ in said[0]] == [
        "ValueError", "ValueError", "ValueError", "TypeError", "ValueError", "ValueError",
        "ValueError", "ValueError", "ValueError", "ValueError", "TypeError", "TypeError",
        "ValueError", "", "CollectiveMismatch",
    ]  # fmt: skip
    who = ("every rank: ", "rank 0: ") if culprit is None else f"rank {culprit}: "
    for kind, text in said[0][:13]:
        assert kind and text.startswith(who), text


def free_on_one_rank(context):
    x = Operands(context)
    said = {}
    with context:
        mm = Matmul(x.a, x.b, distributions=XXX)
        mm.plan()
        if context.rank == 1:
            mm.free()
        said["execute"] = raised(mm.execute)
        said["plan"] = raised(mm.plan)
        other = Matmul(x.a, x.b, distributions=XXX)
        other.plan()
        said["crossed"] = raised(other.execute if context.rank else other.plan)
    return said


def test_free_on_one_rank_is_an_error_on_all(contexts):
    said = contexts.run(free_on_one_rank, ranks=3)
    assert said[0] == said[1] == said[2]
    assert said[0]["execute"][0] == said[0]["plan"][0] == "InvalidMatmulState"
    assert said[0]["crossed"][0] == CollectiveMismatch.__name__
    assert said[0]["execute"][1].startswith("rank 1: ")


def free_an_operand(context):
    x = Operands(context)
    with context:
        a = allocate_symmetric_memory(x.a.shape, np, skip_symmetric_check=True)
        a[...] = x.a
        mm = Matmul(a, x.b, x.c, distributions=XXX, beta=1, options={"inplace": True})
        mm.plan()
        if context.rank == 0:
            free_symmetric_memory(a)
        before = x.c.copy()
        said = raised(mm.execute)
        assert (x.c == before).all()
        mm.reset_operands(a=x.a)
        close(mm.execute(), x.want(1, 1))
    return said


def test_an_operand_freed_on_one_rank(contexts):
    for kind, text in contexts.run(free_an_operand, ranks=2):
        assert kind == UseAfterFree.__name__ and text.startswith("rank 0: ")


def plan_again(context):
    x = Operands(context)
    bias = np.arange(len(x.a), dtype=float)
    with context, Matmul(x.a, x.b, distributions=XXX) as mm:
        mm.plan()
        close(mm.execute(), x.want())
        mm.plan(epilog=MatmulEpilog.BIAS, epilog_inputs={"bias": bias})
        close(mm.execute(), x.want() + bias[:, None])
        bias += 1
        close(mm.execute(), x.want() + bias[:, None])
        mm.reset_operands(epilog_inputs={"bias": 2 * bias})
        close(mm.execute(), x.want() + 2 * bias[:, None])
        refused = [
            raised(mm.reset_operands, epilog_inputs={"bias": bias[:-1]}),
            raised(mm.reset_operands, epilog_inputs={"bias": bias, "more": bias}),
            raised(mm.plan, epilog=MatmulEpilog.BIAS),
            raised(mm.plan, epilog=77 if context.rank == context.size - 1 else None),
        ]
        close(mm.execute(), x.want() + 2 * bias[:, None])  # a refused plan leaves the last
        mm.plan(epilog=MatmulEpilog.RELU_AUX)
        d, aux = mm.execute()
        close(d, np.maximum(x.want(), 0))
        assert list(aux) == ["relu_aux"]
        mm.plan()  # no stale epilog, no stale outputs
        close(mm.execute(), x.want())
        assert "epilog" not in mm.explain()
    return [kind for kind, _ in refused]


@pytest.mark.parametrize("size", [1, 2])
def test_a_further_plan_plans_anew(contexts, size):
    assert contexts.run(plan_again, ranks=size) == [["ValueError"] * 4] * size


def tune(context):
    x = Operands(context)
    with context, Matmul(x.a, x.b, distributions=XXX) as mm:
        refused = raised(mm.plan, autotune=context.rank == 0)
        mm.plan(autotune=True)  # on cores there is nothing to choose
        close(mm.execute(), x.want())
        assert "autotuned" not in mm.explain()
    return refused[0]


def test_all_ranks_tune_or_none(contexts):
    assert contexts.run(tune, ranks=2) == ["CollectiveMismatch"] * 2


def explain(context):
    x = Operands(context)
    with context:
        with Matmul(x.a, x.b, distributions=XXX) as mm:
            mm.plan()
            chosen = mm.explain()
        other = "stationary b" if context.size > 1 else "stationary c"
        options = MatmulOptions(strategy=other, logger=logging.getLogger("matmul"))
        with Matmul(x.a, x.b, distributions=XXX, options=options) as mm:
            mm.plan()
            close(mm.execute(), x.want())
            forced = mm.explain()
    return chosen, forced


def test_explain(contexts):
    (chosen, forced), (again, _) = contexts.run(explain, ranks=2)
    assert chosen == again
    lines = chosen.splitlines()
    assert lines[0] == "matmul (9 x 8) @ (8 x 7), float64 on 2 ranks"
    assert lines[1].startswith("chosen: all-gather (stationary c); predicted ")
    assert lines[1].endswith("560 FLOP, 1.02 KiB of memory and 224 B of peers per rank")
    assert lines[2:5] == [
        "  1. take all of b from peers: (8, 7) on rank 0",
        "  2. multiply 5 x 7 x 8 on rank 0",
        "compared with",
    ]
    assert "as options.strategy='stationary b' asks" in forced
    assert forced.splitlines()[1].startswith("chosen: redistribute (stationary b), as")


def test_explain_on_one_rank(contexts):
    ((chosen, forced),) = contexts.run(explain, ranks=1)
    assert chosen.splitlines()[1].startswith("chosen: local (stationary c)")
    assert "as options.strategy='stationary c' asks" in forced


def give_workspace_back(context):
    rng, rank = np.random.default_rng(0), context.rank
    a, b = (rng.integers(-9, 9, shape) * 1.0 for shape in ((400, 1000), (1000, 400)))
    layouts = [Slab.Y, Slab.X, Slab.X]  # sums of both ranks, more than is kept for readers
    parts = [part_of(x, y, rank, 2).copy() for x, y in zip((a, b), layouts, strict=False)]
    want = part_of(a @ b, Slab.X, rank, 2)
    give_back(context)  # what operations before have left
    with context, Matmul(*parts, distributions=layouts) as mm:
        mm.plan()
        mm.execute()
        full = len(Workspace.of(context)._buffers)
        close(mm.execute(release_workspace=rank == 0), want)
        empty = len(Workspace.of(context)._buffers)
        close(mm.execute(), want)
        context.barrier()
    return full, empty


def test_workspace_is_given_back_on_one_rank(contexts):
    (released, empty), (full, kept) = contexts.run(give_workspace_back, ranks=2)
    assert released >= 1 and empty == 0 and kept == full >= 1
