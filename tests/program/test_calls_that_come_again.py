"""Calls that came again, and then did not: by compiled code and by Python, the same is raised.

Three calls are as each other on all ranks. In the fourth something is different, on one rank or on
all: the results are right, or all ranks raise the same and no byte of a result has been written;
and then calls work as before.
"""

from __future__ import annotations

import gc
import logging
import weakref
from functools import cache, partial, reduce
from itertools import product

import numpy as np
import pytest
import torch

from arrangements import part_of
from mortal import Raised, run_job
from shardmath.base.compiled import extension
from shardmath.collectives import all_gather, all_reduce, reduce_scatter
from shardmath.context import startup
from shardmath.distribution import Redistribute, Slab, redistribute
from shardmath.fft import fft
from shardmath.handles.allocation import allocate_symmetric_memory as allocate
from shardmath.handles.allocation import free_symmetric_memory as free
from shardmath.linalg.advanced import Matmul, matmul
from shardmath.program.cores import Cores

RANKS = 3
ODD = 1  # the rank that does otherwise
VARIABLES = {"SHARDMATH_TIMEOUT": "100", "SHARDMATH_NOTICE": "100"}
WAYS = {"compiled": VARIABLES, "in Python": VARIABLES | {"SHARDMATH_COMPILED": "0"}}
SPLITS = (Slab.X, Slab.X, Slab.Y)
UNTOUCHED = -1.0


class Calls:
    """A redistribution of columns that say whose they were, into `out`; it is right, or it raises.

    `whole` is the array on all ranks in the turn `turn`.
    """

    shape = (2 * RANKS, 4 * RANKS)

    def __init__(self, context):
        self.context, self.turn = context, 0
        self.x, self.out = allocate((2, 4 * RANKS), np), allocate((2 * RANKS, 4), np)
        self.other = allocate((2, 4 * RANKS), np)

    def whole(self):
        return np.arange(np.prod(self.shape)).reshape(self.shape) + 1000.0 * self.turn

    def again(self, x=None, out="", words=(Slab.X, Slab.Y)):
        self.turn += 1
        rank, x, out = self.context.rank, self.x if x is None else x, self.out if out == "" else out
        x[...] = self.whole()[2 * rank : 2 * rank + 2]
        if out is not None:
            out[...] = UNTOUCHED
        self.context.barrier()
        found = redistribute(x, *words, out=out)
        assert np.array_equal(found, self.whole()[:, 4 * rank : 4 * rank + 4])
        return found


def on_odd(calls, given, otherwise):
    return given if calls.context.rank == ODD else otherwise


def after_a_free(calls):
    if calls.context.rank == ODD:
        free(calls.x)
    redistribute(calls.x, Slab.X, Slab.Y, out=calls.out)


def with_a_new_plan(calls):
    all_reduce(np.ones(7))
    calls.again()


def in_another_operation(calls):
    if calls.context.rank == ODD:
        calls.context.barrier()
        calls.turn += 1
        all_reduce(np.ones(3))
    else:
        calls.again()


def told(calls):
    logger = logging.getLogger("shardmath")
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        calls.again()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert lines, "the plan is told once"


def told_each_time(calls):
    """A logger of the options' own is told of each call; options may change from call to call."""
    lines, options = [], {"logger": logging.Logger("own", logging.INFO)}
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    options["logger"].addHandler(handler)
    for number in range(4):
        redistribute(calls.x, Slab.X, Slab.Y, options=options)
        assert len(lines) == number + 1
    options["blocking"] = "never"
    redistribute(calls.x, Slab.X, Slab.Y, options=options)


def in_the_other_direction(calls):
    calls.again(words=on_odd(calls, (Slab.Y, Slab.X), (Slab.X, Slab.Y)))


def read_only(calls):
    if calls.context.rank == ODD:
        calls.out.flags.writeable = False
    try:
        redistribute(calls.x, Slab.X, Slab.Y, out=calls.out)
    finally:
        calls.out.flags.writeable = True


def with_a_dictionary_that_was_changed(calls):
    options = {}
    for _ in range(4):
        redistribute(calls.x, Slab.X, Slab.Y, out=calls.out, options=options)
    calls.out[...] = UNTOUCHED
    if calls.context.rank == ODD:
        options["nonsense"] = True
    redistribute(calls.x, Slab.X, Slab.Y, out=calls.out, options=options)


