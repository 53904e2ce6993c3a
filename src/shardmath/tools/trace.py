"""`shardmath trace script.py`: what all ranks of a program did, and when.

Each rank records its operations in memory that this process owns, so that the record of a rank that
was killed remains, and nothing is written while the program runs. The record is the flight
recorder's; a trace keeps more of it. It also has spans, of the copies and the computations inside
operations on cores (`base.spans`), and what GPUs do (`tools.kernels`).

Waits are derived from these records. Operations of all ranks with the same number and name are one
meeting, and a rank waits there until the last one has begun. Where ranks have made different calls,
in contexts that are parts of the job, their numbers differ, and no more waits are shown.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import statistics
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from shardmath.base import spans
from shardmath.base.caller import file_line
from shardmath.base.config import Settings
from shardmath.base.recorder import OPERATIONS, RAISED, Operation, Site, operations, this_process
from shardmath.base.spans import Span, Spans
from shardmath.inspection.job import new_record, start_in
from shardmath.launch.program import Program, run
from shardmath.tools.drawing import UNITS, Bar, save_beside, timeline, unit_for
from shardmath.tools.kernels import Collector, Work, lanes, short, stream_name
from shardmath.tools.tables import show

KEPT = 1 << 17  # operations of each rank
SPANS = 8  # that are kept for each operation, on average
_THREADS = 1000  # numbers for the threads of a rank
_STREAMS = 500  # the first of those that are for streams
_POPULATE_WRITE = 23  # of madvise, since Linux 5.14; Python has no name for it before 3.14
_PREDICTED = re.compile(r"predicted:? ([\d.]+(?:e[+-]?\d+)?) (ns|us|ms|s)\b")


class Done(NamedTuple):
    """What one rank did.

    operations  of the package, the earliest first
    plans       explanations, by the numbers of operations
    spans       copies and computations inside them; their `sites` say what each is
    works       of the rank's GPU
    lost        the number of spans that were not kept
    """

    operations: list[Operation]
    plans: Mapping[int, str] = MappingProxyType({})
    spans: Sequence[Span] = ()
    sites: Sequence[Site] = ()
    works: Sequence[Work] = ()
    lost: int = 0


class Wait(NamedTuple):
    """A rank waited for the rank `last`. Times are nanoseconds."""

    last: int
    begun: int
    ended: int


class Summary(NamedTuple):
    """Calls that look alike: their number on all ranks, and medians of seconds.

    These are what a call takes, what it takes without waits for another rank, the parts of that in
    which something is copied and in which something is computed, and what its plan predicts, if it
    does. What a GPU does may last longer than the call.
    """

    name: str
    operands: str
    line: str
    calls: int
    seconds: float
    without_waits: float
    copies: float
    computes: float
    predicted: float | None


def trace(
    program: Program, size: int, *, threads: int | None, output: Path, kept: int, kernels: bool
) -> int:
    """Run `program` on `size` ranks, write `output` and a picture beside it, and print a summary.

    The result is the exit status: the program's, or 1 where `output` cannot be written in the end.
    Raises OSError if it cannot be written at the beginning. The ranks return from here as well, and
    write nothing; nor is anything written if no rank has called shardmath.
    """
    is_new = not output.exists()
    output.open("ab").close()  # raises now where it cannot be written, and not after a long run
    if is_new:
        output.unlink()
    starter = os.getpid()
    records = [_Record(kept) for _ in range(size)]
    traced = _Traced(program.name, program.arguments, program.is_module, records, kernels)
    status = run(traced, size, threads=threads, command="trace")
    if os.getpid() != starter:
        return status
    told = [record.read() for record in records]
    ranks = [done for done, _ in told]
    if not any(done.operations for done in ranks):
        if status == 0:
            print("shardmath trace: no rank has called shardmath: no trace", file=sys.stderr)
        return status
    for why in dict.fromkeys(why for _, reasons in told for why in reasons):
        print(f"shardmath trace: {why}", file=sys.stderr)
    try:
        _write(ranks, output)
    except OSError as error:
        print(f"shardmath trace: {output} is not written: {error.strerror}", file=sys.stderr)
        return status or 1
    return status


class _Record:
    """Memory for what one rank records: the starter makes it, and reads it when the rank is gone.

    Operations and spans have a ring each. What is written seldom is a line of `notes`.
    """

    def __init__(self, kept: int) -> None:
        self._descriptor, self._memory = new_record(kept)
        self._spans = mmap.mmap(-1, spans.bytes_for(SPANS * max(kept, OPERATIONS)))
        self._notes = os.memfd_create("shardmath-notes", os.MFD_CLOEXEC)

    def forget(self) -> None:
        """Close it in another rank: a process has one record, by which others find it."""
        os.close(self._descriptor)

    def start(self) -> None:
        """Record in this process from now on."""
        touch(self._memory)
        touch(self._spans)
        start_in(self._descriptor, self._memory)
        this_process.spans = Spans(self._spans, partial(self.note, "site"))
        this_process.tell_plan = partial(self.note, "plan")

    def note(self, *words: object) -> None:
        """Write a line at once: a rank may be killed at any time. What does not fit is lost."""
        with suppress(OSError):
            os.write(self._notes, json.dumps(words).encode() + b"\n")

    def read(self) -> tuple[Done, list[str]]:
        """What the rank did, and why some of that is not known."""
        *lines, _ = os.pread(self._notes, os.fstat(self._notes).st_size, 0).split(b"\n")
        notes = defaultdict(list)
        for kind, *words in map(json.loads, lines):
            notes[kind].append(words)
        done = operations(self._memory[:])
        first = done[0].begun if done else 0
        kept, lost = spans.spans_in(self._spans[:])
        if kept and kept[0].begun < first:  # of operations that were not kept either
            kept, lost = [span for span in kept if span.begun >= first], 0
        sites = [Site._make(site) for (site,) in notes["site"]]
        works = [Work._make(work) for (work,) in notes["work"] if isinstance(work, list)]
        reasons = [work for (work,) in notes["work"] if isinstance(work, str)]
        plans = dict(notes["plan"])
        works = [work for work in works if work.begun >= first]
        return Done(done, plans, kept, sites, works, lost), reasons


class _Traced(Program):
    """The program, in a rank that records what it does in memory of the starter's."""

    records: Sequence[_Record] = ()
    kernels: bool = True

    def execute(self) -> None:
        own = Settings.from_environment().rank
        for rank, record in enumerate(self.records):
            if rank != own:
                record.forget()
        record = self.records[own]
        record.start()
        collector = Collector(partial(record.note, "work"))
        if self.kernels:
            this_process.on_gpu = collector.start
        try:
            super().execute()
        finally:
            collector.stop()


