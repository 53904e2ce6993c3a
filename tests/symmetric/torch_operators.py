"""What tests of `torch.ops.symm_mem` begin with: the operators, served, and arrays of each rank."""

import torch

from shardmath import symmetric_memory as symm_mem


def operators(context):
    """The operators, for which the ranks are the group "g"."""
    symm_mem.register()
    symm_mem.register()
    symm_mem.set_group_info("g", context.rank, context.size)
    return torch.ops.symm_mem


def of_rank(rank, shape, dtype=torch.float64):
    """A rank's numbers: every rank knows those of all."""
    count = torch.Size(shape).numel()
    return (torch.arange(count).reshape(shape) % 7 + 10 * rank).to(dtype)


def summed(shape, size, dtype=torch.float64):
    """The sum of all ranks' numbers."""
    return sum(of_rank(rank, shape, dtype) for rank in range(size))


def slab(x, dim, rank, size):
    """The part of a rank along an axis: the first ones have one more."""
    lengths = [len(range(x.shape[dim])[n::size]) for n in range(size)]
    return x.split(lengths, dim)[rank]
