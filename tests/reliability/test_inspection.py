"""The flight recorder, and the table that shows where all ranks are."""

import contextlib
import mmap
import os
import re
import select
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from mortal import ENDLESS, Job, left_behind
from shardmath.base import recorder
from shardmath.base.caller import PACKAGE
from shardmath.base.compiled import extension
from shardmath.base.recorder import (
    OPERATIONS,
    RAISED,
    Operation,
    Recorder,
    bytes_for,
    description,
    operations,
)
from shardmath.collectives import all_reduce
from shardmath.context import startup
from shardmath.errors import BootstrapError, OpTimeout, RankFailure
from shardmath.inspection import job as inspection
from shardmath.inspection.stacks import Frame
from shardmath.inspection.table import Seen, table

RANKS = 3
PATIENCE = 60


# -- what is recorded ------------------------------------------------------------------------------


def multiply(*_):
    """The name of an operation."""


@pytest.fixture(params=["compiled", "in Python"])
def recording(request, monkeypatch):
    """A recorder of its own, and its memory."""
    if request.param == "in Python":
        monkeypatch.setattr(recorder, "extension", lambda _: None)
    elif extension("shardmath.base._record") is None:
        pytest.skip("there was no compiler")
    memory, mine = mmap.mmap(-1, bytes_for(OPERATIONS)), Recorder()
    shared = recorder.this_process.memory
    mine.start(memory)
    yield mine, memory
    mine.stop()
    if shared is not None:
        recorder.this_process.start(shared)


def last(memory):
    return operations(bytes(memory))[-1]


OPERANDS = {
    "none": ((), ""),
    "arrays": ((np.ones((3, 0)), np.ones(7, "f4")[::2]), "[3,0] [4]"),
    "a number": ((np.float64(2), 3, "sum", None), "[]"),
    "what has a shape": ((SimpleNamespace(shape=(2, 1)),), "[2,1]"),
    "what has none": ((object(), SimpleNamespace(shape="round")), ""),
    "many": ((np.broadcast_to(1.0, (1111,) * 4),) * 9, None),
}


@pytest.mark.parametrize("what", OPERANDS)
def test_an_operation_from_its_begin_to_its_end(recording, what):
    mine, memory = recording
    arguments, expected = OPERANDS[what]
    mine.begin(multiply, arguments)
    begun = last(memory)
    assert (begun.number, begun.name, begun.ended) == (1, "multiply", 0)
    assert begun.begun > 0
    shapes = " ".join(f"[{each.partition('[')[2]}" for each in begun.operands.split())
    assert shapes == expected or (expected is None and begun.operands.count("1111") > 4)
    mine.on_stream(0xABC)
    mine.end()
    mine.on_stream(7)  # of no operation
    assert last(memory).ended >= begun.begun
    assert last(memory).stream == 0xABC
    mine.begin(multiply, ())
    mine.leave()
    mine.leave()  # none is under way
    assert [each.state for each in operations(bytes(memory))] == [0, RAISED]


def test_the_last_ones_are_kept(recording):
    mine, memory = recording
    for _ in range(OPERATIONS + 9):
        mine.begin(multiply, ())
        mine.end()
    assert [each.number for each in operations(bytes(memory))] == [*range(10, OPERATIONS + 10)]


