"""Products whose rows come from all ranks, against float64."""

from __future__ import annotations

import pytest

from shardmath.operators.matmul.gpu.all_gather import AllGatherGemm
from shardmath.operators.matmul.gpu.local_product import OperandLayout
from shardmath.operators.matmul.gpu.row_split import RowSplitProduct, Tiling

EPSILON = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
SENTINEL = 7.0


class Case:
    """One product with its operands on this rank, and how its result must look."""

    def __init__(self, context, rows, columns, depth, **layout):
        import torch

        torch.cuda.set_device(context.device_id)
        self.context, self.torch = context, torch
        self.rows = [rows[rank % len(rows)] for rank in range(context.size)]
        self.columns = columns[context.rank % len(columns)]
        self.depth, self.dtype = depth, layout.get("dtype", "bfloat16")
        self.pad, self.wide = layout.get("pad", 0), layout.get("wide", 0)
        orders = layout.get("a", "C"), layout.get("b", "F")
        pitches = [
            self._pitch(orders[0], (self.rows[context.rank], depth)),
            self._pitch(orders[1], (depth, self.columns)),
        ]
        self.order = layout.get("out", "C")
        self.problem = RowSplitProduct(
            tuple(self.rows),
            self.columns,
            depth,
            self.dtype,
            *(OperandLayout(order, pitch) for order, pitch in zip(orders, pitches, strict=True)),
            self.order,
        )

    def _pitch(self, order, shape):
        return -(-shape[order == "C"] // 8) * 8 + self.pad

    def make(self, shape, factor, seed):
        """Values that every rank can make: (what is multiplied, the memory it lies in)."""
        torch = self.torch
        generator = torch.Generator("cuda").manual_seed(seed)
        x = torch.randn(shape, device="cuda", generator=generator).to(getattr(torch, self.dtype))
        lines = shape if factor.order == "C" else shape[::-1]
        memory = torch.full((lines[0] * factor.pitch + 8,), torch.nan, device="cuda", dtype=x.dtype)
        inside = memory.as_strided(lines, (factor.pitch, 1))
        inside.copy_(x if factor.order == "C" else x.T)
        return x, memory

    def operands(self, seed):
        """A and B of this rank, and the product of all rows in float64."""
        torch, rank = self.torch, self.context.rank
        b, b_memory = self.make((self.depth, self.columns), self.problem.b, 1000 * seed + rank)
        parts = []
        for src, rows in enumerate(self.rows):
            factor = self.problem.a if src == rank else OperandLayout("C", self.depth)
            part, memory = self.make((rows, self.depth), factor, 777 * seed + 31 * src + 5)
            parts.append(part)
            if src == rank:
                a_memory = memory
        whole = torch.cat(parts).double()
        scale = self.depth**0.5 + 1e-30
        return a_memory, b_memory, whole @ b.double(), scale

    def result(self):
        """PlanMemory for it, as rows or as columns; sentinels lie behind each, and at the end."""
        torch, lines = self.torch, (sum(self.rows), self.columns)
        lines = lines if self.order == "C" else lines[::-1]
        shape = (lines[0] + 1, lines[1] + self.wide)
        return torch.full(shape, SENTINEL, device="cuda", dtype=getattr(torch, self.dtype))

    def wrong(self, out, wanted, scale):
        """What is wrong, in words, or ""."""
        torch, height = self.torch, sum(self.rows)
        if self.order == "F":
            wide = self.wide
            beyond, out = out[-1:], out[:-1].T
            beyond = torch.cat([beyond.flatten(), out[height:].flatten()])
            if not (beyond == SENTINEL).all():
                return f"written beyond the result: {self.problem} {wide}"
            out = torch.cat([out[:height], torch.full_like(out[:1], SENTINEL)])
        if not (out[height:] == SENTINEL).all() or not (out[:, self.columns :] == SENTINEL).all():
            return f"written beyond the result: {self.problem}"
        found = out[:height, : self.columns].double()
        if not found.numel():
            return ""
        error = (found - wanted).abs()
        limit = EPSILON[self.dtype] * (wanted.abs() + 0.05 * scale)
        bad = ~(error <= limit)
        if bad.any():
            at = torch.nonzero(bad)[0].tolist()
            return (
                f"{int(bad.sum())} of {bad.numel()} wrong, the first at {at}: "
                f"{float(found[tuple(at)])} for {float(wanted[tuple(at)])}: {self.problem}"
            )
        return ""


def check(context, rows, columns, depth, layout, tiling=None):
    case = Case(context, rows, columns, depth, **layout)
    plan = AllGatherGemm.create(context, case.problem, tiling and Tiling(*tiling))
    stream = case.torch.cuda.current_stream().cuda_stream
    wrong, jobs = [], []
    for seed in (1, 2, 3):
        a, b, wanted, scale = case.operands(seed)
        jobs.append((a, b, wanted, scale, case.result()))
    case.torch.cuda.synchronize()
    for a, b, _, _, out in jobs:  # one after another, without a pause
        plan.launch(a.data_ptr(), b.data_ptr(), out.data_ptr(), stream, pitch=out.stride(0))
    context.team.synchronize(stream)
    for _, _, wanted, scale, out in jobs:
        problem = case.wrong(out, wanted, scale)
        wrong += [problem] if problem else []
    plan.free()
    context.barrier()
    return wrong


# rows of each rank, columns of each rank, depth, layout
CASES = {
    "even": ([256], [512], 512, {}),
    "float16": ([256], [512], 512, {"dtype": "float16"}),
    "B by rows": ([256], [512], 512, {"b": "C"}),
    "A by columns": ([256], [512], 512, {"a": "F"}),
    "both transposed": ([256], [264], 512, {"a": "F", "b": "C"}),
    "rows differ": ([300, 1, 129, 64, 0, 77, 256, 511], [264], 200, {}),
    "columns differ": ([130], [8, 0, 264, 500], 136, {"wide": 4}),
    "one row each": ([1], [8], 8, {}),
    "some have none": ([0, 0, 70], [256], 128, {"a": "F", "pad": 8}),
    "nobody has any": ([0], [256], 128, {}),
    "no depth": ([100], [64], 0, {}),
    "odd everything": ([77, 13], [101], 83, {"wide": 3}),
    "odd, transposed": ([77, 13], [101], 83, {"wide": 2, "a": "F", "b": "C", "pad": 16}),
    "result by columns": ([256, 128], [384], 512, {"out": "F"}),
    "all by columns": ([200, 96, 0], [200], 320, {"a": "F", "out": "F", "wide": 8}),
    "result by odd columns": ([77, 13], [101], 83, {"out": "F", "wide": 3}),
    "deep": ([128], [128], 5000, {"b": "C", "pad": 8}),
    "long": ([1536], [1000], 264, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_float64(gpus, size, name):
    assert gpus.run(check, *CASES[name], ranks=size) == [[]] * size


@pytest.mark.parametrize("width", [256, 224, 192, 160, 128])
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("b", ["C", "F"])
def test_every_tiling(gpus, width, cluster, b):
    size = min(2, gpus.size)
    tiling = (width, cluster, 4, 6)
    found = gpus.run(check, [390, 260], [700], 520, {"b": b}, tiling, ranks=size)
    assert found == [[]] * size


@pytest.mark.parametrize(
    ("rows", "depth", "layout"),
    [
        ([200], 0, {}),
        ([200], 1000, {}),
        ([0, 300], 257, {}),
        ([0, 300], 1000, {"a": "F", "pad": 8}),
        ([130, 0, 0, 260], 136, {"a": "F"}),
        ([1200], 64, {"pad": 8}),
    ],
)
@pytest.mark.parametrize("early", [1, 2, 9])
def test_rows_in_pieces(gpus, size, rows, depth, layout, early):
    tiling = (128, 2, 4, 6, early)
    assert gpus.run(check, rows, [264], depth, layout, tiling, ranks=size) == [[]] * size


def test_ways_that_differ(gpus, size):
    """Each rank hands its rows on as it likes: peers see only that they have come."""
    tilings = [(128, 2, 4, 6, 2), (256, 1, 4, 5, 1), (192, 2, 4, 2, 0)]
    assert gpus.run(check_own, [300, 129], [264], 640, tilings, ranks=size) == [[]] * size


def check_own(context, rows, columns, depth, tilings):
    return check(context, rows, columns, depth, {}, tilings[context.rank % len(tilings)])


def check_graph(context, replays, tiling):
    """A graph of several launches, replayed; eager launches between replays."""
    case = Case(context, [200, 300], [264], 320)
    torch = case.torch
    plan = AllGatherGemm.create(context, case.problem, Tiling(*tiling))
    a, b, _, _ = case.operands(1)
    out = [case.result() for _ in range(3)]

    def launch(into):
        stream = torch.cuda.current_stream().cuda_stream
        plan.launch(a.data_ptr(), b.data_ptr(), into.data_ptr(), stream)

    launch(out[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for into in out[:2]:
            launch(into)
    wrong = []
    for replay in range(replays):
        for into in out:
            into.fill_(SENTINEL)
        values, b_values, wanted, scale = case.operands(replay + 2)
        a.copy_(values)
        b.copy_(b_values)
        graph.replay()
        launch(out[2])
        context.team.synchronize(0)
        torch.cuda.synchronize()
        wrong += [text for into in out if (text := case.wrong(into, wanted, scale))]
    context.team.check()
    context.barrier()
    return wrong


@pytest.mark.parametrize("early", [0, 1])
def test_graphs(gpus, size, early):
    assert gpus.run(check_graph, 6, (128, 2, 4, 6, early), ranks=size) == [[]] * size


def check_two_plans(context, rounds, rows, columns):
    """Two plans on two streams, launched in turn; both take operands from their own stream."""
    import torch

    torch.cuda.set_device(context.device_id)
    cases = [Case(context, rows, columns, 256), Case(context, rows, columns[::-1], 512, b="C")]
    plans = [AllGatherGemm.create(context, case.problem) for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    jobs = []
    for number in range(rounds):
        for case in cases:
            jobs.append((case, case.operands(number), case.result()))
    torch.cuda.synchronize()
    for number, (_, (a, b, _, _), out) in enumerate(jobs):
        stream = streams[number % 2].cuda_stream
        plans[number % 2].launch(a.data_ptr(), b.data_ptr(), out.data_ptr(), stream)
    torch.cuda.synchronize()
    context.team.check()
    context.barrier()
    return [
        text
        for case, (_, _, wanted, scale), out in jobs
        if (text := case.wrong(out, wanted, scale))
    ]


@pytest.mark.parametrize(
    ("rounds", "rows", "columns"),
    [(5, [260, 100], [512, 136]), (20, [1024, 800], [3584])],  # the second fill the GPU
)
def test_two_plans_on_two_streams(gpus, size, rounds, rows, columns):
    found = gpus.run(check_two_plans, rounds, rows, columns, ranks=size)
    assert found == [[]] * size


def check_absent(context):
    """A rank that does not launch: the others say so in time, and go on with it afterwards."""
    from shardmath.errors import OpTimeout

    case = Case(context, [256], [256], 256)
    plan = AllGatherGemm.create(context, case.problem, Tiling(128, 2, 4, 6, 1))
    a, b, wanted, scale = case.operands(1)
    stream = case.torch.cuda.current_stream().cuda_stream
    late = context.size - 1
    usual, context.team.timeout = context.team.timeout, 0.5
    said = ""
    out = case.result()
    if context.rank != late:
        plan.launch(a.data_ptr(), b.data_ptr(), out.data_ptr(), stream)
        try:
            context.team.synchronize(stream)
        except OpTimeout as error:
            said = str(error)
    context.team.timeout = usual
    context.barrier()
    plan.free()
    context.barrier()
    plan = AllGatherGemm.create(context, case.problem)
    out = case.result()
    plan.launch(a.data_ptr(), b.data_ptr(), out.data_ptr(), stream)
    context.team.synchronize(stream)
    context.barrier()
    return [context.rank == late or f"rank {late}" in said, case.wrong(out, wanted, scale)]


def test_a_rank_that_does_not_come(gpus, size):
    if size > 1:
        assert gpus.run(check_absent, ranks=size) == [[True, ""]] * size


def check_disagreement(context):
    case = Case(context, [64], [64], 64 + 8 * context.rank)
    try:
        AllGatherGemm.create(context, case.problem)
    except ValueError as error:
        return "rank 1" in str(error)
    return False


def test_disagreement_is_everybodys(gpus):
    if gpus.size > 1:
        assert gpus.run(check_disagreement, ranks=2) == [True] * 2
