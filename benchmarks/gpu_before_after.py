"""Figures of two versions of the source, as ratios: results of the same benchmarks, run in turn.

    python benchmarks/gpu_before_after.py BEFORE AFTER

BEFORE and AFTER are folders of results, `benchmarks/results` of two working trees that were
measured on the same machine, one benchmark after the other. A ratio is the time after divided by
the time before: 1.05 is 5 % slower.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path

# By file of results: what it is about, and which of a row's figures are times of ours.
TIMES = {
    "gpu_redistribution_2": ("redistribution", ["ours_us"]),
    "gpu_fft_2": ("transforms", ["ours_ms", "called_ms"]),
    "gpu_matmul_grid_2": ("block-cyclic products", ["ours_ms", "eager_ms"]),
    "gpu_matmul_2": ("AllGather + GEMM", ["ours_ms"]),
    "gpu_matmul_reduce_2": ("GEMM + ReduceScatter, AllReduce", ["execute_us", "heap_us"]),
    "gpu_float8_2": ("float8 products", ["ours"]),
    "gpu_epilogs_1": ("epilogs", ["kernel_us", "within_us"]),
    "gpu_hosts_cuda_2": ("pretended hosts, mapped", ["one_host_ms", "two_hosts_ms"]),
    "gpu_hosts_nvshmem_2": ("pretended hosts, NVSHMEM", ["one_host_ms", "two_hosts_ms"]),
    "gpu_signals_2": ("signals", ["ours_us"]),
    "gpu_collectives_2": ("collectives", ["ours_us"]),
}
# What a row has besides its case and its figures.
TOLD = {"chosen", "note", "prediction", "plan", "goal", "target", "ours TFLOP/s", "torch TFLOP/s"}


def case(row: dict[str, object]) -> str:
    """The words and sizes that say which case a row is."""
    kinds = (str, int, list)
    return " ".join(str(v) for k, v in row.items() if isinstance(v, kinds) and k not in TOLD)


def ratios(before: Path, after: Path, times: list[str]) -> Iterator[dict[str, object]]:
    """The figures that both files have of the same case."""
    rows = {case(row): row for row in json.loads(before.read_text())["rows"]}
    for row in json.loads(after.read_text())["rows"]:
        other = rows.get(case(row), {})
        for name in times:
            if row.get(name) and other.get(name):
                yield {
                    "row": case(row),
                    "figure": name,
                    "before": other[name],
                    "after": row[name],
                    "ratio": round(row[name] / other[name], 3),
                }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    args = parser.parse_args()
    heads, rows, figures = [], [], []
    for name, (what, times) in TIMES.items():
        files = [folder / f"{name}.json" for folder in (args.before, args.after)]
        if not all(file.exists() for file in files):
            continue
        compared = list(ratios(*files, times))
        values = [float(str(entry["ratio"])) for entry in compared]
        if not values:
            continue
        heads.append([json.loads(file.read_text()) for file in files])
        figures += [{"benchmark": name, **entry} for entry in compared]
        median = round(statistics.median(values), 3)
        spread = {"median": median, "least": min(values), "greatest": max(values)}
        rows.append({"what": what, "benchmark": name, "figures": len(values), **spread})
        print(f"{what:32} {len(values):3} figures, median {median}, {min(values)} to {max(values)}")
    before, after = heads[0]
    known = {key: value for key, value in after.items() if key not in ("benchmark", "rows")}
    result = {"benchmark": "gpu_before_after_2", **known, "before": before["commit"]}
    path = Path(__file__).parent / "results" / "gpu_before_after_2.json"
    path.write_text(json.dumps({**result, "rows": rows, "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
