import time

import pytest

from forked import on_ranks
from shardmath.agreement import require_equal
from shardmath.planning import agree_plan


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


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_plan_is_built_once_and_the_notes_of_each_call_travel(size):
    def body(context):
        build = Counted()
        for turn in range(5):
            note = bytes([context.rank, turn])
            plan, notes = agree_plan(context, "op", lambda n=note: (("a", context.rank), n), build)
            assert plan == tuple(("a", r) for r in range(size))
            assert notes == [bytes([r, turn]) for r in range(size)]
        return build.calls

    assert on_ranks(size, body) == [1] * size


def test_plans_are_told_apart_by_the_specs_of_all_ranks_and_by_the_operation():
    def body(context):
        build = Counted()
        for _ in range(3):
            for operation in ("op", "po"):
                for length in (1, 2):  # only rank 1's spec changes
                    spec = ("a", length if context.rank else 0)
                    plan, _ = agree_plan(context, operation, lambda s=spec: (s, b""), build)
                    assert plan == (("a", 0), ("a", length))
        return build.calls

    assert on_ranks(2, body) == [4, 4]


def test_an_error_on_one_rank_or_of_all_specs_is_raised_on_all_and_nothing_is_left():
    def body(context):
        build = Counted()

        def describe():
            if context.rank == 1:
                raise KeyError("no")
            return ("a",), b""

        refused = said(lambda: agree_plan(context, "op", describe, build))
        differ = said(
            lambda: agree_plan(context, "op", lambda: (("a", "b")[context.rank], b""), build)
        )
        unhashable = said(
            lambda: agree_plan(context, "op", lambda: ([] if context.rank == 0 else (), b""), build)
        )
        fine = said(lambda: agree_plan(context, "op", lambda: (("a",), b""), build)[0])
        crossed = said(lambda: agree_plan(context, f"op{context.rank}", lambda: ((), b""), build))
        return refused, differ, unhashable, fine, crossed

    first, second = on_ranks(2, body)
    assert first == second
    refused, differ, unhashable, fine, crossed = first
    assert refused.startswith("KeyError") and "rank 1" in refused
    assert (
        differ
        == "CollectiveMismatch: the kind must be equal on all ranks: rank 0 has a, rank 1 has b"
    )
    assert unhashable.startswith("TypeError: rank 0: ")
    assert fine == "(('a',), ('a',))"
    assert "rank 0 called op0; rank 1 called op1" in crossed


def test_books_that_differ_are_begun_anew():
    def body(context):
        build = Counted()
        call = lambda: agree_plan(context, "op", lambda: (("a",), b""), build)  # noqa: E731
        call()
        if context.rank == 1:  # as after an interrupt between exchange and keeping
            context.cache("plans", None).restart(0)
        call()
        call()
        return build.calls

    assert on_ranks(2, body) == [2, 2]


def test_many_plans_do_not_stay():
    def body(context):
        for turn in range(600):
            agree_plan(context, "op", lambda t=turn: ((t,), b""), tuple)
        book = context.cache("plans", None)
        return len(book._plans), len(book._digests)

    assert on_ranks(2, body) == [(256, 256)] * 2


def test_agreeing_again_is_quick():
    def body(context):
        times = []
        for _ in range(300):
            start = time.perf_counter()
            agree_plan(context, "op", lambda: (("a", 1, (2, 3)), b"12345678"), tuple)
            times.append(time.perf_counter() - start)
        return sorted(times)[150]

    assert max(on_ranks(2, body)) < 1e-3  # some 10 us where each rank has a core