CASES = {
    "an array elsewhere": (lambda calls: calls.again(on_odd(calls, calls.other, None)), ""),
    "in ordinary memory": (
        lambda calls: calls.again(on_odd(calls, np.zeros((2, 4 * RANKS)), None)),
        "",
    ),
    "a new result": (lambda calls: calls.again(out=on_odd(calls, None, "")), ""),
    "a plan is made": (with_a_new_plan, ""),
    "the logger is told": (told, ""),
    "a logger is told each time": (told_each_time, "blocking"),
    "a block is freed": (after_a_free, "freed"),
    "read-only": (read_only, "read-only"),
    "other words": (in_the_other_direction, "distribution"),
    "other options": (with_a_dictionary_that_was_changed, "nonsense"),
    "another operation": (in_another_operation, "redistribute"),
}


def body(name):
    def run(group):
        calls = Calls(startup.initialize("cpu", group))
        for _ in range(4):
            calls.again()
        act, wrong = CASES[name]
        calls.out[...] = UNTOUCHED
        try:
            act(calls)
            found = ""
        except (TypeError, ValueError, RuntimeError) as error:
            found = f"{type(error).__name__}: {error}"
        assert not wrong or (calls.out == UNTOUCHED).all()
        if name not in ("a block is freed", "another operation"):
            for _ in range(3):
                calls.again()
        else:
            assert all_reduce(np.ones(3))[0] == RANKS
        return found

    return run


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_a_call_that_is_not_as_it_was(name, way):
    outcomes = run_job(RANKS, body(name), WAYS[way], timeout=60)
    assert not any(isinstance(each, Raised) for each in outcomes), outcomes
    wrong = CASES[name][1]
    assert all(wrong in each if wrong else each == "" for each in outcomes), outcomes


def numbers(group):
    """Products with other numbers, one after the other: 2 is no 2.0 + 0j, and -0.0 no 0.0."""
    context, found = startup.initialize("cpu", group), []
    a, b = np.ones((2, 2 * RANKS)), np.ones((2, 4 * RANKS))
    for alpha in (1.0, 2.0, 2.0, 2.0, -0.0, 0.0, -0.0, np.float64(3), 3, 3.0, 3.0, 4.0):
        d = matmul(a, b, distributions=SPLITS, alpha=alpha)
        found.append((d == 2 * RANKS * float(alpha)).all() and np.signbit(d).any())
    with Matmul(a, b, distributions=SPLITS) as product:
        product.plan()
        for turn in range(6):
            a[...] = turn
            context.barrier()
            assert (product.execute() == 2 * RANKS * turn).all()
        product.reset_operands(alpha=5.0)
        assert (product.execute() == 2 * RANKS * 5.0 * 5).all()
    try:
        product.execute()
    except RuntimeError as error:
        assert "freed" in str(error)
    else:
        raise AssertionError("a product that was freed is executed")
    return True


@pytest.mark.parametrize("way", WAYS)
def test_numbers_of_calls_are_told_apart(way):
    outcomes = run_job(RANKS, numbers, WAYS[way], timeout=60)
    assert outcomes == [True] * RANKS


KINDS = (
    *(("f4", "packed"), ("f4", "strided"), ("f4", "torch")),
    *(("c16", "packed"), ("i8", "packed"), ("u4", "packed"), ("i2", "packed")),
)
SHAPES = ((), (7,), (3, 5), (0, 3))
TURNS = 4


@cache
def elements(dtype, shape, rank, turn):
    """Any bits, so that among numbers there are NaN of every kind."""
    rng, dtype = np.random.default_rng([rank, turn]), np.dtype(dtype)
    kind = "u1" if dtype.kind != "b" else "?"
    bits = rng.integers(0, 2, (*shape, dtype.itemsize)) * rng.integers(0, 256, (*shape, 1))
    return bits.astype(kind).view(dtype).reshape(shape)


