"""New results on the heap: right however long each rank keeps them, and in whatever order it drops
them.
"""

from __future__ import annotations

import gc
import random
from contextlib import ExitStack
from unittest.mock import patch

import pytest

from shardmath.base.compiled import extension

# How many results are kept until the end, and whether the heap takes them for large ones.
WAYS = {"few": (0, False), "many": (400, False), "large": (0, True), "many large": (150, True)}


def keep(context, name, count, large):
    """Which results are wrong of calls whose results each rank drops in an order of its own."""
    import torch

    from shardmath.arrays import library_named
    from shardmath.distribution import Redistribute, Slab
    from shardmath.fft import FFT, FFTOptions
    from shardmath.handles import device_array
    from shardmath.handles.allocation import empty_on_heap
    from shardmath.linalg.advanced import Matmul
    from shardmath.symmetric import heap

    torch.cuda.set_device(context.device_id)
    size, rank, library = context.size, context.rank, library_named("torch")
    mine, everyones, n = random.Random(rank), random.Random(5), 48
    dtype = torch.complex64 if "transform" in name else torch.float32

    def part(whole, slab):
        return whole.tensor_split(size, dim=1 if slab is Slab.Y else 0)[rank]

    def on_heap(x):
        name = str(dtype).removeprefix("torch.")
        return empty_on_heap(context, library, tuple(x.shape), name).copy_(x)

    right = (torch.arange(n * n).reshape(n, n) % 5).to("cuda", dtype)
    with context, ExitStack() as stack:
        if large:
            stack.enter_context(patch.object(heap, "_SMALL", 0))
            stack.enter_context(patch.object(device_array, "_MOST_CARRIED", 0))
        x, other, b = (on_heap(part(torch.zeros_like(right), Slab.X)) for _ in range(3))
        b.copy_(part(right, Slab.X))
        work, target, of = {
            "redistribution": lambda: (Redistribute(x, Slab.X, Slab.Y), Slab.Y, lambda w: w),
            "transform": lambda: (
                FFT(x, distribution=Slab.X, options=FFTOptions(redistribute=False)),
                Slab.Y,
                torch.fft.fft2,
            ),
            "transform back": lambda: (FFT(x, distribution=Slab.X), Slab.X, torch.fft.fft2),
            "product": lambda: (
                Matmul(x, b, distributions=[Slab.X] * 3),
                Slab.X,
                lambda w: w @ right,
            ),
        }[name]()
        work.plan()
        wrong, kept = [], []

        def check():
            turn, result, wanted = kept.pop(mine.randrange(len(kept)))
            if not torch.allclose(result, wanted, rtol=1e-4, atol=1e-2):
                wrong.append(turn)

        for turn in range(200 + count):
            whole = ((torch.arange(n * n) + turn) % (7 + turn % 4)).reshape(n, n)
            whole = whole.to("cuda", dtype)
            operand = other if everyones.randrange(20 * size) == rank else x
            operand.copy_(part(whole, Slab.X))
            if name == "product":
                work.reset_operands_unchecked(a=operand)
            else:
                work.reset_operand_unchecked(operand)
            kept.append((turn, work.execute(), part(of(whole), target).clone()))
            if turn >= count:
                for _ in range(mine.choice((0, 1, 1, 1, 2, 3))):
                    if len(kept) > count:
                        check()
        while kept:
            check()
        work.free()
    return wrong


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["redistribution", "transform", "transform back", "product"])
def test_results_are_right_however_long_they_are_kept(gpus, size, name, way):
    assert gpus.run(keep, name, *WAYS[way], ranks=size) == [[]] * size


def capture(context, name):
    """How many arrays on the heap a graph overwrites whose result was dropped after its capture."""
    import torch

    from shardmath.arrays import library_named
    from shardmath.collectives import all_reduce
    from shardmath.distribution import Slab, redistribute
    from shardmath.fft import fft
    from shardmath.handles.allocation import empty_on_heap
    from shardmath.linalg.advanced import matmul

    torch.cuda.set_device(context.device_id)
    n, library = 1024, library_named("torch")
    call = {
        "redistribution": lambda: redistribute(x, Slab.X, Slab.Y),
        "transform": lambda: fft(x, distribution=Slab.X),
        "product": lambda: matmul(x, x, distributions=[Slab.X] * 3),
        "sum": lambda: all_reduce(x),
    }[name]
    with context:
        shape = (n // context.size, n)
        x = empty_on_heap(context, library, shape, "complex64").fill_(1)
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = call()
        shape, dtype = tuple(result.shape), str(result.dtype).removeprefix("torch.")
        del result
        gc.collect()
        for _ in range(3):
            context.barrier()
        others = [empty_on_heap(context, library, shape, dtype).fill_(7) for _ in range(8)]
        torch.cuda.synchronize()
        context.barrier()
        graph.replay()
        torch.cuda.synchronize()
        context.barrier()
        return sum(not bool((x == 7).all()) for x in others)


@pytest.mark.parametrize("name", ["redistribution", "transform", "product", "sum"])
def test_a_graph_writes_no_array_made_after_its_result_was_dropped(gpus, size, name):
    assert gpus.run(capture, name, ranks=size) == [0] * size


def move(context, is_default):
    """Which products are wrong whose operands and results, in ordinary memory, lie elsewhere in
    each turn, as in a program that trains, on the default stream or on another; and how many of
    them the driver has made.
    """
    import torch

    from shardmath.call.driver import Driver
    from shardmath.distribution import Slab
    from shardmath.linalg.advanced import matmul

    torch.cuda.set_device(context.device_id)
    size, rank, n, call = context.size, context.rank, 48, Driver.call
    right = (torch.arange(n * n).reshape(n, n) % 5).float().cuda()
    counted = patch.object(Driver, "call", autospec=True, side_effect=call)
    kept = []
    stream = torch.cuda.default_stream() if is_default else torch.cuda.Stream()
    stream.wait_stream(torch.cuda.default_stream())
    with context, torch.cuda.stream(stream), counted as made:
        for turn in range(200):
            whole = ((torch.arange(n * n) + turn) % (7 + turn % 4)).reshape(n, n).float().cuda()
            x, b = (full.tensor_split(size)[rank].clone() for full in (whole, right))
            d = matmul(x, b, distributions=[Slab.X] * 3)
            kept.append((x, b, d, (whole @ right).tensor_split(size)[rank]))
            x.fill_(-1)  # after the product has read it
    torch.cuda.synchronize()
    wrong = [turn for turn, (*_, d, wanted) in enumerate(kept) if not torch.equal(d, wanted)]
    return wrong, made.call_count


@pytest.mark.parametrize("is_default", [True, False])
def test_operands_that_lie_elsewhere(gpus, size, is_default):
    for wrong, made in gpus.run(move, is_default, ranks=size):
        assert not wrong
        if is_default and extension("shardmath.call._direct"):
            assert made < 50
