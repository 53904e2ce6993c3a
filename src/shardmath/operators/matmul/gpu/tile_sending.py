"""GEMM + ReduceScatter and GEMM + AllReduce: tiles are sent to the ranks that reduce them.

    product blocks, rank 0   multiply tile, send it to its owner's slot, count it as arrived, ...
    reducer blocks, rank 1   wait for all ranks' tiles of a chunk, add them up in rank order

Slots and counters are in symmetric memory: see `plan_memory`. A slot is written again only after
its owner has added up what the last launch left there. Product blocks never wait for a peer's
tiles. Reducer blocks do; they are few, and the last of the same kernel, so that plans on several
streams cannot deadlock. A second kernel adds up what is left when all tiles have arrived.

The parts of a result are rounded to its type before they are added, in the order of the ranks and
as float32: the sum has the same bits every time, and on all ranks.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt

from shardmath.base.integers import up
from shardmath.context.context import Context
from shardmath.cuda.driver import call
from shardmath.cuda.kernel import Kernel
from shardmath.cuda.tensormap import require_aligned
from shardmath.local.gpu import Matrix
from shardmath.local.gpu.epilog import combine, copy
from shardmath.operators.matmul.gpu.local_product import SplitKProduct
from shardmath.operators.matmul.gpu.plan_memory import KernelPlan, PlanMemory
from shardmath.operators.matmul.gpu.reduction_choice import choose_schedule, choose_shared_schedule
from shardmath.operators.matmul.gpu.tile_order import (
    TILE_COLUMNS,
    TILE_ROWS,
    TileOrder,
    TileSchedule,
)

_TILE_BYTES = TILE_ROWS * TILE_COLUMNS * 2
_ROUND = 1024  # bytes to which the parts of a plan's memory are rounded up
_STAGE_BYTES = (TILE_ROWS + TILE_COLUMNS) * 64 * 2
_THREADS = 384  # of the product
_REDUCE_THREADS = 512  # threads of a block that adds up what is left
_ADDED = 8  # elements, by each thread
_BLOCKS_OF_TILE = TILE_ROWS * TILE_COLUMNS // _ADDED // _REDUCE_THREADS


class SlotLayout:
    """The layout of one rank's memory: where its parts begin, in bytes, and its size.

    Counters start at zero. `stride` is the bytes of one source's slots.
    """

    def __init__(self, tile_order: TileOrder, rank: int, extra_bytes: int) -> None:
        self.tile_order, size = tile_order, len(tile_order.rows)
        self.stride = tile_order.tiles(rank) * _TILE_BYTES
        parts = (
            8 * (2 + size),  # counters: `Ledger` of tile_slots.cuh
            8 * size * tile_order.chunks,  # counters of tiles, [source][chunk]; peers write them
            4 * tile_order.chunks,  # counters by chunk: pieces of sums that have been begun with
            size * self.stride,  # slots, [source][tile]; peers write them
            extra_bytes,  # the caller's
            16 * 2 * tile_order.count,  # the table of all tiles of the rank, filled up for clusters
            16 * tile_order.tiles(rank),  # the table of its own
            8 * tile_order.chunks,  # the table of its chunks
        )
        starts = accumulate((up(nbytes, _ROUND) for nbytes in parts), initial=0)
        self.ledger, self.arrived, self.claimed, self.slots, *others = starts
        self.extra, self.tiles, self.owned, self.chunks, self.nbytes = others


class TileSendingGemm(KernelPlan[SplitKProduct]):
    """One rank's slots, ledger, tables and kernels for a `SplitKProduct`."""

    kernel: ClassVar[str]
    shares: ClassVar[bool]  # whether sums go to all ranks

    def __init__(
        self,
        problem: SplitKProduct,
        schedule: TileSchedule,
        slot_layouts: Sequence[SlotLayout],
        memory: PlanMemory,
    ) -> None:
        super().__init__(problem, memory)
        self.schedule = schedule
        self.tile_order = slot_layouts[0].tile_order
        self.slot_layouts = tuple(slot_layouts)
        self._own = slot_layouts[self.team.rank]

    @classmethod
    def create(
        cls,
        context: Context,
        problem: SplitKProduct,
        schedule: TileSchedule | None = None,
        *,
        result_addresses: bool = False,
    ) -> Self:
        """A plan. Collective.

        With `result_addresses`, launches will say where all ranks' results lie, and the plan has no
        memory for sums that go to all ranks. Raises ValueError on all ranks where they differ in
        the product, or where it is `unsupported` on one of them; HeapExhausted.
        """
        schedule = schedule or (choose_shared_schedule if cls.shares else choose_schedule)(problem)
        copied = cls.shares and not result_addresses
        extra = problem.height * up(2 * problem.columns, 16) if copied else 0
        tile_order = TileOrder(
            problem.rows, problem.columns, schedule.chunks, schedule.chunk_columns
        )
        slot_layouts = [SlotLayout(tile_order, rank, extra) for rank in range(len(problem.rows))]

        def begin(address: int) -> None:
            own = slot_layouts[context.rank]
            context.gpu_team.device.zero(address, own.slots)
            _write(address + own.tiles, tile_order.of(context.rank, schedule.cluster))
            _write(address + own.owned, tile_order.owned(context.rank))
            _write(address + own.chunks, tile_order.table(context.rank))

        memory = PlanMemory.create(
            context,
            "a product that sends its tiles",
            problem,
            lambda rank: slot_layouts[rank].nbytes,
            begin,
            ("chunks", [schedule.chunks, schedule.chunk_columns]),
            ("extra bytes", extra),
        )
        return cls(problem, schedule, slot_layouts, memory)

    # -- on a stream -------------------------------------------------------------------------------

    def _multiply(
        self, a: int, b: int, sums: int, pitch: int, stream: int, copies: bytes = b""
    ) -> None:
        """Put on `stream` a kernel that multiplies A and B and sends the tiles, and one that adds
        up what is left.

        A, B and the sums of this rank's rows lie at these addresses, rows of the sums `pitch` bytes
        apart. `copies`, the end of `TileSumsArgument`, says where the sums are copied to.
        """
        self._memory.require_usable()
        problem, schedule = self.problem, self.schedule
        defines = (
            f"ELEMENT={problem.dtype.capitalize()}",
            f"A_ALONG_K={problem.a.order == 'C':d}",
            f"B_ALONG_K={problem.b.order == 'F':d}",
            f"CLUSTER={schedule.cluster}",
            f"STAGES={schedule.stages}",
            *self._defines(sums, pitch, bool(copies)),
        )
        # Half of a tile has memory of its own, the other half that of a stage.
        memory = 1024 + schedule.stages * _STAGE_BYTES + _TILE_BYTES // 2
        product = self.team.kernel(self.kernel, self.kernel, defines, shared=memory, features="a")
        # Loaded before the first runs: loading may wait for kernels, which wait for peers.
        remaining_sums = self.team.kernel(
            "remaining_sums", "remaining_sums", self._defines(sums, pitch, bool(copies))
        )
        argument = self._argument(self._of_product, a, b, sums, pitch, copies)
        product.launch(stream, self._product_blocks + self._reducer_blocks, _THREADS, argument)
        self._reduce_rest(remaining_sums, sums, pitch, copies, stream)

    def _reduce_rest(
        self, kernel: Kernel, sums: int, pitch: int, copies: bytes, stream: int
    ) -> None:
        """Put on `stream` the kernel that adds up what is left, and ends the launch."""
        blocks = max(1, self.tile_order.tiles(self.team.rank) * _BLOCKS_OF_TILE)
        most = 2 * self.team.device.processors
        argument = self._argument(self._of_rest, sums, pitch, copies)
        kernel.launch(stream, min(most, blocks), _REDUCE_THREADS, argument, early=True)

    def _defines(self, sums: int, pitch: int, shared: bool) -> tuple[str, ...]:
        """The macros of tile_sums.cuh."""
        whole = sums % 16 == 0 and pitch % 16 == 0 and self.problem.columns % 8 == 0
        return f"ADDEND={self.problem.dtype}", f"WHOLE={whole:d}", f"SHARED={shared:d}"

    @property
    def _reducer_blocks(self) -> int:
        return up(max(1, self.schedule.reducer_blocks), self.schedule.cluster)

    @cached_property
    def _units(self) -> int:
        return (
            len(self.tile_order.of(self.team.rank, self.schedule.cluster)) // self.schedule.cluster
        )

    @property
    def _product_blocks(self) -> int:
        """Blocks that multiply: no more than the least number of rounds of tiles needs."""
        cluster = self.schedule.cluster
        most = max(1, (self.team.device.processors - self._reducer_blocks) // cluster)
        rounds = -(-self._units // most)
        return cluster * -(-self._units // rounds)

    # -- arguments ---------------------------------------------------------------------------------

    def _of_product(self, a: int, b: int, sums: int, pitch: int, copies: bytes) -> bytes:
        """The struct `Product`, whose size is a multiple of 64 bytes as it holds tensor maps."""
        problem, rank = self.problem, self.team.rank
        require_aligned(A=a, B=b)
        columns = TILE_COLUMNS // self.schedule.cluster
        slots = [
            self.bases[dst] + p.slots + rank * p.stride for dst, p in enumerate(self.slot_layouts)
        ]
        skipped = 8 * rank * self.tile_order.chunks
        arrived = [self.bases[dst] + p.arrived + skipped for dst, p in enumerate(self.slot_layouts)]
        packed = (
            self._map(a, problem.a, (problem.height, problem.depth), TILE_ROWS, 64)
            + self._map(b, problem.b, (problem.depth, problem.columns), 64, columns)
            + self.team.packed()
            + struct.pack("QII", self._start("tiles"), self._units, -(-problem.depth // 64))
            + struct.pack("II", self._product_blocks, self.schedule.stagger_cycles)
            + struct.pack(f"{2 * len(slots)}Q", *slots, *arrived)
            + self._of_take(sums, pitch, copies)
        )
        return packed + bytes(-len(packed) % 64)

    def _of_rest(self, sums: int, pitch: int, copies: bytes) -> bytes:
        """The struct `RestArgument`."""
        return self.team.packed() + self._of_take(sums, pitch, copies)

    def _of_take(self, sums: int, pitch: int, copies: bytes) -> bytes:
        """The struct `TileSumsArgument`, which ends with the `copies` of sums."""
        tile_order, start = self.tile_order, self._start
        return (
            struct.pack("QQQQ", start("slots"), self._own.stride, start("owned"), start("chunks"))
            + struct.pack("I4xQ", tile_order.chunks, tile_order.columns)
            + struct.pack("QQ", start("arrived"), start("claimed"))
            + struct.pack("QQ", pitch, sums)
            + struct.pack(f"{self.team.size}Q", *self.bases)
            + (copies or bytes(8 + 8 * self.team.size))
        )

    def _start(self, name: str) -> int:
        """The address of a part of this rank's memory."""
        return self.bases[self.team.rank] + int(getattr(self._own, name))


class GemmReduceScatter(TileSendingGemm):
    """`launch` leaves rank r's `rows[r]` rows of the product on rank r. Made by `create`."""

    kernel, shares = "gemm_reduce_scatter", False

    def launch(self, a: int, b: int, result: int, stream: int, *, pitch: int | None = None) -> None:
        """Put the product of A and B on `stream`; A, B and this rank's rows lie at these addresses.

        `pitch` is how many elements the rows of the result are apart; None is `columns`. Never
        waits on the host, and can be captured in a CUDA graph. Collective, in stream order.
        """
        nbytes = 2 * (self.problem.columns if pitch is None else pitch)
        self._multiply(a, b, result, nbytes, stream)


class GemmAllReduce(TileSendingGemm):
    """`launch` leaves all rows of the product on every rank. Made by `create`.

    `problem.rows` says which rank sums which rows: see `even_rows`. Sums are written straight into
    the results of all ranks, if these have told each other where they lie. Else sums arrive in
    symmetric memory and are copied to the result from there.
    """

    kernel, shares = "gemm_all_reduce", True

    def launch(
        self,
        a: int,
        b: int,
        result: int,
        stream: int,
        *,
        pitch: int | None = None,
        result_addresses: Sequence[int] = (),
    ) -> None:
        """Put the product of A and B on `stream`; A, B and all rows of the result lie at these
        addresses.

        `pitch` is how many elements the rows of the result are apart; None is `columns`.
        `result_addresses` are those of all ranks' results, as this rank sees them: multiples of 16
        bytes, with rows of multiples of 8 elements and the same pitch on each rank. Never waits on
        the host, and can be captured in a CUDA graph. Collective, in stream order.
        """
        rank, columns, first = self.team.rank, self.problem.columns, self._first
        nbytes, between = 2 * (columns if pitch is None else pitch), up(2 * columns, 16)
        here, there = result + first[rank] * nbytes, list(result_addresses)
        arrived = [
            base + own.extra for base, own in zip(self.bases, self.slot_layouts, strict=True)
        ]
        copies = self._copies(there, nbytes) if there else self._copies(arrived, between)
        self._multiply(a, b, here, nbytes, stream, copies)
        if there:
            return
        for low, high in ((0, first[rank]), (first[rank + 1], first[-1])):
            shape = high - low, columns
            target = Matrix(result + low * nbytes, *shape, nbytes // 2, 1, self.problem.dtype)
            sums = target._replace(address=arrived[rank] + low * between, row_stride=between // 2)
            if nbytes > 2 * columns:  # keep what lies between the rows of the result
                combine(self.team.device, stream, target, [sums])
            else:
                copy(self.team.device, stream, target, sums)

    def _copies(self, addresses: Sequence[int], pitch: int) -> bytes:
        """The pitch of this rank's sums on all ranks, and their addresses from the next rank on."""
        team = self.team
        skipped = self._first[team.rank] * pitch
        begin = [addresses[other] + skipped for other in team.ring_order]
        return struct.pack(f"{1 + team.size}Q", pitch, *begin)

    @cached_property
    def _first(self) -> tuple[int, ...]:
        """The first row that each rank sums, and the number of all rows."""
        return tuple(accumulate(self.problem.rows, initial=0))


def _write(address: int, words: npt.NDArray[np.uint32]) -> None:
    """Copy a table to the device, and wait until it is there."""
    if words.size:
        call("cuMemcpyHtoD", address, words.ctypes.data, words.nbytes)
        call("cuCtxSynchronize")
