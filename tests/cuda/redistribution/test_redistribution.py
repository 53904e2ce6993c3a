"""The host's test bodies for redistribution, on ranks with GPUs, and what only GPUs have.

The bodies run as they are with arrays in host memory, which come back as they came; and, their way
of placing arrays replaced, with arrays of CuPy and torch on the GPU.
"""

from __future__ import annotations

import importlib
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import redistribution_cases as cases
from hypothesis import given
from visible import GPUS, RANKS, gpu_of

from arrangements import part_of
from draws import drawn
from heap_use import settled_use
from mistakes import heard
from shardmath.arrays import library_named, library_of
from shardmath.context.context import DistributedContext
from shardmath.distribution import BlockCyclic, ProcessGrid, Redistribute, Slab, redistribute
from shardmath.errors import HeapExhausted
from shardmath.handles.allocation import (
    block_of,
    empty_on_heap,
    free_symmetric_memory,
    is_symmetric,
)
from shardmath.operators.lanes import Lane
from shardmath.symmetric.heap import Heap

ORDINARY = ("C", "F", "strided", "reversed")


# -- the host's bodies -----------------------------------------------------------------------------


class OnGpu:
    """A library whose arrays are on this rank's GPU, and can be looked at from the host."""

    def __init__(self, name, context):
        self.name, self.context = name, context
        self.library = library_named(name)
        self.device = f"cuda:{context.device_id}"

    def host_view(self, x):
        return library_named("torch").host_view(x.cpu()) if self.name == "torch" else x.get()

    def placed(self, part, store):
        how = store.removeprefix("heap ")
        inner, whole = cases.stored(part, how, np.empty)
        base = np.asarray(inner if whole is None else whole)
        order = "F" if how == "F" else "C"
        if store.startswith("heap"):
            there = empty_on_heap(self.context, self.library, base.shape, base.dtype, order)
        else:
            there = self.library.empty(base.shape, base.dtype, order, self.device)
        there[...] = self.uploaded(base)
        if whole is None:
            return there, Shown(self, there), None
        user = there[tuple(slice(1, 1 + 2 * n, 2) for n in part.shape)]
        if how == "reversed":
            user = user[(slice(None, None, -1),) * part.ndim]
        return user, Shown(self, user), Shown(self, there)

    def uploaded(self, host):
        host = np.ascontiguousarray(host)
        if self.name == "torch":
            return library_named("torch").from_host(np.array(host)).to(self.device)
        return importlib.import_module("cupy").asarray(host)


class Shown:
    """The elements of an array, as they are when they are asked for."""

    def __init__(self, library, array):
        self.library, self.array = library, array

    def now(self):
        return self.library.host_view(self.array)

    def tobytes(self):
        return self.now().tobytes()


def untouched(inner, whole, plain=cases.untouched):
    now = [x.now() if isinstance(x, Shown) else x for x in (inner, whole)]
    return plain(*now)


def in_place_of(bodies, name, context):
    """What replaces names of the module of bodies, for arrays of that library on the GPU."""
    library = OnGpu(name, context)
    made = {
        "library_named": lambda _: library,
        "placed": lambda _context, _library, part, store: library.placed(part, store),
    }
    if name == "cupy":
        cupy = importlib.import_module("cupy")
        made["np"] = SimpleNamespace(
            array=lambda x: library.uploaded(np.array(x)),
            zeros=np.zeros,
            zeros_like=lambda x: cupy.zeros(x.shape, x.dtype),
        )
    return patch.multiple(bodies, **{key: made[key] for key in made if hasattr(bodies, key)})


def select(context, name):
    """Make this rank's GPU the library's current one."""
    if name == "torch":
        importlib.import_module("torch").cuda.set_device(context.device_id)
    else:
        importlib.import_module("cupy").cuda.Device(context.device_id).use()


