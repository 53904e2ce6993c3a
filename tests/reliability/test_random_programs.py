"""R22: random programs, beside NumPy; with the mark `torture`, for an hour."""

from __future__ import annotations

import pytest

import random_programs
from mortal import ENDLESS, Job, Raised, on_ranks, run_job
from shardmath import collectives
from shardmath.context import startup
from shardmath.context.context import get_context

HOUR = 3600.0


def run(seed, count, *, ranks=4):
    def body(context):
        return sum(
            random_programs.Program(context, number, on_gpus=False).run(random_programs.STEPS)
            for number in range(seed, seed + count)
        )

    assert on_ranks(ranks, body) == [count * random_programs.STEPS] * ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_random_programs_do_as_numpy_does(ranks):
    run(1000 * ranks, 2, ranks=ranks)


@pytest.mark.torture
def test_an_hour_of_random_programs(record_property):
    """However busy the machine is: a rank that hangs the outcomes' own limit finds."""

    def body(group):
        return random_programs.programs(0, 1 << 60, HOUR, group=group)

    outcomes = run_job(4, body, ENDLESS, timeout=2 * HOUR)
    assert len({*map(str, outcomes)}) == 1 and not isinstance(outcomes[0], Raised), outcomes
    record_property("steps", outcomes[0][1])


def test_a_wrong_result_is_found():
    """Of one rank, in one element: the number of the program and of the step are told."""

    def body(group):
        right = collectives.all_gather

        def wrong(x, **named):
            made = right(x, **named)
            if made.size and get_context().rank == 1:
                made.reshape(-1)[-1] += 1
            return made

        collectives.all_gather = wrong
        context = startup.initialize("cpu", group)
        for number in range(9):
            random_programs.Program(context, number, on_gpus=False).run(random_programs.STEPS)
        return "nothing was found"

    with Job(2, body) as job:
        outcome = job.outcome(1)
    assert isinstance(outcome, Raised) and outcome.kind == "AssertionError"
    assert "rank 1: collect: " in outcome.text and outcome.text.startswith("program ")