def arranged(values, way):
    """Memory of the same shape, in which elements lie otherwise."""
    if way == "torch":
        return torch.empty(values.shape, dtype=torch.from_numpy(values).dtype)
    whole = np.empty((*values.shape[::-1], 2), values.dtype)
    return whole[..., 0].T if way == "strided" else np.empty_like(values)


def sums_of(x, out):
    """Calls by what identifies them, and how NumPy has their results."""
    calls = {
        "new": lambda: all_reduce(x),
        "out": lambda: all_reduce(x, out=out),
        "in place": lambda: all_reduce(x, out=x),
        "product": lambda: all_reduce(x, op="product"),
    }
    for axis in range(x.ndim):
        calls[f"scattered along {axis}"] = partial(reduce_scatter, x, axis=axis)
    return calls


def numpys(name, parts, rank):
    with np.errstate(all="ignore"):
        result = reduce(np.multiply if name == "product" else np.add, parts)
    return np.array_split(result, RANKS, int(name[-1]))[rank] if "along" in name else result


def sums(group):
    """Sums that come again, of what ranks write anew each time: those that are wrong."""
    context, wrong = startup.initialize("cpu", group), []
    for (dtype, way), shape in product(KINDS, SHAPES):
        x, out = (arranged(elements(dtype, shape, 0, 0), way) for _ in range(2))
        seen, given, kept = np.asarray(x), np.asarray(out), []
        for (name, call), turn in product(sums_of(x, out).items(), range(TURNS)):
            parts = [elements(dtype, shape, rank, turn) for rank in range(RANKS)]
            seen[...], given[...] = parts[context.rank], 0
            kept.append(call())  # so that each new result lies elsewhere
            result, wanted = np.asarray(kept[-1]), numpys(name, parts, context.rank)
            assert (result.dtype, result.shape) == (wanted.dtype, wanted.shape)
            if result.tobytes() != wanted.tobytes():
                wrong.append((dtype, shape, way, name, turn))
    return wrong


@pytest.mark.parametrize("way", WAYS)
def test_sums_that_come_again_have_the_bits_of_numpys(way):
    outcomes = run_job(RANKS, sums, WAYS[way], timeout=100)
    assert outcomes == [[]] * RANKS


def other_sum(context, name):
    """A sum that one rank asks for otherwise than in the calls before."""
    odd = context.rank == ODD
    x, out = np.ones(6, "f4"), np.full(6, UNTOUCHED, "f4")
    return {
        "an operation": lambda: all_reduce(x, op="max" if odd else "sum", out=out),
        "a type": lambda: all_reduce(x.astype("f8" if odd else "f4"), out=out),
        "a shape": lambda: all_reduce(x[: 6 - odd], out=out[: 6 - odd]),
        "an out of another shape": lambda: all_reduce(x, out=out[:5] if odd else out),
        "no array": lambda: all_reduce(None if odd else x, out=out),
    }[name], out


OTHER_SUMS = {
    "an operation": "op",
    "a type": "dtype",
    "a shape": "shape",
    "an out of another shape": "out",
    "no array": "x",
}


def sum_otherwise(group):
    context, found = startup.initialize("cpu", group), []
    x, out = np.ones(6, "f4"), np.zeros(6, "f4")
    for name in OTHER_SUMS:
        for _ in range(4):
            assert (all_reduce(x, out=out) == RANKS).all()
        call, result = other_sum(context, name)
        try:
            call()
            found.append("")
        except (TypeError, ValueError, RuntimeError) as error:
            found.append(str(error))
        assert (result == UNTOUCHED).all()
    return found


@pytest.mark.parametrize("way", WAYS)
def test_a_sum_that_is_not_as_it_was(way):
    outcomes = run_job(RANKS, sum_otherwise, WAYS[way], timeout=60)
    assert outcomes == [outcomes[0]] * RANKS
    for wanted, said in zip(OTHER_SUMS.values(), outcomes[0], strict=True):
        assert wanted in said, (wanted, said)


