"""Replay of executions on GPUs: what one launches is captured into a CUDA graph, for the next.

The ranks have agreed that all of them do what they did before. Where results lie is each rank's own
affair: what is launched for one place is captured into a graph the second time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from shardmath.base.caller import caller_line
from shardmath.base.lru_cache import LRUCache
from shardmath.context.context import Context
from shardmath.cuda import stream as streams
from shardmath.cuda.graph import Graph
from shardmath.operators.lanes import Lane

__all__ = ["GraphCache", "Launch", "Launches"]

_PLACES = 32  # of results, of which the graphs are kept


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

    def find(self, place: Hashable) -> Graph | None:
        """The graph for results at `place`, once there is one."""
        return self.graphs.find(place)


@dataclass(frozen=True, eq=False)
class Launch:
    """A graph that makes a call again, if all ranks agree as in `agreement`; this rank's note is
    `note`. `check` raises where nothing more can be launched, `give(turn)` has the results.
    """

    context: Context
    agreement: Any
    note: bytes
    lane: Lane
    graph: Graph
    give: Callable[[Any], tuple[Any, ...]]
    check: Callable[[], None] | None = None

    def launch(self, turn: Any) -> tuple[Any, ...]:
        """See Repeat. An error here ends the wait of the peers at once."""
        try:
            if self.check is not None:
                self.check()
            self.lane.launch(self.graph, turn.held.stream)
            return self.give(turn)
        except BaseException as error:
            self.context.board.interrupted(error, caller_line())
            raise


class Launches:
    """Launches for calls on the same arrays, by the place of this rank's results: while `facts` are
    what they were, and the lane's memory has that version. Calls look for them by `results`.
    """

    __slots__ = ("_lane", "facts", "places", "results", "version")

    def __init__(self, lane: Lane, facts: tuple[Any, ...], results: Any) -> None:
        self._lane, self.facts, self.results = lane, facts, results
        self.version = lane.version
        self.places: LRUCache[Hashable, Launch] = LRUCache(_PLACES)

    @classmethod
    def keep(
        cls, known: Any, facts: tuple[Any, ...], results: Any, place: Hashable, launch: Launch
    ) -> None:
        """Let calls of which that is `known` find a launch."""
        found: Launches | None = known.repeats
        if found is None or found.facts != facts or found.version != launch.lane.version:
            found = known.repeats = cls(launch.lane, facts, results)
        found.places.keep(place, launch)

    def hold(self, facts: tuple[Any, ...], stream: int) -> bool:
        """Whether they can be launched on `stream`: what is captured is not launched now."""
        same = self.facts == facts and self.version == self._lane.version
        return same and not streams.capturing(stream)
