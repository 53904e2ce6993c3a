"""Groups of processes, for programs that bring their own: the base class and what it is asked for.

The names are those of nvmath.distributed.process_group. `shardmath.initialize` takes such a group.
"""

from shardmath.group import ProcessGroup, ReductionOp
from shardmath.group.mpi import MPIProcessGroup
from shardmath.group.torch import TorchProcessGroup

__all__ = ["MPIProcessGroup", "ProcessGroup", "ReductionOp", "TorchProcessGroup"]


def __dir__() -> list[str]:
    return sorted(__all__)