def looked_at(group):
    """Arguments that changed where they are, and contexts: what came in place of the result."""
    context, wrong = startup.initialize("cpu", group), []
    rank, x = context.rank, np.arange(4.0 * RANKS)
    counts, splits = [4] * RANKS, [Slab.X, Slab.X, Slab.Y]
    a, b = np.ones((2, 2 * RANKS)), np.ones((2, 4 * RANKS))

    def scattered():
        start = sum(counts[:rank])
        found = reduce_scatter(x, counts=counts)
        return np.array_equal(found, RANKS * x[start : start + counts[rank]])

    def product_of():
        return matmul(a, b, distributions=splits).shape

    def number():
        return float(all_reduce(x[:1]).sum())

    for _ in range(4):
        assert scattered() and product_of() == (2 * RANKS, 4) and number() == 0.0
    counts[:] = [3, *[4] * (RANKS - 2), 5]
    wrong += [] if scattered() else ["counts"]
    splits[2] = Slab.X
    wrong += [] if product_of() == (2, 4 * RANKS) else ["distributions"]
    x[:1] = 7.0
    wrong += [] if number() == 7.0 * RANKS else ["elements"]
    with context.split(rank) as alone:
        wrong += [] if [number() for _ in range(4)] == [7.0] * 4 else ["the context"]
        x[:1] = 8.0
        wrong += [] if number() == 8.0 else ["elements of one rank"]
        x[:1] = 7.0
    alone.close()
    wrong += [] if number() == 7.0 * RANKS else ["the context, afterwards"]
    x.shape = 2, -1
    wrong += [] if all_reduce(x[:1]).shape == (1, 2 * RANKS) else ["the shape"]
    startup.finalize()
    try:
        number()
    except RuntimeError:
        return wrong
    return [*wrong, "after the end"]


@pytest.mark.parametrize("way", WAYS)
def test_arguments_are_looked_at_each_time(way):
    outcomes = run_job(RANKS, looked_at, WAYS[way], timeout=60)
    assert outcomes == [[]] * RANKS


def objects(group):
    """Objects whose operands changed, or that have ended, after executions that came again."""
    context, wrong = startup.initialize("cpu", group), []
    rank = context.rank

    def columns(of):
        return np.broadcast_to(np.repeat(of + np.arange(RANKS), 2)[:, None], (2 * RANKS, 4))

    def written(start):
        x = allocate((2, 4 * RANKS), np)
        x[...] = start + rank
        return x

    def again(moved):
        return [moved.execute() for _ in range(4)][-1]

    first, second = written(0.0), written(100.0)
    moved = Redistribute(first, Slab.X, Slab.Y)
    moved.plan()
    wrong += [] if np.array_equal(again(moved), columns(0.0)) else ["first"]
    moved.reset_operand(second)
    wrong += [] if np.array_equal(moved.execute(), columns(100.0)) else ["reset"]
    wrong += [] if np.array_equal(again(moved), columns(100.0)) else ["reset, again"]
    second[...] = rank
    context.barrier()
    out = allocate((2 * RANKS, 4), np)
    wrong += [] if moved.execute(out=out) is out and np.array_equal(out, columns(0.0)) else ["out"]
    found = moved.execute(release_workspace=True)
    wrong += [] if np.array_equal(found, columns(0.0)) else ["released workspace"]
    second.shape = 2, 2, -1
    try:
        moved.execute()
        wrong.append("another shape")
    except ValueError:
        second.shape = 2, -1
    again(moved)
    moved.release_operand()
    try:
        moved.execute()
        wrong.append("released")
    except RuntimeError:
        moved.reset_operand(first)
    again(moved)
    known, kept = weakref.ref(moved), len(context.again)
    del moved
    gc.collect()
    wrong += [] if known() is None and len(context.again) <= kept else ["it stays"]
    with Redistribute(first, Slab.X, Slab.Y) as moved:
        moved.plan()
        again(moved)
    try:
        moved.execute()
        wrong.append("freed")
    except RuntimeError:
        pass
    return wrong


@pytest.mark.parametrize("way", WAYS)
def test_objects_are_looked_at_each_time(way):
    outcomes = run_job(RANKS, objects, WAYS[way], timeout=60)
    assert outcomes == [[]] * RANKS


def count(group):
    context = startup.initialize("cpu", group)
    calls, steps = Calls(context), []
    for _ in range(5):
        calls.again()
    compiled = extension("shardmath.call._direct")
    driver = next(x for x in context.caches.values() if hasattr(x, "again"))
    plain = driver.performer.prepare
    driver.performer.prepare = lambda *_: steps.append(0) or plain(*_)
    calls.again()
    return [compiled is not None, len(steps)]


