"""What GPUs do for a transform, performed with NumPy: plans, copies and exchanges are pure data."""

from __future__ import annotations

import itertools
import math
import sys
from functools import cache
from pathlib import Path

from draws import drawn

sys.path.append(str(Path(__file__).parent.parent / "fft"))

import fft_cases
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rank_interpreter import Rank, interpret_ranks, perform

from arrangements import part_of
from shardmath import geometry
from shardmath.arrays import dtypes
from shardmath.geometry import decode
from shardmath.local.fft import ADJOINTS, COMPLETING, HALVING, bound_transform
from shardmath.local.plan_many import StridedArray, plan_many
from shardmath.local.trigonometric import SERIES
from shardmath.operators.fft.local_steps import LocalFFT, local_steps, strided
from shardmath.operators.fft.lowering import GPUPlan, Results, UserArrays, lowered
from shardmath.operators.fft.options import FFTDirection, FFTOptions
from shardmath.operators.fft.problem import check, describe
from shardmath.operators.fft.pushes import Start, tables
from shardmath.operators.fft.stages import Chunking, first_parts
from shardmath.operators.fft.strategy import ON_GPUS, ON_GPUS_OF_HOSTS, choose
from shardmath.program.rank_program import RankProgram, View, packed
from shardmath.program.steps import Fused, Memory

RISES = (1, 2, 3, 4, 4, 4, 4, 4)

# What a peer reads second under the name of a memory has other strides than what it read first.
TWO_ARRAYS_OF_ONE_MEMORY = {
    "size": 2,
    "shape": (7, 7),
    "axes": (0, -1),
    "kind": "C2R",
    "parity": "even",
    "norm": "ortho",
    "inputs": [("Slab", 1, None, None)] * 2,
    "outputs": [("Slab", 1, None, None)] * 2,
    "library": "numpy",
    "dtype": "complex64",
    "stores": ["reversed"] * 2,
    "block": 700,
    "out": "heap C",
}


def laid_out(part, store):
    """`part` in memory of its own: raw bytes, origin, strides in bytes."""
    if store.endswith(("strided", "reversed")):
        whole = np.zeros(tuple(2 * n + 3 for n in part.shape), part.dtype)
        view = whole[tuple(slice(1, 1 + 2 * n, 2) for n in part.shape)]
        if store == "reversed":
            view = view[(slice(None, None, -1),) * part.ndim]
    else:
        whole = np.zeros(part.shape, part.dtype, order="F" if store.endswith("F") else "C")
        view = whole
    view[...] = part
    raw = np.ndarray((whole.nbytes,), np.uint8, whole.ravel("K").data) if whole.size else None
    assert raw is None or np.shares_memory(raw, whole)
    raw = np.zeros(0, np.uint8) if raw is None else raw
    origin = 0
    if part.size:
        first = view.__array_interface__["data"][0]
        origin = first - whole.__array_interface__["data"][0]
    return raw, origin, view.strides


