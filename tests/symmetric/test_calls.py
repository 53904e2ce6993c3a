"""Ranks that run ahead with calls, and meet: where one has made another call, all raise the same.

The ranks are threads of one process, of which one runs at a time: see `test_board_schedules`.
"""

from __future__ import annotations

import mmap
import random
import types

import pytest
from test_board_schedules import Schedule, Word

from shardmath.errors import CollectiveMismatch, OpTimeout, RankFailure
from shardmath.symmetric import board as boards_module
from shardmath.symmetric import waiting
from shardmath.symmetric.board import Board
from shardmath.symmetric.rows import WINDOW, Rows, board_bytes
from shardmath.symmetric.waiting import WaitPolicy

SEEDS = 40
LIMIT = 5.0  # of the schedule's seconds
MEET = 0  # in place of a call's tag
TELL = 4  # a call of which this rank wants to know what all say with it,
QUIET = 5  # and the same call where it does not


def board_of(rows, size):
    return Board(
        rows,
        watch=None,
        numbers=range(size),
        processes=[f"pid {r}" for r in range(size)],
        policy=WaitPolicy(LIMIT, notice=100, spin=0.0),
    )


def boards_of(size, schedule):
    memory = mmap.mmap(-1, board_bytes(size))
    found = []
    for rank in range(size):
        rows = Rows(memory, rank=rank, size=size)
        rows.words = [Word(words, schedule) for words in rows.words]
        board = board_of(rows, size)

        def explain(tags, rank=rank):
            known = {tag for tag in tags.values() if tag is not None}  # of those that have come
            return CollectiveMismatch(f"{sorted(known)}, where rank {rank} meets")

        board.let_run_ahead(explain)
        found.append(board)
    return found


def outcomes(seed, programs, monkeypatch):
    """What each rank's program did: tags of calls, MEET for a meeting. The last is one."""
    size = len(programs)
    schedule = Schedule(seed, size)
    clock = types.SimpleNamespace(monotonic=lambda: schedule.now, sleep=schedule.pause)
    monkeypatch.setattr(waiting, "time", clock)
    monkeypatch.setattr(waiting.os, "sched_yield", schedule.pause)
    monkeypatch.setattr(waiting, "_YIELDS", 1)
    monkeypatch.setattr(boards_module, "extension", lambda _: None, raising=False)
    boards, furthest = boards_of(size, schedule), [0]

    def be(rank):
        board = boards[rank]
        try:
            schedule.pause(schedule.random.uniform(0, 2e-3))
            for number, tag in enumerate(programs[rank]):
                if tag == MEET:
                    told = board.exchange("meet", b"%d %d" % (rank, number))
                    assert told == [b"%d %d" % (r, number) for r in range(size)], told
                else:
                    board.run_ahead("call", TELL if tag == QUIET else tag, (rank, number))
                    made = [each.calls.made for each in boards]
                    furthest[0] = max(furthest[0], max(made) - min(made))
                if tag == TELL:
                    told = board.listed_words(2)
                    assert told == [(r, number) for r in range(size)], told
        except (CollectiveMismatch, OpTimeout, RankFailure) as error:
            return f"{type(error).__name__}: {error}"
        return "out"

    return schedule.run(be, size), furthest[0]


def program(choice, count):
    return [choice.choice((MEET, 1, 2, 3, TELL)) for _ in range(count)]


@pytest.mark.parametrize("size", [2, 3])
def test_the_same_calls(size, monkeypatch):
    """Calls and meetings in any order: all ranks come to the end."""
    for seed in range(SEEDS):
        calls = [*program(random.Random(seed), 12), MEET]
        with monkeypatch.context() as patch:
            found, _ = outcomes(seed, [calls] * size, patch)
        assert found == ["out"] * size, seed


@pytest.mark.parametrize("size", [2, 3])
def test_one_rank_asks_what_the_others_say(size, monkeypatch):
    """What a rank says with its last call is there for one that comes late, however far it goes."""
    for seed in range(SEEDS):
        calls = [[TELL if rank == n % size else QUIET for n in range(12)] for rank in range(size)]
        programs = [[*own, *[1] * 2 * WINDOW] for own in calls]
        with monkeypatch.context() as patch:
            found, _ = outcomes(seed, programs, patch)
        assert found == ["out"] * size, seed


@pytest.mark.parametrize("size", [2, 3])
def test_one_rank_meets_where_others_call(size, monkeypatch):
    """All ranks raise what that one says, also where the others only make calls for long."""
    for seed in range(SEEDS):
        choice = random.Random(seed)
        calls, rest = program(choice, 6), choice.choice(([MEET], [3] * 2 * WINDOW))
        culprit = choice.randrange(size)
        programs = [
            [*calls, MEET, MEET] if rank == culprit else [*calls, 2, *rest] for rank in range(size)
        ]
        with monkeypatch.context() as patch:
            found, _ = outcomes(seed, programs, patch)
        wanted = f"CollectiveMismatch: [2], where rank {culprit} meets"
        assert found == [wanted] * size, seed


def test_no_rank_is_further_ahead_than_can_be_read(monkeypatch):
    calls = [1] * 3 * WINDOW
    with monkeypatch.context() as patch:
        found, furthest = outcomes(1, [calls, calls], patch)
    assert found == ["out"] * 2 and furthest < WINDOW


def test_of_a_rank_that_has_not_come_nothing_is_said():
    """Rank 0 runs ahead, rank 2 meets, and rank 1 is still on its way to either."""
    memory, told = mmap.mmap(-1, board_bytes(3)), []
    rows = [Rows(memory, rank=rank, size=3) for rank in range(3)]
    boards = [board_of(own, 3) for own in rows]
    for board in boards:
        board.let_run_ahead(lambda tags: told.append(tags) or CollectiveMismatch("differ"))
    boards[0].run_ahead("call", 7)
    with pytest.raises(CollectiveMismatch, match="differ"):
        boards[2].exchange("meet", b"")
    assert told == [{0: 7, 1: None}]
