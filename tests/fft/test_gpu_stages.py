"""What GPUs do for a transform, performed with NumPy: plans, copies and exchanges are pure data.

Memory is an array of bytes for every buffer of every rank. A plan runs as cuFFT defines it, element
by element of its embedding, so that any wrong stride shows.
"""

from __future__ import annotations

import itertools
import math

import fft_cases
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from arrangements import part_of
from copying import copy_boxes
from shardmath import geometry
from shardmath.arrays import dtypes
from shardmath.geometry import decode, moves
from shardmath.local.plan_many import StridedArray, plan_many
from shardmath.operators.fft.chunking import Chunking, first_parts
from shardmath.operators.fft.local_steps import (
    Convert,
    Copy,
    LocalFFT,
    Scale,
    View,
    local_steps,
    packed,
)
from shardmath.operators.fft.multi_host_pipeline import make_multi_host_program
from shardmath.operators.fft.options import FFTDirection, FFTOptions
from shardmath.operators.fft.pipeline import make_pipeline
from shardmath.operators.fft.problem import check, describe
from shardmath.operators.fft.program import (
    FETCH_BUFFERS,
    Deliver,
    PeerCopy,
    UserArrays,
    WaitDelivery,
    make_program,
)
from shardmath.operators.fft.search import choose
from shardmath.operators.fft.stages import stages
from shardmath.operators.fft.strategy import ON_GPUS, ON_GPUS_OF_HOSTS

RISES = (1, 2, 3, 4, 4, 4, 4, 4)

COMPLEX = {4: np.complex64, 8: np.complex64, 16: np.complex128}


class Memory:
    """The buffers of one rank. `origin` is where the operand's and the result's element 0 lies."""

    def __init__(self, buffers, given):
        self.held = {name: np.full(size, 0xA5, np.uint8) for name, size in buffers.items()}
        self.origin = dict.fromkeys(self.held, 0)
        for name, (raw, origin) in given.items():
            self.held[name], self.origin[name] = raw, origin

    def array(self, view, dtype=None):
        raw, start = self.held[view.buffer], self.origin[view.buffer] + view.offset
        dtype = np.dtype(dtype or dtypes.to_numpy(view.dtype))
        if view.size == 0:
            return np.empty(view.shape, dtype)
        assert (
            raw.size
            >= start
            + sum((n - 1) * max(0, s) for n, s in zip(view.shape, view.strides, strict=True))
            + view.itemsize
        )
        return np.ndarray(view.shape, dtype, raw.data, start, view.strides)


def perform(step, memory, forward):
    if isinstance(step, Copy):
        memory.array(step.target)[...] = memory.array(step.source)
    elif isinstance(step, Convert):
        target, made = memory.array(step.target), fft_cases.wide(memory.array(step.source))
        target[...] = fft_cases.as_type(made * step.factor, target.dtype)
    elif isinstance(step, Scale):
        memory.array(step.target)[...] *= step.factor
    else:
        local_fft(step, memory, forward)