def case_problem(case, parts, sources, targets):
    kind = case["kind"].removesuffix(" inverse")
    inverse = kind == "C2R" or case["kind"].endswith("inverse")
    options = FFTOptions(**fft_cases.options_of(case))
    descriptions = []
    for part, source, target in zip(parts, sources, targets, strict=True):
        strides = tuple(step // part.itemsize for step in part.strides)
        spec = dtypes_spec(case, part, strides)
        pair = source if target is None else (source, target)
        direction = FFTDirection.INVERSE if inverse else FFTDirection.FORWARD
        described = describe(spec, pair, case["axes"], case["norm"], kind, direction, options, None)
        descriptions.append(described)
    return check(descriptions)


def dtypes_spec(case, part, strides):
    from shardmath.arrays import ArraySpec

    dtype = case["dtype"].split()[0]
    return ArraySpec(case["library"], dtype, part.shape, strides, "cpu", part.itemsize)


def plan_of(problem, size, hosts):
    numbers = tuple(rank * hosts // size for rank in range(size))
    return GPUPlan(problem, choose(problem, ON_GPUS if hosts == 1 else ON_GPUS_OF_HOSTS), numbers)


def run_case(case, results, hosts=1, chunking=None, seed=0):
    size = case["size"]
    array = fft_cases.operand_of(case)
    full = fft_cases.wanted(case, array)
    sources = [decode(each) for each in case["inputs"]]
    targets = [None if case["outputs"] is None else decode(case["outputs"][r]) for r in range(size)]
    parts = [part_of(array, sources[r], r, size) for r in range(size)]
    problem = case_problem(case, parts, sources, targets)
    plan = plan_of(problem, size, hosts)
    ranks = []
    for number in range(size):
        shape = problem.target.local_shape(number)
        store = case["stores"][number]
        blank = np.zeros(shape, dtypes.to_numpy(problem.result))
        users, views = {}, []
        for name, part in (("operand", parts[number].copy()), ("out", blank)):
            raw, origin, strides = laid_out(part, store)
            users[name] = raw, origin
            views.append(View(name, part.shape, strides, dtypes.of(part.dtype).name))
        program = lowered(
            plan, number, UserArrays(*views), results, chunking and Chunking(*chunking)
        )
        ranks.append(Rank(number, program, users, forward=problem.direction < 0))
    interpret_ranks(ranks, seed=seed)
    axes = range(array.ndim) if case["axes"] is None else case["axes"]
    count = math.prod(full.shape[axis] for axis in axes)
    for number, rank in enumerate(ranks):
        target = sources[number] if targets[number] is None else targets[number]
        got = rank.array(rank.named("out"))
        assert fft_cases.close(got, part_of(full, target, number, size), count), number
        if parts[number].size:
            left = rank.array(rank.named("operand"))
            assert left.tobytes() == parts[number].tobytes(), "the operand is left as it was"
    return ranks


@drawn(100)
@given(case=fft_cases.cases(), seed=st.integers(0, 99))
@example(case=TWO_ARRAYS_OF_ONE_MEMORY, seed=0)
def test_any_program(case, seed):
    for reachable in (True, False):
        run_case(case, Results(reachable, False), seed=seed)


@drawn(60)
@given(case=fft_cases.cases(), hosts=st.integers(2, 3), seed=st.integers(0, 99))
def test_any_program_of_ranks_on_several_hosts(case, hosts, seed):
    run_case(case, Results(False, False), hosts, seed=seed)


@drawn(70)
@given(
    case=fft_cases.cases(least=2),
    hosts=st.integers(2, 3),
    chunking=st.sampled_from([((1,), 1, 1), ((1,) * 3, 2, 1), ((1, 2), 3, 2), (RISES, 4, 3)]),
    seed=st.integers(0, 99),
)
def test_any_program_with_deliveries_in_parts(case, hosts, chunking, seed):
    run_case(case, Results(False, False), hosts, chunking, seed)


PIPELINES = {
    "X to Y": ((24, 16, 64), "complex64", None, "X", "Y"),
    "X to X": ((24, 24, 64), "complex64", None, "X", "X"),
    "Y to X in double": ((24, 16, 64), "complex128", None, "Y", "X"),
    "real": ((16, 24, 254), "float32", None, "X", "Y"),
    "real, there and back": ((24, 24, 254), "float32", None, "X", "X"),
    "uneven": ((13, 22, 64), "complex64", None, "X", "Y"),
    "fewer than ranks": ((2, 22, 64), "complex64", None, "X", "Y"),
    "batches": ((12, 16, 8, 64), "complex64", (0, 1), "X", "Y"),
    "matrix": ((64, 4608), "complex64", None, "X", "Y"),
    "to real": ((48, 48, 33), "complex64", None, "Y", "X"),
    "half precision": ((24, 16, 128), "complex32", None, "X", "Y"),
    "half precision, there and back": ((24, 24, 128), "complex32", None, "X", "X"),
    "real, half precision": ((16, 24, 510), "float16 halves", None, "X", "Y"),
    "DCT2": ((24, 16, 128), "float32", None, "X", "Y"),
    "orthogonal DST3, there and back": ((24, 24, 64), "complex64", None, "X", "X"),
    "DST1 of half precision": ((24, 16, 256), "float16", (0, 2), "X", "Y"),
}


@cache
def pipeline(name, size):
    """By rank the parts of the operand and of the result, and the problem."""
    shape, dtype, axes, *slabs = PIPELINES[name]
    kind = "R2C" if dtype.startswith("float") else "C2R" if name == "to real" else "C2C"
    kind = next((series for series in SERIES if name.startswith(series)), kind)
    case = {"size": size, "shape": shape, "axes": axes, "kind": kind, "parity": "even",
            "norm": "ortho", "dtype": dtype,
            "library": "torch"}  # fmt: skip
    array = fft_cases.operand_of(case)
    full = fft_cases.wanted(case, array)
    source, target = (getattr(geometry.Slab, axis) for axis in slabs)
    parts = [part_of(array, source, r, size) for r in range(size)]
    problem = case_problem(case, parts, [source] * size, [target] * size)
    return parts, [part_of(full, target, r, size) for r in range(size)], problem


@cache
def pipeline_plan(name, size, hosts):
    *_, problem = pipeline(name, size)
    return plan_of(problem, size, hosts)


CHUNKINGS = [((1,), 1), ((1,) * 3, 2), (RISES, 4, 3)]
# Each transform has every pair of a number of ranks, a number of hosts and a chunking; all three
# meet in every third transform.
PIPELINE_CASES = [
    (name, size, hosts, CHUNKINGS[(number + turn + hosts) % 3])
    for number, name in enumerate(PIPELINES)
    for turn, size in enumerate([2, 3, 8])
    for hosts in (1, 2, 3)
]


@pytest.mark.parametrize(("name", "size", "hosts", "chunking"), PIPELINE_CASES)
def test_pipelines(name, size, hosts, chunking):
    """On one host by the push stream, on several by deliveries in parts."""
    parts, wanted, problem = pipeline(name, size)
    plan = pipeline_plan(name, size, hosts)
    there_and_back = PIPELINES[name][3] == PIPELINES[name][4]
    elsewhere = [(False, "F")] * there_and_back  # results that chunks are not pushed into
    for seed, (packed_results, order) in enumerate([(True, "C"), *elsewhere]):
        ranks = []
        for number in range(size):
            operand = packed("operand", parts[number].shape, problem.dtype)
            out = packed("out", problem.target.local_shape(number), problem.result, order)
            users = {view.memory: (np.zeros(view.end, np.uint8), 0) for view in (operand, out)}
            program = lowered(
                plan,
                number,
                UserArrays(operand, out),
                Results(True, packed_results),
                Chunking(*chunking),
            )
            rank = Rank(number, program, users, forward=problem.direction < 0)
            rank.array(operand)[...] = parts[number]
            ranks.append(rank)
            starts = [step.plan for step in program.steps if is_start(step)]
            assert len(starts) == (hosts == 1)
            for start in starts:
                chunks, rows = tables(start, 1 << 14)
                assert chunks["rows"].sum() == len(rows)
        interpret_ranks(ranks, seed=seed)
        shape, axes = problem.target.global_shape, PIPELINES[name][2]
        count = math.prod(shape[axis] for axis in axes or range(len(shape)))
        for rank, want in zip(ranks, wanted, strict=True):
            assert fft_cases.close(rank.array(rank.named("out")), want, count)


def is_start(step):
    return isinstance(step, Fused) and isinstance(step.plan, Start)


@pytest.mark.parametrize("dtype", ["float32", "complex128", "float16"])
@pytest.mark.parametrize("kind", [kind for kind in SERIES if "adjoint" not in kind])
def test_a_series_for_any_order_of_memory(kind, dtype):
    """Axes of 2, 7 and 8 numbers, or 1: alone and together, out of place and in place."""
    result = dtypes.accumulator(dtype).name
    for shape, order in (((2, 7, 8), (0, 1, 2)), ((7, 1, 2), (1, 2, 0)), ((2, 8, 7), (2, 0, 1))):
        possible = [axis for axis in range(3) if SERIES[kind].period(shape[axis])]
        for axes in [each for n in (1, 2, 3) for each in itertools.permutations(possible, n)]:
            case = {"shape": shape, "axes": axes, "kind": kind, "norm": None, "dtype": dtype}
            array = fft_cases.operand_of(case)
            source, target = packed("a", shape, dtype, order), packed("b", shape, result)
            for into in (target, source)[: 1 + (dtype == result)]:
                steps = local_steps(kind, axes, source, into, preserve_input=False, factor=0.5)
                rank = rank_of(steps)
                rank.array(source)[...] = array
                for step in steps:
                    perform(step, rank)
                want, count = fft_cases.wanted(case, array) / 2, 4 * math.prod(shape)
                assert fft_cases.close(rank.array(into), want, count), (shape, axes, into)


@pytest.mark.parametrize("preserve", [False, True])
@pytest.mark.parametrize("kind", [*ADJOINTS, *(kind for kind in SERIES if "adjoint" in kind)])
def test_adjoints(kind, preserve):
    """An adjoint for GPUs is that for cores."""
    rng = np.random.default_rng(7)
    for shape, order in (((2, 7, 8), (0, 1, 2)), ((7, 2, 3), (1, 2, 0)), ((3, 8, 7), (2, 0, 1))):
        for axes in ((0,), (2,), (0, 1), (2, 1), (1, 0, 2)):
            half = tuple(n // 2 + 1 if axis == axes[-1] else n for axis, n in enumerate(shape))
            shapes, types = (shape,) * 2, ("float64",) * 2
            if kind in COMPLETING:
                shapes, types = (half, shape), ("complex128", "float64")
            elif kind in HALVING:
                shapes, types = (shape, half), ("float64", "complex128")
            source, target = (
                packed(*each, order) for each in zip("ab", shapes, types, strict=True)
            )
            steps = local_steps(kind, axes, source, target, preserve_input=preserve)
            rank = rank_of(steps)
            rank.forward = kind not in COMPLETING
            values = rng.standard_normal(shapes[0])
            if kind in COMPLETING:
                values = values + 1j * rng.standard_normal(shapes[0])
            rank.array(source)[...] = values
            for step in steps:
                perform(step, rank)
            assert not preserve or (rank.array(source) == values).all()
            wanted = np.empty(shapes[1], types[1])
            way = {"kind": kind, "forward": rank.forward, "norm": None}
            bound_transform(values, axes, out=wanted, **way)()
            assert np.allclose(rank.array(target), wanted), (shape, axes)


def rank_of(steps):
    """A rank with the memories of these steps."""
    needed = {}
    for view in (view for step in steps for view in (step.source, step.target)):
        needed[view.memory] = max(needed.get(view.memory, 0), view.end)
    memories = {name: Memory(nbytes) for name, nbytes in needed.items()}
    return Rank(0, RankProgram(tuple(steps), {}, memories), {})


GRID = (5, 4, 6)
ORDERS = [(0, 1, 2), (2, 1, 0), (1, 0, 2), (2, 0, 1)]


@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("orders", list(itertools.product(ORDERS, ORDERS)))
@pytest.mark.parametrize("kind", ["C2C", "R2C", "C2R"])
def test_a_plan_for_any_order_of_memory(kind, axes, orders):
    """A plan exists for packed arrays of the same order; where one exists, it is right."""
    half = (*GRID[: axes[-1]], GRID[axes[-1]] // 2 + 1, *GRID[axes[-1] + 1 :])
    shapes = {"C2C": (GRID, GRID), "R2C": (GRID, half), "C2R": (half, GRID)}[kind]
    names = {"C2C": ("complex64",) * 2, "R2C": ("float32", "complex64"),
             "C2R": ("complex64", "float32")}[kind]  # fmt: skip
    views = [
        packed(place, shape, name, order)
        for place, shape, name, order in zip("ab", shapes, names, orders, strict=True)
    ]
    found = plan_many(kind, axes, *(strided(view) for view in views))
    if found is None:
        assert orders[0] != orders[1] or kind != "C2C"
        return
    step = LocalFFT(kind, axes, *views)
    rng = np.random.default_rng(7)

    rank = rank_of([step])
    source = rank.array(views[0])
    source[...] = rng.standard_normal(shapes[0])
    if kind != "R2C":
        source[...] += 1j * rng.standard_normal(shapes[0]).astype(np.float32)
    before = source.copy()
    perform(step, rank)
    want = {
        "C2C": lambda: np.fft.fftn(before, axes=axes),
        "R2C": lambda: np.fft.rfftn(before, axes=axes),
        "C2R": lambda: np.fft.irfftn(before, s=[GRID[a] for a in axes], axes=axes, norm="forward"),
    }[kind]()
    assert np.abs(rank.array(views[1]) - want).max() < 1e-3


@pytest.mark.parametrize("extent", [0, 1, 2, 7, 12, 13, 31, 32, 64, 129])
@pytest.mark.parametrize("weights", [(1,), (1, 1), (1, 2, 3, 4, 4, 4), (2, 3, *[4] * 14)])
def test_parts_cover_all_and_none_is_empty(extent, weights):
    ranges = first_parts(extent, weights)
    assert [i for lo, hi in ranges for i in range(lo, hi)] == list(range(extent))
    assert len(ranges) == max(1, min(len(weights), extent // 2))
    assert extent == 0 or all(lo < hi for lo, hi in ranges)
    lengths = [hi - lo for lo, hi in ranges]
    assert lengths[0] == min(lengths[:-1], default=lengths[0])


def test_one_real_number_from_one_complex():
    """cuFFT leaves an axis of length 1 away: the others are transformed before it."""
    target = packed("b", (20, 20, 1), "float32")
    for order in ("C", "F"):
        source = packed("a", (20, 20, 1), "complex64", order)
        steps = local_steps("C2R", (0, 1, 2), source, target, preserve_input=False)
        done = [step.axes for step in steps if isinstance(step, LocalFFT)]
        assert [set(each) for each in done] == [{0, 1}, {2}]
        assert plan_many("C2R", (1, 2), strided(source), strided(target)) is None


def test_what_no_plan_can_do():
    reversed_rows = StridedArray((4, 6), (-48, 8), 8)
    plain = StridedArray((4, 6), (48, 8), 8)
    assert plan_many("C2C", (1,), plain, plain) is not None
    assert plan_many("C2C", (1,), reversed_rows, plain) is None
    assert plan_many("C2C", (1,), StridedArray((4, 6), (0, 8), 8), plain) is None
    assert plan_many("C2C", (1,), StridedArray((4, 6), (48, 8), 8, misalignment=4), plain) is None
    assert plan_many("R2C", (1,), StridedArray((4, 6), (24, 4), 4, misalignment=4), plain) is None


@pytest.mark.parametrize(("hosts", "wanted"), [(1, "move work to receive 0"), (2, "unpack into")])
def test_explain_shows_the_steps(hosts, wanted):
    x = np.zeros((4, 8), np.complex64)
    case = {"axes": None, "kind": "C2C", "parity": "even", "norm": None, "dtype": "complex64",
            "library": "torch"}  # fmt: skip
    slabs = [geometry.Slab.X] * 2
    text = str(plan_of(case_problem(case, [x, x], slabs, slabs), 2, hosts))
    for line in ("C2C along", wanted, "synchronise before reusing" if hosts == 1 else "2 hosts"):
        assert line in text, text
