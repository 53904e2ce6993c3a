"""The figures of gpu_fft.py as bars, beside them.

python benchmarks/gpu_fft_picture.py results/gpu_fft_4.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

BARS = [
    ("ours_ms", "shardmath", "#2a6f97"),
    ("nccl_ms", "torch.fft and NCCL, same run", "#a9a9a9"),
    ("cufftmp_seen_elsewhere_ms", "cuFFTMp, another day", "#e9c46a"),
    ("local_ms", "local transforms alone", "#d8e2dc"),
]


def main() -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    path = Path(sys.argv[1])
    found = json.loads(path.read_text())
    measured = {row["dtype"] for row in found["rows"]}
    dtypes = [dtype for dtype in ("complex64", "float32", "complex128") if dtype in measured]
    shown = [bar for bar in BARS if any(bar[0] in row for row in found["rows"])]
    groups = [(result, dtype) for result in ("transposed", "back") for dtype in dtypes]
    figure, all_axes = plt.subplots(
        2,
        len(dtypes),
        figsize=(2 + 3 * max(len(dtypes), 2), 6),
        constrained_layout=True,
        squeeze=False,
    )
    for axes, (result, dtype) in zip(all_axes.flat, groups, strict=True):
        rows = [r for r in found["rows"] if (r["result"], r["dtype"]) == (result, dtype)]
        rows.sort(key=lambda row: row["n"])
        for number, (name, label, colour) in enumerate(shown):
            # As multiples of our own time, so that all sizes can be seen.
            heights = [row.get(name, 0) / row["ours_ms"] for row in rows]
            places = [at + 0.2 * (number - (len(shown) - 1) / 2) for at in range(len(rows))]
            bars = axes.bar(places, heights, 0.19, label=label, color=colour)
            texts = [f"{row[name]:.3g}" if name in row else "" for row in rows]
            axes.bar_label(bars, texts, fontsize=7, rotation=90, padding=2)
        axes.set_xticks(range(len(rows)), [f"{row['n']}\u00b3" for row in rows])
        axes.set_ylim(0, 1.35 * max((bar.get_height() for bar in axes.patches), default=1))
        slab = "slab X to slab Y" if result == "transposed" else "slab X to slab X"
        axes.set_title(f"{dtype}, {slab}", fontsize=10)
    all_axes[0][0].set_ylabel("time / shardmath's; labels: ms")
    all_axes[1][0].set_ylabel("time / shardmath's; labels: ms")
    handles, labels = all_axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(shown), fontsize=8)
    figure.suptitle(f"3-D Fourier transforms on {found['gpus']} x {found['gpu']}")
    figure.savefig(path.with_suffix(".svg"))


if __name__ == "__main__":
    main()
