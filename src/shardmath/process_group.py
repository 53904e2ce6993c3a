"""Groups of processes, for programs that bring their own: the base class and what it is asked for.

The names are those of nvmath.distributed.process_group. `shardmath.initialize` takes such a group.
"""

from shardmath.group import MPIProcessGroup, ProcessGroup, ReductionOp, TorchProcessGroup

__all__ = ["MPIProcessGroup", "ProcessGroup", "ReductionOp", "TorchProcessGroup"]


def __dir__() -> list[str]:
    return sorted(__all__)
