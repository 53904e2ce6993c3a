"""Bringing strided boxes of peers' matrices into memory of this GPU, beside the products.

With a stream of its own the gathering runs ahead: a product's stream waits for the panels that it
needs, and a panel's memory is filled again only when the product that read it is done. Rows that
are long enough are then moved by the copy engines, which take no multiprocessor from a product that
runs; all else by one launch of a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from shardmath.cuda.driver import call
from shardmath.geometry import Move
from shardmath.local.gpu import Matrix
from shardmath.operators.lanes import Lane
from shardmath.operators.matmul.gpu.copy_engines import EngineCopies, engine_copies
from shardmath.operators.published import Places
from shardmath.redistribution.copies import StridedCopy, lowered
from shardmath.redistribution.device import Box, BoxCopies

__all__ = ["Gather"]

_MOST_SOURCES = 96  # of one launch


class Gather:
    """What one execution gathers. Without `prefetching`, all of it is on the product's stream.

    `cache` holds the geometry of what has been gathered before, for as long as its plan lives.
    """

    def __init__(self, lane: Lane, stream: int, cache: dict[Any, Any]) -> None:
        self._lane = lane
        self._stream = stream
        self._prefetch_stream: Any = None
        self._cache = cache

    @property
    def stream(self) -> Any:
        """Where it gathers."""
        return self._stream if self._prefetch_stream is None else self._prefetch_stream

    @contextmanager
    def prefetching(self, overlaps: bool) -> Iterator[None]:
        """Let what is fetched run on a stream of its own, if `overlaps`."""
        if overlaps:
            self._prefetch_stream = self._lane.side
            self._wait(self._prefetch_stream, self._record("fork", self._stream))
        yield

    def await_release(self, number: int) -> None:
        """What is fetched next takes the memory of interval `number`."""
        if self._prefetch_stream is not None:
            self._wait(self._prefetch_stream, self._lane.event(f"used {number}"))

    def await_panels(self, number: int) -> None:
        """The product of interval `number` comes after its panels."""
        if self._prefetch_stream is not None:
            self._wait(self._stream, self._record(f"come {number}", self._prefetch_stream))

    def release(self, number: int) -> None:
        """The product of interval `number` is on its stream."""
        if self._prefetch_stream is not None:
            self._record(f"used {number}", self._stream)

    def copy(self, name: str, moves: Sequence[Move], places: Places, panel: Matrix) -> None:
        """Perform `moves` into a packed matrix; the source of each is where `places` says.

        A `name` stands for the same moves each time.
        """
        steps = panel.row_stride * panel.itemsize, panel.column_stride * panel.itemsize
        sources = {move.src: places(move.src) for move in moves if move.elements}
        strides = tuple((src, strides) for src, (_, strides) in sources.items())
        key = (name, steps, strides, self._prefetch_stream is None)
        if key not in self._cache:
            found = [
                lowered(move, panel.itemsize, sources[move.src][1], steps)
                for move in sorted(moves, key=_ring_order)
                if move.elements
            ]
            by_engines = None if self._prefetch_stream is None else engine_copies(found)
            self._cache[key] = by_engines or self._boxes(found)
        made, stream = self._cache[key], self.stream
        if isinstance(made, EngineCopies):
            last = max(sources, default=-1)
            addresses = [sources.get(rank, (0, ()))[0] for rank in range(last + 1)]
            made.launch(stream, addresses, panel.address)
            return
        for ranks, boxes in made:
            boxes.launch(stream, [sources[rank][0] for rank in ranks], [panel.address])

    def _boxes(self, found: Sequence[StridedCopy]) -> list[tuple[list[int], BoxCopies]]:
        """Launches from the memories of these ranks each, since one has room for so many."""
        ranks, launches = list(dict.fromkeys(copy.src for copy in found)), []
        for start in range(0, len(ranks), _MOST_SOURCES):
            number = {rank: at for at, rank in enumerate(ranks[start : start + _MOST_SOURCES])}
            boxes = [
                Box.of(replace(copy, src=number[copy.src]), 0)
                for copy in found
                if copy.src in number
            ]
            launches.append((list(number), BoxCopies(self._lane.team.device, boxes)))
        return launches

    def _record(self, name: str, stream: Any) -> Any:
        event = self._lane.event(name)
        call("cuEventRecord", event, stream)
        return event

    @staticmethod
    def _wait(stream: Any, event: Any) -> None:
        call("cuStreamWaitEvent", stream, event, 0)


def _ring_order(move: Move) -> tuple[bool, int]:
    """From the next rank on to this one's own: no two ranks begin with the same."""
    return move.src <= move.dst, move.src
