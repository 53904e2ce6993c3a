"""Memory that ranks allocate together: at each rank's address for its peers, or nowhere."""

import ctypes
import gc

import numpy as np
import pytest

from mortal import on_ranks
from shardmath.context.agreement import require_equal
from shardmath.errors import CollectiveMismatch, HeapExhausted
from shardmath.handles.allocation import allocate_on_all_ranks


def allocation(context, nbytes):
    buffer = context.heap.allocate(nbytes)
    np.asarray(buffer)[:] = context.rank + 1
    return buffer, f"rank {context.rank}"


def share(context):
    memory = allocate_on_all_ranks(
        context, "share", lambda: allocation(context, 8 * (context.rank + 1))
    )
    found = [
        ctypes.string_at(address, nbytes)
        for address, nbytes in zip(memory.addresses(context), memory.sizes, strict=True)
    ]
    context.barrier()
    return memory.notes, found


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_rank_reaches_the_memory_of_all(contexts, ranks):
    notes = tuple(f"rank {rank}" for rank in range(ranks))
    bytes_of = [bytes([rank + 1]) * 8 * (rank + 1) for rank in range(ranks)]
    assert contexts.run(share, ranks=ranks) == [(notes, bytes_of)] * ranks


def fail(context, what):
    def allocate():
        if what == "memory":
            return context.heap.allocate((1 << 60) if context.rank == 1 else 8), None
        return context.heap.allocate(8), context.rank

    gc.collect()
    for _ in range(2):  # what ranks have dropped before, all of them know, and use again
        context.barrier()
    kind, used = {"memory": HeapExhausted, "notes": CollectiveMismatch}[what], context.heap.used
    with pytest.raises(kind) as caught:
        allocate_on_all_ranks(context, "fail", allocate, lambda notes: require_equal("it", notes))
    text = str(caught.value)
    del caught, allocate  # the traceback refers to the buffer
    gc.collect()
    return text, context.heap.used - used


@pytest.mark.parametrize("what", ["memory", "notes"])
def test_what_one_rank_lacks_or_ranks_differ_in_is_raised_on_all_and_leaves_nothing(what):
    """On new ranks, which collect their garbage in no time: others keep a thousand plans."""
    (text, left), *others = on_ranks(3, lambda context: fail(context, what))
    assert "rank 1" in text and left == 0 and [tuple(each) for each in others] == [(text, 0)] * 2
