"""New results of calls that come again, on pretended GPUs: wherever they lie, in few steps."""

from __future__ import annotations

import random
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar
from unittest.mock import patch

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent))

from pretended import pretended_gpu
from pretended_products import products_at_once

from arrangements import part_of
from counted import calls_before
from mistakes import heard
from shardmath.arrays import library_named
from shardmath.base.compiled import extension
from shardmath.distribution import Redistribute, Slab, redistribute
from shardmath.fft import FFT, FFTOptions, fft
from shardmath.handles import device_array
from shardmath.handles.allocation import empty_on_heap
from shardmath.linalg.advanced import Matmul, matmul
from shardmath.operators.matmul.gpu import performing
from shardmath.program import gpu_repeats

M, N = 12, 8
SPLITS = [Slab.X, Slab.X, Slab.Y]
# On the heap, where the last one lay, or where blocks have their turn; with nothing to copy from.
STORES = ["heap", "turns", "no room", "ordinary"]
# Functions of Python in a call with copied operands; without copies there are many hundreds.
MOVED = {"cores": 60, "pretended": 120}
REPEATS = 24  # more than there are blocks which take turns to be used again


class Redistribution:
    """Of real numbers, from rows to columns."""

    dtype, target = "float64", Slab.Y
    forms: ClassVar = {
        "function": lambda self, x: redistribute(x, Slab.X, Slab.Y),
        "object": lambda self, x: executed(self.object, x),
    }

    def __init__(self, context, x, made):
        self.object = Redistribute(x, Slab.X, Slab.Y)

    def of(self, whole):
        return whole


class Transform:
    """Of complex numbers, which leaves columns where it does without the last exchange."""

    dtype, target = "complex128", Slab.Y
    forms: ClassVar = {
        "options": lambda self, x: fft(
            x, distribution=Slab.X, options=FFTOptions(redistribute=False)
        ),
        "object": lambda self, x: executed(self.object, x),
    }

    def __init__(self, context, x, made):
        self.object = FFT(x, distribution=Slab.X, options=FFTOptions(redistribute=False))

    def of(self, whole):
        return np.fft.fft2(whole)


class TransformBack(Transform):
    """With the last exchange: ranks push into each other's results, and tell where these lie."""

    target = Slab.X
    forms: ClassVar = {
        "function": lambda self, x: fft(x, distribution=Slab.X),
        "object": lambda self, x: executed(self.object, x),
    }

    def __init__(self, context, x, made):
        self.object = FFT(x, distribution=Slab.X)


class Product:
    """With a matrix of rows, so that columns come out."""

    dtype, target = "float64", Slab.Y
    forms: ClassVar = {
        "function": lambda self, x: matmul(x, self.b, distributions=SPLITS),
        "options": lambda self, x: matmul(
            x, self.b, distributions=SPLITS, options={"strategy": self.strategy}
        ),
        "object": lambda self, x: executed(self.object, a=x),
    }

    def __init__(self, context, x, made):
        self.right = np.arange(64.0).reshape(N, N)
        self.strategy = "local" if context.size == 1 else "stationary-c"
        self.b = made(part_of(self.right, Slab.X, context.rank, context.size))
        self.object = Matmul(x, self.b, distributions=SPLITS)

    def of(self, whole):
        return whole @ self.right


def executed(planned, *operand, **named):
    """What an object gives for an operand."""
    reset = getattr(planned, "reset_operands_unchecked", None) or planned.reset_operand_unchecked
    reset(*operand, **named)
    return planned.execute()


@contextmanager
def pretended(context, store):
    """Within, this rank has a GPU, and a context where results lie in that store."""
    most = 0 if store == "no room" else device_array._MOST_CARRIED
    at_once = 2 if store == "turns" else 0
    with (
        pretended_gpu(context),
        patch.object(type(context.heap.transport), "drops_at_once", at_once),
        products_at_once(),
        patch.object(device_array, "_MOST_CARRIED", most),
        context,
    ):
        yield


def arrays(context, store):
    """What makes a copy of an array in memory of this store."""

    def made(x):
        where = np.empty_like(x)
        if store != "ordinary":
            where = empty_on_heap(context, library_named("numpy"), x.shape, x.dtype)
        where[...] = x
        return where

    return made


