"""The battery that operators of clusters ask for, and what it found: `python tests/battery.py`.

`python tests/battery.py R1 R12` runs some of its rows. Each row is a choice of tests, with those
that only the torture takes; what they found goes into benchmarks/results/reliability.json, and
into the table of docs/reliability.md, which `--page` writes anew from the file alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "benchmarks" / "results" / "reliability.json"
PAGE = ROOT / "docs" / "reliability.md"
sys.path.append(str(ROOT / "benchmarks"))


class Row(NamedTuple):
    """What is done to ranks, what is asked of them, and the tests that see to it."""

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
        "the documented error on all ranks; none hangs, none gives numbers",
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
        "use after free, double free, views of what has ended, forks, calls after `finalize`",
        "a named exception each",
        ("tests/reliability/test_misuse.py",),
    ),
    Row(
        "R8",
        "sizes and types that differ by rank; limits that one rank reaches",
        "an error on all ranks",
        ("tests/collectives/test_disagreement.py", "tests/reliability/test_limits.py"),
    ),
    Row(
        "R10",
        "100 jobs, and 100 of which a rank dies",
        "nothing left; less than 1 MB grown",
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
        "messages of the start and between hosts late, lost, cut short, twice; 1,000 seeds",
        "success or a named error; no hang",
        ("tests/reliability/test_faults.py",),
    ),
    Row(
        "R13",
        "strangers at the start: noise, wrong keys, replays, idle connections",
        "the job starts all the same; nothing is unpickled",
        (
            "tests/reliability/test_strangers.py",
            "tests/hosts/test_meeting.py",
            "tests/hosts/test_wires.py",
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
]

MISSING = """\
Not in the battery yet:

* R9 in a memory cgroup, and with a full small tmpfs: limits of a process are tried (R8).
* R14: what is open while a job runs is tried by single tests, and not as a table.
* R22, the hour of random programs beside a sequential oracle.
* R23: ranks killed while kernels of GPUs wait, for which `tests/cuda` has tests that take GPUs.
"""

HEAD = """\
# How it fails, and how often that was tried

Errors and what to do about them are in [errors](errors.md). This is the battery behind their
promises: what was done to ranks, and what they did. `make torture` runs it, `make test` a short
form of most rows. This page is written by `tests/battery.py`, from
`benchmarks/results/reliability.json`.

| | what was done | what is asked | tests | found |
| --- | --- | --- | --- | --- |
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="run the battery, or some rows of it")
    parser.add_argument("rows", nargs="*", help="names of rows, such as R1; all if none is given")
    parser.add_argument("--page", action="store_true", help="write the page, and run nothing")
    given = parser.parse_args()
    known = {row.name: row for row in ROWS}
    unknown = sorted(set(given.rows) - set(known))
    if unknown:
        parser.error(f"no rows {', '.join(unknown)}; there are {', '.join(known)}")
    found = {row["row"]: row for row in results()}
    if not given.page:
        import record

        chosen = [known[name] for name in given.rows] or ROWS
        for number, row in enumerate(chosen):
            print(f"[{number + 1}/{len(chosen)}] {row.name}: {row.what}", flush=True)
            found[row.name] = {**performed(row), **record.circumstances()}
            print(f"    {in_words(found[row.name])}", flush=True)
            record.write("reliability", [found[each.name] for each in ROWS if each.name in found])
    PAGE.write_text(page(list(found.values())))
    return int(any(row["failed"] for row in found.values()))


def results() -> list[dict[str, Any]]:
    """The rows of the file, none where there is none."""
    return list(json.loads(FILE.read_text())["rows"]) if FILE.exists() else []


def performed(row: Row) -> dict[str, Any]:
    """What the tests of a row found."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "torture or not torture"]
        command += ["--timeout", "3600", f"--junitxml={report}", "-p", "no:cacheprovider"]
        variables = {"SHARDMATH_TEST_DRAWS": str(row.draws)} if row.draws else {}
        start = time.monotonic()
        done = subprocess.run(
            [*command, *row.tests],
            check=False,
            cwd=ROOT,
            env=os.environ | variables,
            capture_output=True,
            text=True,
        )
        if not report.exists():
            raise RuntimeError(f"{row.name}: {done.stdout}{done.stderr}")
        cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None]
    failed += [case for case in cases if case.find("error") is not None]
    if failed:
        print(done.stdout)
    properties = [each for case in cases for each in case.iter("property")]
    seconds = [float(p.get("value", "")) for p in properties if p.get("name") == "seconds"]
    return {
        "row": row.name,
        "tests": len(cases),
        "failed": len(failed),
        "skipped": len([case for case in cases if case.find("skipped") is not None]),
        "minutes": round((time.monotonic() - start) / 60, 1),
        **({"ms": milliseconds(seconds)} if seconds else {}),
    }


def milliseconds(seconds: list[float]) -> dict[str, float]:
    """Their median, their 99th percentile, and the longest."""
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    found = {"median": cuts[49], "p99": cuts[98], "most": max(seconds)}
    return {name: round(1e3 * each, 1) for name, each in found.items()}


def in_words(found: dict[str, Any]) -> str:
    """What a row found, for its table."""
    words = "all pass" if not found["failed"] else f"**{found['failed']} fail**"
    if found["skipped"]:
        words += f", {found['skipped']} skipped"
    if "ms" in found:
        ms = found["ms"]
        words += f"; median {ms['median']} ms, p99 {ms['p99']}, the longest {ms['most']}"
    return words


def page(found: list[dict[str, Any]]) -> str:
    """The text of docs/reliability.md."""
    by_name = {row["row"]: row for row in found}
    lines = []
    for row in ROWS:
        result = by_name.get(row.name)
        count, words = ("", "not run") if result is None else (result["tests"], in_words(result))
        lines.append(f"| {row.name} | {row.what} | {row.asked} | {count} | {words} |\n")
    dates = sorted(row["date"][:10] for row in found)
    when = f"\nRun from {dates[0]} to {dates[-1]}.\n" if dates else ""
    return HEAD + "".join(lines) + when + "\n" + MISSING


if __name__ == "__main__":
    sys.exit(main())