@pytest.mark.parametrize("way", WAYS)
def test_compiled_code_makes_the_call_where_it_was_built(way):
    outcomes = run_job(RANKS, count, WAYS[way], timeout=60)
    assert all(steps == (0 if built else 1) for built, steps in outcomes), outcomes
    assert way == "compiled" or not any(built for built, _ in outcomes)


def waves(whole):
    return np.fft.fft2(whole)


# What makes a new result of an operand split along x, what it is of the whole, and how it is split.
MAKERS = {
    "all_gather": (lambda x, _: all_gather(x), lambda whole: whole, None),
    "redistribute": (lambda x, _: redistribute(x, Slab.X, Slab.Y), lambda whole: whole, Slab.Y),
    "product": (
        lambda x, b: matmul(x, b, distributions=SPLITS),
        lambda whole: whole @ whole,
        Slab.Y,
    ),
    "transform": (lambda x, _: fft(x, distribution=Slab.X), waves, Slab.X),
}
SIDES = 2 * RANKS, 96  # results of up to, and of more than what is sooner copied
TRIED = 4  # calls whose results are dropped, before others are kept


def kept(group):
    """Results that were not right at the end, of programs that keep them, and how many calls bound
    steps to the places of those: each lies where none lies, but perhaps where one lay that was
    dropped.

    Each library has half of the forms, in which every two properties of a form meet.
    """
    context, wrong, most = startup.initialize("cpu", group), [], 0
    rank, size, bind = context.rank, context.size, Cores._bind_step
    forms = product(enumerate(MAKERS), enumerate(SIDES), (False, True), (False, True))
    for (number, name), (which, side), on_heap, columns in forms:
        library = (np, torch)[(number + which + on_heap + columns) % 2]
        make, dtype = MAKERS[name][0], dtype_of(name)
        x, b = (
            in_memory(library, (side // size, side), dtype, on_heap=on_heap, columns=columns)
            for _ in range(2)
        )
        results, bound = [], set()

        def noted(self, *arguments, bound=bound, results=results):
            bound.add(len(results))
            return bind(self, *arguments)

        Cores._bind_step = noted
        for turn in range(TRIED + 8):
            operand, part = operand_and_result(name, side, turn, rank, size)
            for array in (x, b):
                np.asarray(array)[...] = operand
            context.barrier()
            result = make(x, b)
            if turn < TRIED:
                bound.clear()
            else:
                results.append((result, part))
            del result
        Cores._bind_step = bind
        most = max(most, len(bound) if side == SIDES[0] and not columns else 0)
        if not all(np.allclose(result, part, atol=1e-9) for result, part in results):
            wrong.append((name, library.__name__, side, on_heap, columns))
    return [wrong, most]


def dtype_of(name):
    return np.dtype("complex128" if name == "transform" else "float64")


@cache
def operand_and_result(name, side, turn, rank, size):
    """A rank's parts of both."""
    _, expected, split = MAKERS[name]
    whole = (np.arange(side * side).reshape(side, side) % (5 + turn)).astype(dtype_of(name))
    result = expected(whole)
    if split is not None:
        result = part_of(result, split, rank, size)
    return part_of(whole, Slab.X, rank, size), result


def in_memory(library, shape, dtype, *, on_heap, columns):
    """An array on the heap, or in ordinary memory, whose rows or columns are contiguous."""
    shape = shape[::-1] if columns else shape
    if on_heap:
        kind = dtype if library is np else getattr(torch, dtype.name)
        array = allocate(shape, library, dtype=kind)
    else:
        array = (
            np.empty(shape, dtype) if library is np else torch.from_numpy(np.empty(shape, dtype))
        )
    return array.T if columns else array


@pytest.mark.parametrize("way", WAYS)
def test_results_that_are_kept_lie_where_none_lay_before(way):
    outcomes = run_job(RANKS, kept, WAYS[way], timeout=60)
    assert all(wrong == [] and most <= TRIED for wrong, most in outcomes), outcomes
