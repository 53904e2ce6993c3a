"""R6: allocate, free, drop and collect in another order on each rank, groups overlapping.

What the ranks do together they take from one random sequence; what each does alone, from its own.
Every array is filled with its group, number and rank, which every holder of a view checks again and
again: memory reused too early would show another array's pattern.
"""

import gc
import random

import numpy as np
import pytest
import torch

from draws import seeds
from mortal import on_ranks
from shardmath.handles.allocation import allocate_symmetric_memory as allocate
from shardmath.handles.allocation import free_symmetric_memory
from shardmath.handles.rendezvous import rendezvous

STEPS = 500
SIZE = 3
GROUPS = [(0, 1, 2), (0, 1), (1, 2), (2, 0), (2, 1, 0)]


def pattern(number, rank):
    return 1 + number * 8 + rank


class Holding:
    """What one rank has of an array: itself, the handle, views of peers; each may be dropped."""

    def __init__(self, context, number, lengths, package):
        self.number = number
        self.lengths = lengths
        self.array = allocate(
            lengths[context.rank], package, dtype="int64", skip_symmetric_check=True
        )
        self.array[:] = pattern(number, context.rank)
        self.handle = rendezvous(self.array, context)
        self.handle.barrier()
        self.views = {
            peer: self.handle.get_buffer(peer, (lengths[peer],), "int64")
            for peer in range(context.size)
        }
        self.rank = context.rank
        self.ring = self if number % 5 == 0 else None  # only the collector frees these

    def check(self):
        for peer, view in self.views.items():
            if peer == self.rank and self.array is None:
                continue
            expected = pattern(self.number, peer)
            assert len(view) == self.lengths[peer]
            assert not len(view) or (int(view.min()), int(view.max())) == (expected, expected)

    def drop(self, random_):
        part = random_.randrange(4)
        if part == 0:
            self.array = None
        elif part == 1:
            self.handle = None
        elif part == 2 and self.views:
            del self.views[random_.choice(sorted(self.views))]
        elif self.array is not None:
            free_symmetric_memory(self.array)
            self.array = None
            self.views.pop(self.rank, None)  # freed: its contents are nobody's


def lonely_step(random_, held, scratch):
    """One thing that a rank does on its own."""
    choice = random_.randrange(6)
    if choice == 0:
        made = allocate(random_.choice((0, 1, 7, 9, 4000, 300000)), np, skip_symmetric_check=True)
        made[:] = -1.0
        scratch.append(made)
    elif choice == 1 and scratch:
        gone = scratch.pop(random_.randrange(len(scratch)))
        if random_.random() < 0.5:
            free_symmetric_memory(gone)
    elif choice == 2 and held:
        held.pop(random_.randrange(len(held)))
    elif choice == 3 and held:
        random_.choice(held).drop(random_)
    elif choice == 4:
        gc.collect(random_.randrange(3))
    elif held:
        random_.choice(held).check()


@pytest.mark.parametrize("seed", seeds(3, 20))
def test_memory_is_reused_neither_too_early_nor_never(seed):
    def body(context):
        together, alone = random.Random(seed), random.Random(1000 * seed + context.rank + 1)
        contexts = {g: context.subset(g) for g in GROUPS if context.rank in g}
        held, scratch, high = [], [], 0
        for number in range(STEPS):
            group, action = together.choice(GROUPS), together.randrange(5)
            lengths = [together.choice((0, 1, 8, 9, 5000, 200000)) for _ in group]
            package = (np, torch)[together.randrange(2)]
            if action < 2:
                if group in contexts:
                    held.append(Holding(contexts[group], number, lengths, package))
            elif action == 2:
                if group in contexts:
                    contexts[group].barrier()
            else:
                for _ in range(3):
                    lonely_step(alone, held, scratch)
            if len(held) > 12:
                held.pop(alone.randrange(len(held)))
            high = max(high, context.heap.used)
        for holding in held:
            holding.check()
        context.barrier()
        del held, scratch
        holding = None
        gc.collect()
        for each in [context, *contexts.values()]:
            each.barrier()
        assert high > 1 << 20
        return context.heap.used

    assert on_ranks(SIZE, body) == [0] * SIZE
