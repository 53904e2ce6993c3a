"""Without a logger of the user's, the root logger's handlers get what is started, planned,
allocated and called.
"""

from __future__ import annotations

import logging
import os
import re
from contextlib import contextmanager, suppress

import numpy as np
import pytest

import shardmath
from shardmath.collectives import all_reduce
from shardmath.context import startup
from shardmath.distribution import Box, Redistribute, Slab, redistribute
from shardmath.fft import FFT, allocate_operand, fft, irfft, rfft
from shardmath.linalg.advanced import Matmul, matmul
from shardmath.reshape import reshape

ROWS = 6  # of each rank
XY = {"input_distribution": Slab.X, "output_distribution": Slab.Y}


def array(columns=12, dtype="c16"):
    return np.ones((ROWS, columns), dtype)


def planned_transform(**named):
    FFT(array(18), distribution=Slab.X, **named).free()


def product(context, **named):
    square = array(ROWS * context.size)
    matmul(square, array(), distributions=[Slab.X] * 3, **named)


def planned_product(context, **named):
    square = array(ROWS * context.size)
    with Matmul(square, array(18), distributions=[Slab.X] * 3, **named) as planned:
        planned.plan()


def planned_move(**named):
    Redistribute(array(18), Slab.X, Slab.Y, **named).free()


def boxes(context):
    mine = ROWS * context.rank, ROWS * context.rank + ROWS
    return Box((mine[0], 0), (mine[1], 24)), Box((mine[0], 0), (mine[1], 24))


# (the call, given a context and options or none; a word of what is logged)
PLANNED = {
    "fft": (lambda c, **o: fft(array(), distribution=Slab.X, **o), "fft C2C"),
    "rfft": (lambda c, **o: rfft(array(dtype="f8"), distribution=Slab.X, **o), "fft R2C"),
    "irfft": (lambda c, **o: irfft(array(), distribution=Slab.X, **o), "fft C2R"),
    "FFT": (lambda c, **o: planned_transform(**o), "fft C2C"),
    "matmul": (product, "matmul"),
    "Matmul": (planned_product, "matmul"),
    "redistribute": (lambda c, **o: redistribute(array(), **XY, **o), "redistribute"),
    "Redistribute": (lambda c, **o: planned_move(**o), "redistribute"),
    "reshape": (lambda c, **o: reshape(array(24), *boxes(c), **o), "redistribute"),
}


@contextmanager
def heard(level, name="root"):
    """What the handlers of a logger get while it is at `level`, as (logger's name, text)."""
    logger, handler, lines = logging.getLogger(name), logging.Handler(), []
    handler.emit = lambda record: lines.append((record.name, record.getMessage()))
    usual = logger.level
    logger.setLevel(level)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(usual)


def plan_each(context):
    """What is wrong with what is logged."""
    wrong = []

    def expect(what, lines, word, count):
        texts = [text for name, text in lines if name.split(".")[0] == "shardmath"]
        if len(lines) != count or not all(word in text for text in texts) or len(texts) != count:
            wrong.append((what, lines))

    with context.split(0) as part:  # which has planned nothing yet
        for name, (call, word) in PLANNED.items():
            with heard(logging.WARNING) as lines:
                call(part)
            expect(f"{name}: nothing at WARNING", lines, word, 0)
            with heard(logging.INFO) as lines:
                for _ in range(3):
                    call(part)
            expect(f"{name}: a plan once", lines, word, 1)
            with heard(logging.INFO) as lines, heard(logging.WARNING, "shardmath"):
                call(part)
            expect(f"{name}: nothing where the package is silenced", lines, word, 0)
            with heard(logging.INFO) as lines, heard(logging.INFO, "shardmath.user") as own:
                for _ in range(2):
                    call(part, options={"logger": logging.getLogger("shardmath.user")})
            expect(f"{name}: a logger of the user's, each call", own, word, 2)
    return wrong


def allocate_each(context):
    """What is logged of an operand and, on cores, of symmetric memory, at INFO and at WARNING."""
    found = []
    with context:
        for level in (logging.INFO, logging.WARNING):
            with heard(level) as lines:
                allocate_operand((2, 6), np, distribution=Slab.X, fft_type="C2C")
                if context.team is None:
                    shardmath.allocate_symmetric_memory(3, np)
            found += [text.split()[0] for name, text in lines if name == "shardmath"]
    return found


def call_each(context):
    """What is logged of calls at DEBUG, one of which raises, without their times."""
    x, uneven = array(dtype="f4"), np.ones(3 + context.rank)
    with context.split(0):
        for _ in range(4):  # from now on they are compiled
            redistribute(x, **XY)
        with heard(logging.DEBUG) as lines:
            redistribute(x, **XY)
            with suppress(ValueError):
                all_reduce(uneven)
        with heard(logging.INFO) as others:
            redistribute(x, **XY)
    told = [text for name, text in [*lines, *others] if "py:" in text]
    return [re.sub(r":[0-9]+, (.*) [0-9.]+ ms", r", \1", text) for text in told]


def test_calls_reach_the_root_logger(contexts):
    for rank, told in enumerate(contexts.run(call_each, ranks=2)):
        assert told == [
            f"rank {rank}: redistribute(float32[6,12]), test_logging.py, took",
            f"rank {rank}: all_reduce(float64[{3 + rank}]), test_logging.py, raised",
        ]


def test_starts_reach_the_root_logger():
    with heard(logging.INFO) as lines:
        startup.new_context("cpu").close()
    ((name, text),) = lines
    assert name == "shardmath"
    assert text.startswith(f"rank 0 of 1 (pid {os.getpid()} on ")
    assert "computes on cpu over host" in text and text.endswith("by SoloProcessGroup")


@pytest.mark.parametrize("size", [1, 2])
def test_plans_reach_the_root_logger(contexts, size):
    assert contexts.run(plan_each, ranks=size) == [[]] * size


def test_allocations_reach_the_root_logger(contexts):
    assert contexts.run(allocate_each, ranks=2) == [["allocated", "allocated"]] * 2
