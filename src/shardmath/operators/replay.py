"""Replay of executions on GPUs: what one launches is captured into a CUDA graph, for the next.

The ranks have agreed that all of them do what they did before. Where results lie is each rank's own
affair: what is launched for one place is captured into a graph the second time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from shardmath.base.lru_cache import LRUCache
from shardmath.cuda.graph import Graph
from shardmath.handles.device_array import Copy
from shardmath.operators.lanes import Lane

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

    def launch(
        self,
        place: Hashable,
        stream: int,
        enqueue: Callable[[int], None],
        copy: Copy | None = None,
    ) -> bool:
        """Launch on `stream` what `enqueue(stream)` enqueues, for results at `place`, and the copy.

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
            self.lane.copy(copy, stream)
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
