"""Executions that come again: agreed on by a number, and launched as one CUDA graph.

Every execution of a plan has a number, the same on all ranks. A rank whose call is as it was in an
earlier one, with its operands and its lane's memory where they were then, says the number of that
execution in place of what its peers would have to know. Where all ranks say the same one, what they
told each other then still holds, and nobody says anything else. Where results lie is each rank's
own affair, unless peers write them: what is put on the stream for one place is a graph from the
second time on.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from shardmath.cuda.graph import Graph
from shardmath.latest import Latest
from shardmath.operators.lanes import Lane

__all__ = ["Known", "Repeats"]

_KEPT = 16  # executions of a plan, and places of the results of one

Agreed = TypeVar("Agreed")


@dataclass
class Known(Generic[Agreed]):
    """An execution that can come again: what all ranks `agreed` on for it, the lane's memory by
    name, and the `graphs` by where this rank's results lie, None for a place seen once.
    """

    number: int
    agreed: Agreed
    memory: Mapping[str, object] = field(repr=False)
    graphs: Latest[Hashable, Graph | None] = field(
        repr=False, default_factory=lambda: Latest(_KEPT)
    )

    def launch(
        self, place: Hashable, lane: Lane, stream: int, launches: Callable[[int], None]
    ) -> None:
        """Put on `stream` what `launches(stream)` puts there, for results at `place`."""
        graph = self.graphs.find(place)
        if graph is None:
            seen = place in self.graphs
            graph = lane.graph(launches) if seen else None
            self.graphs.keep(place, graph)
        lane.team.check()
        with lane.entered(stream):
            if graph is None:
                launches(stream)
            else:
                graph.launch(stream)


class Repeats(Generic[Agreed]):
    """The latest executions of one plan on one rank."""

    def __init__(self) -> None:
        self._count = 0
        self._known: Latest[Hashable, Known[Agreed]] = Latest(_KEPT)

    def next(self) -> int:
        """The number of one more execution. To be called where all ranks call it."""
        self._count += 1
        return self._count

    def find(self, key: Hashable, lane: Lane) -> Known[Agreed] | None:
        """The execution that had that key, if the lane's memory is what it was then."""
        known = self._known.find(key)
        return known if known is not None and lane.holds(known.memory) else None

    def keep(self, key: Hashable, number: int, agreed: Agreed, lane: Lane) -> None:
        """Remember an execution whose memory has been prepared."""
        self._known.keep(key, Known(number, agreed, lane.memory()))

    def forget(self) -> None:
        """Nothing comes again as it was: the way to do it has changed on all ranks."""
        self._known.clear()
