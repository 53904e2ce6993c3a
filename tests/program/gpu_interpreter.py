"""Programs of products on GPUs performed by NumPy, every rank in one process.

Memory is the host's, each at a multiple of 256 bytes and full of NaN. A rank's streams run as they
like: which of the steps that may come next is next, a random number says. So a step that awaits
nothing, or a synchronisation that is missing, gives another result for another number. What
cuBLASLt asks of its factors is asserted.
"""

from __future__ import annotations

import ctypes
import random
from itertools import pairwise

import numpy as np

from copying import copy_boxes
from shardmath.arrays import dtypes
from shardmath.arrays.dtypes import of, to_numpy
from shardmath.handles.operand import Operand
from shardmath.local import epilog, float8
from shardmath.local.epilog import MatmulEpilog
from shardmath.local.gpu import Matrix, scaled
from shardmath.local.gpu.gemm import fits, takes_result
from shardmath.local.rounding import round_into
from shardmath.operators.matmul.gpu.lowering import lowered
from shardmath.operators.matmul.gpu.steps import (
    AddUp,
    Await,
    Clear,
    EpilogProduct,
    Fetched,
    Gather,
    Gemm,
    Greatest,
    LayOut,
    On,
    Packed,
    Push,
    Record,
    View,
    plain,
)
from shardmath.program.steps import (
    Convert,
    Dequantize,
    Fused,
    Quantize,
    SumLines,
    Synchronise,
)
from shardmath.redistribution.boxes import Box
from shardmath.redistribution.copies import lowered as lowered_move

__all__ = ["interpret_products", "on_gpu", "view"]

ALIGNMENT = 256


def room(nbytes):
    """Memory at a multiple of ALIGNMENT, full of NaN."""
    whole = np.full(nbytes + ALIGNMENT, 0xFF, np.uint8)
    start = -whole.ctypes.data % ALIGNMENT
    return whole[start : start + nbytes]


def on_gpu(x, shift=0):
    """An operand with the elements and strides of an array, `shift` bytes behind an alignment."""
    span = [(n - 1) * step for n, step in zip(x.shape, x.strides, strict=True)]
    low = sum(min(0, each) for each in span) if x.size else 0
    high = sum(max(0, each) for each in span) + x.itemsize if x.size else 0
    memory = room(shift + high - low)
    held = np.ndarray(x.shape, x.dtype, memory, offset=shift - low, strides=x.strides)
    held[...] = x
    address = memory.ctypes.data + shift - low
    return Operand(address, x.shape, x.strides, of(x.dtype).name, None, memory)


def view(x: Matrix):
    """A matrix of the "GPU" as NumPy sees it."""
    if not x.size:
        return np.zeros((x.rows, x.columns), to_numpy(x.dtype))
    item = x.itemsize
    steps = (x.row_stride * item, x.column_stride * item)
    ends = [(n - 1) * step for n, step in zip((x.rows, x.columns), steps, strict=True)]
    low, high = (sum(pick(0, end) for end in ends) for pick in (min, max))
    buffer = (ctypes.c_char * (high - low + item)).from_address(x.address + low)
    return np.ndarray((x.rows, x.columns), to_numpy(x.dtype), buffer, offset=-low, strides=steps)


