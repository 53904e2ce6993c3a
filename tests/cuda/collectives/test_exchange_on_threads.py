"""The kernel that exchanges parts of any size, on this computer's threads in place of GPUs'.

Every rank puts all its launches on its stream at once; the host's code packs their arguments. Lanes
are few and slots small here, so that parts of some ten thousand bytes go through every slot again.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
from on_threads import NONE, SECONDS, aligned, compiled, source_of, with_constants

from shardmath.collectives import cells, heaps
from shardmath.collectives.cells import DeviceCollectives, Parts
from shardmath.collectives.heaps import Heaps
from shardmath.symmetric import structs

LANES, INBOX, MAIL, THREADS = 2, 48 << 10, 3 * 256, 3
SMALLER = {"_LANES": LANES, "_INBOX_BYTES": INBOX, "_MAIL_BYTES": MAIL, "_LANE_BLOCKS": 2 * LANES}
SMALLER |= {"_FEW_BYTES": 64, "_FEW_THREADS": THREADS, "_WRITTEN_BYTES": 3 * 128}
SEGMENTS = 3  # of a heap, as many as threads
HEAP = 1 << 20  # bytes of each of a rank's two segments
OURS, OTHER = 7, 8  # tags

RUN = """
typedef const ExchangeArgument* Argument;
extern "C" void run(Argument argument, unsigned blocks, unsigned threads, bool few, unsigned late) {
    run_grid(blocks, threads, late, [=] { (few ? exchange_few : exchange)(*argument); });
}
"""


@pytest.fixture(scope="module", params=[2, 3])
def kernel(request, tmp_path_factory):
    """The number of ranks, and the library of a kernel for them."""
    return for_ranks(request.param, tmp_path_factory.mktemp("exchange"))


@pytest.fixture(scope="module", params=[2, 3])
def hasty(request, tmp_path_factory):
    """The same, but that all blocks but the first wait for no guesses."""
    folder = tmp_path_factory.mktemp("hasty")
    return for_ranks(request.param, folder, "blockIdx.x ? 0 : 1u << 31")


def for_ranks(size, folder, patience=None):
    """The number of ranks, and a library. `patience` replaces the polls for guesses."""
    text = with_constants(source_of("exchange.cu"), {"u32 kLanes": LANES, "u64 kInbox": INBOX})
    if patience is not None:
        assert text.count("polls < kPatience") == 1
        text = text.replace("polls < kPatience", f"polls < ({patience})")
    (folder / "elements.cuh").write_text("#pragma once\n")
    with patch.multiple(cells, **SMALLER):
        mail = cells._mail_bytes(size)
        sizes = {"MAIL_BYTES": mail, "POST_BYTES": cells._post_bytes(size, mail)}
    sizes |= {"SEGMENTS": SEGMENTS, "SHARDMATH_RANKS": size}
    return size, compiled(folder, text, ("symm.cuh", "cells.cuh"), RUN, **sizes)


class Table(Heaps):
    """One rank's table of heaps of two segments each; of a rank's it knows those in `reached`."""

    def __init__(self, rank, ranks, reached):
        starts = [[memory.ctypes.data for memory in each.heap] for each in ranks]
        own = {segment: (start, HEAP) for segment, start in enumerate(starts[rank])}
        peers = {(peer, segment): starts[peer][segment] for peer, segment in reached}
        with patch.object(heaps, "SEGMENTS", SEGMENTS):
            table = heaps.table_of(len(ranks), own, peers)
        self.table = aligned(len(table))
        self.table[:] = np.frombuffer(table, np.uint8)
        self.address = self.table.ctypes.data
        self._own = [(start, start + nbytes) for start, nbytes in own.values()]


class Rank(DeviceCollectives):
    """One rank's exchanges; `launches` are what is on its stream."""

    def __init__(self, rank, ranks, library):
        size = len(ranks)
        self.launches, self._library = [], library
        self.pad = aligned(64)
        self.report = np.zeros(2 + 3 * size, np.uint64)
        before = cells._cells_bytes(size)  # 20 MB and more, of other kernels
        used = cells._words_end(size) + cells._post_bytes(size, cells._mail_bytes(size)) - before
        self.memory = aligned(before + used, None)
        self.memory[before:] = 0xFF
        self.heap = [aligned(HEAP, 0xA5) for _ in range(2)]
        self.taken = [0, 0]  # bytes of each segment
        ranks[rank] = self
        self.team = SimpleNamespace(rank=rank, size=size, require_usable=lambda: None)

    def room(self, segment, nbytes):
        """Memory of that segment of the heap, or memory of its own."""
        if segment is None:
            return aligned(nbytes, 0xA5)
        start = self.taken[segment]
        self.taken[segment] = start + -(-nbytes // 64) * 64
        assert self.taken[segment] <= HEAP
        return self.heap[segment][start : start + nbytes]

    def begin(self, ranks, reached):
        """When all ranks have memory."""
        rank, size = self.team.rank, len(ranks)
        self.team.ring_order = [(rank + step) % size for step in range(1, size + 1)]
        pads = [each.pad.ctypes.data for each in ranks]
        head = rank, size, 1, 0, int(SECONDS * 1e9), self.report.ctypes.data
        packed = struct.pack(f"iiIIQQ{size}Q", *head, *pads)
        self.team.packed = lambda: packed
        self.team.kernel = lambda file, function, _: SimpleNamespace(ready=self.ready_of(function))
        self._order = self
        places = [each.memory.ctypes.data for each in ranks]
        self._lay_out(places, Table(rank, ranks, reached))

    def ready_of(self, function):
        """What makes launches of that kernel."""
        few = function == "exchange_few"

        def ready(blocks, threads, argument):
            most = blocks if few else 2 * LANES - 1 + (blocks == 2 * LANES)
            grid = min(blocks, most), THREADS, few
            return SimpleNamespace(grid=grid, argument=argument, change=argument.change)

        return ready

    def put(self, launch, stream):
        """Put it on the stream."""
        self.launches.append((launch.argument.first, launch.grid))

    def run(self, late):
        """All launches, one after the other; that thread of their first blocks starts late."""
        for argument, grid in self.launches:
            place = aligned(len(argument))
            place[:] = np.frombuffer(argument, np.uint8)
            self._library.run(ctypes.c_void_p(place.ctypes.data), *grid, late)

    @property
    def noted(self):
        """What the kernel has noted of each rank: the kinds of it."""
        return [int(word) & 0xFFFFFFFF for word in self.report[1:].reshape(-1)[0:-1:3]]


class Exchanges:
    """Exchanges of all ranks: put on their streams one by one, run together, and looked at."""

    def __init__(self, kernel, reached=()):
        """All ranks reach those of a rank's segments that are `reached`."""
        self.size, library = kernel
        self.patches = patch.multiple(cells, **SMALLER)
        with self.patches:
            self.ranks = [None] * self.size
            for rank in range(self.size):
                Rank(rank, self.ranks, library)
            for rank in self.ranks:
                rank.begin(self.ranks, reached)
        self.results = []

    def put(
        self, table, width=1, *, rooms=None, told=False, tags=None, shift=0, heap=lambda rank: None
    ):
        """One more, of `table[src][dst]` times `width` bytes.

        `rooms` are what the ranks have room for; `told`: they know what comes from whom. The result
        of a rank lies in segment `heap(rank)` of its heap.
        """
        ranks = range(self.size)
        rng = np.random.default_rng([len(self.results), width])
        data = [[rng.integers(0, 256, table[s][d] * width, np.uint8) for d in ranks] for s in ranks]
        for rank in ranks:
            sent = np.concatenate(data[rank])
            source = aligned(sent.size + shift)[shift:]
            source[:] = sent
            wanted = np.concatenate([row[rank] for row in data])
            room = len(wanted) // width if rooms is None else rooms[rank]
            target = self.ranks[rank].room(heap(rank), room * width + 2 * shift + 64)
            starts = np.cumsum([0, *(width * count for count in table[rank])])[:-1].tolist()
            expected = [row[rank] for row in table] if told else None
            parts = Parts.guessed(width, starts, table[rank], expected, room)
            if told:
                parts = parts._replace(guess=cells._digest(table))
            place = target.ctypes.data + 2 * shift
            tag = OURS if tags is None else tags[rank]
            with self.patches:
                self.ranks[rank].exchange(source.ctypes.data, place, parts, 0, tag=tag)
            self.results.append((rank, source, target, 2 * shift, wanted))

    def run(self, late=NONE):
        streams = [threading.Thread(target=rank.run, args=[late]) for rank in self.ranks]
        for stream in streams:
            stream.start()
        for stream in streams:
            stream.join()

    def wrong(self):
        """The results that are not what they should be, or have a byte beside them."""
        found = []
        for number, (rank, _, target, start, wanted) in enumerate(self.results):
            right = np.full_like(target, 0xA5)
            right[start : start + wanted.size] = wanted
            if not np.array_equal(target, right):
                found.append((number // self.size, rank))
        return found

    def untouched(self, first):
        """Whether no byte was written from that exchange on."""
        return all(bool((each[2] == 0xA5).all()) for each in self.results[first * self.size :])


def slots_start(size):
    """Where the slots start in a rank's `Post`."""
    with patch.multiple(cells, **SMALLER):
        mail = cells._mail_bytes(size)
        whole = cells._post_bytes(size, mail)
        slot = INBOX // (LANES * size * cells._SLOTS) // cells._SLOT_UNIT * cells._SLOT_UNIT
    return whole - 16 - LANES * size * cells._SLOTS * slot


def tables(size):
    """Parts as packets, in chunks, in chunks through slots that were used before, and none."""
    rng = np.random.default_rng(size)
    yield np.full((size, size), 8)
    yield rng.integers(0, 500, (size, size))
    yield np.zeros((size, size), int)
    yield rng.choice([0, 1, 255, 390, 5000, 17_003], (size, size))
    yield np.full((size, size), 3000) * np.eye(size, dtype=int)
    yield rng.integers(0, 20_000, (size, size))
    yield rng.choice([0, 400], (size, size))
    yield rng.integers(0, 60, (size, size))


@pytest.mark.parametrize(
    ("width", "shift", "told"),
    [(1, 0, True), (1, 1, False), (16, 0, False), (6, 2, True), (4, 4, False)],
)
def test_every_part_comes_to_its_place(kernel, width, shift, told):
    exchanges = Exchanges(kernel)
    for table in tables(exchanges.size):
        exchanges.put((table // (1 + width // 4)).tolist(), width, told=told, shift=shift)
    exchanges.run()
    assert exchanges.wrong() == []
    assert [rank.noted for rank in exchanges.ranks] == [[0] * exchanges.size] * exchanges.size


@pytest.mark.parametrize(
    ("width", "shift", "told"), [(16, 0, True), (1, 8, False), (1, 1, True), (6, 2, False)]
)
@pytest.mark.parametrize(
    "heap",
    [lambda rank: 0, lambda rank: rank % 2 or None, lambda rank: rank % 2],
    ids=["all reached", "some on the heap", "some reached"],
)
def test_parts_are_written_straight_into_results_on_heaps(kernel, heap, width, shift, told):
    """Where the senders know the segment; else they come as to any other memory."""
    exchanges, size = Exchanges(kernel, [(rank, 0) for rank in range(kernel[0])]), kernel[0]
    for table in (*tables(size), np.full((size, size), 1000)):
        exchanges.put(
            (table // (1 + width // 4)).tolist(), width, told=told, shift=shift, heap=heap
        )
    exchanges.run()
    assert exchanges.wrong() == []
    assert [rank.noted for rank in exchanges.ranks] == [[0] * size] * size
    start = cells._words_end(size) + slots_start(size)
    used = [bool((rank.memory[start:-16] != 0xFF).any()) for rank in exchanges.ranks]
    assert used == [heap(rank) != 0 for rank in range(size)], "others came through slots"


@pytest.mark.parametrize("width", [1, 8, 40, 300])
def test_some_take_counts_for_equal_that_are_not(kernel, width):
    """Four, three and five: the first rank's count, times the ranks, is what it has room for."""
    exchanges, size = Exchanges(kernel), kernel[0]
    even = np.full((size, size), 4)
    columns = np.array([[4, 3, 5]] * 3)[:, :size] if size == 3 else np.array([[4, 5], [4, 3]])
    for table in (even, columns.T, even, columns, even):
        exchanges.put(table.tolist(), width)
    exchanges.run()
    assert exchanges.wrong() == []


def test_some_blocks_take_guesses_and_others_wait_for_rows(hasty):
    """A peer is so late that one block no longer waits for its guess when it comes to another."""
    exchanges, size = Exchanges(hasty), hasty[0]
    for count in (4, 8, 5):
        exchanges.put(np.full((size, size), count).tolist(), 8, told=count == 8)
    exchanges.run()
    assert exchanges.wrong() == []


@pytest.mark.parametrize("segment", [None, 0], ids=["ordinary", "heap"])
@pytest.mark.parametrize("count", [5, 3000])
def test_nothing_is_written_where_one_has_other_room(kernel, count, segment):
    """All ranks report it, and what comes after writes nothing either."""
    exchanges, size = Exchanges(kernel, [(rank, 0) for rank in range(kernel[0])]), kernel[0]
    table, heap = np.full((size, size), count).tolist(), lambda rank: segment
    exchanges.put(table, heap=heap)
    rooms = [count * size] * (size - 1) + [count * size - 1]
    exchanges.put(table, rooms=rooms, heap=heap)
    exchanges.put(table, heap=heap)
    exchanges.run()
    assert [n for n, _ in exchanges.wrong() if n == 0] == [] and exchanges.untouched(1)
    for rank in exchanges.ranks:
        assert rank.noted[rank.team.rank] == structs.MISFIT
        with patch.object(cells, "call", lambda _, to, place, n: ctypes.memmove(to, place, n)):
            rank.team.device = SimpleNamespace(activate=lambda: None)
            rows = rank.rows(int(rank.report[1 + 3 * rank.team.rank + 2]))
        assert [row[:size] for row in rows] == [(count,) * size] * size
        assert [row[-1] for row in rows] == [count * size] * (size - 1) + [count * size - 1]


@pytest.mark.parametrize("segment", [None, 0], ids=["ordinary", "heap"])
@pytest.mark.parametrize("count", [5, 3000])
@pytest.mark.parametrize("late", [NONE, *range(THREADS)], ids=["none", *map(str, range(THREADS))])
def test_nothing_is_written_where_one_makes_another_call(kernel, count, late, segment):
    """One thread of a block may start late, when others have seen that the exchange fails."""
    exchanges, size = Exchanges(kernel, [(rank, 0) for rank in range(kernel[0])]), kernel[0]
    table, heap = np.full((size, size), count).tolist(), lambda rank: segment
    exchanges.put(table, heap=heap)
    exchanges.put(table, tags=[OURS] * (size - 1) + [OTHER], heap=heap)
    exchanges.put(table, heap=heap)
    exchanges.run(late)
    assert [n for n, _ in exchanges.wrong() if n == 0] == [] and exchanges.untouched(1)
    for rank in exchanges.ranks:
        others = [r for r in range(size) if (r == size - 1) != (rank.team.rank == size - 1)]
        assert [r for r in range(size) if rank.noted[r] == structs.MISMATCH] == others
