"""Programs of operators, performed by the interpreter: every rank in one process."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draws import drawn

sys.path.append(str(Path(__file__).parent.parent / "redistribution"))
sys.path.append(str(Path(__file__).parent.parent / "fft"))

import fft_cases
import redistribution_cases as cases
from interpreter import interpret
from matvec import MATVEC

from arrangements import distributions, part_of
from shardmath.arrays import ArraySpec
from shardmath.arrays.libraries.numpy import NumPy
from shardmath.geometry import Layout, Slab, decode
from shardmath.machine import Machine
from shardmath.operators.fft.operation import OPERATIONS
from shardmath.operators.redistribute.operation import REDISTRIBUTE
from shardmath.program import passes
from shardmath.program.analysis import waits_at_end
from shardmath.program.hosts import between_hosts
from shardmath.program.steps import READ, TAKEN, Arrive, Move, Program, Reason, Synchronise
from shardmath.redistribution import TransferPlan

FUNCTIONS = {"C2C": "fft", "C2C inverse": "ifft", "R2C": "rfft", "C2R": "irfft"}
ANY = drawn(80)


def described(operation, parts, words, options):
    """One rank's description of a call with new results."""
    arrays = {name: spec_of(part) for name, part in parts.items()}
    arrays |= dict.fromkeys(operation.names.results)
    return operation.describe(arrays, words, operation.options(**options))


