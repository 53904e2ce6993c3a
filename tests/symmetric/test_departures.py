"""Which ranks' kernels send no more, as this rank's kernels are told: without a GPU.

The words that kernels would read are NumPy's, and the marks that a GPU would set are set by hand.
Boards are real; of three ranks the last ends in some way, and the others look.
"""

from __future__ import annotations

import gc
import mmap
import os
import select
import signal
import threading
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest

from mortal import Job, Raised
from shardmath.context import startup
from shardmath.errors import OpTimeout, RankFailure
from shardmath.group.liveness import PeerWatch
from shardmath.symmetric import departures as module
from shardmath.symmetric import structs, team
from shardmath.symmetric.board import Board
from shardmath.symmetric.departures import Departures, watch
from shardmath.symmetric.rows import Rows, board_bytes
from shardmath.symmetric.team import Team
from shardmath.symmetric.waiting import WaitPolicy

SIZE = 3
LAST = SIZE - 1
OTHERS = range(SIZE - 1)


class Dead(set):
    """A PeerWatch that is told who has died."""

    def dead(self):
        return frozenset(self)

    def pending(self):
        return []


def boards(size=SIZE):
    """The boards of all ranks in one process, and what watches their processes."""
    memory, dead = mmap.mmap(-1, board_bytes(size)), Dead()
    names = [f"pid {1000 + rank} on here" for rank in range(size)]
    made = [
        Board(
            Rows(memory, rank=rank, size=size),
            watch=dead,
            numbers=range(size),
            processes=names,
            policy=WaitPolicy(1.0, 100.0, 1),
        )
        for rank in range(size)
    ]
    return made, dead


def departures_of(board, *, can_mark=True):
    """With words of NumPy's; `words[-1] = 1` is what the GPU would do."""
    words = np.zeros(board.size + 1, np.uint64)
    return Departures(board, words, lambda: can_mark), words


# What the last rank does, in order, and for whom the others' kernels wait no more after each step.
ENDS = {
    "it dies": [(lambda it: it.dead.add(LAST), [0, 1, 2])],
    "it gives up": [(lambda it: it.board.fail("out of memory"), [0, 1, 2])],
    "it leaves": [
        (lambda it: it.board.leave(), []),
        (lambda it: it.departures.leave(), []),
        (lambda it: it.departures.look(), []),  # its kernels are at work
        (lambda it: it.words.__setitem__(SIZE, 1), []),
        (lambda it: it.departures.look(), [LAST]),
    ],
    "it leaves, and its process ends": [
        (lambda it: it.board.leave(), []),
        (lambda it: it.dead.add(LAST), [LAST]),
    ],
    "it is about to leave": [
        (lambda it: it.departures.leave(), []),
        (lambda it: it.words.__setitem__(SIZE, 1), []),
        (lambda it: it.departures.look(), [LAST]),
    ],
    "it gave up after another had left": [
        (lambda it: it.departures.ask(it.gave_up), []),
        (lambda it: it.departures.look(), []),  # nobody has left: its peers see for themselves
        (lambda it: it.departures._words.__setitem__(0, 1), []),
        (lambda it: it.departures.look(), [LAST]),
    ],
}


class Ending:
    """What the last rank ends with."""

    def __init__(self, board, dead):
        self.board, self.dead = board, dead
        self.departures, self.words = departures_of(board)

    def gave_up(self):
        return True

    def finish(self):
        self.words[SIZE] = 1
        self.departures.look()


@pytest.mark.parametrize("how", ENDS)
def test_for_whom_kernels_wait_no_more(how):
    made, dead = boards()
    ending = Ending(made[LAST], dead)
    others = [departures_of(made[rank])[0] for rank in OTHERS]
    for step, (act, gone) in enumerate(ENDS[how]):
        act(ending)
        for rank, each in zip(OTHERS, others, strict=True):
            assert each.look()
            assert each.gone() == [r for r in gone if r != rank], (step, rank)
    module._settle()


@pytest.mark.parametrize(
    ("acts", "working"),
    [
        ([], [True]),
        ([lambda it: it.dead.add(LAST)], [False]),
        ([lambda it: it.board.fail("out of memory"), lambda it: it.finish()], [True, False]),
        ([lambda it: it.board.leave(), lambda it: it.departures.leave()], [True, True]),
        (
            [lambda it: it.departures.leave(), lambda it: it.finish(), lambda it: it.finish()],
            [True, False, False],
        ),
        (
            [
                lambda it: it.departures.ask(it.gave_up),
                lambda it: it.departures._words.__setitem__(0, 1),
                lambda it: it.departures.look(),  # it sends no more, and may write
                lambda it: it.finish(),
            ],
            [True, True, True, False],
        ),
    ],
)
def test_whose_kernels_may_be_at_work(acts, working):
    made, dead = boards()
    ending = Ending(made[LAST], dead)
    for act, expected in zip(acts or [lambda it: None], working, strict=True):
        act(ending)
        for rank in OTHERS:
            assert (
                made[rank].peers.at_work()
                == [r for r in range(LAST) if r != rank] + [LAST] * expected
            )
    module._settle()