@contextmanager
def settled(context):
    """Memory that was dropped is back at the next barrier, as on cores: GPUs have finished first.

    The first of two barriers sets its fences, and the second carries its marks.
    """

    def barrier(context):
        for _ in range(2):
            context.team.device.synchronize()
            plain(context)

    def used(heap):
        plain_used.fget(heap)
        context.team.device.synchronize()
        return plain_used.fget(heap)

    plain, plain_used = DistributedContext.barrier, Heap.used
    with (
        patch.object(DistributedContext, "barrier", barrier),
        patch.object(Heap, "used", property(used)),
    ):
        yield


def check(context, body, name, args):
    """A body of test_redistribute_any, with arrays of that library on the GPU."""
    bodies = importlib.import_module("test_redistribute_any")
    select(context, name)
    with (
        in_place_of(bodies, name, context),
        patch.object(cases, "untouched", untouched),
        settled(context),
    ):
        context.barrier()
        found = getattr(bodies, body)(context, *args)
    context.team.synchronize(0)
    context.barrier()
    return found


@drawn(80, shrunk=False)
@given(case=cases.cases(most=max(RANKS, 1), libraries=("cupy", "torch")))
def test_any_distribution_to_any_other_on_gpus(gpus, case):
    gpus.run(check, "run_case", case[4], [case], ranks=case[0])


def check_host(context, module, body, args):
    return getattr(importlib.import_module(module), body)(context, *args)


@drawn(40, shrunk=False)
@given(case=cases.cases(most=max(RANKS, 1), stores=ORDINARY))
def test_any_distribution_to_any_other_from_host_memory(gpus, case):
    gpus.run(check_host, "test_redistribute_any", "run_case", [case], ranks=case[0])


@drawn(10, shrunk=False)
@given(case=cases.cases(most=max(RANKS, 1)))
def test_a_plan_serves_any_operand_of_its_shape(gpus, case):
    assert all(gpus.run(check, "keep_planned", "cupy", [case], ranks=case[0]))


@pytest.mark.parametrize("store", ["C", "heap C"])
def test_a_call_may_become_another_than_the_last_that_looked_like_it(gpus, size, store):
    assert all(gpus.run(check, "expect_otherwise", "cupy", [store], ranks=size))


@pytest.mark.parametrize("store", cases.STORES)
def test_a_result_keeps_the_order_of_the_operand(gpus, size, store):
    column_major = store.endswith("F")
    flags = gpus.run(check, "keep_order", "cupy", [store, Slab.Z.encode()], ranks=size)
    if size > 1:
        assert flags == [(not column_major, column_major)] * size


def test_objects_and_groups_do_not_disturb_each_other(gpus, size):
    found = gpus.run(check_host, "test_redistribute_any", "interleave", [], ranks=size)
    assert found == [len(range(rank % 2, size, 2)) for rank in range(size)]


@pytest.mark.parametrize("store", ["heap C", "C", "heap strided"])
def test_operands_may_be_overwritten_after_each_execution(gpus, size, store):
    assert gpus.run(check, "overwrite", "cupy", [store, 100], ranks=size) == [0] * size


def test_operands_in_host_memory_may_be_overwritten(gpus, size):
    args = ["C", 20]
    found = gpus.run(check_host, "test_redistribute_any", "overwrite", args, ranks=size)
    assert found == [0] * size


@pytest.mark.skipif(RANKS < 2, reason="a body for two ranks")
def test_reshape(gpus):
    for name in ("cupy", None):
        given = (
            ("reshape_boxes", name, []) if name else ("test_redistribute_any", "reshape_boxes", [])
        )
        body = check if name else check_host
        assert gpus.run(body, *given, ranks=2) == ["<Reshape"] * 2


# -- mistakes --------------------------------------------------------------------------------------


def freed_on_gpu(context, name="cupy", shape=(3, 7)):
    array = empty_on_heap(context, library_named(name), shape, "float64")
    free_symmetric_memory(array)
    return array


def check_mistakes(context, names, who):
    bodies = importlib.import_module("test_redistribute_mistakes")
    select(context, "cupy")
    with context, patch.object(bodies, "freed", lambda: freed_on_gpu(context)):
        return bodies.mistaken(context, names, who)


