"""Predicting the time of a factorisation, by counting its steps on all ranks. Pure.

Each step advances the clock of its rank. Where all synchronise, a rank waits until the last one has
arrived; a rank that looks ahead arrives before it does the rest of its work:

    owner of k+1   subtract from k+1 ─ factorise k+1 ─ arrive ─ subtract from the rest ─┐
    others         arrive ─ subtract from the rest ───────────────────── wait for that ─┴ read k+1
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import prod

from shardmath.base.immutable import Immutable
from shardmath.factorisations.steps import (
    Cut,
    ExchangeRows,
    FactoriseCholesky,
    FactoriseLU,
    Substitute,
    Subtract,
)
from shardmath.machine import Rates
from shardmath.operators.matmul.strategy import Cost
from shardmath.program.steps import Arrive, Move, Step, Synchronise

_OF_A_PANEL = 0.5  # the share of the rate of products for panels and triangles, which are narrow


class Work(Immutable):
    """Operations, and the share of the rate of products at which they are done; bytes of matrices
    that they read and write; and bytes received from peers.
    """

    flops: float = 0.0
    share: float = 1.0
    touched: int = 0
    received: int = 0

    def seconds(self, rate: float, rates: Rates) -> float:
        """The time that it takes. Products, but not those with a vector, copy blocks, too."""
        computing = self.flops / (self.share * rate)
        if self.flops and self.share == 1:
            computing += self.touched / rates.packing
        return max(computing, rates.touching(self.touched)) + self.received / rates.link


def predicted(ranks: Sequence[Sequence[Step]], dtype: str, itemsize: int, rates: Rates) -> Cost:
    """The cost of the steps of all ranks, for the rank that does most of each."""
    size, rate = len(ranks), rates.product(dtype)
    flops, touched, received, clocks = ([0.0] * size for _ in range(4))
    for together in zip(*map(_phases, ranks), strict=True):
        arrivals = []
        for rank, steps in enumerate(together):
            arrival = None
            for step in steps:
                if isinstance(step, Arrive):
                    arrival = clocks[rank]
                    continue
                work = work_of(step, rank, itemsize)
                clocks[rank] += work.seconds(rate, rates)
                flops[rank] += work.flops
                touched[rank] += work.touched
                received[rank] += work.received
            arrivals.append(clocks[rank] if arrival is None else arrival)
        clocks = [max(*arrivals, clock) + rates.latency for clock in clocks]
    return Cost(max(flops), int(max(touched)), int(max(received)), max(clocks))


def _phases(steps: Sequence[Step]) -> list[list[Step]]:
    """The steps of a rank between synchronisations."""
    return [
        [*group]
        for synchronises, group in groupby(steps, lambda step: isinstance(step, Synchronise))
        if not synchronises
    ]


def work_of(step: Step, rank: int, itemsize: int) -> Work:
    """The work of a step for a rank; none for steps that touch each element once."""
    work = Work()
    if isinstance(step, Subtract):
        (m, n), depth = _extents(step.target), _extents(step.left)[step.ops[0] == "N"]
        work = Work(2.0 * m * n * depth, 1.0, itemsize * (depth * (m + n) + m * n))
    elif isinstance(step, Substitute):
        width, n = _extents(step.target)
        elements = width * width // 2 + 2 * width * n
        work = Work(float(width**2 * n), _OF_A_PANEL, itemsize * elements)
    elif isinstance(step, FactoriseLU):
        height, width = _extents(step.panel)
        work = Work(width**2 * (height - width / 3), _OF_A_PANEL, 2 * itemsize * height * width)
    elif isinstance(step, FactoriseCholesky):
        height, width = _extents(step.panel)
        elements = width * (2 * height - width)
        work = Work(width**2 * (height - 2 / 3 * width), _OF_A_PANEL, itemsize * elements)
    elif isinstance(step, ExchangeRows):
        lo, hi = step.place
        work = Work(touched=4 * itemsize * (hi - lo) * _extents(step.target)[1])
    elif isinstance(step, Move):
        received = step.transfer.traffic[1][rank]
        held = itemsize * prod(step.transfer.result_shape(rank))
        work = Work(touched=2 * max(0, held - received), received=received)
    return work


def _extents(cut: Cut) -> tuple[int, int]:
    """The numbers of rows and columns of a block."""
    return max(0, cut.rows[1] - cut.rows[0]), max(0, cut.columns[1] - cut.columns[0])
