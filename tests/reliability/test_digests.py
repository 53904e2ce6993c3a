"""SHARDMATH_DIGESTS: two runs of a program are compared, call by call and bit by bit."""

from __future__ import annotations

import time
import warnings

import numpy as np
import pytest

import shardmath
from mortal import Job, run_job
from shardmath.base import config
from shardmath.base.collective_call import collective_call
from shardmath.collectives import all_gather, all_reduce
from shardmath.context import startup
from shardmath.distribution import Slab
from shardmath.fft import fft
from shardmath.handles.allocation import allocate_symmetric_memory as allocate
from shardmath.handles.rendezvous import rendezvous

SIZE = 2
NAMES = ["all_reduce", "fft", "all_gather", "array"]


@collective_call
def unsteady(x):
    return x + time.monotonic_ns()


def run(folder, order, changed=None):
    """What ranks are warned of in a run of the calls of that `order`; `changed` is given others."""

    def body(group):
        def altered(number, x):
            return x * (1 + (number == changed))

        calls = [
            lambda: all_reduce(altered(0, np.arange(20.0)), out=np.zeros(20)),
            lambda: fft(altered(1, np.arange(20.0).reshape(4, 5) ** 2 + 1j), distribution=Slab.X),
            lambda: all_gather(altered(2, np.arange(3))),
            lambda: shardmath.array(altered(3, np.ones((2, 3))), Slab.X).sum(axis=1),
            lambda: unsteady(7),
        ]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            startup.initialize("cpu", group)
            memory = allocate(1000, np)  # which nobody has written to
            rendezvous(memory).barrier()
            for number in order:
                calls[number]()
            startup.finalize()
        return [str(each.message) for each in caught]

    variables = {"SHARDMATH_CHECK": "1", "SHARDMATH_DIGESTS": str(folder)}
    return run_job(SIZE, body, variables)


def test_equal_runs_are_equal(tmp_path):
    for _ in range(3):
        assert run(tmp_path / "notes", range(4)) == [[]] * SIZE
    assert len([*(tmp_path / "notes").iterdir()]) == SIZE


@pytest.mark.parametrize("number", range(4))
def test_the_first_call_that_was_given_other_bits_is_named(tmp_path, number):
    assert run(tmp_path, range(4)) == [[]] * SIZE
    for rank, told in enumerate(run(tmp_path, range(4), number)):
        [text] = told
        assert text.startswith(f"rank {rank}: {NAMES[number]} of ") and "test_digests.py:" in text
        assert "gives other bits" in text and text.endswith("and this rank gave it others")


def test_a_call_that_is_at_fault_itself_is_told_so(tmp_path):
    assert run(tmp_path, (0, 4, 2)) == [[]] * SIZE
    for told in run(tmp_path, (0, 4, 2), 2):
        [text] = told
        assert "unsteady of no array" in text and text.endswith("though this rank gave it the same")


def test_other_calls_end_the_comparison(tmp_path):
    assert run(tmp_path, range(4)) == [[]] * SIZE
    for told in run(tmp_path, (0, 2, 1, 3)):
        [text] = told
        assert "all_gather of int64[3]" in text and "was fft, test_digests.py:" in text


MISTAKES = {  # by folder: what the check is, and what is said on all ranks
    "": ("0", "takes SHARDMATH_CHECK=1"),
    ".": ("1", r"rank 1: SHARDMATH_DIGESTS: .*rank-1-of-.*.jsonl was not written"),
    f"rank-1-of-{SIZE}.jsonl/in": ("1", "SHARDMATH_DIGESTS: .*rank-1-of-.*: Not a directory"),
}


def test_mistakes(tmp_path):
    (tmp_path / f"rank-1-of-{SIZE}.jsonl").write_text("12\n")

    def body(group):
        for folder, (check, message) in MISTAKES.items():
            variables = {"DIGESTS": str(tmp_path / folder), "CHECK": check}
            config.export({f"{config.PREFIX}{name}": text for name, text in variables.items()})
            with pytest.raises((ValueError, OSError), match=message):
                startup.initialize("cpu", group)
        return True

    with Job(SIZE, body) as job:
        assert [job.outcome(rank) for rank in range(SIZE)] == [True] * SIZE
