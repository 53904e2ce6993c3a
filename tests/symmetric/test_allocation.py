"""allocate_symmetric_memory and free_symmetric_memory, for NumPy and torch alike."""

import gc
import logging

import numpy as np
import pytest
import torch

from mortal import on_ranks
from shardmath.arrays import library_of_package
from shardmath.context.startup import finalize
from shardmath.errors import CollectiveMismatch, HeapExhausted, UseAfterFree
from shardmath.handles.allocation import allocate_symmetric_memory as allocate
from shardmath.handles.allocation import (
    block_of,
    empty_on_heap,
    free_symmetric_memory,
    is_symmetric,
)

PACKAGES = [np, torch]


def said(call):
    """What `call` raises, as (type's name, text), or ("", "")."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("package", PACKAGES)
def test_shapes_orders_and_dtypes(package):
    cases = [
        # shape, axis_order, strides in elements
        (5, "C", (1,)),
        ((), "C", ()),
        ((0,), "C", (1,)),
        ((7, 8, 9), "C", (72, 9, 1)),
        ((7, 8, 9), "F", (1, 7, 56)),
        ((7, 8, 9), (2, 1, 0), (72, 9, 1)),
        ((7, 8, 9), (0, 1, 2), (1, 7, 56)),
        ((7, 8, 9), [1, 0, 2], (8, 1, 56)),
        ((np.int64(3), 1), "C", (1, 1)),
    ]
    dtypes = ["float16", "bfloat16", "float32", "complex128", "int8", "bool", "float8_e4m3fn"]

    def body(context):
        library = library_of_package(package)
        for shape, order, strides in cases:
            array = allocate(shape, package, axis_order=order)
            spec = library.spec(array)
            assert spec.dtype == str(library.default_dtype())
            assert spec.shape == ((shape,) if isinstance(shape, int) else tuple(shape))
            assert spec.size == 0 or spec.strides == strides, (spec, strides)
            assert block_of(context, array)[1] == 0
            library.host_view(array, writable=True)[...] = 1
        for dtype in dtypes:
            array = allocate((2, 3), package, dtype=dtype)
            assert library.spec(array).dtype == dtype
        native = allocate(3, package, dtype=package.float32)
        assert library.spec(native).dtype == "float32"

    on_ranks(2, body)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("size", [1, 3])
def test_uneven_sizes_are_padded_or_skipped(package, size):
    def body(context):
        mine = allocate((context.rank, 7), package, dtype="int32", make_symmetric=True)
        assert tuple(mine.shape) == (context.rank, 7)
        padded = block_of(context, mine)[0].nbytes
        loose = allocate(context.rank + 1, package, dtype="int8", skip_symmetric_check=True)
        return padded, block_of(context, loose)[0].nbytes

    assert on_ranks(size, body) == [((size - 1) * 28, rank + 1) for rank in range(size)]


def test_what_lies_on_the_heap_is_recognised():
    def body(context):
        for package in PACKAGES:
            whole = allocate((4, 6), package, dtype="float64")
            views = [
                (whole[1:], 48),
                (whole[:, 2], 16),
                (whole[3:, 5:], 184),
                (whole.T, 0),
                (whole.reshape(24)[5:7], 40),
            ]
            for view, offset in views:
                block, at = block_of(context, view)
                assert at == offset and block is block_of(context, whole)[0]
            for empty in (whole[4:], whole[:0], whole[2:2, 3:], allocate((0, 5), package)):
                assert block_of(context, empty) is not None and is_symmetric(empty)
            assert block_of(context, package.zeros((3, 3))) is None
            assert not is_symmetric(package.zeros(0))
        grid = allocate((4, 6), np)
        assert block_of(context, grid[::-1, ::2])[1] == 18 * 8
        beyond = np.lib.stride_tricks.as_strided(grid, (40, 6), (48, 8))
        assert block_of(context, beyond) is None, "it reaches beyond its block"
        assert block_of(context, torch.from_numpy(grid)) is not None
        assert block_of(context, allocate((4, 6), torch).numpy()) is not None
        made = empty_on_heap(context, library_of_package(np), (2, 3), "float32", "F")
        assert made.strides == (4, 8) and block_of(context, made)[1] == 0
        return said(lambda: block_of(context, [1, 2]))[0]

    assert on_ranks(1, body) == ["ValueError"]


BAD = [
    (lambda rank: allocate(3, np if rank else logging), "ValueError"),
    (lambda rank: allocate(3, "numpy"), "ValueError"),
    (lambda rank: allocate(3 + (rank == 1), np), "CollectiveMismatch"),
    (lambda rank: allocate(3, np, dtype="f4" if rank else "f8"), "CollectiveMismatch"),
    (lambda rank: allocate(3, np, make_symmetric=rank == 1), "CollectiveMismatch"),
    (lambda rank: allocate(-3 if rank else 3, np), "ValueError"),
    (lambda rank: allocate("ab" if rank else 3, np), "TypeError"),
    (lambda rank: allocate(3, np, dtype=object if rank else None), "ValueError"),
    (lambda rank: allocate(3, np, dtype=["f8"] if rank else None), "ValueError"),
    (lambda rank: allocate(3, np, logger=print if rank else None), "TypeError"),
    (lambda rank: allocate((3, 3), np, axis_order="K" if rank else "C"), "ValueError"),
    (lambda rank: allocate((3, 3), np, axis_order=(0, 0) if rank else (0, 1)), "ValueError"),
    (lambda rank: allocate(3, torch, dtype="V12" if rank else None), "ValueError"),
    (lambda rank: allocate(1 << 60 if rank else 3, np), "HeapExhausted"),
    (
        lambda rank: allocate(3, np, make_symmetric=True, skip_symmetric_check=True),
        "ValueError",
    ),
]


def test_an_error_on_one_rank_is_raised_on_all_and_the_heap_is_unchanged():
    def body(context):
        names = []
        for call, _ in BAD:
            name, text = said(lambda c=call: c(context.rank))
            assert "rank" in text, text
            names.append(name)
        gc.collect()
        assert context.heap.used == 0
        return names

    for names in on_ranks(3, body):
        assert names == [name for _, name in BAD]


def test_sizes_in_the_message_and_facts_on_every_rank():
    def body(context):
        _, text = said(lambda: allocate((context.rank + 1, 3), np))
        assert "rank 0 for 24 bytes, rank 1 for 48" in text and "make_symmetric" in text
        try:
            allocate(1 << 50 if context.rank else 1, np)
        except HeapExhausted as error:
            assert str(error).startswith("rank 1: ") and error.need >= 8 << 50
        return "done"

    assert on_ranks(2, body) == ["done"] * 2


@pytest.mark.parametrize("package", PACKAGES)
def test_free_is_a_hint_and_local(package):
    def body(context):
        free_symmetric_memory()
        first, second, third = (allocate(3, package) for _ in range(3))
        if context.rank == 0:
            free_symmetric_memory(first)  # on one rank only
        outcomes = [
            said(lambda: free_symmetric_memory(package.zeros(3)))[0],
            said(lambda: free_symmetric_memory([1, 2]))[0],
            said(lambda: free_symmetric_memory(second, second))[0],
            said(lambda: free_symmetric_memory(second, package.zeros(1)))[0],
        ]
        assert not block_of(context, second)[0].freed, "nothing is freed by a call that raises"
        free_symmetric_memory(second, third[1:])
        outcomes += [
            said(lambda: free_symmetric_memory(second))[0],
            said(lambda: block_of(context, third))[0],
        ]
        first = second = third = None
        assert context.heap.used == 0
        return outcomes

    expected = ["TypeError", "TypeError", "UseAfterFree", "TypeError"] + ["UseAfterFree"] * 2
    assert on_ranks(2, body) == [expected] * 2
    assert issubclass(UseAfterFree, RuntimeError) and issubclass(CollectiveMismatch, ValueError)


def test_without_a_context_it_says_what_to_call():
    assert "initialize" in said(lambda: allocate(3, np))[1]

    def body(context):
        array = allocate(3, np)
        array[:] = 5
        finalize()
        assert array.tolist() == [5, 5, 5], "the memory stays while the array does"
        return [said(lambda: allocate(3, np)), said(lambda: free_symmetric_memory(array))]

    for outcomes in on_ranks(2, body):
        assert all(n == "RuntimeError" and "initialize" in text for n, text in outcomes)


def test_the_logger_is_told():
    def body(context):
        lines = []
        logger = logging.getLogger("allocation")
        logger.setLevel(logging.INFO)
        logger.addFilter(lambda record: lines.append(record.getMessage()))
        allocate((2, 3), np, logger=logger)
        return lines

    assert on_ranks(1, body) == [
        ["allocated numpy float64 (2, 3), 48 bytes on the symmetric heap of rank 0"]
    ]