@pytest.mark.parametrize("recording", ["compiled", "in Python"], indirect=True)
@pytest.mark.parametrize("count", [0, OPERATIONS, OPERATIONS + 1, 1000])
def test_a_longer_record_keeps_more(recording, count):
    mine, _ = recording
    longer = mmap.mmap(-1, bytes_for(count))
    mine.start(longer)
    for _ in range(1100):
        mine.begin(multiply, ())
        mine.end()
    kept = [each.number for each in operations(bytes(longer))]
    mine.stop()
    assert kept == [*range(1101 - len(kept), 1101)]
    assert len(kept) == (OPERATIONS if count <= OPERATIONS else 2 * OPERATIONS * (1 + count // 600))


def test_threads_end_their_own(recording):
    mine, memory = recording
    mine.begin(multiply, ())
    other = threading.Thread(target=lambda: (mine.begin(multiply, ()), mine.end()))
    other.start()
    other.join()
    assert [each.ended > 0 for each in operations(bytes(memory))] == [False, True]
    mine.end()
    assert [each.ended > 0 for each in operations(bytes(memory))] == [True, True]


def test_what_a_process_tells_of_itself(recording):
    mine, memory = recording
    assert description(bytes(memory)) == {}
    mine.describe({"rank": 2, "host": "node7"})
    assert description(bytes(memory)) == {"rank": 2, "host": "node7"}
    mine.describe({"pids": "x" * recorder.HEAD_BYTES})  # there is no room for it
    assert description(bytes(memory)) == {"rank": 2, "host": "node7"}


# -- the table -------------------------------------------------------------------------------------


def operation(number, name="all_reduce", ended=0, state=0):
    seconds = 10**9
    return Operation(
        number, 2 * seconds, ended * seconds, state, 0, 1, 31, name, "f4[3]", "/a/x.py"
    )


ON_A_GPU = operation(7)._replace(stream=0xABC)
OURS = Frame(f"{PACKAGE[0]}context/startup.py", 1, "start")
ASLEEP = Seen(2, 13, operation(6, ended=3), stack=[Frame("/a/data.py", 40, "load")])
WAITING = [Seen(0, 11, operation(7)), Seen(1, 12, operation(7))]
TABLES = {
    "one is missing": (
        [*WAITING, ASLEEP],
        """\
rank  pid  #  operation                since  at
   0   11  7  all_reduce f4[3]         5.0 s  x.py:31
   1   12  7  all_reduce f4[3]         5.0 s  x.py:31
   2   13  6  after: all_reduce f4[3]  4.0 s  data.py:40
missing: rank 2 (pid 13)
  /a/data.py:40 in load""",
    ),
    "one has died": (
        [WAITING[0], Seen(1, 12, operation(6), "died")],
        """\
rank  pid  #  operation                       since  at
   0   11  7  all_reduce f4[3]                5.0 s  x.py:31
   1   12  6  died; last in all_reduce f4[3]  5.0 s
missing: rank 1 (pid 12), which died""",
    ),
    "different operations": (
        [Seen(0, 11, ON_A_GPU), Seen(1, 12, operation(7, "fft"))],
        """\
rank  pid  #  operation                         since  at
   0   11  7  all_reduce f4[3] on stream 0xabc  5.0 s  x.py:31
   1   12  7  fft f4[3]                         5.0 s  x.py:31
the ranks are in different operations: all_reduce, fft""",
    ),
    "none is in an operation, one was left, one is elsewhere": (
        [
            Seen(0, 11),
            Seen(1, 12, operation(7, ended=7, state=RAISED)),
            Seen(2, 13, elsewhere="far"),
            Seen(3, 14, stack=[OURS, *ASLEEP.stack]),
            Seen(4, 15, stack=[OURS]),
        ],
        """\
rank  pid  #  operation                                 since  at
   0   11     none so far
   1   12  7  left by an exception: all_reduce f4[3]  0.00 ms
   2   13     far
   3   14     none so far                                      data.py:40
   4   15     none so far                                      startup.py:1""",
    ),
}


@pytest.mark.parametrize("what", TABLES)
def test_tables(what):
    ranks, expected = TABLES[what]
    assert table(ranks, 7 * 10**9) == expected


# -- ranks -----------------------------------------------------------------------------------------


def asleep():
    while True:
        signal.pause()


def hang(group):
    """Rank 2 sleeps where the others reduce."""
    context = startup.initialize("cpu", group)
    for _ in range(4):
        all_reduce(np.ones(3))
    if context.rank == 2:
        asleep()
    all_reduce(np.ones(3))


def seen(pid, *words):
    """The table of a job, as soon as it has all of these words."""
    for _ in range(100 * PATIENCE):
        try:
            text = inspection.inspected(pid)
        except BootstrapError as error:
            text = str(error)
        if all(word in text for word in words):
            return text
        select.select([], [], [], 0.01)
    raise AssertionError(text)


@pytest.mark.parametrize("way", ["compiled", "in Python"])
def test_who_is_where_as_seen_from_outside(way):
    variables = ENDLESS if way == "compiled" else ENDLESS | {"SHARDMATH_COMPILED": "0"}
    with left_behind(), Job(RANKS, hang, variables) as job:
        lines = seen(job.pids[1], "missing: rank 2", "in asleep", "all_reduce").splitlines()
        assert lines[0].startswith("3 of 3 ranks, on ")
        for rank in (0, 1):
            assert str(job.pids[rank]) in lines[2 + rank]
            assert "all_reduce" in lines[2 + rank] and "[3]" in lines[2 + rank]
            assert "test_inspection.py:" in lines[2 + rank]
        assert "after: all_reduce" in lines[4]
        assert "    signal.pause()" in lines[6:]
        assert not [line for line in lines[5:] if line.startswith("missing")][1:]
        job.signal(2, signal.SIGSTOP)
        assert "missing: rank 2" in seen(job.pids[0], "is stopped; last in all_reduce")
        job.signal(2, signal.SIGKILL)
        for rank in (0, 1):
            assert job.outcome(rank).kind == "RankFailure"


def test_a_process_that_is_no_rank():
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        with pytest.raises(BootstrapError, match=f"process {other.pid} is no rank"):
            inspection.inspected(other.pid)
        command = [sys.executable, "-m", "shardmath", "inspect", str(other.pid)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        other.stdin.close()
    assert done.returncode == 1 and "is no rank" in done.stderr


def test_the_dead_are_known_by_what_they_did_last():
    def body(group):
        context = startup.initialize("cpu", group)
        for _ in range(4):
            all_reduce(np.ones(3))
        if context.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        shown = []
        context._runtime.job.print = shown.append
        try:
            all_reduce(np.ones(3))
        except RankFailure:
            context.show("asked")
        return shown

    with Job(RANKS, body, ENDLESS) as job:
        shown = job.outcome(0) + job.outcome(1)
    assert any("died; last in all_reduce float64[3]" in text for text in shown), shown


def test_one_rank_shows_the_table_where_time_is_up(tmp_path):
    """And none raises before it is shown: that may end the job."""
    path = tmp_path / "shown"

    def body(group):
        context = startup.initialize("cpu", group)
        shown = []

        def show(text):
            select.select([], [], [], 0.1)
            path.touch()
            shown.append(text)

        context._runtime.job.print = show
        part = context.split(context.rank // 2)
        if context.rank == 2:
            asleep()
        try:
            part.barrier()
            all_reduce(1)
        except OpTimeout:
            assert path.exists()
        return shown

    with Job(RANKS, body, {"SHARDMATH_TIMEOUT": "0.3", "SHARDMATH_NOTICE": "100"}) as job:
        shown = job.outcome(0) + job.outcome(1)
    assert len(shown) == 1, shown
    assert "has waited too long" in shown[0] and "missing: rank 2" in shown[0]


def test_ctrl_c_shows_who_is_missing():
    def body(group):
        signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest's may be ignored
        context = startup.initialize("cpu", group)
        shown = []
        context._runtime.job.print = shown.append
        if context.rank == 2:
            asleep()
        with contextlib.suppress(KeyboardInterrupt, RankFailure):
            all_reduce(np.ones(3))
        return shown

    with Job(RANKS, body, ENDLESS) as job:
        seen(job.pids[0], "missing: rank 2", f"{job.pids[1]}  1  all_reduce")
        job.signal(0, signal.SIGINT)
        shown = job.outcome(0)
    assert len(shown) == 1, shown
    assert "rank 0 in all_reduce" in shown[0] and "was interrupted" in shown[0]
    assert "missing: rank 2" in shown[0] and "in asleep" in shown[0]
    assert "missing: rank 1" not in shown[0]  # which has not heard of it by then


def test_a_number_that_is_another_process_here():
    """As in another namespace of processes, where a peer's number may be this rank's own."""

    def body(group):
        startup.initialize("cpu", group)
        shown, numbers = [], [os.getpid()] * 2
        job = inspection.Job(0, numbers, [inspection.start()] * 2, [0, 1], "here")
        job.print = shown.append
        job.show("asked")
        return shown

    with Job(1, body, ENDLESS) as job:
        (text,) = job.outcome(0)
    assert re.search(r"\n   1 +\d+ +not seen here", text), text


SCRIPT = """
import signal
import sys
import numpy as np
import shardmath
from shardmath.collectives import all_reduce

context = shardmath.initialize("cpu")
for _ in range(4):
    all_reduce(np.ones(3))
if context.rank == 2:
    while True:
        signal.pause()
all_reduce(np.ones(3))
"""


def read_until(stream, word):
    text = ""
    while word not in text:
        line = stream.readline()
        assert line, text
        text += line
    return text


def hear():
    """Ignore none of the signals that are sent: pytest may have been started in the background."""
    for signum in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_DFL)


def test_a_notice_a_signal_and_ctrl_c(tmp_path):
    """On a launched job: the launcher passes SIGQUIT on, and is looked into as its ranks are."""
    script = tmp_path / "hang.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "shardmath", "run", "-n", "3", str(script)]
    variables = dict(os.environ) | ENDLESS | {"SHARDMATH_NOTICE": "0.1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command,
        env=variables,
        stderr=pipe,
        text=True,
        preexec_fn=hear,  # noqa: PLW1509
    ) as launcher:
        text = read_until(launcher.stderr, "signal.pause()")
        assert "waiting for rank 2" in text and "missing: rank 2" in text
        assert text.count("where the ranks are") == 1
        assert "its last operation was all_reduce)" in text
        number, pid = re.search(r", #(\d+), pid (\d+)", text).groups()
        assert re.search(rf" {pid} +{number}  ", text), text  # the table counts alike
        assert "missing: rank 2" in seen(launcher.pid, "missing")
        asking = threading.Event()

        def ask():
            while not asking.wait(0.2):
                launcher.send_signal(signal.SIGQUIT)

        thread = threading.Thread(target=ask)
        thread.start()
        text = read_until(launcher.stderr, "asked by SIGQUIT")
        text = read_until(launcher.stderr, "signal.pause()")
        assert "stacks.py" not in text  # also where the missing rank itself shows the table
        asking.set()
        thread.join()
        launcher.send_signal(signal.SIGINT)
        rest = launcher.stderr.read()
    assert launcher.returncode == 130
    assert "ended by SIGINT; in no operation: rank 2\nTraceback" in rest
    assert rest.count("signal.pause()") >= 1


def test_a_program_that_has_these_signals_keeps_them():
    code = """
import signal, sys, os
mine = lambda *_: print("mine", flush=True)
signal.signal(signal.SIGQUIT, mine)
signal.signal(signal.SIGURG, mine)
import shardmath
shardmath.initialize("cpu")
os.kill(os.getpid(), signal.SIGQUIT)
os.kill(os.getpid(), signal.SIGURG)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["mine", "mine"]


def test_sigquit_ends_a_process_whose_contexts_have_ended():
    code = """
import resource, shardmath, signal, os
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
shardmath.initialize("cpu")
os.kill(os.getpid(), signal.SIGQUIT)
shardmath.finalize()
print("still here", flush=True)
os.kill(os.getpid(), signal.SIGQUIT)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=hear)
    assert (done.stdout, done.returncode) == ("still here\n", -signal.SIGQUIT)
