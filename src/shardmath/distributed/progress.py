"""A progress bar on rank 0 for work of many turns, silent where there is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TypeVar

from shardmath.context.context import DistributedContext

T = TypeVar("T")


def shown(turns: Sequence[T], title: str, context: DistributedContext) -> Iterator[T]:
    """The turns, one after the other; on rank 0 a bar says how many there are still to come.

    The bar is rich's, an extra: without it, or without a terminal, nothing is said.
    """
    if context.rank == 0 and len(turns) > 1 and sys.stderr.isatty():
        try:
            from rich.console import Console
            from rich.progress import track
        except ImportError:
            pass
        else:
            yield from track(turns, title, console=Console(stderr=True))
            return
    yield from turns
