"""Several streams: memory that one still reads, calls that share a context, groups side by side."""

from __future__ import annotations

import pytest

from shardmath.arrays import dtypes
from shardmath.collectives import all_reduce
from shardmath.collectives.cells import DeviceCollectives, LaunchConfig
from shardmath.cuda.driver import call
from shardmath.cuda.graph import Graph
from shardmath.handles.allocation import allocate_symmetric_memory
from shardmath.handles.rendezvous import rendezvous

MIB = 1 << 20
BLOCKS, THREADS = 132, 512
CYCLES = 200_000_000  # of a kernel that does nothing: about 0.1 s


def torch_on(context):
    import torch

    torch.cuda.set_device(context.device_id)
    return torch


def check_reuse(context):
    """An array is dropped while a slow stream still reads it: another gets other memory."""
    torch = torch_on(context)
    slow = torch.cuda.Stream()
    heap = context.heap
    before = heap.used
    buffer = heap.allocate(8 * MIB)
    address = buffer.block.address
    call("cuMemsetD8", address, 1, 8 * MIB)
    copy = torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(slow):
        torch.cuda._sleep(CYCLES)
        call("cuMemcpyAsync", copy.data_ptr(), address, 8 * MIB, slow.cuda_stream)
    del buffer
    waiting = heap.used - before  # set the fence
    other = heap.allocate(8 * MIB)
    apart = other.block.address != address or slow.query()
    call("cuMemsetD8Async", other.block.address, 2, 8 * MIB, 0)
    torch.cuda.synchronize()
    found = (int(copy.min()), int(copy.max()))
    del other
    after = heap.used
    again = heap.allocate(8 * MIB)
    reused = again.block.address == address
    return waiting > 0, apart, found, after == before, reused


def test_memory_that_a_stream_reads_is_not_given_away(gpus):
    assert gpus.run(check_reuse, ranks=1) == [(True, True, (1, 1), True, True)]


def check_peer_reuse(context):
    """Rank 1's slow stream reads rank 0's memory, which both have dropped: it is not reused."""
    torch = torch_on(context)
    slow = torch.cuda.Stream()
    with context:
        array = allocate_symmetric_memory(2 * MIB, torch, dtype="float32")
    array.fill_(context.rank + 1)
    address = array.data_ptr()
    handle = rendezvous(array, context)
    handle.barrier()
    handle.synchronize()
    copy = torch.zeros(2 * MIB, device="cuda")
    filled = torch.empty(2 * MIB, device="cuda").fill_(9)
    if context.rank == 1:
        theirs = handle.get_buffer(0, (2 * MIB,), "float32")
        copy.copy_(theirs)  # loads what it needs, which may wait for all that runs
        copy.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(slow):
            torch.cuda._sleep(10 * CYCLES)
            copy.copy_(theirs)
        del theirs
    del array, handle
    context.barrier()  # carries the marks of what is quiet
    taken = []
    if context.rank == 0:
        for _ in range(3):
            taken.append(torch.as_tensor(context.heap.allocate(8 * MIB), device="cuda"))
            taken[-1].view(torch.float32).copy_(filled)
    context.barrier()
    busy = not slow.query()
    torch.cuda.synchronize()
    context.barrier()
    early = any(part.data_ptr() == address for part in taken)
    taken.clear()
    gone = context.heap.find(address)
    context.barrier()
    return early, busy, float(copy.min()), gone is None or not gone.shared


def test_memory_that_a_peers_stream_reads_is_not_given_away(gpus):
    if gpus.size < 2:
        pytest.skip("one GPU has no peer")
    found = gpus.run(check_peer_reuse, ranks=2)
    assert found == [(False, False, 0.0, True), (False, True, 1.0, True)]


