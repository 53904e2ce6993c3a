"""Products of gathered rows: what is pure of them. No GPU is needed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from shardmath.operators.matmul.gpu.all_gather import copy_steps
from shardmath.operators.matmul.gpu.local_product import OperandLayout
from shardmath.operators.matmul.gpu.row_split import (
    CHUNKS,
    DEPTH,
    RowSplitProduct,
    Tiling,
    choose_tiling,
    is_fused_faster,
    predicted,
)

HOPPER = SimpleNamespace(arch="sm_90")


def product(rows, columns=3584, depth=8192, dtype="bfloat16", a="C", b="F", pad=0):
    factors = (
        OperandLayout(a, (depth if a == "C" else max(rows)) + pad),
        OperandLayout(b, depth + pad),
    )
    return RowSplitProduct(tuple(rows), columns, depth, dtype, *factors)


def test_rows_come_from_the_left():
    problem = product([5, 6, 0, 8])
    assert problem.arrivals(0) == [0, 3, 1]
    assert problem.arrivals(3) == [3, 1, 0]
    assert problem.starts == (0, 5, 11, 11)
    assert problem.height == 19


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("rows", [[1, 2, 3], [0, 77, 0], [128] * 8, [0]])
@pytest.mark.parametrize("depth", [0, 7, 64])
def test_gathered_rows_lie_apart_and_aligned(order, rows, depth):
    problem = RowSplitProduct(
        tuple(rows), 8, depth, "float16", OperandLayout(order, 8), OperandLayout("C", 8)
    )
    for rank in range(len(rows)):
        assert problem.gathered(rank).pitch % 8 == 0
        assert problem.gathered(rank).pitch >= (depth if order == "C" else rows[rank])
        assert problem.offsets[rank] % 128 == 0
        room = problem.offsets[rank + 1] - problem.offsets[rank]
        assert room >= 2 * problem.gathered(rank).pitch * problem.lines(rank)


@pytest.mark.parametrize(
    ("problem", "device", "words"),
    [
        (product([64]), HOPPER, ""),
        (product([64]), SimpleNamespace(arch="sm_80"), "capability 9.0"),
        (product([64], dtype="float32"), HOPPER, "float32"),
        (product([64], depth=83), HOPPER, "A's rows are 83 elements apart"),
        (product([64], a="F", pad=4), HOPPER, "A's columns are 68 elements apart"),
        (product([1] * 65), HOPPER, "65 ranks"),
    ],
)
def test_misfit(problem, device, words):
    assert words in problem.unsupported(device)
    assert bool(words) == bool(problem.unsupported(device))


@pytest.mark.parametrize(
    ("rows", "columns", "width", "blocks"),
    [
        ([1024] * 8, 3584, 224, 128),  # one turn of 128 tiles for the rows of each rank
        ([512] * 8, 6144, 256, 128),
    ],
)
def test_tilings_that_are_chosen(rows, columns, width, blocks):
    tiling = choose_tiling(product(rows, columns), 0, 132)
    assert (tiling.width, tiling.blocks) == (width, blocks)


@pytest.mark.parametrize(
    ("size", "height", "piecewise"),
    [
        (8, 4096, 1),  # own rows are half a round
        (8, 8192, 0),  # own rows are a round
        (4, 2048, 1),
        (4, 4096, 0),
    ],
)
def test_who_gets_rows_in_pieces(size, height, piecewise):
    assert choose_tiling(product([height // size] * size), 0, 132).piecewise == piecewise


@pytest.mark.parametrize("rows", [[0] * 4, [7, 0, 300], [4096] * 8, [100]])
@pytest.mark.parametrize("columns", [0, 1, 264, 6656])
@pytest.mark.parametrize("b_along_k", [True, False])
def test_every_choice_fits(rows, columns, b_along_k):
    for rank in range(len(rows)):
        tiling = choose_tiling(product(rows, columns), rank, 132)
        assert 1 <= tiling.blocks <= (132 if len(rows) == 1 else 128)  # what begins copies: some
        assert tiling.blocks % tiling.cluster == 0
        assert 0 <= tiling.piecewise < len(rows)
        assert tiling.shared_bytes(b_along_k=b_along_k) < 227 << 10


@pytest.mark.parametrize("depth", [0, 1, 64, 65, 512, 513, 8192])
def test_chunks_of_k_are_whole_steps(depth):
    problem = product([8], depth=depth)
    ends = [0, *(end for _, end in problem.chunks)]
    assert [first for first, _ in problem.chunks] == ends[:-1]
    assert ends[-1] == depth
    assert len(problem.chunks) <= CHUNKS
    assert all(first % (DEPTH * problem.chunk) == 0 < end - first for first, end in problem.chunks)


@pytest.mark.parametrize(
    ("rows", "depth", "piecewise", "steps"),
    [
        ([8] * 4, 128, 0, [(1, 0, 2), (2, 0, 2), (3, 0, 2)]),
        ([8] * 4, 128, 1, [(1, 0, 1), (1, 1, 2), (2, 0, 2), (3, 0, 2)]),
        ([8] * 3, 128, 2, [(1, 0, 1), (2, 0, 1), (1, 1, 2), (2, 1, 2)]),
        ([8] * 2, 128, 7, [(1, 0, 1), (1, 1, 2)]),
        ([8] * 2, 8192, 1, [(1, 0, 2), (1, 2, 4), (1, 4, 6), (1, 6, 8)]),
        ([8] * 3, 0, 1, []),
        ([8], 128, 0, []),
    ],
)
def test_what_copy_engines_copy(rows, depth, piecewise, steps):
    assert list(copy_steps(len(rows), piecewise, product(rows, depth=depth))) == steps


def test_prediction_waits_for_rows():
    tiling = Tiling(256, 2, 4, 132)
    alone = predicted(product([8192]), 0, tiling)
    assert predicted(product([1024] * 8), 0, tiling) < 1.15 * alone
    narrow = predicted(product([8192], columns=512), 0, tiling)
    assert predicted(product([1024] * 8, columns=512), 0, tiling) > 2 * narrow
    assert predicted(product([0] * 8), 0, tiling) == 0


@pytest.mark.parametrize(
    ("height", "fused"), [(128, False), (512, False), (2048, True), (4096, True), (8192, True)]
)
def test_few_rows_are_gathered_first(height, fused):
    assert is_fused_faster(product([height // 8] * 8)) is fused


def test_one_rank_has_nothing_to_gather():
    assert not is_fused_faster(product([8192]))
