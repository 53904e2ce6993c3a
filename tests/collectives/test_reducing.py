"""all_reduce and reduce_scatter against NumPy, rank after rank."""

from __future__ import annotations

import numpy as np
import pytest
from samples import (
    DTYPES,
    FORMS,
    OPS,
    close,
    digest,
    elements_of,
    formed,
    framed,
    reduced,
    reduces,
    same,
    special_values,
    values,
)

from shardmath.collectives import all_reduce, broadcast, reduce_scatter
from shardmath.program import two_shots

SHAPES = ((), (0,), (1,), (7, 9), (3, 0, 2), (5, 1, 8))
# Sizes about the limits: notes of 2 KB, copies of 64 KB, one shot of 1 MB, blocks of 2 MB.
LENGTHS = (511, 512, 513, 16385, 262143, 262145, 1048577, 2500003)


def check_types(context, dtypes, halves=(0, 1)):
    """Every type, operation and shape: each half of the cases has every pair of those."""
    wrong, digests = [], []
    for number, dtype in enumerate(dtypes):
        for turn, op in enumerate(OPS):
            for index, shape in enumerate(SHAPES if reduces(op, dtype) else ()):
                if (number + turn + index) % 2 not in halves:
                    continue
                parts = [values(dtype, shape, rank) for rank in range(context.size)]
                found = all_reduce(parts[context.rank], op=op, context=context)
                wanted = reduced(op, parts)
                if not (same(found, wanted) or (dtype.startswith("c") and close(found, wanted))):
                    wrong.append((dtype, op, shape))
                if type(found) is not np.ndarray or not found.flags.c_contiguous:
                    wrong.append((dtype, op, shape, "kind"))
                digests.append(digest(found))
    return wrong, digests


@pytest.mark.parametrize(("size", "halves"), [(1, (0, 1)), (2, (0, 1)), (3, (1,)), (6, (0,))])
def test_all_reduce_of_every_dtype_and_op(contexts, size, halves):
    results = contexts.run(check_types, DTYPES, halves, ranks=size)
    assert [wrong for wrong, _ in results] == [[]] * size
    assert all(digests == results[0][1] for _, digests in results)


def check_specials(context):
    wrong, digests = [], []
    for dtype in ("float16", "bfloat16", "float32", "float64", "complex64"):
        for op in (op for op in OPS if reduces(op, dtype)):
            parts = [special_values(dtype, rank, context.size) for rank in range(context.size)]
            found = all_reduce(parts[context.rank], op=op, context=context)
            if not same(found, reduced(op, parts)):
                wrong.append((dtype, op))
            digests.append(digest(found))
    return wrong, digests


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("size", [1, 2, 3])
def test_nan_infinity_zeros_and_denormals_at_every_rank_are_as_in_numpy(contexts, size):
    results = contexts.run(check_specials, ranks=size)
    assert [wrong for wrong, _ in results] == [[]] * size
    assert all(digests == results[0][1] for _, digests in results)


def check_complex_means(context):
    """Infinities, NaN and zeros in either part, and numbers whose third is rounded."""
    wrong = []
    parts_of_numbers = (-np.inf, np.inf, np.nan, -0.0, 0.0, 0.28, -3.5)
    numbers = [complex(real, imag) for real in parts_of_numbers for imag in parts_of_numbers]
    for dtype in ("complex64", "complex128"):
        for special in range(context.size):
            parts = [values(dtype, len(numbers), rank) for rank in range(context.size)]
            parts[special][:] = numbers
            wanted, share = reduced("mean", parts), _slab(len(numbers), context.size)
            low = sum(share[: context.rank])
            found = {
                "all_reduce": (all_reduce(parts[context.rank], op="mean", context=context), wanted),
                "reduce_scatter": (
                    reduce_scatter(parts[context.rank], op="mean", context=context),
                    wanted[low : low + share[context.rank]],
                ),
            }
            for name, (result, right) in found.items():
                if not same(result.view(right.real.dtype), right.view(right.real.dtype)):
                    wrong.append((dtype, special, name))
    return wrong


