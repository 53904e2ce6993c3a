"""Collectives that run beside the program have its results, their own order, and their errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import shardmath
from mortal import on_ranks
from shardmath import collectives
from shardmath.collectives.background import Work
from shardmath.errors import CollectiveMismatch, RankFailure

CALLS = {
    "all_reduce": lambda x, **words: collectives.all_reduce(x, op="max", **words),
    "all_gather": lambda x, **words: collectives.all_gather(x, axis=-1, **words),
    "all_to_all": lambda x, **words: collectives.all_to_all(
        x, send_counts=[0, len(x)], receive_counts=None, **words
    ),
    "broadcast": lambda x, **words: collectives.broadcast(x, root=1, **words),
    "reduce_scatter": lambda x, **words: collectives.reduce_scatter(
        x, op="mean", axis=1, counts=[7, 1], **words
    ),
}


def check_results(context):
    """What differs of calls that are all under way, while the program makes the same ones."""
    wrong = []
    for make in (np.full, torch.full):
        xs = [make((n, 8), context.rank + n + 1.0) for n in (0, 1, 9)]
        works = [
            (name, x, CALLS[name](x, context=context, async_op=True)) for name in CALLS for x in xs
        ]
        for name, x, work in works:
            expected = CALLS[name](x, context=context)
            found = work.wait()
            if (
                type(found) is not type(expected)
                or not (np.asarray(found) == np.asarray(expected)).all()
            ):
                wrong.append((name, x.shape))
            if work.wait() is not found or not work.is_completed() or work.exception() is not None:
                wrong.append((name, "ended"))
    out = np.empty(3)
    if (
        collectives.all_reduce(np.ones(3), out=out, context=context, async_op=True).wait()
        is not out
    ):
        wrong.append("out")
    return wrong


def test_results(contexts):
    assert contexts.run(check_results, ranks=2) == [[]] * 2


def check_order(context):
    """Rank 0 calls before the barrier, rank 1 after it: neither waits where it calls."""
    x = np.ones(3)
    collectives.all_reduce(x, context=context, async_op=True).wait()
    if context.rank == 1:
        context.barrier()
    works = [collectives.all_reduce(n * x, context=context, async_op=True) for n in range(4)]
    under_way = not works[0].is_completed()
    if context.rank == 0:
        context.barrier()
    return under_way or context.rank == 1, [float(work.wait()[0]) for work in works]


def test_a_call_goes_on_beside_the_program(contexts):
    assert contexts.run(check_order, ranks=2) == [(True, [0.0, 2.0, 4.0, 6.0])] * 2


def check_errors(context):
    """What is raised is heard where it is waited for, and the next call is as good as before."""
    work = collectives.all_reduce(np.ones(2 + context.rank), context=context, async_op=True)
    with pytest.raises(CollectiveMismatch):
        work.wait()
    said = str(work.exception()), work.is_completed()
    needs = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match="async_op"):
        collectives.all_reduce(needs, context=context, async_op=True)
    with pytest.raises(ValueError, match=r"rank 1.*async_op"):  # the others hear of it
        needs.requires_grad_(context.rank == 1)
        collectives.all_reduce(needs, context=context, async_op=True).wait()
    with torch.no_grad():
        needs.requires_grad_()
        assert (
            not collectives.all_reduce(needs, context=context, async_op=True).wait().requires_grad
        )
    again = collectives.all_reduce(np.ones(2), context=context, async_op=True)
    return *said, again.wait().tolist()


def test_errors(contexts):
    one, other = contexts.run(check_errors, ranks=2)
    assert one == other and one[1:] == (True, [2.0, 2.0])


def check_that_a_split_is_another_call(context):
    part = context.split(0)
    with pytest.raises(CollectiveMismatch, match="async_op"):
        if context.rank == 0:
            collectives.all_reduce(1.0, context=part, async_op=True)
        else:
            part.split(1)
    return collectives.all_reduce(1.0, context=part, async_op=True).wait()


def test_the_split_of_a_first_call_is_not_taken_for_the_programs(contexts):
    assert contexts.run(check_that_a_split_is_another_call, ranks=2) == [2.0] * 2


class Interrupted(BaseException):
    """What a signal handler raises."""


def interrupt_and_call_again(context):
    """On rank 1 an exception strikes when the thread has the work; the program calls once more."""
    x, found = np.ones(3), []
    collectives.all_reduce(x, context=context, async_op=True).wait()
    if context.rank == 1:
        plain = Work.__init__

        def ring(*_):
            Work.__init__ = plain
            raise Interrupted

        Work.__init__ = ring
    for number in (1.0, 10.0, 100.0):
        try:
            try:
                work = collectives.all_reduce(number * x, context=context, async_op=True)
            except Interrupted:
                work = collectives.all_reduce(number * x, context=context, async_op=True)
            found.append(float(work.wait()[0]) == 2 * number)
        except RankFailure as error:
            found.append("rank 1" in str(error) and "Interrupted" in str(error))
    assert collectives.all_reduce(1, context=context) == 2  # this context goes on
    made = context.recover()
    assert collectives.all_reduce(x, context=made, async_op=True).wait()[0] == 2
    return found


def test_an_interrupted_call_is_not_taken_for_another():
    assert on_ranks(2, interrupt_and_call_again) == [[True] * 3] * 2


def end_early(context):
    """The context ends while rank 0 waits for a call that rank 1 does not make."""
    collectives.all_reduce(1.0, async_op=True).wait()
    work = collectives.all_reduce(1.0, async_op=True) if context.rank == 0 else None
    context.barrier()
    shardmath.finalize()
    return work is None or str(work.exception())


def test_a_context_that_ends_before_its_calls():
    said, nothing = on_ranks(2, end_early)
    assert "finalize" in said and nothing
