"""Products of scaled elements as a GPU performs them, by NumPy: every rank in one process.

Memory is the host's; what launches kernels is replaced by the same in NumPy, which asserts what
cuBLASLt asks for: lines along k, everything at multiples of 16 bytes, scales in its layouts.
"""

from __future__ import annotations

import ctypes
import itertools
from contextlib import contextmanager
from types import SimpleNamespace

import float8_cases as cases
import numpy as np
import pytest
from float8_cases import E4, E5

from copying import copy_boxes
from shardmath.arrays.dtypes import of, to_numpy
from shardmath.distribution import Slab
from shardmath.geometry import Layout
from shardmath.handles.operand import Operand
from shardmath.local.epilog import MatmulEpilog
from shardmath.local.gpu import Matrix, float8, scaled
from shardmath.machine import Machine, h200
from shardmath.operators.matmul.gpu import line_exchange, panels, rounds
from shardmath.operators.matmul.gpu import scaled as module
from shardmath.operators.matmul.gpu.rank_plan import Operands, RankPlan, Scales
from shardmath.operators.matmul.gpu.scale_moves import choose_strategy
from shardmath.operators.matmul.problem import Problem
from shardmath.operators.matmul.scaling import OUTER, SQUARES, TENSOR, VECTORS, Scaling
from shardmath.redistribution.boxes import Box

MODES = {"tensor": TENSOR, "outer": OUTER, "vectors": VECTORS, "squares": SQUARES}


def view(x: Matrix):
    """A matrix of the "GPU" as NumPy sees it."""
    item = x.itemsize
    nbytes = ((x.rows - 1) * x.row_stride + (x.columns - 1) * x.column_stride + 1) * item
    if not x.size:
        return np.zeros((x.rows, x.columns), to_numpy(x.dtype))
    buffer = (ctypes.c_char * nbytes).from_address(x.address)
    steps = (x.row_stride * item, x.column_stride * item)
    return np.ndarray((x.rows, x.columns), to_numpy(x.dtype), buffer, strides=steps)


def bytes_of(x: Matrix):
    """All bytes from its first element to its last."""
    last = (x.rows - 1) * x.row_stride + (x.columns - 1) * x.column_stride + 1
    return view(Matrix(x.address, 1, last * x.itemsize if x.size else 0, 0, 1, "uint8"))[0]


def strides_of(x: Matrix):
    return x.row_stride * x.itemsize, x.column_stride * x.itemsize


def room(nbytes):
    """Memory at a multiple of 256, full of NaN."""
    whole = np.full(nbytes + 256, 0xFF, np.uint8)
    start = -whole.ctypes.data % 256
    return whole[start : start + nbytes]


class Lane:
    """Buffers by name."""

    def __init__(self):
        self.team = SimpleNamespace(device=SimpleNamespace(processors=132))
        self.held = {}

    def buffer(self, name, nbytes):
        if name not in self.held or self.held[name].nbytes < nbytes:
            self.held[name] = room(nbytes)
        return SimpleNamespace(block=SimpleNamespace(address=self.address(name)))

    def private(self, name, nbytes):
        return self.buffer(name, nbytes).block.address

    def address(self, name):
        return self.held[name].ctypes.data

    def stream(self, name):
        return 1

    def event(self, name): ...

    def barrier(self, stream): ...

    @property
    def pushes(self):
        return SimpleNamespace(push_to_all=push)


class Shown:
    """A showcase whose ranks are all here."""

    def __init__(self, lane, rank, everyone):
        self._lane, self._rank, self._everyone = lane, rank, everyone
        self.made_here = {}

    def made(self, name, shape, dtype, order):
        empty = Matrix.packed(0, tuple(shape), dtype, order)
        self._lane.buffer(name, empty.size * empty.itemsize)
        self.made_here[name] = empty._replace(address=self._lane.address(name))
        return self.made_here[name]

    def own(self, name):
        return self.made_here[name]

    def place(self, name, rank):
        x = self._everyone[rank].made_here[name]
        return x.address, strides_of(x)

    def make_room(self, name, parts, itemsize): ...

    def publish(self, name, stream): ...

    def reach(self, name, part, moves, stream):
        return lambda rank: self.place(name, rank)