def spec_of(part):
    """Of pairs of halves as torch's, which NumPy has no name for."""
    if part.dtype == fft_cases.HALVES:
        strides = tuple(step // part.itemsize for step in part.strides)
        return ArraySpec("torch", "complex32", part.shape, strides, "cpu", part.itemsize)
    return NumPy().spec(part)


def programs_of(operation, arrays, words, machine, options=()):
    """All ranks' programs, from the operands and other arguments of all."""
    specs = [described(operation, *each, dict(options)) for each in zip(arrays, words, strict=True)]
    problem = operation.check(specs)
    return [operation.program(problem, machine, rank) for rank in range(len(arrays))]


@st.composite
def placed(draw, sizes):
    """The number of each rank's host, and an order of ranks."""
    hosts = [draw(st.integers(0, 2)) for _ in range(sizes)]
    return tuple(hosts), draw(st.permutations(range(sizes)))


@ANY
@given(data=st.data(), case=cases.cases(libraries=("numpy",)))
def test_a_redistribution_on_any_hosts(data, case):
    size, shape, inputs, outputs, _, dtype, *_ = case
    hosts, order = data.draw(placed(size))
    array = cases.global_array(shape, dtype)
    sources, targets = (
        [cases.decoded(each, rank) for rank in range(size)] for each in (inputs, outputs)
    )
    arrays = [
        {"operand": np.array(part_of(array, source, rank, size))}
        for rank, source in enumerate(sources)
    ]
    words = list(zip(sources, targets, strict=True))
    found = programs_of(REDISTRIBUTE, arrays, words, Machine("cuda", hosts))
    want = [part_of(array, target, rank, size).tobytes() for rank, target in enumerate(targets)]
    lowered = [between_hosts(program, rank, hosts) for rank, program in enumerate(found)]
    for programs in (found, lowered):
        results = interpret(programs, arrays, order)
        assert [result["out"].tobytes() for result in results] == want


@ANY
@given(data=st.data(), case=fft_cases.cases())
def test_a_transform(data, case):
    """In small blocks, so in many passes: of any distributions, in any order of the ranks."""
    size = case["size"]
    _, order = data.draw(placed(size))
    array = fft_cases.operand_of(case)
    full = fft_cases.wanted(case, array)
    sources = [decode(each) for each in case["inputs"]]
    targets = sources if case["outputs"] is None else [decode(each) for each in case["outputs"]]
    pairs = sources if case["outputs"] is None else list(zip(sources, targets, strict=True))
    words = [(pair, case["axes"], case["norm"], None) for pair in pairs]
    arrays = [
        {"operand": np.array(part_of(array, source, rank, size))}
        for rank, source in enumerate(sources)
    ]
    options = {"last_axis_parity": case["parity"]}
    with patch.object(passes, "BLOCK_BYTES", case["block"]):
        machine = Machine("cpu", (0,) * size)
        programs = programs_of(OPERATIONS[FUNCTIONS[case["kind"]]], arrays, words, machine, options)
    axes = range(array.ndim) if case["axes"] is None else case["axes"]
    count = math.prod(full.shape[axis] for axis in axes)
    for rank, result in enumerate(interpret(programs, arrays, order)):
        assert fft_cases.close(result["out"], part_of(full, targets[rank], rank, size), count)


def vector_case(data):
    """(ranks, (a, x), each rank's distributions of a, x and the result, encoded)."""
    size = data.draw(st.integers(1, 6))
    m, n = data.draw(st.integers(0, 12)), data.draw(st.integers(0, 12))
    shapes = ((m, n), (n,), (m,))
    given = [data.draw(distributions(shape, size)) for shape in shapes]
    words = [tuple(each[rank] for each in given) for rank in range(size)]
    a = np.arange(1.0, 1 + m * n).reshape(m, n)
    return size, (a, np.arange(1.0, 1 + n)), words


@ANY
@given(data=st.data())
def test_a_matrix_and_a_vector(data):
    size, (a, x), encoded = vector_case(data)
    words = [tuple(map(decode, each)) for each in encoded]
    _, order = data.draw(placed(size))
    arrays = [
        {"a": np.array(part_of(a, word[0], r, size)), "x": np.array(part_of(x, word[1], r, size))}
        for r, word in enumerate(words)
    ]
    programs = programs_of(MATVEC, arrays, words, Machine("cpu", (0,) * size))
    results = interpret(programs, arrays, order)
    for rank, (result, word) in enumerate(zip(results, words, strict=True)):
        assert result["out"].tolist() == part_of(a @ x, word[2], rank, size).tolist()


def test_what_is_not_synchronised_shows():
    """The same programs without the synchronisation before sums are read, in two orders."""
    size, a, x = 2, np.ones((4, 4)), np.ones(4)
    word = (Slab.Y, Slab.X, Slab.X)
    arrays = [
        {"a": np.array(part_of(a, word[0], r, size)), "x": np.array(part_of(x, word[1], r, size))}
        for r in range(size)
    ]
    programs = programs_of(MATVEC, arrays, [word] * size, Machine("cpu", (0, 0)))
    broken = [replace(each, steps=(*each.steps[:-3], *each.steps[-2:])) for each in programs]
    assert isinstance(programs[0].steps[-3], Synchronise)
    whole = [interpret(programs, arrays, order)[0]["out"].tolist() for order in ([0, 1], [1, 0])]
    torn = [interpret(broken, arrays, order)[0]["out"].tolist() for order in ([0, 1], [1, 0])]
    assert whole[0] == whole[1] == [4, 4]
    assert torn[0] != torn[1]


def test_a_program_says_why_its_ranks_wait():
    steps = programs_of(
        REDISTRIBUTE,
        [{"operand": np.zeros((2, 4))}] * 2,
        [(Slab.X, Slab.Y)] * 2,
        Machine("cpu", (0, 0)),
    )[0].steps
    assert [type(step) for step in steps] == [Synchronise, Move, Synchronise]
    assert Reason.BEFORE_REUSING in steps[-1].reasons
    assert str(steps[-1]).endswith(Reason.BEFORE_REUSING.value)


@pytest.mark.parametrize("hosts", [(0, 0), (0, 1)])
def test_what_stays_on_its_rank_waits_for_nobody(hosts):
    arrays = [{"operand": np.zeros((2, 4))}] * 2
    found = programs_of(REDISTRIBUTE, arrays, [(Slab.X, Slab.X)] * 2, Machine("cuda", hosts))
    assert [type(step) for step in between_hosts(found[0], 0, hosts).steps] == [Move]


ROWS, COLUMNS = (Layout.slab((4, 4), 2, axis=axis) for axis in (0, 1))
A, B = (Move(TransferPlan(ROWS, COLUMNS, 8), name, f"{name} here") for name in "ab")
ENDS = [
    # What comes behind the exchange, and whose readers a rank waits for.
    ([A], ["a"]),
    ([A, READ, B], ["b"]),
    ([READ, A, B], ["a", "b"]),
    # A peer that has said that it comes to a synchronisation may still be reading `a` behind it.
    ([READ, Arrive(), A, READ, B], ["a", "b"]),
    ([A, Arrive(), READ, B], ["b"]),
    # This rank has said that it comes to the last.
    ([A, READ, B, Arrive()], True),
]


class Waiting:
    """Offers of buffers, which say whose readers they were asked about."""

    def wait(self, names):
        return list(names)


@pytest.mark.parametrize(("steps", "names"), ENDS)
def test_whose_readers_a_rank_waits_for_at_the_end(steps, names):
    assert waits_at_end(Program((READ, *steps, TAKEN), {}), Waiting()) == names
