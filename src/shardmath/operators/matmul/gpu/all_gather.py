"""AllGather + GEMM: one kernel sends this rank's rows while it multiplies those that are here.

A plan has room for all rows on the symmetric heap, and words that only count up, so that launches
follow each other without the host, also when a CUDA graph replays them. Rows travel from where the
caller has them into the peers' room, box by box, through the shared memory of the multiprocessors
that multiply; there is no second stream, and no barrier. Every wait has a deadline.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from shardmath.context import DistributedContext
from shardmath.cuda.driver import call
from shardmath.cuda.kernel import Argument, Kernel
from shardmath.cuda.stream import capturing
from shardmath.cuda.tensormap import ALIGNMENT, NBYTES, tensor_map
from shardmath.errors import RankFailure
from shardmath.operators.matmul.gpu.gathered import (
    CHUNKS,
    DEPTH,
    TILE_ROWS,
    GatheredProduct,
    Tiling,
    choose_tiling,
    same_everywhere,
)
from shardmath.symmetric.heap import Buffer, Location
from shardmath.symmetric.team import Team

__all__ = ["AllGatherGemm"]

_THREADS = 384
_MOST_ARGUMENTS = 256


class AllGatherGemm:
    """`launch` leaves the product of all ranks' rows with this rank's columns. See `together`.

    A plan is used by one stream at a time; several plans may be at work on several streams.
    """

    def __init__(
        self,
        context: DistributedContext,
        problem: GatheredProduct,
        tiling: Tiling,
        buffer: Buffer,
        bases: Sequence[int],
    ) -> None:
        assert context.team is not None, "a context of GPUs"
        self.team: Team = context.team
        self.problem = problem
        self.tiling = tiling
        self._bases = tuple(bases)
        self._buffer: Buffer | None = buffer
        self._kept = weakref.finalize(self, context.keep_for_kernels, buffer)
        self._kept.atexit = False
        self._arguments: dict[tuple[int, ...], Argument] = {}
        self._turns = Turns.of(context)

    @classmethod
    def together(
        cls, context: DistributedContext, problem: GatheredProduct, tiling: Tiling | None = None
    ) -> AllGatherGemm:
        """A plan. Collective.

        Raises ValueError on all ranks where they do not mean the same product, or where
        `problem.misfit` speaks on one of them; HeapExhausted.
        """
        buffers: list[Buffer] = []
        nbytes = _words(context.size) + problem.offsets[-1]

        def describe() -> tuple[Any, ...]:
            assert context.team is not None, "a context of GPUs"
            device = context.team.device
            misfit = problem.misfit(device)
            if misfit:
                raise ValueError(f"rank {context.rank}: {misfit}")
            if len(problem.rows) != context.size:
                raise ValueError(f"rows of {len(problem.rows)} ranks, and there are {context.size}")
            buffers.append(context.heap.allocate(nbytes))
            block = buffers[0].block
            device.zero(block.address, _words(context.size))
            context.announce(block)
            return block.location.segment, block.location.offset, same_everywhere(problem)

        found = context.agree("a product of gathered rows", describe, _require_same)
        buffers[0].block.shared.add((context.number, context.next_share()))
        bases = [
            context.peer_address(rank, Location(segment, offset), nbytes) or 0
            for rank, (segment, offset, _) in enumerate(found)
        ]
        if tiling is None:
            assert context.team is not None
            tiling = choose_tiling(problem, context.rank, context.team.device.processors)
        return cls(context, problem, tiling, buffers[0], bases)

    def launch(self, a: int, b: int, result: int, stream: int, *, pitch: int | None = None) -> None:
        """Put the product on `stream`; this rank's rows of A, its columns of B and the result lie
        at these addresses.

        `pitch` is how many elements the result's rows (columns, in the order "F") are apart; None
        is as few as can be. Never waits on the host, and can be captured in a CUDA graph.
        Collective, in stream order.
        """
        self._require_usable()
        problem, tiling = self.problem, self.tiling
        if not problem.height:
            return
        if pitch is None:
            pitch = problem.columns if problem.out == "C" else problem.height
        key = (a, b, result, pitch)
        if key not in self._arguments:
            if len(self._arguments) >= _MOST_ARGUMENTS:
                self._arguments.clear()
            self._arguments[key] = Argument(self._packed(*key))
        kernel = self._kernel(boxes=self._boxes(result, pitch))
        with self._turns.taken(stream):
            kernel.launch(stream, tiling.blocks, _THREADS, self._arguments[key])

    def free(self) -> None:
        """Wait for this rank's kernels, and mark the memory: it is used again after all ranks have.

        Nothing can be launched any more, on any rank.
        """
        if self._buffer is not None:
            self.team.device.synchronize()
            self._kept.detach()
            self._buffer = None

    def _require_usable(self) -> None:
        self.team.check()
        if self.team.broken:
            raise RankFailure(
                f"rank {self.team.rank}: an earlier operation of this context was given up "
                f"({self.team.broken}); finalize and initialize again among the ranks that remain"
            )
        if self._buffer is None:
            raise RuntimeError("this product has been freed")

    # -- the kernel and its argument ---------------------------------------------------------------

    def _kernel(self, *, boxes: bool) -> Kernel:
        problem, tiling = self.problem, self.tiling
        defines = (
            f"ELEMENT={problem.dtype.capitalize()}",
            f"A_ALONG_K={problem.a.order == 'C':d}",
            f"B_ALONG_K={problem.b.order == 'F':d}",
            f"C_ALONG_N={problem.out == 'C':d}",
            f"WIDTH={tiling.width}",
            f"CLUSTER={tiling.cluster}",
            f"STAGES={tiling.stages}",
            f"PIECES={tiling.pieces}",
            f"BOXES={boxes:d}",
        )
        shared = tiling.shared_bytes
        return self.team.kernel("gathered", "gathered", defines, shared=shared, features="a")

    def _boxes(self, result: int, pitch: int) -> bool:
        """Whether the part of the result that each rank's rows make can be stored in boxes, of
        which no row is cut but at a multiple of 16 bytes.
        """
        problem, unit = self.problem, ALIGNMENT // 2
        cuts = [problem.columns] if problem.out == "C" else problem.rows
        return result % ALIGNMENT == 0 and pitch % unit == 0 and not any(cut % unit for cut in cuts)

    def _packed(self, a: int, b: int, result: int, pitch: int) -> bytes:
        """The struct `GatheredArgument`."""
        problem, tiling, rank, size = self.problem, self.tiling, self.team.rank, self.team.size
        _require_aligned("A", a if problem.rows[rank] else 0)
        _require_aligned("B", b if problem.columns else 0)
        arrivals = problem.arrivals(rank)
        absent = size - len(arrivals)
        maps = [self._map_of_rows(src, a) for src in arrivals] + [bytes(NBYTES)] * absent
        maps += [self._map_of_result(src, result, pitch) for src in arrivals]
        maps += [bytes(NBYTES)] * absent
        maps += [self._map_of_b(b), self._map_of_rows(rank, a, 64)]
        maps += [self._map_there(peer) for peer in range(size)]
        parts, units = [], 0
        for src in arrivals:
            heights = tiling.heights(problem.rows[src])
            parts += [units, heights, problem.rows[src], src]
            units += heights * tiling.across(problem.columns)
        starts = [problem.starts[src] for src in arrivals]
        steps = -(-problem.depth // DEPTH)
        counts = (len(arrivals), units, steps, problem.columns)
        sent = (max(1, -(-steps // CHUNKS)), problem.rows[rank])
        packed = b"".join(maps) + self.team.packed()
        packed += struct.pack(f"{size}QQQ6I", *self._bases, result, 2 * pitch, *counts, *sent)
        packed += struct.pack(f"{4 * size}I", *parts, *[0] * 4 * absent)
        packed += struct.pack(f"{size}I", *starts, *[0] * absent)
        return packed + bytes(-len(packed) % 64)

    def _map_of_rows(self, src: int, a: int, box: int = TILE_ROWS) -> bytes:
        """The rows of `src`: this rank's own lie where the caller has them."""
        problem, rank = self.problem, self.team.rank
        if src == rank:
            return self._map_of_part(a, src, problem.a.pitch, box)
        return self._map_of_part(self._gathered(rank, src), src, problem.pitch(src), box)

    def _map_there(self, peer: int) -> bytes:
        """Where this rank's rows go to on `peer`."""
        rank = self.team.rank
        return self._map_of_part(self._gathered(peer, rank), rank, self.problem.pitch(rank), 64)

    def _map_of_part(self, at: int, src: int, pitch: int, box: int) -> bytes:
        problem = self.problem
        if problem.a.order == "C":
            return tensor_map(at, problem.dtype, problem.depth, problem.rows[src], pitch, box)
        return tensor_map(at, problem.dtype, problem.rows[src], problem.depth, pitch, DEPTH)

    def _gathered(self, rank: int, src: int) -> int:
        """Where the rows of `src` lie on `rank`."""
        return self._bases[rank] + _words(self.team.size) + self.problem.offsets[src]

    def _map_of_b(self, b: int) -> bytes:
        """A block loads one of `cluster` shares of a tile's columns."""
        problem, tiling = self.problem, self.tiling
        if problem.b.order == "C":
            shape, box = (problem.columns, problem.depth), DEPTH
        else:
            shape, box = (problem.depth, problem.columns), tiling.width
        return tensor_map(b, problem.dtype, *shape, problem.b.pitch, box // tiling.cluster)

    def _map_of_result(self, src: int, result: int, pitch: int) -> bytes:
        """What the rows of `src` make of it."""
        problem, start, rows = self.problem, self.problem.starts[src], self.problem.rows[src]
        if not self._boxes(result, pitch):
            return bytes(NBYTES)
        if problem.out == "C":
            at = result + 2 * start * pitch
            return tensor_map(at, problem.dtype, problem.columns, rows, pitch, 64, 32)
        return tensor_map(result + 2 * start, problem.dtype, rows, problem.columns, pitch, 32, 64)


class Turns:
    """Kernels of a context that wait for the same kernels of peers, one after another.

    Two that fill the GPU, on two streams, could wait for each other: one here, the other there. In
    a graph the streams are the caller's to order.
    """

    def __init__(self) -> None:
        self._event = call("cuEventCreate", 2)  # no timing
        self._stream: int | None = None

    @classmethod
    def of(cls, context: DistributedContext) -> Turns:
        """The one of a context."""
        turns: Turns = context.cache("turns", cls)
        return turns

    @contextmanager
    def taken(self, stream: int) -> Iterator[None]:
        """Around a launch on `stream`."""
        captured = capturing(stream)
        if not captured and self._stream not in (None, stream):
            call("cuStreamWaitEvent", stream, self._event, 0)
        yield
        if not captured:
            call("cuEventRecord", self._event, stream)
            self._stream = stream


def _words(size: int) -> int:
    """Bytes of the struct `Words`, as many as keep what follows aligned."""
    return -(-8 * (size * (CHUNKS + 1) + 2) // 1024) * 1024


def _require_aligned(name: str, address: int) -> None:
    if address % ALIGNMENT:
        raise ValueError(f"{name} lies at {address:#x}, which is no multiple of {ALIGNMENT}")


def _require_same(found: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    for rank, (*_, same) in enumerate(found):
        if same != found[0][-1]:
            raise ValueError(
                "a product of gathered rows: rows of each rank, depth, dtype and A's order are "
                f"{found[0][-1]} on rank 0 and {same} on rank {rank}"
            )
    return found
