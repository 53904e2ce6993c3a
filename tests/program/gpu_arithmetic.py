"""What GPUs do with matrices at addresses, by NumPy: `local/gpu` where memory is the host's.

Memories begin at multiples of 256 bytes and are full of NaN. What cuBLASLt asks of its factors is
asserted.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from copying import copy_boxes
from shardmath.arrays import dtypes
from shardmath.arrays.dtypes import of, to_numpy
from shardmath.handles.operand import Operand
from shardmath.local import epilog as epilogs
from shardmath.local import float8
from shardmath.local.epilog import MatmulEpilog
from shardmath.local.gpu import Matrix, scaled
from shardmath.local.gpu.gemm import fits, takes_result
from shardmath.program.binding import round_into

ALIGNMENT = 256


def room(nbytes):
    """Memory at a multiple of ALIGNMENT, full of NaN."""
    whole = np.empty(nbytes + ALIGNMENT, np.uint8)
    whole.fill(0xFF)
    start = -address_of(whole) % ALIGNMENT
    return whole[start : start + nbytes]


NO_BYTES = ctypes.c_ubyte * 0


def address_of(memory):
    """As `memory.ctypes.data`, which takes several times as long."""
    return ctypes.addressof(NO_BYTES.from_buffer(memory))


def on_gpu(x, shift=0):
    """An operand with the elements and strides of an array, `shift` bytes behind an alignment."""
    span = [(n - 1) * step for n, step in zip(x.shape, x.strides, strict=True)]
    low = sum(min(0, each) for each in span) if x.size else 0
    high = sum(max(0, each) for each in span) + x.itemsize if x.size else 0
    memory = room(shift + high - low)
    held = np.ndarray(x.shape, x.dtype, memory, offset=shift - low, strides=x.strides)
    held[...] = x
    address = address_of(memory) + shift - low
    return Operand(address, x.shape, x.strides, of(x.dtype).name, None, memory)


def view(x: Matrix):
    """A matrix of the "GPU" as NumPy sees it."""
    if not x.size:
        return np.zeros((x.rows, x.columns), to_numpy(x.dtype))
    steps = x.row_stride * x.itemsize, x.column_stride * x.itemsize
    return np.ndarray((x.rows, x.columns), to_numpy(x.dtype), around(x.address), MIDDLE, steps)


def copy_between(boxes, sources, target):
    """The copies that boxes are, from memories at addresses, by number, to one at an address."""
    places = {number: (around(address), MIDDLE) for number, address in sources.items()}
    copy_boxes(boxes, places, (around(target), MIDDLE))


MIDDLE = 1 << 40
AROUND = ctypes.c_ubyte * (2 * MIDDLE)


def around(address):
    """The memory before and behind an address, which is byte MIDDLE of it."""
    return AROUND.from_address(address - MIDDLE)


move_bytes = ctypes.memmove


def multiply(
    left, right, target, conj_left=False, conj_right=False, *, alpha=1, beta=0, c=None,
    epilog=MatmulEpilog.DEFAULT, bias=None, aux=None,
):  # fmt: skip
    """See `local.gpu.gemm.multiply`; sums are of double precision."""
    factors = []
    wide = np.result_type(to_numpy(dtypes.accumulator(target.dtype)), np.float64)
    for x, conjugate in ((left, conj_left), (right, conj_right)):
        assert fits(x, target, conjugate=conjugate) and takes_result(target)
        factors.append(Elements.of(view(x).conj() if conjugate else view(x)))
    total = add_to(product_of(*factors, wide) * alpha, beta, c, target)
    finish(total, target, epilog, bias, aux, target.dtype)


def packed_factor(x, precision, *, right):
    """The lines of a factor, or of the transpose of a `right` one, as kernels/pack_factor.cu packs
    them: each is a column here.
    """
    numbers = np.ascontiguousarray(x).view("float32").reshape(len(x), -1)  # re, im, re, im, ...
    if x.dtype.kind == "c" and not right:
        one, two = (np.ascontiguousarray(y).view("float32") for y in (x.conj(), 1j * x.conj()))
        numbers = np.stack([one, two], 1).reshape(2 * len(x), -1)
    filled = np.zeros((len(numbers), -(-numbers.shape[1] // 8) * 8), "float32")
    filled[:, : numbers.shape[1]] = numbers
    if precision == "bfloat16":
        return filled.astype(to_numpy("bfloat16")).T
    high = near_tf32(filled)
    low = near_tf32(filled - high)
    return np.hstack([high, high, low] if right else [high, low, high]).T


def near_tf32(x):
    """The nearest numbers of 11 bits."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.rint(np.ldexp(mantissa, 11)), exponent - 11).astype("float32")


def subtract_packed(target, left, right):
    """`target`, an array, minus the product of packed factors."""
    product = left.T.astype("float64") @ right.astype("float64")
    target[...] -= product if target.dtype.kind == "f" else product[::2] + 1j * product[1::2]


class Elements(NamedTuple):
    """A copy of an array that can be looked up."""

    data: bytes
    shape: tuple[int, ...]
    dtype: np.dtype

    @classmethod
    def of(cls, x):
        return cls(x.tobytes(), x.shape, x.dtype)

    @property
    def array(self):
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


@lru_cache(maxsize=64)
def product_of(left, right, wide, of_left=None, of_right=None):
    """The product of two factors, of which each may be scaled. Not to be written to.

    Each program is performed twice and more: what has been multiplied is remembered.
    """
    return scaled_by(of_left, left.array.astype(wide)) @ scaled_by(
        of_right, right.array.astype(wide)
    )


def scaled_by(scales, x):
    return x if scales is None else x * spread(scales.array, x.shape)


