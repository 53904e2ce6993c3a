"""Ranks that give up while a late one arrives: all come out of a round or a barrier, or none does.
Ranks that only meet: nobody is taken for one that called something else.

The ranks are threads of one process, of which one runs at a time: at every load and store of a
shared word a schedule of a fixed seed says which runs next, on a clock of its own.
"""

from __future__ import annotations

import mmap
import random
import threading
import types
from functools import partial

import pytest

from shardmath.errors import OpTimeout, RankFailure
from shardmath.symmetric import board, waiting
from shardmath.symmetric.board import Board
from shardmath.symmetric.rows import ROW_BYTES, Rows, board_bytes
from shardmath.symmetric.waiting import WaitPolicy

LIMIT = 0.03  # of the schedule's seconds
SEEDS = 60


class Schedule:
    """Says which of the threads runs, and what time it is."""

    def __init__(self, seed: int, count: int, stays: float = 0.0) -> None:
        """`stays`: how probably the thread that runs goes on, where it might be another's turn."""
        self.random, self._stays = random.Random(seed), stays
        self.now = 0.0
        self._step = self.random.choice((2e-6, 2e-5, 2e-4))  # at most, of one load or store
        self._wakes = dict.fromkeys(range(count), 0.0)  # by thread: when it can go on
        self._turns = [threading.Semaphore(0) for _ in range(count)]
        self._local = threading.local()

    def run(self, body, count: int) -> list:
        """What `body(number)` returns in each of so many threads, or the exception it raises."""
        found = [None] * count

        def be(number: int) -> None:
            self._start(number)
            try:
                found[number] = body(number)
            except BaseException as error:
                found[number] = error
            finally:
                self._end()

        threads = [threading.Thread(target=be, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        self._begin()
        for thread in threads:
            thread.join()
        return found

    def _start(self, number: int) -> None:
        """Make the calling thread that of this number, and let it wait for its turn."""
        self._local.number = number
        self._turns[number].acquire()

    def pause(self, seconds: float = 0.0) -> None:
        """Let others run for so long, and as long as it pleases."""
        own = self._local.number
        self.now += self.random.uniform(0, self._step)
        self._wakes[own] = self.now + seconds
        if not seconds and self.random.random() < self._stays:
            return
        if (chosen := self._chosen()) != own:
            self._turns[chosen].release()
            self._turns[own].acquire()

    def _end(self) -> None:
        """Let the others run from now on."""
        del self._wakes[self._local.number]
        self._begin()

    def _begin(self) -> None:
        """Let some thread run."""
        if self._wakes:
            self._turns[self._chosen()].release()

    def _chosen(self) -> int:
        self.now = max(self.now, min(self._wakes.values()))
        return self.random.choice([n for n, wake in self._wakes.items() if wake <= self.now])


class Word:
    """The words of a row: who loads or stores one lets the schedule choose who runs next."""

    def __init__(self, words: memoryview[int], schedule: Schedule) -> None:
        self._words, self._schedule = words, schedule

    def __getitem__(self, index: int) -> int:
        self._schedule.pause()
        return self._words[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._schedule.pause()
        self._words[index] = value


class SlowRows(Rows):
    """Rows of ranks of two hosts: those of the own host are seen at once, messages take a while."""

    needs_polling = True

    def __init__(self, memories, schedule, *, rank, size):
        super().__init__(memories[rank], rank=rank, size=size)
        self._random, self._unsent, self._arriving = schedule.random, [], {}
        self._elsewhere = [r for r in range(size) if memories[r] is not memories[rank]]
        for peer in self._elsewhere:
            self.bytes[peer] = memoryview(bytearray(ROW_BYTES))
            self.words[peer] = self.bytes[peer].cast("Q")
            self._arriving[peer] = []

    def write(self, place, data):
        super().write(place, data)
        self._unsent.append((place, bytes(data)))

    def publish(self, word, value):
        super().publish(word, value)
        message, self._unsent = [*self._unsent, (8 * word, value.to_bytes(8, "little"))], []
        for peer in self._elsewhere:
            self.everybody[peer]._arriving[self.rank].append(message)

    def poll(self):
        for peer, messages in self._arriving.items():
            while messages and self._random.random() < 0.2:
                for place, data in messages.pop(0):
                    self.bytes[peer][place : place + len(data)] = data


def boards_of(schedule, size, limit, patch, hosts=None):
    """The boards of ranks that are threads of a schedule, on one host or on these."""
    clock = types.SimpleNamespace(monotonic=lambda: schedule.now, sleep=schedule.pause)
    patch.setattr(waiting, "time", clock)
    patch.setattr(waiting.os, "sched_yield", schedule.pause)
    patch.setattr(waiting, "_YIELDS", 1)
    patch.setattr(board, "extension", lambda _: None)  # the schedule sees Python's loads
    memories = [mmap.mmap(-1, board_bytes(size)) for _ in range(1 + max(hosts or [0]))]
    if hosts is None:
        memory = memories[0]
        pages = [Rows(memory, rank=r, size=size) for r in range(size)]
    else:
        own = [memories[host] for host in hosts]
        pages = [SlowRows(own, schedule, rank=r, size=size) for r in range(size)]
    boards = []
    for rows in pages:
        rows.words = [Word(words, schedule) for words in rows.words]
        rows.everybody = pages
        boards.append(
            Board(
                rows,
                watch=None,
                numbers=range(size),
                processes=[f"pid {r}" for r in range(size)],
                policy=WaitPolicy(limit, notice=100, spin=0.0),
            )
        )
    return boards


def outcomes(seed, size, operation, monkeypatch):
    """What the ranks' calls did, where some arrive when the others give up."""
    schedule = Schedule(seed, size)
    boards = boards_of(schedule, size, LIMIT, monkeypatch)
    late = set(schedule.random.sample(range(size), schedule.random.randrange(1, size)))
    starts = [
        LIMIT + schedule.random.uniform(-2e-3, 4e-3) if rank in late else 0.0
        for rank in range(size)
    ]

    def call(rank):
        schedule.pause(starts[rank] + schedule.random.uniform(0, 2e-3))
        try:
            if operation == "barrier":
                boards[rank].barrier()
                return "out"
            told = boards[rank].exchange("told", b"%d" % rank)
            return "out" if told == [b"%d" % r for r in range(size)] else told
        except (OpTimeout, RankFailure):
            return "raised"

    return schedule.run(call, size)


@pytest.mark.parametrize("operation", ["exchange", "barrier"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_come_out_or_none(size, operation, monkeypatch):
    seen = {"out": 0, "raised": 0}
    for seed in range(SEEDS):
        with monkeypatch.context() as patch:
            found = outcomes(seed, size, operation, patch)
        assert len(set(found)) == 1, (seed, found)
        seen[found[0]] += 1
    assert min(seen.values()) > SEEDS // 20, seen  # both happen, or the schedules show nothing


def meetings(seed, hosts, monkeypatch):
    """What ranks of these hosts saw, each of which calls one thing after another, and leaves."""
    size = len(hosts)
    schedule = Schedule(seed, size, stays=0.9)
    boards = boards_of(schedule, size, 100.0, monkeypatch, hosts)
    slots = Word([0] * size, schedule)

    def call(rank):
        before, behind = (rank - 1) % size, (rank + 1) % size
        for number in range(1, 4):
            boards[rank].barrier()
            slots[behind] = number
            arrived = partial(lambda number: slots[rank] == number, number)
            boards[rank].wait(arrived, lambda: [before], "signal")
            boards[rank].exchange("told", b"%d" % rank)
        boards[rank].leave()
        return "out"

    return schedule.run(call, size)


@pytest.mark.parametrize("hosts", [[0, 0, 0], [0, 0, 1], [0, 0, 1, 1]], ids=str)
def test_who_goes_on_or_leaves_has_come_before(hosts, monkeypatch):
    """A rank sees that a peer has gone on before it sees that the peer, or a third, has come."""
    for seed in range(SEEDS):
        with monkeypatch.context() as patch:
            assert meetings(seed, hosts, patch) == ["out"] * len(hosts), seed
