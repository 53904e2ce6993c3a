"""`shardmath trace script.py`: what all ranks of a program did, and when.

Each rank records its operations in memory that this process owns, so that the record of a rank that
was killed remains, and nothing is written while the program runs. The record is the flight
recorder's; a trace only keeps more of it.

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
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from shardmath.base.caller import file_line
from shardmath.base.config import Settings
from shardmath.base.recorder import RAISED, Operation, operations, this_process
from shardmath.inspection.job import new_record, start_in
from shardmath.launch.program import Program, run
from shardmath.tools.drawing import UNITS, Bar, save_beside, timeline, unit_for
from shardmath.tools.tables import show

KEPT = 1 << 17  # operations of each rank
_THREADS = 1000  # numbers for the threads of a rank
_POPULATE_WRITE = 23  # of madvise, since Linux 5.14; Python has no name for it before 3.14
_PREDICTED = re.compile(r"predicted:? ([\d.]+(?:e[+-]?\d+)?) (ns|us|ms|s)\b")


class Done(NamedTuple):
    """What one rank did: its operations, and by their numbers the explanations of plans."""

    operations: list[Operation]
    plans: dict[int, str]


class Summary(NamedTuple):
    """Calls that look alike: their number on all ranks, their median time in seconds, the median
    without waits for another rank, and the time that their plan predicts, if it does.
    """

    name: str
    operands: str
    line: str
    calls: int
    seconds: float
    without_waits: float
    predicted: float | None


def trace(program: Program, size: int, *, threads: int | None, output: Path, kept: int) -> int:
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
    records = [new_record(kept) for _ in range(size)]
    notes = [os.memfd_create("shardmath-plans", os.MFD_CLOEXEC) for _ in range(size)]
    traced = _Traced(program.name, program.arguments, program.is_module, records, notes)
    status = run(traced, size, threads=threads)
    if os.getpid() != starter:
        return status
    ranks = [
        Done(operations(memory[:]), _plans_in(note))
        for (_, memory), note in zip(records, notes, strict=True)
    ]
    if not any(done.operations for done in ranks):
        if status == 0:
            print("shardmath trace: no rank has called shardmath: no trace", file=sys.stderr)
        return status
    try:
        _write(ranks, output)
    except OSError as error:
        print(f"shardmath trace: {output} is not written: {error.strerror}", file=sys.stderr)
        return status or 1
    return status


class _Traced(Program):
    """The program, in a rank that records its operations in memory of the starter's."""

    records: Sequence[tuple[int, mmap.mmap]] = ()
    notes: Sequence[int] = ()

    def execute(self) -> None:
        own = Settings.from_environment().rank
        for rank, (descriptor, memory) in enumerate(self.records):
            if rank == own:
                touch(memory)
                start_in(descriptor, memory)
            else:  # a process has one record, by which others find it
                os.close(descriptor)
        this_process.tell_plan = partial(_append, self.notes[own])
        super().execute()


def touch(memory: mmap.mmap) -> None:
    """Have the system provide all pages now, as the first write to a page would delay a call.

    Where the system cannot, or has no room, pages are provided when they are written.
    """
    with suppress(OSError):
        memory.madvise(_POPULATE_WRITE)


def _append(descriptor: int, number: int, plan: str) -> None:
    """Write it at once, since a rank may be killed at any time. What does not fit is left out."""
    with suppress(OSError):
        os.write(descriptor, json.dumps([number, plan]).encode() + b"\n")


def _plans_in(descriptor: int) -> dict[int, str]:
    """The plans that a rank has written."""
    *lines, _ = os.pread(descriptor, os.fstat(descriptor).st_size, 0).split(b"\n")
    return dict(json.loads(line) for line in lines)


# -- what follows from it. Pure ------------------------------------------------------------------


def waits(ranks: Sequence[Done]) -> dict[tuple[int, int], tuple[int, int]]:
    """By rank and number of an operation: the rank that came last, and when, in nanoseconds.

    Only for meetings of all ranks, and for ranks that came before the last.
    """
    alike: dict[tuple[int, str], dict[int, Operation]] = defaultdict(dict)
    for rank, done in enumerate(ranks):
        for each in done.operations:
            alike[each.number, each.name][rank] = each
    found = {}
    for meeting in alike.values():
        last = max(meeting, key=lambda rank: meeting[rank].begun)
        came = meeting[last].begun
        # Where one was through before another had come, they did not wait for each other.
        if len(meeting) == len(ranks) and not any(0 < e.ended < came for e in meeting.values()):
            for rank, each in meeting.items():
                if rank != last and each.begun < came:
                    found[rank, each.number] = last, came
    return found


