"""An exception that leaves the host's part of a call on GPUs gives no wrong number."""

import pytest
from interrupts import CALLS, Part, run_trials
from visible import gpu_of

from mortal import Job, Raised

VARIABLES = {"SHARDMATH_TIMEOUT": "100", "SHARDMATH_NOTICE": "100"}


def try_all(gpus, name, chosen):
    del gpus  # which skips where there are none

    def body(group):
        return run_trials(group, name, chosen, gpu_of(group.rank))

    with Job(2, body, VARIABLES) as job:
        outcomes = [job.outcome(rank, 3500) for rank in range(2)]
    assert not any(isinstance(each, Raised) or each is None for each in outcomes), outcomes
    assert not any(failures for _, _, failures, _ in outcomes), [each[2] for each in outcomes]


@pytest.mark.parametrize("name", CALLS)
def test_no_interrupt_gives_a_wrong_number(gpus, name):
    try_all(gpus, name, 2)


@pytest.mark.torture
@pytest.mark.parametrize("name", CALLS)
def test_no_interrupt_at_any_place_gives_a_wrong_number(gpus, name):
    try_all(gpus, name, Part(0, 1))
