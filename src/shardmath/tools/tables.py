"""Tables on stdout: rich's on a terminal where it is installed, else plain text."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.table import Table
            from rich.text import Text
        except ImportError:
            pass
        else:
            made = Table(*header, title=title, title_justify="left")
            for row in rows:
                made.add_row(*map(Text, row))
            Console().print(made)
            return
    print(plain(title, header, rows))


def plain(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table as text, its columns in line."""
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    ]
    return "\n".join([f"{title}:", *(f"  {line}" for line in lines)])
