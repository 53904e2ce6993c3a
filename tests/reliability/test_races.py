"""SHARDMATH_CHECK=1 on cores: accesses to symmetric memory that nothing orders are found, and told
with both lines; those that barriers, exchanges or signals order are not.
"""

from __future__ import annotations

import pickle
import re

import numpy as np
import pytest

from mortal import run_job
from shardmath.collectives import all_reduce
from shardmath.context import startup
from shardmath.errors import DataRace
from shardmath.handles.allocation import allocate_symmetric_memory as allocate
from shardmath.handles.rendezvous import rendezvous
from shardmath.handles.watched import WatchedArray
from shardmath.symmetric import accesses
from shardmath.symmetric.accesses import Extent

CHECKED = {"SHARDMATH_CHECK": "1", "SHARDMATH_TIMEOUT": "20"}
N = 12
SIZE = 3


class Case:
    """A rank of a case: its context, array and handle, and what it does with them."""

    def __init__(self, context, shape=(N,)):
        self.context, self.rank = context, context.rank
        self.array = allocate(shape, np)
        self.array[:] = 0
        self.handle = rendezvous(self.array)
        self.handle.barrier()

    def peer(self, rank, shape=(N,)):
        return self.handle.get_buffer(rank, shape, "float64")


def put_and_get(case):
    if case.rank == 0:
        case.handle.put(np.ones(N), 1)
    if case.rank == 2:
        case.handle.get(np.empty(N), 1)


def two_puts(case):
    if case.rank != 1:
        case.handle.put(np.ones(4), 1, offset=case.rank)


def view_and_owner(case):
    if case.rank == 0:
        case.peer(1)[3:7] = 1
    if case.rank == 1:
        case.array += 1


def views_of_the_same(case):
    if case.rank == 0:
        case.peer(2)[5] = 1
    if case.rank == 1:
        float(case.peer(2)[5])


def after_the_barrier_of_some(case):
    """Rank 0 takes no part in what orders ranks 1 and 2."""
    pair = case.context.subset([1, 2]) if case.rank > 0 else None
    if pair is not None:
        pair.barrier()
    if case.rank == 0:
        case.handle.put(np.ones(N), 1)
    if case.rank == 2:
        case.handle.get(np.empty(N), 1)


def after_the_signal(case):
    """Rank 2 waits until rank 0 has signalled, which reads only then."""
    if case.rank == 0:
        case.handle.put_signal(2)
        case.handle.get(np.empty(N), 1)
    if case.rank == 2:
        case.handle.wait_signal(0)
        case.handle.put(np.ones(N), 1)


def before_it_is_consumed(case):
    """The first signal orders one put before the sum; nothing orders the sum and the second put."""
    if case.rank == 0:
        case.handle.put(np.ones(N), 1)
        case.handle.put_signal(1)
        case.handle.put(np.ones(N), 1)
    if case.rank == 1:
        case.handle.wait_signal(0)
        case.array.sum()


def by_a_list(case):
    if case.rank == 0:
        case.peer(1)[[1, 4, 9]] = 1
    if case.rank == 1:
        case.array[4] = 2


def by_a_function(case):
    if case.rank == 0:
        np.copyto(case.peer(1), 1.0)
    if case.rank == 1:
        np.concatenate([case.array, case.array])


def by_a_method(case):
    if case.rank == 0:
        case.peer(1)[::3].fill(1)
    if case.rank == 1:
        case.array.copy()


def by_a_call_that_reads(case):
    try:
        if case.rank == 0:
            case.handle.put(np.ones(N), 1)
    finally:
        all_reduce(case.array)


RACES = [
    by_a_call_that_reads,
    put_and_get,
    two_puts,
    view_and_owner,
    views_of_the_same,
    after_the_barrier_of_some,
    after_the_signal,
    before_it_is_consumed,
    by_a_list,
    by_a_function,
    by_a_method,
]


def barrier_between(case):
    put_and_get(case) if case.rank == 0 else None
    case.handle.barrier()
    put_and_get(case) if case.rank == 2 else None


def exchange_between(case):
    for turn in range(3):
        if case.rank == turn:
            case.handle.put(np.ones(N), 1)
        all_reduce(np.ones(2))


def barrier_of_the_context(case):
    case.array[:] = case.rank
    case.context.barrier()
    assert (case.peer((case.rank + 1) % SIZE) == (case.rank + 1) % SIZE).all()
    case.context.barrier()
    case.array[:] = 7


def signals_along_a_ring(case):
    """Rank 2 is ordered after rank 0 only through rank 1."""
    for _ in range(3):
        if case.rank == 0:
            case.handle.put(np.ones(N), 1)
            case.handle.put_signal(1)
            case.handle.wait_signal(2)
        if case.rank == 1:
            case.handle.wait_signal(0)
            case.handle.put_signal(2)
        if case.rank == 2:
            case.handle.wait_signal(1)
            case.handle.get(np.empty(N), 1)
            case.handle.put_signal(0)


def contexts_in_a_row(case):
    """Ranks 0 and 2 are in no context together but the first, which does nothing."""
    low = case.context.subset([0, 1]) if case.rank < 2 else None
    high = case.context.subset([1, 2]) if case.rank > 0 else None
    if case.rank == 0:
        case.handle.put(np.ones(N), 1)
    for pair in (low, high):
        if pair is not None:
            pair.barrier()
    if case.rank == 2:
        case.handle.get(np.empty(N), 1)


def disjoint_rows_and_columns(case):
    view = case.peer(1)
    if case.rank != 1:
        view[case.rank :: SIZE] += 1
    else:
        case.array[1::SIZE] = view[1::SIZE] * 2
    case.peer(0)[[case.rank, case.rank + 3]] = 1
    np.multiply(view.reshape(4, SIZE)[:, case.rank], 2, out=view.reshape(4, SIZE)[:, case.rank])