def local_fft(step, memory, forward):
    """As cuFFT: batches of `lengths`, each side placed by its embedding, stride and distance."""
    plan, kind = step.plan, step.kind
    half = (*plan.lengths[:-1], plan.lengths[-1] // 2 + 1)
    shapes = {"C2C": (plan.lengths,) * 2, "R2C": (plan.lengths, half), "C2R": (half, plan.lengths)}
    for offsets in plan.offsets:
        taken, left = (
            side(memory, view, layout, offset, shape, plan.batch)
            for view, layout, offset, shape in zip(
                (step.source, step.target),
                (plan.source, plan.target),
                offsets,
                shapes[kind],
                strict=True,
            )
        )
        axes = tuple(range(1, taken.ndim))
        wide = taken.astype(np.complex128 if taken.dtype.kind == "c" else np.float64)
        if kind == "R2C":
            made = np.fft.rfftn(wide, axes=axes)
        elif kind == "C2R":
            made = np.fft.irfftn(wide, s=plan.lengths, axes=axes, norm="forward")
            taken[...] = np.nan
        elif forward:
            made = np.fft.fftn(wide, axes=axes)
        else:
            made = np.fft.ifftn(wide, axes=axes, norm="forward")
        left[...] = made


def side(memory, view, layout, offset, shape, count):
    size = view.itemsize
    steps = [layout.stride * size]
    for extent in layout.embed[:0:-1]:
        steps.insert(0, steps[0] * extent)
    raw = memory.held[view.buffer][memory.origin[view.buffer] + view.offset + offset :]
    dtype = np.dtype(view.dtype)
    flat = raw[: raw.size // size * size].view(dtype)
    reach = (count - 1) * layout.distance + sum(
        (n - 1) * step // size for n, step in zip(shape, steps, strict=True)
    )
    assert reach < flat.size, "a plan leaves its buffer"
    return as_strided(flat, (count, *shape), (layout.distance * size, *steps))


def exchanged(programs, memories, at, results):
    for rank, (program, memory) in enumerate(zip(programs, memories, strict=True)):
        step = program.steps[at[rank]]
        own = memory.array(step.own).copy() if not step.pull else memory.array(step.own)
        only = {"dst_rank": rank} if step.pull else {"src_rank": rank}
        for move in moves(step.source, step.target, **only):
            peer = move.src if step.pull else move.dst
            there = memories[peer].array((step.remote or results)[peer])
            src, dst = (there, own) if step.pull else (own, there)
            copy_move(move, src, dst)


def packed_up(steps, programs, memories, readable):
    """All ranks pack. `readable` are the outboxes that peers may still read."""
    for step, memory, program, seen in zip(steps, memories, programs, readable, strict=True):
        assert step.outbox not in seen, "not before all have read what was in it"
        seen.append(step.outbox)
        start = memory.origin[step.own.buffer] + step.own.offset
        boxes = step.delivery.packing(step.own.strides)
        outbox = memory.held[step.outbox]
        copy_boxes(boxes, [(memory.held[step.own.buffer], start)], (outbox, 0))
        assert {step.outbox, step.fetch_buffer} <= program.on_heap


def fetched(steps, memories):
    """Each rank fetches from the outboxes on other hosts."""
    for step, memory in zip(steps, memories, strict=True):
        target = memory.held[step.fetch_buffer]
        for each in step.delivery.fetches:
            remote = memories[each.src].held[steps[each.src].outbox]
            target[each.at : each.at + each.nbytes] = remote[
                each.offset : each.offset + each.nbytes
            ]


def unpacked(steps, memories, readable):
    """Each rank unpacks its fetch buffer, and the outboxes on its host."""
    for step, seen in zip(steps, readable, strict=True):
        del seen[: seen.index(step.outbox)]  # all have met since they read those before
        if step.barrier_last:
            seen.clear()
    for step, memory in zip(steps, memories, strict=True):
        delivery = step.delivery
        starts = [memory.origin[view.buffer] + view.offset for view in (step.own, step.target)]
        near = [(memories[peer].held[steps[peer].outbox], 0) for peer in delivery.same_host]
        own = (memory.held[step.own.buffer], starts[0])
        boxes = delivery.unpacking(step.own.strides, step.target.strides)
        sources = delivery.memories(own, (memory.held[step.fetch_buffer], 0), near)
        copy_boxes(boxes, sources, (memory.held[step.target.buffer], starts[1]))


def copy_move(move, src, dst):
    def indices(run, which):
        start, step = getattr(run, f"{which}_start"), getattr(run, f"{which}_step")
        return [start + i * step + j for i in range(run.count) for j in range(run.length)]

    dst[np.ix_(*(indices(run, "dst") for run in move.runs))] = src[
        np.ix_(*(indices(run, "src") for run in move.runs))
    ]


def unpack_next(in_flight, memories, readable):
    """Then its fetch buffer is free for another one."""
    unpacked(in_flight.pop(0), memories, readable)
    if len(in_flight) >= FETCH_BUFFERS:
        fetched(in_flight[FETCH_BUFFERS - 1], memories)


def run_all(programs, memories, results, forward):
    """Step by step. Asynchronous deliveries are fetched early, and unpacked as late as can be."""
    at = [0] * len(programs)
    readable, in_flight = [[] for _ in programs], []
    while True:
        for rank, program in enumerate(programs):
            while at[rank] < len(program.steps):
                step = program.steps[at[rank]]
                if isinstance(step, (PeerCopy, Deliver, WaitDelivery)):
                    break
                perform(step, memories[rank], forward)
                at[rank] += 1
        steps = [p.steps[i] for i, p in zip(at, programs, strict=True) if i < len(p.steps)]
        assert len(steps) in (0, len(programs)), "all ranks take part in an exchange, or none"
        assert len({type(step) for step in steps}) <= 1
        if not steps:
            break
        if isinstance(steps[0], PeerCopy):
            exchanged(programs, memories, at, results)
        elif isinstance(steps[0], Deliver):
            packed_up(steps, programs, memories, readable)
            in_flight.append(steps)
            if len(in_flight) <= FETCH_BUFFERS:
                fetched(steps, memories)
            if steps[0].number is None:
                unpacked(in_flight.pop(), memories, readable)
        else:
            while in_flight and in_flight[0][0].number <= steps[0].number:
                unpack_next(in_flight, memories, readable)
        at = [each + 1 for each in at]
    while in_flight:
        unpack_next(in_flight, memories, readable)
    assert not any(readable), "there is a barrier after the last delivery"


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
    kind = case["kind"].split()[0]
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


def run_case(case, reachable, hosts=1, chunking=None):
    size = case["size"]
    array = fft_cases.operand_of(case)
    full = fft_cases.wanted(case, array)
    sources = [decode(each) for each in case["inputs"]]
    targets = [None if case["outputs"] is None else decode(case["outputs"][r]) for r in range(size)]
    parts = [part_of(array, sources[r], r, size) for r in range(size)]
    problem = case_problem(case, parts, sources, targets)
    machine = ON_GPUS if hosts == 1 else ON_GPUS_OF_HOSTS
    found = stages(choose(problem, machine), reachable=reachable, multi_host=hosts > 1)
    results, given = [], []
    for rank in range(size):
        shape = problem.target.local_shape(rank)
        store = case["stores"][rank]
        blank = np.zeros(shape, dtypes.to_numpy(problem.result))
        held = [laid_out(part.copy(), s) for part, s in ((parts[rank], store), (blank, store))]
        views = [
            View(place, part.shape, strides, dtypes.of(part.dtype).name, 0)
            for place, part, (_, _, strides) in zip(
                ("operand", "result"), (parts[rank], blank), held, strict=True
            )
        ]
        given.append((held, views))
        results.append(views[1])
    numbers = tuple(rank * hosts // size for rank in range(size))
    programs = []
    for rank in range(size):
        arrays = UserArrays(given[rank][1][0], results[rank])
        program = chunking and make_multi_host_program(
            found, problem, rank, arrays, Chunking(*chunking), hosts=numbers
        )
        programs.append(program or make_program(found, problem, rank, arrays, hosts=numbers))
    memories = [
        Memory(program.buffers, {view.buffer: (raw, origin) for view, (raw, origin, _) in
                         zip(views, held, strict=True)})
        for program, (held, views) in zip(programs, given, strict=True)
    ]  # fmt: skip
    run_all(programs, memories, results, problem.direction < 0)
    axes = range(array.ndim) if case["axes"] is None else case["axes"]
    count = math.prod(full.shape[axis] for axis in axes)
    for rank in range(size):
        target = sources[rank] if targets[rank] is None else targets[rank]
        got = memories[rank].array(results[rank])
        assert fft_cases.close(got, part_of(full, target, rank, size), count), rank
        if parts[rank].size:
            left = memories[rank].array(given[rank][1][0])
            assert left.tobytes() == parts[rank].tobytes(), "the operand is left as it was"


@settings(max_examples=300, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(case=fft_cases.cases())
def test_any_program(case):
    for reachable in (True, False):
        run_case(case, reachable)


@settings(max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(case=fft_cases.cases(), hosts=st.integers(2, 3))
def test_any_program_of_ranks_on_several_hosts(case, hosts):
    run_case(case, False, hosts)


@settings(max_examples=200, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(
    case=fft_cases.cases(least=2),
    hosts=st.integers(2, 3),
    chunking=st.sampled_from([((1,), 1, 1), ((1,) * 3, 2, 1), ((1, 2), 3, 2), (RISES, 4, 3)]),
)
def test_any_program_with_asynchronous_deliveries(case, hosts, chunking):
    run_case(case, False, hosts, chunking)


def pushed(memories, rank, pipeline, at, ready, signals):
    """Push the chunks from number `at` on that may go, up to one that signals; the next number."""
    while at < len(pipeline.chunks) and pipeline.chunks[at].ready_count <= ready:
        chunk = pipeline.chunks[at]
        for rows in chunk.rows:
            buffers = (("work", "receive 0"), ("receive 0", "result"))[chunk.exchange]
            src, dst = memories[rank].held[buffers[0]], memories[rows.peer].held[buffers[1]]
            for i in range(rows.count):
                one, two = rows.source + i * rows.source_pitch, rows.target + i * rows.target_pitch
                dst[two : two + rows.width] = src[one : one + rows.width]
        at += 1
        signals[rank] += chunk.signals
        if chunk.signals:
            break
    return at


def run_pipelines(pipelines, memories, forward):
    size = len(pipelines)
    at, ready, signals = [0] * size, [0] * size, [0] * size
    for rank, pipeline in enumerate(pipelines):
        for steps in pipeline.first:
            for step in steps:
                perform(step, memories[rank], forward)
            ready[rank] += 1
            if ready[rank] < len(pipeline.first):
                at[rank] = pushed(memories, rank, pipeline, at[rank], ready[rank], signals)
    for part in range(len(pipelines[0].second)):
        for rank, pipeline in enumerate(pipelines):
            at[rank] = pushed(memories, rank, pipeline, at[rank], ready[rank], signals)
        assert signals == [part + 1] * size
        for rank, pipeline in enumerate(pipelines):
            for step in pipeline.second[part]:
                perform(step, memories[rank], forward)
    for rank, pipeline in enumerate(pipelines):
        if pipeline.two_exchanges:
            at[rank] = pushed(memories, rank, pipeline, at[rank], 1 << 30, signals)
        assert at[rank] == len(pipeline.chunks)
    assert len(set(signals)) == 1


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
}


@pytest.mark.parametrize("chunking", [((1,), 1), ((1,) * 3, 2), (RISES, 4, 3)])
@pytest.mark.parametrize("hosts", [1, 2, 3])
@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines(name, size, hosts, chunking):
    """On one host by the push stream, on several by asynchronous deliveries."""
    shape, dtype, axes, one, two = PIPELINES[name]
    kind = "R2C" if dtype.startswith("float") else "C2R" if name == "to real" else "C2C"
    case = {"size": size, "shape": shape, "axes": axes, "kind": kind, "parity": "even",
            "norm": "ortho", "dtype": dtype,
            "library": "torch"}  # fmt: skip
    array = fft_cases.operand_of(case)
    full = fft_cases.wanted(case, array)
    slabs = [getattr(geometry.Slab, axis) for axis in (one, two)]
    parts = [part_of(array, slabs[0], r, size) for r in range(size)]
    problem = case_problem(case, parts, [slabs[0]] * size, [slabs[1]] * size)
    multi_host = hosts > 1
    numbers = tuple(rank * hosts // size for rank in range(size))
    found = stages(choose(problem, ON_GPUS), reachable=not multi_host, multi_host=multi_host)
    memories, pipelines, results = [], [], []
    for rank in range(size):
        operand = packed("operand", parts[rank].shape, problem.dtype)
        result = packed("result", problem.target.local_shape(rank), problem.result)
        if multi_host:
            pipeline = make_multi_host_program(
                found,
                problem,
                rank,
                UserArrays(operand, result),
                Chunking(*chunking),
                hosts=numbers,
            )
        else:
            pipeline = make_pipeline(
                found, rank, UserArrays(operand, result), Chunking(*chunking), order="C"
            )
            chunks, rows = pipeline.tables(1 << 14)
            assert chunks["rows"].sum() == len(rows)
        sizes = {view.buffer: view.size * view.itemsize for view in (operand, result)}
        memory = Memory(pipeline.buffers | sizes, {})
        memory.array(operand)[...] = parts[rank]
        memories.append(memory)
        pipelines.append(pipeline)
        results.append(result)
    if multi_host:
        run_all(pipelines, memories, results, problem.direction < 0)
    else:
        run_pipelines(pipelines, memories, problem.direction < 0)
    count = math.prod(full.shape[axis] for axis in axes or range(full.ndim))
    for rank in range(size):
        want = part_of(full, slabs[1], rank, size)
        assert fft_cases.close(memories[rank].array(results[rank]), want, count)


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
    found = plan_many(kind, axes, *(view.strided for view in views))
    if found is None:
        assert orders[0] != orders[1] or kind != "C2C"
        return
    step = LocalFFT(kind, axes, *views)
    rng = np.random.default_rng(7)

    buffers = {view.buffer: view.size * view.itemsize for view in views}
    memory = Memory(buffers, {})
    source = memory.array(views[0])
    source[...] = rng.standard_normal(shapes[0])
    if kind != "R2C":
        source[...] += 1j * rng.standard_normal(shapes[0]).astype(np.float32)
    before = source.copy()
    perform(step, memory, True)
    want = {
        "C2C": lambda: np.fft.fftn(before, axes=axes),
        "R2C": lambda: np.fft.rfftn(before, axes=axes),
        "C2R": lambda: np.fft.irfftn(before, s=[GRID[a] for a in axes], axes=axes, norm="forward"),
    }[kind]()
    assert np.abs(memory.array(views[1]) - want).max() < 1e-3


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
        assert plan_many("C2R", (1, 2), source.strided, target.strided) is None


def test_what_no_plan_can_do():
    reversed_rows = StridedArray((4, 6), (-48, 8), 8)
    plain = StridedArray((4, 6), (48, 8), 8)
    assert plan_many("C2C", (1,), plain, plain) is not None
    assert plan_many("C2C", (1,), reversed_rows, plain) is None
    assert plan_many("C2C", (1,), StridedArray((4, 6), (0, 8), 8), plain) is None
    assert plan_many("C2C", (1,), StridedArray((4, 6), (48, 8), 8, misalignment=4), plain) is None
    assert plan_many("R2C", (1,), StridedArray((4, 6), (24, 4), 4, misalignment=4), plain) is None