@pytest.mark.skipif(RANKS < 3, reason="the table is for three ranks")
@pytest.mark.parametrize("who", ["rank 1", "all"])
def test_mistakes_with_arrays_in_host_memory(gpus, who):
    bodies = importlib.import_module("test_redistribute_mistakes")
    # A freed array is one of the GPU's here; as `out`, it is of another library besides.
    names = [name for name, whose in bodies.TABLE if whose == who and name != "out freed"]
    every = gpus.run(check_mistakes, names, who, ranks=3)
    table = {**bodies.MISTAKES, **bodies.DIFFERENCES, **bodies.PARTITIONS}
    misses = [
        (case, [rank[case] for rank in every])
        for case, said in every[0].items()
        if not all(rank[case] == said for rank in every)
        or said[0] != table[case.rpartition(",")[0]][1].__name__
        or table[case.rpartition(",")[0]][2] not in said[1]
    ]
    assert not misses, "\n".join(map(str, misses))


@pytest.mark.skipif(RANKS < 3, reason="the table is for three ranks")
@pytest.mark.parametrize("who", ["rank 1", "all"])
def test_mistakes_in_the_life_of_an_object(gpus, who):
    bodies = importlib.import_module("test_redistribute_mistakes")
    for name, (_, kind, words) in bodies.LIFE.items():
        args = ["test_redistribute_mistakes", "lived", [name, who]]
        said = gpus.run(check_host, *args, ranks=3)
        assert all(each == said[0] for each in said), name
        assert said[0][0] == kind, name
        assert words in said[0][1], name


def slab(context, library, target=Slab.X, base=0, heap=False):
    """This rank's part of a matrix of 12 x 8 numbers, on its GPU."""
    gpu = OnGpu(library, context)
    whole = np.arange(96.0).reshape(12, 8) + base
    part = part_of(whole, target, context.rank, context.size)
    return gpu.placed(part, "heap C" if heap else "C")[0]


def check_gpu_mistakes(context, library):
    """Each mistake on the last rank is an error on all, and what follows is right."""
    select(context, library)
    rank, size = context.rank, context.size
    last, other = rank == size - 1, f"cuda:{gpu_of(rank + 1)}"
    good = slab(context, library)
    lib = library_named(library)
    module = importlib.import_module(library)
    with context:
        elsewhere = lib.empty(good.shape, "float64", "C", other if GPUS > 1 else "cuda:0")
        blank = slab(context, library, Slab.Y)
        away = lib.empty(blank.shape, "float64", "C", other if GPUS > 1 else "cuda:0")
        host = (
            np.zeros(good.shape) if library == "cupy" else module.zeros(tuple(good.shape)).double()
        )
        table = {
            "freed": ({"operand": freed_on_gpu(context, library, good.shape)}, "RuntimeError"),
            "out freed": ({"out": freed_on_gpu(context, library, blank.shape)}, "RuntimeError"),
            "out in host memory": ({"out": np.zeros(blank.shape)}, "ValueError"),
            "out the operand": ({"out": good, "target": Slab.X}, "ValueError"),
            "out too small": ({"out": blank[:-1]}, "ValueError"),
            "stream a word": ({"stream": "default"}, "TypeError"),
        }
        if GPUS > 1:
            table["another GPU's"] = ({"operand": elsewhere}, "ValueError")
            table["out another GPU's"] = ({"out": away}, "ValueError")
            stream = module.cuda.Stream(device=other) if library == "torch" else None
            if stream is not None:
                table["stream another GPU's"] = ({"stream": stream}, "ValueError")
        if size > 1:
            table["one in host memory"] = ({"operand": host}, "ValueError")
        found = {}
        for name, (wrong, want) in table.items():
            given = {"operand": good, "target": Slab.Y, "out": None}
            if name == "out the operand":
                given["target"] = Slab.X
            if last:
                given.update(wrong)
            operand, target = given.pop("operand"), given.pop("target")
            said, _ = heard(partial(redistribute, operand, Slab.X, target, **given))
            if said != want:
                found[name] = said
            got = redistribute(good, Slab.X, Slab.Y)
            assert (
                OnGpu(library, context).host_view(got).tobytes()
                == np.ascontiguousarray(
                    part_of(np.arange(96.0).reshape(12, 8), Slab.Y, rank, size)
                ).tobytes()
            )
        context.team.synchronize(0)
    return found


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_mistakes_with_arrays_on_gpus(gpus, size, library):
    assert gpus.run(check_gpu_mistakes, library, ranks=size) == [{}] * size


