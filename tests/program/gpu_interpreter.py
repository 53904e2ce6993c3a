"""Programs of products on GPUs performed by NumPy, every rank in one process.

Memory is the host's, each at a multiple of 256 bytes and full of NaN. A rank's `streams` run as
they like. What cuBLASLt asks of its factors is asserted.
"""

from __future__ import annotations

import random

import gpu_arithmetic as arithmetic
import numpy as np
from gpu_arithmetic import ALIGNMENT, copy_between, move_bytes, room, view
from streams import schedule

from shardmath.arrays.dtypes import of
from shardmath.local.gpu import Matrix
from shardmath.local.rounding import round_into
from shardmath.operators.matmul.gpu.lowering import lowered
from shardmath.operators.matmul.gpu.steps import (
    AddUp,
    Clear,
    EpilogProduct,
    Fetched,
    Gather,
    Gemm,
    Greatest,
    LayOut,
    Packed,
    Push,
    View,
)
from shardmath.program.steps import (
    Convert,
    Dequantize,
    Fused,
    Quantize,
    SumLines,
    plain,
)
from shardmath.redistribution.boxes import Box
from shardmath.redistribution.copies import lowered as lowered_move

__all__ = ["interpret_products", "program_of"]


def program_of(rank_plan, lying, addition_order=""):
    """`lowered`, once for the interpreter and for what performs programs on GPUs."""
    key = "as lowered", lying, addition_order
    return rank_plan.programs.made(key, lambda: lowered(rank_plan, lying, addition_order))


class Rank:
    """One rank: its program, its memories, and what its peers find."""

    def __init__(self, rank_plan, operands, addition_order, ranks, within):
        self.rank_plan, self.operands, self.ranks = rank_plan, operands, ranks
        self.program = program_of(rank_plan, operands.lying(), addition_order)
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

    def optional(self, name):
        return self.matrix(name) if name else None

    def address(self, name):
        return self.matrix(name).address if name else 0

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
    schedule(ranks, random.Random(seed), PERFORM)
    return ranks


# -- steps -----------------------------------------------------------------------------------------


def clear(step, rank):
    rank.view(step.target)[...] = 0


def gather(step, rank):
    target, sources = rank.matrix(step.target), dict(step.sources)
    assert set(sources) == {move.src for move in step.moves}
    strides = target.row_stride * target.itemsize, target.column_stride * target.itemsize
    for move in step.moves:
        address, there = rank.place(sources[move.src])
        box = Box.of(lowered_move(move, target.itemsize, there, strides), 0)
        copy_between([box], {box.source: address}, target.address)


def packed(step, rank):
    boxes = [Box.of(each, 0) for each in step.outbox.packing(rank.place(step.source)[1])]
    copy_between(boxes, {0: rank.address(step.source)}, rank.address(step.target))


def fetched(step, rank):
    hosts, target = rank.rank_plan.hosts, rank.matrix(step.target).address
    for each in step.fetches:
        assert hosts[each.src] != hosts[rank.rank_plan.rank]
        there = rank.ranks[each.src]
        buffer, _ = there.program.published[step.name]
        outbox = there.view(buffer).reshape(-1)[each.offset : each.offset + each.nbytes]
        move_bytes(target + each.at, np.ascontiguousarray(outbox).ctypes.data, outbox.size)


def push(step, rank):
    source = rank.matrix(step.source)
    for name in step.targets:
        target = rank.matrix(name)
        assert not any(word % 16 for word in (source.address, source.size, target.address))
        move_bytes(target.address, source.address, source.size)


def convert(step, rank):
    round_into(rank.view(step.source), rank.view(step.target))


def gemm(step, rank):
    matrix = rank.optional
    left, right, target = (matrix(name) for name in (step.left, step.right, step.target))
    how = {
        "alpha": np.prod([rank.numbers[name] for name in step.alpha] or [1]),
        "beta": rank.numbers[step.beta] if step.beta else float(bool(step.addend)),
        "c": matrix(step.addend),
    }
    if step.scales is None:
        assert step.quantized is None
        of_epilog = {"epilog": step.epilog, "bias": matrix(step.bias), "aux": matrix(step.aux)}
        arithmetic.multiply(left, right, target, *step.conjugate, **how, **of_epilog)
        return
    scales = [(each.mode, rank.address(each.buffer)) for each in step.scales]
    quantized = None if step.quantized is None else [rank.address(x) for x in step.quantized]
    arithmetic.multiply_scaled(left, right, target, scales, quantized=quantized, **how)


def add_up(step, rank):
    arithmetic.add_up(
        rank.matrix(step.target),
        [rank.matrix(name) for name in step.parts],
        alpha=rank.numbers[step.alpha] if step.alpha else 1,
        beta=rank.numbers[step.beta] if step.beta else 1,
        c=rank.optional(step.addend),
        epilog=step.epilog,
        bias=rank.optional(step.bias),
        aux=rank.optional(step.aux),
        unrounded=rank.optional(step.unrounded),
        extra=step.extras,
    )


def sum_lines(step, rank):
    x = rank.matrix(step.source)
    x = x.transposed() if step.columns else x
    arithmetic.sum_rows(x, rank.matrix(step.target).address, conjugate=step.conjugate)


def dequantize(step, rank):
    elements, factor = rank.matrix(step.source), rank.numbers[step.scale].real
    scales = rank.matrix(step.scale) if step.scale in rank.program.buffers else None
    target = rank.matrix(step.target)
    arithmetic.dequantize(target, elements, scales, step.blocks, factor=factor)


def lay_out(step, rank):
    target, *also = (rank.matrix(name) for name in step.targets)
    factor = rank.numbers[step.number].real if step.number else 1.0
    given = rank.optional(step.source)
    arithmetic.dequantize(
        target, None, given, step.blocks, factor=factor, known_rows=step.known, also=also
    )


def quantize(step, rank):
    factor = rank.numbers[step.scale].real
    scale = rank.address(step.scale) if step.scale in rank.program.buffers else 0
    source, target = rank.matrix(step.source), rank.matrix(step.target)
    arithmetic.quantize(target, source, factor=factor, scale=scale, amax=rank.address(step.largest))


def greatest(step, rank):
    addresses = [rank.matrix(name).address for name in step.parts]
    arithmetic.greatest(rank.matrix(step.target).address, addresses)


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
