"""A rank ends while its peers' kernels wait for it: these end soon, wherever the hosts are.

See `departing` for how it ends, where the peers are, and what they say. `make torture` has all.
"""

from __future__ import annotations

import random
from itertools import cycle, product

import departing
import pytest
from visible import GPUS

from started import LAUNCHERS, missing

SIZES = (2, 4)  # on two GPUs
SAMPLE = [
    ("SIGKILL", "synchronize", "apart", "shardmath", 2),
    ("SIGKILL", "graph", "anywhere", "shardmath", 4),
    ("exit", "python", "apart", "torchrun", 2),
    ("interrupt", "graph", "apart", "shardmath", 2),
    ("finalize", "synchronize", "apart", "mpirun", 2),
    ("leave one", "graph", "apart", "shardmath", 2),
]


def all_jobs(count=100):
    """`count` jobs: everything that can come together of two, and more at random."""
    random_ = random.Random(13)
    launchers = [name for name in LAUNCHERS if "+" not in name]
    moments, sizes = cycle(departing.MOMENTS), cycle((2, 2, 4))
    jobs = [
        (how, where, next(moments), launcher, next(sizes))
        for (how, where), launcher in product(departing.JOBS, launchers)
    ]
    while len(jobs) < count:
        how, where = random_.choice(departing.JOBS)
        chosen = (random_.choice(departing.MOMENTS), random_.choice(launchers))
        job = (how, where, *chosen, random_.choice(SIZES))
        if job not in jobs:
            jobs.append(job)
    return jobs


def check(folder, how, where, moment, launcher, size):
    if reason := missing(launcher):
        pytest.skip(reason)
    victim, others = departing.run(folder, how, where, moment, launcher=launcher, size=size)
    assert len(others) == size - 1
    for other in others:
        # Who calls another operation than the one that finalizes is told so.
        kinds = {"RankFailure", "CollectiveMismatch"} if how == "finalize" else {"RankFailure"}
        assert other["kind"] in kinds, other
        assert other["usable"] and other["threads"] == 1, other
        assert other["rank"] not in other["ranks"] or other["kind"] != "RankFailure", other
        # It must not have been the deadline that ended the wait.
        assert other["raised"] - victim["ended"] < departing.DEADLINE / 2, other
    failures = [other for other in others if other["kind"] == "RankFailure"]
    named = [other for other in failures if victim["rank"] in other["ranks"]]
    # Of more than two, one that has heard and left may be whom the next one hears of.
    assert named or not failures, others
    assert size > 2 or named == failures, others
    assert all(f"pid {victim['pid']}" in other["text"] for other in named), others


@pytest.fixture
def two_gpus(gpus):
    """There are two; and no ranks of other tests have them."""
    if GPUS < 2:
        pytest.skip("ranks on two GPUs are to lose one another")
    gpus.close()


@pytest.mark.parametrize(("how", "where", "moment", "launcher", "ranks"), SAMPLE)
def test_kernels_wait_no_more(two_gpus, tmp_path, how, where, moment, launcher, ranks):
    check(tmp_path, how, where, moment, launcher, ranks)


@pytest.mark.torture
@pytest.mark.parametrize(("how", "where", "moment", "launcher", "ranks"), all_jobs())
def test_kernels_wait_no_more_at_length(two_gpus, tmp_path, how, where, moment, launcher, ranks):
    check(tmp_path, how, where, moment, launcher, ranks)


def test_there_are_a_hundred_jobs():
    jobs = all_jobs()
    assert len(set(jobs)) == len(jobs) == 100
    for place, values in enumerate(
        (departing.HOWS, departing.WHERES, departing.MOMENTS, ("shardmath", "torchrun", "mpirun"))
    ):
        assert {job[place] for job in jobs} == set(values)
    assert {job[4] for job in jobs} == set(SIZES)
