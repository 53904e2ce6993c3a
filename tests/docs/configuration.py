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
