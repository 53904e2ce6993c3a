"""Programs performed by NumPy, every rank in one process: the performer that hides nothing.

Between two synchronisations ranks run one after the other, in an order of the caller's choice. What
a program leaves to chance shows: a rank that reads what a peer has not written yet, or writes what
one still reads, gets another result in another order.
"""

from __future__ import annotations

import math

import numpy as np

from copying import copy_moves, perform
from shardmath.arrays.dtypes import to_numpy
from shardmath.geometry import moves, shared_part
from shardmath.local import epilog, float8
from shardmath.local.fft import bound_transform
from shardmath.program.binding import round_into
from shardmath.program.steps import (
    Arrive,
    Axpby,
    Combine,
    Convert,
    Dequantize,
    Finish,
    Get,
    Largest,
    Move,
    Multiply,
    Pack,
    Quantize,
    SumLines,
    Synchronise,
    Transform,
    Unpack,
)
from shardmath.redistribution import Window

__all__ = ["interpret"]


def interpret(programs, arrays, order, numbers=None, *, late=False):
    """The results of all ranks, by rank and name.

    `programs` are all ranks', `arrays` their operands by name; `order` is a permutation of the
    ranks, in which they run between synchronisations. `numbers` are those of each rank's call. What
    a rank does after it has arrived is done before it synchronises, or, `late`, behind.
    """
    numbers = numbers or [{}] * len(arrays)
    buffers = [Buffers(own, told) for own, told in zip(arrays, numbers, strict=True)]
    for rank, program in enumerate(programs):
        own = buffers[rank]
        for name in {*program.transposed} & {*own}:
            own[name] = own[name].T
        made, memories = {**program.workspace, **program.results}, {}
        for name, array in made.items():
            place = getattr(array, "memory", "") or name
            size = math.prod(array.local_shape(rank)) * to_numpy(array.dtype).itemsize
            memories.setdefault(place, []).append((size, name))
        for sharing in memories.values():
            memory = np.full(max(1, *(size for size, _ in sharing)), 77, "u1").data
            for _, name in sharing:
                shape, dtype = made[name].local_shape(rank), to_numpy(made[name].dtype)
                own[name] = np.ndarray(shape, dtype, memory, order=made[name].order)
        for name, scratch in program.scratch.items():
            own[name] = np.full(own[scratch.like].shape, 77, to_numpy(scratch.dtype))
        for name in {*program.transposed} & {*program.results}:
            own[name] = own[name].T
    phases = [split_phases(program.steps, late) for program in programs]
    assert len({len(each) for each in phases}) == 1, "all ranks synchronise alike"
    for together in zip(*phases, strict=True):
        for rank in order:
            for step in together[rank]:
                PERFORM[type(step)](step, rank, buffers)
    return [
        {
            name: buffers[rank][name].T if name in program.transposed else buffers[rank][name]
            for name in program.results
        }
        for rank, program in enumerate(programs)
    ]


class Buffers(dict):
    """One rank's arrays by name, and the numbers of the call."""

    def __init__(self, arrays, numbers):
        super().__init__(arrays)
        self.numbers = numbers


def split_phases(steps, late):
    """The steps between synchronisations; `late`: those behind an arrival are of the next phase."""
    phases, arrived = [[]], False
    for step in steps:
        if isinstance(step, Arrive):
            assert not arrived, "once before each synchronisation"
            arrived = True
            if late:
                phases.append([])
        elif isinstance(step, Synchronise):
            if not (late and arrived):
                phases.append([])
            arrived = False
        else:
            phases[-1].append(step)
    assert not arrived, "and waits there"
    return phases


def move(step, rank, buffers):
    found = step.transfer.into(rank)
    copy_moves(found, lambda src: buffers[src][step.source], buffers[rank][step.target], rank=rank)


def multiply(step, rank, buffers):
    own = buffers[rank]
    factors = (own[name] for name in (step.left, step.right))
    left, right = (x.conj() if c else x for x, c in zip(factors, step.conjugate, strict=True))
    dtype = own[step.target].dtype
    own[step.target][...] = 0
    if own[step.target].size and left.size:
        own[step.target][...] = left.astype(dtype) @ right.astype(dtype)


