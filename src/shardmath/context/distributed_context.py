"""A context as users see it. `context` has what the package itself asks of one besides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Self

from shardmath.group.base import ProcessGroup


class DistributedContext(ABC):
    """The ranks that compute together, as seen by one of them. Made by `initialize`.

    `rank` is this process's number, from 0 to `size` - 1. `device_id` is "cpu" or the index of a
    CUDA device, `process_group` the group through which the ranks found each other.
    `nvshmem_available` and `nccl_comm`, which is None, are there for programs written for
    nvmath.distributed.

    The ranks' calls are matched by their order. So only one thread at a time may use a context, and
    threads that compute at the same time have one each: a call during another thread's raises
    RuntimeError.

    `with context:` makes it the current context of this thread, which operators use, until the end.
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
        """Wait until every rank has called it. Collective.

        What a rank wrote before it, all ranks see after it. Memory that every rank has dropped can
        be used again afterwards. Raises OpTimeout and RankFailure.
        """

    @abstractmethod
    def split(self, color: int | None, key: int = 0) -> DistributedContext | None:
        """A context of the ranks that gave the same `color`, ordered by (`key`, rank). Collective.

        None for a rank that gave None. The new context has the same memory, and synchronises its
        ranks independently: calls of both may be mixed in any order. Raises TypeError for a color
        or key that is not an integer.
        """

    @abstractmethod
    def subset(self, ranks: Sequence[int]) -> DistributedContext:
        """A context of these ranks of this one, in this order. Collective among them alone.

        The same ranks in the same order get the same context again, unless it has been closed,
        which all of them must do then. Raises ValueError when `ranks` names a rank twice, one that
        does not exist, or not this one.
        """

    @abstractmethod
    def recover(self) -> DistributedContext:
        """A context of the ranks that remain, in which all of them can compute. Collective.

            except shardmath.errors.RankFailure:
                context = context.recover()

        It serves after any failure: an interrupted call, a timeout, a mismatch, a rank that has
        died. Every rank that lives calls it, each from wherever it is: calls in this context that
        still wait end with RankFailure. The new context has the same order of ranks, without those
        that are gone, and is the default one if this one was; this one is closed. Arrays on the
        heap remain as they are; handles and operator objects are made anew.

        Raises OpTimeout where a rank that lives does not call it, naming it, and RankFailure where
        the others have gone on without this rank; then it can be called again.
        """

    @abstractmethod
    def close(self, why: str = "it was closed") -> None:
        """End the context on this rank; later calls raise RuntimeError with `why`. Local.

        Peers that wait for this rank in it raise RankFailure. After it this rank must not use views
        of peers' memory that it got through this context.
        """

    @abstractmethod
    def __enter__(self) -> Self: ...

    @abstractmethod
    def __exit__(self, *_: object) -> None: ...
