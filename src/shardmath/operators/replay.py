"""Executions that come again: agreed on by a number, and launched as one CUDA graph.

Every execution in a context has a number, the same on all ranks. A rank whose call is as it was in
an earlier one, with its operands and its lane's memory where they were then, says the number of
that execution in place of what its peers would have to know. Where all ranks say the same one, what
they told each other then still holds, and nobody says anything else. Where results lie is each
rank's own affair: what is put on the stream for one place is a graph from the second time on.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from shardmath.cuda.graph import Graph
from shardmath.lru_cache import LRUCache
from shardmath.operators.lanes import Lane

__all__ = ["Known", "Launches", "Replays"]

_KEPT, _PLACES = 128, 32  # executions, and places of the results of one

Agreed = TypeVar("Agreed")


@dataclass
class Launches:
    """What is put on streams in a turn of one lane, again and again: `graphs` by where this rank's
    results lie, None for a place seen once.
    """

    lane: Lane
    graphs: LRUCache[Hashable, Graph | None] = field(
        init=False, repr=False, default_factory=lambda: LRUCache(_PLACES)
    )

    def launch(self, place: Hashable, stream: int, launches: Callable[[int], None]) -> bool:
        """Put on `stream` what `launches(stream)` puts there, for results at `place`.

        Whether it is captured into a graph of the user's: then it is launched piece by piece.
        """
        self.lane.team.check()
        with self.lane.entered(stream) as turn:
            graph = None if turn.captured else self._graph(place, launches)
            if graph is None:
                launches(stream)
            else:
                graph.launch(stream)
        return turn.captured

    def _graph(self, place: Hashable, launches: Callable[[int], None]) -> Graph | None:
        graph = self.graphs.find(place)
        if graph is None:
            seen = place in self.graphs
            graph = self.graphs.keep(place, self.lane.graph(launches) if seen else None)
        return graph


@dataclass
class Known(Launches, Generic[Agreed]):
    """An execution that can come again: what was `agreed` on for it, and its lane's memory by name,
    as it was then.
    """

    number: int
    agreed: Agreed
    memory: Mapping[str, object] = field(repr=False)


class Replays(Generic[Agreed]):
    """The latest executions of one kind of operation of a context, on one rank."""

    def __init__(self) -> None:
        self._count = 0
        self._known: LRUCache[Hashable, Known[Agreed]] = LRUCache(_KEPT)

    def next(self) -> int:
        """The number of one more execution. To be called where all ranks call it."""
        self._count += 1
        return self._count

    def find(self, key: Hashable) -> Known[Agreed] | None:
        """The execution that had that key, if its lane's memory is what it was then."""
        known = self._known.find(key)
        return known if known is not None and known.lane.holds(known.memory) else None

    def keep(self, key: Hashable, number: int, agreed: Agreed, lane: Lane) -> None:
        """Remember an execution whose memory has been prepared."""
        self._known.keep(key, Known(lane, number, agreed, lane.memory()))
