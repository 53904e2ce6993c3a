"""A second stream, on which one kernel pushes chunks while the user's stream transforms.

The kernel holds few multiprocessors for as long as the exchanges last. Both streams tell each other
by words in the GPU's memory, peers by signals; all of it counts up, and can be replayed in a graph.
A wait that expires leaves the words in no known state: then the context's transforms end here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from shardmath.context import Context
from shardmath.cuda.constant import Constant
from shardmath.cuda.device import Device
from shardmath.cuda.driver import call
from shardmath.cuda.kernel import Argument, Kernel
from shardmath.operators.fft.pipeline import Pipeline
from shardmath.symmetric.team import Team

__all__ = ["Beside", "PushTables", "blocks_for", "widest_cluster"]

_SIGNALS, _BARRIER = 59, 58  # channels
_WORDS = 16 + 4 * 62  # struct Words
_PIECE, _STAGES, _AHEAD = 16 << 10, 12, 10
_BLOCKS = 32  # about so many, and as many for each peer
_FEW = 16  # where that is a multiple of 4 or more ranks, and no exchange goes back
_CLUSTERS = (16, 8)  # blocks that are neighbours; see docs/decisions/chunks-beside-transforms.md


class PushTables:
    """The tables of a pipeline on a device. Keep it while a launch or a graph may use it."""

    def __init__(self, device: Device, pipeline: Pipeline) -> None:
        chunks, rows = pipeline.tables(_PIECE)
        self.count = len(chunks)
        self.blocks = blocks_for(pipeline.size, returns=pipeline.returns)
        self.chunks = Constant(device, chunks)
        self.rows = Constant(device, rows)
        self.arguments: dict[tuple[int, ...], Argument] = {}


def blocks_for(size: int, *, returns: bool) -> int:
    """How many blocks push to so many ranks. `returns`: there is an exchange back.

    What comes before it hides behind transforms, from which more blocks take more.
    """
    few = not returns and size >= 4 and _FEW % size == 0
    return _FEW if few else max(1, _BLOCKS // size) * size


def widest_cluster(blocks: int, holds: Callable[[int, int], bool]) -> int:
    """How many blocks that push are neighbours: as many as the device has room for, or 1.

    `holds(count, size)` says whether it has for so many clusters. Exchanges beside transforms are
    faster by blocks that are in one place; they have its way to memory and to the links, we take
    it, for themselves.
    """
    sizes = (size for size in _CLUSTERS if blocks % size == 0)
    return next((size for size in sizes if holds(blocks // size, size)), 1)


class Beside:
    """The second stream of one context. Get it with `Beside.of`."""

    def __init__(self, context: Context) -> None:
        assert context.team is not None, "a context of GPUs"
        self._team: Team = context.team
        device = self._team.device
        words = context.heap.allocate(_WORDS)
        device.zero(words.block.address, _WORDS)
        context.keep_for_kernels(words)
        self._words = words.block.address
        _, highest = call("cuCtxGetStreamPriorityRange")
        # It does not wait for the default stream, and its kernel starts before others' next blocks.
        self.stream = call("cuStreamCreateWithPriority", 1, highest)
        self._fork, self._join = call("cuEventCreate", 2), call("cuEventCreate", 2)  # no timing
        for name in ("push", "ready", "await_all"):  # none is loaded while another waits for it
            self._kernel(name).load()
        self._clusters: dict[int, int] = {}
        tail = struct.pack("QII", self._words, _SIGNALS, 0)
        self._argument = Argument(self._team.packed() + tail)

    @classmethod
    def of(cls, context: Context) -> Beside:
        """The one of a context. Local; raises HeapExhausted when it is made."""
        beside: Beside = context.cache("fft beside", lambda: cls(context))
        return beside

    def require_usable(self) -> None:
        """Raise what kernels have noted, and RankFailure after an operation that was given up."""
        self._team.require_usable()

    def start(
        self,
        tables: PushTables,
        stream: int,
        sources: Sequence[int],
        targets: Sequence[Sequence[int]],
    ) -> None:
        """Launch what pushes, on the second stream, from where `stream` is now.

        `sources[i]` is where exchange i begins in this rank's memory, `targets[i][rank]` in the
        ranks'. All ranks wait for each other first: before reusing what its owner may still use.
        """
        team = self._team
        call("cuEventRecord", self._fork, stream)
        call("cuStreamWaitEvent", self.stream, self._fork, 0)
        team.barrier(int(self.stream), channel=_BARRIER)
        one, two = (*targets, [0] * team.size)[:2]
        key = (*(*sources, 0)[:2], *one, *two)
        if key not in tables.arguments:
            words = struct.pack(
                f"QQQII{2 + 2 * team.size}Q",
                *(self._words, tables.chunks.address, tables.rows.address),
                *(tables.count, _SIGNALS),
                *key,
            )
            tables.arguments[key] = Argument(team.packed() + words)
        self._kernel("push").launch(
            int(self.stream),
            tables.blocks,
            32,
            tables.arguments[key],
            cluster=self._cluster(tables.blocks),
        )

    def ready(self, stream: int) -> None:
        """Launch: what `stream` has done so far can be pushed, as far as a chunk needs it."""
        self._kernel("ready").launch(stream, 1, 1, self._argument, early=True)

    def wait(self, stream: int) -> None:
        """Launch: `stream` waits until every rank has signalled one more chunk."""
        self._kernel("await_all").launch(stream, 1, 32, self._argument, early=True)

    def end(self, stream: int) -> None:
        """Make `stream` wait for the second one."""
        call("cuEventRecord", self._join, self.stream)
        call("cuStreamWaitEvent", stream, self._join, 0)

    def _cluster(self, blocks: int) -> int:
        """How many of so many blocks are neighbours."""
        if blocks not in self._clusters:
            holds = self._kernel("push").holds_clusters
            self._clusters[blocks] = widest_cluster(
                blocks, lambda count, size: holds(count, size, 32)
            )
        return self._clusters[blocks]

    def _kernel(self, name: str) -> Kernel:
        defines = (f"PIECE={_PIECE}", f"STAGES={_STAGES}", f"AHEAD={_AHEAD}")
        return self._team.kernel("pipeline", name, defines, shared=_PIECE * _STAGES)
