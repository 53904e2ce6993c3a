"""A picture of gpu_matmul.py's figures, beside them: time against m, one line a system.

python benchmarks/gpu_matmul_picture.py results/gpu_matmul_8.json [--what AG+GEMM]
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

LINES = {  # by column: name, colour, style
    "nccl_ms": ("NCCL + cuBLAS", "tab:orange", "o-"),
    "torch_ms": ("torch, fused", "tab:red", "s-"),
    "ours_ms": ("shardmath", "tab:blue", "D-"),
    "local_ms": ("cuBLAS alone", "tab:gray", "--"),
}


def main() -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("json", type=Path)
    parser.add_argument("--what", default="AG+GEMM")
    options = parser.parse_args()
    found = json.loads(options.json.read_text())
    rows = [row for row in found["rows"] if row["what"] == options.what]
    (n, k), _ = Counter((row["n"], row["k"]) for row in rows).most_common(1)[0]
    rows = sorted((row for row in rows if (row["n"], row["k"]) == (n, k)), key=lambda r: r["m"])
    figure, axes = plt.subplots(figsize=(7, 4.5))
    heights = [row["m"] for row in rows]
    for column, (name, colour, style) in LINES.items():
        axes.plot(heights, [row[column] for row in rows], style, color=colour, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(heights, [str(m) for m in heights])
    axes.set_xlabel("m")
    axes.set_ylabel("ms")
    axes.set_title(f"{options.what}, n = {n}, k = {k}, bfloat16, {found['gpus']} x {found['gpu']}")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(options.json.with_suffix(".svg"))


if __name__ == "__main__":
    main()
