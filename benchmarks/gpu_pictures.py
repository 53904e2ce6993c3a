"""Draws the figures of gpu_fft.py or gpu_matmul.py, next to the JSON file.

    python benchmarks/gpu_pictures.py results/gpu_fft_4.json
    python benchmarks/gpu_pictures.py results/gpu_matmul_8.json

Transforms are bars, as multiples of our own time, so that all sizes can be seen. Products are lines
of time against m, for the n and k that most rows have.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

BARS = [
    ("ours_ms", "shardmath", "#2a6f97"),
    ("nccl_ms", "torch.fft and NCCL, same run", "#a9a9a9"),
    ("cufftmp_seen_elsewhere_ms", "cuFFTMp, another day", "#e9c46a"),
    ("local_ms", "local transforms alone", "#d8e2dc"),
]
LINES = {  # by column: name, colour, style
    "nccl_ms": ("NCCL + cuBLAS", "tab:orange", "o-"),
    "torch_ms": ("torch, fused", "tab:red", "s-"),
    "ours_ms": ("shardmath", "tab:blue", "D-"),
    "local_ms": ("cuBLAS alone", "tab:gray", "--"),
}


def bars(plt: Any, results: dict[str, Any]) -> Any:
    """Transforms, by type and by where the result ends."""
    measured = {row["dtype"] for row in results["rows"]}
    dtypes = [dtype for dtype in ("complex64", "float32", "complex128") if dtype in measured]
    shown = [bar for bar in BARS if any(bar[0] in row for row in results["rows"])]
    groups = [(result, dtype) for result in ("transposed", "back") for dtype in dtypes]
    size = 2 + 3 * max(len(dtypes), 2), 6
    figure, all_axes = plt.subplots(
        2, len(dtypes), figsize=size, constrained_layout=True, squeeze=False
    )
    for axes, (result, dtype) in zip(all_axes.flat, groups, strict=True):
        rows = [r for r in results["rows"] if (r["result"], r["dtype"]) == (result, dtype)]
        rows.sort(key=lambda row: row["n"])
        for number, (name, label, colour) in enumerate(shown):
            heights = [row.get(name, 0) / row["ours_ms"] for row in rows]
            places = [group + 0.2 * (number - (len(shown) - 1) / 2) for group in range(len(rows))]
            drawn = axes.bar(places, heights, 0.19, label=label, color=colour)
            texts = [f"{row[name]:.3g}" if name in row else "" for row in rows]
            axes.bar_label(drawn, texts, fontsize=7, rotation=90, padding=2)
        axes.set_xticks(range(len(rows)), [f"{row['n']}\u00b3" for row in rows])
        axes.set_ylim(0, 1.35 * max((bar.get_height() for bar in axes.patches), default=1))
        slab = "slab X to slab Y" if result == "transposed" else "slab X to slab X"
        axes.set_title(f"{dtype}, {slab}", fontsize=10)
    for axes in all_axes[:, 0]:
        axes.set_ylabel("time / shardmath's; labels: ms")
    handles, labels = all_axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(shown), fontsize=8)
    figure.suptitle(f"3-D Fourier transforms on {results['gpus']} x {results['gpu']}")
    return figure


def lines(plt: Any, results: dict[str, Any]) -> Any:
    """Products, one line a system."""
    (n, k), _ = Counter((row["n"], row["k"]) for row in results["rows"]).most_common(1)[0]
    rows = [row for row in results["rows"] if (row["n"], row["k"]) == (n, k)]
    rows.sort(key=lambda row: row["m"])
    figure, axes = plt.subplots(figsize=(7, 4.5))
    heights = [row["m"] for row in rows]
    for column, (name, colour, style) in LINES.items():
        axes.plot(heights, [row[column] for row in rows], style, color=colour, label=name)
    axes.set(xlabel="m", ylabel="ms", yscale="log")
    axes.set_xscale("log", base=2)
    axes.set_xticks(heights, [str(m) for m in heights])
    where = f"{results['gpus']} x {results['gpu']}"
    axes.set_title(f"{rows[0]['what']}, n = {n}, k = {k}, bfloat16, {where}")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    path = Path(sys.argv[1])
    results = json.loads(path.read_text())
    draw = bars if results["benchmark"].startswith("gpu_fft") else lines
    draw(plt, results).savefig(path.with_suffix(".svg"))
