"""`shardmath trace`: what it writes of a job, and what it concludes from records."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from launched import write
from PIL import Image

from shardmath.base.recorder import RAISED, Operation, Site
from shardmath.base.spans import Span
from shardmath.errors import BackendUnavailable
from shardmath.tools import drawing, kernels
from shardmath.tools.drawing import Bar, columns, timeline
from shardmath.tools.kernels import Collector, Work, lanes, short, works_of
from shardmath.tools.trace import (
    Done,
    Wait,
    bars,
    covered,
    events,
    in_units,
    seconds_predicted,
    summaries,
    waits,
)

PROGRAM = """
import numpy as np
import shardmath
from shardmath.collectives import all_gather, all_reduce
from shardmath.distribution import Slab, redistribute
from shardmath.fft import fft
from shardmath.linalg.advanced import matmul

context = shardmath.initialize("cpu")
x, w = np.ones(Slab.X.shape(rank, (7, 8))), np.ones(Slab.X.shape(rank, (8, 5)))
for _ in range(300):
    y = matmul(x, w, distributions=[Slab.X] * 3)
total = all_reduce(y.sum())
for rows, columns in ((7, 8), (70, 90)):  # the first are sent along when the ranks agree
    a = np.ones(Slab.X.shape(rank, (rows, columns)))
    redistribute(a, Slab.X, Slab.Y)
    all_gather(a)
fft(a + 0j, distribution=Slab.X)
all_reduce(np.ones(300_000))
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


@pytest.mark.parametrize(("killed", "ranks"), [(-1, 3), (1, 2)])
def test_a_job(tmp_path, killed, ranks):
    script = write(tmp_path, PROGRAM.format(killed=killed))
    done, found = traced(tmp_path, script, ranks=ranks)
    assert (done.returncode == 0) == (killed < 0), done.stderr
    of_ranks = []
    for rank in range(ranks):
        boxes = [each for each in found if each["pid"] == rank + 1 and each["ph"] == "X"]
        of_ranks.append(boxes)
        calls = [each for each in boxes if each["cat"] == "call"]
        names = [each["name"] for each in calls]
        both = ["redistribute", "all_gather"]
        after = ["all_reduce", *both, *both, "fft", "all_reduce"]
        assert names[:308] == ["initialize", *["matmul"] * 300, *after]
        first = f"float64[{len(range(rank, 7, ranks))},8] "
        assert calls[1]["args"]["operands"].startswith(first)
        assert all(each["args"]["line"] == "program.py:14" for each in calls[1:301])
        plans = [each["args"].get("plan", "") for each in calls[1:301]]
        assert "predicted" in plans[0]
        assert not any(plans[1:])
    require_volumes(of_ranks)
    assert "matmul" in done.stdout
    with Image.open(tmp_path / "out.png") as picture:
        assert picture.size[1] > 2 * ranks * 34


def is_within(box, call):
    return 0 <= box["ts"] - call["ts"] <= call["dur"] - box["dur"] + ROUNDING


def require_volumes(of_ranks):
    """Assert that the copies in a trace of PROGRAM, by rank, move what the program exchanges, when
    all ranks have come.
    """
    size = len(of_ranks)
    inner = {}  # by number of the call, and rank: the boxes inside the call
    begun = {}  # by number of the call: when the last rank began it
    for rank, boxes in enumerate(of_ranks):
        calls = [each for each in boxes if each["cat"] == "call"]
        for call in calls:
            number = call["args"]["number"]
            begun[number] = max(begun.get(number, 0), call["ts"])
        for each in boxes:
            if each["cat"] in ("copy", "compute"):
                holds = [x for x in calls if is_within(each, x)]
                assert len(holds) == 1, each
                inner.setdefault((holds[0]["args"]["number"], rank), []).append(each)

    def read(number, rank, name=None):
        found = {}
        for each in inner.get((number, rank), ()):
            if name in (None, each["name"]):
                for peer, nbytes in each.get("args", {}).get("read from", {}).items():
                    assert each["ts"] >= begun[number], each  # one clock: all ranks had come
                    found[peer] = found.get(peer, 0) + nbytes
        return found

    for number, rows, width in ((303, 7, 8), (305, 70, 90)):
        for rank in range(size):
            heights = {f"rank {peer}": len(range(peer, rows, size)) for peer in range(size)}
            del heights[f"rank {rank}"]
            columns = len(range(rank, width, size))
            assert read(number, rank) == {peer: 8 * n * columns for peer, n in heights.items()}
            assert read(number + 1, rank) == {peer: 8 * n * width for peer, n in heights.items()}
    for rank in range(size):
        names = {name: {x["name"] for x in inner[name, rank]} for name in (2, 307)}
        assert "multiply" in names[2] and "transform" in names[307]
    for name in ("reduce", "copy results"):  # in two shots, each element goes to each peer once
        total = sum(sum(read(308, rank, name).values()) for rank in range(size))
        assert total == (size - 1) * 8 * 300_000


