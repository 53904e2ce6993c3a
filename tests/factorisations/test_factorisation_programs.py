"""Programs of factorisations, every rank in one process: ranks run in any order between
synchronisations, and what they do after they have arrived is done early or late; and as GPUs
perform them, in any order that their streams allow.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import scipy.linalg
from hypothesis import given
from hypothesis import strategies as st
from matrices import general, is_small, positive, right_sides, singular
from own_steps import interpret_on_gpus, interpreter
from stream_order import unordered

from arrangements import distributions, part_of
from draws import drawn
from shardmath.arrays.libraries.numpy import NumPy
from shardmath.factorisations import gpus as gpu_programs
from shardmath.factorisations.blocks import Blocks
from shardmath.factorisations.cholesky import (
    CHOLESKY,
    CHOLESKYS,
    SOLVE_POSITIVE_DEFINITE,
)
from shardmath.factorisations.lu import (
    DIAGONAL,
    INVERSE,
    LU_FACTOR,
    LU_FACTORS,
    LU_SOLVE,
    SOLVE,
)
from shardmath.factorisations.operation import SOLVE_TRIANGULAR
from shardmath.factorisations.prediction import predicted
from shardmath.factorisations.problem import Problem
from shardmath.factorisations.steps import GOOD, NOT_FINITE_A
from shardmath.geometry import Layout, Slab, decode
from shardmath.machine import CORES, Machine
from shardmath.program.rank_program import packed
from shardmath.program.steps import Arrive, Await, Move, On

FEW = drawn(12)
TYPES = st.sampled_from(["float64", "complex128"])


def performed(operation, operands, split, flags, size, *, block, order, late=False, gpus=None):
    """All ranks' results by name. `split`: encoded distributions by rank, of operands but pivots,
    and of the result. `gpus`: as GPUs perform it, with that seed.
    """
    rows = [[decode(one[rank]) for one in split] for rank in range(size)]
    parts = []
    for rank in range(size):
        given = iter(rows[rank])
        parts.append({
            name: np.array(whole if name == "pivots" else part_of(whole, next(given), rank, size))
            for name, whole in operands.items()
        })  # fmt: skip
    specs = []
    for rank in range(size):
        arrays = {name: NumPy().spec(part) for name, part in parts[rank].items()}
        arrays |= dict.fromkeys(operation.names.results)
        words = tuple(rows[rank]), flags
        specs.append(operation.describe(arrays, words, operation.options(block_size=block)))
    problem = operation.check(specs)
    machine = Machine("cpu", (0,) * size)
    programs = [operation.program(problem, machine, rank) for rank in range(size)]
    assert operation.explain(problem, machine)
    if gpus is not None:
        staged = [name for at, name in enumerate(operands) if gpus >> at & 1]
        return interpret_on_gpus(programs, parts, seed=gpus, staged=staged)
    return interpreter.interpret(programs, parts, order, late=late)


@st.composite
def calls(draw, shapes):
    """Ranks, the size of a matrix, distributions, a block size, and an order of the ranks."""
    size, n = draw(st.integers(1, 4)), draw(st.integers(0, 30))
    columns = draw(st.sampled_from([None, 0, 1, 2, 5]))
    right = (n,) if columns is None else (n, columns)
    split = [draw(distributions({"a": (n, n), "b": right}[shape], size)) for shape in shapes]
    words = {"block": draw(st.integers(1, 12)), "late": draw(st.booleans())}
    words["gpus"] = draw(st.one_of(st.none(), st.integers(0, 99)))
    return size, n, columns, split, words | {"order": draw(st.permutations(range(size)))}


@FEW
@given(call=calls("aa"), dtype=TYPES, lower=st.booleans())
def test_cholesky(call, dtype, lower):
    size, n, _, split, words = call
    a = positive(n, dtype)
    seen = np.tril(a) if lower else np.triu(a)  # the other triangle is not read
    results = performed(CHOLESKY, {"a": seen}, split, (lower, True), size, **words)
    want = np.linalg.cholesky(a) if n else a
    want = want if lower else want.conj().T
    for rank, made in enumerate(results):
        part = part_of(want, decode(split[-1][rank]), rank, size)
        assert is_small(made["out"] - part, want, n=n, dtype=dtype, growth=100)
        assert made["fault"].tolist() == [GOOD]


@FEW
@given(call=calls("abb"), dtype=TYPES, lower=st.booleans(), transposed=st.booleans())
def test_positive_definite_systems(call, dtype, lower, transposed):
    size, n, columns, split, words = call
    a, b = positive(n, dtype), right_sides(n, columns, dtype)
    seen = np.tril(a) if lower else np.triu(a)
    operands = {"a": seen, "b": b}
    flags = lower, transposed, True
    results = performed(SOLVE_POSITIVE_DEFINITE, operands, split, flags, size, **words)
    want = np.linalg.solve(a.T if transposed else a, b) if b.size else b
    for rank, made in enumerate(results):
        part = part_of(want, decode(split[-1][rank]), rank, size)
        assert made["fault"].tolist() == [GOOD]
        assert is_small(made["x"] - part, want, n=n, dtype=dtype, growth=1000)


@FEW
@given(call=calls("aa"), dtype=TYPES)
def test_lu_factors(call, dtype):
    size, n, _, split, words = call
    a = general(n, dtype)
    lu, pivots = scipy.linalg.lu_factor(a)
    for rank, made in enumerate(performed(LU_FACTOR, {"a": a}, split, (True,), size, **words)):
        part = part_of(lu, decode(split[-1][rank]), rank, size)
        assert made["pivots"].tolist() == pivots.tolist()
        assert is_small(made["lu"] - part, lu, n=n, dtype=dtype, growth=1e4)
    for made in performed(DIAGONAL, {"a": a}, split, (True,), size, **words):
        assert made["pivots"].tolist() == pivots.tolist()
        assert is_small(made["diagonal"] - lu.diagonal(), lu, n=n, dtype=dtype, growth=1e4)


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize("gpus", [None, 5])
@pytest.mark.parametrize("precision", ["bfloat16", "tf32x3"])
def test_products_in_a_lower_precision(dtype, gpus, precision):
    a, split = positive(43, dtype), [[Slab.X.encode()] * 3] * 2
    words = {"block": 7, "order": [1, 2, 0], "gpus": gpus}
    made = performed(CHOLESKYS[precision], {"a": a}, split, (True, True), 3, **words)
    lower = np.concatenate([rank["out"] for rank in made])
    made = performed(LU_FACTORS[precision], {"a": a}, split, (True,), 3, **words)
    lu = np.concatenate([rank["lu"] for rank in made])
    for left, right in ((lower, lower.conj().T), (np.tril(lu, -1) + np.eye(43), np.triu(lu))):
        for row, other in () if left is lower else list(enumerate(made[0]["pivots"]))[::-1]:
            left[[row, other]] = left[[other, row]]
        error = np.linalg.norm(left @ right - a) / np.linalg.norm(a)
        least, most = {"bfloat16": (1e-5, 2.0**-8), "tf32x3": (0, 2.0**-20)}[precision]
        assert least < error < most


@FEW
@given(call=calls("abb"), dtype=TYPES, transposed=st.booleans())
def test_general_systems(call, dtype, transposed):
    size, n, columns, split, words = call
    a, b = general(n, dtype), right_sides(n, columns, dtype)
    flags = transposed, True
    results = performed(SOLVE, {"a": a, "b": b}, split, flags, size, **words)
    seen = a.T if transposed else a
    want = np.linalg.solve(seen, b) if b.size else b
    for rank, made in enumerate(results):
        part = part_of(want, decode(split[-1][rank]), rank, size)
        assert made["fault"].tolist() == [GOOD]
        assert is_small(made["x"] - part, want, n=n, dtype=dtype, growth=1e7)


@FEW
@given(call=calls("abb"), dtype=TYPES, op=st.sampled_from("NTC"))
def test_systems_by_factors(call, dtype, op):
    size, n, columns, split, words = call
    a, b = general(n, dtype), right_sides(n, columns, dtype)
    lu, pivots = scipy.linalg.lu_factor(a)
    operands = {"lu": lu, "pivots": pivots.astype(np.int32), "b": b}
    results = performed(LU_SOLVE, operands, split, (op, True), size, **words)
    want = scipy.linalg.lu_solve((lu, pivots), b, "NTC".index(op)) if b.size else b
    for rank, made in enumerate(results):
        part = part_of(want, decode(split[-1][rank]), rank, size)
        assert made["fault"].tolist() == [GOOD]
        assert is_small(made["x"] - part, want, n=n, dtype=dtype, growth=1e7)


def test_a_solution_waits_for_what_it_reads_and_no_more():
    """Without any one of the waits of its streams it would read or write too early."""
    n, size, block = 20, 2, 4
    a, b = Blocks(n, block, size).layout, Layout.slab((n, 2 * size), size, axis=0)
    problem = Problem(a, b, b, "float32", 4, "F", ("N", True), block)
    program = LU_SOLVE.program(problem, Machine("cpu", (0,) * size), 0)
    looks = {"lu": (a.local_shape(0), "float32"), "b": (b.local_shape(0), "float32")}
    looks |= {"pivots": ((n,), "int32")}
    looks |= {name: (look.local_shape(0), look.dtype) for name, look in program.results.items()}
    views = {name: packed(name, *look, "F") for name, look in looks.items()}
    lowered = gpu_programs.lowered(program, views, 0, size, staged=())
    assert unordered(lowered, 0) == []
    needed = []
    for at, step in enumerate(lowered.steps):
        if isinstance(step.step if isinstance(step, On) else step, Await):
            without = replace(lowered, steps=lowered.steps[:at] + lowered.steps[at + 1 :])
            try:
                needed.append(bool(unordered(without, 0)))
            except AssertionError:  # the last copy is not joined to the user's stream
                needed.append(True)
    # The first copies to both places wait for nothing but the synchronisation.
    assert needed == [False, True] * 2 + [True] * (4 * (n // block) - 4)


@FEW
@given(call=calls("abb"), dtype=TYPES, op=st.sampled_from("NTC"), kind=st.integers(0, 3))
def test_triangular_systems(call, dtype, op, kind):
    lower, unit = map(bool, divmod(kind, 2))
    size, n, columns, split, words = call
    a, b = general(n, dtype) / max(n, 1) + 2 * np.eye(n), right_sides(n, columns, dtype)
    results = performed(SOLVE_TRIANGULAR, {"a": a, "b": b}, split, (op, lower, unit, True), size,
                        **words)  # fmt: skip
    want = b
    if b.size:
        want = scipy.linalg.solve_triangular(a, b, "NTC".index(op), lower, unit)
    for rank, made in enumerate(results):
        part = part_of(want, decode(split[-1][rank]), rank, size)
        assert made["fault"].tolist() == [GOOD]
        assert is_small(made["x"] - part, want, n=n, dtype=dtype, growth=1e4)


@FEW
@given(call=calls("aa"), dtype=TYPES)
def test_inverses(call, dtype):
    size, n, _, split, words = call
    a = general(n, dtype)
    want = np.linalg.inv(a)
    for rank, made in enumerate(performed(INVERSE, {"a": a}, split, (True,), size, **words)):
        part = part_of(want, decode(split[-1][rank]), rank, size)
        assert is_small(made["out"] - part, want, n=n, dtype=dtype, growth=1e7)


def test_the_first_pivot_that_is_0_is_named():
    a, b = singular(13), np.ones(13)
    split = [[Slab(0).encode()] * 3] * 3
    operands, order = {"a": a, "b": b}, [2, 0, 1]
    results = performed(SOLVE, operands, split, (False, True), 3, block=4, order=order)
    assert [made["fault"].tolist() for made in results] == [[13]] * 3
    flags = "N", True, False, True
    operands = {"a": a - np.diag([0.0] * 5 + [1.0] + [0.0] * 7), "b": b}
    results = performed(SOLVE_TRIANGULAR, operands, split, flags, 3, block=4, order=order)
    assert [made["fault"].tolist() for made in results] == [[6]] * 3


@pytest.mark.parametrize("place", [0, 4, 5, 16])
def test_the_first_minor_that_is_not_positive_is_named(place):
    a = positive(17, "float64")
    a[place, place] = -1
    a[16, 16] = -1
    slabs = [[Slab.X.encode()] * 3] * 2
    results = performed(CHOLESKY, {"a": a}, slabs, (True, True), 3, block=4, order=[2, 0, 1])
    assert [made["fault"].tolist() for made in results] == [[place + 1]] * 3
    a[1, 1] = np.nan
    results = performed(CHOLESKY, {"a": a}, slabs, (True, True), 3, block=4, order=[2, 0, 1])
    assert [made["fault"].tolist() for made in results] == [[NOT_FINITE_A]] * 3


def test_an_explanation_shows_the_look_ahead():
    a = positive(40, "float64")
    specs = [
        CHOLESKY.describe(
            {"a": NumPy().spec(a[20 * rank : 20 * rank + 20])}
            | dict.fromkeys(CHOLESKY.names.results),
            (Slab.X, (True, True)),
            CHOLESKY.options(block_size=8),
        )
        for rank in range(2)
    ]
    text = CHOLESKY.explain(CHOLESKY.check(specs), Machine("cpu", (0, 0)))
    assert "cholesky of 40 x 40 float64 on 2 ranks: 5 panels of 8 columns" in text
    lines = [line.partition(". ")[2] for line in text.splitlines()]
    assert re.fullmatch(r"predicted .* ms, .* kFLOP, .* of memory and .* of peers per rank",
                        text.splitlines()[1].replace(" us", " ms"))  # fmt: skip
    ahead = lines.index("factorise columns[16:40, 8:16], without pivots")
    assert lines[ahead - 1].endswith("from columns[16:40, 8:16]")
    assert lines[ahead + 1] == "arrive"
    assert lines[ahead + 2].endswith("from columns[32:40, 16:24]")


def steps_of(operation, flags, n, size, block):
    """The steps of all ranks for an n x n matrix that is there already."""
    layout = Blocks(n, block, size).layout
    problem = Problem(layout, None, layout, "float64", 8, "F", flags, block)
    machine = Machine("cpu", (0,) * size)
    return [operation.program(problem, machine, rank).steps for rank in range(size)]


@pytest.mark.parametrize(("operation", "flags", "third"), [
    (CHOLESKY, (True, True), 1), (LU_FACTOR, (True,), 2),
])  # fmt: skip
def test_a_prediction_counts_all_operations(operation, flags, third):
    n, block = 240, 8
    alone = predicted(steps_of(operation, flags, n, 1, block), "float64", 8, CORES)
    assert third / 3 * n**3 <= alone.flops <= 1.1 * third / 3 * n**3  # whole diagonal blocks
    assert alone.received == 0
    shared = predicted(steps_of(operation, flags, n, 3, block), "float64", 8, CORES)
    assert alone.flops / 3 <= shared.flops <= 1.1 * alone.flops / 3
    assert shared.received == pytest.approx(n**2 / 2 * 8 * 2 / 3, rel=0.1)


def test_a_prediction_says_what_looking_ahead_is_worth():
    ahead = steps_of(LU_FACTOR, (True,), 2048, 2, 128)
    late = [[step for step in steps if not isinstance(step, Arrive)] for steps in ahead]
    with_it, without = (predicted(x, "float64", 8, CORES).seconds for x in (ahead, late))
    panels = 0.5 * 2048**2 * 128 / (0.5 * CORES.product("float64"))  # one rank's, all others wait
    assert 0.3 * panels < without - with_it < 1.2 * panels


@pytest.mark.parametrize(("n", "width", "size"), [(10, 3, 2), (7, 8, 3), (12, 2, 3), (0, 4, 2)])
def test_blocks_are_where_the_layout_has_them(n, width, size):
    blocks = Blocks(n, width, size)
    for rank, spans in enumerate(blocks.spans):
        columns = [column for lo, hi in spans.ranges() for column in range(lo, hi)]
        for k in range(blocks.count):
            lo, hi = blocks.bounds(k)
            assert blocks.before(k, rank) == sum(column < lo for column in columns)
            if blocks.owner(k) == rank:
                assert columns[slice(*blocks.place(k))] == list(range(lo, hi))
        assert list(blocks.owned(rank)) == [
            k for k in range(blocks.count) if blocks.owner(k) == rank
        ]


def received(operation, flags, n, size, block):
    """The elements that each rank receives in panels of an n x n matrix."""
    moves = [
        step
        for step in steps_of(operation, flags, n, size, block)[0]
        if isinstance(step, Move) and step.target.startswith("panel")
    ]
    return [sum(move.transfer.traffic[1][rank] for move in moves) // 8 for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize(("operation", "flags"), [
    (CHOLESKY, (True, True)), (CHOLESKYS["bfloat16"], (True, True)), (LU_FACTOR, (True,)),
])  # fmt: skip
def test_a_rank_receives_what_it_needs_of_each_panel_once(operation, flags, size):
    """Of others' panels, where it has columns behind: for LU all rows from the diagonal on, for
    Cholesky's factor those from its own next diagonal block on.
    """
    n, block = 58, 5
    row = np.arange(n)
    owner = row // block % size
    for rank, elements in enumerate(received(operation, flags, n, size, block)):
        want = 0
        for first in range(0, n, block):
            behind = row[(owner == rank) & (row >= first + block)]
            if owner[first] != rank and len(behind):
                top = first if operation is LU_FACTOR else behind[0]
                want += (n - top) * len(row[first : first + block])
        assert elements == want
