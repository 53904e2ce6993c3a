"""An exception that leaves a call at any bytecode gives no wrong number, then or later.

`make test` takes a sample of the bytecodes, `make torture` all of them.
"""

import random

import pytest
from interrupts import CALLS, INTERRUPTED, Trials

from mortal import Job, Raised

RANKS = 3
VARIABLES = {"SHARDMATH_TIMEOUT": "100", "SHARDMATH_NOTICE": "100"}
SAMPLE = 6  # bytecodes of each step, for each way to raise
STRIDE = 1  # of a whole run


def acceptable(outcomes):
    """Whether all that a rank has seen are right numbers, named errors and its own interrupt."""
    return all(
        each == "right" or each.startswith("named ") or each in ("Interrupted", "Alarm")
        for each in outcomes
    )


def trials(name, choose, seed=0):
    """All trials of a call; `choose(count, random)` are bytecodes of a step that has `count`."""

    def body(group):
        mine = Trials(group, name)
        steps = len(mine.make(mine.context))
        failures, made = [], 0
        for warm in (0, 2):
            for position in range(steps):
                _, counted = mine.run(position, 0, kind="none", warm=warm)
                counted = agreed(mine.context, counted)
                pick = random.Random(f"{seed} {name} {warm} {position}")
                for at in choose(counted, pick):
                    kind = pick.choice(["base", "exception"])
                    found, _ = mine.run(position, at, kind=kind, warm=warm)
                    made += 1
                    if not acceptable(found):
                        failures.append(f"step {position} after {warm}, {kind} at {at}: {found}")
        return made, failures

    with Job(RANKS, body, VARIABLES) as job:
        outcomes = [job.outcome(rank, 3000) for rank in range(RANKS)]
    assert not any(isinstance(each, Raised) for each in outcomes), outcomes
    assert not any(failures for _, failures in outcomes), [f for _, f in outcomes if f]
    assert outcomes[0][0] > 0


def agreed(context, counted):
    """How many bytecodes the rank that is interrupted has executed."""
    return context.agree("count", lambda: counted, lambda counts: counts[INTERRUPTED])


@pytest.mark.parametrize("name", CALLS)
def test_no_interrupt_gives_a_wrong_number(name):
    trials(name, lambda count, pick: sorted(pick.sample(range(1, count + 1), min(SAMPLE, count))))


@pytest.mark.torture
@pytest.mark.parametrize("name", CALLS)
def test_no_interrupt_at_any_bytecode_gives_a_wrong_number(name):
    trials(name, lambda count, _: range(1, count + 1, STRIDE))
