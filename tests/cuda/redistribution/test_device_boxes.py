"""Strided boxes copied by the kernel, between one GPU's memories and its peers', against NumPy."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from shardmath.cuda.driver import call
from shardmath.cuda.stream import resolve_stream
from shardmath.redistribution.copies import StridedCopy
from shardmath.symmetric.heap import Location

UNITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 40, 64, 100, 256, 1000, 70_000)
EXTENTS = (1, 2, 3, 5, 8, 16, 33, 64, 70, 200)


def strided(rng, shape, unit):
    """Strides for any order of axes, with gaps, some reversed: (offset, strides, end)."""
    order = rng.sample(range(len(shape)), len(shape))
    step = unit + rng.choice([0, 0, 0, unit, 1, 16])
    strides, offset = [0] * len(shape), 0
    for axis in order:
        strides[axis] = step
        step = step * shape[axis] + rng.choice([0, 0, 0, 0, 1, 16])
    end = unit + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    for axis in rng.sample(range(len(shape)), len(shape) // 3):
        offset += (shape[axis] - 1) * strides[axis]
        strides[axis] = -strides[axis]
    return offset, tuple(strides), end


def random_boxes(rng, sources, targets):
    """A few boxes, and the bytes of each memory. Boxes of one target lie one after the other."""
    rooms, ends, boxes = [0] * sources, [0] * targets, []
    for _ in range(rng.randint(1, 5)):
        unit = rng.choice(UNITS)
        shape = [rng.choice(EXTENTS) for _ in range(rng.randint(0, 5))]
        while unit * np.prod(shape) > 400_000:
            shape[shape.index(max(shape))] //= 2
        shape = tuple(max(1, n) for n in shape)
        source, target = rng.randrange(sources), rng.randrange(targets)
        start, steps, end = strided(rng, shape, unit)
        if shape and rng.random() < 0.1 and steps[0] > 0:
            steps = (0, *steps[1:])  # the same units again
        shift = rng.choice([0, 0, 16, 8, 4, 1])
        rooms[source] = max(rooms[source], end + shift)
        at, strides, end = strided(rng, shape, unit)
        boxes.append(
            StridedCopy(
                source, target, unit, shape, start + shift, steps, ends[target] + at, strides
            )
        )
        ends[target] = -(-(ends[target] + end) // 16) * 16 + rng.choice([0, 0, 16, 3])
    return boxes, [room + 32 for room in rooms], [end + 32 for end in ends]


def viewed(memory, unit, shape, offset, strides):
    """The units of a box as an array of bytes."""
    low = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if s < 0)
    flat = memory[low:]
    return np.ndarray((*shape, unit), np.uint8, flat.data, offset - low, (*strides, 1))


def perform(boxes, sources, targets):
    """What the kernel is to do, by NumPy."""
    for box in boxes:
        source = viewed(sources[box.src], box.unit, box.shape, box.src_offset, box.src_strides)
        target = viewed(targets[box.dst], box.unit, box.shape, box.dst_offset, box.dst_strides)
        target[...] = source


def filled(context, bytes_):
    """A buffer of the heap that holds these bytes."""
    buffer = context.heap.allocate(len(bytes_) + 16)
    context.team.device.activate()
    call("cuMemcpyHtoD", buffer.block.address, bytes_.ctypes.data, len(bytes_))
    return buffer


def held(buffer, count):
    found = np.empty(count, np.uint8)
    call("cuMemcpyDtoH", found.ctypes.data, buffer.block.address, count)
    return found


def random_bytes(seed, count):
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8)


def check_local(context, seed, cases):
    """Boxes within one GPU, with sentinels between them."""
    from shardmath.redistribution.box_copies import BoxCopies

    wrong = []
    for case in range(cases):
        rng = random.Random(1000 * seed + case)
        boxes, rooms, ends = random_boxes(rng, rng.randint(1, 3), rng.randint(1, 3))
        sources = [random_bytes(case + k, room) for k, room in enumerate(rooms)]
        targets = [np.full(end, 0x5A, np.uint8) for end in ends]
        there = [filled(context, each) for each in sources]
        into = [filled(context, each) for each in targets]
        copies = BoxCopies(context.team.device, boxes)
        addresses = [[buffer.block.address for buffer in buffers] for buffers in (there, into)]
        copies.launch(0, *addresses, blocks=rng.choice([0, 1, 7]))
        context.team.synchronize(0)
        perform(boxes, sources, targets)
        for number, (buffer, want) in enumerate(zip(into, targets, strict=True)):
            got = held(buffer, len(want))
            if not (got == want).all():
                at = int(np.flatnonzero(got != want)[0])
                wrong.append((seed, case, number, at, str(boxes)))
    return wrong[:3]


@pytest.mark.parametrize("seed", range(4))
def test_random_boxes_on_one_gpu(gpus, seed):
    assert gpus.run(check_local, seed, 60, ranks=1) == [[]]


def check_peers(context, seed, cases):
    """Every rank pushes its boxes to all ranks, and then pulls boxes from all of them."""
    from shardmath.redistribution.box_copies import BoxCopies

    size, rank, team, wrong = context.size, context.rank, context.team, []
    for case in range(cases):
        plans = [random_boxes(random.Random(f"{seed} {case} {r}"), 1, size) for r in range(size)]
        rooms = [[plan[2][r] for plan in plans] for r in range(size)]  # [target][source]
        starts = [np.cumsum([0, *(-(-n // 16) * 16 for n in row)]) for row in rooms]
        sources = [random_bytes(case + r, plans[r][1][0]) for r in range(size)]
        own = filled(context, sources[rank])
        into = filled(context, np.full(starts[rank][-1], 0x5A, np.uint8))
        places = context.agree("test", lambda own=own, into=into: tell(context, own, into), list)
        reach = [
            [context.peer_address(r, Location(*place[k : k + 2]), place[k + 2]) for k in (0, 3)]
            for r, place in enumerate(places)
        ]
        copies = BoxCopies(team.device, plans[rank][0])
        targets = [reach[r][1] + int(starts[r][rank]) for r in range(size)]
        team.barrier(0)
        copies.launch(0, [own.block.address], targets)
        team.barrier(0)
        team.synchronize(0)
        want = np.full(starts[rank][-1], 0x5A, np.uint8)
        for r, (boxes, _, _) in enumerate(plans):
            mine = [box for box in boxes if box.dst == rank]
            views = {rank: want[starts[rank][r] :]}
            perform(mine, [sources[r]], views)
        if not (held(into, len(want)) == want).all():
            wrong.append(("push", case))
        # The same boxes of the next rank, pulled from what all ranks have as their source.
        boxes, rooms, ends = random_boxes(random.Random(f"{seed} {case} pull"), size, 1)
        whole = [np.resize(random_bytes(r, 4096), room) for r, room in enumerate(rooms)]
        own = filled(context, whole[rank])
        into = filled(context, np.full(ends[0], 0x5A, np.uint8))
        places = context.agree("test", lambda own=own, into=into: tell(context, own, into), list)
        reach = [
            context.peer_address(r, Location(*place[:2]), place[2])
            for r, place in enumerate(places)
        ]
        team.barrier(0)
        BoxCopies(team.device, boxes).launch(0, reach, [into.block.address])
        team.barrier(0)
        team.synchronize(0)
        want = np.full(ends[0], 0x5A, np.uint8)
        perform(boxes, whole, [want])
        if not (held(into, len(want)) == want).all():
            wrong.append(("pull", case))
    return wrong


def tell(context, *buffers):
    for buffer in buffers:
        context.announce(buffer.block)
    where = [(b.block.location.segment, b.block.location.offset, b.block.nbytes) for b in buffers]
    return tuple(itertools.chain(*where))


@pytest.mark.parametrize("seed", range(2))
def test_random_boxes_between_gpus(gpus, size, seed):
    assert gpus.run(check_peers, seed, 12, ranks=size) == [[]] * size


def check_capture(context):
    """A launch in a graph, of an object that is made while the graph is captured, and replayed."""
    from shardmath.redistribution.box_copies import BoxCopies

    device = context.team.device
    data = random_bytes(1, 6000)
    source, target = filled(context, data), filled(context, np.zeros(6000, np.uint8))
    addresses = [source.block.address], [target.block.address]
    box = StridedCopy(0, 0, 2, (30, 100), 0, (200, 2), 0, (2, 60))
    BoxCopies(device, [box]).launch(0, *addresses)  # loads the kernel
    stream = call("cuStreamCreate", 1)
    call("cuStreamBeginCapture", stream, 0)
    assert resolve_stream(int(stream), "numpy", device) == int(stream)  # as operations begin
    copies = BoxCopies(device, [box])
    copies.launch(stream, *addresses)
    graph = call("cuGraphInstantiate", call("cuStreamEndCapture", stream), 0)
    found = []
    for turn in range(2):
        now = np.roll(data, turn)
        call("cuMemcpyHtoD", source.block.address, now.ctypes.data, len(now))
        call("cuGraphLaunch", graph, stream)
        call("cuStreamSynchronize", stream)
        want = np.zeros(6000, np.uint8)
        perform([box], [now], [want])
        found.append(bool((held(target, 6000) == want).all()))
    call("cuGraphExecDestroy", graph)
    call("cuStreamDestroy", stream)
    return found


def test_capture_and_replay(gpus):
    assert gpus.run(check_capture, ranks=1) == [[True, True]]


CYCLES = 400_000_000  # of a GPU: some tenths of a second


def check_dropped(context):
    """Objects that are dropped while a kernel is ahead of their launches, and others made then.

    Whether the stream was still busy when all was dropped, and whether each launch copied.
    """
    import torch

    from shardmath.redistribution.box_copies import BoxCopies

    device = context.team.device
    torch.cuda.set_device(device.ordinal)
    stream = torch.cuda.Stream()
    data = random_bytes(2, 6000)
    source = filled(context, data)
    targets = [filled(context, np.zeros(6000, np.uint8)) for _ in range(5)]
    box = StridedCopy(0, 0, 2, (30, 100), 0, (200, 2), 0, (2, 60))
    other = StridedCopy(0, 0, 2, (100, 30), 0, (60, 2), 0, (2, 200))
    spare = filled(context, np.zeros(6000, np.uint8))
    BoxCopies(device, [box]).launch(
        stream.cuda_stream, [source.block.address], [spare.block.address]
    )
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(CYCLES)
    for target in targets:
        copies = BoxCopies(device, [box])
        copies.launch(stream.cuda_stream, [source.block.address], [target.block.address])
        del copies
        BoxCopies(device, [other])  # whose tables are not to lie where those did
    busy = not stream.query()
    torch.cuda.synchronize()
    want = np.zeros(6000, np.uint8)
    perform([box], [data], [want])
    return busy, [bool((held(target, 6000) == want).all()) for target in targets]


def test_dropping_waits_for_nothing(gpus):
    assert gpus.run(check_dropped, ranks=1) == [(True, [True] * 5)]
