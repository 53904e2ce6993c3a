"""The host's test bodies for matrix products, on ranks with GPUs.

The bodies run as they are with arrays in host memory, which are carried there and back; and with
arrays of CuPy and torch on the GPU in their place.
"""

from __future__ import annotations

import importlib
from contextlib import ExitStack
from unittest.mock import patch

import matmul_cases
import numpy as np
import pytest
from hypothesis import given
from visible import GPUS

from draws import drawn
from shardmath.arrays import library_named, library_of
from shardmath.context.context import require_context
from shardmath.handles.allocation import allocate_symmetric_memory

GPU_LIBRARY = {"numpy": "cupy", "torch": "torch"}
HostStored = matmul_cases.Stored


class OnGPU:
    """A library's arrays on this rank's GPU, made from NumPy arrays and read as NumPy arrays."""

    def __init__(self, name):
        self.name = name
        self._library = library_named(name)

    def from_host(self, host):
        order = "F" if host.flags.f_contiguous and not host.flags.c_contiguous else "C"
        device = f"cuda:{require_context().device_id}"
        array = self._library.empty(host.shape, library_of(host).spec(host).dtype, order, device)
        packed = np.asarray(host, order=order)
        if host.nbytes:
            from shardmath.cuda.driver import call

            call("cuMemcpyHtoD", self._library.pointer(array), packed.ctypes.data, packed.nbytes)
        return array

    def host_view(self, x):
        """A copy."""
        if library_of(x).spec(x).order == "F":
            return self.host_view(x.T).T
        if self.name == "cupy":
            return x.get()
        return library_of(x).host_view(x.cpu())


class GpuStored:
    """As `Stored` of the host's bodies, on the GPU."""

    def __init__(self, part, store, library_name):
        name = GPU_LIBRARY[library_name]
        self._library = library = OnGPU(name)
        self.part = part
        place, _, how = store.rpartition(" ")
        inner = how in ("strided", "reversed")
        shape = tuple(2 * n + 3 for n in part.shape) if inner else part.shape
        order = "C" if inner else how
        self._at = tuple(slice(1, 1 + 2 * n, 2) for n in part.shape) if inner else None
        host = np.empty(shape, part.dtype, order)
        host.view("u1" if order == "C" else part.dtype)[...] = 0x5A if order == "C" else 0
        host[self._at if inner else ...] = part
        self._whole = library.from_host(host)
        if place == "heap":
            package = importlib.import_module(name)
            dtype = part.dtype if name == "cupy" else getattr(package, part.dtype.name)
            whole = allocate_symmetric_memory(
                shape, package, dtype=dtype, axis_order=order, skip_symmetric_check=True
            )
            whole[...] = self._whole
            self._whole = whole
        self.array = self._whole[self._at] if inner else self._whole
        if how == "reversed":
            self.array = self.array[::-1, ::-1]
            self.array[...] = library.from_host(np.ascontiguousarray(part))

    @property
    def host(self):
        return self._library.host_view(self.array)

    def untouched_around(self):
        if self._at is None:
            return True
        rest = self._library.host_view(self._whole).copy()
        rest.view("u1").reshape(*rest.shape, rest.itemsize)[self._at] = 0x5A
        return set(rest.tobytes()) <= {0x5A}

    def untouched(self):
        return self.host.tobytes() == self.part.tobytes() and self.untouched_around()


def host_stored(part, store, library_name):
    """In ordinary host memory: NumPy arrays and CPU tensors are never on a GPU's heap."""
    return HostStored(part, store.removeprefix("heap "), library_name)


def body(context, panel_gemm_module, function, where, args):
    """Run a body of the host's with arrays in "host" or "gpu" memory."""
    torch = importlib.import_module("torch")
    torch.cuda.set_device(context.device_id)
    importlib.import_module("cupy").cuda.Device(context.device_id).use()
    bodies = importlib.import_module(panel_gemm_module)
    stored = host_stored if where == "host" else GpuStored
    with ExitStack() as patches:
        patches.enter_context(patch.object(matmul_cases, "Stored", stored))
        if where == "gpu" and hasattr(bodies, "library_named"):
            of_gpu = lambda name: OnGPU(GPU_LIBRARY[name])  # noqa: E731
            patches.enter_context(patch.object(bodies, "library_named", of_gpu))
        found = getattr(bodies, function)(context, *args)
    context.team.synchronize(0)
    return found if isinstance(found, (list, str, int, type(None))) else list(found)


SETTINGS = drawn(120)