def check_want_of_memory(context):
    """The last rank's heap is full: HeapExhausted on all, and every heap as it was."""
    select(context, "cupy")
    operand = slab(context, "cupy", heap=True)
    ordinary = slab(context, "cupy")
    told = []
    with context:
        plan = Redistribute(ordinary, Slab.X, Slab.Y)
        plan.plan()
        Lane.release(context)  # what earlier calls have left would do
        before = settled_use(context)

        def full(nbytes):
            raise HeapExhausted("the heap is full", need=nbytes, have=0)

        for call in (
            lambda: redistribute(operand, Slab.X, Slab.Y),
            lambda: redistribute(ordinary, Slab.X, Slab.Y),
            plan.execute,
        ):
            with patch.object(
                context.heap,
                "allocate",
                full if context.rank == context.size - 1 else context.heap.allocate,
            ):
                try:
                    call()
                    told.append("nothing")
                except HeapExhausted:
                    told.append("HeapExhausted")
            told.append(context.heap.used - before)
        plan.free()
    return told


def test_want_of_memory_on_one_rank_is_an_error_on_all(gpus, size):
    ordinary = ["HeapExhausted", 0] if size > 1 else ["nothing", 0]  # nothing is staged
    want = ["HeapExhausted", 0, *ordinary, *ordinary]
    assert gpus.run(check_want_of_memory, ranks=size) == [want] * size


# -- what only GPUs have ---------------------------------------------------------------------------


def check_capture(context, library, kinds):
    """A planned redistribution in a CUDA graph, replayed on operands that change."""
    import torch

    select(context, library)
    torch.cuda.set_device(context.device_id)
    heap, out_heap = kinds
    rank, size = context.rank, context.size
    operand = slab(context, library, heap=heap)
    out = slab(context, library, Slab.Y, base=1000, heap=out_heap)
    wrong = []
    with context:
        plan = Redistribute(operand, Slab.X, Slab.Y)
        plan.plan()
        plan.execute(out=out)
        torch.cuda.synchronize()
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            plan.execute(out=out, stream=stream)
        for turn in range(3):
            operand[...] = slab(context, library, base=turn)
            out[...] = -1
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                graph.replay()
            torch.cuda.synchronize()
            context.team.check()
            want = part_of(np.arange(96.0).reshape(12, 8) + turn, Slab.Y, rank, size)
            if OnGpu(library, context).host_view(out).tolist() != want.tolist():
                wrong.append(turn)
            context.barrier()
        plan.free()
    return wrong


@pytest.mark.parametrize("library", ["cupy", "torch"])
@pytest.mark.parametrize("heap", [True, False])
@pytest.mark.parametrize("out_heap", [True, False])
def test_capture_and_replay(gpus, size, library, heap, out_heap):
    kinds = (heap, out_heap)
    assert gpus.run(check_capture, library, kinds, ranks=size) == [[]] * size