def test_who_leaves_waits_for_the_kernels_of_all():
    made, _ = boards()
    endings = [Ending(board, Dead()) for board in made]
    for ending in endings:
        ending.departures.leave()
    assert not endings[0].departures.wait(0.01)
    for ending in endings[1:]:
        ending.finish()
    assert not endings[0].departures.wait(0.01), "its own are at work"
    assert not endings[1].departures.wait(0.01)
    endings[0].words[SIZE] = 1
    assert all(ending.departures.wait(60.0) for ending in endings)


def test_a_mark_that_cannot_be_set_now_is_set_when_the_next_group_is_left():
    first, second = (boards()[0][0] for _ in range(2))
    asked = []
    able = SimpleNamespace(now=False)

    def set_mark():
        asked.append(able.now)
        return able.now

    waiting = Departures(first, np.zeros(SIZE + 1, np.uint64), set_mark)
    waiting.leave()  # during a capture, say
    waiting.drop()
    assert asked == [False]
    able.now = True
    departures_of(second)[0].leave()
    assert asked == [False, True]


# -- the thread ------------------------------------------------------------------------------------


def watching():
    """The thread, while there is one."""
    return module._watch().thread


def until(true):
    """Return once `true()`; the test's own limit is the only one."""
    while not true():
        select.select([], [], [], 0.002)


def ended():
    return watching() is None


def test_one_thread_watches_all_and_ends_with_the_last():
    until(ended)
    assert not any("departures" in thread.name for thread in threading.enumerate())
    watched = [departures_of(boards()[0][0]) for _ in range(3)]
    for departures, _ in watched:
        watch(departures)
    thread = watching()
    assert thread.daemon and thread.name == "shardmath: departures"
    assert sum("departures" in each.name for each in threading.enumerate()) == 1
    for _, words in watched[:2]:
        words[SIZE] = 1
    made, dead = boards()
    last, _ = departures_of(made[0])
    watch(last)
    dead.add(1)
    until(lambda: last.gone() == [1, 2])
    assert watching() is thread
    for words in (watched[2][1], last._words):
        words[SIZE] = 1
    until(ended)
    thread.join()
    again, words = departures_of(boards()[0][0])
    watch(again)
    assert watching() is not thread
    words[SIZE] = 1
    until(ended)


def test_a_forked_child_has_no_such_thread_and_can_start_its_own():
    departures, words = departures_of(boards()[0][0])
    watch(departures)
    departures.leave()
    pid = os.fork()
    if pid == 0:
        status = 1
        with suppress(BaseException):
            assert watching() is None and not module._left
            made, dead = boards()
            own, _ = departures_of(made[1])
            watch(own)
            dead.add(0)
            until(lambda: own.gone() == [0, 2])
            status = 0
        os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert watching() is not None
    words[SIZE] = 1
    until(ended)


def test_the_thread_leaves_signals_to_the_program():
    departures, words = departures_of(boards()[0][0])
    watch(departures)
    thread = watching()
    status = f"/proc/self/task/{thread.native_id}/status"

    def blocked():
        with open(status) as lines:  # noqa: PTH123
            masks = [line.split()[1] for line in lines if line.startswith("SigBlk")]
        return int(masks[0], 16)

    until(lambda: blocked() >> (signal.SIGINT - 1) & 1 and blocked() >> (signal.SIGTERM - 1) & 1)
    words[SIZE] = 1
    until(ended)