def check_beside(context):
    """Handles are made beside a busy stream; they and graphs are dropped there, and in captures."""
    torch = torch_on(context)
    slow, other = torch.cuda.Stream(), torch.cuda.Stream()
    handles = []
    for _ in range(3):
        with context:
            array = allocate_symmetric_memory(5, torch, dtype="float32")
        handles.append(rendezvous(array, context))
        handles[-1].barrier()
    del array
    x = torch.ones(3, device="cuda")
    torch.cuda.synchronize()
    with context:
        array = allocate_symmetric_memory(5, torch, dtype="float32")
    cleared = torch.full((3,), 5, dtype=torch.uint8, device="cuda")
    graphs = [
        Graph(context.team.device, lambda on: call("cuMemsetD8Async", cleared.data_ptr(), 0, 3, on))
        for _ in range(2)
    ]
    torch.cuda.synchronize()
    with torch.cuda.stream(slow):
        torch.cuda._sleep(CYCLES)
    graphs[0].launch(slow.cuda_stream)
    graphs.pop(0)
    handles.pop()
    handles.append(rendezvous(array, context))
    waited = slow.query()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=other):
        x += 1
        handles.pop()
        graphs.pop()
        x += 1
    graph.replay()
    with context:  # which takes the reports that were left
        array = allocate_symmetric_memory(5, torch, dtype="float32")
    after = rendezvous(array, context)
    after.barrier()
    after.synchronize()
    return waited, x.tolist() + cleared.tolist()


def test_handles_and_graphs_come_and_go_beside_what_runs(gpus, size):
    assert gpus.run(check_beside, ranks=size) == [(False, [3.0] * 3 + [0] * 3)] * size


def sums(torch, size, count, number):
    """What rank 0 gives to call `number`, and the sum of what all ranks give."""
    given = torch.arange(count, device="cuda", dtype=torch.float32) % 1000 + number
    return given, given * size + sum(range(size))


def check_streams(context, counts):
    """Calls of one context, dealt to three streams without waiting: they follow each other."""
    torch = torch_on(context)
    moves = DeviceCollectives.of(context)
    streams = [torch.cuda.Stream() for _ in range(3)]
    results = []
    for number in range(30):
        count = counts[number % len(counts)]
        given, wanted = sums(torch, context.size, count, number)
        given += context.rank
        out = torch.empty_like(given)
        torch.cuda.synchronize()
        results.append((given, out, wanted))
    for number, (given, out, _) in enumerate(results):
        stream = streams[number % 3].cuda_stream
        of = dtypes.of("float32")
        moves.all_reduce(given.data_ptr(), out.data_ptr(), out.numel(), of, "sum", stream)
    torch.cuda.synchronize()
    context.team.check()
    wrong = [number for number, (_, out, wanted) in enumerate(results) if not out.equal(wanted)]
    context.barrier()
    return wrong


@pytest.mark.parametrize("counts", [(1000,), (17, 300_000, 70_001), (20 * MIB, 100, 3 * MIB)])
def test_calls_of_one_context_on_several_streams(gpus, size, counts):
    assert gpus.run(check_streams, counts, ranks=size) == [[]] * size


def check_groups(context, count, rounds):
    """Two groups on two streams; odd ranks call the second group first."""
    torch = torch_on(context)
    half = context.split(context.rank % 2)
    groups = [context.split(0), half]
    moves = [DeviceCollectives.of(group) for group in groups]
    streams = [torch.cuda.Stream() for _ in groups]
    of = dtypes.of("float32")
    rows = []
    for number in range(rounds):
        row = []
        for group in groups:
            given, wanted = sums(torch, group.size, count, number)
            row.append((given + group.rank, torch.empty_like(given), wanted))
        rows.append(row)
    torch.cuda.synchronize()
    context.barrier()
    for which in (0, 1):  # loading a kernel may wait for what runs: in the same order on all ranks
        scratch = torch.empty(count, device="cuda")
        at = scratch.data_ptr()
        moves[which].all_reduce(at, at, count, of, "sum", streams[which].cuda_stream)
        torch.cuda.synchronize()
        context.barrier()
    order = (0, 1) if context.rank % 2 == 0 else (1, 0)
    for row in rows:
        for which in order:
            given, out, _ = row[which]
            stream = streams[which].cuda_stream
            moves[which].all_reduce(given.data_ptr(), out.data_ptr(), count, of, "sum", stream)
    torch.cuda.synchronize()
    wrong = []
    for group in groups:
        group.team.check()
    for number, row in enumerate(rows):
        wrong += [(number, which) for which in (0, 1) if not row[which][1].equal(row[which][2])]
    context.barrier()
    return wrong


