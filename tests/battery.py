"""The battery that operators of clusters ask for, and what it found: `python tests/battery.py`.

    python tests/battery.py R1 R12               some of its rows
    python tests/battery.py --short --busy 8     what `make test` has of them, beside 8 busy loops
    python tests/battery.py --page               the page alone, from the files

Each row is a choice of tests, with those that only the torture takes. What they found goes into
benchmarks/results/reliability.json, or reliability_busy.json, and into the table of
docs/reliability.md. A row of which nothing can run here leaves what was found elsewhere.

pytest loads this module, too, as a plugin that tells how far it is.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
FILES = {
    busy: ROOT / "benchmarks" / "results" / f"reliability{'_busy' * busy}.json"
    for busy in (False, True)
}
PAGE = ROOT / "docs" / "reliability.md"
sys.path.append(str(ROOT / "benchmarks"))


class Row(NamedTuple):
    """What is done to ranks, what must happen, and the tests that check it."""

    name: str
    what: str
    asked: str
    tests: tuple[str, ...]
    draws: int = 0  # times as many random cases as in every run


KILLED = "tests/reliability/test_killed_ranks.py"
ROWS = [
    Row(
        "R1",
        "`kill -9` of a random rank, at 200 random moments, a quarter at the start; 2 to 8 ranks",
        "every survivor names the rank; nothing is left; p99 <= 50 ms",
        (f"{KILLED}::test_every_survivor_names_the_killed_rank",),
    ),
    Row(
        "R2",
        "a rank ends by each signal, by `os._exit`, by `sys.exit`, by an exception",
        "the job's status is the first failing rank's, whose traceback is printed last, once",
        (
            "tests/launch/test_run.py::test_the_first_failing_rank_ends_the_job",
            "tests/launch/test_run.py::test_a_dead_rank_is_named_and_not_those_who_noticed",
            "tests/launch/test_failure.py",
        ),
    ),
    Row(
        "R3",
        "the launcher is killed 50 times; hang-up; Ctrl-C twice",
        "no orphan",
        (
            "tests/launch/test_run.py::test_no_orphans_when_the_launcher_is_killed",
            "tests/launch/test_run.py::test_a_signal_ends_the_job",
            "tests/launch/test_run.py::test_ctrl_c_twice_kills",
        ),
    ),
    Row(
        "R4",
        "SIGSTOP of a rank, 20 times; 10,000 barriers beside busy loops",
        "OpTimeout names the rank; no false alarm",
        (
            f"{KILLED}::test_a_stopped_rank_is_a_timeout_that_names_it",
            f"{KILLED}::test_no_false_alarm_beside_busy_loops",
        ),
    ),
    Row(
        "R5",
        "500 generated differences in operation, shape, dtype and number of calls",
        "the documented error on all ranks; none hangs, none returns a result",
        ("tests/reliability/test_mismatches.py",),
    ),
    Row(
        "R6",
        "500 steps of allocate, free, drop and collect, in another order on each rank; 20 seeds",
        "no hang, no memory reused too early, heap back to 0 bytes",
        ("tests/reliability/test_torture.py",),
    ),
    Row(
        "R7",
        "use after free, double free, views of freed memory, forks, calls after `finalize`",
        "a named exception for each",
        ("tests/reliability/test_misuse.py",),
    ),
    Row(
        "R8",
        "sizes and types that differ by rank; limits that one rank reaches",
        "an error on all ranks",
        ("tests/collectives/test_disagreement.py", "tests/reliability/test_limits.py"),
    ),
    Row(
        "R9",
        "memory is short: a control group, a full /dev/shm, the address space, three ranks at once",
        "HeapExhausted, with the bytes needed and available; no process is killed",
        ("tests/reliability/test_scarce_memory.py", "tests/symmetric/test_available_memory.py"),
    ),
    Row(
        "R10",
        "100 jobs, and 100 jobs in which a rank dies",
        "nothing is left; memory grows by less than 1 MB",
        (
            "tests/reliability/test_scale.py::test_a_hundred_jobs_and_a_hundred_that_fail_leave_nothing",
        ),
    ),
    Row(
        "R11",
        "the link between two hosts is cut, is slow, or loses packets",
        "RankFailure long before time is up; right results",
        ("tests/hosts/test_links.py",),
    ),
    Row(
        "R12",
        "messages at the start and between hosts late, lost, cut short or sent twice; 1,000 seeds",
        "success or a named error; no hang",
        ("tests/reliability/test_faults.py",),
    ),
    Row(
        "R13",
        "strangers at the start: noise, wrong keys, replays, idle connections",
        "the job starts nevertheless; nothing is unpickled",
        (
            "tests/reliability/test_strangers.py",
            "tests/hosts/test_meeting.py",
            "tests/hosts/test_wires.py",
        ),
    ),
    Row(
        "R14",
        "what is open while a job runs: sockets, files, memory, variables; another user",
        "no network socket, nothing with a name, no secret; another user reaches nothing",
        (
            "tests/reliability/test_what_is_open.py",
            "tests/reliability/test_strangers.py::test_another_users_process_is_refused_even_with_the_key",
        ),
    ),
    Row(
        "R15",
        "2^31 + 17 elements put, got and redistributed",
        "exact",
        ("tests/reliability/test_scale.py::test_more_than_two_to_the_31_elements",),
    ),
    Row(
        "R16, R17",
        "NaN, infinities, -0 and denormals in every reduction, dtype and rank's place",
        "as NumPy; the same bits on all ranks, every time",
        ("tests/collectives/test_reducing.py",),
    ),
    Row(
        "R18",
        "generated products, transforms and redistributions, 10 times as many as in `make test`",
        "within the error bounds of each",
        (
            "tests/matmul/test_matmul_any.py",
            "tests/fft/test_fft_any.py",
            "tests/redistribution/test_redistribute_any.py",
        ),
        draws=10,
    ),
    Row(
        "R22",
        "an hour of random programs on 4 ranks, compared with NumPy step by step",
        "no difference",
        ("tests/reliability/test_random_programs.py",),
    ),
    Row(
        "R23",
        "`kill -9` of a rank while GPUs' kernels wait for it, in collectives and barriers",
        "every survivor names the rank within 2 s; the GPU's memory is free again",
        ("tests/cuda/reliability/test_killed_gpu_ranks.py",),
    ),
]

HEAD = """\
# Reliability: what was tried, and what happened