class FarShown(Shown):
    """The same on several hosts: nothing is read but outboxes of this host, and what is fetched."""

    def __init__(self, lane, everyone, plan):
        super().__init__(lane, plan.rank, everyone)
        self._share = plan
        self._rooms, self.outboxes = {}, {}

    def make_room(self, name, parts, itemsize):
        self._rooms[name] = room(self._share.routes.room(name, parts, itemsize))

    def publish(self, name, stream):
        x = self.made_here[name]
        outbox = self._share.routes.outbox(name, self._rank, x.itemsize)
        self.outboxes[name] = held = room(outbox.nbytes)
        boxes = [Box.of(copy, 0) for copy in outbox.packing(strides_of(x))]
        copy_boxes(boxes, [(bytes_of(x), 0)], (held, 0))

    def reach(self, name, part, moves, stream):
        x, plan = self.made_here[name], self._share
        starts, held = {}, self._rooms[name]
        for each in plan.routes.fetches(name, part, moves, x.itemsize):
            assert plan.hosts[each.src] != plan.hosts[self._rank]
            source = self._everyone[each.src].outboxes[name]
            held[each.at : each.at + each.nbytes] = source[each.offset : each.offset + each.nbytes]
            starts[each.src] = held.ctypes.data + each.at - each.offset

        def place(src):
            if src == self._rank:
                return self.place(name, src)
            parcel = plan.routes.parcel(name, src, x.itemsize)
            near = plan.hosts[src] == plan.hosts[self._rank]
            start = self._everyone[src].outboxes[name].ctypes.data if near else starts[src]
            return start + parcel.offset, parcel.strides

        return place