@pytest.mark.parametrize("size", [1, 2, 3])
def test_means_of_complex_numbers_are_those_of_numpy(contexts, size):
    assert contexts.run(check_complex_means, ranks=size) == [[]] * size


def check_numbers(context):
    """Numbers are arrays of no axes: those of Python, and those that NumPy's functions return."""
    wrong = []
    for number in (True, 3, -2.5, 1 + 2j, np.float32(0.5), np.ones(3).sum(), np.int8(7), np.False_):
        elements = np.asarray(number)
        calls = {
            "all_reduce": (all_reduce(number, context=context), [elements] * context.size),
            "broadcast": (broadcast(number, context=context), [elements]),
        }
        for name, (found, parts) in calls.items():
            wanted = reduced("sum", parts)
            if type(found) is not np.ndarray or not same(found, wanted):
                wrong.append((name, number))
    return wrong


@pytest.mark.parametrize("size", [1, 3])
def test_numbers(contexts, size):
    assert contexts.run(check_numbers, ranks=size) == [[]] * size


def check_lengths(context, lengths, dtype, op):
    wrong, digests = [], []
    for length in lengths:
        parts = [values(dtype, (length,), rank) for rank in range(context.size)]
        wanted = reduced(op, parts)
        mine = parts[context.rank]
        heap = formed("heap", mine, context)
        mixed = formed("heap" if context.rank % 2 else "plain", mine, context)
        into = formed("heap", wanted * 0, context)
        calls = [
            ("plain", mine, None),
            ("again", mine, None),
            ("heap", heap, None),
            ("into heap", mine, into),
            ("mixed", mixed, None),
            ("out mixed", mixed, into if context.rank == 0 else None),
        ]
        if wanted.dtype == mine.dtype:
            calls += [(f"{name} in place", x, x) for name, x, _ in (calls[4], calls[2], calls[0])]
        for name, x, out in calls:
            found = all_reduce(x, op=op, out=out, context=context)
            if not same(found, wanted):
                wrong.append((length, name))
            digests.append(digest(found))
    return wrong, digests


@pytest.mark.parametrize(
    ("size", "dtype", "op"),
    [(2, "float32", "sum"), (3, "int16", "mean"), (4, "float32", "mean"), (5, "int32", "max")],
)
def test_all_reduce_of_every_length_from_and_to_every_place(contexts, size, dtype, op):
    lengths = LENGTHS if size < 4 else LENGTHS[3:-1]
    results = contexts.run(check_lengths, lengths, dtype, op, ranks=size)
    assert [wrong for wrong, _ in results] == [[]] * size
    assert all(digests == results[0][1] for _, digests in results)


