"""Every mistake, on one rank or on all, is the same error on all ranks, soon; c is as it was."""

from __future__ import annotations

import random
from functools import cache

import matmul_cases as cases
import numpy as np
import pytest
import torch

from arrangements import part_of
from shardmath.collectives import all_reduce
from shardmath.distribution import BlockCyclic, Box, ProcessGrid, Replicated, Slab, redistribute
from shardmath.handles.allocation import allocate_symmetric_memory, free_symmetric_memory
from shardmath.linalg.advanced import (
    Matmul,
    MatmulComputeType,
    MatmulEpilog,
    MatmulOptions,
    MatmulPlanPreferences,
    matmul,
    matrix_qualifiers_dtype,
)

M, N, K = 12, 9, 10
X, Y = Slab.X, Slab.Y


@cache
def operands_and_result(rank, size):
    """One rank's parts of a, b and c, and of what a good call makes of them."""
    rng = np.random.default_rng(3)
    a, b, c = (cases.random_matrix(rng, shape, "float64") for shape in ((M, K), (K, N), (M, N)))
    mine = [part_of(x, X, rank, size) for x in (a, b, c, 2 * a @ b + c)]
    mine[3] += np.arange(len(mine[3]))[:, None]
    return mine


class Call:
    """One rank's arguments of a good call, to be spoilt."""

    def __init__(self, context):
        self.context = context
        *operands, self.wanted = operands_and_result(context.rank, context.size)
        self.a, self.b, self.c = (x.copy() for x in operands)
        self.kept = operands[2]
        self.named = {
            "distributions": [X, X, X],
            "alpha": 2.0,
            "beta": 1.0,
            "epilog": MatmulEpilog.BIAS,
            "epilog_inputs": {"bias": np.arange(len(self.a), dtype=self.a.dtype)},
            "qualifiers": np.zeros(3, matrix_qualifiers_dtype),
            "options": {"inplace": True},
        }

    def set(self, **named):
        self.named.update(named)

    def option(self, **options):
        self.named["options"] = {**self.named["options"], **options}

    def qualify(self, index, **flags):
        for name, flag in flags.items():
            self.named["qualifiers"][index][f"is_{name}"] = flag

    def make(self):
        return matmul(self.a, self.b, self.c, **self.named)

    def plan(self):
        """The same through the class."""
        later = ("epilog", "epilog_inputs", "preferences")
        at_plan = {name: self.named.pop(name) for name in later if name in self.named}
        with Matmul(self.a, self.b, self.c, **self.named) as mm:
            mm.plan(**at_plan)
            return mm.execute()

    def check_result(self):
        assert self.c.shape == self.wanted.shape
        assert (abs(self.c - self.wanted) < 1e-10).all()


def on_gone_heap(call):
    call.a = allocate_symmetric_memory(call.a.shape, np, skip_symmetric_check=True)
    free_symmetric_memory(call.a)


def read_only(call):
    call.c.flags.writeable = False


def cut(call, name, where):
    setattr(call, name, getattr(call, name)[where])


def cast(call, names, dtype):
    for name in names:
        setattr(call, name, getattr(call, name).astype(dtype))


def to_torch(call, names):
    for name in names:
        setattr(call, name, torch.from_numpy(getattr(call, name)))


def grid_of(call):
    return BlockCyclic(ProcessGrid(shape=(call.context.size, 1)), (2, 2))


V, T, R = "ValueError", "TypeError", "RuntimeError"
MISMATCH, BIND = "CollectiveMismatch", "BindDistributionError"
FIT = "ValueError or BindDistributionError"  # shapes and distributions that do not fit together

