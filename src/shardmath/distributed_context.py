"""What a user sees of a context. What the package itself asks of one is in `context`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Self

from shardmath.group.base import ProcessGroup

__all__ = ["DistributedContext"]


class DistributedContext(ABC):
    """The ranks that compute together, as seen by one of them. Made by `initialize`.

    `rank`, `size`; `device_id` ("cpu", or the index of a CUDA device); `process_group`, used to
    start. `nvshmem_available` and `nccl_comm` are there for programs written for
    nvmath.distributed.

    The ranks' calls are matched by their order. So one thread at a time uses a context, and threads
    that compute at once have one each: a call during another's raises RuntimeError.

    `with context:` makes it the one that operators use, for this thread, until the end.
    """

    nccl_comm: ClassVar[None] = None
    rank: int
    size: int
    device_id: int | str
    process_group: ProcessGroup | None

    @property
    @abstractmethod
    def nvshmem_available(self) -> bool:
        """Whether the ranks' memory is NVSHMEM's."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank has called it; what was written before is seen after. Collective.

        Memory that every rank has dropped returns to use here.
        """

    @abstractmethod
    def split(self, color: int | None, key: int = 0) -> DistributedContext | None:
        """A context of the ranks that gave the same `color`, ordered by (`key`, rank). Collective.

        None for a rank that gave None. The new context shares this one's memory, and lives on its
        own board: both can be used in any order.
        """

    @abstractmethod
    def subset(self, ranks: Sequence[int]) -> DistributedContext:
        """A context of these ranks of this one, in this order. Collective among them alone.

        The same ranks in the same order get the same context again, unless it has been closed,
        which all of them must do then. Raises ValueError when `ranks` names a rank twice, one that
        does not exist, or not this one.
        """

    @abstractmethod
    def close(self, why: str = "it was closed") -> None:
        """End the context on this rank. Never waits; peers that still wait for this rank are told.

        Says that this rank reads no peer's memory through it any more.
        """

    @abstractmethod
    def __enter__(self) -> Self: ...

    @abstractmethod
    def __exit__(self, *_: object) -> None: ...