@pytest.mark.parametrize(("count", "rounds"), [(500, 50), (300_000, 20), (20 * MIB, 4)])
def test_two_groups_at_once_in_opposite_order(gpus, size, count, rounds):
    assert gpus.run(check_groups, count, rounds, ranks=size) == [[]] * size


def check_waiting_kernels(context, function):
    """A group whose kernel waits for a peer leaves room for another group's."""
    torch = torch_on(context)
    first, second = context.split(0), context.split(0)
    moves = [DeviceCollectives.of(group) for group in (first, second)]
    streams = [torch.cuda.Stream() for _ in moves]
    of, count = dtypes.of("float32"), 8 * MIB
    data = [torch.full((count,), 1.0, device="cuda") for _ in moves]
    torch.cuda.synchronize()
    context.barrier()
    # Each rank's first kernel waits until the other rank's second one has come.
    order = (0, 1) if context.rank == 0 else (1, 0)
    for turn in order:
        address = data[turn].data_ptr()
        stream = streams[turn].cuda_stream
        launch = LaunchConfig(function, BLOCKS, THREADS)
        moves[turn].all_reduce(address, address, count, of, "sum", stream, launch=launch)
        context.barrier()  # the other has launched its own first
    torch.cuda.synchronize()
    for group in (first, second):
        group.team.check()
    context.barrier()
    return [float(x.min()) for x in data] + [float(x.max()) for x in data]


@pytest.mark.parametrize("function", ["one_shot", "two_shot"])
def test_kernels_that_wait_leave_room(gpus, function):
    if gpus.size < 2:
        pytest.skip("one GPU has no peer")
    assert gpus.run(check_waiting_kernels, function, ranks=2) == [[2.0] * 4] * 2


def check_forked(context):
    """A barrier on a forked stream comes after the one that was put on the first stream."""
    torch = torch_on(context)
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with context:
        array = allocate_symmetric_memory(5, torch, dtype="float32")
        total = allocate_symmetric_memory(5, torch, dtype="float32")
    handle = rendezvous(array, context)
    x, seen = torch.zeros(5, device="cuda"), torch.zeros(5, device="cuda")
    found = []

    def work():
        second.wait_stream(first)
        torch.cuda._sleep(CYCLES // 10)
        x.add_(1)
        array.copy_(x)
        handle.barrier()
        with torch.cuda.stream(second):
            handle.barrier()
            seen.copy_(handle.get_buffer((handle.rank + 1) % handle.world_size, (5,), "float32"))
            all_reduce(seen, out=total, context=context)
        all_reduce(x, out=array, context=context)
        first.wait_stream(second)
        handle.barrier()

    with torch.cuda.stream(first):
        work()
    torch.cuda.synchronize()
    context.barrier()
    found.append((seen.tolist(), total.tolist()))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=first):
        work()
    for _ in range(5):
        graph.replay()
        torch.cuda.synchronize()
        context.barrier()
        found.append((seen.tolist(), total.tolist()))
    return found


def test_barriers_of_one_channel_follow_each_other_on_forked_streams(gpus, size):
    expected = [([step] * 5, [step * size] * 5) for step in map(float, range(1, 7))]
    assert gpus.run(check_forked, ranks=size) == [expected] * size
