"""The part that GEMM + ReduceScatter and GEMM + AllReduce share: products whose tiles are sent.

A plan has slots on the symmetric heap, where every rank puts its tiles of this rank's rows, and a
ledger of words that only count up, so that launches follow each other without the host, also when
a CUDA graph replays them. The product waits for nobody, except that a slot is written again only
after its owner has taken what the launch before left there. Kernels that wait for tiles run on a
second stream, on multiprocessors that the product leaves free: none of them fills the GPU.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from shardmath.context import DistributedContext
from shardmath.cuda.driver import call
from shardmath.cuda.kernel import Argument
from shardmath.cuda.tensormap import ALIGNMENT, tensor_map
from shardmath.errors import RankFailure
from shardmath.operators.matmul.gpu.sharded import Factor, ShardedProduct
from shardmath.operators.matmul.gpu.walk import TILE_COLUMNS, TILE_ROWS, Walk
from shardmath.symmetric.heap import Buffer, Location
from shardmath.symmetric.team import Team

__all__ = ["SendingProduct", "Shape"]

_TILE_BYTES = TILE_ROWS * TILE_COLUMNS * 2
_ROUND = 1024  # bytes that the parts of a plan's memory are rounded up to
_STAGE_BYTES = (TILE_ROWS + TILE_COLUMNS) * 64 * 2
_THREADS = 384  # of the product
_TAKE_THREADS = 512
_UNITS = _TILE_BYTES // (16 * _TAKE_THREADS)  # of a tile, that blocks of take.cu share out
_MOST_ARGUMENTS = 256


@dataclass(frozen=True)
class Shape:
    """How the work is cut. `chunks` of each owner's rows are added up one after another, all but
    the last by `spare` blocks, on as many multiprocessors as the product leaves free; `stages` and
    `parts` are product.cu's.
    """

    chunks: int
    spare: int
    stages: int = 3
    parts: int = 1


@dataclass(frozen=True)
class Places:
    """Where the parts of one rank's memory begin, in bytes."""

    walk: Walk
    rank: int
    extra_bytes: int

    @property
    def ledger(self) -> int:
        """`Ledger` of slots.cuh."""
        return 0

    @cached_property
    def arrived(self) -> int:
        """Counters of tiles, [source][chunk]; peers write them."""
        return _rounded(8 * (2 + 2 * self._size))

    @cached_property
    def ready(self) -> int:
        """Launches whose sums are there, [owner][chunk]; peers write them."""
        return self.arrived + _rounded(8 * self._size * self.walk.chunks)

    @cached_property
    def summed(self) -> int:
        """[chunk]: how many blocks have taken their part."""
        return self.ready + _rounded(8 * self._size * self.walk.chunks)

    @cached_property
    def slots(self) -> int:
        """[source][tile]; peers write them. All before are counters, and begin as zeros."""
        return self.summed + _rounded(8 * self.walk.chunks)

    @cached_property
    def extra(self) -> int:
        """The caller's."""
        return self.slots + self._size * self.stride

    @cached_property
    def tiles(self) -> int:
        """The table of all tiles that the rank computes."""
        return self.extra + _rounded(self.extra_bytes)

    @cached_property
    def owned(self) -> int:
        """The table of its own."""
        return self.tiles + _rounded(16 * self.walk.count)

    @cached_property
    def expected(self) -> int:
        """How far a counter goes up in one launch, by chunk."""
        return self.owned + _rounded(16 * self.walk.tiles(self.rank))

    @cached_property
    def nbytes(self) -> int:
        """All of it."""
        return self.expected + _rounded(8 * self.walk.chunks)

    @property
    def stride(self) -> int:
        """Bytes of one source's slots."""
        return self.walk.tiles(self.rank) * _TILE_BYTES

    @property
    def _size(self) -> int:
        return len(self.walk.rows)