This page shows what happened when ranks were killed, stopped, cut off or given wrong arguments,
row by row: the tests behind the promises of the [errors](errors.md) page. `make torture` runs
them, `make test` a short form of most rows, and `make torture-busy` the kills, the mismatches and
the short form of all rows beside eight busy loops. This page is written by `tests/battery.py`,
from `benchmarks/results/reliability.json` and `reliability_busy.json`.

| | what was done | what must happen | tests | result | beside busy loops |
| --- | --- | --- | --- | --- | --- |
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="run the battery, or some rows of it")
    parser.add_argument("rows", nargs="*", help="names of rows, such as R1; all if none is given")
    parser.add_argument("--short", action="store_true", help="only what `make test` has of them")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="beside N busy loops")
    parser.add_argument("--page", action="store_true", help="write the page, and run nothing")
    given = parser.parse_args()
    known = {row.name: row for row in ROWS}
    unknown = sorted(set(given.rows) - set(known))
    if unknown:
        parser.error(f"no rows {', '.join(unknown)}; there are {', '.join(known)}")
    failed = False
    if not given.page:
        chosen = [known[name] for name in given.rows] or ROWS
        with busy_loops(given.busy):
            failed = run(chosen, short=given.short, busy=given.busy)
    PAGE.write_text(page(results(), results(busy=True)))
    return int(failed)


def run(chosen: list[Row], *, short: bool, busy: int) -> bool:
    """Run rows, and write down what each found when it has; whether any failed."""
    import record

    found = {row["row"]: row for row in results(busy=bool(busy))}
    failed = False
    for number, row in enumerate(chosen):
        print(f"[{number + 1}/{len(chosen)}] {row.name}: {row.what}", flush=True)
        made = performed(row, short=short)
        print(f"    {in_words(made)}", flush=True)
        failed |= bool(made["failed"])
        was_run = made["tests"] > made["skipped"]
        if short and not busy:  # a part of what the file says
            continue
        if was_run or row.name not in found:
            extra = {"busy": busy} if busy else {}
            found[row.name] = {**made, **extra, **record.circumstances()}
            rows = [found[each.name] for each in ROWS if each.name in found]
            with contextlib.redirect_stdout(io.StringIO()):  # all rows, each time
                record.keep(FILES[bool(busy)].stem, rows, "")
    return failed


