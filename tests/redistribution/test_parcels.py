"""What is packed, fetched and unpacked where peers have no address: every rank in this process."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import redistribution_cases as cases
from hypothesis import given
from hypothesis import strategies as st

from arrangements import part_of
from copying import copy_boxes
from draws import drawn
from shardmath.geometry import BlockCyclic, Layout, ProcessGrid, Replicated, Slab, decode
from shardmath.redistribution import TransferPlan, lowered
from shardmath.redistribution.delivery import Delivery, Outbox

SENTINEL = 0xA5


def bytes_of(whole, view):
    """The memory of `whole`, and where element 0 of `view` is."""
    start = view.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    raw = np.ndarray((whole.nbytes,), np.uint8, whole.ravel("K").data) if whole.size else None
    return (np.zeros(0, np.uint8), 0) if raw is None else (raw, start)


def delivered(transfer, parts, stores, hosts, axes):
    """Every rank's array after the delivery, and the sum of what is fetched by each."""
    size = len(parts)
    ranks = [Delivery(transfer, rank, hosts, axes) for rank in range(size)]
    empty = np.zeros
    held, outboxes = [], []
    for rank, part in enumerate(parts):
        inner, whole = cases.stored(part, stores[rank], empty)
        held.append((inner, bytes_of(inner if whole is None else whole, inner)))
        outbox = np.full(ranks[rank].outbox.nbytes, SENTINEL, np.uint8)
        copy_boxes(ranks[rank].outbox.packing(inner.strides), [held[-1][1]], (outbox, 0))
        outboxes.append(outbox)
    results, fetched = [], []
    for rank, each in enumerate(ranks):
        room = np.full(each.room, SENTINEL, np.uint8)
        for one in each.fetches:
            assert hosts[one.src] != hosts[rank]
            room[one.at : one.at + one.nbytes] = outboxes[one.src][
                one.offset : one.offset + one.nbytes
            ]
        fetched.append(sum(one.nbytes for one in each.fetches))
        result, whole = cases.stored(
            np.zeros(transfer.dst.local_shape(rank), parts[0].dtype), stores[rank], empty
        )
        target = bytes_of(result if whole is None else whole, result)
        memories = each.memories(
            held[rank][1], (room, 0), [(outboxes[peer], 0) for peer in each.same_host]
        )
        boxes = each.unpacking(held[rank][0].strides, result.strides)
        copy_boxes(boxes, memories, target)
        assert cases.untouched(result, whole)
        results.append(result)
    return results, fetched