def test_the_last_operations_are_kept(tmp_path):
    done, found = traced(
        tmp_path, "--operations=1", write(tmp_path, PROGRAM.format(killed=-1)), ranks=2
    )
    assert len([each for each in found if each.get("cat") == "call"]) == 2 * 256
    assert min(each["ts"] for each in found if "ts" in each) == 0
    assert done.stdout.count("were not kept") == 2


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


SITES = (
    Site("copy from rank 1", "copy", 24, read=((1, 24),)),
    Site("multiply", "compute"),
    Site("barrier", "wait"),
)


def of(*operations, plans=None, spans=(), works=()):
    return Done(list(operations), plans or {}, [Span(*each, 7) for each in spans], SITES, works)


WAITS = {
    "nobody": ([], {}),
    "one rank": ([of(operation(1, 0, 9))], {}),
    "for the last": (
        [of(operation(1, 0, 9)), of(operation(1, 5, 9)), of(operation(1, 3, 9))],
        {(0, 1): (1, 0, 5), (2, 1): (1, 3, 5)},
    ),
    "when it is ready": (
        [of(operation(1, 0, 9), spans=[(1, 3, 0), (6, 8, 1)]), of(operation(1, 5, 9))],
        {(0, 1): (1, 3, 5)},
    ),
    "ready after the last": (
        [of(operation(1, 0, 9), spans=[(1, 6, 1)]), of(operation(1, 5, 9))],
        {},
    ),
    "at once": ([of(operation(1, 4, 9)), of(operation(1, 4, 9))], {}),
    "one that has not come": ([of(operation(1, 0, 0)), of()], {}),
    "one that never ended": ([of(operation(1, 0, 0)), of(operation(1, 5, 0))], {(0, 1): (1, 0, 5)}),
    "through before": ([of(operation(1, 0, 4)), of(operation(1, 5, 9))], {}),
    "other operations": ([of(operation(1, 0, 9)), of(operation(1, 5, 9, "max"))], {}),
    "other lines": (
        [of(operation(1, 0, 9)), of(operation(1, 5, 9, line=2))],
        {(0, 1): (1, 0, 5)},
    ),
    "other numbers": ([of(operation(1, 0, 9)), of(operation(2, 5, 9))], {}),
}


