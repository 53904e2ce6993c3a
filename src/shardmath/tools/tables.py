"""Tables on stdout: rich's on a terminal where it is installed, else plain text."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import zip_longest
from shutil import get_terminal_size
from textwrap import wrap


def show(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, most: int = sys.maxsize
) -> None:
    """Print a table. Cells may have several lines.

    In plain text lines have `most` letters in a cell. On a terminal the columns fit its width.
    """
    if sys.stdout.isatty():
        try:
            from rich.box import SIMPLE_HEAD
            from rich.console import Console
            from rich.table import Column, Table
            from rich.text import Text
        except ImportError:
            most = min(most, _room_in_last_column([header, *rows]))
        else:
            # Cells go on in the next line of a narrow terminal: by default they would be cut.
            columns = [Column(text, overflow="fold") for text in header]
            made = Table(*columns, title=title, title_justify="left", box=SIMPLE_HEAD)
            made.padding, made.pad_edge, made.show_edge = (0, 1, 0, 0), False, False
            for row in rows:
                made.add_row(*map(Text, row))
            Console().print(made)
            return
    print(plain(title, header, rows, most=most))


def plain(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, most: int = sys.maxsize
) -> str:
    """The table as text, with aligned columns."""
    lines = [tuple(header)]
    for row in rows:
        cells = [[part for line in text.split("\n") for part in _parts(line, most)] for text in row]
        lines += zip_longest(*cells, fillvalue="")
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    drawn = [
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return "\n".join([f"{title}:", *(f"  {line}" for line in drawn)])


def _room_in_last_column(rows: Sequence[Sequence[str]]) -> int:
    """How many letters the last column may have on this terminal, 20 at least."""
    columns = zip(*(row[:-1] for row in rows), strict=True)
    widths = [max(len(line) for cell in column for line in cell.split("\n")) for column in columns]
    taken = sum(width + 2 for width in widths)
    return max(20, get_terminal_size().columns - 2 - taken)


def _parts(line: str, most: int) -> list[str]:
    return [line] if len(line) <= most else wrap(line, most, break_on_hyphens=False)