@drawn(120)
@given(
    case=cases.cases(libraries=("numpy",), stores=("C", "F", "strided", "reversed")),
    count=st.integers(1, 3),
)
def test_any_delivery(case, count):
    size, shape, inputs, outputs, _, dtype, stores, _ = case
    whole = cases.global_array(shape, dtype)
    ends = [[decode(each) for each in side] for side in (inputs, outputs)]
    transfer = TransferPlan(*(Layout.bind(side, shape) for side in ends), whole.itemsize)
    parts = [part_of(whole, ends[0][rank], rank, size) for rank in range(size)]
    hosts = tuple(rank * count // size for rank in range(size))
    for axes in (tuple(range(len(shape))), tuple(reversed(range(len(shape))))):
        found, _ = delivered(transfer, parts, stores, hosts, axes)
        for rank, result in enumerate(found):
            want = part_of(whole, ends[1][rank], rank, size)
            assert result.tobytes() == want.tobytes()


GRID = ProcessGrid(shape=(2, 2), layout=ProcessGrid.Layout.ROW_MAJOR)


@pytest.mark.parametrize(
    ("source", "target", "shared"),
    [
        (Slab.X, Slab.Y, False),
        (Slab.Y, Slab.X, False),
        (Slab.X, Replicated(), True),
        (BlockCyclic(GRID, (3, 2)), Slab.X, False),
        (BlockCyclic(GRID, (3, 2)), BlockCyclic(GRID, (2, 5)), False),
    ],
)
def test_no_byte_is_fetched_that_is_not_needed(source, target, shared):
    """And of what several peers take there is one copy in the outbox."""
    shape, hosts = (24, 40), (0, 0, 1, 1)
    transfer = TransferPlan(*(Layout.bind([d] * 4, shape) for d in (source, target)), 8)
    whole = cases.global_array(shape, "f8")
    parts = [part_of(whole, source, rank, 4) for rank in range(4)]
    results, fetched = delivered(transfer, parts, ["C"] * 4, hosts, (0, 1))
    for rank in range(4):
        assert results[rank].tobytes() == part_of(whole, target, rank, 4).tobytes()
        far = [m for m in transfer.into(rank) if hosts[m.src] != hosts[rank]]
        assert fetched[rank] == 8 * sum(move.elements for move in far)
        each = Delivery(transfer, rank, hosts, (0, 1))
        assert len(each.fetches) == len({move.src for move in far})
        gaps = 256 * (1 if shared else 3)  # parcels begin at multiples of it
        assert each.outbox.nbytes < 8 * parts[rank].size + gaps
        assert not shared or len(set(map(id, each.outbox.parcels.values()))) == 1


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("block", [2, 5, 32])
def test_parts_along_the_slowest_axis_are_ranges(axis, block):
    """An interval of one axis takes the bytes of that interval alone, from any parcel."""
    shape, size = (30, 44), 4
    ends = [BlockCyclic(GRID, (block, block)), Slab.X if axis else Slab.Y]
    transfer = TransferPlan(*(Layout.bind([d] * size, shape) for d in ends), 4)
    axes = (axis, 1 - axis)
    whole = cases.global_array(shape, "f4")
    for rank in range(size):
        want = part_of(whole, ends[1], rank, size)
        peers = [src for src in transfer.sources(rank) if src != rank]
        boxes = {src: Outbox.of(transfer, src, axes) for src in peers}
        delivery = Delivery(transfer, rank, tuple(range(size)), axes)  # every rank on its own host
        moves = [move for move in delivery.moves if move.src != rank]
        for lo in range(0, want.shape[axis], 7):
            hi = min(lo + 7, want.shape[axis])
            parts = [part for move in moves for part in move.clipped(axis, lo, hi)]
            interval_of = delivery.only(parts)
            found = interval_of.fetches
            assert sum(each.nbytes for each in found) == 4 * sum(p.elements for p in parts)
            room = np.full(interval_of.room, SENTINEL, np.uint8)
            starts = {}
            for each in found:
                box = boxes[each.src]
                held = np.zeros(box.nbytes, np.uint8)
                part = np.ascontiguousarray(part_of(whole, ends[0], each.src, size))
                packing = box.packing(part.strides)
                copy_strided(packing, part.view(np.uint8).reshape(-1), held)
                room[each.at : each.at + each.nbytes] = held[
                    each.offset : each.offset + each.nbytes
                ]
                starts[each.src] = each.at - each.offset + box.parcels[rank].offset
            panel = np.zeros((hi - lo, want.shape[1 - axis]), "f4")
            panel = panel if axis == 0 else np.ascontiguousarray(panel.T)
            wanted = np.zeros_like(panel)
            for move in parts:
                parcel = boxes[move.src].parcels[rank]
                copy = lowered(move, 4, parcel.strides, panel.strides)
                copy_strided([copy], room, panel.view(np.uint8).reshape(-1), starts[move.src])
                cut = np.ix_(*(run_indices(run) for run in move.runs))
                interval = want[lo:hi] if axis == 0 else want[:, lo:hi]
                wanted[cut] = interval[cut]
            assert panel.tobytes() == wanted.tobytes()


def run_indices(run):
    return [
        run.dst_start + i * run.dst_step + j for i in range(run.count) for j in range(run.length)
    ]


def copy_strided(copies, source, target, start=0):
    for copy in copies:
        for index in itertools.product(*map(range, copy.shape)):
            one = start + copy.src_offset + int(np.dot(index, copy.src_strides))
            two = copy.dst_offset + int(np.dot(index, copy.dst_strides))
            assert one >= 0 and two >= 0
            target[two : two + copy.unit] = source[one : one + copy.unit]
