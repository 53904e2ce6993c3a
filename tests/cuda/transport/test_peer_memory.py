"""The heap on GPUs: memory that peers map, as CuPy and torch arrays, and how it runs out."""

from __future__ import annotations

import gc
from itertools import pairwise

import numpy as np
import pytest

from shardmath.arrays import library_named
from shardmath.errors import HeapExhausted
from shardmath.symmetric.heap import Location

LIBRARIES = ("cupy", "torch")


def on_peer(context, library, rank, place, nbytes):
    """Bytes of a peer as an array, without an owner."""

    raw = context.peer_memory(rank, Location(*place), nbytes)
    return library_named(library).on_device(raw, "uint8", (nbytes,), (1,))


def host(x):
    return x.get() if hasattr(x, "get") else x.cpu().numpy()


def imported(library):
    module = pytest.importorskip(library)
    return module


def check_peers(context, library, nbytes):
    """Every rank writes its number, and reads all others'."""
    imported(library)
    device = f"cuda:{context.device_id}"
    buffer = context.heap.allocate(nbytes)
    own = library_named(library).on_device(buffer, "uint8", (nbytes,), (1,))
    own[...] = context.rank + 1
    spec = library_named(library).spec(own)
    assert (spec.device, spec.shape, spec.dtype) == (device, (nbytes,), "uint8")
    assert library_named(library).pointer(own) == buffer.block.address
    assert context.heap.find(library_named(library).pointer(own)) is buffer.block
    context.announce(buffer.block)
    where = buffer.block.location
    synchronize(context)
    places = context.agree("t", lambda: (where.segment, where.offset), lambda found: found)
    seen = [
        host(on_peer(context, library, rank, place, nbytes)) for rank, place in enumerate(places)
    ]
    context.barrier()
    return [np.unique(each).tolist() for each in seen]


def synchronize(context):
    context.team.device.synchronize()


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_rank_reads_every_other(gpus, size, library):
    for nbytes in (1, 257, (64 << 20) + 5):  # the last takes a segment of its own
        found = gpus.run(check_peers, library, nbytes, ranks=size)
        assert found == [[[rank + 1] for rank in range(size)]] * size


def check_shapes(context, library):
    imported(library)
    wrong = []
    for dtype, shape, strides in (
        ("float32", (7, 9), (9, 1)),
        ("float64", (9, 8), (1, 9)),
        ("complex128", (3, 5), (5, 1)),
        ("float16", (0, 4), (4, 1)),
        ("bfloat16", (4, 4), (4, 1)),
        ("int64", (), ()),
    ):
        kind = library_named(library)
        nbytes = int(np.prod(shape)) * 16
        buffer = context.heap.allocate(nbytes)
        x = kind.on_device(buffer, dtype, shape, strides)
        del buffer
        gc.collect()
        spec = kind.spec(x)
        if (spec.dtype, spec.shape) != (dtype, shape) or (
            (x.size if library == "cupy" else x.numel()) and spec.strides != strides
        ):
            wrong.append((dtype, str(spec)))
        if 0 not in shape:
            x[...] = 3
            if not bool((x == 3).all()):
                wrong.append((dtype, "value"))
        used = context.heap.used
        del x
        gc.collect()
        if 0 not in shape and context.heap.used >= used:
            wrong.append((dtype, "the array did not keep its memory, or kept it too long"))
    return wrong


@pytest.mark.parametrize("library", LIBRARIES)
def test_arrays_of_every_layout_keep_their_memory(gpus, library):
    assert gpus.run(check_shapes, library, ranks=1) == [[]]


def check_exhaustion(context):
    before = context.heap.used
    need = 1 << 44
    try:
        context.heap.allocate(need)
    except HeapExhausted as error:
        told = (error.need >= need, 0 < error.have < need)
    else:
        told = None
    synchronize(context)
    buffer = context.heap.allocate(1000)
    return told, context.heap.used - before >= 1000, buffer.block.nbytes


def test_what_does_not_fit_is_an_error_and_changes_nothing(gpus):
    assert gpus.run(check_exhaustion, ranks=1) == [((True, True), True, 1000)]


def check_probe(context):
    from shardmath.transport.gpus.cuda import CudaTransport

    return CudaTransport.probe(context.device_id), "999" in CudaTransport.probe(999)


def test_probe_tries_and_tells(gpus):
    assert gpus.run(check_probe, ranks=1) == [("", True)]


def check_release(context):
    """What each closed context has cost the device; other processes take and give, too."""
    from shardmath.context.startup import new_context
    from shardmath.cuda.driver import call
    from shardmath.group.base import SoloProcessGroup

    free = []
    for _ in range(6):
        other = new_context(context.device_id, SoloProcessGroup())
        buffer = other.heap.allocate(256 << 20)
        other.close()
        del buffer, other
        gc.collect()
        free.append(call("cuMemGetInfo")[0])
    return [before - after for before, after in pairwise(free)]


def test_a_closed_context_gives_its_memory_back(gpus):
    assert min(gpus.run(check_release, ranks=1)[0]) < 64 << 20
