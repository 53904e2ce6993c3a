"""Collectives that come again: what is kept of a call serves only where it is the same call."""

from __future__ import annotations

import importlib
import itertools
from unittest.mock import patch

import numpy as np
import pytest

from counted import calls_before
from shardmath.arrays import library_named
from shardmath.base.compiled import extension
from shardmath.collectives import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter
from shardmath.distribution import Redistribute, Slab, redistribute
from shardmath.handles.allocation import empty_on_heap, free_symmetric_memory

N = 24
TURNS = 4
GROWTH = 256 << 20  # bytes, more than the heap's first segment has left


def maker(context, library):
    """What turns a NumPy array into one of the library on this rank's GPU, and back."""
    if library == "torch":
        import torch

        torch.cuda.set_device(context.device_id)
        return lambda host: torch.as_tensor(host, device="cuda"), lambda x: x.cpu().numpy()
    import cupy

    cupy.cuda.Device(context.device_id).use()
    return cupy.asarray, cupy.asnumpy


def given(rank, turn, shape):
    return np.random.default_rng([rank, turn]).integers(-99, 99, shape).astype(np.float32)


def check_turns(context, library):
    """Each call several times: with the same arrays, and with others that look alike."""
    with context:
        return turns(context, *maker(context, library))


def turns(context, make, host):
    rank, size = context.rank, context.size
    unrounded = {name: make(np.zeros(N, np.float32)) for name in ("x", "out")}
    counts = [r + (r == 0) for r in range(size)]
    wrong = []

    def tell(name, turn, found, wanted):
        if not np.array_equal(host(found), wanted):
            wrong.append((name, turn))

    for turn in range(TURNS):
        values = [given(r, turn, N) for r in range(size)]
        total = np.sum(values, axis=0, dtype=np.float32)
        x = unrounded["x"] if turn % 2 else make(np.zeros(N, np.float32))
        x[:] = make(values[rank])
        tell("all_reduce", turn, all_reduce(x), total)
        out = unrounded["out"]
        found = all_reduce(x, out=out)
        tell("out", turn, found, total)
        if found is not out:
            wrong.append(("another array", turn))
        tell("max", turn, all_reduce(x, op="max"), np.max(values, axis=0))
        wide = make(values[rank].astype(np.int32))
        tell("mean", turn, all_reduce(wide, op="mean"), np.mean(values, axis=0, dtype=np.float64))
        # One rank's part changes, and nothing on the others.
        lengths = [r + 1 + (turn if r == 0 else 0) for r in range(size)]
        parts = [given(r, turn, lengths[r]) for r in range(size)]
        tell("all_gather", turn, all_gather(make(parts[rank])), np.concatenate(parts))
        whole = [given(r, turn, sum(counts)) for r in range(size)]
        start = sum(counts[:rank])
        piece = np.sum(whole, axis=0, dtype=np.float32)[start : start + counts[rank]]
        tell("reduce_scatter", turn, reduce_scatter(make(whole[rank]), counts=counts), piece)
        even = [given(r, turn, 3 * size) for r in range(size)]
        sent = np.concatenate([part[3 * rank :][:3] for part in even])
        tell("all_to_all", turn, all_to_all(make(even[rank])), sent)
        root = turn % size
        shown = make(values[root]) if rank == root or turn < 2 else None
        tell("broadcast", turn, broadcast(shown, root=root), values[root])
        # Over the operand: in its place, and beside it.
        tell("in place", turn, all_reduce(x, out=x), total)
        both = make(np.concatenate([values[rank], np.zeros(N, np.float32)]))
        at = (N, 7, 0, 7)[turn]
        tell("over", turn, all_reduce(both[:N], out=both[at : at + N]), total)
    context.barrier()
    return wrong


@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_calls_that_look_alike(gpus, size, library):
    pytest.importorskip(library)
    assert gpus.run(check_turns, library, ranks=size) == [[]] * size


def check_entered(context, library):
    """By call, the package's functions that run when it comes again."""
    make, _ = maker(context, library)
    size, ran = context.size, {}
    x, out = make(np.ones(N, np.float32)), make(np.zeros(N, np.float32))
    many = make(np.zeros(N * size, np.float32))
    rows, columns = make(np.ones((2, 2 * size))), make(np.zeros((2 * size, 2)))
    with context, Redistribute(rows, Slab.X, Slab.Y) as moved:
        moved.plan()
        calls = {
            "all_reduce": lambda: all_reduce(x),
            "all_reduce, out": lambda: all_reduce(x, out=out),
            "all_gather, out": lambda: all_gather(x, out=many),
            "redistribute, out": lambda: redistribute(rows, Slab.X, Slab.Y, out=columns),
            "execute, out": lambda: moved.execute(out=columns),
        }
        for name, call in calls.items():
            for _ in range(8):
                call()
            ran[name] = sorted({each.split(".")[0] for each in calls_before("", call)})
    context.barrier()
    return ran


@pytest.mark.skipif(
    extension("shardmath.call._direct") is None, reason="the package was built without a C compiler"
)
@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_functions_are_not_entered(gpus, size, library):
    pytest.importorskip(library)
    ours = {"all_reduce", "all_gather", "redistribute", "Driver", "Repeats", "GPUCalls"}
    for ran in gpus.run(check_entered, library, ranks=size):
        for name, functions in ran.items():
            assert not ours.intersection(functions), (name, functions)


