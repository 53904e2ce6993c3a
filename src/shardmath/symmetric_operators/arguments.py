"""Arguments that several operators have; what is wrong with one, all ranks raise."""

from __future__ import annotations

from shardmath.call.agreement import raise_on_all_ranks
from shardmath.context.context import DistributedContext

_OPS = {"sum": "sum", "avg": "mean", "min": "min", "max": "max", "product": "product"}


def reduction(context: DistributedContext, reduce_op: str) -> str:
    """Our name of torch's reduction. An unknown one raises ValueError on all ranks. Collective."""
    found = _OPS.get(reduce_op)
    if found is None:
        error = ValueError(f"reduce_op is one of {', '.join(_OPS)}, not {reduce_op!r}")
        raise_on_all_ranks(context, "torch.ops.symm_mem", error)
        raise error
    return found
