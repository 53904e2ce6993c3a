"""Programs performed by NumPy, every rank in one process: the performer that hides nothing.

Between two synchronisations ranks run one after the other, in an order of the caller's choice. What
a program leaves to chance shows: a rank that reads what a peer has not written yet, or writes what
one still reads, gets another result in another order.
"""

from __future__ import annotations

import numpy as np

from shardmath.geometry import moves, shared_part
from shardmath.program.steps import Combine, Get, Move, Multiply, Pack, Synchronise, Unpack
from shardmath.redistribution import StridedCopy, Window
from shardmath.redistribution.host import copy_moves, perform

__all__ = ["interpret"]


def interpret(programs, arrays, order):
    """The results of all ranks, by rank and name.

    `programs` are all ranks', `arrays` their operands by name; `order` is a permutation of the
    ranks, in which they run between synchronisations.
    """
    buffers = [dict(own) for own in arrays]
    for rank, program in enumerate(programs):
        for name, array in {**program.workspace, **program.results}.items():
            stale = np.full(array.layout.local_shape(rank), 77, array.dtype, array.order)
            buffers[rank][name] = stale
    phases = [split_phases(program.steps) for program in programs]
    assert len({len(each) for each in phases}) == 1, "all ranks synchronise alike"
    for together in zip(*phases, strict=True):
        for rank in order:
            for step in together[rank]:
                PERFORM[type(step)](step, rank, buffers)
    return [
        {name: buffers[rank][name] for name in program.results}
        for rank, program in enumerate(programs)
    ]


def split_phases(steps):
    """The steps between synchronisations."""
    found = [[]]
    for step in steps:
        if isinstance(step, Synchronise):
            found.append([])
        else:
            found[-1].append(step)
    return found


def move(step, rank, buffers):
    found = moves(step.transfer.src, step.transfer.dst, dst_rank=rank)
    copy_moves(found, lambda src: buffers[src][step.source], buffers[rank][step.target], rank=rank)


def multiply(step, rank, buffers):
    own = buffers[rank]
    own[step.target][...] = own[step.left] @ own[step.right]


def combine(step, rank, buffers):
    target = buffers[rank][step.target]
    target[...] = 0
    for src in range(len(buffers)):
        found = shared_part(step.held, step.needed, src=src, dst=rank)
        copy_moves(found, lambda r: buffers[r][step.source], target, add=True)


def pack(step, rank, buffers):
    source = buffers[rank][step.source]
    outbox = np.full(step.delivery.outbox.nbytes, 0xA5, "u1")
    perform(step.delivery.outbox.packing(source.strides), {0: Window.of(source)}, Window.of(outbox))
    buffers[rank][step.outbox] = outbox


def get(step, rank, buffers):
    fetched = np.full(step.delivery.room, 0xA5, "u1")
    for each in step.delivery.fetches:
        part = buffers[each.src][step.outbox][each.offset : each.offset + each.nbytes]
        fetched[each.at : each.at + each.nbytes] = part
    buffers[rank][step.target] = fetched


def unpack(step, rank, buffers):
    """The boxes name their memories by number: see `Delivery.memories`."""
    delivery, own, target = step.delivery, buffers[rank][step.source], buffers[rank][step.target]
    near = [buffers[peer][step.outbox] for peer in delivery.near]
    memories = dict(enumerate([own, buffers[rank][step.fetched], *near]))
    windows = {number: Window.of(memory) for number, memory in memories.items()}
    perform(
        map(copy_of, delivery.unpacking(own.strides, target.strides)), windows, Window.of(target)
    )


def copy_of(box):
    """The copy that a box for GPUs is."""
    return StridedCopy(
        box.source,
        box.unit,
        box.shape,
        box.source_offset,
        box.source_strides,
        box.target_offset,
        box.target_strides,
    )


PERFORM = {
    Move: move,
    Multiply: multiply,
    Combine: combine,
    Pack: pack,
    Get: get,
    Unpack: unpack,
}
