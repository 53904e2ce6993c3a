"""Programs of products on GPUs, performed by the interpreter: every strategy, all ranks in one
process, on one host and on several.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draws import drawn

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent.parent / "matmul"))

import float8_cases
import matmul_cases as cases
import test_matmul_epilogs as epilogs
from float8_cases import E4, E5
from gpu_arithmetic import on_gpu, view
from gpu_interpreter import interpret_products
from pretended_products import block_at, perform_programs
from test_products import calls_of, calls_with_epilog, check_epilog, described

from arrangements import part_of
from shardmath.arrays.dtypes import to_numpy
from shardmath.distribution import BlockCyclic, ProcessGrid, Replicated, Slab
from shardmath.geometry import Layout
from shardmath.linalg.advanced import MatmulEpilog, MatmulOptions
from shardmath.local.epilog import requirements
from shardmath.machine import Machine, h200
from shardmath.operators.matmul.gpu import panels, rounds
from shardmath.operators.matmul.gpu.product_program import memories_of
from shardmath.operators.matmul.gpu.rank_plan import RankPlan, matrix_of
from shardmath.operators.matmul.gpu.scale_moves import choose_strategy, keeps_blocks
from shardmath.operators.matmul.gpu.steps import (
    Collective,
    EpilogProduct,
    OneKernel,
    PanelProduct,
)
from shardmath.operators.matmul.operation import MATMUL
from shardmath.operators.matmul.problem import Problem, gradient_layouts
from shardmath.operators.matmul.program import output
from shardmath.operators.matmul.scaling import SCALES, TENSOR, Scaling
from shardmath.operators.matmul.strategy import candidates
from shardmath.program.gpu_performing import Given
from shardmath.program.steps import Fused

ANY = drawn(24)
ORDERS = ("C", "F", "strided", "reversed")


def result_array(shape, dtype, order):
    """A new D that lies in that order."""
    if order in ("C", "F"):
        return np.zeros(shape, to_numpy(dtype), order)
    whole = np.zeros([2 * n + 3 for n in shape], to_numpy(dtype))
    part = whole[1 : 1 + 2 * shape[0] : 2, 1 : 1 + 2 * shape[1] : 2]
    return part[::-1, ::-1] if order == "reversed" else part


def operands_of(problem, call, rank, order="C", heap=(True, True), shift=0):
    """One rank's operands, with new results that lie in that order."""
    arrays, _, numbers = call
    if "c" in arrays and order in ("C", "F"):
        arrays = {**arrays, "c": np.asarray(arrays["c"], order=order)}
    held = {name: on_gpu(x, shift) for name, x in arrays.items()}
    for index, name in enumerate("ab"):
        turned = held[name].transposed() if problem.transpose[index] else held[name]
        block = block_at(turned.address + turned.span[0]) if heap[index] else None
        held[name] = replace(turned, block=block)
    values = {name: numbers[name] for name in ("alpha", "beta")} | dict.fromkeys(SCALES, 1.0)
    if problem.scaling is not None:
        whole = [kind == TENSOR for kind in (problem.scaling.a, problem.scaling.b)]
        for name, is_number in zip(SCALES, [*whole, True, True], strict=True):
            if numbers[name] is not None and is_number:
                values[name] = float(numbers[name])
            elif numbers[name] is not None:  # of one line
                held[name] = on_gpu(np.full((1, 1), numbers[name], np.float32))
    m, n = problem.d.local_shape(rank)
    outputs = {}
    for extra in requirements(problem.epilog, m, n, problem.extras).outputs:
        shape = extra.shape
        if extra.name == problem.epilog.makes_bgrad:
            shape = gradient_layouts(problem)[2].local_shape(rank)[:1]
        outputs[output(extra.name)] = on_gpu(np.zeros(shape, to_numpy(extra.dtype), "F"))
    if problem.scaling is not None and problem.scaling.amax:
        outputs[output("result_amax")] = on_gpu(np.zeros(1, np.float32))
    held["d"] = on_gpu(result_array((m, n), problem.result, order))
    return Given({**held, **outputs}, {name: complex(x) for name, x in values.items()})


