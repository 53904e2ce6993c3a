"""The programs of the collectives, performed by NumPy, every rank in one process; and the verbs by
which GPUs perform them.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from interpreter import interpret

from shardmath.arrays import library_and_spec
from shardmath.collectives.moving import ALL_GATHER, ALL_TO_ALL, BROADCAST
from shardmath.collectives.reducing import ALL_REDUCE, REDUCE_SCATTER
from shardmath.machine import Machine

SIZE = 3
ORDERS = list(itertools.permutations(range(SIZE)))
SHAPES = [(), (7,), (5, 4), (4, 0, 3)]


def elements(shape, rank, dtype="float32"):
    count = int(np.prod(shape))
    return (np.arange(count) * (rank + 2) % 11 / 7 + rank).astype(dtype).reshape(shape)


def performed(operation, arrays, words_of, order):
    """Every rank's result; `words_of(rank)` are the words of its call."""
    looks = [None if x is None else library_and_spec(x, "x")[1] for x in arrays]
    specs = [
        operation.describe({"x": look, "out": None}, (SIZE, rank, *words_of(rank)), None)
        for rank, look in enumerate(looks)
    ]
    problem, machine = operation.check(specs), Machine("cpu", (0,) * SIZE)
    programs = [operation.program(problem, machine, rank) for rank in range(SIZE)]
    given = [{} if x is None else {"x": x} for x in arrays]
    results = [made["out"] for made in interpret(programs, given, order)]
    verbs = [Verbs(arrays, rank) for rank in range(SIZE)]
    require_equal([operation.gpus.launch(one, problem) for one in verbs], results)
    for one, result in zip(verbs, results, strict=True):
        assert operation.gpus.result(one, problem) in ((), (result.dtype.name, result.shape))
    return results


class Verbs:
    """One rank's `DeviceOperand`, on the arrays of all ranks."""

    def __init__(self, arrays, rank):
        self.arrays, self.rank = arrays, rank
        self.context = SimpleNamespace(rank=rank, size=SIZE)
        self.spec = SimpleNamespace(shape=np.shape(arrays[rank]))

    def is_pushed(self, reduction):
        return False

    def move(self, table, shape, axis, *, whole, in_place=False):
        parts = []
        for counts, x in zip(table, self.arrays, strict=True):
            count, start = counts[self.rank], 0 if whole else sum(counts[: self.rank])
            if axis is not None:
                parts.append(x.take(range(start, start + count), axis))
            elif count:
                parts.append(x)
        made = np.concatenate(parts, axis) if axis is not None else parts[0]
        assert made.shape == shape
        return made

    def all_reduce(self, reduction, *, new):
        assert new, "no rank has given an array for the result"
        wide = [x.astype(reduction.result) for x in self.arrays]
        return np.asarray(REDUCED[reduction.op](wide))

    def reduce_scatter(self, reduction, axis, counts, shape):
        whole = self.all_reduce(reduction, new=True)
        made = np.split(whole, np.cumsum(counts)[:-1], axis)[self.rank]
        assert made.shape == shape
        return made


def require_equal(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("root", range(SIZE))
@pytest.mark.parametrize("shape", SHAPES)
def test_broadcast(shape, root, order):
    x = elements(shape, root)
    arrays = [x if rank == root else None for rank in range(SIZE)]
    require_equal(performed(BROADCAST, arrays, lambda _: (root,), order), [x] * SIZE)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("axis", [0, 1])
def test_all_gather_of_uneven_parts(axis, order):
    extents = [2, 0, 5]
    shapes = [(n, 4) if axis == 0 else (3, n) for n in extents]
    arrays = [elements(shape, rank) for rank, shape in enumerate(shapes)]
    found = performed(ALL_GATHER, arrays, lambda _: (axis,), order)
    require_equal(found, [np.concatenate(arrays, axis)] * SIZE)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("axis", [0, 1])
def test_all_to_all_of_uneven_counts(axis, order):
    sent = [(1, 0, 4), (0, 2, 1), (3, 3, 0)]
    shapes = [(sum(counts), 2) if axis == 0 else (2, sum(counts)) for counts in sent]
    arrays = [elements(shape, rank) for rank, shape in enumerate(shapes)]
    found = performed(ALL_TO_ALL, arrays, lambda rank: (axis, sent[rank], None), order)
    cut = [
        np.split(x, np.cumsum(counts)[:-1], axis) for x, counts in zip(arrays, sent, strict=True)
    ]
    wanted = [np.concatenate([parts[rank] for parts in cut], axis) for rank in range(SIZE)]
    require_equal(found, wanted)


REDUCED = {
    "sum": lambda parts: parts[0] + parts[1] + parts[2],
    "min": lambda parts: np.minimum(np.minimum(parts[0], parts[1]), parts[2]),
    "max": lambda parts: np.maximum(np.maximum(parts[0], parts[1]), parts[2]),
    "product": lambda parts: parts[0] * parts[1] * parts[2],
    "mean": lambda parts: (parts[0] + parts[1] + parts[2]) / np.float32(3),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("op", REDUCED)
@pytest.mark.parametrize("shape", SHAPES)
def test_all_reduce(shape, op, order):
    arrays = [elements(shape, rank) for rank in range(SIZE)]
    wanted = np.asarray(REDUCED[op](arrays))
    require_equal(performed(ALL_REDUCE, arrays, lambda _: (op,), order), [wanted] * SIZE)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("counts", [None, (4, 0, 2)])
@pytest.mark.parametrize("axis", [0, 1])
def test_reduce_scatter(axis, counts, order):
    arrays = [elements((6, 6), rank, "int64") for rank in range(SIZE)]
    found = performed(REDUCE_SCATTER, arrays, lambda _: ("mean", axis, counts), order)
    whole = sum(x.astype("float64") for x in arrays) / 3
    ends = np.cumsum(counts or (2, 2, 2))
    require_equal(found, np.split(whole, ends[:-1], axis))