class SendingProduct:
    """One rank's slots, ledger, tables and kernels for a `ShardedProduct`. Made by `together`.

    A plan is used by one stream at a time; several plans may be at work on several streams.
    """

    def __init__(
        self,
        context: DistributedContext,
        problem: ShardedProduct,
        shape: Shape,
        buffer: Buffer,
        places: Sequence[Places],
        bases: Sequence[int],
    ) -> None:
        assert context.team is not None, "a context of GPUs"
        self.team: Team = context.team
        self.problem = problem
        self.shape = shape
        self.walk = places[0].walk
        self.places = tuple(places)
        self.bases = tuple(bases)
        self._own = places[self.team.rank]
        self._buffer: Buffer | None = buffer
        self._kept = weakref.finalize(self, context.keep_for_kernels, buffer)
        self._kept.atexit = False
        self._arguments: dict[tuple[str | int, ...], Argument] = {}
        self.team.device.activate()
        self._side = call("cuStreamCreate", 1)  # it does not wait for the default stream
        self._fork, self._join = call("cuEventCreate", 2), call("cuEventCreate", 2)  # no timing

    @classmethod
    def together(
        cls,
        context: DistributedContext,
        problem: ShardedProduct,
        shape: Shape,
        *,
        extra: int = 0,
    ) -> SendingProduct:
        """The same on all ranks, but for what `ShardedProduct` lets differ. Collective.

        `extra` bytes of every rank's memory, at `extra(rank)`, are the caller's. Raises ValueError
        on all ranks where they disagree or one rank's device cannot, HeapExhausted.
        """
        walk = Walk(problem.rows, problem.columns, shape.chunks)
        places = [Places(walk, rank, extra) for rank in range(context.size)]
        buffers: list[Buffer] = []

        def describe() -> tuple[Any, ...]:
            assert context.team is not None, "a context of GPUs"
            device = context.team.device
            misfit = problem.misfit(device)
            if misfit:
                raise ValueError(f"rank {context.rank}: {misfit}")
            own = places[context.rank]
            buffers.append(context.heap.allocate(own.nbytes))
            block = buffers[0].block
            device.zero(block.address, own.slots)
            _write(block.address + own.tiles, walk.of(context.rank))
            _write(block.address + own.owned, walk.owned(context.rank))
            expected = walk.expected(context.rank)
            _write(block.address + own.expected, np.array(expected, np.uint64).view(np.uint32))
            context.announce(block)
            same = [*problem.rows, problem.columns, problem.dtype, shape.chunks, extra]
            return block.location.segment, block.location.offset, same

        found = context.agree("a product that sends its tiles", describe, _require_same)
        buffers[0].block.shared.add((context.number, context.next_share()))
        bases = [
            context.peer_address(rank, Location(segment, offset), places[rank].nbytes) or 0
            for rank, (segment, offset, _) in enumerate(found)
        ]
        return cls(context, problem, shape, buffers[0], places, bases)

    def extra(self, rank: int) -> int:
        """Where the caller's bytes of `rank` lie for this rank."""
        return self.bases[rank] + self.places[rank].extra

    def free(self) -> None:
        """Wait for this rank's kernels, and mark the memory: it is used again after all ranks have.

        Nothing can be launched any more, on any rank.
        """
        if self._buffer is not None:
            self.team.device.synchronize()
            self._kept.detach()
            self._buffer = None

    # -- on a stream -------------------------------------------------------------------------------

    def require_usable(self) -> None:
        """Raise what a kernel has noted; RankFailure after one was given up; else nothing."""
        self.team.check()
        if self.team.broken:
            raise RankFailure(
                f"rank {self.team.rank}: an earlier operation of this context was given up "
                f"({self.team.broken}); finalize and initialize again among the ranks that remain"
            )
        if self._buffer is None:
            raise RuntimeError("this product has been freed")

    def multiply(self, a: int, b: int, stream: int) -> None:
        """Put the product of A and B, which lie at these addresses, on `stream`."""
        problem, shape = self.problem, self.shape
        defines = (
            f"ELEMENT={problem.dtype.capitalize()}",
            f"A_ALONG_K={problem.a.order == 'C':d}",
            f"B_ALONG_K={problem.b.order == 'F':d}",
            f"STAGES={shape.stages}",
            f"PARTS={shape.parts}",
        )
        shared = 1024 + shape.stages * _STAGE_BYTES + _TILE_BYTES // shape.parts
        kernel = self.team.kernel("product", "product", defines, shared=shared, features="a")
        blocks = max(1, min(self.team.device.processors - shape.spare, self.walk.count))
        kernel.launch(stream, blocks, _THREADS, self.argument(self._of_product, a, b))

    def take(
        self, result: int, pitch: int, stream: int, *, early: bool, shared: bool = False
    ) -> None:
        """Put `take_early` or `take_last` on `stream`; rows of the result are `pitch` bytes apart.

        `shared`: peers read the result, and the launch does not end here.
        """
        whole = result % 16 == 0 and pitch % 16 == 0 and self.problem.columns % 8 == 0
        defines = (f"ELEMENT={self.problem.dtype}", f"WHOLE={whole:d}", f"SHARED={shared:d}")
        kernel = self.team.kernel("take", "take_early" if early else "take_last", defines)
        units = (self.walk.tiles(self.team.rank) - self._early) * _UNITS
        blocks = self.shape.spare if early else min(2 * self.team.device.processors, units)
        kernel.launch(
            stream, max(1, blocks), _TAKE_THREADS, self.argument(self._of_take, result, pitch)
        )

    @contextmanager
    def beside(self, stream: int) -> Iterator[Any]:
        """A second stream that starts where `stream` is; `stream` waits for it at the end."""
        self.team.device.activate()
        call("cuEventRecord", self._fork, stream)
        call("cuStreamWaitEvent", self._side, self._fork, 0)
        yield self._side
        call("cuEventRecord", self._join, self._side)
        call("cuStreamWaitEvent", stream, self._join, 0)

    # -- arguments ---------------------------------------------------------------------------------

    def argument(self, make: Callable[..., bytes], *words: int) -> Argument:
        """The struct that `make` packs from these words, made once."""
        key: tuple[str | int, ...] = (make.__name__, *words)
        if key not in self._arguments:
            if len(self._arguments) >= _MOST_ARGUMENTS:
                self._arguments.clear()
            self._arguments[key] = Argument(make(*words))
        return self._arguments[key]

    def _of_product(self, a: int, b: int) -> bytes:
        """The struct `ProductArgument`."""
        problem, walk, rank = self.problem, self.walk, self.team.rank
        for name, address in (("A", a), ("B", b)):
            if address % ALIGNMENT:
                raise ValueError(
                    f"{name} lies at {address:#x}, which is no multiple of {ALIGNMENT}"
                )
        size, base = self.team.size, self.bases[rank]
        slots = [self.bases[dst] + p.slots + rank * p.stride for dst, p in enumerate(self.places)]
        arrived = [
            self.bases[dst] + p.arrived + 8 * rank * walk.chunks
            for dst, p in enumerate(self.places)
        ]
        return _padded(
            self._map(a, problem.a, problem.height, problem.depth, TILE_ROWS, "C")
            + self._map(b, problem.b, problem.depth, problem.columns, TILE_COLUMNS, "F")
            + self.team.packed()
            + struct.pack("QII", base + self._own.tiles, walk.count, -(-problem.depth // 64))
            + struct.pack(f"Q{2 * size}Q", base, *slots, *arrived)
        )

    def _map(
        self, address: int, factor: Factor, rows: int, columns: int, tile: int, along_k: str
    ) -> bytes:
        """A box holds 64 elements along the contiguous axis, and of the other 64 of k or a tile."""
        width, height = (columns, rows) if factor.order == "C" else (rows, columns)
        box = tile if factor.order == along_k else 64
        return tensor_map(address, self.problem.dtype, width, height, factor.pitch, box)

    @property
    def _early(self) -> int:
        return sum(part.tiles for part in self.walk.parts(self.team.rank)[:-1])

    def _of_take(self, result: int, pitch: int) -> bytes:
        """The struct `TakeArgument`."""
        walk, rank, base = self.walk, self.team.rank, self.bases[self.team.rank]
        ready = [
            self.bases[peer] + p.ready + 8 * rank * walk.chunks
            for peer, p in enumerate(self.places)
        ]
        return _padded(
            self.team.packed()
            + struct.pack("QQ", base + self._own.slots, self._own.stride)
            + struct.pack("QII", base + self._own.owned, self._early, walk.tiles(rank))
            + struct.pack("QQQ", base, base + self._own.arrived, base + self._own.expected)
            + struct.pack(
                "QIIQQ", base + self._own.summed, walk.chunks, walk.columns, pitch, result
            )
            + struct.pack(f"{2 * self.team.size}Q", *self.bases, *ready)
        )


def _require_same(found: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    for rank, (*_, same) in enumerate(found):
        if same != found[0][2]:
            raise ValueError(
                "a product of all ranks: rows of each rank, columns, dtype, chunks and extra bytes "
                f"are {found[0][2]} on rank 0 and {same} on rank {rank}"
            )
    return found


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ROUND) * _ROUND


def _padded(struct: bytes) -> bytes:
    """Structs that hold tensor maps are multiples of 64 bytes."""
    return struct + bytes(-len(struct) % 64)


def _write(address: int, words: npt.NDArray[np.uint32]) -> None:
    if words.size:
        call("cuMemcpyHtoD", address, words.ctypes.data, words.nbytes)