def spread(scales, shape):
    """Scales of single elements, of blocks of 128, or of whole axes, for each element."""
    for axis, extent in enumerate(shape):
        if scales.shape[axis] not in (1, extent):
            scales = scales.repeat(128, axis)[(slice(None),) * axis + (slice(extent),)]
    return scales


def add_to(total, beta, c, target):
    if beta != 0:
        total = total + beta * view(c or target).astype(total.dtype)
    return total if np.iscomplexobj(view(target)) else total.real


def multiply_scaled(left, right, target, scales, *, alpha=1, beta=0, c=None, quantized=None):
    """See `local.gpu.scaled.multiply`; scales are pairs of a mode and an address."""
    one, two = left.transposed(), right
    assert scaled.fits(one) and scaled.fits(two)
    modes = [mode for mode, _ in scales]
    assert scaled.takes_result(target, blocks=bool({"vectors", "squares"} & set(modes))), target
    pairs = {"tensor": {"tensor"}, "outer": {"outer"}, "vectors": {"vectors", "squares"},
             "squares": {"vectors"}}  # fmt: skip
    assert modes[1] in pairs[modes[0]]
    factors = [Elements.of(view(left)), Elements.of(view(right))]
    of_left = Elements.of(decoded(*scales[0], left.rows, left.columns))
    of_right = Elements.of(decoded(*scales[1], right.columns, right.rows).T)
    total = product_of(*factors, np.dtype(float), of_left, of_right)
    total = add_to(total * np.real(alpha), np.real(beta), c, target)
    if quantized is not None:
        raise_to(quantized[1], total)
        number = word(quantized[0]) if quantized[0] else 1.0
        float8.quantize(total.astype(np.float32), number, view(target))
    else:
        round_into(total.astype(to_numpy(dtypes.accumulator(target.dtype))), view(target))


def decoded(mode, address, lines, k):
    """The scales of a factor, lines first, from cuBLASLt's layouts; see `spread`."""
    deep = -(-k // 128)
    if mode == "tensor":
        return np.full((1, 1), word(address) if address else 1.0)
    assert address % 16 == 0
    if mode == "outer":
        return view(Matrix(address, lines, 1, 1, lines, "float32"))
    if mode == "vectors":
        assert lines % 4 == 0
        return view(Matrix(address, lines, deep, 1, lines, "float32"))
    step = -(-deep // 4) * 4
    return view(Matrix(address, -(-lines // 128), deep, step, 1, "float32"))


def add_up(
    target, parts, *, alpha=1, beta=1, c=None, epilog=MatmulEpilog.DEFAULT, bias=None, aux=None,
    unrounded=None, extra="",
):  # fmt: skip
    """See `local.gpu.epilog.combine`."""
    wide = to_numpy(dtypes.accumulator(target.dtype))
    total = np.zeros((target.rows, target.columns), np.result_type(wide, type(alpha), type(beta)))
    for part in parts:
        assert (part.rows, part.columns) == total.shape
        total = total + view(part).astype(wide)
    total = add_to(total * alpha, beta if c else 0, c, target)
    finish(total, target, epilog, bias, aux, extra or target.dtype, unrounded)


def finish(total, target, epilog, bias, aux, extra, unrounded=None):
    """The epilog of sums, rounded once."""
    total = np.ascontiguousarray(total, to_numpy(dtypes.accumulator(target.dtype)))
    if epilog.changes_d:
        inputs = {epilog.needs_aux: view(aux)} if epilog.needs_aux else {}
        if epilog.has_bias:
            inputs["bias"] = view(bias)
        out = np.empty_like(total)
        total, made = epilogs.apply(epilog, total, inputs, dtype=extra, out=out)
        if epilog.makes_aux:
            view(aux)[...] = made[epilog.makes_aux]
    if unrounded is not None:
        view(unrounded)[...] = total
    round_into(total, view(target))


def sum_rows(x, address, *, conjugate=False):
    """See `local.gpu.epilog.row_sums`."""
    wide = dtypes.accumulator(x.dtype).name
    values = view(x).conj() if conjugate else view(x)
    sums = view(Matrix(address, x.rows, 1, 1, max(1, x.rows), wide))
    sums[...] = values.astype(to_numpy(wide)).sum(axis=1)[:, None]


def dequantize(out, elements, scales, blocks, *, factor=1.0, known_rows=None, also=()):
    """See `local.gpu.float8.dequantize`."""
    values = np.full((out.rows, out.columns), factor, np.float32)
    known = out.rows if known_rows is None else known_rows
    if scales is not None and known:
        row = np.minimum(np.arange(out.rows), known - 1) // (blocks.rows or 1 << 40)
        column = np.arange(out.columns) // (blocks.columns or 1 << 40)
        values *= view(scales)[row[:, None], column]
    if elements is not None:
        values *= view(elements).astype(np.float32)
    values[known:] = 0
    for each in (out, *also):
        view(each)[...] = values


def quantize(out, source, *, factor, scale=0, amax=0):
    """See `local.gpu.float8.quantize`."""
    number = np.float32(factor * (word(scale) if scale else 1))
    float8.quantize(view(source).astype(np.float32), number, view(out))
    raise_to(amax, view(source))


def raise_to(address, numbers):
    if address:
        held = view(Matrix(address, 1, 1, 1, 1, "float32"))
        held[0, 0] = max(held[0, 0], np.abs(numbers).max(initial=0))


def word(address):
    return view(Matrix(address, 1, 1, 1, 1, "float32"))[0, 0]


def greatest(address, each):
    """See `local.gpu.float8.amax`."""
    view(Matrix(address, 1, 1, 1, 1, "float32"))[...] = max(map(word, each))
