"""Kernels that exchange rows by counts of the GPU, on this computer's threads in place of GPUs'.

Every rank puts all its exchanges on its stream at once; the host's code packs their arguments.
Tiles are small here, so that chunks of some hundred bytes have several; and so is shared memory,
which has no room for the chunks of many experts.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from on_threads import SECONDS, aligned, compiled, source_of, with_constants

from shardmath.collectives import experts, pushes
from shardmath.collectives.experts import Experts, RowExchange
from shardmath.cuda.kernel import ReadyLaunch
from shardmath.symmetric import structs
from shardmath.symmetric_operators.rows import Shuffle

THREADS, BLOCKS, TILE, FEW = 3, 4, 64, 16
WORST = 40  # experts of a rank

RUN = """
extern "C" void run(const ExpertsArgument* argument, unsigned blocks) {
    run_grid(blocks, THREADS, kNoThread, [=] { exchange_rows(*argument); });
}
"""


@pytest.fixture(scope="module", params=[1, 2, 3])
def kernel(request, tmp_path_factory):
    """The number of ranks, and the library of the kernels for them."""
    size, folder = request.param, tmp_path_factory.mktemp("experts")
    text = with_constants(source_of("experts.cu"), {"u64 kTile": TILE, "u64 kFew": FEW})
    sizes = {"SHARDMATH_RANKS": size, "THREADS": THREADS}
    return size, compiled(folder, text, ("symm.cuh",), RUN, **sizes)


class Ready(ReadyLaunch):
    """A launch that is not for a GPU."""

    def __init__(self, blocks, threads, argument):
        super().__init__(0, None, argument, (blocks, threads))


class Rank(Experts):
    """One rank's exchanges; `launches` are what is on its stream."""

    def __init__(self, rank, size):
        self.launches = []
        self.pad = aligned(structs.pad_bytes(size, pushes.CHANNEL + 1))
        self.report = np.zeros(2 + 3 * size, np.uint64)
        self._capacity = size * WORST
        words = experts._plan_words(size, self._capacity)
        nbytes = experts._table_bytes(size, self._capacity) + 8 * words
        self.memory = aligned(nbytes, 0xFF)
        device = SimpleNamespace(processors=BLOCKS // experts._BLOCKS_EACH)
        team = SimpleNamespace(rank=rank, size=size, device=device)
        team.kernel = lambda file, function: SimpleNamespace(ready=Ready)
        order = SimpleNamespace(put=lambda launch, stream: self.launches.append(launch.parts))
        self._collectives = SimpleNamespace(team=team, order=order)

    def begin(self, ranks):
        """When all ranks have memory."""
        team, size = self._collectives.team, len(ranks)
        pads = [each.pad.ctypes.data for each in ranks]
        head = team.rank, size, pushes.CHANNEL + 1, 0, int(SECONDS * 1e9), self.report.ctypes.data
        packed = struct.pack(f"iiIIQQ{size}Q", *head, *pads)
        team.packed = lambda: packed
        self._tables = [each.memory.ctypes.data for each in ranks]

    def run(self, library):
        """All launches, one after the other."""
        for _, blocks, _, argument in self.launches:
            place = aligned(len(argument))
            place[:] = np.frombuffer(argument, np.uint8)
            library.run(ctypes.c_void_p(place.ctypes.data), blocks)


class Job:
    """Exchanges of all ranks: put on their streams one by one, run together, and looked at."""

    def __init__(self, kernel):
        self.size, self.library = kernel
        self.ranks = [Rank(rank, self.size) for rank in range(self.size)]
        for rank in self.ranks:
            rank.begin(self.ranks)
        self.results = []

    def put(self, shuffles, table, *, width=8, gap=0, lacking=None, tags=()):
        """One more: chunk n of rank r has `table[r][n]` rows of `width` bytes, of random bits.

        `gap`: rows between chunks, whose starts are given then. `lacking`: a rank whose result
        lacks room for one row. `shuffles` are those of the ranks.
        """
        rng = np.random.default_rng(len(self.results))
        chunks = [[rng.integers(0, 256, (n, width), np.uint8) for n in row] for row in table]
        outs = []
        for rank, shuffle in enumerate(shuffles):
            coming = shuffle.coming(table, rank)
            room = shuffle.end(coming) - (rank == lacking)
            outs.append(aligned(room * width + 64, 0xA5))
        for rank, shuffle in enumerate(shuffles):
            spaces = [np.zeros((gap, width), np.uint8)] * shuffle.chunks
            pairs = zip(spaces, chunks[rank], strict=True)
            source = np.concatenate([rows for pair in pairs for rows in pair])
            counts = np.array(table[rank], np.int64)
            starts = np.cumsum(counts + gap) - counts
            counts = np.stack([counts, starts])
            told = np.full((2, shuffle.chunks), -1, np.int64)
            exchange = RowExchange(
                targets=[out.ctypes.data for out in outs],
                width=width,
                rows=len(source),
                room=(outs[rank].size - 64) // width,
                experts=shuffle.experts,
                align=shuffle.align,
                combines=shuffle.combines,
                starts=bool(gap or shuffle.combines),
            )
            launch = self.ranks[rank].prepare(exchange)
            launch.put_on(0, source.ctypes.data, counts.ctypes.data, told.ctypes.data)
            self.results.append((rank, shuffle, table, chunks, outs[rank], told))
            self.results[-1] += (source, counts)  # kept until all has run

    def run(self):
        streams = [threading.Thread(target=r.run, args=[self.library]) for r in self.ranks]
        for stream in streams:
            stream.start()
        for stream in streams:
            stream.join()

    def wrong(self):
        """The results that are not what they should be, or have a byte beside them."""
        found = []
        for number, (rank, shuffle, table, chunks, out, told, *_) in enumerate(self.results):
            right = np.full_like(out, 0xA5)
            coming, width = shuffle.coming(table, rank), chunks[0][0].shape[1]
            offsets = shuffle.offsets(coming)
            for src in range(shuffle.ranks):
                for expert in range(shuffle.experts):
                    part = chunks[src][shuffle.sent(rank, expert)].reshape(-1)
                    start = offsets[shuffle.came(src, expert)] * width
                    right[start : start + part.size] = part
            if not np.array_equal(out, right) or told.tolist() != [coming, offsets]:
                found.append(number // self.size)
        return found

    def untouched(self):
        return all(
            (out == 0xA5).all() and (told == -1).all() for *_, out, told, _, _ in self.results
        )


def shuffles(size):
    """Exchanges to experts and back, of few chunks and of more than threads."""
    for experts_each in (1, 3, WORST):
        yield Shuffle("there", size, experts_each, align=0)
        yield Shuffle("there", size, experts_each, align=4)
        yield Shuffle("back", size, experts_each, combines=True)


@pytest.mark.parametrize("width", [16, 8, 3])
def test_every_row_comes_to_its_place(kernel, width):
    job = Job(kernel)
    rng = np.random.default_rng(width)
    for shuffle in shuffles(job.size):
        for choices in ([0], [0, 1, 2, 40], [7]):
            table = rng.choice(choices, (job.size, shuffle.chunks)).tolist()
            job.put([shuffle] * job.size, table, width=width, gap=3 if shuffle.combines else 0)
    job.run()
    assert job.wrong() == []
    assert all((rank.report == 0).all() for rank in job.ranks)


def reported(job):
    """What each rank has noted of itself: why, of which rank, and two numbers."""
    notes = [r.report[1:-1].reshape(-1, 3)[i].tolist() for i, r in enumerate(job.ranks)]
    return [(why & 0xFFFFFFFF, why >> 32, expected, seen) for why, expected, seen in notes]


def test_what_does_not_fit_is_found_by_all_and_nothing_is_written(kernel):
    size = kernel[0]
    shuffle, last = Shuffle("there", size, 2, align=1), size - 1
    job = Job(kernel)
    job.put([shuffle] * size, [[3] * shuffle.chunks] * size, lacking=last)
    job.run()
    rows = 2 * 3 * size
    assert reported(job) == [(structs.NO_ROOM, last, rows - 1, rows)] * size and job.untouched()

    job = Job(kernel)
    job.put([shuffle] * size, [[1] * shuffle.chunks] * size)
    *_, counts = job.results[-1]
    counts[0, 1] = -1
    job.run()
    assert reported(job) == [(structs.BAD_ROWS, last, 2 * size, 1)] * size and job.untouched()

    if size > 1:
        job, other = Job(kernel), Shuffle("there", size, 2, align=4)
        job.put([shuffle] * last + [other], [[1] * shuffle.chunks] * size)
        job.run()
        notes = [note[:2] for note in reported(job)]
        assert notes == [(structs.OTHER_ROWS, last)] * size and job.untouched()


def test_nothing_is_exchanged_after_what_does_not_fit(kernel):
    """No host has read yet what was noted, and no rank waits for another."""
    size, job = kernel[0], Job(kernel)
    shuffle = Shuffle("back", size, 2, combines=True)
    for lacking in (None, 0, None, None):
        job.put([shuffle] * size, [[3] * shuffle.chunks] * size, lacking=lacking)
    job.run()
    assert sorted(set(job.wrong())) == [1, 2, 3]
    del job.results[:size]
    assert job.untouched()
    assert [note[0] for note in reported(job)] == [structs.NO_ROOM] * size