# What is spoilt, what one rank's mistake raises, what all ranks' raises ("": it is no mistake).
MISTAKES = {
    "a is a list": (lambda s: setattr(s, "a", s.a.tolist()), V, V),
    "a is None": (lambda s: setattr(s, "a", None), V, V),
    "a of integers": (lambda s: cast(s, "a", int), V, V),
    "all of integers": (lambda s: cast(s, "abc", int), V, V),
    "a narrower": (lambda s: cast(s, "a", "f4"), V, V),
    "c narrower": (lambda s: cast(s, "c", "f4"), V, V),
    "a and b narrower": (lambda s: cast(s, "ab", "f4"), V, V),
    "a has one axis": (lambda s: cut(s, "a", 0), V, V),
    "a has three axes": (lambda s: cut(s, "a", None), V, V),
    "a lacks a row": (lambda s: cut(s, "a", slice(1, None)), FIT, FIT),
    "a lacks a column": (lambda s: cut(s, "a", (slice(None), slice(1, None))), FIT, V),
    "b lacks a row": (lambda s: cut(s, "b", slice(1, None)), FIT, FIT),
    "b lacks a column": (lambda s: cut(s, "b", (slice(None), slice(1, None))), FIT, V),
    "c lacks a row": (lambda s: cut(s, "c", slice(1, None)), V, V),
    "c lacks a column": (lambda s: cut(s, "c", (slice(None), slice(1, None))), V, V),
    "a in torch": (lambda s: to_torch(s, "a"), V, V),
    "all in torch": (lambda s: to_torch(s, "abc"), f"{T} or {MISMATCH}", T),  # the bias is not
    "c missing": (lambda s: setattr(s, "c", None), V, V),
    "c is a view": (lambda s: setattr(s, "c", np.broadcast_to(s.c[0], s.c.shape)), V, V),
    "c is read-only": (read_only, V, V),
    "c is b": (lambda s: setattr(s, "b", s.c[: len(s.b)]), V, V),
    "a was freed": (on_gone_heap, "UseAfterFree", "UseAfterFree"),
    "distributions: two": (lambda s: s.set(distributions=[X, X]), V, V),
    "distributions: one alone": (lambda s: s.set(distributions=X), V, V),
    "distributions: a name": (lambda s: s.set(distributions=[X, X, "X"]), V, V),
    "distributions: a list": (lambda s: s.set(distributions=[X, X, [X]]), V, V),
    "a's distribution": (lambda s: s.set(distributions=[Replicated(), X, X]), FIT, V),
    "b's distribution": (lambda s: s.set(distributions=[X, Y, X]), FIT, FIT),
    "c's distribution": (lambda s: s.set(distributions=[X, X, Y]), FIT, V),
    "c's grid": (lambda s: s.set(distributions=[X, X, grid_of(s)]), FIT, ""),
    "a box": (lambda s: s.set(distributions=[X, X, Box((0, 0), (M, N))]), FIT, FIT),
    "an axis too many": (lambda s: s.set(distributions=[Slab.Z, X, X]), FIT, FIT),
    "a is transposed": (lambda s: s.qualify(0, transpose=1), MISMATCH, V),
    "b is transposed": (lambda s: s.qualify(1, transpose=1), MISMATCH, V),
    "c is transposed": (lambda s: s.qualify(2, transpose=1), V, V),
    "c is conjugated": (lambda s: s.qualify(2, conjugate=1), V, V),
    "a is conjugated": (lambda s: s.qualify(0, conjugate=1), V, V),
    "qualifiers: one": (lambda s: s.set(qualifiers=np.zeros(1, matrix_qualifiers_dtype)), V, V),
    "qualifiers: numbers": (lambda s: s.set(qualifiers=np.zeros(3)), V, V),
    "qualifiers: text": (lambda s: s.set(qualifiers="TN"), V, V),
    "alpha is text": (lambda s: s.set(alpha="2"), V, V),
    "alpha is a vector": (lambda s: s.set(alpha=[1, 2]), V, V),
    "alpha is huge": (lambda s: s.set(alpha=10**400), V, V),
    "alpha is complex": (lambda s: s.set(alpha=1j), V, V),
    "alpha is another": (lambda s: s.set(alpha=2.5), MISMATCH, ""),
    "alpha is left out": (lambda s: s.set(alpha=None), MISMATCH, ""),
    "beta is missing": (lambda s: s.set(beta=None), V, V),
    "beta is another": (lambda s: s.set(beta=2), MISMATCH, ""),
    "beta is an array": (lambda s: s.set(beta=np.ones(2) * 1j), V, V),
    "epilog is missing": (lambda s: s.set(epilog=None, epilog_inputs=None), MISMATCH, ""),
    "epilog is another": (lambda s: s.set(epilog=MatmulEpilog.RELU_BIAS), MISMATCH, ""),
    "epilog is text": (lambda s: s.set(epilog="BIAS"), V, V),
    "epilog is unknown": (lambda s: s.set(epilog=3), V, V),
    "inputs are missing": (lambda s: s.set(epilog_inputs=None), MISMATCH, V),
    "an input without a name": (
        lambda s: s.set(epilog_inputs={**s.named["epilog_inputs"], 1: s.a}), T, T,
    ),
    "inputs are a list": (lambda s: s.set(epilog_inputs=[1]), T, T),
    "bias is a number": (lambda s: s.set(epilog_inputs={"bias": 1.0}), V, V),
    "bias is short": (lambda s: s.set(epilog_inputs={"bias": np.zeros(len(s.a) - 1)}), V, V),
    "bias is narrow": (
        lambda s: s.set(epilog_inputs={"bias": np.zeros(len(s.a), "f4")}), V, V,
    ),
    "bias in torch": (lambda s: s.set(epilog_inputs={"bias": torch.zeros(len(s.a))}), T, T),
    "one input more": (
        lambda s: s.set(epilog_inputs={**s.named["epilog_inputs"], "relu_aux": s.a}), MISMATCH, V,
    ),
    "scales": (lambda s: s.set(quantization_scales={"a": 1.0}), V, V),
    "stream": (lambda s: s.set(stream="default"), T, T),
    "preferences": (lambda s: s.set(preferences={"epilogue": None}), T, T),
    "aux_amax": (lambda s: s.set(preferences={"epilog": {"aux_amax": True}}), V, V),
    "aux_type": (lambda s: s.set(preferences=MatmulPlanPreferences({"aux_type": 0})), V, V),
    "options of another kind": (lambda s: s.set(options=3), T, T),
    "an unknown option": (lambda s: s.option(in_place=True), T, T),
    "inplace": (lambda s: s.option(inplace="yes"), V, V),
    "inplace on one": (lambda s: s.option(inplace=False), MISMATCH, ""),
    "blocking": (lambda s: s.option(blocking=False), V, V),
    "compute_type": (lambda s: s.option(compute_type=68), V, V),
    "compute_type: text": (lambda s: s.option(compute_type="64F"), V, V),
    "compute_type on one": (lambda s: s.option(compute_type=70), MISMATCH, ""),
    "scale_type": (lambda s: s.option(scale_type=0), V, V),
    "scale_type on one": (lambda s: s.option(scale_type=1), MISMATCH, ""),
    "result_type": (lambda s: s.option(result_type=0), V, V),
    "algo_type": (lambda s: s.option(algo_type=9), V, V),
    "algo_type on one": (lambda s: s.option(algo_type=1), MISMATCH, ""),
    "result_amax": (lambda s: s.option(result_amax=True), V, V),
    "block_scaling": (lambda s: s.option(block_scaling=True), V, V),
    "sm_count": (lambda s: s.option(sm_count_communication="all"), V, V),
    "sm_count on one": (lambda s: s.option(sm_count_communication=4), MISMATCH, ""),
    "inplace: list": (lambda s: s.option(inplace=[True]), V, V),
    "inplace: number": (lambda s: s.option(inplace=1), V, V),
    "inplace: NumPy's": (lambda s: s.option(inplace=np.True_), "", ""),
    "compute_type: list": (lambda s: s.option(compute_type=[70]), V, V),
    "compute_type: enum": (
        lambda s: s.option(compute_type=MatmulComputeType.COMPUTE_64F), MISMATCH, "",
    ),
    "blocking: list": (lambda s: s.option(blocking=[True]), V, V),
    "logger": (lambda s: s.option(logger=print), T, T),
    "strategy: list": (lambda s: s.option(strategy=["replicate"]), T, T),
    "preferences: list": (lambda s: s.set(preferences=[]), T, T),
    "strategy: unknown": (lambda s: s.option(strategy="fast"), MISMATCH, V),
    "strategy: number": (lambda s: s.option(strategy=1), T, T),
    "strategy on one": (lambda s: s.option(strategy="stationary b"), MISMATCH, ""),
}  # fmt: skip