def performed(problem, strategy, calls, *, hosts=None, orders=("C",), heaps=((True, True),), **how):
    """What all ranks have at last, by name, and the programs.

    The same, to the bit, where what performs the programs on GPUs does.
    """
    hosts = hosts or (0,) * problem.size
    rank_plans = [RankPlan(strategy, rank, hosts) for rank in range(problem.size)]
    found = []
    for perform in (interpret_products, perform_programs):
        operands = [
            operands_of(problem, call, rank, orders[rank % len(orders)], heaps[rank % len(heaps)])
            for rank, call in enumerate(calls)
        ]
        added = {
            plan.addition_order("F" if matrix_of(own.arrays["d"]).by_columns else "C")
            for plan, own in zip(rank_plans, operands, strict=True)
        }
        ranks = perform(rank_plans, operands, added.pop() if len(added) == 1 else "", **how)
        found.append([results_of(own) for own in operands])
        if perform is interpret_products:
            programs = [rank.program for rank in ranks]
    for one, two in zip(*found, strict=True):
        assert {n: x.tobytes() for n, x in one.items()} == {n: x.tobytes() for n, x in two.items()}
    return found[0], programs


def results_of(operands):
    """Copies of D and of what is beside it, in their order."""
    found = {}
    for name, array in operands.arrays.items():
        if name == "d" or name.startswith(output("")):
            x = view(matrix_of(array)).copy("K")
            found[name] = x[:, 0] if len(array.shape) == 1 else x
    return found


def fused_in(programs):
    """The kinds of fused steps."""

    def inside(steps):
        for step in steps:
            if isinstance(step, Fused):
                yield type(step.plan)
                yield from inside(step.replaces)

    return {kind for program in programs for kind in inside(program.steps)}


HEAPS = ((True, True), (False, True), (True, False), (False, False))


