"""The words by which kernels of collectives compare their calls, in a model without a GPU.

Every rank has put all its launches on its stream at once. A launch is blocks of threads, of which
one runs at a time: at every load and store of a word a schedule of a fixed seed says which. A
thread does what `Launch` and `receive` of kernels/cells.cuh do.
"""

from __future__ import annotations

import random

import pytest

THREADS, PLACES = 2, 2
SEEDS = 80


class Rank:
    """One rank's memory, and what its launches have done."""

    def __init__(self, size, most):
        self.counts = [-1] * most  # of launches, by block
        self.words = [[[(-1, None)] * size for _ in range(PLACES)] for _ in range(most)]
        self.broken = self.failed = False
        self.written, self.reported = [], []


def thread(ranks, own, block, number, tag, launch):
    """One thread: it pauses before each load and store. `number` is its own in the block."""
    me, size = ranks[own], len(ranks)
    yield
    count = me.counts[block] + 1
    yield
    usable = not me.broken
    word = (count, tag)
    if usable and number == 0:
        for peer in ranks:
            yield
            peer.words[block][count % PLACES][own] = word
    while True:
        if not usable:
            return
        seen = []
        for peer in range(size):
            yield
            seen.append(me.words[block][count % PLACES][peer])
        if all(each[0] == count for each in seen):
            break
        yield
        if me.failed:  # as a wait that has expired
            me.broken = True
            me.reported.append((launch, "late"))
            return
    if any(each != word for each in seen):
        me.broken = me.failed = True
        me.reported.append((launch, tuple(each[1] for each in seen)))
        return
    yield
    me.written.append((launch, block, number))


def stream(ranks, own, calls):
    """This rank's launches, one after the other: sets of threads that are under way."""
    for launch, (tag, blocks) in enumerate(calls):
        threads = [
            (block, thread(ranks, own, block, number, tag, launch))
            for block in range(blocks)
            for number in range(THREADS)
        ]
        yield threads
        for block in range(blocks):
            ranks[own].counts[block] += 1


def run(seed, programs, most):
    """All ranks' launches, to their end; False where they wait for ever."""
    choice = random.Random(seed)
    ranks = [Rank(len(programs), most) for _ in programs]
    streams = [stream(ranks, own, calls) for own, calls in enumerate(programs)]
    under_way = [next(each) for each in streams]
    weights = [choice.choice((1, 1, 20)) for _ in programs]  # some ranks are much faster
    for _ in range(20_000):
        running = [own for own, threads in enumerate(under_way) if threads]
        if not running:
            return ranks
        own = choice.choices(running, [weights[each] for each in running])[0]
        at = choice.randrange(len(under_way[own]))
        try:
            next(under_way[own][at][1])
        except StopIteration:
            under_way[own].pop(at)
            if not under_way[own]:
                under_way[own] = next(streams[own], [])
    return None


def program(choice, launches):
    return [(choice.choice("abc"), choice.choice((1, 1, 2, 3))) for _ in range(launches)]


@pytest.mark.parametrize("size", [2, 3])
def test_no_old_word_is_taken_for_a_new_one(size):
    """Ranks that make the same calls all write all results, however far one is ahead."""
    for seed in range(SEEDS):
        calls = program(random.Random(seed), 6)
        every = {
            (launch, block, number)
            for launch, (_, blocks) in enumerate(calls)
            for block in range(blocks)
            for number in range(THREADS)
        }
        ranks = run(seed, [calls] * size, 3)
        assert ranks is not None, seed
        for rank in ranks:
            assert set(rank.written) == every and not rank.reported, seed


@pytest.mark.parametrize("size", [2, 3])
def test_nothing_is_written_from_another_call_on(size):
    """One rank makes another call, in a grid of another size: all ranks report all tags."""
    for seed in range(SEEDS):
        choice = random.Random(seed)
        calls = program(choice, 6)
        place, culprit = choice.randrange(6), choice.randrange(size)
        other = [*calls[:place], ("d", choice.choice((1, 2, 3))), *calls[place + 1 :]]
        ranks = run(seed, [other if own == culprit else calls for own in range(size)], 3)
        assert ranks is not None, seed
        tags = tuple("d" if own == culprit else calls[place][0] for own in range(size))
        for rank in ranks:
            assert all(launch < place for launch, *_ in rank.written), seed
            assert (place, tags) in rank.reported, seed


def test_one_place_for_a_word_would_not_do(monkeypatch):
    """The model finds what it is for: with one place a rank waits for ever, or sees a mismatch."""
    monkeypatch.setattr("test_words_of_launches.PLACES", 1)
    calls = [("a", 1)] * 6
    found = [run(seed, [calls] * 2, 1) for seed in range(40)]
    assert any(ranks is None or any(r.reported for r in ranks) for ranks in found)