def events(ranks: Sequence[Done]) -> dict[str, Any]:
    """The trace in the format of Chrome's trace viewer and Perfetto: a process for each rank, with
    times in microseconds from the first operation on.

    Process r + 1 is rank r, as 0 is taken for the system's idle process. Threads are numbered,
    since those of forked ranks have the same addresses.
    """
    start = min((each.begun for done in ranks for each in done.operations), default=0)
    waiting, found = waits(ranks), []
    for rank, done in enumerate(ranks):
        found.append(_metadata(rank, "process_name", name=f"rank {rank}"))
        found.append(_metadata(rank, "process_sort_index", sort_index=rank))
        threads: dict[int, int] = {}
        for each in done.operations:
            if each.thread not in threads:
                threads[each.thread] = _THREADS * (rank + 1) + len(threads)
                name = f"thread {len(threads)}" if len(threads) > 1 else "calls"
                own = {"tid": threads[each.thread]}
                found.append({**_metadata(rank, "thread_name", name=name), **own})
            thread = threads[each.thread]
            ended = each.ended or _latest(done.operations)
            said = {
                "number": each.number,
                "operands": each.operands,
                "line": file_line(each.file, each.line),
                **({"stream": hex(each.stream)} if each.stream else {}),
                **({"left by": "an exception"} if each.state == RAISED else {}),
                **({} if each.ended else {"ended": "no"}),
                **({"plan": done.plans[each.number]} if each.number in done.plans else {}),
            }
            common = {"ph": "X", "pid": rank + 1, "tid": thread, "ts": 1e-3 * (each.begun - start)}
            long = 1e-3 * (ended - each.begun)
            found.append({**common, "name": each.name, "cat": "call", "dur": long, "args": said})
            last = waiting.get((rank, each.number))
            if last is not None:
                name, long = f"wait for rank {last[0]}", 1e-3 * (last[1] - each.begun)
                found.append({**common, "name": name, "cat": "wait", "dur": long})
    return {"traceEvents": found, "displayTimeUnit": "ms"}


def summaries(ranks: Sequence[Done]) -> list[Summary]:
    """Calls that look alike, those with the longest total time first."""
    waiting = waits(ranks)
    groups: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
    predicted: dict[tuple[str, str, str], float] = {}
    for rank, done in enumerate(ranks):
        for each in done.operations:
            if not each.ended:
                continue
            key = each.name, each.operands, file_line(each.file, each.line)
            last = waiting.get((rank, each.number))
            waited = 0.0 if last is None else 1e-9 * (last[1] - each.begun)
            seconds = 1e-9 * (each.ended - each.begun)
            groups[key].append((seconds, seconds - waited))
            plan = seconds_predicted(done.plans.get(each.number, ""))
            if plan is not None:
                predicted[key] = plan
    rows = []
    for key, times in groups.items():
        whole, alone = (statistics.median(column) for column in zip(*times, strict=True))
        rows.append(Summary(*key, len(times), whole, alone, predicted.get(key)))
    return sorted(rows, key=lambda row: -row.calls * row.seconds)


def seconds_predicted(text: str) -> float | None:
    """The seconds that a plan's `explain()` predicts, None if it does not."""
    found = _PREDICTED.search(text)
    return None if found is None else float(found[1]) * UNITS[found[2]]


def bars(ranks: Sequence[Done]) -> list[Bar]:
    """What a picture shows: a line for each rank, with waits drawn upon the calls."""
    start = min((each.begun for done in ranks for each in done.operations), default=0)
    waiting, found = waits(ranks), []
    for rank, done in enumerate(ranks):
        for each in done.operations:
            begun = 1e-9 * (each.begun - start)
            ended = 1e-9 * ((each.ended or _latest(done.operations)) - start)
            found.append(Bar(rank, begun, ended, each.name))
            last = waiting.get((rank, each.number))
            if last is not None:
                found.append(Bar(rank, begun, 1e-9 * (last[1] - start), ""))
    return found


def _metadata(rank: int, what: str, **said: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": rank + 1, "name": what, "args": said}


def _latest(done: Iterable[Operation]) -> int:
    return max(max(each.begun, each.ended) for each in done)


# -- files, and words ------------------------------------------------------------------------------


def _write(ranks: Sequence[Done], output: Path) -> None:
    with output.open("w") as file:
        json.dump(events(ranks), file)
    lines = [f"rank {rank}" for rank in range(len(ranks))]
    written = save_beside(output, lambda: timeline(bars(ranks), lines), "trace")
    header = ("operation", "on", "at", "calls", "takes", "without waits", "predicted")
    show("Longest in all", header, [_row(each) for each in summaries(ranks)[:20]])
    for rank, done in enumerate(ranks):
        if done.operations and done.operations[0].number > 1:
            print(f"rank {rank}: operations before {done.operations[0].number} were not kept")
    print(f"written: {', '.join(written)}")


def _row(each: Summary) -> tuple[str, ...]:
    predicted = "" if each.predicted is None else in_units(each.predicted)
    times = in_units(each.seconds), in_units(each.without_waits)
    return each.name, each.operands, each.line, str(each.calls), *times, predicted


def in_units(seconds: float) -> str:
    """Three digits in a suitable unit."""
    unit = unit_for(seconds)
    return f"{seconds / UNITS[unit]:.3g} {unit}"
