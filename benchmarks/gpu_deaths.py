"""How long kernels, and the hosts that wait for them, go on after a rank has ended.

    python benchmarks/gpu_deaths.py 2
    python benchmarks/gpu_deaths.py 2 --all

Each job is started anew. One rank ends while the others compute; if there are more ranks than GPUs,
two share one. A time runs from just before the end to the exception in the last of the others. The
program is that of the tests, tests/cuda/symmetric/departing.py. `--all` takes all ways to end,
instead of three.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import on_gpus
import record

TESTS = Path(__file__).parent.parent / "tests"
sys.path[:0] = [str(TESTS / "cuda" / "symmetric"), str(TESTS)]

import departing  # noqa: E402

FEW = ("SIGKILL", "interrupt", "finalize")


def measured(how: str, where: str, size: int) -> dict[str, object]:
    """One job: milliseconds, and what was raised; or what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        row: dict[str, object] = {"how": how, "where": where, "ranks": size}
        try:
            victim, others = departing.run(
                Path(folder), how, where, "apart", launcher="shardmath", size=size
            )
        except AssertionError as error:
            return {**row, "failed": str(error)[-2000:]}
        late = max(other["raised"] for other in others) - victim["ended"]
        kinds = sorted({other["kind"] for other in others})
        usable = all(other["usable"] for other in others)
        return {**row, "ms": round(1e3 * late, 1), "raised": kinds, "usable": usable}


def main(options: argparse.Namespace) -> None:
    jobs = [(how, where) for how, where in departing.JOBS if options.all or how in FEW]
    rows = []
    for how, where in jobs:
        rows.append(measured(how, where, options.gpus))
        if "failed" in rows[-1]:
            print(rows[-1]["failed"], file=sys.stderr)
    record.keep(f"gpu_deaths_{options.gpus}", rows, options.commit, **on_gpus.facts(options.gpus))


if __name__ == "__main__":
    parser = on_gpus.command(__doc__)
    parser.add_argument("--all", action="store_true", help="all ways to end")
    main(parser.parse_args())
