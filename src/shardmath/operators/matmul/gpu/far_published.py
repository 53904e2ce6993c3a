"""What the ranks of a product on several hosts show each other: parcels in outboxes, by name.

As in `published`, a barrier on the stream says when elements may be read. Before it a rank packs
what peers take of its matrices; after it, it reads the outboxes on its own host in place, and
fetches its parts of the others into a room of the lane.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from shardmath.context.context import Context
from shardmath.geometry import Move
from shardmath.handles.operand import Operand
from shardmath.local.gpu import Matrix
from shardmath.operators.lanes import Lane
from shardmath.operators.matmul.gpu.routes import Routes
from shardmath.operators.published import Places, PublishedMatrices, matrix_of
from shardmath.redistribution import Exposed
from shardmath.redistribution.device import Box, BoxCopies
from shardmath.redistribution.fetching import fetch
from shardmath.symmetric.heap import Location

__all__ = ["FarPublishedMatrices"]


class FarPublishedMatrices(PublishedMatrices):
    """See PublishedMatrices. `cache` holds what is packed, for as long as the plan lives."""

    def __init__(
        self,
        context: Context,
        lane: Lane,
        names: Sequence[str],
        routes: Routes,
        cache: dict[Any, Any],
    ) -> None:
        super().__init__(context, lane, names)
        self._routes = routes
        self._cache = cache
        self._itemsizes: dict[str, int] = {}

    def made(self, name: str, shape: tuple[int, ...], dtype: str, order: str) -> Matrix:
        """See PublishedMatrices: memory for a packed matrix, of which a copy is shown."""
        rows, columns = shape
        empty = Matrix.packed(0, (rows, columns), dtype, order)
        address = self._lane.private(name, empty.size * empty.itemsize)
        self._own[name] = empty._replace(address=address)
        self._make_outbox(name, empty.itemsize)
        return self._own[name]

    def operand(
        self, name: str, array: Operand, ranges: tuple[tuple[int, int], ...]
    ) -> Matrix | None:
        """See PublishedMatrices: nothing is left for the caller to fill."""
        self._own[name] = matrix_of(array)
        self._make_outbox(name, array.itemsize)
        return None

    def make_room(
        self,
        name: str,
        parts: Callable[[], Iterable[tuple[str, Sequence[Move]]]],
        itemsize: int,
    ) -> None:
        """See PublishedMatrices."""
        self._itemsizes[name] = itemsize
        self._lane.buffer(f"room {name}", self._routes.room(name, parts, itemsize))

    def publish(self, name: str, stream: int) -> None:
        """See PublishedMatrices: pack it."""
        if name not in self._shown:
            return
        own = self._own[name]
        strides = own.row_stride * own.itemsize, own.column_stride * own.itemsize
        key = ("packing", name, strides)
        if key not in self._cache:
            outbox = self._routes.outbox(name, self._context.rank, own.itemsize)
            boxes = [Box.of(copy, 0) for copy in outbox.packing(strides)]
            self._cache[key] = BoxCopies(self._lane.team.device, boxes)
        self._cache[key].launch(stream, [own.address], [self._lane.address(f"outbox {name}")])

    def reach(self, name: str, part: str, moves: Sequence[Move], stream: Any) -> Places:
        """See PublishedMatrices: what is on other hosts is fetched."""
        context, rank = self._context, self._context.rank
        itemsize = self._itemsizes[name]
        found = self._routes.fetches(name, part, moves, itemsize)
        outboxes = [
            shown[name].location if name in shown else Location(0, 0) for shown in self._found
        ]
        room = self._lane.address(f"room {name}")
        fetch(context, found, outboxes, room, int(stream))
        starts = {each.src: room + each.at - each.offset for each in found}

        def place(src: int) -> tuple[int, tuple[int, ...]]:
            if src == rank:
                own = self._own[name]
                return own.address, (own.row_stride * itemsize, own.column_stride * itemsize)
            start = starts.get(src)
            if start is None:
                shown = self._found[src][name]
                start = context.peer_address(src, shown.location, shown.nbytes)
                assert start is not None, "it is on this host"
            parcel = self._routes.parcel(name, src, itemsize)
            return start + parcel.offset, parcel.strides

        return place

    def _make_outbox(self, name: str, itemsize: int) -> None:
        self._itemsizes[name] = itemsize
        nbytes = self._routes.outbox(name, self._context.rank, itemsize).nbytes
        if not nbytes:
            return
        block = self._lane.buffer(f"outbox {name}", nbytes).block
        self._shown[name] = Exposed(block.location, nbytes, 0, ())
