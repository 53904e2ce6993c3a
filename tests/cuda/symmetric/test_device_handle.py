"""SymmetricMemory on GPUs: CuPy arrays and torch tensors on peers' memory, signals on streams."""

from __future__ import annotations

import importlib

import pytest

from shardmath import symmetric_memory
from shardmath.errors import OpTimeout, UseAfterFree
from shardmath.handles.allocation import (
    allocate_symmetric_memory,
    free_symmetric_memory,
    is_symmetric,
)
from shardmath.handles.rendezvous import rendezvous

PACKAGES = ["cupy", "torch"]


def ready(context, package):
    module = importlib.import_module(package)
    if package == "torch":
        module.cuda.set_device(context.device_id)
    else:
        module.cuda.Device(context.device_id).use()
    return module


def uneven(context, module):
    with context:
        array = allocate_symmetric_memory(
            (context.rank + 1, 5), module, dtype="float32", skip_symmetric_check=True
        )
    array[...] = context.rank
    return array


def check_table(context, package):
    module = ready(context, package)
    array = uneven(context, module)
    with context:
        assert is_symmetric(array) and not is_symmetric(array + 1)
    handle = rendezvous(array, context)
    size, rank = context.size, context.rank
    assert (handle.rank, handle.world_size) == (rank, size)
    assert str(handle.device) == f"cuda:{context.device_id}"
    assert handle.buffer_sizes == [20 * (r + 1) for r in range(size)]
    assert len(set(handle.buffer_ptrs)) == size and handle.multicast_ptr == 0
    assert rendezvous(array, context) is handle

    def table(address):  # read as a kernel would
        import numpy as np

        from shardmath.cuda.driver import call

        words = np.zeros(size, np.uint64)
        call("cuMemcpyDtoH", words.ctypes.data, address, words.nbytes)
        return [int(word) for word in words]

    assert table(handle.buffer_ptrs_dev) == handle.buffer_ptrs
    assert table(handle.signal_pad_ptrs_dev) == handle.signal_pad_ptrs
    handle.barrier()
    for peer in range(size):
        theirs = handle.get_buffer(peer, (peer + 1, 5), "float32")
        assert type(theirs) is type(array) and bool((theirs == peer).all())
    handle.barrier()
    right = handle.get_remote_tensor((rank + 1) % size, (1,), "float32")
    right[...] = 100 + rank
    handle.barrier()
    handle.synchronize()
    assert float(array[0, 0]) == 100 + (rank - 1) % size
    pad = handle.get_signal_pad(rank)
    assert int(pad.sum()) == 0
    try:
        handle.get_buffer(0, (6, 6, 6), "float32")
    except RuntimeError:
        pass
    else:
        return "beyond the end"
    context.barrier()
    with context:
        free_symmetric_memory(array)
    try:
        handle.get_buffer(0, (1,), "float32")
    except UseAfterFree:
        return "fine"
    return "use after free"


@pytest.mark.parametrize("package", PACKAGES)
def test_the_table(gpus, size, package):
    assert gpus.run(check_table, package, ranks=size) == ["fine"] * size


def check_flags(context, package):
    """torch's semaphores: a second signal waits until the first has been consumed."""
    module = ready(context, package)
    handle = rendezvous(uneven(context, module), context)
    rank, size = context.rank, context.size
    right, left = (rank + 1) % size, (rank - 1) % size
    last = handle.signal_pad_size // (4 * size) - 1
    for channel in (0, last):
        for _ in range(20):
            handle.put_signal(right, channel)
            handle.wait_signal(left, channel)
    handle.synchronize()
    context.barrier()
    late = []
    handle.put_signal(right, 9)
    handle.put_signal(right, 9, timeout_ms=100)
    for turn, expected in enumerate((right, left)):
        try:
            handle.synchronize()
        except OpTimeout as error:
            late.append(error.ranks == (expected,))
        if turn == 0:
            handle.wait_signal(left, 8, timeout_ms=100)
    handle.wait_signal(left, 9)
    context.barrier()
    handle.put_signal(right, 8)
    handle.wait_signal(left, 8)
    handle.barrier(last)
    handle.synchronize()
    pads = handle.get_signal_pad(rank)
    try:
        handle.barrier(last + 1)
    except ValueError:
        late.append(True)
    result = int(pads.sum())
    context.barrier()
    return late, result


@pytest.mark.parametrize("package", PACKAGES)
def test_flags_and_time_outs(gpus, size, package):
    assert gpus.run(check_flags, package, ranks=size) == [([True] * 3, 0)] * size


def check_names(context):
    """Names of GPUs are torch's: who gives one gets a tensor, as torch's function would give."""
    torch = ready(context, "torch")
    with context:
        for device in ("cuda", f"cuda:{context.device_id}", torch.device("cuda")):
            x = symmetric_memory.empty(3, device=device)
            assert isinstance(x, torch.Tensor) and x.dtype is torch.get_default_dtype()
            assert x.device.index == context.device_id and symmetric_memory.is_symm_mem_tensor(x)
        for package in PACKAGES:
            module = importlib.import_module(package)
            assert type(symmetric_memory.empty(3, device="cuda", package=module)) is type(
                module.empty(3)
            )
    return True


def test_names_of_devices(gpus, size):
    assert gpus.run(check_names, ranks=size) == [True] * size


def check_graph(context):
    import torch

    ready(context, "torch")
    handle = rendezvous(uneven(context, torch), context)
    rank, size = context.rank, context.size
    right, left = (rank + 1) % size, (rank - 1) % size
    own = handle.get_buffer(rank, (1,), "float32")
    theirs = handle.get_buffer(right, (1,), "float32")
    own.zero_()
    count = torch.zeros(1, device=own.device)
    handle.barrier()
    handle.put_signal(right)
    handle.wait_signal(left)
    handle.synchronize()
    context.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            count.add_(1)
            theirs.copy_(count)
            handle.put_signal(right)
            handle.wait_signal(left)
            handle.barrier(1)
    for _ in range(50):
        graph.replay()
    handle.synchronize()
    context.barrier()
    return float(own[0])


def test_a_graph_is_replayed(gpus, size):
    assert gpus.run(check_graph, ranks=size) == [150.0] * size
