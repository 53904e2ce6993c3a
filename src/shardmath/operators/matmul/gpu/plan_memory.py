"""The symmetric memory of a kernel's plan: found by all ranks, kept for kernels, freed, refused.

All ranks take theirs together, or none does. A plan that is dropped and not freed may have kernels
at work, this rank's or its peers': its memory is then kept until the context has ended.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from shardmath.context.context import Context
from shardmath.cuda.device import Device
from shardmath.handles.allocation import allocate_on_all_ranks
from shardmath.symmetric.heap import Buffer
from shardmath.symmetric.team import Team


class PlanMemory:
    """Memory on every rank, at `bases` as this rank sees it."""

    def __init__(
        self,
        context: Context,
        buffer: Buffer,
        bases: Sequence[int],
    ) -> None:
        assert context.team is not None, "a context of GPUs"
        self.team: Team = context.team
        self.bases = tuple(bases)
        self._buffer: Buffer | None = buffer
        self._kept = weakref.finalize(self, context.heap.groups.keep, context.number, buffer)
        self._kept.atexit = False

    @classmethod
    def create(
        cls,
        context: Context,
        operation: str,
        nbytes: Callable[[int], int],
        *,
        refusal: Callable[[Device], str],
        begin: Callable[[int], None],
        same: Sequence[tuple[str, Any]],
    ) -> PlanMemory:
        """`nbytes(rank)` bytes on each rank. Collective.

        `refusal(device)` is why this rank cannot, "" where it can. `begin(address)` writes what its
        memory begins with. `same` must be equal on all ranks:
        names and values. Raises ValueError on all ranks where one refuses or they differ,
        HeapExhausted.
        """

        def allocate() -> tuple[Buffer, list[Any]]:
            assert context.team is not None, "a context of GPUs"
            why = refusal(context.team.device)
            if why:
                raise ValueError(f"rank {context.rank}: {why}")
            buffer = context.heap.allocate(nbytes(context.rank))
            begin(buffer.block.address)
            return buffer, [value for _, value in same]

        def check(notes: Sequence[list[Any]]) -> None:
            for rank, values in enumerate(notes):
                for (name, _), value, first in zip(same, values, notes[0], strict=True):
                    if value != first:
                        raise ValueError(
                            f"{operation}: {name} is {first} on rank 0 and {value} on rank {rank}; "
                            "give the same on all ranks"
                        )

        memory = allocate_on_all_ranks(context, operation, allocate, check)
        context.heap.share(memory.buffer.block, context.number, context.next_shared_id())
        return cls(context, memory.buffer, memory.addresses(context))

    def require_usable(self) -> None:
        """Raise what a kernel has noted; RankFailure after one was given up; else nothing."""
        self.team.require_usable()
        if self._buffer is None:
            raise RuntimeError("this product has been freed")

    def free(self) -> bool:
        """Wait for this rank's kernels, and mark the memory: it is used again after all ranks have.

        Nothing can be launched any more, on any rank. False where that had been done.
        """
        if self._buffer is None:
            return False
        self.team.device.synchronize()
        self._kept.detach()
        self._buffer = None
        return True