def raised(call):
    """(type name, message) of what a call raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def make_mistakes(context, culprit, through):
    """What each mistake raises when rank `culprit` makes it (None: all ranks do)."""
    said = {}
    with context:
        for name, (spoil, *_) in MISTAKES.items():
            call = Call(context)
            held = call.c
            if culprit in (None, context.rank):
                spoil(call)
            said[name] = raised(getattr(call, through))
            if said[name][0]:
                assert (held == call.kept).all(), name
            good = Call(context)  # the context is as good as before
            good.make()
            good.check_result()
    return said


@pytest.mark.parametrize("through", ["make", "plan"])
@pytest.mark.parametrize("culprit", [0, 2, None])
def test_mistakes(contexts, culprit, through):
    first, *others = contexts.run(make_mistakes, culprit, through, ranks=3)
    for other in others:
        assert {n: said[0] for n, said in other.items()} == {n: s[0] for n, s in first.items()}
        assert other == first
    for name, (_, on_one, on_all) in MISTAKES.items():
        kind, text = first[name]
        wanted = on_one if culprit is not None else on_all
        wanted = "" if wanted in ("number", "") else wanted
        assert kind in wanted.split(" or "), (name, kind, text)
        if name in ("a is a list", "bias is a number"):
            assert f"{name.split()[0]}: expected an array" in text
        if kind and culprit is not None and wanted != FIT:
            assert f"rank {culprit}" in text, (name, text)


OTHER_CALLS = {
    "barrier": lambda call: call.context.barrier(),
    "redistribute": lambda call: redistribute(call.a, X, Y),
    "all_reduce": lambda call: all_reduce(np.zeros(3)),
    "allocation": lambda call: allocate_symmetric_memory(3, np),
    "split": lambda call: call.context.split(0),
    "construction": lambda call: Matmul(call.a, call.b, distributions=[X, X, X]),
}


def call_something_else(context, culprit):
    said = {}
    with context:
        for name, other in OTHER_CALLS.items():
            call = Call(context)
            mine = (lambda o=other, c=call: o(c)) if context.rank == culprit else call.make
            said[name] = raised(mine)
            assert (call.c == call.kept).all()
            call.make()
            call.check_result()
    return said


@pytest.mark.parametrize("culprit", [0, 1])
def test_another_operation_on_one_rank(contexts, culprit):
    first, second, third = contexts.run(call_something_else, culprit, ranks=3)
    assert first == second == third
    for name, (kind, text) in first.items():
        assert kind == MISMATCH, (name, text)
        assert f"rank {culprit} called" in text and "called matmul" in text


def spoil_at_random(rng, call):
    """Change one thing that must be equal on all ranks, or fit; return what it was."""
    options = {
        "inplace": False, "compute_type": 70, "scale_type": 1, "result_type": 1, "algo_type": 2,
        "strategy": "stationary c",
    }  # fmt: skip
    what = rng.choice(
        ["rows", "columns", "dtype", "distribution", "qualifier", "scalar", "epilog", "option"]
    )
    if what == "rows":
        name = rng.choice("abc")
        x = getattr(call, name)
        setattr(call, name, x[1:] if rng.random() < 0.5 else np.vstack([x, x[:1]]))
    elif what == "columns":
        name = rng.choice("abc")
        x = getattr(call, name)
        setattr(call, name, x[:, 1:] if rng.random() < 0.5 else np.hstack([x, x[:, :1]]))
    elif what == "dtype":
        cast(call, rng.choice(["a", "b", "c", "ab", "abc"]), rng.choice(["f4", "f2", "c16", "i8"]))
    elif what == "distribution":
        index = rng.randrange(3)
        blocks = (rng.randint(1, 9), rng.randint(1, 9))
        grid = ProcessGrid(shape=rng.choice([(3, 1), (1, 3)]))
        other = rng.choice([Y, Replicated(), BlockCyclic(grid, blocks), Box((0, 0), (4, 4))])
        call.named["distributions"] = [other if i == index else X for i in range(3)]
    elif what == "qualifier":
        call.qualify(rng.randrange(3), **{rng.choice(["transpose", "conjugate"]): 1})
    elif what == "scalar":
        value = rng.choice([0, -1, 7.5, float("nan"), float("inf"), 1j])
        call.named[rng.choice(["alpha", "beta"])] = value
    elif what == "epilog":
        call.set(epilog=rng.choice([e for e in MatmulEpilog if e != MatmulEpilog.BIAS]))
    else:
        name = rng.choice(list(options))
        call.option(**{name: options[name]})
    return what


def make_random_mistakes(context, seed, count):
    rng = random.Random(seed)
    said = []
    with context:
        for _ in range(count):
            call = Call(context)
            held = call.c
            culprit = rng.randrange(context.size)
            spoilt = Call(context)
            what = spoil_at_random(rng, spoilt)  # on all ranks, so that all draw the same
            said.append((what, *raised((spoilt if context.rank == culprit else call).make)))
            assert (held == call.kept).all(), said[-1]
        good = Call(context)
        good.make()
        good.check_result()
    return said


def test_random_mistakes_on_one_rank(contexts):
    first, *others = contexts.run(make_random_mistakes, 11, 120, ranks=3)
    assert all(other == first for other in others)
    assert {kind for _, kind, _ in first} <= {V, MISMATCH, BIND}, first
    assert len({what for what, _, _ in first}) == 8


def test_options_are_frozen_and_left_alone():
    options = MatmulOptions()
    with pytest.raises(AttributeError):
        options.inplace = True
    assert MatmulOptions().inplace is False


def test_without_a_context():
    with pytest.raises(RuntimeError, match=r"call shardmath\.initialize"):
        matmul(np.eye(2), np.eye(2), distributions=[X, X, X])
