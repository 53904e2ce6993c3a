"""The push stream: a second stream, where one kernel pushes chunks while the user's one transforms.

The kernel holds few multiprocessors for as long as the exchanges last. The streams synchronise by
counters in the GPU's memory, ranks by signals; all of these count up, and can be replayed in a
graph. A wait that expires leaves the counters in no known state: then the context's transforms end
here.

    user's stream    transform 0, ready | transform 1, ready | wait, transform a | ...
    push stream      barrier |  push 0           | push 1, signal | ...
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from shardmath.context.context import Context
from shardmath.cuda.allocation import Constant
from shardmath.cuda.device import Device
from shardmath.cuda.driver import call
from shardmath.cuda.kernel import Argument, Kernel
from shardmath.cuda.stream import new_event, new_stream
from shardmath.operators.fft.pushes import Start, tables
from shardmath.symmetric.team import Team

_SIGNALS, _BARRIER = 59, 58  # channels
_COUNTERS = 16 + 4 * 62  # bytes of struct Counters
_COPY_BYTES, _STAGES, _PREFETCH = 16 << 10, 12, 10
_BLOCKS = 32  # about so many, and as many for each peer
_FEW_BLOCKS = 16  # where that is a multiple of 4 or more ranks, and there is one exchange
_CLUSTER_SIZES = (16, 8)  # see docs/notebook/chunked-exchanges.md


class PushTables:
    """The tables of what is pushed, on a device. Keep it while a launch or a graph may use it."""

    def __init__(self, device: Device, start: Start) -> None:
        chunks, rows = tables(start, _COPY_BYTES)
        self.count = len(chunks)
        self.blocks = push_blocks(start.size, two_exchanges=len(start.targets) > 1)
        self.chunks = Constant(device, chunks)
        self.rows = Constant(device, rows)


def push_blocks(size: int, *, two_exchanges: bool) -> int:
    """How many blocks push to so many ranks.

    One exchange hides behind transforms, from which more blocks take more multiprocessors. Of two
    exchanges the second has nothing to hide behind at its end.
    """
    few = not two_exchanges and size >= 4 and _FEW_BLOCKS % size == 0
    return _FEW_BLOCKS if few else max(1, _BLOCKS // size) * size


def cluster_size(blocks: int, holds: Callable[[int, int], bool]) -> int:
    """The largest cluster size for so many blocks that the device can hold, or 1.

    `holds(count, size)` says whether it can hold so many clusters of that size. Exchanges beside
    transforms are faster from blocks of one cluster. These run on neighbouring multiprocessors,
    whose way to memory and to the links, we take it, they then have for themselves.
    """
    sizes = (size for size in _CLUSTER_SIZES if blocks % size == 0)
    return next((size for size in sizes if holds(blocks // size, size)), 1)


class PushStream:
    """The push stream of one context, and its kernels. Get it with `PushStream.of`."""

    def __init__(self, context: Context) -> None:
        assert context.team is not None, "a context of GPUs"
        self._team: Team = context.team
        device = self._team.device
        counters = context.heap.allocate(_COUNTERS)
        device.zero(counters.block.address, _COUNTERS)
        context.keep_for_kernels(counters)
        self._counters = counters.block.address
        self.stream = new_stream(self, device, first=True)
        self._fork, self._join = new_event(self), new_event(self)
        # None is loaded while another waits for it.
        for name in ("push", "signal_ready", "wait_for_chunk"):
            self._kernel(name).load()
        self._cluster_sizes: dict[int, int] = {}
        tail = struct.pack("QII", self._counters, _SIGNALS, 0)
        self._argument = Argument(self._team.packed() + tail)

    @classmethod
    def of(cls, context: Context) -> PushStream:
        """The one of a context. Local; raises HeapExhausted when it is made."""
        return context.cache("fft push stream", lambda: cls(context))

    def require_usable(self) -> None:
        """Raise what kernels have noted, and RankFailure after an operation that was given up."""
        self._team.require_usable()

    def bind(
        self, tables: PushTables, sources: Sequence[int], targets: Sequence[Sequence[int]]
    ) -> Callable[[int], None]:
        """A function that forks the push stream from a stream, and launches the kernel that pushes.

        `sources[i]` is where exchange i begins in this rank's memory, `targets[i][rank]` in the
        ranks'. All ranks wait for each other first: before reusing what its owner may still use.
        """
        team, kernel = self._team, self._kernel("push")
        cluster = self._cluster_size(tables.blocks)
        one, two = (*targets, [0] * team.size)[:2]
        words = struct.pack(
            f"QQQII{2 + 2 * team.size}Q",
            *(self._counters, tables.chunks.address, tables.rows.address),
            *(tables.count, _SIGNALS, *(*sources, 0)[:2], *one, *two),
        )
        argument = Argument(team.packed() + words)

        def start(stream: int) -> None:
            call("cuEventRecord", self._fork, stream)
            call("cuStreamWaitEvent", self.stream, self._fork, 0)
            team.barrier(int(self.stream), channel=_BARRIER)
            kernel.launch(int(self.stream), tables.blocks, 32, argument, cluster=cluster)

        return start

    def signal_ready(self, stream: int) -> None:
        """Launch: chunks that need only what `stream` has done so far can be pushed."""
        self._kernel("signal_ready").launch(stream, 1, 1, self._argument, early=True)

    def wait_for_chunk(self, stream: int) -> None:
        """Launch: `stream` waits until every rank has signalled one more chunk."""
        self._kernel("wait_for_chunk").launch(stream, 1, 32, self._argument, early=True)

    def join(self, stream: int) -> None:
        """Make `stream` wait for the push stream."""
        call("cuEventRecord", self._join, self.stream)
        call("cuStreamWaitEvent", stream, self._join, 0)

    def _cluster_size(self, blocks: int) -> int:
        """The cluster size of so many blocks on this device."""
        if blocks not in self._cluster_sizes:
            holds = self._kernel("push").holds_clusters
            self._cluster_sizes[blocks] = cluster_size(
                blocks, lambda count, size: holds(count, size, 32)
            )
        return self._cluster_sizes[blocks]

    def _kernel(self, name: str) -> Kernel:
        defines = (f"COPY_BYTES={_COPY_BYTES}", f"STAGES={_STAGES}", f"PREFETCH={_PREFETCH}")
        return self._team.kernel("pipeline", name, defines, shared=_COPY_BYTES * _STAGES)
