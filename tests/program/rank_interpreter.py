"""Programs of ranks (`program.rank_program`) performed by NumPy, all ranks in one process.

Memory is an array of bytes for every memory of every rank; that of the lane is full of NaN. What a
step of a type does, `PERFORM` says; products add their steps. A plan of cuFFT runs as cuFFT defines
it, element by element of its embedding, so that any wrong stride shows. What is pushed in chunks is
pushed row by row, as the kernel's tables have it.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "fft"))

import fft_cases
import numpy as np
from gpu_arithmetic import address_of, room
from numpy.lib.stride_tricks import as_strided
from streams import schedule

from copying import copy_boxes
from shardmath.arrays import dtypes
from shardmath.arrays.spec import packed_strides
from shardmath.operators.fft.local_steps import LocalFFT, Scale, Turn
from shardmath.operators.fft.pushes import Chunk
from shardmath.program.rank_program import Copy, View
from shardmath.program.steps import Get, Move, Pack, Unpack, plain
from shardmath.redistribution.copies import lowered
from shardmath.redistribution.plan import SomeMoves

__all__ = ["Rank", "interpret_ranks", "perform", "turned"]


class Rank:
    """One rank: its program, and its memories as (bytes, where they begin); `users` are the user's.

    `numbers` are those of the call.
    """

    def __init__(self, number, program, users, *, forward=True, numbers=None, steps=None):
        self.number, self.program, self.forward = number, program, forward
        self.steps = plain(program.steps) if steps is None else steps
        self.ranks, self.numbers, self.matrices = [self], numbers, {}
        self.memories = {n: (room(memory.nbytes), 0) for n, memory in program.memories.items()}
        self.memories |= users
        self.users = users.keys()
        for name in program.shared:
            view = program.told.get(name)
            memory = name if view is None else view.memory
            reached = memory in users or (name in program.told and view is None)
            assert reached or program.memories[memory].shared, f"peers reach {memory}"

    def array(self, view, dtype=None):
        return self.at(view.memory, view.offset, view.shape, view.strides, dtype or view.dtype)

    def at(self, memory, offset, shape, strides, dtype):
        """An array in a memory, which must hold all of it."""
        raw, origin = self.memories[memory]
        dtype = dtypes.to_numpy(dtype) if isinstance(dtype, str) else np.dtype(dtype)
        if 0 in shape:
            return np.empty(shape, dtype)
        ends = [(n - 1) * step for n, step in zip(shape, strides, strict=True)]
        assert origin + offset + sum(min(end, 0) for end in ends) >= 0
        last = origin + offset + sum(max(end, 0) for end in ends)
        assert last + dtype.itemsize <= raw.size
        return np.ndarray(shape, dtype, raw.data, origin + offset, strides)

    def named(self, name):
        return self.program.arrays[name]

    def start(self, view):
        """The bytes of a view's memory, and where it begins in them."""
        raw, origin = self.memories[view.memory]
        return raw, origin + view.offset

    def matrix(self, name):
        """A matrix of this rank's or of a peer's, at its address; it is in its memory."""
        if name not in self.matrices:
            self.matrices[name] = self._matrix(name)
        return self.matrices[name]

    def _matrix(self, name):
        peer = self.program.peers.get(name)
        if peer is None:
            view, rank = self.named(name), self
        else:
            rank = self.ranks[peer.rank]
            number = self.program.shared.index(peer.name)
            view = rank.of_shared(rank.program.shared[number], peer)
        rank.array(view)
        raw, start = rank.start(view)
        return view.matrix._replace(address=address_of(raw) + start)

    def of_shared(self, name, peer):
        """The view that a box of what this rank shares is."""
        told = self.program.told.get(name)
        memory, offset = (name, 0) if told is None else (told.memory, told.offset)
        strides = None if told is None else told.strides
        if peer.parcel is not None:
            start, strides = peer.parcel
            offset += start
        offset += sum(first * step for (first, _), step in zip(peer.box, strides, strict=True))
        return View(memory, tuple(hi - lo for lo, hi in peer.box), strides, peer.dtype, 0, offset)

    def of_peer(self, peer, memory, shape, itemsize):
        """A peer's array in the memory that corresponds to this one."""
        there = self.ranks[peer]
        name = there.program.shared[self.program.shared.index(memory)]
        if name in there.users:  # of these a peer tells the strides; the others have no gaps
            strides = there.named(name).strides
        else:
            strides = packed_strides(shape, itemsize, self.program.order)
        return there.at(name, 0, shape, strides, f"V{itemsize}" if 0 not in shape else "V1")


def interpret_ranks(ranks, *, seed=0):
    """Perform the programs of all ranks, in an order in which their streams might."""
    for rank in ranks:
        rank.ranks = ranks
    schedule(ranks, random.Random(seed), PERFORM)


def perform(step, rank):
    """Perform a step of one rank alone."""
    PERFORM[type(step)](step, rank)


# -- moves -----------------------------------------------------------------------------------------