class Gather:
    """Copies at once; what has come must have been waited for."""

    stream = 0

    def __init__(self, *_):
        self._apart, self._came = False, set()

    @contextmanager
    def prefetching(self, overlaps):
        self._apart = overlaps
        yield

    def await_release(self, number): ...

    def await_panels(self, number):
        self._came.add(number)

    def release(self, number):
        assert number in self._came

    def copy(self, name, moves, places, panel):
        out, item = view(panel), panel.itemsize
        for move in moves:
            at = [
                [
                    (start + np.arange(run.count)[:, None] * step + np.arange(run.length)).ravel()
                    for start, step in (
                        (run.src_start, run.src_step),
                        (run.dst_start, run.dst_step),
                    )
                ]
                for run in move.runs
            ]
            address, strides = places(move.src)
            shape = [int(one[0].max(initial=-1)) + 1 for one in at]
            steps = [stride // item for stride in strides]
            source = view(Matrix(address, *shape, *steps, panel.dtype))
            out[np.ix_(at[0][1], at[1][1])] = source[np.ix_(at[0][0], at[1][0])]


def push(source, targets, nbytes, stream):
    assert not any(word % 16 for word in (source, nbytes, *targets))
    for target in targets:
        ctypes.memmove(target, source, nbytes)


def dequantize(_, __, out, elements, scales, blocks, *, factor=1.0, known_rows=None, also=()):
    assert elements is None
    i, j = np.indices((out.rows, out.columns))
    values = np.full(i.shape, factor, np.float32)
    known = out.rows if known_rows is None else known_rows
    if scales is not None:
        given = view(scales)
        row = np.minimum(i // (blocks.rows or 1 << 40), (known - 1) // (blocks.rows or 1 << 40))
        values = values * given[row, j // (blocks.columns or 1 << 40)]
    for each in (out, *also):
        view(each)[...] = np.where(i < known, values, 0)


def decoded(scale, lines, k):
    """The scale of each element of a factor, lines first, from cuBLASLt's layouts."""
    deep = -(-k // 128)
    if scale.mode == "tensor":
        one = 1.0 if not scale.address else view(Matrix(scale.address, 1, 1, 1, 1, "float32"))
        return np.broadcast_to(one, (lines, k))
    assert scale.address % 16 == 0
    if scale.mode == "outer":
        vector = view(Matrix(scale.address, lines, 1, 1, lines, "float32"))
        return np.broadcast_to(vector, (lines, k))
    if scale.mode == "vectors":
        assert lines % 4 == 0
        made = view(Matrix(scale.address, lines, deep, 1, lines, "float32"))
    else:
        step = -(-deep // 4) * 4
        made = view(Matrix(scale.address, -(-lines // 128), deep, step, 1, "float32"))
        made = made.repeat(128, 0)[:lines]
    return made.repeat(128, 1)[:, :k]


def multiply(_, a, b, d, *, scale_a, scale_b, alpha=1.0, beta=0.0, c=None, quantized=None, **rest):
    one, two = a.transposed(), b
    assert scaled.fits(one) and scaled.fits(two)
    blocks = bool({scale_a.mode, scale_b.mode} & {"vectors", "squares"})
    assert scaled.takes_result(d, blocks=blocks), d
    pairs = {"tensor": {"tensor"}, "outer": {"outer"}, "vectors": {"vectors", "squares"},
             "squares": {"vectors"}}  # fmt: skip
    assert scale_b.mode in pairs[scale_a.mode] and quantized is None and rest["workspace"]
    left = view(a).astype(float) * decoded(scale_a, a.rows, a.columns)
    right = view(b).astype(float) * decoded(scale_b, b.columns, b.rows).T
    total = alpha * (left @ right)
    addend = view(d if c is None else c)
    view(d)[...] = (total + beta * addend if beta else total).astype(to_numpy(d.dtype))


def finish(_, __, d, parts):
    (part,) = parts
    view(d)[...] = view(part)


def call(name, *given):
    """What the driver is asked for."""
    if name == "cuMemcpyAsync":
        target, source, nbytes, _ = given
        ctypes.memmove(target, source, nbytes)
    elif name == "cuMemsetD2D8Async":
        address, pitch, value, width, height, _ = given
        view(Matrix(address, height, width, pitch, 1, "uint8"))[...] = value
    else:
        assert name in ("cuEventRecord", "cuStreamWaitEvent")


@pytest.fixture(autouse=True)
def _by_numpy(monkeypatch):
    monkeypatch.setattr(module, "Gather", Gather)
    monkeypatch.setattr(float8, "dequantize", dequantize)
    monkeypatch.setattr(module.scaled, "multiply", multiply)
    monkeypatch.setattr(module, "finish", finish)
    monkeypatch.setattr(module, "WORKSPACE", 256)  # which nothing uses here
    monkeypatch.setattr(line_exchange, "call", call)
    monkeypatch.setattr(h200, "PROCESSORS", 1)  # small products take time, too
    monkeypatch.setattr(panels, "_FIRST_BYTES", 1 << 10)
    monkeypatch.setattr(panels, "_LEAST", 128)
    monkeypatch.setattr(panels, "_FIRST", 0.0)
    # Small products have several intervals, too.
    monkeypatch.setattr(RankPlan, "_passes_over_sums", lambda *_: 0.0)


def device_array(x, keep):
    memory = room(x.nbytes)
    held = np.ndarray(x.shape, x.dtype, memory, order="F" if x.flags.f_contiguous else "C")
    held[...] = x
    keep.append(memory)
    name = of(x.dtype).name
    return Operand(held.ctypes.data, held.shape, held.strides, name, None, held)


class Rank:
    """One rank's products."""

    def __init__(self, strategy, hosts, rank, everyone, operand_pair, keep, order):
        problem = strategy.problem
        self.plan = RankPlan(strategy, rank, hosts)
        operands, arrays, given = [], [], []
        for factor in operand_pair:
            part = np.asarray(factor.parts[rank], order=order)
            operands.append(device_array(part, keep))
            scale = factor.all_scales[rank]
            is_number = np.ndim(scale) == 0 and rank % 2
            arrays.append(None if is_number else device_array(np.atleast_1d(scale), keep))
            given.append(float(scale) if is_number else 1.0)
        shape = problem.d.local_shape(rank)
        out = device_array(np.zeros(shape, to_numpy(problem.result), order), keep)
        self.operands = Operands(
            *operands, None, out, 1.0, 0.0, {}, {}, 0,
            scales=Scales((*given, 1.0, 1.0), (*arrays, None, None)),
        )  # fmt: skip
        self.lane = Lane()
        self.published = Shown(self.lane, rank, everyone)
        if self.plan.multi_host:
            self.published = FarShown(self.lane, everyone, self.plan)
        for name, operand in zip("ab", operands, strict=True):
            self.published.made_here[name] = module.matrix_of(operand)
        everyone.append(self.published)
        sums = None
        if strategy.reduces or strategy.moves_result:
            by_columns = "F" if module.matrix_of(out).by_columns else "C"
            shape = strategy.sums.local_shape(rank)
            sums = self.published.made("sums", shape, "float32", by_columns)
        finish_phase = SimpleNamespace(sums=sums, quantized_result=None)
        self.made = module.ScaledProducts(
            self.plan, self.operands, self.lane, self.published, finish_phase
        )
        self.made.prepare_published()
        if self.plan.multiplies:
            self.made.prepare()

    def result(self, strategy):
        """What this rank has computed, and where."""

        def source(index, part, moves, stream):
            return self.published.reach("ab"[index], part, moves, stream)

        parts = self.made.run(source)
        if parts is None:
            return view(module.matrix_of(self.operands.out))
        return view(parts[0])


def problem_of(layouts, modes, result, label=None):
    """A product of eight-bit factors without more."""
    return Problem(
        *layouts, dtype=E4, result=result, transpose=(False, False), conjugate=(False, False),
        has_c=False, sums_c=False, epilog=MatmulEpilog.DEFAULT, strategy=label,
        scaling=Scaling((E4, E5), result, *modes, c=False, d=False, amax=False),
    )  # fmt: skip


def perform(layout, mode_a, mode_b, shape, result, order, label=None, hosts=(0,) * 4):
    m, n, k = shape
    size, shapes = len(hosts), [(m, k), (k, n), (m, n)]
    rng = np.random.default_rng(3)
    whole = cases.elements(rng, (m, k), E4), cases.elements(rng, (k, n), E5)
    dists = [cases.layout(layout, shapes, rank, size) for rank in range(size)]
    given = tuple(MODES[each] for each in (mode_a, mode_b))
    layouts = [Layout.bind([d[i] for d in dists], shapes[i]) for i in range(3)]
    machine = Machine("cuda", hosts)
    strategy, compared = choose_strategy(problem_of(layouts, given, result, label), machine)
    if strategy.problem.dtype != E4:
        return None, compared
    operand_pair = [
        cases.Factor(i, whole[i], mode, [d[i] for d in dists], 0, 5 + i)
        for i, mode in enumerate((mode_a, mode_b))
    ]
    everyone, keep = [], []
    ranks = [
        Rank(strategy, hosts, rank, everyone, operand_pair, keep, order) for rank in range(size)
    ]
    for rank in ranks:
        for name in "ab":
            rank.published.publish(name, 0)
        rank.made.begin()
    one, two = operand_pair[0].numbers, operand_pair[1].numbers
    for number, rank in enumerate(ranks):
        if not rank.plan.multiplies:
            continue
        got = rank.result(strategy)
        part = strategy.sums.parts[number]
        at = [np.array([i for lo, hi in each.ranges() for i in range(lo, hi)]) for each in part]
        depth = [i for lo, hi in strategy.depth[number].ranges() for i in range(lo, hi)]
        want = one[np.ix_(at[0], depth)] @ two[np.ix_(depth, at[1])]
        limit = cases.bound(want, one[at[0]], two[:, at[1]], got.dtype.name)
        assert got.shape == want.shape
        assert (abs(got.astype(float) - want) <= limit).all(), (strategy.label, number)
    return strategy, compared


SHAPES = {"fitting": (512, 128, 512), "odd": (130, 77, 300), "small": (5, 3, 20)}


@pytest.mark.parametrize("layout", list(cases.LAYOUTS))
@pytest.mark.parametrize("shape", list(SHAPES))
def test_products_of_scaled_elements(layout, shape):
    turns = itertools.cycle([("bfloat16", "C"), ("float32", "F"), ("float16", "C")])
    for mode_a, mode_b in itertools.product(cases.MODES, repeat=2):
        result, order = next(turns)
        _, compared = perform(layout, mode_a, mode_b, SHAPES[shape], result, order)
        if mode_a == "vectors":
            label = compared[-1][0].label
            perform(layout, mode_a, mode_b, SHAPES[shape], result, order, label)


@pytest.mark.parametrize("layout", list(cases.LAYOUTS))
def test_products_between_hosts(layout):
    """Elements and scales that no rank of another host can read where they lie."""
    pairs = [
        *zip(cases.MODES, cases.MODES, strict=True),
        ("vectors", "squares"),
        ("outer", "tensor"),
    ]
    for number, (mode_a, mode_b) in enumerate(pairs):
        hosts = [(0, 0, 1, 1), (0, 1, 2, 2)][number % 2]
        given = mode_a, mode_b, SHAPES["odd" if number else "fitting"], "bfloat16", "CF"[number % 2]
        _, compared = perform(layout, *given, hosts=hosts)
        for strategy, _ in compared if number in (1, 4) else ():
            perform(layout, *given, strategy.label, hosts=hosts)


def test_some_are_of_several_intervals_and_padded():
    strategy, _ = perform("rows", "outer", "tensor", SHAPES["odd"], "bfloat16", "C")
    assert len(RankPlan(strategy, 0, (0,) * 4).schedule[0]) > 1


ROUNDS = [(), (0, 1, 2, 3), (0, 1, 3), (0, 2, 3), (0, 3)]


@pytest.mark.parametrize("after", ROUNDS)
@pytest.mark.parametrize(("layout", "index"), [("rows of a", 0), ("columns of b", 1)])
def test_lines_that_come_in_rounds(layout, index, after, monkeypatch):
    monkeypatch.setattr(rounds, "cuts", lambda *_: after)
    turns = itertools.cycle([("bfloat16", "C"), ("float32", "F"), ("float16", "C")])
    pairs = list(itertools.product(cases.MODES, repeat=2))
    # Blocks of 128 lines begin where parts do, or not; D can be written to where it lies, or not.
    kinds = itertools.product((512, 192), ((256, 272), (76, 400)))
    for number, (lines, (others, k)) in enumerate(kinds):
        shape = (lines, others, k) if index == 0 else (others, lines, k)
        for mode_a, mode_b in pairs[(number + len(after)) % 3 :: 3]:
            result, order = next(turns)
            strategy, _ = perform(layout, mode_a, mode_b, shape, result, order)
            found = RankPlan(strategy, 0, (0,) * 4).rounds
            assert found is not None and (found.index, found.cuts) == (index, after)


@pytest.mark.parametrize(
    ("shape", "several"), [((8192, 8192, 8192), False), ((1024, 1024, 1 << 17), True)]
)
def test_panels_of_k_are_cut_where_sums_are_small(shape, several, monkeypatch):
    """Each panel reads and writes the sums; B comes from the other rank, cut along k."""
    monkeypatch.undo()
    m, n, k = shape
    layouts = [
        Layout.bind([slab] * 2, extents)
        for slab, extents in ((Slab.X, (m, k)), (Slab.X, (k, n)), (Slab.X, (m, n)))
    ]
    strategy, _ = choose_strategy(
        problem_of(layouts, (TENSOR, TENSOR), "bfloat16"), Machine("cuda", (0, 0))
    )
    assert (len(RankPlan(strategy, 0, (0, 0)).schedule[0]) > 1) == several
