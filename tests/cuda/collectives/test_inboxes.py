"""Large parts through inboxes, without a GPU: ranks are threads, their memory is the process's."""

from __future__ import annotations

import ctypes
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from shardmath.collectives.pushes import Pushes


class HostPushes(Pushes):
    """Pushes of one rank, which copy at once; `shared` is what the ranks' threads have together."""

    def __init__(self, rank, size, shared):
        self.team = SimpleNamespace(rank=rank, size=size, require_usable=lambda: None)
        self._order = SimpleNamespace(section=lambda _: nullcontext())
        self._meet, self._inboxes = shared

    def barrier(self, stream):
        self._meet.wait()

    def _send(self, sources, targets, sizes, stream, *, by_engine):
        for source, target, nbytes in zip(sources, targets, sizes, strict=True):
            ctypes.memmove(target, source, nbytes)

    def _scratch(self, purpose, nbytes):
        assert all(each.nbytes >= nbytes for each in self._inboxes)
        return [each.ctypes.data for each in self._inboxes]


TABLES = {
    "even": lambda size: np.full((size, size), 32),
    "odd": lambda size: 7 + np.arange(size * size).reshape(size, size),
    "one sends": lambda size: np.arange(size)[None] * 9 * (np.arange(size) == 0)[:, None],
    "nothing": lambda size: np.zeros((size, size), int),
}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_parts_come_in_the_order_of_the_ranks(size, name):
    table = TABLES[name](size).tolist()
    ranks = range(size)
    parts = [
        [np.random.default_rng([s, d]).integers(0, 256, table[s][d], np.uint8) for d in ranks]
        for s in ranks
    ]
    inboxes = [np.zeros(32 << 20, np.uint8) for _ in ranks]
    shared = threading.Barrier(size), inboxes
    found = [np.full(sum(row[d] for row in table) + 16, 0xA5, np.uint8) for d in ranks]

    def be(rank):
        pushes = HostPushes(rank, size, shared)
        sources = [part.ctypes.data for part in parts[rank]]
        for _ in range(3):
            pushes.move_by_inboxes(sources, table, found[rank].ctypes.data, 0)

    threads = [threading.Thread(target=be, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in ranks:
        wanted = np.concatenate([parts[s][rank] for s in ranks] + [np.full(16, 0xA5, np.uint8)])
        assert np.array_equal(found[rank], wanted)
