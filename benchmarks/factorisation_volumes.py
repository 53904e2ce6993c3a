"""Bytes that a rank receives in factorisations, counted, beside published volumes of others.

`python benchmarks/factorisation_volumes.py`: float64, ranks 1 to 8, with the same number of
elements each: n = 2048 sqrt(P). This counts the moves of the ranks' programs for the rank that
receives most: for columns that are already in place, and for rows that are brought into columns and
back. Beside them, in elements of 8 bytes:

* 2-D: n^2/2 (1/p + 1/q) on the p x q ranks nearest to a square, p <= q: the panels of rows and
  columns that a rank uses in ScaLAPACK's and SLATE's factorisations; on a square n^2/sqrt(P).
  Source: Kwasniewski and others, "On the parallel I/O optimality of linear algebra kernels",
  SC 2021, on ScaLAPACK and SLATE.
* 2-D received: the same, counted as ours is: without a rank's own share of these panels, and for
  LU with the rows that the p ranks of a column exchange, whole, each rank being equally likely to
  have the pivot: 2 n^2/P (1 - 1/p).
* I/O optimal: n^3/(P sqrt(S)), of COnfLUX and COnfCHOX there, by the authors and the method of
  COSMA ("Red-blue pebbling revisited", SC 2019), with the memory of S = n^2/P that columns take.
  COSMA's own volume, 2 n^3/(P sqrt(S)), is that of a product, which has three times as many
  operations as LU.
"""

from __future__ import annotations

from math import isqrt, sqrt
from typing import Any

import record

from shardmath.factorisations.blocks import Blocks
from shardmath.factorisations.cholesky import CHOLESKY
from shardmath.factorisations.lu import LU_FACTOR
from shardmath.factorisations.problem import Problem
from shardmath.geometry import Layout
from shardmath.machine import Machine
from shardmath.program.steps import Move

N, BLOCK, RANKS, GOAL = 2048, 128, 8, 1.2
OPERATIONS = {"cholesky": (CHOLESKY, (True, True)), "lu_factor": (LU_FACTOR, (True,))}


def received(operation: Any, flags: tuple[Any, ...], layout: Layout, size: int) -> int:
    """Bytes of the rank that receives most, of a matrix and a factor of that layout."""
    problem = Problem(layout, None, layout, "float64", 8, "F", flags, BLOCK)
    machine, most = Machine("cpu", (0,) * size), 0
    for rank in range(size):
        steps = operation.program(problem, machine, rank).steps
        moves = [step for step in steps if isinstance(step, Move)]
        most = max(most, sum(move.transfer.traffic[1][rank] for move in moves))
    return most


def main() -> None:
    """Count, print a table, write results/factorisation_volumes.json."""
    rows = []
    for size in range(1, RANKS + 1):
        n = round(N * sqrt(size) / BLOCK) * BLOCK
        p = next(p for p in range(isqrt(size), 0, -1) if size % p == 0)
        q = size // p
        grid = 8 * n**2 / 2 * (1 / p + 1 / q) * (size > 1)
        panels = 8 * n**2 / 2 * ((1 - 1 / q) / p + (1 - 1 / p) / q)
        exchanged = 8 * 2 * n**2 / size * (1 - 1 / p)
        optimal = 8 * n**3 / (size * sqrt(n**2 / size)) * (size > 1)
        for name, (operation, flags) in OPERATIONS.items():
            own = received(operation, flags, Blocks(n, BLOCK, size).layout, size)
            split = received(operation, flags, Layout.slab((n, n), size, axis=0), size)
            row: dict[str, Any] = {"operation": name, "ranks": size, "n": n}
            row |= {"columns": own, "rows": split}
            others = {"2-D": grid, "2-D received": panels, "I/O optimal": optimal}
            if operation is LU_FACTOR:
                others["2-D received"] += exchanged
            for of, volume in others.items():
                row |= {of: round(volume), f"of {of}": round(own / volume, 3) if own else 0.0}
            rows.append(row)
    record.write("factorisation_volumes", rows, block=BLOCK, goal=GOAL)


if __name__ == "__main__":
    main()
