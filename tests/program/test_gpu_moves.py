"""Moves on GPUs, pushed, pulled, staged and delivered: each rank's program performed by NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_interpreter import Rank, interpret_ranks
from test_programs import ANY, cases, placed, programs_of

from arrangements import part_of
from shardmath.machine import Machine
from shardmath.operators.redistribute.operation import REDISTRIBUTE
from shardmath.program.gpus import delivered_program, moved_program
from shardmath.program.rank_program import View
from shardmath.program.steps import Synchronise


def performed(data, case, lower, hosts):
    """What all ranks have in the end, and what they should have, as bytes."""
    size, shape, inputs, outputs, _, dtype, *_ = case
    array = cases.global_array(shape, dtype)
    sources, targets = (
        [cases.decoded(each, rank) for rank in range(size)] for each in (inputs, outputs)
    )
    parts = [np.array(part_of(array, source, rank, size)) for rank, source in enumerate(sources)]
    words = list(zip(sources, targets, strict=True))
    machine = Machine("cuda", hosts)
    programs = programs_of(REDISTRIBUTE, [{"operand": part} for part in parts], words, machine)
    ranks = []
    for number, (program, part, target) in enumerate(zip(programs, parts, targets, strict=True)):
        order = data.draw(st.sampled_from("CF"))
        out = np.zeros(part_of(array, target, number, size).shape, part.dtype, order=order)
        held = {"operand": np.array(part, order=data.draw(st.sampled_from("CF"))), "out": out}
        views = [View(name, x.shape, x.strides, dtype) for name, x in held.items()]
        users = {name: (x.reshape(-1, order="A").view(np.uint8), 0) for name, x in held.items()}
        ranks.append(Rank(number, lower(program, number, *views), users))
    interpret_ranks(ranks, seed=data.draw(st.integers(0, 99)))
    want = [part_of(array, target, number, size) for number, target in enumerate(targets)]
    got = [rank.array(rank.named("out"), want[rank.number].dtype) for rank in ranks]
    return [x.tobytes() for x in got], [x.tobytes() for x in want]


@ANY
@given(data=st.data(), case=cases.cases(libraries=("numpy",)))
@pytest.mark.parametrize("way", ["push", "pull", "staged"])
def test_a_move_on_one_host(data, case, way):
    def lower(program, rank, operand, out):
        staged = way == "staged" and data.draw(st.booleans())
        return moved_program(program, operand, out, pulls=way == "pull", staged=staged)

    got, want = performed(data, case, lower, (0,) * case[0])
    assert got == want


@ANY
@given(data=st.data(), case=cases.cases(libraries=("numpy",)))
def test_a_move_between_hosts(data, case):
    hosts, _ = data.draw(placed(case[0]))

    def lower(program, rank, operand, out):
        if not any(isinstance(step, Synchronise) for step in program.steps):
            return moved_program(program, operand, out, pulls=False, staged=False)
        return delivered_program(program, operand, out, rank=rank, hosts=hosts)

    got, want = performed(data, case, lower, hosts)
    assert got == want