def combine(step, rank, buffers):
    target, dtype = buffers[rank][step.target], buffers[rank][step.source].dtype
    if step.reduction is not None:
        spans = step.needed.spans(rank)
        cut = (*(slice(each.start, each.start + each.length) for each in spans), ...)
        target[...] = reduced(step.reduction, [own[step.source][cut] for own in buffers])
        return
    weight = buffers[rank].numbers[step.weight] if step.weight else 1
    if weight == 0:
        return
    total = target.astype(dtype) if step.weight else np.zeros(target.shape, dtype)
    for src in step.sources(rank):
        part = np.zeros(target.shape, dtype)
        found = shared_part(step.held, step.needed, src=src, dst=rank)
        copy_moves(found, lambda r: buffers[r][step.source], part)
        total = total + dtype.type(weight) * part
    target[...] = total


UFUNCS = {"min": np.minimum, "max": np.maximum, "product": np.multiply}


def reduced(reduction, parts):
    """All ranks' elements combined in rank order, and rounded once."""
    total, *others = (part.astype(to_numpy(reduction.accumulator)) for part in parts)
    with np.errstate(all="ignore"):
        for part in others:
            total = UFUNCS.get(reduction.op, np.add)(total, part)
        if reduction.op == "mean":
            total = np.divide(total, total.dtype.type(len(parts)))
        return total.astype(to_numpy(reduction.result))


def axpby(step, rank, buffers):
    own, target = buffers[rank], buffers[rank][step.target]
    target[...] = target * target.dtype.type(own.numbers[step.alpha])
    if step.addend and own.numbers[step.beta] != 0:
        beta = target.dtype.type(own.numbers[step.beta])
        target[...] = target + beta * own[step.addend].astype(target.dtype)


def finish(step, rank, buffers):
    own = buffers[rank]
    inputs, outputs = {n: own[n] for n in step.inputs}, {n: own[b] for n, b in step.outputs}
    d, made = epilog.apply(step.epilog, own[step.source].copy(), inputs, dtype=step.extras)
    own[step.target][...] = d
    for name, output in outputs.items():
        output[...] = made[name]


def sum_lines(step, rank, buffers):
    source, target = buffers[rank][step.source], buffers[rank][step.target]
    source = source.conj() if step.conjugate else source
    target[...] = source.astype(target.dtype).sum(axis=0 if step.columns else 1)


def convert(step, rank, buffers):
    round_into(buffers[rank][step.source], buffers[rank][step.target])


def fourier(step, rank, buffers):
    """All of a rank's part at once."""
    source, target = buffers[rank][step.source], buffers[rank][step.target]
    taken = np.empty(step.transfer.dst.local_shape(rank), source.dtype)
    found = moves(step.transfer.src, step.transfer.dst, dst_rank=rank)
    copy_moves(found, lambda src: buffers[src][step.source], taken, rank=rank)
    if taken.size:
        named = {"kind": step.kind, "forward": step.forward, "norm": step.norm}
        bound_transform(taken, step.axes, out=target, **named)()


def number_or_array(name, own, shape):
    number = own.numbers.get(name)
    return own[name].reshape(shape) if number is None else np.full(shape, number, "f4")


def dequantize(step, rank, buffers):
    own, source = buffers[rank], buffers[rank][step.source]
    scales = number_or_array(step.scale, own, step.blocks.shape(*source.shape))
    for (i, j), element in np.ndenumerate(source):
        row, column = i // (step.blocks.rows or 1 << 30), j // (step.blocks.columns or 1 << 30)
        own[step.target][i, j] = np.float32(element) * scales[row, column]


def quantize(step, rank, buffers):
    own = buffers[rank]
    float8.quantize(own[step.source], own.numbers[step.scale], own[step.target])


def largest(step, rank, buffers):
    buffers[rank][step.target][...] = np.abs(buffers[rank][step.source]).max(initial=0)


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
    """The copies name their memories by number: see `Delivery.memories`."""
    delivery, own, target = step.delivery, buffers[rank][step.source], buffers[rank][step.target]
    near = [buffers[peer][step.outbox] for peer in delivery.same_host]
    memories = dict(enumerate([own, buffers[rank][step.fetched], *near]))
    windows = {number: Window.of(memory) for number, memory in memories.items()}
    perform(delivery.unpacking(own.strides, target.strides), windows, Window.of(target))


PERFORM = {
    Move: move,
    Multiply: multiply,
    Combine: combine,
    Pack: pack,
    Get: get,
    Unpack: unpack,
    Axpby: axpby,
    Finish: finish,
    SumLines: sum_lines,
    Convert: convert,
    Transform: fourier,
    Dequantize: dequantize,
    Quantize: quantize,
    Largest: largest,
}
