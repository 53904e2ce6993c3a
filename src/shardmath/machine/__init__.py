"""The measured rates of processors, and the hosts that ranks compute on.

Each kind of processor has one file of rates. Plans of operations work out what follows from them.
"""

from functools import cached_property

from shardmath.base.immutable import Immutable
from shardmath.machine.cores import CORES
from shardmath.machine.h200 import H200, H200_MULTI_HOST
from shardmath.machine.rates import Rates

__all__ = ["CORES", "H200", "H200_MULTI_HOST", "Machine", "OnHosts", "Rates"]


class OnHosts:
    """Objects with `hosts`, the number of each rank's host, equal on all ranks."""

    hosts: tuple[int, ...]

    @property
    def host_count(self) -> int:
        """How many hosts there are."""
        return len(set(self.hosts))

    @cached_property
    def multi_host(self) -> bool:
        """Whether ranks are on several hosts, and so have no address for each other's memory."""
        return self.host_count > 1


class Machine(OnHosts, Immutable):
    """The kind of processor, "cpu" or "cuda", and the number of each rank's host."""

    kind: str
    hosts: tuple[int, ...]

    @property
    def rates(self) -> Rates:
        """The rates of one rank. All GPUs have those of an H200, the only kind measured."""
        if self.kind == "cpu":
            return CORES
        return H200_MULTI_HOST if self.multi_host else H200
