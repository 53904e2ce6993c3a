"""Products of ranks on several hosts as data: what is packed, fetched and added, in this process.

All ranks' outboxes are arrays of bytes here; nothing is read but a rank's own memory, the outboxes
on its host, and what its fetches brought into its room.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_matmul_strategies import problem

from arrangements import distributions
from copying import copy_boxes
from draws import drawn
from shardmath.geometry import BlockCyclic, ProcessGrid, Slab, decode
from shardmath.operators.matmul.gpu import panels
from shardmath.operators.matmul.gpu.rank_plan import RankPlan
from shardmath.operators.matmul.strategy import candidates
from shardmath.redistribution.copies import lowered


def indices(spans):
    return np.array([i for lo, hi in spans.ranges() for i in range(lo, hi)], np.intp)


def part(array, layout, rank):
    return array[np.ix_(*map(indices, layout.spans(rank)))]


class Ranks:
    """All ranks of one product; matrices by name."""

    def __init__(self, strategy, hosts):
        self.hosts = hosts
        self.rank_plans = [RankPlan(strategy, rank, hosts) for rank in range(len(hosts))]
        self.arrays, self.outboxes = {}, {}

    def pack(self, name, arrays):
        """Every rank packs its matrix."""
        self.arrays[name] = arrays = [np.ascontiguousarray(array) for array in arrays]
        self.outboxes[name] = []
        for rank_plan, array in zip(self.rank_plans, arrays, strict=True):
            outbox = rank_plan.delivery(name, array.itemsize).outbox
            held = np.full(outbox.nbytes, 0xA5, np.uint8)
            boxes = outbox.packing(array.strides)
            copy_boxes(boxes, [(bytes_of(array), 0)], (held, 0))
            self.outboxes[name].append(held)

    def gathered(self, rank, name, moves, shape):
        """The matrix that moves fill."""
        rank_plan, arrays = self.rank_plans[rank], self.arrays[name]
        itemsize = arrays[rank].itemsize
        delivery = rank_plan.delivery(name, itemsize).only(moves)
        room = np.full(delivery.room, 0xA5, np.uint8)
        for each in delivery.fetches:
            assert self.hosts[each.src] != self.hosts[rank]
            source = self.outboxes[name][each.src][each.offset : each.offset + each.nbytes]
            assert source.size == each.nbytes
            room[each.at : each.at + each.nbytes] = source
        target = np.zeros(shape, arrays[rank].dtype)
        for move in moves:
            memory, start, strides = bytes_of(arrays[rank]), 0, arrays[rank].strides
            if move.src != rank:
                near = self.hosts[move.src] == self.hosts[rank]
                assert near != any(each.src == move.src for each in delivery.fetches)
                memory = self.outboxes[name][move.src] if near else room
                start, strides = delivery.place(move.src)
                packed = self.rank_plans[move.src].delivery(name, itemsize).outbox.parcels[rank]
                assert strides == packed.strides and (not near or start == packed.offset)
            copy = lowered(move, itemsize, strides, target.strides)
            source = (memory, start)
            copy_boxes([copy], {move.src: source}, (bytes_of(target), 0))
        return target


def bytes_of(array):
    return array.reshape(-1).view(np.uint8)


def check(strategy, hosts):
    """The whole product, by what the shares say."""
    given, size = strategy.problem, len(hosts)
    m, n, k = given.shape
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-9, 9, shape).astype(np.float64) for shape in ((m, k), (k, n)))
    ranks = Ranks(strategy, hosts)
    factors = [
        [part(x, layout, r) for r in range(size)] for x, layout in ((a, given.a), (b, given.b))
    ]
    sums = []
    for name, parts in zip("ab", factors, strict=True):
        ranks.pack(name, parts)
    for rank, rank_plan in enumerate(ranks.rank_plans):
        assert rank_plan.pattern is None and rank_plan.multi_host == (len(set(hosts)) > 1)
        needed = [part(a, strategy.a, rank), part(b, strategy.b, rank)]
        if rank_plan.multiplies:
            for index, operand_plan in enumerate(rank_plan.operand_plans):
                if not operand_plan.gathers:
                    continue
                for interval in rank_plan.schedule[0]:
                    moves = operand_plan.gather_moves(interval.lo, interval.hi)
                    cut = (slice(None),) * operand_plan.axis + (slice(interval.lo, interval.hi),)
                    shape = operand_plan.shape(interval.lo, interval.hi)
                    panel = ranks.gathered(rank, "ab"[index], moves, shape)
                    assert panel.tobytes() == needed[index][cut].tobytes()
        sums.append(needed[0] @ needed[1])
    final = finished(strategy, ranks, sums) if strategy.reduces or strategy.moves_result else sums
    for rank in range(size):
        want = part(a @ b, given.d, rank)
        assert not want.size or np.array_equal(final[rank], want), str(strategy)


def finished(strategy, ranks, sums):
    """Sums added, and moved."""
    name = "sums"
    if strategy.reduces:
        ranks.pack("sums", sums)
        name, totals = "reduced", []
        for rank, rank_plan in enumerate(ranks.rank_plans):
            shape = strategy.reduced.local_shape(rank)
            groups = rank_plan.added("sums")
            parts = [ranks.gathered(rank, "sums", moves, shape) for moves in groups]
            totals.append(sum(parts, np.zeros(shape)))
        sums = totals
    if not strategy.moves_result:
        return sums
    ranks.pack(name, sums)
    return [
        ranks.gathered(r, name, rank_plan.moves(name), strategy.problem.d.local_shape(r))
        for r, rank_plan in enumerate(ranks.rank_plans)
    ]


@drawn(30)
@given(data=st.data(), hosts=st.integers(2, 3))
def test_any_product(data, hosts):
    size = data.draw(st.integers(2, 6))
    m, n, k = (data.draw(st.integers(0, 20)) for _ in range(3))
    sides = [
        [decode(each) for each in data.draw(distributions(shape, size))]
        for shape in ((m, k), (k, n), (m, n))
    ]
    numbers = tuple(rank * hosts // size for rank in range(size))
    for strategy in candidates(problem((m, n, k), *sides)):
        check(strategy, numbers)


GRID = ProcessGrid(shape=(2, 2), layout=ProcessGrid.Layout.ROW_MAJOR)
BLOCKS = BlockCyclic(GRID, (6, 7))


@pytest.mark.parametrize(
    "sides", [(Slab.X,) * 3, (Slab.Y,) * 3, (BLOCKS,) * 3, (Slab.Y, Slab.X, BLOCKS)]
)
def test_intervals_fetch_what_they_need(sides, monkeypatch):
    """Many intervals of k: each fetches its own part, and all together what moves between hosts."""
    monkeypatch.setattr(panels, "_FIRST_BYTES", 1 << 10)
    monkeypatch.setattr(panels, "_LEAST", 64)
    monkeypatch.setattr(panels, "_FIRST", 0.0)
    hosts, shape = (0, 0, 1, 1), (24, 20, 700)
    for strategy in candidates(problem(shape, *([side] * 4 for side in sides))):
        check(strategy, hosts)
        for rank in range(4):
            rank_plan = RankPlan(strategy, rank, hosts)
            for name, operand_plan, transfer in zip(
                "ab", rank_plan.operand_plans, strategy.transfers, strict=True
            ):
                if not operand_plan.gathers or len(rank_plan.schedule[0]) < 2:
                    continue
                fetched = sum(
                    each.nbytes
                    for interval in rank_plan.schedule[0]
                    for each in rank_plan.delivery(name, 8)
                    .only(operand_plan.gather_moves(interval.lo, interval.hi))
                    .fetches
                )
                far = [move for move in transfer.into(rank) if hosts[move.src] != hosts[rank]]
                assert fetched == 8 * sum(move.elements for move in far), str(strategy)


def test_what_all_take_is_packed_once():
    size = 4
    strategies = candidates(problem((16, 16, 16), *([side] * size for side in (Slab.X,) * 3)))
    (strategy,) = [each for each in strategies if each.label == "stationary c"]
    outbox = RankPlan(strategy, 0, (0, 0, 1, 1)).delivery("b", 8).outbox
    assert len(outbox.parcels) == 3 and outbox.nbytes == 16 * 4 * 8
