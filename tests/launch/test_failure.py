"""Which failure is the first, and what is said of it."""

from __future__ import annotations

import pytest

from shardmath.errors import OpTimeout, RankFailure
from shardmath.launch.failure import Failure, died, from_exception, rebuild


def failure(rank: int, error: BaseException, when: float) -> Failure:
    return Failure.decode(Failure(**{**vars(from_exception(rank, error)), "when": when}).encode())


CASES = [
    ("the earliest", [failure(0, ValueError(), 2.0), failure(1, KeyError(), 1.0)], 1),
    (
        "a cause before its consequence",
        [failure(0, RankFailure("x"), 1.0), died(2, 1, when=5.0)],
        2,
    ),
    ("else the earliest consequence", [failure(r, RankFailure("x"), 3.0 - r) for r in (0, 2)], 2),
    ("a silent death, dated early", [failure(0, ValueError(), 1.0), died(2, -9, when=0.9)], 2),
    ("the lower rank", [died(3, 1, when=1.0), died(1, 1, when=1.0)], 1),
]


@pytest.mark.parametrize(("failures", "expected"), [case[1:] for case in CASES])
def test_first(failures: list[Failure], expected: int) -> None:
    assert min(failures, key=lambda entry: entry.order).rank == expected


WORDS = [
    (died(2, 3, when=0), "rank 2 exited with status 3", 3),
    (died(2, -9, when=0), "rank 2 was killed by SIGKILL", 137),
    (died(2, 200, when=0), "rank 2 exited with status 200", 200),
    (died(2, 0, when=0), "rank 2 ended before it returned a result", 0),
    (from_exception(2, SystemExit(300)), "rank 2 exited with status 44", 44),
    (from_exception(2, SystemExit("why")), "rank 2 exited with status 1", 1),
    (from_exception(2, SystemExit(None)), "rank 2 ended before it returned a result", 0),
    (from_exception(2, ValueError("x")), "rank 2 raised ValueError", 1),
    (from_exception(2, KeyboardInterrupt()), "rank 2 raised KeyboardInterrupt", 130),
]


@pytest.mark.parametrize(("failed", "words", "status"), WORDS)
def test_words_and_status(failed: Failure, words: str, status: int) -> None:
    assert (str(failed), failed.status) == (words, status)


def test_ranks_survive_the_way() -> None:
    error = rebuild(failure(1, OpTimeout("late", (0, 3)), 0.0))
    assert isinstance(error, OpTimeout) and error.ranks == (0, 3)