def check_small_blocks(context):
    """Many blocks, uneven last ones, parts that are empty; each group knows one size of blocks."""
    kept = two_shots._BLOCK_BYTES
    wrong = []
    try:
        for block in (1 << 13, 1 << 15, 1 << 20):
            two_shots._BLOCK_BYTES = block
            group = context.split(0)
            whole = max(5 << 16, block // 2)  # float32 elements, of blocks without a rest
            for length in (whole, whole + 1, 400_001):
                parts = [values("float32", (length,), r, seed=block) for r in range(context.size)]
                found = all_reduce(parts[context.rank], context=group)
                if not same(found, reduced("sum", parts)):
                    wrong.append((block, length))
            group.close()
    finally:
        two_shots._BLOCK_BYTES = kept
    return wrong


@pytest.mark.parametrize("size", [2, 3, 6])
def test_two_shots_in_many_blocks(contexts, size):
    assert contexts.run(check_small_blocks, ranks=size) == [[]] * size


def check_forms(context, shape, dtype):
    wrong = []
    parts = [values(dtype, shape, rank) for rank in range(context.size)]
    wanted = reduced("sum", parts)
    shares = _slab(shape[0], context.size)
    low = sum(shares[: context.rank])
    own = wanted[low : low + shares[context.rank]]
    for form in FORMS:
        library = "torch" if form.startswith("torch") else "numpy"
        x = formed(form, parts[context.rank], context)
        found = all_reduce(x, context=context)
        if type(found) is not type(x) or not same(elements_of(found), wanted):
            wrong.append((form, "all_reduce"))
        out, untouched = framed(shape, dtype, library)
        found = all_reduce(x, out=out, context=context)
        if found is not out or not same(elements_of(out), wanted) or not untouched():
            wrong.append((form, "all_reduce out"))
        out, untouched = framed(own.shape, dtype, library)
        found = reduce_scatter(x, out=out, context=context)
        if found is not out or not same(elements_of(out), own) or not untouched():
            wrong.append((form, "reduce_scatter out"))
        if not same(elements_of(x), parts[context.rank]):
            wrong.append((form, "operand changed"))
        found = all_reduce(x, out=x, context=context)
        if found is not x or not same(elements_of(x), wanted):
            wrong.append((form, "in place"))
    return wrong


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("shape", [(7, 9), (600, 701)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_operands_and_results_of_every_form(contexts, size, shape, dtype):
    assert contexts.run(check_forms, shape, dtype, ranks=size) == [[]] * size


def check_scatter(context, case, dtype, op):
    shape, axis, counts = case
    parts = [values(dtype, shape, rank) for rank in range(context.size)]
    found = reduce_scatter(parts[context.rank], op=op, axis=axis, counts=counts, context=context)
    shares = list(counts) if counts is not None else _slab(shape[axis], context.size)
    low = sum(shares[: context.rank])
    wanted = np.take(reduced(op, parts), range(low, low + shares[context.rank]), axis)
    return bool(same(found, wanted)) and found.shape[axis] == shares[context.rank]


@pytest.mark.parametrize("dtype", ["float16", "int64"])
@pytest.mark.parametrize(
    ("size", "case"),
    [
        (1, ((7,), 0, None)),
        (2, ((7,), 0, None)),
        (3, ((8, 5), 0, (0, 8, 0))),
        (3, ((5, 8), 1, None)),
        (3, ((5, 8), -1, (1, 3, 4))),
        (4, ((3, 2, 9), 1, None)),
        (4, ((0, 4), 0, None)),
        (4, ((4, 0), 0, None)),
        (6, ((9, 40_000), 0, None)),
        (2, ((300, 4000), 1, (1, 3999))),
        (3, ((2, 3, 200_000), 2, None)),
    ],
)
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_reduce_scatter(contexts, size, case, dtype, op):
    assert all(contexts.run(check_scatter, case, dtype, op, ranks=size))


def check_overlap(context):
    """An out that overlaps the operand, but is not it."""
    wrong = []
    for length in (100, 400_000):
        for place in ("plain", "heap"):
            parts = [values("float32", (length + 1,), rank) for rank in range(context.size)]
            memory = formed(place, parts[context.rank], context)
            all_reduce(memory[:-1], out=memory[1:], context=context)
            if not same(memory[1:], reduced("sum", [part[:-1] for part in parts])):
                wrong.append((length, place))
    return wrong


def test_an_out_that_overlaps_the_operand(contexts):
    assert contexts.run(check_overlap, ranks=3) == [[]] * 3


def repeat(context, times):
    x = values("float32", (300_000,), context.rank) / 7
    return sorted({digest(all_reduce(x, context=context)) for _ in range(times)})


def test_repeats_give_the_same_bits(contexts):
    results = contexts.run(repeat, 30, ranks=4)
    assert len(results[0]) == 1 and all(result == results[0] for result in results)


def _slab(extent, size):
    return [extent // size + (rank < extent % size) for rank in range(size)]
