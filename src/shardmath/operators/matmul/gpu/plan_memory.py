"""Plans of kernels that move data while they multiply, and their symmetric memory.

All ranks allocate together, or none does. The memory has counters, which only increase, so that
launches follow each other without the host, also when a CUDA graph replays them. Every wait for a
counter has a deadline. When a plan is dropped without `free`, kernels of this rank or its peers may
still be at work: its memory is then kept until the context has ended.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from shardmath.base.lru_cache import LRUCache
from shardmath.context.context import Context
from shardmath.cuda.kernel import Argument
from shardmath.cuda.tensormap import tensor_map
from shardmath.handles.allocation import allocate_on_all_ranks
from shardmath.operators.matmul.gpu.local_product import LocalProduct, OperandLayout
from shardmath.symmetric.heap import Buffer

Product = TypeVar("Product", bound=LocalProduct)

_MOST_ARGUMENTS = 256


class KernelPlan(Generic[Product]):
    """One rank's plan of a kernel for a product. It keeps the packed arguments of launches.

    A plan is used by one stream at a time; several plans may be at work on several streams.
    """

    def __init__(self, problem: Product, memory: PlanMemory) -> None:
        self.team = memory.team
        self.problem = problem
        self.bases = memory.bases
        self._memory = memory
        self._arguments: LRUCache[tuple[object, ...], Argument] = LRUCache(_MOST_ARGUMENTS)

    def _argument(self, make: Callable[..., bytes], *words: int | bytes) -> Argument:
        """The struct that `make` packs from these words, packed once."""
        return self._arguments.made((make.__name__, *words), lambda: Argument(make(*words)))

    def _map(
        self, address: int, layout: OperandLayout, shape: tuple[int, int], rows: int, columns: int
    ) -> bytes:
        """The tensor map of a matrix of that shape, in boxes of 64 elements along its contiguous
        lines, by so many `rows` where the lines are rows, else `columns`.
        """
        dtype, (height, width) = self.problem.dtype, shape
        if layout.order == "C":
            return tensor_map(address, dtype, width, height, layout.pitch, rows)
        return tensor_map(address, dtype, height, width, layout.pitch, columns)

    def free(self) -> None:
        """Wait for this rank's kernels and give the memory back: it is reused when all ranks have.

        Nothing can be launched any more, on any rank.
        """
        self._memory.free()


class PlanMemory:
    """Memory on every rank, at `bases` as this rank sees it."""

    def __init__(self, context: Context, buffer: Buffer, bases: Sequence[int]) -> None:
        self.team = context.gpu_team
        self.bases = tuple(bases)
        self._buffer: Buffer | None = buffer
        self._kept = weakref.finalize(self, context.heap.groups.keep, context.number, buffer)
        self._kept.atexit = False

    @classmethod
    def create(
        cls,
        context: Context,
        operation: str,
        problem: LocalProduct,
        nbytes: Callable[[int], int],
        begin: Callable[[int], None],
        *also: tuple[str, Any],
    ) -> PlanMemory:
        """`nbytes(rank)` bytes on each rank, for a plan of that product. Collective.

        `begin(address)` writes the initial contents of this rank's memory. The product, and the
        values in `also`, which have names, must be equal on all ranks. Raises ValueError on all
        ranks where they are not, or where one's device cannot do the product; HeapExhausted.
        """
        same = [*problem.same_everywhere, *also]

        def allocate() -> tuple[Buffer, list[Any]]:
            why = problem.unsupported(context.gpu_team.device)
            if len(problem.rows) != context.size:
                why = f"rows of {len(problem.rows)} ranks, and there are {context.size}"
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
        """Raise the error that a kernel has noted, and RankFailure after one was given up."""
        self.team.require_usable()
        if self._buffer is None:
            raise RuntimeError("this product has been freed")

    def free(self) -> None:
        """Wait for this rank's kernels and give the memory back. A second call does nothing."""
        if self._buffer is not None:
            self.team.device.synchronize()
            self._kept.detach()
            self._buffer = None