def results(*, busy: bool = False) -> list[dict[str, Any]]:
    """The rows of a file, none where there is none."""
    file = FILES[busy]
    return list(json.loads(file.read_text())["rows"]) if file.exists() else []


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """So many processes that want a core each, for as long as this lasts."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def performed(row: Row, *, short: bool) -> dict[str, Any]:
    """What the tests of a row found."""
    with tempfile.TemporaryDirectory() as folder:
        report, output = Path(folder) / "report.xml", Path(folder) / "output"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "battery"]
        command += ["-m", "not torture" if short else "torture or not torture"]
        command += ["--timeout", "7200", f"--junitxml={report}", "-o", "junit_family=xunit1"]
        paths = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
        variables = {"PYTHONPATH": paths}
        if row.draws and not short:
            variables["SHARDMATH_TEST_DRAWS"] = str(row.draws)
        start = time.monotonic()
        heard, tells = os.pipe()
        with output.open("w") as file:
            process = subprocess.Popen(
                [*command, *row.tests],
                cwd=ROOT,
                env={**os.environ, **variables, _TELLS: str(tells)},
                stdout=file,
                stderr=subprocess.STDOUT,
                pass_fds=[tells],
            )
        os.close(tells)
        show_progress(row.name, heard)
        process.wait()
        if not report.exists():
            raise RuntimeError(f"{row.name}: {output.read_text()}")
        cases = list(ElementTree.parse(report).iter("testcase"))
        failed = [case for case in cases if case.find("failure") is not None]
        failed += [case for case in cases if case.find("error") is not None]
        if failed:
            print(output.read_text())
    skipped = [each for case in cases for each in case.iter("skipped")]
    properties = [each for case in cases for each in case.iter("property")]
    seconds = [float(p.get("value", "")) for p in properties if p.get("name") == "seconds"]
    steps = sum(int(p.get("value", "")) for p in properties if p.get("name") == "steps")
    gpus = [p.get("value", "") for p in properties if p.get("name") == "gpus"]
    return {
        "row": row.name,
        "tests": len(cases),
        "failed": len(failed),
        "skipped": len(skipped),
        **({"why": sorted({str(each.get("message")) for each in skipped})} if skipped else {}),
        **({"short": True} if short else {}),
        "minutes": round((time.monotonic() - start) / 60, 1),
        **({"ms": milliseconds(seconds)} if seconds else {}),
        **({"steps": steps} if steps else {}),
        **({"gpus": gpus[0]} if gpus else {}),
    }


# -- how far it is ---------------------------------------------------------------------------------

_TELLS = "BATTERY_TELLS"  # the variable with the descriptor that pytest writes to
_WIDTH = 40


def pytest_collection_finish(session: Any) -> None:
    _tell(f"{len(session.items)}\n")


def pytest_runtest_logfinish() -> None:
    _tell(".")


def _tell(text: str) -> None:
    if _TELLS in os.environ:
        with contextlib.suppress(OSError):
            os.write(int(os.environ[_TELLS]), text.encode())


def show_progress(name: str, heard: int) -> None:
    """Draw a bar on a terminal, until pytest has ended."""
    total, done, shows = 0, 0, sys.stderr.isatty()
    with os.fdopen(heard, "rb", buffering=0) as pipe:
        while text := pipe.read(4096):
            head, newline, dots = text.rpartition(b"\n")
            total = int(head) if newline else total
            done += len(dots)
            if shows:
                filled = _WIDTH * done // max(total, 1)
                bar = "#" * filled + "." * (_WIDTH - filled)
                print(f"\r    {name} {bar} {done}/{total} ", end="", file=sys.stderr, flush=True)
    if shows:
        print("\r" + " " * (_WIDTH + 30) + "\r", end="", file=sys.stderr, flush=True)


# -- in words --------------------------------------------------------------------------------------


def milliseconds(seconds: list[float]) -> dict[str, float]:
    """Their median, their 99th percentile, and the longest."""
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    found = {"median": cuts[49], "p99": cuts[98], "most": max(seconds)}
    return {name: round(1e3 * each, 1) for name, each in found.items()}


def in_words(found: dict[str, Any]) -> str:
    """What a row found, for its table."""
    why = "; ".join(each.removeprefix("Skipped: ") for each in found.get("why", ()))
    if found["tests"] == found["skipped"]:
        return f"not run: {why}"
    words = "all pass" if not found["failed"] else f"**{found['failed']} fail**"
    if found["skipped"]:
        words += f", {found['skipped']} skipped ({why})"
    if "ms" in found:
        ms = found["ms"]
        words += f"; median {ms['median']} ms, p99 {ms['p99']}, the longest {ms['most']}"
    if "steps" in found:
        words += f"; {found['steps']:,} steps"
    if "gpus" in found:
        words += f"; on {found['gpus']}"
    return words


def page(found: list[dict[str, Any]], beside: list[dict[str, Any]]) -> str:
    """The text of docs/reliability.md."""
    by_name, busy = ({row["row"]: row for row in rows} for rows in (found, beside))
    lines = []
    for row in ROWS:
        result, other = by_name.get(row.name), busy.get(row.name)
        count, words = ("", "not run") if result is None else (result["tests"], in_words(result))
        loaded = ""
        if other is not None and not other["tests"]:
            loaded = "has no short form"
        elif other is not None:
            loaded = f"{'short form, ' if 'short' in other else ''}{other['tests']} tests: "
            loaded += in_words(other)
        lines.append(f"| {row.name} | {row.what} | {row.asked} | {count} | {words} | {loaded} |\n")
    dates = sorted(row["date"][:10] for row in [*found, *beside])
    when = f"\nRun from {dates[0]} to {dates[-1]}.\n" if dates else ""
    return HEAD + "".join(lines) + when


if __name__ == "__main__":
    sys.exit(main())
