"""Rendezvous of sub-groups, overlapping groups and foreign groups, in any order."""

import gc
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from mortal import on_ranks
from shardmath import symmetric_memory
from shardmath.collectives import all_reduce
from shardmath.group.base import GatheringGroup
from shardmath.handles.allocation import allocate_symmetric_memory as allocate
from shardmath.handles.rendezvous import rendezvous


def mine(context, value):
    array = allocate(4, np, dtype="int64", skip_symmetric_check=True)
    array[:] = value
    return array


def values(handle):
    handle.barrier()
    found = [int(handle.get_buffer(r, (4,), "int64")[3]) for r in range(handle.world_size)]
    handle.barrier()
    return found


def test_subsets_keep_the_order_given_and_are_the_same_again():
    def body(context):
        chosen = (2, 0) if context.rank != 1 else (1,)
        part = context.subset(chosen)
        assert part is context.subset(list(chosen)) and part.size == len(chosen)
        assert chosen[part.rank] == context.rank
        handle = rendezvous(mine(context, context.rank), part)
        assert values(handle) == list(chosen)
        part.close()
        again = context.subset(chosen)
        assert again is not part
        assert values(rendezvous(mine(context, 10 + context.rank), again)) == [
            10 + r for r in chosen
        ]
        bad = [(0, 1, 2, 3), (-1, context.rank), (context.rank, context.rank), ()]
        bad.append(tuple(r for r in range(3) if r != context.rank))
        for ranks in bad:
            with pytest.raises(ValueError, match=f"rank {context.rank} of 3"):
                context.subset(ranks)

    on_ranks(3, body)


@pytest.mark.parametrize("ending", ["close", "drop"])
def test_memory_shared_through_a_group_that_has_ended_is_reused(ending):
    def body(context):
        part = context.split(0)
        array = mine(context, 7 + context.rank)
        handle = rendezvous(array, part)
        assert values(handle) == [7, 8]
        view = handle.get_buffer(1 - context.rank, (4,), "int64")
        if context.rank == 0:  # rank 1 still has its view
            part.close()
            del array, handle, view
            part = None
        context.barrier()
        for number in range(5):
            mine(context, number)
        kept = context.heap.used
        context.barrier()
        if context.rank == 1:
            assert view.tolist() == [7] * 4
            del array, handle, view
            if ending == "close":
                part.close()
            del part
            gc.collect()
        context.barrier()
        return kept > 0, context.heap.used

    assert on_ranks(2, body) == [(True, 0)] * 2


@pytest.mark.parametrize("color, key", [("a", 0), (1.5, 0), (True, 0), (0, "a"), (0, None)])
def test_a_color_and_a_key_are_integers(color, key):
    def body(context):
        with pytest.raises(TypeError, match=r"rank 1: (color|key) is an integer"):
            context.split(*((color, key) if context.rank == 1 else (0, 0)))
        part = context.split(np.int64(context.rank), np.int8(0))
        return part.size

    assert on_ranks(2, body) == [1, 1]


def test_nested_splits_and_subsets():
    def body(context):
        part = context
        for depth in range(8):
            part = part.split(0, -part.rank).subset(range(part.size))
            assert values(rendezvous(mine(context, depth), part)) == [depth] * 2
        return part.rank

    assert sorted(on_ranks(2, body)) == [0, 1]


@pytest.mark.parametrize("making", ["split", "subset"])
def test_groups_that_have_ended_keep_no_descriptor(making):
    def body(context):
        def descriptors():
            return len(list(Path("/proc/self/fd").iterdir()))

        before = descriptors()
        for _ in range(60):
            part = context.split(0) if making == "split" else context.subset((0, 1))
            all_reduce(np.ones(3), context=part)
            part.close()
        return descriptors() - before < 10

    assert on_ranks(2, body) == [True] * 2


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_overlapping_groups_in_any_order(seed):
    """Each rank goes through its groups in the same shuffled order as its fellows: none hangs."""
    groups = [g for n in (1, 2, 3, 4) for g in itertools.combinations(range(4), n)]
    np.random.default_rng(seed).shuffle(groups)

    def body(context):
        kept = []
        array = mine(context, context.rank)
        for group in groups + groups[::-1]:
            if context.rank in group:
                handle = rendezvous(array, context.subset(group))
                assert values(handle) == list(group)
                kept.append(handle)
        for group, handle in zip([g for g in groups if context.rank in g], kept, strict=False):
            assert handle is rendezvous(array, context.subset(group)) is handle
        return len(kept)

    assert on_ranks(4, body) == [16] * 4


class Told(GatheringGroup):
    """A user's own group, on a context's board."""

    def __init__(self, context):
        self.context = context
        self.calls = 0

    @property
    def rank(self):
        return self.context.rank

    @property
    def nranks(self):
        return self.context.size

    def allgather_bytes(self, data):
        self.calls += 1
        return self.context.board.exchange("told", data)


def test_a_process_group_means_its_ranks_and_is_asked_once():
    def body(context):
        group = Told(context.split(0 if context.rank < 2 else 1, -context.rank))
        for turn in range(3):
            handle = rendezvous(mine(context, context.rank + turn), group)
            expected = [1, 0] if context.rank < 2 else [3, 2]
            assert values(handle) == [rank + turn for rank in expected]
        return group.calls

    assert on_ranks(4, body) == [1] * 4


def test_torch_groups_and_their_names(tmp_path):
    def body(context):
        ours = not dist.is_initialized()  # torchrun's ranks have it already
        if ours:
            store = dist.FileStore(f"{tmp_path}/store", 3)
            dist.init_process_group("gloo", store=store, rank=context.rank, world_size=3)
        pair = dist.new_group([0, 2])
        t = symmetric_memory.empty(4, dtype=torch.int64)
        t.fill_(context.rank)
        assert values(rendezvous(t, dist.group.WORLD)) == [0, 1, 2]
        assert values(rendezvous(t, dist.group.WORLD.group_name)) == [0, 1, 2]
        if context.rank != 1:
            assert values(rendezvous(t, pair)) == [0, 2]
            assert values(symmetric_memory.rendezvous(t, pair.group_name)) == [0, 2]
        else:
            with pytest.raises(ValueError, match="not in the group, which is torch's NON_GROUP"):
                rendezvous(t, pair)
        with pytest.raises(ValueError, match="set_group_info"):
            rendezvous(t, "nobody")
        with pytest.raises(TypeError):
            rendezvous(t, 17)
        if ours:
            dist.destroy_process_group()

    on_ranks(3, body)
