"""From row slabs to a block-cyclic layout on a grid of ranks, and back, with drawings.

python -m shardmath run -n 4 examples/redistribution.py
"""

from __future__ import annotations

import numpy as np

import shardmath
from shardmath.distribution import BlockCyclic, ProcessGrid, Redistribute, Slab, redistribute

SHAPE = (9, 16)  # 9 rows on 4 ranks: uneven


def main() -> None:
    """Redistribute a matrix; rank 0 draws who owns what, one character per element."""
    context = shardmath.initialize("cpu")
    rank, size = context.rank, context.size
    columns = 2 if size % 2 == 0 else 1
    grid = ProcessGrid(shape=(size // columns, columns), layout=ProcessGrid.Layout.ROW_MAJOR)
    cyclic = BlockCyclic(grid, block_sizes=(2, 3))

    mine = np.full(Slab.X.shape(rank, SHAPE), rank, np.float32)
    with Redistribute(mine, Slab.X, cyclic) as plan:
        plan.plan()
        blocks = plan.execute()
        if rank == 0:
            print(f"{Slab.X}\n{Slab.X.draw(SHAPE)}\n\n{cyclic}\n{cyclic.draw(SHAPE)}\n")
            print(
                f"{plan.explain()}\n\nrank 0 now holds, by the rank that each came from:\n{blocks}"
            )

    back = redistribute(blocks, cyclic, Slab.X)
    assert np.array_equal(back, mine)
    shardmath.finalize()


if __name__ == "__main__":
    main()
