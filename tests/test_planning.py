"""Agreement on repeated calls: when plans are built, found, dropped and refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from shardmath.call.agreement import HashedSpec, agree
from shardmath.context.agreement import require_equal


def agree_plan(context, operation, describe, build):
    """The plan and the notes, where ranks describe a spec and a note, and nothing else."""

    def described():
        spec, note = describe()
        hashed = spec if isinstance(spec, HashedSpec) else HashedSpec(spec)
        return SimpleNamespace(spec=hashed, note=note, payload=b"", last=None)

    _, agreement, _ = agree(context, operation, described, build)
    return agreement.plan, agreement.notes


class Counted:
    """A build function that counts how often it ran."""

    def __init__(self):
        self.calls = 0

    def __call__(self, specs):
        self.calls += 1
        require_equal("the kind", [spec[0] for spec in specs])
        return tuple(specs)


def said(call):
    try:
        return repr(call())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def repeat(context):
    build = Counted()
    for turn in range(5):
        note = bytes([context.rank, turn])
        plan, notes = agree_plan(context, "op", lambda n=note: (("a", context.rank), n), build)
        assert plan == tuple(("a", r) for r in range(context.size))
        assert notes == [bytes([r, turn]) for r in range(context.size)]
    return build.calls


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_plan_is_built_once_and_the_notes_of_each_call_travel(contexts, size):
    assert contexts.run(repeat, ranks=size) == [1] * size


def repeat_hashed(context):
    build, found = Counted(), []
    hashed = HashedSpec(("a", context.rank))
    for turn in (0, 1, 0, 1, 1, 0):  # messages that came before are known
        note = bytes([turn, context.rank])
        plan, notes = agree_plan(context, "again", lambda n=note: (hashed, n), build)
        assert notes == [bytes([turn, r]) for r in range(context.size)]
        found.append(plan)
    other, _ = agree_plan(context, "again", lambda: (("a", context.rank), b""), build)
    assert all(plan is other for plan in found), "equal specs are one"
    return build.calls


@pytest.mark.parametrize("size", [1, 2])
def test_a_spec_means_what_its_values_mean(contexts, size):
    assert contexts.run(repeat_hashed, ranks=size) == [1] * size


def alternate(context):
    build = Counted()
    for _ in range(3):
        for operation in ("this", "that"):
            for length in (1, 2):  # only rank 1's spec changes
                spec = ("b", length if context.rank else 0)
                plan, _ = agree_plan(context, operation, lambda s=spec: (s, b""), build)
                assert plan == (("b", 0), ("b", length))
    return build.calls


def test_plans_are_told_apart_by_the_specs_of_all_ranks_and_by_the_operation(contexts):
    assert contexts.run(alternate, ranks=2) == [4, 4]


def err(context):
    build, rank = Counted(), context.rank

    def describe():
        if rank == 1:
            raise KeyError("no")
        return ("a",), b""

    return (
        said(lambda: agree_plan(context, "op", describe, build)),
        said(lambda: agree_plan(context, "op", lambda: (("a", "b")[rank], b""), build)),
        said(lambda: agree_plan(context, "op", lambda: (() if rank else {1}, b""), build)),
        said(lambda: agree_plan(context, f"op{rank}", lambda: ((), b""), build)),
        said(lambda: agree_plan(context, "op", lambda: (("a",), b""), build)[0]),
    )


def test_an_error_on_one_rank_or_of_all_specs_is_raised_on_all_and_nothing_is_left(contexts):
    first, second = contexts.run(err, ranks=2)
    assert first == second
    refused, differ, unhashable, crossed, fine = first
    assert refused.startswith("KeyError") and "rank 1" in refused
    assert differ.startswith("CollectiveMismatch: the kind must be equal on all ranks")
    assert unhashable.startswith("TypeError: rank 0: ")
    assert "rank 0 called op0; rank 1 called op1" in crossed
    assert fine == "(('a',), ('a',))"


def interrupt(context):
    build = Counted()

    def call():
        return agree_plan(context, "interrupted", lambda: (("a",), b""), build)

    for _ in range(2):
        call()
        if context.rank == 1:  # as after an interrupt between the exchange and keeping the plan
            context.cache("plans", None).restart(0)
        found = [call() for _ in range(3)]
        assert found == [((("a",), ("a",)), [b"", b""])] * 3
    return build.calls


def test_books_that_differ_are_begun_anew(contexts):
    assert contexts.run(interrupt, ranks=2) == [3, 3]


def fill(context):
    for turn in range(600):
        agree_plan(context, "op", lambda t=turn: ((t,), b""), tuple)
    book = context.cache("plans", None)
    return len(book.all)


def test_many_plans_do_not_stay(contexts):
    found = contexts.run(fill, ranks=2)
    assert len(set(found)) == 1  # they are dropped together
    assert 128 < found[0] <= 256


def hurry(context):
    build, board = Counted(), context.board
    rounds = []
    for _ in range(4):
        before = board.rounds
        agree_plan(context, "quick", lambda: (("a", 1, (2, 3)), b"12345678"), build)
        rounds.append(board.rounds - before)
    return rounds, build.calls


def test_agreeing_again_is_quick(contexts):
    """One small exchange, which takes 10 us where each rank has a core; the plan is made once."""
    assert contexts.run(hurry, ranks=2) == [([2, 1, 1, 1], 1)] * 2
