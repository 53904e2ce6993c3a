"""An exception that leaves the host's part of a call on GPUs gives no wrong number.

Of the places at which it may strike, see `tests/reliability/interrupts.py`.
"""

import pytest
from interrupts import CALLS, INTERRUPTED, Part, run_trials
from visible import gpu_of

from mortal import Raised, run_job

RANKS = 2
PARTS = 256  # of all places
VARIABLES = {"SHARDMATH_TIMEOUT": "100", "SHARDMATH_NOTICE": "100"}


def try_all(gpus, name, chosen):
    """The places that the rank that is interrupted has seen. All trials are acceptable."""
    del gpus  # which skips where there are none

    def body(group):
        return run_trials(group, name, chosen, gpu_of(group.rank))

    outcomes = run_job(RANKS, body, VARIABLES, timeout=3500)
    assert not any(isinstance(outcome, Raised) or outcome is None for outcome in outcomes), outcomes
    assert not any(failures for _, _, failures, _ in outcomes), [each[2] for each in outcomes]
    return outcomes[INTERRUPTED][3]


@pytest.mark.parametrize("name", CALLS)
def test_no_interrupt_gives_a_wrong_number(gpus, name):
    try_all(gpus, name, 2)


@pytest.mark.torture
@pytest.mark.parametrize("number", range(PARTS), ids="part{:03}".format)
def test_no_interrupt_at_any_place_gives_a_wrong_number(gpus, number):
    part = Part(number, PARTS)
    for name in CALLS:
        part.seen.update(try_all(gpus, name, part))
