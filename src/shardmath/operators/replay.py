"""Replay of executions on GPUs: agreed on by a number, and launched as one CUDA graph.

Every execution in a context has a number, the same on all ranks. A rank whose call is the same as
in an earlier execution, with its operands and its lane's memory where they were then, sends the
number of that execution in place of what its peers would have to know. If all ranks send the same
number, what they sent each other in that execution still holds, and no rank sends anything else.
Where results lie is each rank's own affair: what is launched for one place is captured into a graph
the second time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from shardmath.cuda.graph import Graph
from shardmath.lru_cache import LRUCache
from shardmath.operators.lanes import Lane

__all__ = ["GraphCache", "Replay", "ReplayCache"]

_EXECUTIONS, _PLACES = 128, 32  # kept: executions, and graphs of each by the place of its results

Agreed = TypeVar("Agreed")


@dataclass
class GraphCache:
    """Graphs of what one execution launches in a lane, by the place of this rank's results; None
    for a place that was used once.
    """

    lane: Lane
    graphs: LRUCache[Hashable, Graph | None] = field(
        init=False, repr=False, default_factory=lambda: LRUCache(_PLACES)
    )

    def launch(self, place: Hashable, stream: int, enqueue: Callable[[int], None]) -> bool:
        """Launch on `stream` what `enqueue(stream)` enqueues, for results at `place`.

        Returns whether the stream is being captured into a graph of the user's: then nothing is
        launched as a graph of ours.
        """
        self.lane.team.check()
        with self.lane.section(stream) as turn:
            graph = None if turn.captured else self._graph(place, enqueue)
            if graph is None:
                enqueue(stream)
            else:
                graph.launch(stream)
        return turn.captured

    def _graph(self, place: Hashable, enqueue: Callable[[int], None]) -> Graph | None:
        graph = self.graphs.find(place)
        if graph is None:
            used_before = place in self.graphs
            graph = self.graphs.keep(place, self.lane.graph(enqueue) if used_before else None)
        return graph


@dataclass
class Replay(GraphCache, Generic[Agreed]):
    """An execution that can be replayed: its number, what was `agreed` on for it, and its lane's
    memory by name, as it was then.
    """

    number: int
    agreed: Agreed
    memory: Mapping[str, object] = field(repr=False)


class ReplayCache(Generic[Agreed]):
    """The latest executions of one kind of operation of a context, on one rank."""

    def __init__(self) -> None:
        self._count = 0
        self._replays: LRUCache[Hashable, Replay[Agreed]] = LRUCache(_EXECUTIONS)

    def next_number(self) -> int:
        """The number of one more execution. Called when all ranks call it."""
        self._count += 1
        return self._count

    def find(self, key: Hashable) -> Replay[Agreed] | None:
        """The execution that had that key, if its lane's memory is what it was then."""
        replay = self._replays.find(key)
        return replay if replay is not None and replay.lane.holds(replay.memory) else None

    def keep(self, key: Hashable, number: int, agreed: Agreed, lane: Lane) -> None:
        """Keep an execution whose memory has been prepared."""
        self._replays.keep(key, Replay(lane, number, agreed, lane.memory()))