def touch(memory: mmap.mmap) -> None:
    """Have the system provide all pages now, as the first write to a page would delay a call.

    Where the system cannot, or has no room, pages are provided when they are written.
    """
    with suppress(OSError):
        memory.madvise(_POPULATE_WRITE)


# -- what follows from it. Pure ------------------------------------------------------------------


def inside(done: Done) -> dict[int, list[Span]]:
    """The spans of each operation, by its number. The threads of a rank may share an operation."""
    threads: dict[int, list[Operation]] = defaultdict(list)
    for each in done.operations:
        threads[each.thread].append(each)
    begun = {thread: [each.begun for each in own] for thread, own in threads.items()}
    all_begun = [each.begun for each in done.operations]
    found: dict[int, list[Span]] = defaultdict(list)
    for span in done.spans:
        own = threads.get(span.thread, done.operations)
        place = bisect_right(begun.get(span.thread, all_begun), span.begun) - 1
        if place >= 0 and (own[place].ended == 0 or span.begun < own[place].ended):
            found[own[place].number].append(span)
    return found


def waits(ranks: Sequence[Done]) -> dict[tuple[int, int], Wait]:
    """The waits, by rank and number of an operation.

    Only for meetings of all ranks, and for ranks that came before the last. A rank begins to wait
    when it has done what it does before they meet.
    """
    alike: dict[tuple[int, str], dict[int, Operation]] = defaultdict(dict)
    for rank, done in enumerate(ranks):
        for each in done.operations:
            alike[each.number, each.name][rank] = each
    within = [inside(done) for done in ranks]
    found = {}
    for meeting in alike.values():
        last = max(meeting, key=lambda rank: meeting[rank].begun)
        came = meeting[last].begun
        # Where one was through before another had come, they did not wait for each other.
        if len(meeting) == len(ranks) and not any(0 < e.ended < came for e in meeting.values()):
            for rank, each in meeting.items():
                before = [span.ended for span in within[rank][each.number] if span.begun < came]
                ready = max([each.begun, *before])
                if rank != last and ready < came:
                    found[rank, each.number] = Wait(last, ready, came)
    return found