@pytest.mark.parametrize("where", ["gpu", "host"])
def test_any_product(gpus, where):
    @SETTINGS
    @given(case=matmul_cases.cases(most=min(gpus.size, 6)))
    def check(case):
        args = [case.plain()]
        gpus.run(body, "test_matmul_any", "run_case", where, args, ranks=case.size)

    check()


@pytest.mark.parametrize("shape", [(33, 20, 700), (9, 8, 7)], ids=["deep", "small"])
@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_every_kind_of_strategy(gpus, size, shape, dtype):
    args = [shape, dtype]
    gpus.run(body, "test_matmul_behaviour", "every_strategy", "host", args, ranks=size)


BEHAVIOUR = [
    ("repeat", [0, 3]),
    ("repeat", [1, 3]),
    ("repeat", [3, 3]),
    ("replicas", []),
    ("spread", ["float64"]),
    ("spread", ["float32"]),
    ("spread", ["bfloat16"]),
    ("read_c_or_not", []),
    ("wide_results", []),
    ("memory_ends_on_one_rank", []),
    ("alternate", []),
    ("plain_views", []),
]


@pytest.mark.parametrize(("function", "args"), BEHAVIOUR)
def test_behaviour(gpus, size, function, args):
    if function == "memory_ends_on_one_rank" and size == 1:
        pytest.skip("there is no other rank")
    found = gpus.run(body, "test_matmul_behaviour", function, "host", args, ranks=size)
    if function == "repeat":
        assert all(set(counts) == {1} for counts in found)
    if function == "replicas":
        assert all(each == found[0] for each in found)


CLASS = ["see_contents_and_reset", "overwrite_c", "release_and_free", "plan_again", "explain"]


@pytest.mark.parametrize("function", CLASS)
def test_class(gpus, size, function):
    gpus.run(body, "test_matmul_class", function, "host", [], ranks=size)


@pytest.mark.parametrize("where", ["gpu", "host"])
@pytest.mark.parametrize("kind", ["rows", "columns", "blocks", "whole", "boxes"])
@pytest.mark.parametrize(
    ("library", "dtype"),
    [("numpy", "float64"), ("torch", "float32"), ("numpy", "float16"), ("torch", "bfloat16")],
)
def test_epilogs(gpus, size, where, kind, library, dtype):
    bodies = importlib.import_module("test_matmul_epilogs")
    args = [kind, library, dtype, bodies.EPILOGS]
    gpus.run(body, "test_matmul_epilogs", "run_epilogs", where, args, ranks=size)


@pytest.mark.parametrize("args", [[False, False], [True, False], [True, True]])
def test_allreduce(gpus, size, args):
    found = gpus.run(body, "test_matmul_epilogs", "run_allreduce", "host", args, ranks=size)
    assert found == [9] * size


def test_gradients_of_transposed_conjugates(gpus, size):
    gpus.run(body, "test_matmul_epilogs", "run_qualified_gradients", "host", [], ranks=size)


def mistakes(context, culprit, through):
    bodies = importlib.import_module("test_matmul_bad_input")
    without = {name: row for name, row in bodies.MISTAKES.items() if name != "a was freed"}
    with patch.multiple(bodies, MISTAKES=without):
        return bodies.make_mistakes(context, culprit, through)


@pytest.mark.parametrize("through", ["make", "plan"])
@pytest.mark.parametrize("culprit", [1, None])
def test_mistakes(gpus, culprit, through):
    ranks = min(gpus.size, 3)
    if ranks < 2:
        pytest.skip("a mistake on one rank of several")
    first, *others = gpus.run(mistakes, culprit, through, ranks=ranks)
    assert wrong_answers(first, culprit) == []
    assert all(other == first for other in others)


def wrong_answers(found, culprit):
    """Of what was raised for each mistake, what should not have been."""
    bodies = importlib.import_module("test_matmul_bad_input")
    wrong = []
    for name, (kind, text) in found.items():
        _, on_one, on_all = bodies.MISTAKES[name]
        wanted = on_one if culprit is not None else on_all
        if kind not in wanted.split(" or "):
            wrong.append((name, kind, text, wanted))
    return wrong