def waiting_process():
    """A process that ends when it reads a byte: its id, and where to write that."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(reading, 1)
        os._exit(0)
    os.close(reading)
    return pid, writing


def test_a_death_is_noticed_by_its_descriptor_not_by_the_clock(monkeypatch):
    monkeypatch.setattr(module, "PERIOD", 3600.0)
    processes = [waiting_process() for _ in range(2)]
    made, _ = boards()
    made[0].peers.watch = PeerWatch({rank: (pid, -1) for rank, (pid, _) in enumerate(processes, 1)})
    departures, words = departures_of(made[0])
    watch(departures)
    os.write(processes[0][1], b"x")
    until(departures.gone)
    words[SIZE] = 1
    os.write(processes[1][1], b"x")
    until(ended)
    made[0].peers.watch.close()
    for pid, writing in processes:
        os.waitpid(pid, 0)
        os.close(writing)


def test_a_watch_that_is_closed_knows_what_it_knew():
    pids = []
    for status in (0, 0):
        pid = os.fork()
        if pid == 0:
            if not pids:
                os._exit(status)
            signal.pause()
        pids.append(pid)
    os.waitid(os.P_PID, pids[0], os.WEXITED | os.WNOWAIT)
    peers = PeerWatch({0: (pids[0], -1), 1: (pids[1], -1)})
    assert peers.dead() == {0}
    assert len(peers.pending()) == 1
    peers.close()
    os.kill(pids[1], signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)
    descriptors = [os.open(os.devnull, os.O_RDONLY) for _ in range(8)]  # with the same numbers
    assert peers.dead() == {0} and peers.pending() == []
    for descriptor in descriptors:
        os.close(descriptor)


# -- ranks that are processes ----------------------------------------------------------------------


def leaves(context, departures):
    context.close()
    departures.leave()
    departures._words[SIZE] = 1


def is_dropped(context, departures):
    departures.drop()
    context._dropping()
    module._settle()
    departures._words[SIZE] = 1


FATES = {
    "killed": lambda context, departures: os.kill(os.getpid(), signal.SIGKILL),
    "exits": lambda context, departures: os._exit(3),
    "fails": lambda context, departures: context.board.fail("no such file"),
    "closes": leaves,
    "drops": is_dropped,
}
ALL_GONE = ("killed", "exits", "fails")


def meets_its_fate(group, fate, split):
    whole = startup.initialize("cpu", group)
    context = whole.split(0) if split else whole
    words = np.zeros(SIZE + 1, np.uint64)
    departures = Departures(context.board, words, lambda: True)
    watch(departures)
    whole.barrier()
    if context.rank == LAST:
        FATES[fate](context, departures)
        signal.pause()  # it stays, unless it has died
    until(departures.gone)
    words[SIZE] = 1
    until(ended)
    error = context.board.peers.silent_error([LAST])
    return departures.gone(), type(error).__name__, list(error.ranks), str(error)


@pytest.mark.parametrize("hosts", ["1", "3"])
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("fate", FATES)
def test_survivors_that_call_nothing_are_told(fate, split, hosts):
    variables = {"SHARDMATH_FAKE_HOSTS": hosts}
    with Job(SIZE, lambda group: meets_its_fate(group, fate, split), variables) as job:
        for rank in OTHERS:
            outcome = job.outcome(rank, timeout=60)
            assert not isinstance(outcome, Raised), outcome
            gone, kind, ranks, text = outcome
            everybody = [peer for peer in range(SIZE) if peer != rank]
            if fate in ALL_GONE:
                assert gone == everybody
            else:
                assert LAST in gone  # the other survivor may have ended meanwhile, too
            assert kind == "RankFailure" and LAST in ranks, text
            assert str(job.pids[LAST]) in text


# -- what is raised --------------------------------------------------------------------------------


def team_of(board, notes, monkeypatch):
    """A team whose kernels have waited in vain for the ranks of `notes`, in operations of these."""
    monkeypatch.setattr(team, "call", lambda *args: None)
    made = object.__new__(Team)
    made.rank, made.size, made.pads = board.rank, board.size, (0,) * board.size
    made.device = SimpleNamespace(ordinal=0, synchronize=lambda: None)
    made.broken, made._board = "", board
    made._notes = np.zeros(structs.gone_place(board.size) // 8, np.uint64)
    for rank, operation in notes.items():
        made._notes[0] = 1
        made._notes[1 + 3 * rank : 4 + 3 * rank] = operation, 5, 4
    return made


@pytest.mark.parametrize(
    ("act", "waited_for", "error", "blamed"),
    [
        (lambda b, dead: None, 1, OpTimeout, [1]),
        (lambda b, dead: b[2].leave(), 1, OpTimeout, [1]),  # nobody waits for who has left
        (lambda b, dead: dead.add(1), 1, RankFailure, [1]),
        (lambda b, dead: dead.add(2), 1, RankFailure, [2]),  # the cause, of a wait for another
        (lambda b, dead: b[2].fail("disk full"), 1, RankFailure, [2]),
        (lambda b, dead: (b[1].leave(), b[1].peers.end_kernels()), 1, RankFailure, [1]),
        (lambda b, dead: b[1].peers.end_kernels(), 1, RankFailure, [1]),
        (lambda b, dead: (b[2].leave(), b[1].peers.end_kernels()), 1, RankFailure, [2]),
    ],
)
def test_the_error_names_who_has_gone(act, waited_for, error, blamed, monkeypatch):
    made, dead = boards()
    act(made, dead)
    found = team_of(made[0], {waited_for: structs.OF_COLLECTIVE}, monkeypatch)
    assert found.gave_up_counts()
    with pytest.raises(error) as raised:
        found.check()
    assert list(raised.value.ranks) == blamed
    assert all(f"rank {rank}" in str(raised.value) for rank in (0, *blamed))
    if error is RankFailure:
        assert all(f"pid {1000 + rank}" in str(raised.value) for rank in blamed)
    assert found.gave_up_counts()  # its counts stay in no known state
    found.check()


def test_only_what_peers_count_on_is_given_up(monkeypatch):
    made, _ = boards()
    for operation, gives_up in [(structs.OF_SIGNAL, False), (structs.OF_PRODUCT, True), (0, False)]:
        found = team_of(made[0], {1: operation} if operation else {}, monkeypatch)
        assert found.gave_up_counts() is gives_up
    gc.collect()