@pytest.mark.parametrize(("ranks", "expected"), WAITS.values(), ids=WAITS.keys())
def test_waits(ranks, expected):
    assert waits(ranks) == {key: Wait(*wait) for key, wait in expected.items()}


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
    inside = [(4000, 4500, 2), (5000, 6000, 0), (5500, 7000, 0), (7000, 8000, 1), (9100, 9300, 0)]
    kernel = Work("void k<int>(int*)", "kernel", 7500, 9500, 0, 7, 0, launched=5000)
    ranks = [
        of(operation(1, 0, 9000), operation(2, 9000, 9500, "max"), plans={1: "predicted 2 us"}),
        of(operation(1, 4000, 9000), operation(2, 9000, 0, "max"), spans=inside, works=[kernel]),
    ]
    found = [
        (s.name, s.calls, *[None if x is None else round(1e9 * x) for x in s[4:]])
        for s in summaries(ranks)
    ]
    assert found == [
        ("sum", 2, 7000, (9000 - 4000 + 5000 - 500) // 2, 1000, 1250, 2000),
        ("max", 1, 500, 500, 0, 0, None),
    ]
    assert covered([(3, 5), (1, 2), (4, 6), (4, 5)]) == 4


# What Kineto exports of a rank, less what is not read: times are microseconds from a base on.
KINETO = {
    "baseTimeNanoseconds": 1_000_000_000,
    "displayTimeUnit": "ms",
    "traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "python"}},
        {
            **{"ph": "X", "cat": "cuda_runtime", "name": "cudaMemcpyAsync", "pid": 9, "tid": 9},
            **{"ts": 2.0, "dur": 1.5, "args": {"cbid": 41, "correlation": 5}},
        },
        {
            **{"ph": "X", "cat": "cuda_driver", "name": "cuLaunchKernel", "pid": 9, "tid": 9},
            **{"ts": 4.5, "dur": 0.5, "args": {"cbid": 307, "correlation": 6}},
        },
        {"ph": "s", "id": 6, "cat": "ac2g", "name": "ac2g", "pid": 9, "tid": 9, "ts": 4.5},
        {
            **{"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoD (Device -> Device)"},
            **{"pid": 1, "tid": 13, "ts": 6.25, "dur": 3.0},
            "args": {"device": 1, "stream": 13, "correlation": 5, "bytes": 4096},
        },
        {
            **{"ph": "X", "cat": "kernel", "name": "void ours::(anonymous namespace)::k<3>(int*)"},
            **{"pid": 1, "tid": 7, "ts": 8.0, "dur": 2.0},
            "args": {"device": 1, "stream": 7, "correlation": 6, "grid": [1, 1, 1]},
        },
        {
            **{"ph": "X", "cat": "kernel", "name": "in_a_graph", "pid": 1, "tid": 7, "ts": 9.0},
            **{"dur": 2.0, "args": {"device": 1, "stream": 7, "correlation": 99}},
        },
        {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": 0, "ts": 0, "dur": 99},
    ],
}


class Profile:
    """Stands for torch's profiler, which has collected KINETO."""

    def __init__(self, activities):
        assert activities == ["cuda"]
        self.did = []

    def start(self):
        self.did.append("start")

    def stop(self):
        self.did.append("stop")

    def export_chrome_trace(self, path):
        assert self.did == ["start", "stop"]
        Path(path).write_text(json.dumps(KINETO))


def refused(activities):
    raise RuntimeError("CUPTI is taken")


@pytest.mark.parametrize(
    ("activities", "profile", "says"),
    [
        (["cuda"], Profile, None),
        (["cpu"], Profile, "kernels are not shown: this torch is built without CUDA's profiler"),
        (["cuda"], refused, "kernels are not shown: CUPTI is taken"),
        (None, None, 'kernels are shown by torch\'s profiler: pip install "shardmath[torch]"'),
    ],
)
def test_collecting_what_a_gpu_does(monkeypatch, activities, profile, says):
    flags, told = [], []
    torch, ranges = ModuleType("torch"), ModuleType("torch.autograd.profiler")
    torch.profiler = SimpleNamespace(
        ProfilerActivity=SimpleNamespace(CUDA="cuda"),
        supported_activities=lambda: activities,
        profile=profile,
    )
    ranges._set_is_profiler_enabled = flags.append
    monkeypatch.setitem(sys.modules, "torch", torch if activities else None)
    monkeypatch.setitem(sys.modules, "torch.autograd", ModuleType("torch.autograd"))
    monkeypatch.setitem(sys.modules, "torch.autograd.profiler", ranges)
    monkeypatch.setattr(kernels, "realtime_minus_monotonic", lambda: 999_990_000)
    collector = Collector(told.append)
    for _ in range(2):  # with each context
        collector.start()
    for _ in range(2):
        collector.stop()
    if says is None:
        assert (told, flags) == (works_of(KINETO, 999_990_000), [False])
    else:
        assert told == [says] and not flags


def test_what_a_gpu_did():
    works = works_of(KINETO, 999_990_000)  # by which CLOCK_REALTIME is ahead
    copy, kernel, beside = works
    assert copy == ("Memcpy DtoD (Device -> Device)", "copy", 16250, 19250, 1, 13, 4096, 12000)
    assert (kernel.begun, kernel.ended, kernel.launched) == (18000, 20000, 14500)
    assert (short(kernel.name), short(copy.name), beside.launched) == ("k", copy.name, 0)
    assert lanes(works) == {(1, 7, 0): [kernel], (1, 7, 1): [beside], (1, 13, 0): [copy]}
    ranks = [of(operation(1, 10000, 15000), operation(2, 15000, 16000), works=works)]
    require_trace(events(ranks))
    found = {x["name"]: x for x in events(ranks)["traceEvents"] if x.get("tid", 0) >= 1500}
    assert found.pop("thread_name")["args"] == {"name": "GPU 1, stream 13"}
    assert {name: x.get("args") for name, x in found.items()} == {
        copy.name: {"bytes": 4096, "operation": 1},
        kernel.name: {"operation": 1},
        beside.name: None,
    }
    assert found[kernel.name]["ts"] == 8 and found[kernel.name]["cat"] == "kernel"
    drawn, lines = bars(ranks)
    assert lines == ["rank 0", *(f"GPU 1, stream {x}" for x in ("7", "7, beside", "13"))]
    assert [bar.name for bar in drawn if bar.line == 1] == ["k"]


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
    assert timeline(*bars([])).size[0] == image.size[0]
    groups = [Bar(0, 0, 12 - i, str(i), "same" if i < 2 else "") for i in range(13)]
    many = timeline(groups, ["r"])
    legend = {colour(many, x, y) for x in range(many.size[0]) for y in range(80, many.size[1])}
    assert legend >= {*drawing._COLOURS, drawing._OTHERS, drawing._WAIT}


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