def large(context, dtype, kind, order):
    """Several intervals of k: (error in units of what is allowed, label) of each strategy."""
    import torch

    from shardmath.distribution import BlockCyclic, ProcessGrid, Replicated, Slab
    from shardmath.linalg.advanced import Matmul, matmul

    torch.cuda.set_device(context.device_id)
    size, rank = context.size, context.rank
    rows = 2 if size % 2 == 0 else 1
    blocks = BlockCyclic(
        ProcessGrid(shape=(rows, size // rows), layout=ProcessGrid.Layout.COL_MAJOR), (256, 256)
    )
    x, y = Slab.X, Slab.Y
    dists = {
        "cyclic": (blocks, blocks, blocks),
        "gather": (x, x, x),
        "columns": (y, y, y),
        "reduce": (y, x, x),
        "everywhere": (y, x, Replicated()),
    }[kind]
    torch.manual_seed(3)
    kind_ = getattr(torch, dtype)
    m, n, k = 1024, 1280, 9000
    a = torch.randn(m, k, device="cuda", dtype=torch.float64).to(kind_)
    b = torch.randn(k, n, device="cuda", dtype=torch.float64).to(kind_)
    want = a.double() @ b.double()
    from arrangements import part_of

    def mine(t, d):
        index = torch.arange(t.numel(), device="cpu").reshape(t.shape).numpy()
        chosen = torch.from_numpy(np.array(part_of(index, d, rank, size))).cuda()
        part = t.reshape(-1)[chosen.reshape(-1)].reshape(chosen.shape)
        return part.t().contiguous().t() if order == "F" else part.contiguous()

    operands, wrong = (mine(a, dists[0]), mine(b, dists[1])), []
    with context:
        with Matmul(*operands, distributions=dists) as mm:
            mm.plan()
            labels = [label for label, _ in matmul_cases.strategies_of(mm.explain())]
        for label in labels:
            for _ in range(3):
                d = matmul(*operands, distributions=dists, options={"strategy": label})
            unit = {"bfloat16": 2.0**-8, "float32": 2.0**-20}.get(dtype, 2.0**-48)
            error = (d.double() - mine(want, dists[2])).abs().max().item()
            if not error <= unit * 12 * k**0.5:  # a product sums 9000 terms one by one
                wrong.append((label, error))
    return wrong


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64", "float32"])
@pytest.mark.parametrize("kind", ["cyclic", "gather", "columns", "reduce", "everywhere"])
def test_many_intervals(gpus, size, kind, dtype, order):
    assert gpus.run(large, dtype, kind, order, ranks=size) == [[]] * size


def panel_gemm(context, dtype, order, shape, block):
    """Products whose factors come while they run: errors, and what has been run so."""
    import torch

    from arrangements import part_of
    from shardmath.distribution import BlockCyclic, ProcessGrid
    from shardmath.linalg.advanced import matmul
    from shardmath.operators.matmul.gpu import panel_gemm as panel_gemm_module

    torch.cuda.set_device(context.device_id)
    size, rank = context.size, context.rank
    rows = 2 if size % 2 == 0 else 1
    grid = ProcessGrid(shape=(rows, size // rows), layout=ProcessGrid.Layout.COL_MAJOR)
    blocks = BlockCyclic(grid, (block, block))
    m, n, k = shape
    generator = torch.Generator("cuda").manual_seed(5)
    kind = getattr(torch, dtype)
    a = torch.randn(m, k, device="cuda", generator=generator).to(kind)
    b = torch.randn(k, n, device="cuda", generator=generator).to(kind)
    want = a.double() @ b.double()

    def mine(x):
        index = np.arange(x.numel()).reshape(x.shape)
        chosen = torch.from_numpy(np.array(part_of(index, blocks, rank, size))).cuda()
        part = x.reshape(-1)[chosen.reshape(-1)].reshape(chosen.shape)
        if order == "skewed":  # boxes of it cannot be loaded where it lies
            wider = torch.full((part.shape[0], part.shape[1] + 3), torch.nan, device="cuda")
            wider = wider.to(part.dtype)
            wider[:, 1:-2] = part
            return wider[:, 1:-2]
        return part.t().contiguous().t() if order == "F" else part.contiguous()

    ran = []
    original = panel_gemm_module.PanelGemm.run

    def counted(self, *args):
        ran.append(original(self, *args))
        return ran[-1]

    x, y, wrong, first = mine(a), mine(b), [], None
    with (
        context,
        patch.multiple(panel_gemm_module, _LEAST_SECONDS=0.0, _LEAST_WIDTH=1, _LEAST_WAVE=0.0),
        patch.object(panel_gemm_module.PanelGemm, "run", counted),
    ):
        for turn in range(3):
            if turn:
                x.mul_(2)
            d = matmul(x, y, distributions=[blocks] * 3, options={"strategy": "stationary c"})
            context.team.synchronize(torch.cuda.current_stream().cuda_stream)
            exact = 2**turn * mine(want)
            unit = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float64": 0.0}[dtype]
            error = ((d.double() - exact).abs() - unit * exact.abs()).flatten()
            most = (2.0**-46 if dtype == "float64" else 2.0**-18) * k * 2**turn
            if error.numel() and not error.max() <= most:
                wrong.append((turn, error.max().item()))
            first = first if turn else d.clone()
            normal = first.abs() >= torch.finfo(d.dtype).tiny  # others are rounded otherwise
            if not torch.equal(d[normal], first[normal] * 2**turn):  # in the same order each time
                wrong.append((turn, "other sums"))
    return [wrong, ran]


@pytest.mark.parametrize("order", ["C", "F", "skewed"])
@pytest.mark.parametrize(
    ("dtype", "shape", "block"),
    [
        ("bfloat16", (2048, 2048, 2048), 256),
        ("float16", (1500, 2300, 3000), 256),
        ("bfloat16", (4096, 3072, 5000), 512),
        ("float64", (2048, 2048, 2048), 256),
        ("float64", (1500, 2300, 3001), 256),
        ("float64", (700, 500, 900), 100),
        ("float64", (300, 4096, 2048), 512),
        ("float64", (5000, 1100, 4000), 512),  # steps of the last tiles are shared out
        ("bfloat16", (5000, 2100, 8000), 512),
    ],
)
def test_products_on_arrival(gpus, size, dtype, shape, block, order):
    found = gpus.run(panel_gemm, dtype, order, shape, block, ranks=size)
    assert [wrong for wrong, _ in found] == [[]] * size
    in_place = order == "skewed" and size < 4  # a factor is here, and cannot be loaded
    long = block >= 256 or size < 4  # of 4 ranks' rows the pieces are too short for copy engines
    apart = size <= GPUS  # or else it is not run
    if size > 1 and apart and long and not in_place and not any(extent % block for extent in shape):
        assert all(ran == [True] * 3 for _, ran in found), found


def fused(context, dtype, order, shape, kind):
    """Products by one kernel that moves data too: errors, and how many ran so."""
    import torch

    from arrangements import part_of
    from shardmath.distribution import Replicated, Slab
    from shardmath.linalg.advanced import matmul
    from shardmath.operators.matmul.gpu.fused import FusedProduct

    dists = {
        "all-gather, rows": (Slab.X, Slab.Y, Slab.X),
        "all-gather, columns": (Slab.X, Slab.Y, Slab.Y),
        "reduce-scatter": (Slab.Y, Slab.X, Slab.X if order == "C" else Slab.Y),
        "all-reduce": (Slab.Y, Slab.X, Replicated()),
    }[kind]

    torch.cuda.set_device(context.device_id)
    size, rank = context.size, context.rank
    m, n, k = shape
    native = getattr(torch, dtype)
    generator = torch.Generator("cuda").manual_seed(6)
    a = torch.randn(m, k, device="cuda", generator=generator).to(native)
    b = torch.randn(k, n, device="cuda", generator=generator).to(native)
    want = a.double() @ b.double()

    def mine(x, d):
        index = np.arange(x.numel()).reshape(x.shape)
        chosen = torch.from_numpy(np.array(part_of(index, d, rank, size))).cuda()
        part = x.reshape(-1)[chosen.reshape(-1)].reshape(chosen.shape)
        return part.t().contiguous().t() if order == "F" else part.contiguous()

    ran, original = [], FusedProduct.bind

    def counted(self, *args):
        run = original(self, *args)
        return lambda stream: ran.append(run(stream))

    x, y, wrong = mine(a, dists[0]), mine(b, dists[1]), []
    named = {"distributions": dists, "options": {"strategy": kind.partition(",")[0]}}
    with context, patch.object(FusedProduct, "bind", counted):
        for turn in range(3):
            if turn:
                x.mul_(2)
                y.mul_(0.5)
            d = matmul(x, y, **named)
            exact, unit = mine(want, dists[2]), {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
            parts = unit * k**0.5 * 4 if "reduce" in kind else 2.0**-18 * k  # parts are rounded too
            error = ((d.double() - exact).abs() - unit * exact.abs()).flatten()
            if error.numel() and not error.max() <= parts:
                wrong.append((turn, error.max().item()))
    return [wrong, len(ran)]


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize(
    "kind", ["all-gather, rows", "all-gather, columns", "reduce-scatter", "all-reduce"]
)
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("bfloat16", (2048, 2048, 1024)), ("float16", (1504, 1000, 264)), ("bfloat16", (70, 90, 33))],
)
def test_one_kernel(gpus, size, dtype, shape, kind, order):
    if size == 1:
        pytest.skip("one rank moves nothing")
    found = gpus.run(fused, dtype, order, shape, kind, ranks=size)
    assert [wrong for wrong, _ in found] == [[]] * size
    counts = {count for _, count in found}
    assert counts == ({3} if shape[2] % 8 == 0 and shape[0] > 2000 else counts)


def tuned(context, kind, inplace):
    """What `explain` says after autotuning, whether results are right and operands as they were,
    and what is chosen.
    """
    import torch

    from arrangements import part_of
    from shardmath.distribution import Replicated, Slab
    from shardmath.linalg.advanced import Matmul
    from shardmath.operators.matmul.gpu.performing import rank_plan_of

    torch.cuda.set_device(context.device_id)
    dists = {
        "rows": (Slab.X, Replicated(), Slab.X),
        "gathered": (Slab.X, Slab.X, Slab.X),
        "added": (Slab.Y, Slab.X, Replicated()),
    }[kind]
    m, n, k = 256, 320, 192
    generator = torch.Generator("cuda").manual_seed(8)
    a, b, c = (
        torch.randn(shape, device="cuda", generator=generator) for shape in ((m, k), (k, n), (m, n))
    )
    want = (a.double() @ b.double() + 2 * c.double()).cpu().numpy()
    a, b, c = (
        torch.from_numpy(np.array(part_of(x.cpu().numpy(), d, context.rank, context.size))).cuda()
        for x, d in zip((a, b, c), dists, strict=True)
    )
    before = [x.clone() for x in (a, b, c)]
    with context, Matmul(a, b, c, beta=2, distributions=dists, options={"inplace": inplace}) as mm:
        mm.plan(autotune=True)
        same = all(bool((x == y).all()) for x, y in zip((a, b, c), before, strict=True))
        lines = [line for line in mm.explain().splitlines() if "autotuned" in line]
        chosen = dict(rank_plan_of(context, mm._plan).algorithms.chosen)
        d = mm.execute()
        off = abs(d.double().cpu().numpy() - part_of(want, dists[2], context.rank, context.size))
        mm.plan()
        plain = "autotuned" in mm.explain()
    said = bool(lines) and all("of" in line for line in lines)
    return [same, said, float(off.max(initial=0)) < 1e-3, plain, sorted(chosen.items())]


@pytest.mark.parametrize("inplace", [False, True], ids=["", "in place"])
@pytest.mark.parametrize("kind", ["rows", "gathered", "added"])
def test_autotune(gpus, size, kind, inplace):
    found = gpus.run(tuned, kind, inplace, ranks=size)
    assert [row[:4] for row in found] == [[True, True, True, False]] * size
    assert all(row[4] == found[0][4] for row in found), "ranks with equal products agree"
    assert found[0][4], "a product was timed"


def graphs(context, library):
    """A captured `execute` replays on new contents; two operators on two streams at once."""
    from shardmath.distribution import Slab
    from shardmath.linalg.advanced import Matmul

    torch = importlib.import_module("torch")
    torch.cuda.set_device(context.device_id)
    size = context.size
    m, n, k = 64 * size, 96, 32 * size
    wrong = []
    with context:
        made = []
        for dists in ((Slab.X, Slab.X, Slab.X), (Slab.Y, Slab.X, Slab.X)):
            a = torch.ones(dists[0].shape(context.rank, (m, k)), device="cuda")
            b = torch.ones(dists[1].shape(context.rank, (k, n)), device="cuda")
            mm = Matmul(a, b, distributions=dists)
            mm.plan()
            mm.execute()  # compiles, and takes memory
            made.append((mm, a, b))
        torch.cuda.synchronize()
        context.barrier()
        for mm, a, other in made:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                d = mm.execute()
            for turn in range(4):
                a.fill_(turn + 1)
                other.fill_(2)
                graph.replay()
                torch.cuda.synchronize()
                if not (d == 2 * k * (turn + 1)).all():
                    wrong.append(("replay", turn, d.flatten()[:3].tolist()))
        context.barrier()
        streams = [torch.cuda.Stream() for _ in made]
        for turn in range(5):
            results = []
            for (mm, a, _), stream in zip(made, streams, strict=True):
                with torch.cuda.stream(stream):
                    a.fill_(turn)
                    results.append(mm.execute())
            torch.cuda.synchronize()
            if not all((d == 2 * k * turn).all() for d in results):
                wrong.append(("streams", turn))
    return wrong


def test_graphs_and_streams(gpus, size):
    assert gpus.run(graphs, "torch", ranks=size) == [[]] * size