def said(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return "fine"


def check_mistakes(context):
    """What is wrong with a call that looks like a kept one is an error on all ranks at once."""
    import torch

    make, _ = maker(context, "torch")
    group = context.split(0)
    group.team.meets = True  # as with SHARDMATH_CHECK=1
    last = group.rank == group.size - 1
    found = []
    x, square = make(np.ones(N, np.float32)), make(np.ones((4, 4), np.float32))
    heap = empty_on_heap(group, library_named("torch"), (N,), "float32")
    heap[:] = 1
    for _ in range(2):
        all_reduce(x, context=group)
        all_reduce(heap, context=group)
        all_gather(square, axis=1, context=group)
    found.append(said(lambda: all_reduce(x, op="max" if last else "sum", context=group)))
    found.append(said(lambda: all_gather(square, axis=True if last else 1, context=group)))
    graded = torch.ones(N, device="cuda", requires_grad=last)
    found.append(said(lambda: all_reduce(graded, context=group)))
    with group:
        free_symmetric_memory(heap)
    found.append(said(lambda: all_reduce(heap if last else x, context=group)))
    found.append(said(lambda: all_reduce(x, context=group)))
    context.barrier()
    return found


def test_mistakes_after_calls_that_look_alike(gpus, size):
    if size > 1:
        wanted = ["CollectiveMismatch", "ValueError", "CollectiveMismatch", "UseAfterFree", "fine"]
        assert gpus.run(check_mistakes, ranks=size) == [wanted] * size


def check_pushed(context):
    """A large all_reduce, where no rank, the last one or all give an array for the result."""
    make, host = maker(context, "torch")
    rank, size = context.rank, context.size
    count, wrong = 5000 * size, []
    with patch("shardmath.collectives.cells._PUSHED_SLICE_BYTES", 4096):
        for turn in range(2):
            for given_by in ((), (size - 1,), range(size)):
                values = [given(r, turn, count) for r in range(size)]
                out = make(np.zeros(count, np.float32)) if rank in given_by else None
                found = host(all_reduce(make(values[rank]), out=out, context=context))
                if not np.array_equal(found, np.sum(values, axis=0, dtype=np.float32)):
                    wrong.append((turn, given_by))
    context.barrier()
    return wrong


def test_large_sums_into_arrays_that_some_ranks_give(gpus, size):
    assert gpus.run(check_pushed, ranks=size) == [[]] * size


def outs(context, make, where):
    """What makes an `out` like an array: in ordinary memory, on the heap where all ranks reach it,
    by turns, or where no rank does before the next call that is new.
    """
    turns, torch = itertools.count(), library_named("torch")
    grown = empty_on_heap(context, torch, (GROWTH,), "uint8") if where == "unknown" else None

    def out(like):
        if where == "ordinary" or (where == "mixed" and (next(turns) + context.rank) % 2):
            return make(np.full_like(like, 3))
        if where == "unknown":
            array = grown[: like.nbytes].view(
                dtype=getattr(importlib.import_module("torch"), str(like.dtype))
            )
            return array.reshape(like.shape).fill_(3)
        return empty_on_heap(context, torch, like.shape, str(like.dtype)).fill_(3)

    return out


def check_moved(context, where):
    """Large moves, in one call after another, where no rank, the last one or all give an `out`."""
    make, host = maker(context, "torch")
    rank, size = context.rank, context.size
    wrong = []
    small = {"_MAIL_BYTES": 8192, "_WRITTEN_BYTES": 2048}
    with patch.multiple("shardmath.collectives.cells", **small), context.split(0) as group:
        out_like = outs(group, make, where)
        for turn, unit in enumerate((16, 7, 1, 48)):
            for given_by in ((), (size - 1,), range(size)):
                ranks = range(size)
                counts = [[(257 + 31 * turn + 5 * s + d) % 400 for d in ranks] for s in ranks]
                shapes = [(sum(row), unit) for row in counts]
                parts = [given(r, turn, shapes[r]).astype(np.int8) for r in ranks]
                cuts = [np.cumsum([0, *row]) for row in counts]
                wanted = np.concatenate(
                    [parts[r][cuts[r][rank] : cuts[r][rank + 1]] for r in ranks]
                )
                out = out_like(wanted) if rank in given_by else None
                found = all_to_all(make(parts[rank]), send_counts=counts[rank], out=out)
                if not np.array_equal(host(found), wanted):
                    wrong.append(("all_to_all", turn, given_by))
                whole = np.concatenate(parts)
                out = out_like(whole) if rank in given_by else None
                if not np.array_equal(host(all_gather(make(parts[rank]), out=out)), whole):
                    wrong.append(("all_gather", turn, given_by))
    context.barrier()
    return wrong


@pytest.mark.parametrize("where", ["ordinary", "heap", "mixed", "unknown"])
def test_large_moves_into_arrays_that_some_ranks_give(gpus, size, where):
    assert gpus.run(check_moved, where, ranks=size) == [[]] * size
