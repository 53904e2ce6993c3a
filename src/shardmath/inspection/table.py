"""One table of all ranks: where each is, since when, and who is missing. Pure."""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from typing import NamedTuple

from shardmath.base.caller import PACKAGE, file_line
from shardmath.base.recorder import RAISED, Operation
from shardmath.inspection.stacks import Frame

_HEAD = ("rank", "pid", "#", "operation", "since", "at")
_RIGHT = (0, 1, 2, 4)  # columns that are right-aligned


class Seen(NamedTuple):
    """What was seen of a rank: its last operation, `state_of` its process, its stack.

    `elsewhere` is what is known of a rank on another host.
    """

    rank: int
    pid: int
    last: Operation | None = None
    state: str = ""
    stack: Sequence[Frame] = ()
    elsewhere: str = ""

    @property
    def under_way(self) -> bool:
        """Whether it is in an operation."""
        return self.last is not None and self.last.ended == 0 and not self.state


def missing(ranks: Sequence[Seen]) -> list[Seen]:
    """The ranks that are in no operation while others are in one."""
    here = [each for each in ranks if not each.elsewhere]
    if not any(each.under_way for each in here):
        return []
    return [each for each in here if not each.under_way]


def table(ranks: Sequence[Seen], now: int) -> str:
    """The table, in lines; below it the stacks of those that are missing. `now` as `begun` is."""
    rows = [_HEAD, *[_row(each, now) for each in ranks]]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = ["  ".join(_aligned(row, widths)).rstrip() for row in rows]
    names = {each.last.name for each in ranks if each.under_way and each.last is not None}
    if len(names) > 1:
        lines.append(f"the ranks are in different operations: {', '.join(sorted(names))}")
    for each in missing(ranks):
        lines.append(
            f"missing: rank {each.rank} (pid {each.pid}){each.state and ', which '}{each.state}"
        )
        for frame in each.stack:
            lines.append(f"  {frame.file}:{frame.line} in {frame.function}")
            source = linecache.getline(frame.file, frame.line).strip()
            lines += [f"    {source}"] if source else []
    return "\n".join(lines)


def _row(each: Seen, now: int) -> tuple[str, ...]:
    if each.elsewhere:
        return str(each.rank), str(each.pid), "", each.elsewhere, "", ""
    outside = (frame for frame in each.stack if not frame.file.startswith(PACKAGE))
    inner = next(outside, None) or next(iter(each.stack), None)
    at = file_line(inner.file, inner.line) if inner else ""
    last = each.last
    if last is None:
        return str(each.rank), str(each.pid), "", each.state or "none so far", "", at
    stream = f"on stream {last.stream:#x}" if last.stream else ""
    what = " ".join(filter(None, (last.name, last.operands, stream)))
    if each.state:
        what, since = f"{each.state}; last in {what}", last.ended or last.begun
    elif last.ended:
        how = "left by an exception" if last.state == RAISED else "after"
        what, since = f"{how}: {what}", last.ended
    else:
        since = last.begun
        at = file_line(last.file, last.line)
    return str(each.rank), str(each.pid), str(last.number), what, _seconds(now - since), at


def _aligned(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [
        text.rjust(width) if column in _RIGHT else text.ljust(width)
        for column, (text, width) in enumerate(zip(row, widths, strict=True))
    ]


def _seconds(nanoseconds: int) -> str:
    seconds = nanoseconds / 1e9
    return f"{seconds:.1f} s" if seconds >= 0.1 else f"{1e3 * seconds:.2f} ms"
