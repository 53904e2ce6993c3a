"""AllGather + GEMM: rows go around a ring while those that are here are multiplied.

A plan has room for all rows on the symmetric heap, and words that only count up, so that launches
follow each other without the host, also when a CUDA graph replays them. Copy engines move the rows,
on a second stream; between two copies one thread waits for the next rows and tells the neighbour.
Every wait has a deadline: a rank that has waited in vain passes nothing on, so no peer takes what
never came for rows.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardmath.context import DistributedContext
from shardmath.cuda.device import Device
from shardmath.cuda.driver import bindings, call
from shardmath.cuda.kernel import Argument, Kernel
from shardmath.cuda.stream import Turns
from shardmath.cuda.tensormap import ALIGNMENT, NBYTES, tensor_map
from shardmath.operators.matmul.gpu.gathered import (
    DEPTH,
    TILE_ROWS,
    GatheredProduct,
    Tiling,
    choose_tiling,
)
from shardmath.operators.matmul.gpu.room import Room
from shardmath.symmetric.team import Team

__all__ = ["AllGatherGemm", "product_kernel"]

_THREADS = 384
_MOST_ARGUMENTS = 256


class AllGatherGemm:
    """`launch` leaves the product of all ranks' rows with this rank's columns. See `together`.

    A plan is used by one stream at a time; several plans may be used on several streams, and take
    turns.
    """

    def __init__(
        self,
        context: DistributedContext,
        problem: GatheredProduct,
        tiling: Tiling,
        room: Room,
    ) -> None:
        self.team = room.team
        self.problem = problem
        self.tiling = tiling
        self._room = room
        self._bases = room.bases
        self._chunks: tuple[int, ...] = room.told  # of each rank's tiling
        self._steps: dict[tuple[int, ...], Argument] = {}
        self._arguments: dict[tuple[int, ...], Argument] = {}
        self.team.device.activate()
        # Two products at once could leave no multiprocessor for what their rings do between copies.
        device = self.team.device
        self._turns: Turns = context.cache("turns of products", lambda: Turns(device))
        self._step_kernel = self.team.kernel("ring", "ring_step")
        self._step_kernel.load()  # now, and not while a product waits for it
        _, highest = call("cuCtxGetStreamPriorityRange")
        self._side = call("cuStreamCreateWithPriority", 1, highest)  # apart from the default stream
        self._fork, self._join = call("cuEventCreate", 2), call("cuEventCreate", 2)  # no timing

    @classmethod
    def together(
        cls, context: DistributedContext, problem: GatheredProduct, tiling: Tiling | None = None
    ) -> AllGatherGemm:
        """A plan. Collective.

        Raises ValueError on all ranks where they do not mean the same product, or where
        `problem.misfit` speaks on one of them; HeapExhausted.
        """
        chosen: list[Tiling] = []
        words = _words(context.size)

        def refusal(device: Device) -> str:
            if len(problem.rows) != context.size:
                return f"rows of {len(problem.rows)} ranks, and there are {context.size}"
            return problem.misfit(device)

        def begin(address: int) -> int:
            assert context.team is not None, "a context of GPUs"
            device = context.team.device
            device.zero(address, words)
            chosen.append(tiling or choose_tiling(problem, context.rank, device.processors))
            return chosen[0].chunks

        room = Room.together(
            context,
            "a product of gathered rows",
            lambda _: words + problem.offsets[-1],
            refusal=refusal,
            begin=begin,
            same=problem.same_everywhere,
        )
        return cls(context, problem, chosen[0], room)

    def launch(self, a: int, b: int, result: int, stream: int, *, pitch: int | None = None) -> None:
        """Put the product on `stream`; this rank's rows of A, its columns of B and the result lie
        at these addresses.

        `pitch` is how many elements the result's rows (columns, in the order "F") are apart; None
        is as few as can be. Never waits on the host, and can be captured in a CUDA graph.
        Collective, in stream order.
        """
        self._room.require_usable()
        problem = self.problem
        if pitch is None:
            pitch = problem.columns if problem.out == "C" else problem.height
        if self.team.size > 1 and problem.height:
            with self._turns.taken(stream), self._beside(stream):
                self._pass_on(a)
                self._multiply(a, b, result, pitch, stream)
        else:
            self._multiply(a, b, result, pitch, stream)

    def free(self) -> None:
        """Wait for this rank's kernels, and mark the memory: it is used again after all ranks have.

        Nothing can be launched any more, on any rank.
        """
        if self._room.free():
            for event in (self._fork, self._join):
                call("cuEventDestroy", event)
            call("cuStreamDestroy", self._side)

    # -- the ring ----------------------------------------------------------------------------------

    def _pass_on(self, a: int) -> None:
        """Put on the second stream: this rank's rows to the right, then those from the left."""
        size, rank = self.team.size, self.team.rank
        before = self._pass_own(a)
        for step in range(1, size - 1):
            src = (rank - step) % size
            if self.problem.rows[src]:
                self._step(**before, awaited=src)
                nbytes = 2 * self.problem.pitch(src) * self.problem.lines(src)
                there = self._gathered((rank + 1) % size, src)
                if nbytes:
                    call("cuMemcpyAsync", there, self._gathered(rank, src), nbytes, self._side)
                before = {"sent": src}
        self._step(**before, last=1)

    def _pass_own(self, a: int) -> dict[str, int]:
        """This rank's rows, in chunks of k; what the next step has to tell of them."""
        problem, rank = self.problem, self.team.rank
        told = {"first": 1}
        if not problem.rows[rank]:
            self._step(**told)
            return {}
        chunk = DEPTH * self._chunk_of(rank)
        for number, k in enumerate(range(0, max(problem.depth, 1), chunk)):
            self._step(**told)
            if problem.depth:
                self._copy_own(a, k, min(problem.depth, k + chunk))
            told = {"begun": number}
        return {"sent": rank}

    def _chunk_of(self, src: int) -> int:
        """Steps of k in a chunk of the rows of `src`, on their way to its neighbour."""
        steps = -(-self.problem.depth // DEPTH)
        return max(1, -(-steps // self._chunks[src]))

    def _step(self, **words: int) -> None:
        """What is told and awaited between two copies: see ring.cu."""
        fields = {"sent": -1, "begun": -1, "awaited": -1, "first": 0, "last": 0, **words}
        key = tuple(fields.values())
        if key not in self._steps:
            size, rank = self.team.size, self.team.rank
            left, right = (rank - 1) % size, (rank + 1) % size
            bases = (self._bases[rank], self._bases[left], self._bases[right])
            tail = struct.pack("QQQ8i", *bases, left, right, *key, 0)
            self._steps[key] = Argument(self.team.packed() + tail)
        self._step_kernel.launch(self._side, 1, 1, self._steps[key])

    def _copy_own(self, a: int, begin: int, end: int) -> None:
        """This rank's rows, from one k to another, to the right neighbour, by a copy engine."""
        problem, rank = self.problem, self.team.rank
        pitch, own = problem.pitch(rank), problem.a.pitch
        there = self._gathered((rank + 1) % self.team.size, rank)
        if problem.a.order == "C":
            a, there = a + 2 * begin, there + 2 * begin
            width, lines = end - begin, problem.rows[rank]
        else:
            a, there = a + 2 * begin * own, there + 2 * begin * pitch
            width, lines = problem.rows[rank], end - begin
        if own == width == pitch:
            call("cuMemcpyAsync", there, a, 2 * width * lines, self._side)
        else:
            call("cuMemcpy2DAsync", _block(a, own, there, pitch, width, lines), self._side)

    def _gathered(self, rank: int, src: int) -> int:
        """Where the rows of `src` lie on `rank`."""
        return self._bases[rank] + _words(self.team.size) + self.problem.offsets[src]

    @contextmanager
    def _beside(self, stream: int) -> Iterator[None]:
        """The second stream starts where `stream` is; `stream` waits for it at the end."""
        self.team.device.activate()
        call("cuEventRecord", self._fork, stream)
        call("cuStreamWaitEvent", self._side, self._fork, 0)
        yield
        call("cuEventRecord", self._join, self._side)
        call("cuStreamWaitEvent", stream, self._join, 0)

    # -- the product -------------------------------------------------------------------------------

    def _multiply(self, a: int, b: int, result: int, pitch: int, stream: int) -> None:
        problem, tiling = self.problem, self.tiling
        if not problem.height or not problem.columns:
            if self.team.size > 1 and problem.height:
                self._say_read(stream)
            return
        kernel = product_kernel(self.team, problem, tiling, boxes=self._boxes(result, pitch))
        key = (a, b, result, pitch)
        if key not in self._arguments:
            if len(self._arguments) >= _MOST_ARGUMENTS:
                self._arguments.clear()
            self._arguments[key] = Argument(self._packed(*key))
        kernel.launch(stream, tiling.blocks, _THREADS, self._arguments[key])

    def _say_read(self, stream: int) -> None:
        """For a rank without columns: it has read all rows."""
        size, rank = self.team.size, self.team.rank
        words = struct.pack("QQ", self._bases[rank], self._bases[(rank - 1) % size])
        argument = Argument(self.team.packed() + words)
        self.team.kernel("ring", "nothing_to_read").launch(stream, 1, 1, argument)

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
        _require_aligned("B", b)
        arrivals = problem.arrivals(rank)
        absent = size - len(arrivals)
        maps = [self._map_of_rows(src, a) for src in arrivals] + [bytes(NBYTES)] * absent
        maps += [self._map_of_result(src, result, pitch) for src in arrivals]
        maps += [bytes(NBYTES)] * absent
        maps.append(self._map_of_b(b))
        parts, units = [], 0
        for src in arrivals:
            heights = tiling.heights(problem.rows[src])
            parts += [units, heights, problem.rows[src], src]
            units += heights * tiling.across(problem.columns)
        starts = [problem.starts[src] for src in arrivals]
        neighbour = (rank - 1) % size
        left = self._bases[neighbour] if size > 1 else 0
        counts = [len(arrivals), units, -(-problem.depth // DEPTH), problem.columns]
        counts += [neighbour, self._chunk_of(neighbour)]
        packed = b"".join(maps) + self.team.packed()
        packed += struct.pack("QQQQ6I", self._bases[rank], left, result, 2 * pitch, *counts)
        packed += struct.pack(f"{4 * size}I", *parts, *[0] * 4 * absent)
        packed += struct.pack(f"{size}I", *starts, *[0] * absent)
        return packed + bytes(-len(packed) % 64)

    def _map_of_rows(self, src: int, a: int) -> bytes:
        """The rows of `src`: this rank's own lie where the caller has them."""
        problem, rank = self.problem, self.team.rank
        at = a if src == rank else self._gathered(rank, src)
        pitch = problem.a.pitch if src == rank else problem.pitch(src)
        if problem.a.order == "C":
            shape, box = (problem.depth, problem.rows[src]), TILE_ROWS
        else:
            shape, box = (problem.rows[src], problem.depth), DEPTH
        return tensor_map(at, problem.dtype, *shape, pitch, box)

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
            return tensor_map(at, problem.dtype, problem.columns, rows, pitch, 64, 64)
        return tensor_map(result + 2 * start, problem.dtype, rows, problem.columns, pitch, 32, 128)


def product_kernel(
    team: Team, problem: GatheredProduct, tiling: Tiling, *, boxes: bool = True
) -> Kernel:
    """The kernel for a problem, compiled when first asked for; `boxes` where the result is aligned
    as they need it.
    """
    b_along_k = problem.b.order == "F"
    defines = (
        f"ELEMENT={problem.dtype.capitalize()}",
        f"A_ALONG_K={problem.a.order == 'C':d}",
        f"B_ALONG_K={b_along_k:d}",
        f"C_ALONG_N={problem.out == 'C':d}",
        f"WIDTH={tiling.width}",
        f"CLUSTER={tiling.cluster}",
        f"STAGES={tiling.stages}",
        f"BOXES={boxes:d}",
    )
    shared = tiling.shared_bytes(b_along_k=b_along_k)
    return team.kernel("gathered", "gathered", defines, shared=shared, features="a")


def _words(size: int) -> int:
    """Bytes of the struct `Words`, as many as keep what follows aligned."""
    return -(-8 * (size + 10) // 1024) * 1024


def _block(source: int, source_pitch: int, target: int, pitch: int, width: int, lines: int) -> Any:
    """A copy of `lines` of `width` elements of two bytes."""
    driver = bindings()
    device = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    block = driver.CUDA_MEMCPY2D()
    block.srcMemoryType = block.dstMemoryType = device
    block.srcDevice, block.srcPitch = source, 2 * source_pitch
    block.dstDevice, block.dstPitch = target, 2 * pitch
    block.WidthInBytes, block.Height = 2 * width, lines
    return block


def _require_aligned(name: str, address: int) -> None:
    if address % ALIGNMENT:
        raise ValueError(f"{name} lies at {address:#x}, which is no multiple of {ALIGNMENT}")