def keep(context, name, form, store):
    """Wrong results among those that are kept for a while, each rank as long as it likes; now and
    then one rank's operand lies elsewhere, in memory of the other kind.
    """
    operation, rank, size, wrong, kept = OPERATIONS[name], context.rank, context.size, [], []
    mine, everyones = random.Random(rank), random.Random(11)
    with pretended(context, store):
        made = arrays(context, store)
        empty = np.zeros(part_of(np.zeros((M, N)), Slab.X, rank, size).shape, operation.dtype)
        beside = "heap" if store == "ordinary" else "ordinary"
        x, other = made(empty), arrays(context, beside)(empty)
        work = operation(context, x, made)
        work.object.plan()
        for turn in range(80):
            late = everyones.randrange(4 * size)  # a rank, mostly none
            operand = other if late == rank else x
            whole = np.arange(float(M * N)).reshape(M, N) % (7 + turn)
            operand[...] = part_of(whole, Slab.X, rank, size)
            context.board.barrier("written")
            result = work.forms[form](work, operand)
            kept.append((turn, result, part_of(work.of(whole), operation.target, rank, size)))
            for _ in range(mine.choice((0, 1, 1, 1, 2, 3))):
                if kept:
                    number, found, wanted = kept.pop(mine.randrange(len(kept)))
                    if not np.allclose(found, wanted, rtol=1e-13, atol=1e-9):
                        wrong.append((turn, number))
            del result
        work.object.free()
        context.board.barrier("done")
    return wrong


OPERATIONS = {
    "redistribution": Redistribution,
    "transform": Transform,
    "transform back": TransformBack,
    "product": Product,
}
CASES = [(name, form) for name, operation in OPERATIONS.items() for form in operation.forms]


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(("name", "form"), CASES)
def test_results_lie_wherever_they_are_made(contexts, name, form, store):
    assert contexts.run(keep, name, form, store, ranks=3) == [[]] * 3


def without_elements(context):
    """The shapes and values of results of which only rank 0 has elements. Those of others do not
    say where they lie, as torch's tensors.
    """
    library, rank, size = type(library_named("numpy")), context.rank, context.size
    pointer = library.pointer
    whole = np.arange(float(N)).reshape(1, N)
    with (
        pretended(context, "heap"),
        patch.object(library, "pointer", lambda self, x: pointer(self, x) if x.size else 0),
    ):
        x = arrays(context, "heap")(part_of(whole, Slab.Y, rank, size))
        results = [redistribute(x, Slab.Y, Slab.X) for _ in range(4)]
        context.board.barrier("done")
    return [result.tolist() for result in results]


def test_results_without_elements(contexts):
    first, *others = contexts.run(without_elements, ranks=3)
    assert first == [[list(map(float, range(N)))]] * 4
    assert others == [[[]] * 4] * 2


def count(context, name, form, store):
    """The functions of Python that a call with a new result calls until its graph.

    The fewest of some calls: where memory for a result is new to a call, its graph is bound anew.
    """
    operation = OPERATIONS[name]
    with pretended(context, store):
        made = arrays(context, store)
        x = made(np.ones(part_of(np.zeros((M, N)), Slab.X, context.rank, context.size).shape))
        x = made(x.astype(operation.dtype))
        work = operation(context, x, made)
        work.object.plan()
        call = work.forms[form] if form != "object" else lambda work, _: work.object.execute()
        last, tries = [], []

        def again():
            last[:] = [call(work, x)]

        for _ in range(REPEATS):
            names = calls_before("Lane.launch", again)
            tries.append([name for name in names if not name.startswith(("Pool.", "finalize."))])
        last.clear()
        work.object.free()
        context.board.barrier("done")
    return min(tries, key=len)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("store", "most"), [("heap", 34), ("ordinary", 24)])
@pytest.mark.parametrize(("name", "form"), CASES)
def test_a_new_result_takes_few_steps(contexts, name, form, store, most, size):
    most = most + 13 * (form == "options")  # which are read each time
    most = most if extension("shardmath.call._direct") else 160
    for names in contexts.run(count, name, form, store, ranks=size):
        assert len(names) <= most, "\n".join(names)


def move(context, where):
    """Wrong products of operands that lie elsewhere in each turn, as do the results, and what the
    last ones call. Then operands lie on one rank where they have been before, and change there.
    """
    rank, size, wrong, kept, tries = context.rank, context.size, [], [], []
    on_gpu, turns = where == "pretended", 3 * REPEATS
    right = np.arange(64.0).reshape(N, N)
    few = patch.object(gpu_repeats, "_PLACES", 4)
    with pretended(context, "ordinary") if on_gpu else context, few:
        made = arrays(context, "ordinary")
        for turn in range(turns):
            whole = np.arange(float(M * N)).reshape(M, N) % (7 + turn)
            x, b = (
                made(part_of(whole, Slab.X, rank, size)),
                made(part_of(right, Slab.X, rank, size)),
            )
            if turn >= turns - REPEATS and rank == 0:
                kept[0][0][...], (x, b, _) = x, kept[0]
            found = []
            kept.append((x, b, found))

            def product(x=x, b=b, found=found):
                found.append(matmul(x, b, distributions=SPLITS))

            names = calls_before("Lane.launch" if on_gpu else "", product)
            tries.append([name for name in names if not name.startswith(("Pool.", "finalize."))])
            if not np.array_equal(found[0], part_of(whole @ right, Slab.Y, rank, size)):
                wrong.append(turn)
        context.board.barrier("done")
    return wrong, min(tries[:-REPEATS], key=len), min(tries[-REPEATS:], key=len)