def move(step, rank):
    transfer = step.transfer
    source, target = rank.named(step.source), rank.named(step.target)
    element = f"V{transfer.itemsize}"
    if step.source in rank.program.told or isinstance(transfer, SomeMoves):
        for each in transfer.into(rank.number):
            there, view = rank.ranks[each.src], source
            if each.src != rank.number:
                number = rank.program.shared.index(step.source)
                view = there.program.told[there.program.shared[number]]
            copy = lowered(each, transfer.itemsize, view.strides, target.strides)
            copy_boxes([replace(copy, src=0)], [there.start(view)], rank.start(target))
    elif rank.program.pushes(step.target):
        own = rank.array(source, element)
        for each in transfer.out_of(rank.number):
            shape = transfer.result_shape(each.dst)
            there = rank.of_peer(each.dst, target.memory, shape, transfer.itemsize)
            if each.dst == rank.number:
                there = rank.array(target, element)
            copy_move(each, own, there)
    else:
        own = rank.array(target, element)
        for each in transfer.into(rank.number):
            there = rank.array(source, element)
            if each.src != rank.number:
                shape = transfer.source_shape(each.src)
                there = rank.of_peer(each.src, source.memory, shape, transfer.itemsize)
            copy_move(each, there, own)


def copy_move(each, source, target):
    def indices(run, which):
        start, step = getattr(run, f"{which}_start"), getattr(run, f"{which}_step")
        return [start + i * step + j for i in range(run.count) for j in range(run.length)]

    taken = source[np.ix_(*(indices(run, "src") for run in each.runs))]
    target[np.ix_(*(indices(run, "dst") for run in each.runs))] = taken


def copy(step, rank):
    rank.array(step.target)[...] = rank.array(step.source)


def chunk(step, rank):
    raw, start = rank.memories[step.source]
    for rows in step.rows:
        there = rank.ranks[rows.peer]
        name = there.program.shared[rank.program.shared.index(step.target)]
        target, origin = there.memories[name]
        for i in range(rows.count):
            one = start + rows.source + i * rows.source_pitch
            two = origin + rows.target + i * rows.target_pitch
            assert one + rows.width <= raw.size
            assert two + rows.width <= target.size
            target[two : two + rows.width] = raw[one : one + rows.width]


def pack(step, rank):
    source = rank.named(step.source)
    boxes = step.delivery.outbox.packing(source.strides)
    copy_boxes(boxes, [rank.start(source)], rank.memories[step.outbox])


def get(step, rank):
    target, _ = rank.memories[step.target]
    number, hosts = rank.program.shared.index(step.outbox), step.delivery.hosts
    for each in step.delivery.fetches:
        assert hosts[each.src] != hosts[rank.number]
        there = rank.ranks[each.src]
        outbox, _ = there.memories[there.program.shared[number]]
        target[each.at : each.at + each.nbytes] = outbox[each.offset : each.offset + each.nbytes]


def unpack(step, rank):
    source, target = rank.named(step.source), rank.named(step.target)
    number = rank.program.shared.index(step.outbox)
    near = [
        rank.ranks[peer].memories[rank.ranks[peer].program.shared[number]]
        for peer in step.delivery.same_host
    ]
    sources = step.delivery.memories(rank.start(source), rank.memories[step.fetched], near)
    boxes = step.delivery.unpacking(source.strides, target.strides)
    copy_boxes(boxes, sources, rank.start(target))


# -- local transforms ------------------------------------------------------------------------------


def scale(step, rank):
    target, made = rank.array(step.target), fft_cases.wide(rank.array(step.source))
    target[...] = fft_cases.as_type(made * step.factor, target.dtype)


def turn(step, rank):
    turned(step, rank.array(step.source), rank.array(step.target))


def turned(step, source, target):
    """As kernels/turn.cu."""
    source, into = (np.moveaxis(array, step.axis, -1) for array in (source, target))
    extent = step.factors.size
    made = source[..., :extent].astype(step.factors.dtype) * step.factors
    into[..., :extent] = made if target.dtype.kind == "c" else made.real
    into[..., extent:] = 0


def local_fft(step, rank):
    """As cuFFT: batches of `lengths`, each side placed by its embedding, stride and distance."""
    plan, kind = step.plan, step.kind
    half = (*plan.lengths[:-1], plan.lengths[-1] // 2 + 1)
    shapes = {"C2C": (plan.lengths,) * 2, "R2C": (plan.lengths, half), "C2R": (half, plan.lengths)}
    for offsets in plan.offsets:
        taken, left = (
            side(rank, view, layout, offset, shape, plan.batch)
            for view, layout, offset, shape in zip(
                (step.source, step.target),
                (plan.source, plan.target),
                offsets,
                shapes[kind],
                strict=True,
            )
        )
        axes = tuple(range(1, taken.ndim))
        wide = taken.astype(np.complex128 if taken.dtype.kind == "c" else np.float64)
        if kind == "R2C":
            made = np.fft.rfftn(wide, axes=axes)
        elif kind == "C2R":
            made = np.fft.irfftn(wide, s=plan.lengths, axes=axes, norm="forward")
            taken[...] = np.nan
        elif rank.forward:
            made = np.fft.fftn(wide, axes=axes)
        else:
            made = np.fft.ifftn(wide, axes=axes, norm="forward")
        left[...] = made


def side(rank, view, layout, offset, shape, count):
    size = view.itemsize
    steps = [layout.stride * size]
    for extent in layout.embed[:0:-1]:
        steps.insert(0, steps[0] * extent)
    raw, start = rank.start(view)
    raw = raw[start + offset :]
    flat = raw[: raw.size // size * size].view(np.dtype(view.dtype))
    reach = (count - 1) * layout.distance + sum(
        (n - 1) * step // size for n, step in zip(shape, steps, strict=True)
    )
    assert reach < flat.size, "a plan leaves its memory"
    return as_strided(flat, (count, *shape), (layout.distance * size, *steps))


PERFORM = {
    Move: move,
    Copy: copy,
    Chunk: chunk,
    Pack: pack,
    Get: get,
    Unpack: unpack,
    Scale: scale,
    Turn: turn,
    LocalFFT: local_fft,
}
