"""Programs of products on GPUs performed by NumPy, every rank in one process.

They are performed as `rank_interpreter` performs all programs, with the steps that only products
have. What cuBLASLt asks of its factors is asserted.
"""

from __future__ import annotations

import gpu_arithmetic as arithmetic
import numpy as np
import rank_interpreter
from gpu_arithmetic import ALIGNMENT, address_of, move_bytes, view
from rank_interpreter import Rank, interpret_ranks

from shardmath.operators.matmul.gpu.rank_plan import placement_of
from shardmath.operators.matmul.gpu.scaled_lowering import lowered
from shardmath.operators.matmul.gpu.steps import (
    AddUp,
    Clear,
    EpilogProduct,
    Gemm,
    Greatest,
    LayOut,
    Push,
)
from shardmath.program.binding import round_into
from shardmath.program.steps import Convert, Dequantize, Fused, Quantize, SumLines, plain

__all__ = ["interpret_products", "program_of"]


def program_of(rank_plan, given, addition_order=""):
    """`lowered`, once for the interpreter and for what performs programs on GPUs."""
    arrays = placement_of(given.arrays, given.numbers)
    key = "as lowered", arrays, addition_order
    if key not in rank_plan.cache:
        rank_plan.cache[key] = lowered(rank_plan, arrays, addition_order)
    return rank_plan.cache[key]


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
        program = program_of(rank_plan, own, addition_order)
        steps = within_products(program.steps) if within else None
        users = {name: (x.keep, start_of(x)) for name, x in own.arrays.items()}
        ranks.append(Rank(rank_plan.rank, program, users, numbers=own.numbers, steps=steps))
    interpret_ranks(ranks, seed=seed)
    return ranks


def start_of(array):
    """Where the memory of a user's array begins, from the first byte of what keeps it."""
    return array.address - array.address % ALIGNMENT - address_of(array.keep)


# -- steps -----------------------------------------------------------------------------------------


def optional(rank, name):
    return rank.matrix(name) if name else None


def address(rank, name):
    return rank.matrix(name).address if name else 0


def clear(step, rank):
    view(rank.matrix(step.target))[...] = 0


def push(step, rank):
    source = rank.matrix(step.source)
    for name in step.targets:
        target = rank.matrix(name)
        assert not any(word % 16 for word in (source.address, source.size, target.address))
        move_bytes(target.address, source.address, source.size)


def convert(step, rank):
    round_into(view(rank.matrix(step.source)), view(rank.matrix(step.target)))


def gemm(step, rank):
    left, right, target = map(rank.matrix, (step.left, step.right, step.target))
    how = {
        "alpha": np.prod([rank.numbers[name] for name in step.alpha] or [1]),
        "beta": rank.numbers[step.beta] if step.beta else float(bool(step.addend)),
        "c": optional(rank, step.addend),
    }
    if step.scales is None:
        assert step.quantized is None
        of_epilog = {"epilog": step.epilog, "bias": optional(rank, step.bias)}
        of_epilog["aux"] = optional(rank, step.aux)
        arithmetic.multiply(left, right, target, *step.conjugate, **how, **of_epilog)
        return
    scales = [(each.mode, address(rank, each.buffer)) for each in step.scales]
    quantized = None if step.quantized is None else [address(rank, x) for x in step.quantized]
    arithmetic.multiply_scaled(left, right, target, scales, quantized=quantized, **how)


def add_up(step, rank):
    arithmetic.add_up(
        rank.matrix(step.target),
        [rank.matrix(name) for name in step.parts],
        alpha=rank.numbers[step.alpha] if step.alpha else 1,
        beta=rank.numbers[step.beta] if step.beta else 1,
        c=optional(rank, step.addend),
        epilog=step.epilog,
        bias=optional(rank, step.bias),
        aux=optional(rank, step.aux),
        unrounded=optional(rank, step.unrounded),
        extra=step.extras,
    )


def sum_lines(step, rank):
    x = rank.matrix(step.source)
    x = x.transposed() if step.columns else x
    arithmetic.sum_rows(x, rank.matrix(step.target).address, conjugate=step.conjugate)


def dequantize(step, rank):
    elements, factor = rank.matrix(step.source), rank.numbers[step.scale].real
    scales = rank.matrix(step.scale) if step.scale in rank.program.arrays else None
    target = rank.matrix(step.target)
    arithmetic.dequantize(target, elements, scales, step.blocks, factor=factor)


def lay_out(step, rank):
    target, *also = (rank.matrix(name) for name in step.targets)
    factor = rank.numbers[step.number].real if step.number else 1.0
    given = optional(rank, step.source)
    arithmetic.dequantize(
        target, None, given, step.blocks, factor=factor, known_rows=step.known, also=also
    )


def quantize(step, rank):
    factor = rank.numbers[step.scale].real
    scale = address(rank, step.scale) if step.scale in rank.program.arrays else 0
    source, target = rank.matrix(step.source), rank.matrix(step.target)
    arithmetic.quantize(
        target, source, factor=factor, scale=scale, amax=address(rank, step.largest)
    )


def greatest(step, rank):
    addresses = [rank.matrix(name).address for name in step.parts]
    arithmetic.greatest(rank.matrix(step.target).address, addresses)


rank_interpreter.PERFORM |= {
    Clear: clear,
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
