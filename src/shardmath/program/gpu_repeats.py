"""Repeated calls on GPUs: each is a CUDA graph, which is launched if all ranks agree as before.

A launch depends on the call's arrays, and on the plan, the stream, and the lane's memory. There is
one for each of the first places where results have lain. A new result at another place, if it is on
the heap or a product's, is written to memory of the lane, and copied from there. It gets a launch
of its own once results have often lain there, or where there is no such memory; if peers are told
nothing of that place, and if there are few launches yet.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial
from typing import Any

from shardmath.arrays import library_named
from shardmath.base.immutable import Immutable
from shardmath.base.lru_cache import LRUCache
from shardmath.call.agreement import Agreement
from shardmath.cuda import stream as streams
from shardmath.cuda.graph import Graph
from shardmath.errors import HeapExhausted
from shardmath.handles.device_array import Copy, ResultTemplate
from shardmath.operators.lanes import Lane
from shardmath.program.performing import Copier, Direct, Home, Known, Steps, Turn

_PLACES = 128  # places of results for which launches are kept
_FIRST = 4  # of them, which get launches at once
_OFTEN = 64  # copies to one place: they take less time than to make a launch
_MOST_MADE = 512  # launches for places on the heap, however often peers' arrays change

Elsewhere = Callable[["Replay", int], "Replay | None"]


class Replay(Immutable, eq=False):
    """A graph that repeats a call on `stream`, if all ranks agree as in `agreement`.

    `note` is this rank's note, and `prepared` is what the performer had prepared. `check` raises if
    nothing more can be launched.
    """

    agreement: Agreement[Any]
    note: bytes
    prepared: Any
    lane: Lane
    graph: Graph
    stream: int
    check: Callable[[], None] | None = None


class _Facts:
    """What a launch depends on besides arrays: it holds while `version` stays the same."""

    __slots__ = ("_device", "_lane", "_stream")

    def __init__(self, lane: Lane, library: str) -> None:
        self._lane, self._device = lane, lane.team.device.ordinal
        self._stream = library_named(library).stream

    @property
    def version(self) -> tuple[int, int] | None:
        """The current stream, and the lane's version; None while that stream is being captured."""
        stream = self._stream(self._device)
        if stream and streams.capturing(stream):
            return None
        return stream, self._lane.version


class Replays:
    """Replays of calls on the same arrays, by the places of this rank's results.

    They hold while the `facts` of a call, (plan, stream), and the `version` of the lane's memory
    are the same. `results` are templates of the new results. `elsewhere(launch, address)` makes a
    launch like that one, of the same agreement, for a new result at that address, or gives None.
    """

    __slots__ = ("_elsewhere", "_made", "facts", "lane", "places", "results", "version")

    def __init__(
        self, lane: Lane, facts: tuple[Any, ...], results: Any, elsewhere: Elsewhere | None
    ) -> None:
        self.lane, self.facts, self.results = lane, facts, results
        self.version = lane.version
        self.places: LRUCache[Hashable, Replay] = LRUCache(_PLACES)
        self._elsewhere = elsewhere
        self._made = 0

    @classmethod
    def keep(
        cls,
        known: Known,
        facts: tuple[Any, ...],
        results: Any,
        place: Hashable,
        launch: Replay,
        elsewhere: Elsewhere | None,
    ) -> None:
        """Let later calls that are `known` by this object find the launch."""
        kept: Replays | None = known.repeats
        if kept is None or kept.facts != facts or kept.version != launch.lane.version:
            kept = known.repeats = cls(launch.lane, facts, results, elsewhere)
        kept.places.keep(place, launch)

    def into(
        self, address: int, agreement: Agreement[Any] | None, *, carried: bool
    ) -> Replay | None:
        """The launch of that agreement that writes a new result at that address. It is made now if
        there is none, and there are few so far. None for a result that is better `carried` there.
        """
        place = (address,)
        launch = self.places.find(place)
        if launch is not None and launch.agreement is agreement:
            return launch
        most = _FIRST if carried else _PLACES
        if self._elsewhere is None or (launch is None and len(self.places) >= most):
            return None
        like = next((x for x in self.places.values() if x.agreement is agreement), None)
        if like is None or self._made >= _MOST_MADE:
            return None
        self._made += 1
        with suppress(HeapExhausted):
            launch = self._elsewhere(like, address)
            if launch is not None and launch.lane.version == self.version:
                return self.places.keep(place, launch)
        self._elsewhere = None
        return None

    def direct(
        self,
        turn: Turn,
        agreement: Agreement[Any],
        place: Hashable,
        template: ResultTemplate | None,
        library: str,
        copier: Copier,
    ) -> Direct | None:
        """What compiled code does to launch such a call, for a given result or a new one.

        None for new results whose places the ranks tell each other in each call.
        """
        launch, lane = self.places.find(place), self.lane
        turn.prepared = launch  # whose note is sent from now on
        if launch is None or launch.agreement is not agreement:
            return None
        room = None if template is None else lane.room(template.carried)
        if template is not None and template.on_heap and room is None:
            try:
                new, address = template.new()  # at another place than this call's result
            except HeapExhausted:
                return None
            if self.into(address, agreement, carried=False) is None:
                return None
            del new
        stream, facts = launch.stream, _Facts(lane, library)
        version = facts.version
        if version != (stream, self.version):
            return None

        def steps(same: Replay, copy: Copy | None) -> Steps:
            check = () if same.check is None else (same.check,)
            return (*check, partial(lane.launch, same.graph, copy, stream))

        def bind(new: Any) -> Steps | None:
            same: Replay | None = launch
            copy = None
            if template is not None:
                same = self.into(template.place(new), agreement, carried=False)
                if same is None and room is not None:
                    same, copy = self.places.find((room.address,)), template.copy(room, new)
            if same is None or same.agreement is not agreement or lane.version != self.version:
                return None
            return steps(same, copy)

        home = None
        # On the default stream a copy follows the launch, and what uses the room next follows both.
        copies = stream == 0 and library_named(library).is_read_by_compiled_code()
        if template is not None and room is not None and copies:
            at_home = self.places.find((room.address,))
            if at_home is not None and at_home.agreement is agreement:
                nbytes = template.carried
                home = Home(room, room.address, nbytes, steps(at_home, None), _OFTEN, copier)
        make = None if template is None else template.new
        return Direct(memory=(facts, version), new=make, bind=bind, home=home)

    def hold(self, facts: tuple[Any, ...], stream: int) -> bool:
        """Whether they can be launched on `stream`, which must not be being captured."""
        same = self.facts == facts and self.version == self.lane.version
        return same and (stream == 0 or not streams.capturing(stream))