@pytest.mark.parametrize("where", MOVED)
def test_operands_that_lie_elsewhere_take_few_steps(contexts, where):
    for wrong, *names in contexts.run(move, where, ranks=2):
        assert not wrong
        if extension("shardmath.call._direct"):
            assert max(map(len, names)) <= MOVED[where], "\n".join(max(names, key=len))


def differ(context, name, form, store):
    """What is raised where one rank's call is another, after calls that came again; what comes next
    is right.
    """
    operation, rank, size = OPERATIONS[name], context.rank, context.size
    whole = np.arange(float(M * N)).reshape(M, N)
    with pretended(context, store):
        made = arrays(context, store)
        x = made(part_of(whole, Slab.X, rank, size).astype(operation.dtype))
        work = operation(context, x, made)
        work.object.plan()
        for _ in range(6):
            work.forms[form](work, x)
        given = made(np.zeros((3, N + 1), operation.dtype)) if rank == 1 else x
        told = heard(lambda: work.forms[form](work, given))[0]
        found = [work.forms[form](work, x) for _ in range(3)]
        wanted = part_of(work.of(whole), operation.target, rank, size)
        right = [np.allclose(one, wanted, rtol=1e-13, atol=1e-9) for one in found]
        work.object.free()
        context.board.barrier("done")
    return told, right


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(("name", "form"), CASES)
def test_all_ranks_raise_the_same_where_one_calls_otherwise(contexts, name, form, store):
    found = contexts.run(differ, name, form, store, ranks=3)
    assert found == [found[0]] * 3
    assert found[0][0] in ("ValueError", "CollectiveMismatch") and found[0][1] == [True] * 3


def grow(context):
    """How often a product is prepared, whose result needs more room than those before it; and how
    many exchanges the last calls are.
    """
    prepared, plain, exchanges = [], performing.Products._ready, []

    def ready(self, execution, *args, **named):
        prepared.append(execution.result.array.shape[0])
        return plain(self, execution, *args, **named)

    with pretended(context, "heap"), patch.object(performing.Products, "_ready", ready):
        made = arrays(context, "heap")
        b = made(part_of(np.ones((N, N)), Slab.X, context.rank, context.size))
        for rows in (M, 8 * M):
            a = made(part_of(np.ones((rows, N)), Slab.X, context.rank, context.size))
            for _ in range(5):
                before = context.board.rounds
                matmul(a, b, distributions=SPLITS)
            exchanges.append(context.board.rounds - before)
        context.board.barrier("done")
    return prepared, exchanges


def test_room_that_grows_lets_products_come_again(contexts):
    # The first has no room yet; the third is written where it lies, as all are that lie there.
    thrice = [rows for rows in (M, 8 * M) for _ in range(3)]
    assert contexts.run(grow, ranks=2) == [(thrice, [1, 1])] * 2


def kept_at_once(context, count, places, often):
    """How often a product is prepared whose results are all kept, each elsewhere on the heap, where
    so many places have launches, the later ones after so many copies; and whether all are right in
    the end.
    """
    prepared, plain = [], performing.Products._ready

    def ready(self, *args, **named):
        prepared.append(0)
        return plain(self, *args, **named)

    with (
        pretended(context, "heap"),
        patch.object(performing.Products, "_ready", ready),
        patch.multiple(gpu_repeats, _PLACES=places, _OFTEN=often),
    ):
        made = arrays(context, "heap")
        a, b = (
            made(part_of(np.ones((rows, N)), Slab.X, context.rank, context.size)) for rows in (M, N)
        )
        kept = []
        for number in range(count):
            a[...] = number
            context.board.barrier("written")
            kept.append(matmul(a, b, distributions=SPLITS))
        right = all((x == number * N).all() for number, x in enumerate(kept))
        context.board.barrier("done")
    return len(prepared), right


@pytest.mark.parametrize(
    ("count", "places", "often"), [(9, 128, 0), (9, 3, 0), (1000, 16, 0), (9, 128, 1)]
)
@pytest.mark.parametrize("size", [1, 2])
def test_products_come_again_wherever_their_results_lie(contexts, size, count, places, often):
    first = 3  # until there is a launch
    most = first if often else min(2 + count - first, 1 + places)  # one place is the lane's
    assert contexts.run(kept_at_once, count, places, often, ranks=size) == [(most, True)] * size
