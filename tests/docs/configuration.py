"""Write docs/configuration.md: `PYTHONPATH=src python tests/docs/configuration.py`."""

from __future__ import annotations

from pathlib import Path

from shardmath import config

PAGE = Path(__file__).parent.parent.parent / "docs" / "configuration.md"

HEAD = """\
# Configuration

The environment variables that shardmath reads, when a context is made. It warns of any other name
that begins with `SHARDMATH_`, with the nearest name of this table. `python -m shardmath env` prints
the same table. This page is written by `tests/docs/configuration.py`.

A rank's products and Fourier transforms on cores use `SHARDMATH_THREADS` threads, which
`python -m shardmath run --threads` sets; else `OMP_NUM_THREADS`; else as many as the cores that the
rank may run on, divided by the ranks of the job that may run on some of them. With threadpoolctl
installed, libraries of BLAS and OpenMP that are loaded when a context is made, NumPy's and torch's,
are limited to that until it ends; a library whose number of threads a variable sets is left alone.
Without threadpoolctl that takes `run`, or the variables.

| variable | type | default | meaning |
| --- | --- | --- | --- |
"""


def page() -> str:
    """The page, from the table in `shardmath.config`."""
    rows = [
        f"| `{name}` | {kind} | {f'`{default}`' if default else 'empty'} | {sentence} |"
        for name, kind, default, sentence in config.table()
    ]
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
