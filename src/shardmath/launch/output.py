"""The ranks' output on the launcher's own: every line whole, and marked with its rank.

A line is written when it is complete, so lines of different ranks never mix. A carriage return ends
a line as well, and is passed on: progress bars move. What a rank leaves unfinished is written when
it is flushed.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Final

# Bytes; a longer line is written in parts, so that memory stays bounded.
LINE_LIMIT: Final = 1 << 20

# "\r" at the very end stays pending: it may be the first half of "\r\n".
_END = re.compile(rb"\r\n|\n|\r(?!\Z)")


class Prefixer:
    """Merges the ranks' bytes into one stream of lines like `[2] text`."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self._pending: dict[int, bytes] = {}
        self._open: int | None = None  # the rank whose unfinished line stands on the screen

    def feed(self, rank: int, data: bytes) -> None:
        """Take `data` from `rank` and write the lines that it completes."""
        pending = self._pending.pop(rank, b"") + data
        ends = [0, *(match.end() for match in _END.finditer(pending))]
        lines = [pending[start:end] for start, end in itertools.pairwise(ends)]
        rest = pending[ends[-1] :]
        if len(rest) > LINE_LIMIT:
            lines.append(rest + b"\n")
            rest = b""
        if rest:
            self._pending[rank] = rest
        if lines:
            self._emit(rank, lines)

    def is_open(self, rank: int) -> bool:
        """Whether `rank` has written a part of a line that waits for its end."""
        return rank in self._pending

    def show_partial(self, rank: int) -> None:
        """Write the unfinished line of `rank`, say a prompt, and leave the line open."""
        rest = self._pending.pop(rank, b"")
        if rest:
            self._emit(rank, [rest])
            self._open = rank

    def finish(self) -> None:
        """Write what is pending and end every line."""
        for rank in sorted(self._pending):
            self._emit(rank, [self._pending[rank].rstrip(b"\r") + b"\n"])
        self._pending.clear()
        self._close_line()

    def _emit(self, rank: int, lines: list[bytes]) -> None:
        prefix = b"[%d] " % rank
        text = b"".join(prefix + line for line in lines)
        if self._open == rank:
            text = text.removeprefix(prefix)
            self._open = None
        self._close_line()
        self._write(text)

    def _close_line(self) -> None:
        if self._open is not None:
            self._open = None
            self._write(b"\n")
