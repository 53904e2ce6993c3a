"""Calls that came again, and then did not: by compiled code and by Python, the same is raised.

Three calls are as each other on all ranks. In the fourth something is different, on one rank or on
all: the results are right, or all ranks raise the same and no byte of a result has been written;
and then calls work as before.
"""

from __future__ import annotations

import logging

import numpy as np
import pytest

from mortal import Job, Raised
from shardmath.base.compiled import extension
from shardmath.collectives import all_reduce
from shardmath.context import startup
from shardmath.distribution import Slab, redistribute
from shardmath.handles.allocation import allocate_symmetric_memory as allocate
from shardmath.handles.allocation import free_symmetric_memory as free
from shardmath.linalg.advanced import Matmul, matmul

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
    with Job(RANKS, body(name), WAYS[way]) as job:
        outcomes = [job.outcome(rank, 60) for rank in range(RANKS)]
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
    with Job(RANKS, numbers, WAYS[way]) as job:
        outcomes = [job.outcome(rank, 60) for rank in range(RANKS)]
    assert outcomes == [True] * RANKS


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
    with Job(RANKS, count, WAYS[way]) as job:
        outcomes = [job.outcome(rank, 60) for rank in range(RANKS)]
    assert all(steps == (0 if built else 1) for built, steps in outcomes), outcomes
    assert way == "compiled" or not any(built for built, _ in outcomes)