def events(ranks: Sequence[Done]) -> dict[str, Any]:
    """The trace in the format of Chrome's trace viewer and Perfetto: a process for each rank, with
    times in microseconds from the first operation on.

    Process r + 1 is rank r, as 0 is taken for the system's idle process. Threads are numbered,
    since those of forked ranks have the same addresses. A stream of a GPU is a thread, too.
    """
    start = _start(ranks)
    waiting = waits(ranks)
    found: list[dict[str, Any]] = []
    for rank, done in enumerate(ranks):
        process = _Process(rank, start)
        for each in done.operations:
            thread, ended = process.thread(each.thread), each.ended or _latest(done)
            process.box(each.name, "call", thread, each.begun, ended, _said(each, done.plans))
            wait = waiting.get((rank, each.number))
            if wait is not None:
                name = f"wait for rank {wait.last}"
                process.box(name, "wait", thread, wait.begun, wait.ended)
        for span in done.spans:
            site, thread = done.sites[span.site], process.thread(span.thread)
            process.box(site.name, site.kind, thread, span.begun, span.ended, _said_of(site))
        numbers = {work: number for number, works in _launched(done).items() for work in works}
        for place, works in lanes(done.works).items():
            thread = process.stream(stream_name(*place))
            for work in works:
                sized = {"bytes": work.nbytes} if work.nbytes else {}
                by = {"operation": numbers[work]} if work in numbers else {}
                process.box(work.name, work.kind, thread, work.begun, work.ended, sized | by)
        found += process.events
    return {"traceEvents": found, "displayTimeUnit": "ms"}


class _Process:
    """The events of one rank. `start` is time 0."""

    def __init__(self, rank: int, start: int) -> None:
        self._number, self._start = rank + 1, start
        self._threads: dict[int, int] = {}
        self._streams = 0
        self.events: list[dict[str, Any]] = []
        self._say("process_name", name=f"rank {rank}")
        self._say("process_sort_index", sort_index=rank)

    def thread(self, own: int) -> int:
        """The number of a thread of the rank's."""
        if own not in self._threads:
            self._threads[own] = _THREADS * self._number + len(self._threads)
            name = f"thread {len(self._threads)}" if len(self._threads) > 1 else "calls"
            self._say("thread_name", tid=self._threads[own], name=name)
        return self._threads[own]

    def stream(self, name: str) -> int:
        """The number of the thread that stands for a new stream of a GPU."""
        thread = _THREADS * self._number + _STREAMS + self._streams
        self._streams += 1
        self._say("thread_name", tid=thread, name=name)
        return thread

    def box(
        self,
        name: str,
        kind: str,
        thread: int,
        begun: int,
        ended: int,
        said: Mapping[str, Any] | None = None,
    ) -> None:
        """Add a box. Times are nanoseconds."""
        times = {"ts": 1e-3 * (begun - self._start), "dur": 1e-3 * (ended - begun)}
        where = {"ph": "X", "pid": self._number, "tid": thread}
        args = {"args": dict(said)} if said else {}
        self.events.append({**where, "name": name, "cat": kind, **times, **args})

    def _say(self, what: str, *, tid: int | None = None, **said: Any) -> None:
        thread = {} if tid is None else {"tid": tid}
        self.events.append({"ph": "M", "pid": self._number, **thread, "name": what, "args": said})


def _said(each: Operation, plans: Mapping[int, str]) -> dict[str, Any]:
    """What the box of an operation says."""
    return {
        "number": each.number,
        "operands": each.operands,
        "line": file_line(each.file, each.line),
        **({"stream": hex(each.stream)} if each.stream else {}),
        **({"left by": "an exception"} if each.state == RAISED else {}),
        **({} if each.ended else {"ended": "no"}),
        **({"plan": plans[each.number]} if each.number in plans else {}),
    }


def _said_of(site: Site) -> dict[str, Any]:
    """What the box of a span says."""
    peers = {"read from": site.read, "written to": site.written}
    return {
        **({"bytes": site.nbytes} if site.nbytes else {}),
        **{
            where: {f"rank {rank}": nbytes for rank, nbytes in those}
            for where, those in peers.items()
            if those
        },
    }


def summaries(ranks: Sequence[Done]) -> list[Summary]:
    """Calls that look alike, those with the longest total time first."""
    waiting = waits(ranks)
    groups: dict[tuple[str, str, str], list[tuple[int, ...]]] = defaultdict(list)
    predicted: dict[tuple[str, str, str], float] = {}
    for rank, done in enumerate(ranks):
        within, works = inside(done), _launched(done)
        for each in done.operations:
            if not each.ended:
                continue
            key = each.name, each.operands, file_line(each.file, each.line)
            wait = waiting.get((rank, each.number))
            whole = each.ended - each.begun
            times: dict[str, list[tuple[int, int]]] = {"copy": [], "compute": [], "wait": []}
            for span in within.get(each.number, ()):
                times[done.sites[span.site].kind].append((span.begun, span.ended))
            waited = sum(end - begin for begin, end in times["wait"])
            if wait is not None:
                waited += wait.ended - wait.begun
            for work in works.get(each.number, ()):
                kind = "compute" if work.kind == "kernel" else "copy"
                times[kind].append((work.begun, work.ended))
            parts = covered(times["copy"]), covered(times["compute"])
            groups[key].append((whole, whole - waited, *parts))
            plan = seconds_predicted(done.plans.get(each.number, ""))
            if plan is not None:
                predicted[key] = plan
    rows = []
    for key, calls in groups.items():
        medians = (1e-9 * statistics.median(column) for column in zip(*calls, strict=True))
        rows.append(Summary._make((*key, len(calls), *medians, predicted.get(key))))
    return sorted(rows, key=lambda row: -row.calls * row.seconds)