def readers_alone(case):
    case.handle.get(np.empty(N), 0)
    assert case.peer(0).sum() == 0
    assert [*case.peer(0)] == [0] * N


def own_words_for_signals(case):
    case.handle.get_signal_pad(case.rank)
    case.handle.barrier()
    put_and_get(case)


RIGHT = [
    barrier_between,
    exchange_between,
    barrier_of_the_context,
    signals_along_a_ring,
    contexts_in_a_row,
    disjoint_rows_and_columns,
    readers_alone,
    own_words_for_signals,
]


def outcomes(program):
    def body(group):
        case = Case(startup.initialize("cpu", group))
        try:
            program(case)
            said = ""
        except DataRace as error:
            said = str(error)
        case.context.barrier()
        startup.finalize()
        return said

    return run_job(SIZE, body, CHECKED)


@pytest.mark.parametrize("program", RACES)
def test_a_race_is_told_with_both_lines(program):
    first, last = (
        program.__code__.co_firstlineno,
        max(n or 0 for *_, n in program.__code__.co_lines()),
    )
    told = [text for text in outcomes(program) if text]
    assert told, "nobody has seen it"
    for text in told:
        lines = [int(number) for number in re.findall(r"test_races\.py:(\d+)", text)]
        assert len(lines) == 2 and all(first < line <= last for line in lines), text
        assert "writes in" in text and "nothing orders the two" in text
        assert "put_signal after the first" in text


@pytest.mark.parametrize("program", RIGHT)
def test_what_is_ordered_is_no_race(program):
    assert outcomes(program) == [""] * SIZE


def test_without_the_variable_arrays_are_plain():
    def body(group):
        case = Case(startup.initialize("cpu", group))
        put_and_get(case)
        return type(case.array) is np.ndarray and type(case.peer(0)) is np.ndarray

    assert run_job(SIZE, body) == [True] * SIZE


def test_old_entries_make_no_races(monkeypatch):
    """Notes that a ring has lost, and accesses before them, count as ordered."""
    monkeypatch.setattr(accesses, "_ACCESSES", 8)
    monkeypatch.setattr(accesses, "_NOTES", 4)

    def many(case):
        pair = case.context.subset([0, 1]) if case.rank < 2 else None
        for turn in range(40):
            if case.rank == 0:
                case.peer(1)[turn % N] = turn
                case.handle.put_signal(1, channel=turn % 2)
            if case.rank == 1:
                case.handle.wait_signal(0, channel=turn % 2)
                assert case.array[turn % N] == turn
                case.array[turn % N] = 0
            if pair is not None:
                pair.barrier()

    assert outcomes(many) == [""] * SIZE


def test_a_watched_array_computes_as_a_plain_one():
    def body(group):
        case = Case(startup.initialize("cpu", group), (3, 4))
        x, plain = case.array, np.arange(12.0).reshape(3, 4)
        x[:] = plain
        assert type(x) is WatchedArray and type(x[1]) is WatchedArray and type(x.T) is WatchedArray
        assert type(x[0, 0]) is np.float64 and type(x + 1) is np.ndarray
        assert type(x[[0, 1]]) is np.ndarray and type(np.sort(x)) is np.ndarray
        assert type(np.transpose(x)) is WatchedArray and type(x.copy()) is np.ndarray
        assert (x @ x.T == plain @ plain.T).all() and x.sum() == plain.sum()
        assert (x[x > 5] == plain[plain > 5]).all() and x.mean() == plain.mean()
        assert (np.stack([x, x]) == np.stack([plain, plain])).all()
        y = x
        y += 1
        assert y is x and (x == plain + 1).all()
        np.add.at(x, ([0, 0], [1, 1]), 1)
        assert x[0, 1] == 4 and np.add(x, 1, out=x) is x
        x.sort(axis=0)
        assert (np.asarray(pickle.loads(pickle.dumps(x))) == np.asarray(x)).all()
        assert all_reduce(x).shape == (3, 4) and repr(x)
        return True

    assert run_job(2, body, CHECKED) == [True, True]


def test_overlaps_are_those_of_bytes():
    arrays = np.arange(600, dtype="u1")
    views = [
        (lambda x: x[3:50], lambda x: x[50:60], False),
        (lambda x: x[3:50], lambda x: x[49:60], True),
        (lambda x: x[::2], lambda x: x[1::2], False),
        (lambda x: x[::2], lambda x: x[::3], True),
        (lambda x: x.reshape(20, 30)[:, 3:5], lambda x: x.reshape(20, 30)[:, 5:9], False),
        (lambda x: x.reshape(20, 30)[:, 4:2:-1], lambda x: x.reshape(20, 30)[4::-1, 4:9], True),
        (lambda x: x[::-1][:9], lambda x: x[-9:-8], True),
        (lambda x: x.reshape(2, 3, 4, 5, 5)[:, 1:, :3, :4, 2], lambda x: x[:0], False),
        (lambda x: x.reshape(2, 3, 4, 5, 5)[::-1, :2, 1:, 1:, ::2], lambda x: x[499:], True),
    ]
    for one, other, expected in views:
        a, b = one(arrays), other(arrays)
        places = [
            Extent.of(
                x.__array_interface__["data"][0] - arrays.__array_interface__["data"][0],
                x.shape,
                x.strides,
                x.itemsize,
            )
            for x in (a, b)
        ]
        found = None not in places and places[0].overlaps(places[1])
        assert found == expected == np.shares_memory(a, b)
