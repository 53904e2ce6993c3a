"""`shardmath trace`: what it writes of a job, and what it concludes from records."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

import pytest
from launched import write
from PIL import Image

from shardmath.base.recorder import RAISED, Operation
from shardmath.errors import BackendUnavailable
from shardmath.tools import drawing
from shardmath.tools.drawing import Bar, columns, timeline
from shardmath.tools.trace import (
    Done,
    bars,
    events,
    in_units,
    seconds_predicted,
    summaries,
    waits,
)

PROGRAM = """
import numpy as np
import shardmath
from shardmath.collectives import all_reduce
from shardmath.distribution import Slab
from shardmath.linalg.advanced import matmul

context = shardmath.initialize("cpu")
x, w = np.ones(Slab.X.shape(rank, (7, 8))), np.ones(Slab.X.shape(rank, (8, 5)))
for _ in range(300):
    y = matmul(x, w, distributions=[Slab.X] * 3)
total = all_reduce(y.sum())
if rank == {killed}:
    os.kill(os.getpid(), signal.SIGKILL)
shardmath.finalize()
"""


def traced(folder, *arguments, ranks=3):
    output = folder / "out.json"
    command = [sys.executable, "-m", "shardmath", "trace", "-n", str(ranks), "-o", str(output)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    if not output.exists():
        return done, []
    document = json.loads(output.read_text(), parse_constant=pytest.fail)  # JSON has no NaN
    require_trace(document)
    return done, document["traceEvents"]


# Metadata of the trace event format that viewers know, and what each says.
METADATA = {
    "process_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}
ROUNDING = 1e-3  # microseconds: viewers count nanoseconds


def require_trace(document):
    """Assert that it is what the trace event format asks for: fields, types, and nested boxes.

    Source: "Trace Event Format", of Chrome's trace viewer, which Perfetto imports: complete events
    (X) and metadata (M). Boxes of a thread that overlap without being nested it does not show.
    """
    assert document.keys() <= {"traceEvents", "displayTimeUnit"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    threads = {}
    for event in document["traceEvents"]:
        assert event["ph"] in ("X", "M") and isinstance(event["name"], str) and event["name"]
        assert type(event["pid"]) is int and event["pid"] > 0  # 0 is the idle process
        assert isinstance(event.get("args", {}), dict)
        if event["ph"] == "M":
            key, kind = METADATA[event["name"]]
            assert event["args"].keys() == {key} and type(event["args"][key]) is kind
            assert type(event.get("tid")) is int or event["name"].startswith("process")
        else:
            assert type(event["tid"]) is int and isinstance(event["cat"], str)
            times = [event["ts"], event["dur"]]
            assert all(type(time) in (int, float) and 0 <= time < 1e15 for time in times)
            threads.setdefault((event["pid"], event["tid"]), []).append((*times, event["name"]))
    numbers = [tid for _, tid in threads]
    assert len(set(numbers)) == len(numbers), "two processes have a thread of the same number"
    for boxes in threads.values():
        around = []
        for begun, long, name in sorted(boxes, key=lambda box: (box[0], -box[1])):
            while around and around[-1] <= begun + ROUNDING:
                around.pop()
            assert not around or begun + long <= around[-1] + ROUNDING, (name, begun)
            around.append(begun + long)


@pytest.mark.parametrize("killed", [-1, 1])
def test_a_job(tmp_path, killed):
    done, found = traced(tmp_path, write(tmp_path, PROGRAM.format(killed=killed)))
    assert (done.returncode == 0) == (killed < 0), done.stderr
    for rank in range(3):
        calls = [each for each in found if each["pid"] == rank + 1 and each.get("cat") == "call"]
        names = [each["name"] for each in calls][:303]
        assert names[:302] == ["initialize", *["matmul"] * 300, "all_reduce"]
        assert calls[1]["args"]["operands"].startswith(f"float64[{2 + (rank == 0)},8] ")
        assert all(each["args"]["line"] == "program.py:13" for each in calls[1:301])
        plans = [each["args"].get("plan", "") for each in calls[1:301]]
        assert "predicted" in plans[0]
        assert not any(plans[1:])
    assert "matmul" in done.stdout
    with Image.open(tmp_path / "out.png") as picture:
        assert picture.size[1] > 3 * 34


def test_the_last_operations_are_kept(tmp_path):
    done, found = traced(tmp_path, "--operations=1", write(tmp_path, PROGRAM.format(killed=-1)))
    assert len([each for each in found if each.get("cat") == "call"]) == 3 * 256
    assert done.stdout.count("were not kept") == 3


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("none.py",), 2, "no file"),
        (
            ("-o", "no/such/folder.json", "none.py"),
            1,
            "shardmath trace: No such file or directory: no/such/folder.json",
        ),
        (("-m", "this"), 0, "no rank has called"),
    ],
)
def test_nothing_to_write(tmp_path, arguments, status, says):
    done, found = traced(tmp_path, *arguments, ranks=1)
    assert (done.returncode, found) == (status, [])
    assert says in done.stderr


def test_a_traceback_begins_in_the_program(tmp_path):
    done, _ = traced(tmp_path, write(tmp_path, "1 / 0"), ranks=1)
    assert done.stderr.count("File ") == 1


# -- what follows from records ---------------------------------------------------------------------


def operation(number, begun, ended, name="sum", state=0, line=1, stream=0):
    return Operation(number, begun, ended, state, stream, 7, line, name, "f8[3]", "/a/b.py")


def of(*operations, plans=None):
    return Done(list(operations), plans or {})


WAITS = {
    "nobody": ([], {}),
    "one rank": ([of(operation(1, 0, 9))], {}),
    "for the last": (
        [of(operation(1, 0, 9)), of(operation(1, 5, 9)), of(operation(1, 3, 9))],
        {(0, 1): (1, 5), (2, 1): (1, 5)},
    ),
    "at once": ([of(operation(1, 4, 9)), of(operation(1, 4, 9))], {}),
    "one that has not come": ([of(operation(1, 0, 0)), of()], {}),
    "one that never ended": ([of(operation(1, 0, 0)), of(operation(1, 5, 0))], {(0, 1): (1, 5)}),
    "through before": ([of(operation(1, 0, 4)), of(operation(1, 5, 9))], {}),
    "other operations": ([of(operation(1, 0, 9)), of(operation(1, 5, 9, "max"))], {}),
    "other lines": (
        [of(operation(1, 0, 9)), of(operation(1, 5, 9, line=2))],
        {(0, 1): (1, 5)},
    ),
    "other numbers": ([of(operation(1, 0, 9)), of(operation(2, 5, 9))], {}),
}


@pytest.mark.parametrize(("ranks", "expected"), WAITS.values(), ids=WAITS.keys())
def test_waits(ranks, expected):
    assert waits(ranks) == expected


def test_events():
    ranks = [
        of(operation(1, 1000, 9000, stream=255), operation(2, 9000, 0)),
        of(operation(1, 3000, 8000, state=RAISED), plans={1: "a plan"}),
    ]
    require_trace(events(ranks))
    metadata = [each for each in events(ranks)["traceEvents"] if each["ph"] == "M"]
    calls = [each for each in events(ranks)["traceEvents"] if each["ph"] == "X"]
    assert {each["args"].get("name") for each in metadata} >= {"rank 0", "rank 1"}
    times = [(each["pid"], each["name"], each["ts"], each["dur"]) for each in calls]
    assert [(p, n, round(t, 6), round(d, 6)) for p, n, t, d in times] == [
        (1, "sum", 0, 8),
        (1, "wait for rank 1", 0, 2),
        (1, "sum", 8, 0),
        (2, "sum", 2, 5),
    ]
    assert len({each["tid"] for each in calls}) == 2  # each has one, with the same address
    said = [each["args"] for each in calls if "args" in each]
    assert said[0]["stream"] == "0xff"
    assert said[1]["ended"] == "no"
    assert (said[2]["left by"], said[2]["plan"]) == ("an exception", "a plan")
    assert events([]) == {"traceEvents": [], "displayTimeUnit": "ms"}


def test_summaries():
    ranks = [
        of(operation(1, 0, 9000), operation(2, 9000, 9500, "max"), plans={1: "predicted 2 us"}),
        of(operation(1, 4000, 9000), operation(2, 9000, 0, "max")),
    ]
    found = [(s.name, s.calls, s.seconds, s.without_waits, s.predicted) for s in summaries(ranks)]
    assert found == [
        ("sum", 2, pytest.approx(7e-6), pytest.approx(5e-6), pytest.approx(2e-6)),
        ("max", 1, pytest.approx(5e-7), pytest.approx(5e-7), None),
    ]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("chosen; predicted 878 us, 19 MFLOP", 878e-6),
        ("predicted: 1.5e+03 ms", 1.5),
        ("predicted 3 s", 3.0),
        ("predicted to be slower", None),
        ("", None),
    ],
)
def test_what_is_predicted(text, seconds):
    assert seconds_predicted(text) == (seconds and pytest.approx(seconds))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 ns"), (2e-9, "2 ns"), (0.0123456, "12.3 ms"), (999.6e-6, "1e+03 us"), (75, "75 s")],
)
def test_units(seconds, text):
    assert in_units(seconds) == text


# -- pictures --------------------------------------------------------------------------------------


def colour(image, x, y):
    return "#{:02x}{:02x}{:02x}".format(*image.getpixel((x, y)))


@pytest.mark.parametrize("most", [845.0, 1.0, 2.26, 9.99, 7e-3, 31])
def test_ticks_are_round_numbers(most):
    ticks = drawing._ticks(most)
    assert 4 <= len(ticks) <= drawing._TICKS + 1 and ticks[0] == 0
    steps = {round(b - a, 12) for a, b in itertools.pairwise(ticks)}
    assert len(steps) == 1 and f"{steps.pop():e}"[0] in "125"
    assert ticks[-1] <= most


def test_a_timeline_has_a_bar_where_something_was_done():
    image = timeline([Bar(0, 0, 1, "a"), Bar(1, 1, 2, "b"), Bar(1, 1, 1.5, "")], ["r", "s"])
    left = {colour(image, 200, y) for y in range(12, 46)}
    right = {colour(image, 1100, y) for y in range(46, 80)}
    assert drawing._COLOURS[0] in left
    assert drawing._COLOURS[1] in right
    assert drawing._WAIT in {colour(image, 700, y) for y in range(46, 80)}
    assert drawing._WAIT not in left | right
    assert timeline(bars([]), []).size[0] == image.size[0]


def test_columns_are_as_long_as_their_values():
    image = columns("seconds", [("one", 1.0), ("two", 2.0), ("none", 0.0)])
    lengths = [
        sum(colour(image, x, y) == drawing._COLOURS[0] for x in range(image.size[0]))
        for y in (50, 84, 118)
    ]
    assert abs(2 * lengths[0] - lengths[1]) <= 3
    assert lengths[2] <= 1
    other = columns("seconds", [("one", 1.0)], others=[("four", 4.0)])
    length = sum(colour(other, x, 50) == drawing._COLOURS[0] for x in range(other.size[0]))
    assert abs(2 * length - lengths[0]) <= 20  # names of other widths leave other room
    assert columns("nothing", []).size[0] == image.size[0]


def test_pictures_need_pillow(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(BackendUnavailable, match=r"shardmath\[plot\]"):
        columns("", [])