class Rank:
    """One rank: its program, its memories, and what its peers find."""

    def __init__(self, rank_plan, operands, addition_order, ranks, within):
        self.rank_plan, self.operands, self.ranks = rank_plan, operands, ranks
        self.program = lowered(rank_plan, operands.lying(), addition_order)
        self.steps = within_products(self.program.steps) if within else self.program.plain
        self.numbers = operands.values
        self.memories, self.bases = {}, {}
        for name, array in operands.arrays.items():
            self.bases[name] = array.address - array.address % ALIGNMENT
        for name, memory in self.program.memories.items():
            self.memories[name] = held = room(memory.nbytes)
            self.bases[name] = held.ctypes.data
        for buffer, _ in self.program.published.values():
            memory = self.program.buffers[buffer].memory
            assert memory in "ab" or self.program.memories[memory].shared, f"peers reach {memory}"

    def matrix(self, name):
        """Where a buffer lies; it is in its memory."""
        buffer = self.program.buffers[name]
        if isinstance(buffer, View):
            x = buffer.matrix
            held = self.memories.get(buffer.memory)
            if held is not None and x.size:
                last = (x.rows - 1) * x.row_stride + (x.columns - 1) * x.column_stride + 1
                assert 0 <= x.address <= x.address + last * x.itemsize <= held.nbytes, name
            return x._replace(address=self.bases[buffer.memory] + x.address)
        address, (row, column) = self.place(name)
        item = of(buffer.dtype).itemsize
        whole = Matrix(address, 0, 0, row // item, column // item, buffer.dtype)
        return whole.part(*buffer.box)

    def place(self, name):
        """The address of element (0, 0), and strides in bytes."""
        buffer = self.program.buffers[name]
        if isinstance(buffer, View):
            x, rank, first = buffer.matrix, self, (0, 0)
            address = self.bases[buffer.memory] + x.address
        else:
            hosts, rank = self.rank_plan.hosts, self.ranks[buffer.rank]
            assert hosts[buffer.rank] == hosts[self.rank_plan.rank], "it has an address here"
            published, first = rank.program.published[buffer.name]
            there = rank.program.buffers[published]
            x, address = there.matrix, rank.bases[there.memory] + there.matrix.address
            if buffer.parcel is not None:
                return address + buffer.parcel[0], buffer.parcel[1]
        steps = x.row_stride * x.itemsize, x.column_stride * x.itemsize
        origin = sum(start * step for start, step in zip(first, steps, strict=True))
        return address - origin, steps

    def view(self, name):
        return view(self.matrix(name))


def within_products(steps):
    """The plain steps, but for products that do what others would do behind them."""
    found = []
    for step in steps:
        if isinstance(step, Fused) and isinstance(step.plan, EpilogProduct):
            found += step.plan.steps
        elif isinstance(step, Fused):
            found += within_products(step.replaces)
        else:
            found += plain((step,))
    return tuple(found)


def interpret_products(rank_plans, operands, addition_order="", *, seed=0, within=False):
    """Perform the programs of all ranks. Operands are overwritten as the user's arrays would be.

    `within` takes products that do what others would do behind them.
    """
    ranks = []
    for rank_plan, own in zip(rank_plans, operands, strict=True):
        ranks.append(Rank(rank_plan, own, addition_order, ranks, within))
    schedule(ranks, random.Random(seed))
    return ranks


def schedule(ranks, chance):
    """Perform all steps, in an order in which streams might."""
    every = [streams_of(rank.steps) for rank in ranks]
    counts = {sum(isinstance(step, Synchronise) for step, _ in steps) for steps, _ in every}
    assert len(counts) <= 1, "all ranks synchronise alike"
    done = [set() for _ in ranks]
    left = [{name: list(reversed(at)) for name, at in streams.items()} for _, streams in every]
    prefer = chance.choice(["", "side", None])  # the user's stream, what is beside it, or any

    def finish(number, name):
        done[number].add(left[number][name].pop())
        if not left[number][name]:
            del left[number][name]

    while any(left):
        ready, waiting = [], {}
        for number, ((steps, _), streams) in enumerate(zip(every, left, strict=True)):
            for name, numbers in streams.items():
                step, after = steps[numbers[-1]]
                if after <= done[number]:
                    if not isinstance(step, Synchronise):
                        ready.append((number, name))
                    elif number not in waiting or numbers[-1] < waiting[number][0]:
                        waiting[number] = numbers[-1], name
        if not ready:
            assert len(waiting) == len(ranks), "all ranks synchronise"
            for number, (_, name) in waiting.items():
                finish(number, name)
            continue
        ready = [each for each in ready if bool(each[1]) == bool(prefer)] or ready
        number, name = chance.choice(ready)
        step = every[number][0][left[number][name][-1]][0]
        if not isinstance(step, Record | Await):
            PERFORM[type(step)](step, ranks[number])
        finish(number, name)


def streams_of(steps):
    """Each step and what it awaits; and by stream, the numbers of its steps."""
    found, streams, events = [], {}, {}
    for at, each in enumerate(steps):
        name, step = (each.stream, each.step) if isinstance(each, On) else ("", each)
        found.append((step, {events[step.event]} if isinstance(step, Await) else set()))
        if isinstance(step, Record):
            events[step.event] = at
        streams.setdefault(name, []).append(at)
    follows = {two: one for each in streams.values() for one, two in pairwise(each)}
    joined, front = set(), streams.get("", [])[-1:]
    while front:
        at = front.pop()
        if at not in joined:
            joined.add(at)
            front += [*found[at][1], *([follows[at]] if at in follows else [])]
    loose = [str(found[at][0]) for at in range(len(found)) if at not in joined]
    assert not loose, f"what is beside the user's stream comes to it at last: {loose}"
    return found, streams


# -- steps -----------------------------------------------------------------------------------------


def clear(step, rank):
    rank.view(step.target)[...] = 0


def gather(step, rank):
    target, sources = rank.matrix(step.target), dict(step.sources)
    assert set(sources) == {move.src for move in step.moves}
    item = target.itemsize
    strides = target.row_stride * item, target.column_stride * item
    for move in step.moves:
        address, there = rank.place(sources[move.src])
        box = Box.of(lowered_move(move, item, there, strides), 0)
        copy_boxes([box], {box.source: (memory_at(address), 1 << 40)},
                   (memory_at(target.address), 1 << 40))  # fmt: skip


def memory_at(address):
    """Bytes around an address."""
    return Around(address)


class Around:
    """All memory, of which byte 1 << 40 is at an address."""

    size = 1 << 60

    def __init__(self, address):
        self.address = address - (1 << 40)

    def __getitem__(self, part):
        buffer = (ctypes.c_ubyte * (1 << 31)).from_address(self.address + part.start)
        return np.frombuffer(buffer, np.uint8)


def packed(step, rank):
    x, target = rank.matrix(step.source), rank.matrix(step.target)
    boxes = [Box.of(each, 0) for each in step.outbox.packing(rank.place(step.source)[1])]
    copy_boxes(boxes, {0: (memory_at(x.address), 1 << 40)}, (memory_at(target.address), 1 << 40))


def fetched(step, rank):
    hosts, target = rank.rank_plan.hosts, rank.matrix(step.target).address
    for each in step.fetches:
        assert hosts[each.src] != hosts[rank.rank_plan.rank]
        there = rank.ranks[each.src]
        buffer, _ = there.program.published[step.name]
        outbox = there.view(buffer).reshape(-1)[each.offset : each.offset + each.nbytes]
        ctypes.memmove(target + each.at, np.ascontiguousarray(outbox).ctypes.data, outbox.size)


def push(step, rank):
    source = rank.matrix(step.source)
    for name in step.targets:
        target = rank.matrix(name)
        assert not any(word % 16 for word in (source.address, source.size, target.address))
        ctypes.memmove(target.address, source.address, source.size)


def convert(step, rank):
    round_into(rank.view(step.source), rank.view(step.target))


def gemm(step, rank):
    left, right, target = (rank.matrix(name) for name in (step.left, step.right, step.target))
    alpha = np.prod([rank.numbers[name] for name in step.alpha] or [1])
    factors = [view(left), view(right)]
    wide = np.result_type(to_numpy(dtypes.accumulator(target.dtype)), np.float64)
    if step.scales is None:
        for x, conjugate in zip((left, right), step.conjugate, strict=True):
            assert fits(x, target, conjugate=conjugate) and takes_result(target)
        factors = [x.conj() if c else x for x, c in zip(factors, step.conjugate, strict=True)]
        factors = [x.astype(wide) for x in factors]
    else:
        factors = scaled_factors(step, rank, left, right, target)
    total = factors[0] @ factors[1] * alpha
    if step.addend:
        beta = rank.numbers[step.beta] if step.beta else 1
        total = total + beta * rank.view(step.addend).astype(wide)
    if not np.iscomplexobj(view(target)):
        total = total.real
    if step.quantized is not None:
        scale, largest = step.quantized
        if largest:
            raise_to(rank, largest, total)
        number = rank.view(scale)[0, 0] if scale else 1.0
        float8.quantize(total.astype(np.float32), number, view(target))
        return
    finished(step, rank, total, target, target.dtype)


def scaled_factors(step, rank, left, right, target):
    """The numbers that eight-bit factors stand for."""
    one, two = left.transposed(), right
    assert scaled.fits(one) and scaled.fits(two)
    modes = [each.mode for each in step.scales]
    assert scaled.takes_result(target, blocks=bool({"vectors", "squares"} & set(modes))), target
    pairs = {"tensor": {"tensor"}, "outer": {"outer"}, "vectors": {"vectors", "squares"},
             "squares": {"vectors"}}  # fmt: skip
    assert modes[1] in pairs[modes[0]]
    addresses = [rank.matrix(x.buffer).address if x.buffer else 0 for x in step.scales]
    of_left = decoded(modes[0], addresses[0], left.rows, left.columns)
    of_right = decoded(modes[1], addresses[1], right.columns, right.rows).T
    return view(left).astype(float) * of_left, view(right).astype(float) * of_right


def decoded(mode, address, lines, k):
    """The scale of each element of a factor, lines first, from cuBLASLt's layouts."""
    deep = -(-k // 128)
    if mode == "tensor":
        one = 1.0 if not address else view(Matrix(address, 1, 1, 1, 1, "float32"))
        return np.broadcast_to(one, (lines, k))
    assert address % 16 == 0
    if mode == "outer":
        vector = view(Matrix(address, lines, 1, 1, lines, "float32"))
        return np.broadcast_to(vector, (lines, k))
    if mode == "vectors":
        assert lines % 4 == 0
        made = view(Matrix(address, lines, deep, 1, lines, "float32"))
    else:
        step = -(-deep // 4) * 4
        made = view(Matrix(address, -(-lines // 128), deep, step, 1, "float32"))
        made = made.repeat(128, 0)[:lines]
    return made.repeat(128, 1)[:, :k]


def add_up(step, rank):
    target = rank.matrix(step.target)
    wide = to_numpy(dtypes.accumulator(target.dtype))
    total = np.zeros((target.rows, target.columns), wide)
    for name in step.parts:
        total = total + rank.view(name).astype(wide)
    total = total * (rank.numbers[step.alpha] if step.alpha else 1)
    if step.addend:
        beta = rank.numbers[step.beta] if step.beta else 1
        total = total + beta * rank.view(step.addend).astype(wide)
    total = total if np.issubdtype(wide, np.complexfloating) else total.real
    finished(step, rank, total, target, step.extras or target.dtype)


def finished(step, rank, total, target, extras):
    """The epilog of sums, rounded once."""
    total = np.ascontiguousarray(total, to_numpy(dtypes.accumulator(target.dtype)))
    if step.epilog is not MatmulEpilog.DEFAULT:
        inputs = {step.epilog.needs_aux: rank.view(step.aux)} if step.epilog.needs_aux else {}
        if step.bias:
            inputs["bias"] = rank.view(step.bias)
        total, made = epilog.apply(
            step.epilog, total, inputs, dtype=extras, out=np.empty_like(total)
        )
        if step.epilog.makes_aux:
            rank.view(step.aux)[...] = made[step.epilog.makes_aux]
    if getattr(step, "unrounded", ""):
        rank.view(step.unrounded)[...] = total
    round_into(total, view(target))


def sum_lines(step, rank):
    source, target = rank.view(step.source), rank.view(step.target)
    source = source.conj() if step.conjugate else source
    target[...] = source.astype(target.dtype).sum(axis=int(not step.columns))[:, None]


def scale_of(rank, name, blocks, shape):
    """The scale of each element."""
    number = rank.numbers[name].real if name in rank.numbers else 1.0
    if name not in rank.program.buffers:
        return np.full(shape, number)
    return expanded(rank.view(name), blocks, shape) * number


def expanded(scales, blocks, shape, known=None):
    i, j = np.indices(shape)
    last = (shape[0] if known is None else known) - 1
    row = np.minimum(i, last) // (blocks.rows or 1 << 40)
    return scales[row, j // (blocks.columns or 1 << 40)]


def dequantize(step, rank):
    elements, target = rank.view(step.source), rank.view(step.target)
    target[...] = elements.astype("f4") * scale_of(rank, step.scale, step.blocks, elements.shape)


def lay_out(step, rank):
    first = rank.matrix(step.targets[0])
    shape = first.rows, first.columns
    values = np.full(shape, rank.numbers[step.number].real if step.number else 1.0, np.float32)
    if step.source and step.known:
        values = values * expanded(rank.view(step.source), step.blocks, shape, step.known)
    values[step.known :] = 0
    for name in step.targets:
        rank.view(name)[...] = values


def quantize(step, rank):
    source = rank.view(step.source)
    number = rank.numbers[step.scale].real
    number *= rank.view(step.scale)[0, 0] if step.scale in rank.program.buffers else 1
    float8.quantize(source.astype(np.float32), np.float32(number), rank.view(step.target))
    if step.largest:
        raise_to(rank, step.largest, source)


def raise_to(rank, name, numbers):
    word = rank.view(name)
    word[0, 0] = max(word[0, 0], np.abs(numbers).max(initial=0))


def greatest(step, rank):
    rank.view(step.target)[...] = max(rank.view(name)[0, 0] for name in step.parts)


PERFORM = {
    Clear: clear,
    Gather: gather,
    Packed: packed,
    Fetched: fetched,
    Push: push,
    Convert: convert,
    Gemm: gemm,
    AddUp: add_up,
    SumLines: sum_lines,
    Dequantize: dequantize,
    LayOut: lay_out,
    Quantize: quantize,
    Greatest: greatest,
}
