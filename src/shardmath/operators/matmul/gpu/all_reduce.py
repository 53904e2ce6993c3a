"""GEMM + AllReduce: owners add up what they are sent, and all read the sums from them.

While the product goes on, chunk after chunk is summed on the multiprocessors that it leaves free,
and copied from each owner by the copy engines. After it, the last chunk is summed and read by all
multiprocessors. The result may lie in any memory, and has the same bits on all ranks.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

from shardmath.context import DistributedContext
from shardmath.cuda.driver import bindings, call
from shardmath.operators.matmul.gpu.sending import SendingProduct, Shape
from shardmath.operators.matmul.gpu.sharded import ShardedProduct
from shardmath.operators.matmul.gpu.walk import TILE_COLUMNS, TILE_ROWS

__all__ = ["GemmAllReduce", "choose_shape", "even_rows"]

_THREADS = 512


class GemmAllReduce:
    """`launch` leaves all rows of the product on every rank. Made by `together`.

    `problem.rows` says which rank sums which rows: see `even_rows`.
    """

    def __init__(self, sending: SendingProduct) -> None:
        self._sending = sending
        self._first = [0, *accumulate(sending.problem.rows)]
        sending.team.device.activate()
        self._copies = call("cuStreamCreate", 1)  # it does not wait for the default stream
        self._fork, self._join = call("cuEventCreate", 2), call("cuEventCreate", 2)  # no timing

    @classmethod
    def together(
        cls, context: DistributedContext, problem: ShardedProduct, shape: Shape | None = None
    ) -> GemmAllReduce:
        """A plan. Collective.

        Raises ValueError on all ranks where they do not mean the same product, or where
        `problem.misfit` speaks on one of them; HeapExhausted.
        """
        most = max(problem.rows)
        sending = SendingProduct.together(
            context, problem, shape or choose_shape(problem), extra=most * _pitch(problem)
        )
        return cls(sending)

    def launch(self, a: int, b: int, result: int, stream: int, *, pitch: int | None = None) -> None:
        """Put the product of A and B on `stream`; A, B and all rows of the result lie there.

        `pitch` is how many elements the rows of the result are apart; None is `columns`. Never
        waits on the host, and can be captured in a CUDA graph. Collective, in stream order.
        """
        sending, problem = self._sending, self._sending.problem
        sending.require_usable()
        nbytes = 2 * (problem.columns if pitch is None else pitch)
        sums, last = sending.extra(sending.team.rank), sending.shape.chunks - 1
        sending.team.device.activate()
        call("cuEventRecord", self._fork, stream)
        call("cuStreamWaitEvent", self._copies, self._fork, 0)
        with sending.beside(stream) as side:
            sending.multiply(a, b, stream)
            sending.take(sums, _pitch(problem), side, early=True, shared=True)
        for chunk in range(last):
            self._await(chunk, self._copies)
            for copy in self._boxes(chunk, result, nbytes):
                _copy(*copy, _pitch(problem), nbytes, self._copies)
        call("cuEventRecord", self._join, self._copies)
        sending.take(sums, _pitch(problem), stream, early=False, shared=True)
        self._await(last, stream)
        call("cuStreamWaitEvent", stream, self._join, 0)
        argument = sending.argument(self._of_gather, last, result, nbytes)
        blocks = 2 * sending.team.device.processors
        sending.team.kernel("gather", "gather_last").launch(stream, blocks, _THREADS, argument)

    def free(self) -> None:
        """See SendingProduct.free."""
        self._sending.free()

    def _await(self, chunk: int, stream: Any) -> None:
        argument = self._sending.argument(self._of_gather, chunk, 0, 0)
        self._sending.team.kernel("gather", "await_sums").launch(stream, 1, _THREADS, argument)

    def _boxes(self, chunk: int, result: int, nbytes: int) -> Iterator[tuple[int, int, int, int]]:
        """(from, to, bytes of a row, rows) of one chunk of each owner's, this rank's last."""
        sending, walk = self._sending, self._sending.walk
        size, rank = sending.team.size, sending.team.rank
        for owner in ((rank + step) % size for step in range(1, size + 1)):
            part = walk.parts(owner)[chunk]
            row, column = part.rows.start * TILE_ROWS, part.columns.start * TILE_COLUMNS
            rows = min(part.rows.stop * TILE_ROWS, walk.rows[owner]) - row
            columns = min(part.columns.stop * TILE_COLUMNS, walk.columns) - column
            yield (
                sending.extra(owner) + row * _pitch(sending.problem) + 2 * column,
                result + (self._first[owner] + row) * nbytes + 2 * column,
                2 * max(columns, 0) if rows > 0 else 0,
                max(rows, 0) if columns > 0 else 0,
            )

    def _of_gather(self, chunk: int, result: int, nbytes: int) -> bytes:
        """The struct `GatherArgument`."""
        sending = self._sending
        rank, size = sending.team.rank, sending.team.size
        base = sending.bases[rank]
        head = struct.pack("QQ", base, base + sending.places[rank].ready)
        head += struct.pack("IIQQ", sending.shape.chunks, chunk, _pitch(sending.problem), nbytes)
        boxes = b"".join(struct.pack("QQII", *box) for box in self._boxes(chunk, result, nbytes))
        return sending.team.packed() + head + boxes + struct.pack(f"{size}Q", *sending.bases)


def _pitch(problem: ShardedProduct) -> int:
    """Bytes from one row of the sums to the next."""
    return -(-2 * problem.columns // 16) * 16


def _copy(
    source: int, target: int, width: int, rows: int, source_pitch: int, pitch: int, stream: Any
) -> None:
    """Put a copy of `rows` rows of `width` bytes on `stream`, for a copy engine."""
    if not rows or not width:
        return
    if width == source_pitch == pitch:
        call("cuMemcpyAsync", target, source, width * rows, stream)
        return
    box = bindings().CUDA_MEMCPY2D()
    box.srcMemoryType = box.dstMemoryType = bindings().CUmemorytype.CU_MEMORYTYPE_DEVICE
    box.srcDevice, box.srcPitch = source, source_pitch
    box.dstDevice, box.dstPitch = target, pitch
    box.WidthInBytes, box.Height = width, rows
    call("cuMemcpy2DAsync", box, stream)


def even_rows(height: int, size: int) -> tuple[int, ...]:
    """Which rank sums how many of `height` rows: whole tiles, as evenly as they go."""
    tiles = -(-height // TILE_ROWS)
    cuts = [min(height, tiles * rank // size * TILE_ROWS) for rank in range(size + 1)]
    return tuple(high - low for low, high in pairwise(cuts))


def choose_shape(problem: ShardedProduct) -> Shape:
    """How to cut the work: what is read after the product is one chunk."""
    most = max(-(-rows // TILE_ROWS) for rows in problem.rows)
    return Shape(chunks=max(1, min(8, most)), spare=4)
