"""The order along k of products whose factors come while they run: performed with NumPy, pure."""

from __future__ import annotations

import numpy as np
import pytest

from shardmath.distribution import BlockCyclic, ProcessGrid, Slab
from shardmath.geometry import Layout, Spans, moves
from shardmath.operators.matmul.gpu.panel_schedule import OWN, KOrder, OperandSteps
from shardmath.operators.matmul.gpu.panels import OperandPlan

STEP, FIRST_BYTES = 4, 300.0


def cyclic(grid, *block):
    order = ProcessGrid.Layout.COL_MAJOR
    return BlockCyclic(ProcessGrid(shape=grid, layout=order), block)


# (ranks, distributions of A, B and D, m, n, k): blocks of whole steps, of cut ones, and slabs.
CASES = {
    "2 x 4": (8, [cyclic((2, 4), 8, 8)] * 3, (16, 32, 64)),
    "2 x 2, ragged": (4, [cyclic((2, 2), 8, 8)] * 3, (13, 21, 45)),
    "2 x 3": (6, [cyclic((2, 3), 4, 8)] * 3, (24, 30, 66)),
    "1 x 2": (2, [cyclic((1, 2), 8, 8)] * 3, (9, 16, 40)),
    "2 x 1": (2, [cyclic((2, 1), 8, 8)] * 3, (16, 9, 40)),
    "cut steps": (4, [cyclic((2, 2), 6, 6)] * 3, (12, 12, 30)),
    "blocks that differ": (
        4,
        [cyclic((2, 2), 8, 8), cyclic((2, 2), 16, 4), cyclic((2, 2), 5, 3)],
        (20, 18, 64),
    ),
    "slabs": (3, [Slab.Y, Slab.X, Slab.X], (12, 12, 36)),
    "rows of several": (3, [Slab.X, Slab.X, Slab.Y], (12, 12, 36)),
    "empty parts": (4, [cyclic((2, 2), 16, 16)] * 3, (16, 40, 16)),
}


def local(array, layout, rank):
    index = [
        [i for lo, hi in spans.ranges() for i in range(lo, hi)] for spans in layout.parts[rank]
    ]
    return array[np.ix_(*index)]


class RankOperand:
    """One factor of one rank, in NumPy: oriented so that k is its axis 0."""

    def __init__(self, array, layout, needs, rank, axis, loadable):
        self.arrays = [local(array, layout, src) for src in range(layout.size)]
        if axis == 1:
            self.arrays = [each.T for each in self.arrays]
        found = moves(layout, needs, dst_rank=rank)
        shape = needs.local_shape(rank)
        operand_plan = OperandPlan.plan(found, shape, rank, axis)
        self.rank, self.axis, self.width = rank, axis, shape[1 - axis]
        extent = shape[axis]
        if operand_plan.place is not None:
            self.k_steps = OperandSteps.local(axis, extent, STEP)
            place = operand_plan.place[axis], operand_plan.place[1 - axis]
            self.reads_own = self.arrays[rank][
                place[0] : place[0] + extent, place[1] : place[1] + self.width
            ]
        else:
            self.k_steps = OperandSteps.of(
                found, rank, axis=axis, extent=extent, step=STEP, loadable=loadable
            )
            end = self.k_steps.source_ends.get(rank, 0)
            self.reads_own = self.arrays[rank][:end, : self.width]
        self.panel = np.full((self.k_steps.width, self.width), np.nan)
        self.received = np.zeros(self.panel.shape, int)

    def perform(self, found, lo):
        for move in found:
            k, across = move.runs[self.axis], move.runs[1 - self.axis]
            src, dst = (
                np.ix_(*([start + i * step + j for i in range(run.count) for j in range(run.length)]
                for run, start, step in self.offsets(k, across, operand)))
                for operand in ("src", "dst")
            )  # fmt: skip
            self.panel[:, lo:][dst] = self.arrays[move.src][src]
            self.received[:, lo:][dst] += 1

    @staticmethod
    def offsets(k, across, operand):
        names = f"{operand}_start", f"{operand}_step"
        return [(run, *(getattr(run, name) for name in names)) for run in (k, across)]

    def step(self, place):
        """As a kernel loads it: zeros beyond the end."""
        here, at = (self.reads_own, place - OWN) if place & OWN else (self.panel, place)
        rows = here[at : at + STEP]
        return np.vstack([rows, np.zeros((STEP - len(rows), self.width))])


def perform(case, rank, loadable):
    size, distributions, (m, n, k) = CASES[case]
    shapes = (m, k), (k, n), (m, n)
    a, b, d = (
        Layout.bind([one] * size, shape) for one, shape in zip(distributions, shapes, strict=True)
    )
    rng = np.random.default_rng(3)
    x, y = rng.integers(-9, 9, (m, k)).astype(float), rng.integers(-9, 9, (k, n)).astype(float)
    whole = tuple(Spans.interval(0, k) for _ in range(size))
    rows, columns = d.column(0), d.column(1)
    needs = (
        Layout.product((m, k), [rows, whole], size=size),
        Layout.product((k, n), [whole, columns], size=size),
    )
    left = RankOperand(x, a, needs[0], rank, 1, loadable)
    right = RankOperand(y, b, needs[1], rank, 0, loadable)
    costs = 8.0 * left.width, 8.0 * right.width
    k_order = KOrder.plan((left.k_steps, right.k_steps), costs, STEP)
    every, table = np.arange(k_order.steps), k_order.table().tolist()
    for operand in (left, right):  # what is here and cannot be read where it lies
        found = operand.k_steps.gather_moves(every, (0, operand.width), STEP) if len(every) else []
        operand.perform([move for move in found if move.src == rank], 0)
    result = np.zeros((left.width, right.width))
    pieces = k_order.pieces(costs, FIRST_BYTES)
    done = 0
    for first, last in [(0, min(k_order.local_steps(0), k_order.local_steps(1))), *pieces]:
        assert first == done
        done = last
        for index, operand in enumerate((left, right)):
            half = operand.width // 2
            for lo, hi in ((0, half), (half, operand.width)):
                found = k_order.gather_moves(index, first, last, (lo, hi))
                assert not (found and last <= k_order.local_steps(index))
                operand.perform(found, lo)
        for of_a, of_b in table[first:last]:
            result += left.step(of_a).T @ right.step(of_b)
    assert done == k_order.steps
    for operand in (left, right):
        assert operand.received.max(initial=0) <= 1
    assert np.array_equal(result, local(x @ y, d, rank))
    return k_order, pieces


@pytest.mark.parametrize("loadable", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_every_step_is_here_when_it_is_multiplied(case, loadable):
    for rank in range(CASES[case][0]):
        perform(case, rank, loadable)


@pytest.mark.parametrize(
    ("rank", "order"),
    [
        (
            0,
            [0, 1, 8, 9, 4, 5, 12, 13, 2, 3, 10, 11, 6, 7, 14, 15],
        ),  # own both; B here; then c = 1, 3
        (2, [2, 3, 10, 11, 4, 5, 12, 13, 0, 1, 8, 9, 6, 7, 14, 15]),
    ],
)
def test_what_is_here_comes_first(rank, order):
    k_order, pieces = perform("2 x 4", rank, True)
    assert (k_order.order.tolist(), pieces) == (order, pieces)
