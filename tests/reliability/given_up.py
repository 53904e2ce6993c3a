"""Contexts that are given up and recovered from, over and over, and how much of the heap is in use.

One body for pretended GPUs and for real ones. A group is told of memory in each context, and memory
is kept for its kernels; then one rank gives an operation up.
"""

from __future__ import annotations

import pytest

from heap_use import settled_use
from shardmath.errors import RankFailure

NBYTES = 3 << 20
ROUNDS = 5
GIVES_UP = 1  # the rank


def give_up(context):
    """Let a rank fail in the middle of an operation: its peers hear of it."""
    if context.rank == GIVES_UP:
        context.board.fail("it was interrupted")
    with pytest.raises(RankFailure):
        context.barrier()


def used_in_each(context, call=lambda context: None):
    """Bytes of the heap that a context leaves in use: given up, recovered from, in each round.

    `call(context)` does more in that context. Collective; the last context is returned, too.
    """
    used = [settled_use(context)]
    for _ in range(ROUNDS):
        told = context.allocate_shared(NBYTES)
        context.keep_for_kernels(context.heap.allocate(NBYTES))
        call(context)
        give_up(context)
        del told
        context = context.recover()
        used.append(use_below(context, NBYTES + used[0]))
    return context, used


def use_below(context, limit):
    """Bytes of the heap in use, when they are less than `limit` on all ranks. Collective.

    On a busy machine a GPU may still be at work when recover() returns.
    """
    while True:
        used = settled_use(context)
        if all(context.agree("use", lambda: used < limit, list)):  # noqa: B023
            return used
