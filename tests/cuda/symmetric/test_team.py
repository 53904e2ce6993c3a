"""Barriers on streams: in graphs, late, and not at all."""

from __future__ import annotations

from visible import GPUS

from shardmath.arrays import library_named
from shardmath.cuda import stream as streams
from shardmath.errors import BackendUnavailable, OpTimeout


def current(context, library="torch"):
    return library_named(library).stream(context.team.device.ordinal)


def check_order(context, rounds):
    """What a rank wrote before a barrier, all see after: also when replayed from a graph."""
    import torch

    torch.cuda.set_device(context.device_id)
    team = context.team
    from test_peer_memory import on_peer

    buffer = context.heap.allocate(8)
    own = torch.as_tensor(buffer, device=f"cuda:{context.device_id}").view(torch.int64)
    own.zero_()
    context.announce(buffer.block)
    where = buffer.block.location
    torch.cuda.synchronize()
    places = context.agree("t", lambda: (where.segment, where.offset), lambda found: found)
    peers = [
        on_peer(context, "torch", rank, place, 8).view(torch.int64)
        for rank, place in enumerate(places)
    ]
    seen = torch.zeros(context.size, dtype=torch.int64, device="cuda")
    least = torch.full((context.size,), 1 << 40, dtype=torch.int64, device="cuda")

    def step():
        own.add_(1)
        team.barrier(current(context), channel=3)
        torch.stack([peer[0] for peer in peers], out=seen)
        torch.minimum(least, seen - own, out=least)
        team.barrier(current(context), channel=3)

    step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
        step()
    for _ in range(rounds):
        graph.replay()
    team.synchronize(current(context))
    context.barrier()
    return int(own[0]), [int(x) for x in seen], [int(x) for x in least]


def test_barriers_order_writes_and_reads_in_graphs_too(gpus, size):
    count = 1 + 2 * 200
    wanted = (count, [count] * size, [0] * size)
    assert gpus.run(check_order, 200, ranks=size) == [wanted] * size


def check_timeout(context, library):
    """The last rank comes late: the others say so, and all go on."""
    team, last = context.team, context.size - 1
    stream = current(context, library)
    outcome = []
    if context.rank != last:
        team.barrier(stream, channel=1, timeout=0.5)
        for _ in range(4):  # they end with the first, not when their own time is up
            team.barrier(stream, channel=1, timeout=86400.0)
        try:
            team.synchronize(stream)
        except OpTimeout as error:
            outcome = [error.ranks, f"rank {last}" in str(error)]
    context.barrier()
    for _ in range(3):
        team.barrier(stream, channel=1, timeout=20)
    team.synchronize(stream)
    import torch

    x = torch.ones(64, 64, device=f"cuda:{context.device_id}")
    return outcome, float((x @ x).sum().item())


def test_a_late_rank_is_named_and_the_gpu_stays_usable(gpus, size):
    last = size - 1
    good = ([(last,), True], 64.0 * 64 * 64)
    wanted = [good] * last + [([], good[1])]
    if size > 1:
        assert gpus.run(check_timeout, "torch", ranks=size) == wanted


def check_streams(context):
    """Two streams, two groups, two channels at once."""
    import torch

    torch.cuda.set_device(context.device_id)
    pair = context.split(context.rank // 2)
    streams_of = [torch.cuda.Stream() for _ in range(3)]
    for _ in range(50):
        context.team.barrier(streams_of[0].cuda_stream, channel=0)
        pair.team.barrier(streams_of[1].cuda_stream, channel=0)
        context.team.barrier(streams_of[2].cuda_stream, channel=1)
    for each in streams_of:
        context.team.synchronize(each.cuda_stream)
    pair.team.check()
    return pair.size


def test_streams_and_groups_do_not_wait_for_each_other(gpus, size):
    sizes = [min(2, size - rank // 2 * 2) for rank in range(size)]
    assert gpus.run(check_streams, ranks=size) == sizes


def check_arguments(context):
    import torch

    device = context.team.device
    torch.cuda.set_device(context.device_id)
    stream = torch.cuda.Stream()
    found = [
        streams.resolve_stream(stream, "torch", device) == stream.cuda_stream,
        streams.resolve_stream(stream.cuda_stream, "torch", device) == stream.cuda_stream,
        streams.resolve_stream(None, "numpy", device) == 0,
    ]
    with torch.cuda.stream(stream):
        found.append(streams.resolve_stream(None, "torch", device) == stream.cuda_stream)
    try:
        import cupy

        with cupy.cuda.Device(context.device_id), cupy.cuda.Stream() as other:
            found.append(streams.resolve_stream(None, "cupy", device) == other.ptr)
            found.append(streams.resolve_stream(other, "cupy", device) == other.ptr)
    except ImportError:
        pass
    refused = []
    for wrong in ("stream", 1.5, object(), True):
        try:
            streams.resolve_stream(wrong, "torch", device)
        except TypeError:
            refused.append(wrong)
    if GPUS > 1:
        another = (context.device_id + 1) % GPUS
        with torch.cuda.device(another):
            foreign = torch.cuda.Stream()
        try:
            streams.resolve_stream(foreign, "torch", device)
        except ValueError as error:
            found.append(f"device {another}" in str(error))
    try:
        context.team.barrier(0, channel=64)
    except ValueError:
        refused.append(64)
    context.barrier()
    return all(found), len(refused)


def test_what_a_stream_may_be(gpus, size):
    assert gpus.run(check_arguments, ranks=size) == [(True, 5)] * size


def check_no_such_device(context):
    from shardmath.context.startup import new_context
    from shardmath.group.base import SoloProcessGroup

    try:
        new_context(999, SoloProcessGroup())
    except BackendUnavailable as error:
        return "999" in str(error)
    return None


def test_a_device_that_is_not_there(gpus):
    assert gpus.run(check_no_such_device, ranks=1) == [True]


def test_constants_are_the_kernels():
    from shardmath.collectives import cells
    from shardmath.cuda.compile import KERNELS

    text = "".join(path.read_text() for path in KERNELS.glob("*.cuh"))
    for name, value in (
        ("kThreads", cells._MAX_THREADS),
        ("kPhases", f"kRanks == 2 ? {cells._phases(2)} : {cells._phases(3)}"),
        ("kSets", cells._SETS),
    ):
        assert f"constexpr int {name} = {value};" in text
