"""SHARDMATH_CHECK=1 on cores: what several ranks have is compared, bit by bit, in each call."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mortal import run_job
from shardmath.context import startup
from shardmath.distribution import Redistribute, Replicated, Slab, redistribute
from shardmath.errors import CollectiveMismatch
from shardmath.fft import fft
from shardmath.linalg import solve
from shardmath.linalg.advanced import matmul

CHECKED = {"SHARDMATH_CHECK": "1"}
ODD = 2  # the rank whose copy differs
ALL = Replicated()


def matrix(n=5, dtype="f8"):
    return (np.arange(n * n).reshape(n, n) + n * n * np.eye(n)).astype(dtype)


def rows(rank, n=5):
    return np.ones(Slab.X.shape(rank, (n, n)))


# Name, operand that is replicated, and a call on one rank's copy of it.
CALLS = {
    "redistribute": ("operand", lambda rank, x: redistribute(x, ALL, Slab.X)),
    "torch": ("operand", lambda rank, x: redistribute(torch.from_numpy(x), ALL, Slab.Y)),
    "column-major": ("operand", lambda rank, x: redistribute(np.asfortranarray(x), ALL, Slab.X)),
    "strided": ("operand", lambda rank, x: redistribute(np.repeat(x, 2, 1)[:, ::2], ALL, Slab.X)),
    "transform": ("operand", lambda rank, x: fft(x + 0j, distribution=(ALL, Slab.X))),
    "a": ("a", lambda rank, x: matmul(x, rows(rank), distributions=[ALL, Slab.X, Slab.X])),
    "b": ("b", lambda rank, x: matmul(rows(rank), x, distributions=[Slab.X, ALL, Slab.X])),
    "solve": ("a", lambda rank, x: solve(x, rows(rank)[:, :1], distributions=[ALL, Slab.X])),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_copy_that_differs_is_an_error_on_all_ranks(name):
    operand, call = CALLS[name]

    def body(group):
        context = startup.initialize("cpu", group)
        same, other = matrix(), matrix()
        other[3, 1] = np.nextafter(other[3, 1], 99) if context.rank == ODD else other[3, 1]
        found = []
        for x in (same, other, same, other):
            try:
                call(context.rank, x)
                found.append("")
            except CollectiveMismatch as error:
                found.append(str(error))
        return found

    outcomes = run_job(3, body, CHECKED)
    assert outcomes == [outcomes[0]] * 3
    first, second, third, fourth = outcomes[0]
    assert first == third == "" and second == fourth
    assert second.startswith(f"{operand} of ")
    assert "that of ranks 0, 1 is not that of rank 2;" in second


def test_an_object_compares_its_operand_each_time():
    def body(group):
        context = startup.initialize("cpu", group)
        x = matrix()
        with Redistribute(x, ALL, Slab.X) as moved:
            moved.plan()
            moved.execute()
            x[0, 0] += context.rank == ODD
            with pytest.raises(CollectiveMismatch, match="replicated"):
                moved.execute()
            x[0, 0] -= context.rank == ODD
            return bool((moved.execute() == matrix()[Slab.X.slices(context.rank, (5, 5))]).all())

    assert run_job(3, body, CHECKED) == [True] * 3


def test_without_the_variable_nothing_is_compared():
    def body(group):
        context = startup.initialize("cpu", group)
        rounds = context.board.rounds
        redistribute(matrix() + (context.rank == ODD), ALL, Slab.X)
        return context.board.rounds - rounds

    unchecked, checked = [], []
    for variables, found in (({}, unchecked), (CHECKED, checked)):
        found.extend(run_job(3, body if not variables else equal_copies, variables))
    assert len(set(unchecked)) == 1 and checked == [unchecked[0] + 1] * 3


def equal_copies(group):
    context = startup.initialize("cpu", group)
    rounds = context.board.rounds
    redistribute(matrix(), ALL, Slab.X)
    return context.board.rounds - rounds
