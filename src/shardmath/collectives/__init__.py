"""Ranks move and combine arrays together: broadcast, gather, scatter, reduce, all to all.

Every function takes ordinary arrays and arrays on the symmetric heap, of any strides, and the ranks
agree on the call before any element moves. A number is an array of no axes, as in
all_reduce((x * x).sum()). Of a DistributedArray the functions take the parts; every rank has the
result, except for reduce_scatter's, which is a slab.

With `async_op=True`, on all ranks, a call returns a `Work` at once, and goes on beside the program:

    work = all_gather(rows, async_op=True)
    ...  # other calls, too; `rows` stays as it is
    matrix = work.wait()

A context makes asynchronous calls in their order, which is the same on all ranks. On GPUs they are
put on the current stream.
"""

from shardmath.collectives.moving import all_gather, all_to_all, broadcast
from shardmath.collectives.reducing import all_reduce, reduce_scatter

__all__ = ["all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter"]


def __dir__() -> list[str]:
    return sorted(__all__)