def _launched(done: Done) -> dict[int, list[Work]]:
    """What the GPU did, by the number of the operation that launched it."""
    found: dict[int, list[Work]] = defaultdict(list)
    for work in done.works:
        place = bisect_right(done.operations, work.launched, key=lambda each: each.begun) - 1
        if place >= 0 and work.launched < (done.operations[place].ended or _latest(done)):
            found[done.operations[place].number].append(work)
    return found


def covered(times: Iterable[tuple[int, int]]) -> int:
    """The length of the union of intervals."""
    length, reached = 0, 0
    for begun, ended in sorted(times):
        length += max(0, ended - max(begun, reached))
        reached = max(reached, ended)
    return length


def seconds_predicted(text: str) -> float | None:
    """The seconds that a plan's `explain()` predicts, None if it does not."""
    found = _PREDICTED.search(text)
    return None if found is None else float(found[1]) * UNITS[found[2]]


def bars(ranks: Sequence[Done]) -> tuple[list[Bar], list[str]]:
    """What a picture shows, and the names of its lines.

    A rank has a line of calls, with waits drawn upon them, a line of what is copied and computed
    inside of them, and a line for each stream of its GPU.
    """
    start = _start(ranks)
    waiting = waits(ranks)
    found: list[Bar] = []
    lines: list[str] = []

    def draw(begun: int, ended: int, name: str, group: str = "") -> None:
        times = 1e-9 * (begun - start), 1e-9 * (ended - start)
        found.append(Bar(len(lines) - 1, *times, name, group or name))

    for rank, done in enumerate(ranks):
        lines.append(f"rank {rank}")
        for each in done.operations:
            draw(each.begun, each.ended or _latest(done), each.name)
            wait = waiting.get((rank, each.number))
            if wait is not None:
                draw(wait.begun, wait.ended, "")
        if done.spans:
            lines.append("inside")
        for span in done.spans:
            site = done.sites[span.site]
            name = "" if site.kind == "wait" else site.name
            draw(span.begun, span.ended, name, _group(site))
        for place, works in lanes(done.works).items():
            lines.append(stream_name(*place))
            for work in works:
                draw(work.begun, work.ended, short(work.name))
    return found, lines


def _group(site: Site) -> str:
    """The name in the legend: copies from all other ranks have one."""
    if site.kind == "wait":
        return ""
    return "copy from another rank" if site.kind == "copy" and site.read else site.name


def _start(ranks: Sequence[Done]) -> int:
    return min((each.begun for done in ranks for each in done.operations), default=0)


def _latest(done: Done) -> int:
    """When the rank was last seen to do something."""
    times = [time for each in done.operations for time in (each.begun, each.ended)]
    return max([*times, *[span.ended for span in done.spans]])


# -- files, and words ------------------------------------------------------------------------------


def _write(ranks: Sequence[Done], output: Path) -> None:
    document = json.dumps(events(ranks))  # in C; `json.dump` takes several times as long
    output.write_text(document)
    written = save_beside(output, lambda: timeline(*bars(ranks)), "trace")
    header = (
        *("operation", "on", "at", "calls", "takes", "without waits"),
        *("copies", "computes", "predicted"),
    )
    show("Longest in all", header, [_row(each) for each in summaries(ranks)[:20]])
    for rank, done in enumerate(ranks):
        if done.operations and done.operations[0].number > 1:
            print(f"rank {rank}: operations before {done.operations[0].number} were not kept")
        if done.lost:
            print(f"rank {rank}: the first {done.lost:,} copies and computations were not kept")
    print(f"written: {', '.join(written)}")


def _row(each: Summary) -> tuple[str, ...]:
    predicted = "" if each.predicted is None else in_units(each.predicted)
    times = [in_units(each.seconds), in_units(each.without_waits)]
    parts = [in_units(part) if part else "" for part in (each.copies, each.computes)]
    return each.name, each.operands, each.line, str(each.calls), *times, *parts, predicted


def in_units(seconds: float) -> str:
    """Three digits in a suitable unit."""
    unit = unit_for(seconds)
    return f"{seconds / UNITS[unit]:.3g} {unit}"