def check_kept(context):
    """A call in a CUDA graph, replayed after so many others that nothing else keeps its tables."""
    import torch

    select(context, "torch")
    torch.cuda.set_device(context.device_id)
    rank, size = context.rank, context.size
    operand = slab(context, "torch", heap=True)
    out = slab(context, "torch", Slab.Y, base=1000, heap=True)
    with context:
        redistribute(operand, Slab.X, Slab.Y, out=out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            redistribute(operand, Slab.X, Slab.Y, out=out)
        for columns in range(1, 80):
            other = torch.zeros((size, columns), device=operand.device)
            redistribute(other[:1], Slab.X, Slab.Y)
        torch.cuda.synchronize()
        operand += 7
        out[...] = -1
        graph.replay()
        torch.cuda.synchronize()
        context.team.check()
        context.barrier()
    want = part_of(np.arange(96.0).reshape(12, 8) + 7, Slab.Y, rank, size)
    return OnGpu("torch", context).host_view(out).tolist() == want.tolist()


def test_a_graph_keeps_what_it_was_captured_with(gpus, size):
    assert gpus.run(check_kept, ranks=size) == [True] * size


def check_streams(context):
    """The work is on the stream that is given, or on the library's current one; a call that blocks
    returns when it is done."""
    import torch

    torch.cuda.set_device(context.device_id)
    operand, out = slab(context, "torch", heap=True), slab(context, "torch", Slab.Y, heap=True)
    want = OnGpu("torch", context).host_view(out).copy()
    side, wrong = torch.cuda.Stream(), []
    with context:
        plan = Redistribute(operand, Slab.X, Slab.Y)
        plan.plan()
        blocking = Redistribute(operand, Slab.X, Slab.Y, options={"blocking": True})
        blocking.plan()
        for how in ("argument", "current", "blocking"):
            out.zero_()
            torch.cuda.synchronize()
            if how == "argument":
                torch.cuda._sleep(20_000_000)  # the default stream is busy meanwhile
                plan.execute(stream=side, out=out)
                side.synchronize()
            elif how == "current":
                with torch.cuda.stream(side):
                    torch.cuda._sleep(20_000_000)
                    operand.neg_()
                    plan.execute(out=out)
                    operand.neg_()
                    out.neg_()
                side.synchronize()
            else:
                with torch.cuda.stream(side):
                    blocking.execute(out=out)
                    busy = not side.query()
                if busy:
                    wrong.append("returned early")
            if out.cpu().numpy().tolist() != want.tolist():
                wrong.append(how)
            torch.cuda.synchronize()
            context.barrier()
        plan.free()
        blocking.free()
    return wrong


def test_streams(gpus, size):
    assert gpus.run(check_streams, ranks=size) == [[]] * size


def check_two_streams(context):
    """Two objects of one context and one of another, each on its own stream, all at once."""
    import torch

    torch.cuda.set_device(context.device_id)
    half = context.split(0)
    streams = [torch.cuda.Stream() for _ in range(3)]
    gpu, wrong, held = OnGpu("torch", context), [], []
    for number, within in enumerate((context, context, half)):
        operand = slab(within, "torch", base=100 * number, heap=True)
        with within:
            plan = Redistribute(operand, Slab.X, Slab.Y)
            plan.plan()
        held.append((plan, operand, slab(within, "torch", Slab.Y, heap=True).zero_()))
    torch.cuda.synchronize()
    for _ in range(100):
        for stream, (plan, _, out) in zip(streams, held, strict=True):
            plan.execute(stream=stream, out=out)
    torch.cuda.synchronize()
    context.team.check()
    half.team.check()
    for number, (plan, _, out) in enumerate(held):
        want = np.arange(96.0).reshape(12, 8) + 100 * number
        want = part_of(want, Slab.Y, context.rank, context.size)
        if gpu.host_view(out).tolist() != want.tolist():
            wrong.append(number)
        plan.free()
    context.barrier()
    return wrong


def test_streams_and_groups_at_once(gpus, size):
    assert gpus.run(check_two_streams, ranks=size) == [[]] * size


def check_conjugated(context):
    """A lazily conjugated tensor has its elements nowhere in memory."""
    import torch

    select(context, "torch")
    size, rank = context.size, context.rank
    array = torch.arange(8 * 9).reshape(8, 9) * (1 + 2j)
    part = torch.from_numpy(np.array(part_of(array.numpy(), Slab.X, rank, size)))
    held = empty_on_heap(context, library_named("torch"), tuple(part.shape), "complex64")
    held[...] = part
    with context:
        got = redistribute(held.conj(), Slab.X, Slab.Y)
    want = part_of(array.conj().resolve_conj().numpy(), Slab.Y, rank, size)
    return is_symmetric(got) and bool((got.cpu().numpy() == want).all())


def test_a_lazily_conjugated_tensor(gpus, size):
    assert gpus.run(check_conjugated, ranks=size) == [True] * size


def distribution_named(name, size):
    """A distribution whose name can travel to the ranks: "X", "Y" or "cyclic 33 x 65"."""
    if name in ("X", "Y"):
        return getattr(Slab, name)
    blocks = tuple(int(extent) for extent in name.removeprefix("cyclic ").split(" x "))
    shape = (2, size // 2) if size % 2 == 0 else (size, 1)
    grid = ProcessGrid(shape=shape, layout=ProcessGrid.Layout.ROW_MAJOR)
    return BlockCyclic(grid, blocks)


def check_large(context, shape, source, target, orders, heap):
    """Sizes at which every block has many tiles, against slices that torch has cut."""
    import torch

    select(context, "torch")
    size, rank = context.size, context.rank
    source, target = (distribution_named(name, size) for name in (source, target))
    device = f"cuda:{context.device_id}"
    torch.manual_seed(7)
    whole = torch.randint(0, 1 << 30, shape, dtype=torch.int32, device=device)
    lib = library_named("torch")

    def part(distribution, order, fill):
        ranges = distribution.index_ranges(rank, tuple(shape), size=size)
        cut = whole
        for axis, pairs in enumerate(ranges):
            at = torch.cat([torch.arange(lo, hi, device=device) for lo, hi in pairs])
            cut = cut.index_select(axis, at)
        if heap:
            array = empty_on_heap(context, lib, tuple(cut.shape), "int32", order)
        else:
            array = lib.empty(tuple(cut.shape), "int32", order, device)
        array.copy_(cut) if fill else array.zero_()
        return array, cut

    operand, _ = part(source, orders[0], True)
    out, want = part(target, orders[1], False)
    with context:
        redistribute(operand, source, target, out=out)
    torch.cuda.synchronize()
    return torch.equal(out, want)


@pytest.mark.parametrize("orders", ["CC", "CF", "FC"])
@pytest.mark.parametrize("heap", [True, False])
@pytest.mark.parametrize("shape", [(1000, 1023, 37), (256, 256, 256)])
def test_large_slabs(gpus, size, orders, heap, shape):
    args = [shape, "X", "Y", orders, heap]
    assert gpus.run(check_large, *args, ranks=size) == [True] * size


@pytest.mark.parametrize("orders", ["CC", "CF", "FC"])
def test_large_cyclic_blocks(gpus, size, orders):
    for blocks, shape in (("256 x 256", (4096, 4096)), ("33 x 65", (3001, 2999))):
        args = [shape, f"cyclic {blocks}", "X", orders, True]
        assert gpus.run(check_large, *args, ranks=size) == [True] * size


def check_agreements(context, kinds):
    """How many exchanges a planned execution takes, the first and the later ones."""
    select(context, "cupy")
    operand = slab(context, "cupy", heap=kinds[0])
    out = slab(context, "cupy", Slab.Y, heap=kinds[1]) if kinds[1] is not None else None
    board, counts = context.board, []
    real = board.exchange_raw

    def counted(*args, **kwargs):
        counts[-1] += 1
        return real(*args, **kwargs)

    with context:
        plan = Redistribute(operand, Slab.X, Slab.Y)
        plan.plan()
        plan.execute(out=out)
        with patch.object(board, "exchange_raw", counted):
            for _ in range(2):
                counts.append(0)
                got = plan.execute(out=out)
        place = block_of(context, got) is not None
        plan.free()
    assert library_of(got).name == "cupy"
    return place, max(counts)


@pytest.mark.parametrize("kinds", [(True, True), (True, False), (False, False), (True, None)])
def test_a_planned_execution_agrees_once(gpus, size, kinds):
    place = kinds[0] if kinds[1] is None else kinds[1]
    assert gpus.run(check_agreements, kinds, ranks=size) == [(place, 1)] * size
