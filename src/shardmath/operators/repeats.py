"""Executions that come again: agreed on by a number, and launched as one CUDA graph.

Every execution of a plan has a number, the same on all ranks. A rank whose call is as it was in an
earlier one, with its arrays and its lane's memory where they were then, says the number of that
execution in place of what its peers would have to know. Where all ranks say the same one, what they
told each other then still holds: nobody prepares anything, and what was launched then is launched
again, from the second time on as a graph.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from shardmath.cuda.graph import Graph
from shardmath.operators.lanes import Lane
from shardmath.symmetric.heap import Block

__all__ = ["Known", "Repeats"]

_KEPT = 16  # executions of a plan: results that are new each time lie in a few places


Agreed = TypeVar("Agreed")


@dataclass
class Known(Generic[Agreed]):
    """An execution that can come again: what all ranks `agreed` on for it, and the lane's memory
    by name. Its `graph` is made when it does come again.
    """

    number: int
    agreed: Agreed
    blocks: Mapping[str, Block] = field(repr=False)
    graph: Graph | None = field(default=None, repr=False)

    def launch(self, lane: Lane, stream: int, launches: Callable[[int], None]) -> None:
        """Put on `stream` what `launches(stream)` would. That is called the first time only."""
        if self.graph is None:
            self.graph = lane.graph(launches)
        lane.team.check()
        with lane.entered(stream):
            self.graph.launch(stream)


class Repeats(Generic[Agreed]):
    """The latest executions of one plan on one rank."""

    def __init__(self) -> None:
        self._count = 0
        self._known: OrderedDict[Hashable, Known[Agreed]] = OrderedDict()

    def next(self) -> int:
        """The number of one more execution. To be called where all ranks call it."""
        self._count += 1
        return self._count

    def find(self, key: Hashable, lane: Lane) -> Known[Agreed] | None:
        """The execution that had that key, if the lane's memory is what it was then."""
        known = self._known.get(key)
        if known is None or not lane.holds(known.blocks):
            return None
        self._known.move_to_end(key)
        return known

    def keep(self, key: Hashable, number: int, agreed: Agreed, lane: Lane) -> None:
        """Remember an execution whose memory has been prepared."""
        self._known[key] = Known(number, agreed, lane.blocks())
        self._known.move_to_end(key)
        if len(self._known) > _KEPT:
            self._known.popitem(last=False)