@ANY
@given(data=st.data(), case=cases.cases())
def test_any_product(data, case):
    calls, want, bound = calls_of(case)
    problem = MATMUL.check([spec for _, spec, _ in calls])
    hosts = tuple(rank * data.draw(st.integers(1, 3)) // case.size for rank in range(case.size))
    how = {
        "hosts": data.draw(st.sampled_from([(0,) * case.size, tuple(sorted(hosts))])),
        "orders": data.draw(st.lists(st.sampled_from(ORDERS), min_size=1, max_size=2)),
        "heaps": data.draw(st.permutations(HEAPS)),
        "seed": data.draw(st.integers(0, 9)),
    }
    for strategy in candidates(problem):
        results, _ = performed(problem, strategy, calls, **how)
        for rank, result in enumerate(results):
            of_d = cases.decoded(case, rank)[2]
            mine, most = (part_of(x, of_d, rank, case.size) for x in (want, bound))
            if RankPlan(strategy, 0, how["hosts"]).parts_dtype == case.dtype:
                most = most * 4  # parts of halves are rounded before they are added
            assert (abs(cases.wide(result["d"]) - mine) <= most).all(), strategy.label


GRID = ProcessGrid(shape=(2, 2), layout=ProcessGrid.Layout.ROW_MAJOR)
BLOCKS = BlockCyclic(GRID, (6, 70))
SIDES = {
    "rows": (Slab.X, Slab.X, Slab.X),
    "columns": (Slab.Y, Slab.Y, Slab.Y),
    "blocks": (BLOCKS, BLOCKS, BLOCKS),
    "added": (Slab.Y, Slab.X, BLOCKS),
    "everywhere": (Slab.Y, Slab.X, Replicated()),
    "rows of b": (Slab.X, Slab.X, Replicated()),
}


HOSTS = [(0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 2, 2)]
# Every side has both types; on the same hosts, the next side has the other one.
INTERVALS = [
    (name, turns, ("float64", "bfloat16")[(number + index) % 2], hosts)
    for number, name in enumerate(SIDES)
    for index, hosts in enumerate(HOSTS)
    for turns in (False, True)
]


@pytest.mark.parametrize(("name", "turns", "dtype", "hosts"), INTERVALS)
def test_many_intervals(name, turns, dtype, hosts, monkeypatch):
    """Panels come on a stream of their own while others are multiplied; with `turns`, into memory
    that several use in turn.
    """
    monkeypatch.setattr(panels, "_FIRST_BYTES", 1 << 8)
    monkeypatch.setattr(panels, "_LEAST", 64)
    monkeypatch.setattr(panels, "_FIRST", 0.0)
    if turns:
        monkeypatch.setattr(panels, "_ROOM", 1 << 12)
    rng, (m, n, k) = np.random.default_rng(4), (24, 20, 700)
    whole = [rng.integers(-3, 4, s).astype(to_numpy(dtype)) for s in ((m, k), (k, n), (m, n))]
    numbers = [x.astype(np.float64) for x in whole]
    want = 0.5 * (numbers[0] @ numbers[1]) + 2 * numbers[2]
    calls = []
    for rank in range(4):
        parts = [np.array(part_of(x, d, rank, 4)) for x, d in zip(whole, SIDES[name], strict=True)]
        calls.append(described(*parts, distributions=SIDES[name], alpha=0.5, beta=2.0))
    problem, several = MATMUL.check([spec for _, spec, _ in calls]), 0
    first = list(SIDES).index(name) + len(set(hosts)) + turns
    for seed, strategy in enumerate(candidates(problem)[first % 2 :: 2]):
        plans = [RankPlan(strategy, rank, hosts) for rank in range(4)]
        several += max(len(plan.schedule[0]) for plan in plans) > 1
        how = {"orders": ("C", "F")[seed % 2 :], "heaps": HEAPS[seed % 4 :], "seed": seed}
        results, _ = performed(problem, strategy, calls, hosts=hosts, **how)
        near = 1e-11 if dtype == "float64" else 2.0**-7 * abs(want).max()
        for rank, result in enumerate(results):
            mine = part_of(want, SIDES[name][2], rank, 4)
            assert (abs(result["d"].astype(np.float64) - mine) <= near).all(), strategy.label
    assert several


@pytest.mark.parametrize("kind", epilogs.KINDS)
@pytest.mark.parametrize("name", epilogs.EPILOGS)
def test_every_epilog(name, kind):
    """By a product itself too, where it may be; every other one on several hosts."""
    number = list(epilogs.KINDS).index(kind) + list(epilogs.EPILOGS).index(name)
    hosts = ((0, 0, 0, 0), (0, 1, 1, 1))[number % 2]
    for turn, slabs in enumerate([(Slab.X, Slab.X), (Slab.Y, Slab.X), (Slab.X, Slab.Y)]):
        dtype = ("bfloat16", "float64")[turn % 2]
        whole = epilogs.Whole(5, dtype)
        near = {"rtol": 0, "atol": 1e-11} if dtype == "float64" else {"rtol": 0.02, "atol": 0.5}
        calls = calls_with_epilog(whole, name, kind, 4, *slabs)
        problem = MATMUL.check([spec for _, spec, _ in calls])
        for number, strategy in enumerate(candidates(problem)[turn::3]):
            orders = ("C", "F") if number % 3 == 1 else ("F",)
            within = bool((number + turn) % 2)
            how = {"hosts": hosts, "orders": orders, "within": within, "seed": number}
            results, _ = performed(problem, strategy, calls, **how)
            if dtype == "bfloat16":
                results = [{n: wider(x) for n, x in each.items()} for each in results]
            check_epilog(whole, name, kind, results, near)


def wider(x):
    return x if x.dtype == np.uint8 else np.asfortranarray(x.astype(np.float64))


@pytest.mark.parametrize("hosts", [(0, 0, 0), (0, 0, 1)])
@pytest.mark.parametrize("beta", [2.0, 0.0])
def test_every_rank_s_c_is_added(hosts, beta):
    a, b = np.ones((4, 6)), np.ones((6, 5))
    named = {"distributions": [Slab.Y, Slab.X, Replicated()], "beta": beta}
    named["epilog"] = MatmulEpilog.ALLREDUCE
    calls = [
        described(
            *(np.array(part_of(x, d, rank, 3)) for x, d in ((a, Slab.Y), (b, Slab.X))),
            np.full((4, 5), rank + 1.0),
            **named,
        )
        for rank in range(3)
    ]
    problem = MATMUL.check([spec for _, spec, _ in calls])
    for strategy in candidates(problem):
        results, _ = performed(problem, strategy, calls, hosts=hosts, orders=("C", "F"))
        assert all((result["d"] == 6 + beta * 6).all() for result in results)


@pytest.mark.parametrize(
    ("sides", "dtype", "shape", "fused"),
    [
        ((Slab.X, Slab.Y, Slab.X), "bfloat16", (512, 512, 64), {OneKernel, PanelProduct}),
        ((Slab.X, Slab.Y, Slab.Y), "bfloat16", (512, 512, 64), {OneKernel, PanelProduct}),
        ((Slab.Y, Slab.X, Slab.X), "float16", (256, 96, 32), {OneKernel, Collective}),
        ((Slab.Y, Slab.X, Slab.Y), "float16", (256, 96, 32), {OneKernel}),
        ((Slab.Y, Slab.X, Replicated()), "bfloat16", (256, 96, 32), {OneKernel, Collective}),
        ((Slab.Y, Slab.X, Replicated()), "float32", (70, 90, 33), {Collective}),
        ((Slab.Y, Slab.X, Slab.X), "complex64", (40, 31, 20), {Collective}),
        ((BLOCKS, BLOCKS, BLOCKS), "float64", (48, 50, 280), {PanelProduct}),
    ],
)
def test_what_one_kernel_does_is_a_sequence_of_steps(sides, dtype, shape, fused):
    """Which steps it replaces: performed one by one they give the same."""
    rng, (m, n, k), size = np.random.default_rng(4), shape, 4
    whole = [rng.integers(-3, 4, s).astype(to_numpy(dtype)) for s in ((m, k), (k, n))]
    want = whole[0].astype(np.complex128) @ whole[1].astype(np.complex128)
    for forced in (True, False):
        calls = []
        for rank in range(size):
            parts = [
                np.array(part_of(x, d, rank, size)) for x, d in zip(whole, sides, strict=False)
            ]
            calls.append(described(*parts, None, distributions=sides))
        problem = MATMUL.check([spec for _, spec, _ in calls])
        found = set()
        for strategy in candidates(problem):
            if forced:  # as options.strategy asks
                named = replace(strategy.problem, strategy=strategy.kind)
                strategy = replace(strategy, problem=named)  # noqa: PLW2901
            for seed in range(3):
                results, programs = performed(problem, strategy, calls, seed=seed)
                found |= fused_in(programs)
                for rank, result in enumerate(results):
                    mine = part_of(want, sides[2], rank, size)
                    near = 2.0**-7 * abs(want).max() if result["d"].itemsize == 2 else 1e-11
                    assert (abs(result["d"].astype(np.complex128) - mine) <= near).all()
        assert found >= (fused if forced else fused - {OneKernel})


def test_an_epilog_within_a_product_replaces_the_steps_behind_it():
    whole = epilogs.Whole(5, "float64")
    calls = calls_with_epilog(whole, "RELU_BIAS", "rows", 4)
    problem = MATMUL.check([spec for _, spec, _ in calls])
    (strategy,) = [each for each in candidates(problem) if each.label == "stationary c"]
    _, (program, *_) = performed(problem, strategy, calls, orders=("F",))
    (step,) = [step for step in program.steps if isinstance(step, Fused)]
    assert isinstance(step.plan, EpilogProduct)
    assert "product" in memories_of(program, step.replaces)
    assert "product" not in memories_of(program, step.plan.steps)


# -- float8 ----------------------------------------------------------------------------------------


def eight_bit_calls(layout, modes, shape, size, *, c=None, result="bfloat16", scale_d=None):
    """The calls of all ranks, whose scales are numbers on some ranks and arrays on others; and the
    numbers that a and b stand for.
    """
    m, n, k = shape
    shapes, whole = [(m, k), (k, n), (m, n)], float8_cases.factors_of(3, shape, (E4, E5))
    dists = [float8_cases.layout(layout, shapes, rank, size) for rank in range(size)]
    factors = [
        float8_cases.Factor(i, whole[i], mode, [d[i] for d in dists], 0, 5 + i)
        for i, mode in enumerate(modes)
    ]
    calls = []
    for rank, own in enumerate(dists):
        parts = [factor.parts[rank] for factor in factors]
        scales = {}
        for name, factor in zip("ab", factors, strict=True):
            scale = factor.all_scales[rank]
            is_number = np.ndim(scale) == 0 and rank % 2
            scales[name] = float(scale) if is_number else np.atleast_1d(scale)
        addend, named = None, {}
        if c is not None:
            addend, named = np.array(part_of(c, own[2], rank, size)), {"alpha": 2.0, "beta": 3.0}
            if c.dtype.name in (E4, E5):
                scales["c"] = 0.5
        options = {"result_type": float8_cases.NUMBERS[result]}
        if result in (E4, E5):
            scales["d"] = scale_d
            options["result_amax"] = True
        named["options"] = MatmulOptions(**options)
        named |= {"distributions": own, "quantization_scales": scales}
        calls.append(described(*parts, addend, **named))
    return calls, [factor.numbers for factor in factors], dists


def eight_bit_strategies(problem):
    """Those that multiply elements, and those that multiply the numbers that they stand for."""
    elements = [each for each in candidates(problem) if keeps_blocks(each)]
    return elements, candidates(problem.widened())


def check_eight_bits(problem, strategy, calls, want, bound, dists, **how):
    """D of all ranks, and the greatest of its numbers."""
    results, programs = performed(problem, strategy, calls, **how)
    for rank, result in enumerate(results):
        mine, most = (part_of(x, dists[rank][2], rank, len(calls)) for x in (want, bound))
        off = abs(result["d"].astype(np.float64) - mine)
        assert (off <= most).all(), (strategy.label, rank, off.max())
    return results, programs


SHAPES = {"fitting": (512, 128, 512), "odd": (130, 77, 300), "small": (5, 3, 20)}


@pytest.fixture
def _small_panels(monkeypatch):
    """Small products take time, too, and have several intervals."""
    monkeypatch.setattr(h200, "PROCESSORS", 1)
    monkeypatch.setattr(panels, "_FIRST_BYTES", 1 << 10)
    monkeypatch.setattr(panels, "_LEAST", 128)
    monkeypatch.setattr(panels, "_FIRST", 0.0)
    monkeypatch.setattr(RankPlan, "_passes_over_sums", lambda *_: 0.0)


# The large shape is on one, two or three hosts, by the layout; the others are on all of them.
SCALED = [
    (layout, shape, hosts)
    for number, layout in enumerate(float8_cases.LAYOUTS)
    for shape in SHAPES
    for hosts in (HOSTS[number % 3 :][:1] if shape == "fitting" else HOSTS)
]


@pytest.mark.usefixtures("_small_panels")
@pytest.mark.parametrize(("layout", "shape", "hosts"), SCALED)
def test_products_of_scaled_elements(layout, shape, hosts):
    kinds = cycle([("bfloat16", "C"), ("float32", "F"), ("float16", "C")])
    pairs = list(product(float8_cases.MODES, repeat=2))
    first = list(float8_cases.LAYOUTS).index(layout) + list(SHAPES).index(shape) + len(set(hosts))
    for number, modes in enumerate(pairs[first % 7 :: 7]):
        result, order = next(kinds)
        calls, (one, two), dists = eight_bit_calls(layout, modes, SHAPES[shape], 4, result=result)
        problem = MATMUL.check([spec for _, spec, _ in calls])
        want = one @ two
        bound = float8_cases.bound(want, one, two, result)
        elements, numbers = eight_bit_strategies(problem)
        chosen = [*elements[number % max(1, len(elements)) :][:1], *numbers[number % 5 :: 5][:1]]
        for strategy in chosen:
            how = {"orders": (order,), "heaps": HEAPS[number % 4 :], "seed": number}
            how["hosts"] = hosts
            check_eight_bits(problem, strategy, calls, want, bound, dists, **how)


ROUNDS = [(), (0, 1, 2, 3), (0, 1, 3), (0, 2, 3), (0, 3)]


@pytest.mark.usefixtures("_small_panels")
@pytest.mark.parametrize("after", ROUNDS)
@pytest.mark.parametrize(("layout", "index"), [("rows of a", 0), ("columns of b", 1)])
def test_lines_that_come_in_rounds(layout, index, after, monkeypatch):
    """Beside products of those that are here; into D itself, and into memory that is padded."""
    monkeypatch.setattr(rounds, "cuts", lambda *_: after)
    kinds = cycle([("bfloat16", "C"), ("float32", "F"), (E4, "C"), ("float16", "C")])
    pairs = list(product(float8_cases.MODES, repeat=2))
    # Blocks of 128 lines begin where parts do, or not; D can be written to where it lies, or not.
    for number, (lines, (others, k)) in enumerate(product((512, 192), ((256, 272), (76, 400)))):
        shape = (lines, others, k) if index == 0 else (others, lines, k)
        for seed, modes in enumerate(pairs[(number + len(after)) % 7 :: 7]):
            result, order = next(kinds)
            calls, (one, two), dists = eight_bit_calls(
                layout, modes, shape, 4, result=result, scale_d=1.0
            )
            problem = MATMUL.check([spec for _, spec, _ in calls])
            (strategy,) = [
                each
                for each in eight_bit_strategies(problem)[0]
                if rounds.rounds_of(each) is not None and rounds.rounds_of(each).index == index
            ][:1]
            want = float8_cases.clipped(one @ two, result)
            bound = float8_cases.bound(want, one, two, result)
            how = {"orders": (order,), "seed": seed}
            results, _ = check_eight_bits(problem, strategy, calls, want, bound, dists, **how)
            for each in results if result == E4 else ():
                near = 1e-3 * abs(one @ two).max()
                assert abs(each[output("result_amax")][0] - abs(one @ two).max()) <= near


RESULTS = [(E4, "bfloat16"), (E5, E5), ("bfloat16", "bfloat16"), ("float32", E4), (E4, None)]


@pytest.mark.usefixtures("_small_panels")
@pytest.mark.parametrize("layout", float8_cases.LAYOUTS)
@pytest.mark.parametrize(("result", "addend"), RESULTS)
def test_eight_bit_results_and_addends(layout, result, addend):
    """Strategies that multiply elements come with every result; those that multiply the numbers
    that these stand for come in turn, with one result and granularity after the other.
    """
    several = (list(float8_cases.LAYOUTS).index(layout) + len(result)) % 2
    hosts = ((0, 0, 0, 0), (0, 1, 1, 2))[several]
    shape, rng = (144, 80, 320), np.random.default_rng(8)
    c = None if addend is None else float8_cases.elements(rng, shape[:2], addend)
    scale_d = np.float32(0.25)
    for turn, modes in enumerate([("tensor", "tensor"), ("outer", "tensor"), ("vectors",) * 2]):
        given = scale_d if turn % 2 else np.full((1,), scale_d)
        calls, (one, two), dists = eight_bit_calls(
            layout, modes, shape, 4, c=c, result=result, scale_d=given
        )
        problem = MATMUL.check([spec for _, spec, _ in calls])
        sums = one @ two
        if c is not None:
            scale_c = 0.5 if addend in (E4, E5) else 1.0
            sums = 2 * sums + 3 * scale_c * c.astype(np.float64)
        scale = float(scale_d) if result in (E4, E5) else 1.0
        want = float8_cases.clipped(scale * sums, result)
        bound = float8_cases.bound(want, 2 * one, two, result, scale_d=scale)
        if addend == "bfloat16":
            bound = bound + 1e-5
        elements, numbers = eight_bit_strategies(problem)
        number = 3 * RESULTS.index((result, addend)) + turn
        for strategy in [*elements[turn::3], numbers[number % len(numbers)]]:
            how = {"hosts": hosts, "orders": ("F" if turn else "C",), "seed": turn}
            results, _ = check_eight_bits(problem, strategy, calls, want, bound, dists, **how)
            for each in results if result in (E4, E5) else ():
                near = 1e-3 * abs(sums).max()
                assert abs(each[output("result_amax")][0] - abs(sums).max()) <= near


def test_panels_of_k_are_cut_where_sums_are_small():
    """Each panel reads and writes the sums; B comes from the other rank, cut along k."""
    for (m, n, k), several in (((8192, 8192, 8192), False), ((1024, 1024, 1 << 17), True)):
        layouts = [Layout.bind([Slab.X] * 2, extents) for extents in ((m, k), (k, n), (m, n))]
        scaling = Scaling((E4, E5), "bfloat16", TENSOR, TENSOR, c=False, d=False, amax=False)
        problem = Problem(
            *layouts, dtype=E4, result="bfloat16", transpose=(False, False),
            conjugate=(False, False), has_c=False, sums_c=False, epilog=MatmulEpilog.DEFAULT,
            strategy=None, scaling=scaling,
        )  # fmt: skip
        strategy, _ = choose_strategy(problem, Machine("cuda", (0, 0)))
        assert (len(RankPlan(strategy, 0, (0, 0)).schedule[0]) > 1) == several
