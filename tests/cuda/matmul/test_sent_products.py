"""GEMM + ReduceScatter and GEMM + AllReduce against float64, rank after rank."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from shardmath.arrays import library_named
from shardmath.cuda.driver import call
from shardmath.errors import OpTimeout, RankFailure
from shardmath.handles.allocation import empty_on_heap
from shardmath.operators.matmul.gpu.local_product import OperandLayout, SplitKProduct, even_rows
from shardmath.operators.matmul.gpu.tile_order import TILE_COLUMNS, TILE_ROWS, TileSchedule
from shardmath.operators.matmul.gpu.tile_sending import GemmAllReduce, GemmReduceScatter
from shardmath.symmetric.heap import Location

KINDS = {  # how each is planned
    "scatter": GemmReduceScatter.create,
    "all": GemmAllReduce.create,
    "shown": partial(GemmAllReduce.create, result_addresses=True),  # peers write the results
}
SENTINEL = 7.0
PIECE = 128  # kPiece


class Case:
    """One product: operands of random numbers, the same on all ranks, and this rank's parts."""

    def __init__(self, context, kind, rows, columns, depths, orders, dtype, *, gap=0, seed=0):
        import torch

        torch.cuda.set_device(context.device_id)
        self.torch, self.context, self.kind = torch, context, kind
        self.device = f"cuda:{context.device_id}"
        self.dtype, self.columns = getattr(torch, dtype), columns
        height, depth = sum(rows), sum(depths)
        rng = np.random.default_rng([height, columns, depth, seed])
        a, b = rng.standard_normal((height, depth)), rng.standard_normal((depth, columns))
        a, b = (torch.from_numpy(x).to(self.device).to(self.dtype) for x in (a, b))
        self.wanted = a.double() @ b.double()
        self.scale = max(depth, 1) ** 0.5
        low = sum(depths[: context.rank])
        own = slice(low, low + depths[context.rank])
        self.a, factor_a = self._laid_out(a[:, own], orders[0])
        self.b, factor_b = self._laid_out(b[own], orders[1])
        self.problem = SplitKProduct(
            tuple(rows), columns, depths[context.rank], dtype, factor_a, factor_b
        )
        self.first = sum(rows[: context.rank]) if kind == "scatter" else 0
        self.height = rows[context.rank] if kind == "scatter" else height
        self.pitch = columns + gap
        shape, self.more = (self.height + 1, self.pitch), {}
        if kind == "shown":
            self.result = empty_on_heap(context, library_named("torch"), shape, dtype)
            self.more["result_addresses"] = self.addresses()
        else:
            self.result = self.torch.empty(shape, device=self.device, dtype=self.dtype)
        self.result.fill_(SENTINEL)

    def addresses(self):
        """Where each rank's result lies for this rank."""
        context, nbytes = self.context, 2 * self.result.numel()
        block = context.heap.find(self.result.data_ptr())
        context.announce(block)
        where = block.location.segment, block.location.offset
        found = context.agree("results", lambda: where, lambda found: found)
        return [context.peer_address(r, Location(*at), nbytes) for r, at in enumerate(found)]

    def _laid_out(self, x, order):
        """A copy whose rows ("C") or columns ("F") are a multiple of 8 elements apart."""
        if order == "F":
            laid, factor = self._laid_out(x.T, "C")
            return laid, OperandLayout("F", factor.pitch)
        pitch = -(-max(x.shape[1], 1) // 8) * 8 + 8
        whole = self.torch.full((x.shape[0] + 1, pitch), 3.0, device=self.device, dtype=self.dtype)
        whole[: x.shape[0], : x.shape[1]] = x
        return whole, OperandLayout("C", pitch)

    def plan(self, shape=None):
        return KINDS[self.kind](self.context, self.problem, shape)

    def launch(self, plan):
        stream = library_named("torch").stream(self.context.team.device.ordinal)
        addresses = self.a.data_ptr(), self.b.data_ptr(), self.result.data_ptr()
        plan.launch(*addresses, stream, pitch=self.pitch, **self.more)

    def poison(self, plan):
        """NaN in every slot and every shared sum of this rank: what is taken too early is seen.

        No rank is at work between the two barriers.
        """
        self.done()
        self.context.barrier()  # before writing what a peer may still write or read
        own, base = plan.slot_layouts[self.context.rank], plan.bases[self.context.rank]
        slots = self.context.size * own.stride
        for first, nbytes in ((own.slots, slots), (own.extra, own.tiles - own.extra)):
            if nbytes:
                call("cuMemsetD8Async", base + first, 0xFF, nbytes, 0)
        self.result.fill_(SENTINEL)
        self.done()
        self.context.barrier()  # before a peer sends here again

    def fault(self):
        """What is wrong with the result, or ""."""
        found = self.result
        wanted = self.wanted[self.first : self.first + self.height]
        part = found[: self.height, : self.columns]
        off = (part.double() - wanted).abs() / self.scale
        step = 2.0**-7 if self.dtype == self.torch.bfloat16 else 2.0**-10
        if off.numel() and not bool((off <= 8 * step).all()):
            row, column = divmod(int(off.nan_to_num(1e9).argmax()), self.columns)
            return (
                f"({row}, {column}): {float(part[row, column])}, not {float(wanted[row, column])}"
            )
        if not bool((found[self.height :] == SENTINEL).all()):
            return "rows behind the result were written"
        if not bool((found[:, self.columns :] == SENTINEL).all()):
            return "elements between rows of the result were written"
        return ""

    def done(self):
        self.context.team.synchronize(
            library_named("torch").stream(self.context.team.device.ordinal)
        )
        self.torch.cuda.synchronize()


def shared_out(total, size):
    """`total` rows in uneven parts, one of them empty where there are several ranks."""
    if size == 1:
        return [total]
    weights = [0 if rank == size // 2 else 1 + rank for rank in range(size)]
    parts = [total * weight // sum(weights) for weight in weights]
    parts[0] += total - sum(parts)
    return parts


CASES = [
    # rows, columns, depth, orders of A and B, dtype, and the TileSchedule
    (256, 512, 512, "CC", "bfloat16", (1, 4)),
    (1000, 601, 203, "CC", "bfloat16", (3, 2)),
    (1000, 601, 203, "CF", "float16", (2, 4)),
    (776, 264, 1030, "FC", "bfloat16", (2, 1, 1)),
    (776, 264, 1030, "FF", "float16", (5, 8, 2, 3, 1)),
    (3, 1, 1, "CC", "float16", (2, 4)),
    (129, 2000, 65, "CC", "bfloat16", (4, 4, 1, 4, 2)),
    (4000, 9000, 40, "CC", "bfloat16", (5, 2, 2, 4, 1, 300)),
    (4000, 3000, 40, "CF", "bfloat16", (6, 4, 2, 4, 3)),
    (1000, 3001, 700, "CC", "float16", (4, 2, 2, 3, 2)),
]


def check_case(context, kind, rows, columns, depth, orders, dtype, shape):
    faults = []
    for gap in (0, 8 if kind == "shown" else 5):
        unit = 8 if orders[0] == "F" else 1
        parts = [unit * part for part in shared_out(rows // unit, context.size)]
        depths = shared_out(depth, context.size)
        case = Case(context, kind, parts, columns, depths, orders, dtype, gap=gap)
        plan = case.plan(TileSchedule(*shape))
        seen = []
        for _ in range(3):
            case.poison(plan)
            case.launch(plan)
            case.done()
            seen.append(case.result.clone())
            faults.append(case.fault())
        if not all(bool((x == seen[0]).all()) for x in seen):
            faults.append("the bits differ from one launch to the next")
        plan.free()
        context.barrier()
    return [fault for fault in faults if fault]


# Peers write whole pieces of 16 bytes.
UNEVEN = [(case, kind) for case in CASES for kind in KINDS if kind != "shown" or case[1] % 8 == 0]


@pytest.mark.parametrize(("case", "kind"), UNEVEN, ids=str)
def test_uneven_parts(gpus, size, kind, case):
    assert gpus.run(check_case, kind, *case, ranks=size) == [[]] * size


def check_poisoned(context, kind, reducer_blocks):
    """Chunks are taken while others come: in none of many launches before a tile has come."""
    rows = even_rows(1024 * context.size, context.size)
    case = Case(context, kind, rows, 2048, [512] * context.size, "CC", "bfloat16")
    plan = case.plan(TileSchedule(8, reducer_blocks))
    faults = []
    for _ in range(12):
        case.poison(plan)
        case.launch(plan)
        case.done()
        faults.append(case.fault())
    plan.free()
    context.barrier()
    return [fault for fault in faults if fault]


@pytest.mark.parametrize("reducer_blocks", [2, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_no_tile_is_taken_before_it_has_come(gpus, size, kind, reducer_blocks):
    assert gpus.run(check_poisoned, kind, reducer_blocks, ranks=size) == [[]] * size


def check_hurry(context):
    """A product that ends long before the takers could have added up all chunks but the last."""
    rows = even_rows(8192, context.size)
    case = Case(context, "scatter", rows, 4096, [64] * context.size, "CC", "bfloat16")
    plan = case.plan(TileSchedule(8))
    sending, claimed = plan, np.zeros(8, np.uint32)
    rest = sending._reduce_rest

    def look_first(*arguments):
        case.done()
        call("cuMemcpyDtoH", claimed.ctypes.data, sending._start("claimed"), claimed.nbytes)
        rest(*arguments)

    sending._reduce_rest = look_first
    case.launch(plan)
    case.done()
    ends = sending.tile_order.table(context.rank)[:, 1].astype(np.int64)
    pieces = np.diff(ends, prepend=0) * TILE_ROWS * TILE_COLUMNS // 8 // PIECE
    plan.free()
    context.barrier()
    return case.fault(), bool((claimed[:-1] < pieces[:-1]).any())


def test_takers_do_not_outlast_the_product(gpus, size):
    assert gpus.run(check_hurry, ranks=size) == [("", True)] * size


def check_graph(context, kind):
    """Two plans on two streams, launched and replayed without a pause, with new operands."""
    import torch

    torch.cuda.set_device(context.device_id)
    size = context.size
    shapes = [(1100, 768, 320), (640, 1304, 1024)]
    cases = [
        Case(context, kind, even_rows(m, size), n, [k] * size, "CC", "bfloat16", seed=i)
        for i, (m, n, k) in enumerate(shapes)
    ]
    plans = [case.plan() for case in cases]
    lanes = [torch.cuda.Stream() for _ in cases]
    for case, plan in zip(cases, plans, strict=True):
        case.launch(plan)  # compiles
        case.done()
    faults = [case.fault() for case in cases]
    graphs = []
    for case, plan in zip(cases, plans, strict=True):
        case.result.fill_(SENTINEL)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            case.launch(plan)
            case.launch(plan)
        graphs.append(graph)
    torch.cuda.synchronize()
    for number in range(6):
        for lane, graph, case, plan in zip(lanes, graphs, cases, plans, strict=True):
            with torch.cuda.stream(lane):
                graph.replay() if number % 2 else case.launch(plan)
    torch.cuda.synchronize()
    context.team.check()
    faults += [case.fault() for case in cases]
    for case, plan in zip(cases, plans, strict=True):
        case.a.neg_()
        case.wanted.neg_()
        case.result.fill_(SENTINEL)
        case.launch(plan)
    cases[0].done()
    faults += [case.fault() for case in cases]
    for plan in plans:
        plan.free()
    context.barrier()
    return [fault for fault in faults if fault]


@pytest.mark.parametrize("kind", KINDS)
def test_plans_on_streams_and_in_graphs(gpus, size, kind):
    assert gpus.run(check_graph, kind, ranks=size) == [[]] * size


def check_late(context, kind):
    """The last rank does not launch: the others name it, and the plan is at an end."""
    group = context.split(0)
    last, told = group.size - 1, []
    parts, depths = even_rows(512 * group.size, group.size), [64] * group.size
    case = Case(group, kind, parts, 256, depths, "CC", "float16")
    plan = case.plan()
    group.team.timeout = 0.3
    for _ in range(2):
        if group.rank != last:
            try:
                case.launch(plan)
                case.done()
            except OpTimeout as error:
                told.append(("late", last in error.ranks))
            except RankFailure as error:
                told.append(("ended", "given up" in str(error)))
        context.barrier()
    x = case.torch.ones(64, 64, device=case.device)
    return told, float((x @ x).sum().item())


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_that_a_rank_does_not_join(gpus, size, kind):
    told = ([("late", True), ("ended", True)], 64.0**3)
    if size > 1:
        wanted = [told] * (size - 1) + [([], 64.0**3)]
        assert gpus.run(check_late, kind, ranks=size) == wanted


def check_disagreement(context):
    rows = [128] * context.size
    columns = 256 + 8 * (context.rank == context.size - 1)
    case = Case(context, "scatter", rows, columns, [64] * context.size, "CC", "float16")
    try:
        case.plan()
    except ValueError as error:
        return "on rank" in str(error)
    return context.size == 1


def test_ranks_that_mean_different_products(gpus, size):
    assert gpus.run(check_disagreement, ranks=size) == [True] * size


def check_misfits(context):
    device, rows = context.team.device, (128,) * context.size
    good = OperandLayout("C", 64)
    problems = [
        SplitKProduct(rows, 64, 64, "float16", good, good),
        SplitKProduct(rows, 64, 64, "float32", good, good),
        SplitKProduct(rows, 64, 60, "float16", OperandLayout("C", 60), good),
        SplitKProduct(rows, 0, 64, "bfloat16", good, good),
        SplitKProduct((3, 128), 64, 64, "bfloat16", OperandLayout("F", 136), good),
    ]
    return [problem.unsupported(device)[:12] for problem in problems]


def test_what_the_kernel_cannot_take(gpus, size):
    wanted = ["", "elements are", "A's rows are", "the result i", "columns of A"]
    assert gpus.run(check_misfits, ranks=size) == [wanted] * size
