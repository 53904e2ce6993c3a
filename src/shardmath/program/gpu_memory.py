"""What moves on GPUs keep from one execution to the next: staging, and launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from shardmath.context import Context
from shardmath.lru_cache import LRUCache
from shardmath.operators.lanes import Lane
from shardmath.operators.replay import GraphCache
from shardmath.operators.workspace import KEPT_STAGING
from shardmath.program.gpu_notes import OneMove, staging_strides
from shardmath.redistribution import Exposed
from shardmath.symmetric.heap import Block, Buffer

if TYPE_CHECKING:
    from shardmath.cuda.kernel import ReadyLaunch
    from shardmath.redistribution.device import BoxCopies

__all__ = ["CopySequence", "DeviceMemory", "Step"]

_KEPT = 64  # launches and copies
_STAGING = "staging"  # of the lane's buffers


@dataclass(frozen=True)
class Step:
    """Copies between addresses, ready to be launched; `launch` is None where there are none."""

    copies: BoxCopies
    launch: ReadyLaunch | None

    @classmethod
    def of(cls, copies: BoxCopies, sources: Sequence[int], targets: Sequence[int]) -> Step:
        """Those copies, between these memories."""
        return cls(copies, copies.ready(sources, targets))

    def put(self, stream: int) -> None:
        """Launch them."""
        if self.launch is not None:
            self.launch.put(stream)


class CopySequence:
    """All that one execution launches: the first step, between barriers where ranks push or pull,
    then the others. Repeated, it is a CUDA graph.
    """

    def __init__(self, lane: Lane, steps: Sequence[Step], *, crosses: bool) -> None:
        self.is_staged = len(steps) > 1
        self._steps, self._crosses = steps, crosses
        self._graphs = GraphCache(lane)

    def put(self, stream: int) -> None:
        """Launch it."""
        if self._graphs.launch((), stream, self._put):
            self._graphs.lane.keep(self)

    def _put(self, stream: int) -> None:
        first, *others = self._steps
        lane = self._graphs.lane
        if self._crosses:
            lane.barrier(stream)
        first.put(stream)
        if self._crosses:
            lane.barrier(stream)
        for step in others:
            step.put(stream)


class DeviceMemory:
    """What is kept from one execution to the next: staging, and copies on the device.

    `temporary`: for calls without an object. Their staging is their lane's; where it is large it is
    given back after each execution, which therefore waits where it used it.
    """

    def __init__(self, context: Context, *, temporary: bool = False) -> None:
        self._context = context
        self._lane = Lane.numbered(context, 0) if temporary else None
        self._buffer: Buffer | None = None  # not the lane's
        self._block: Block | None = None
        self._place = b""
        self._stream = 0  # of the last execution that used the staging
        self._copies: LRUCache[Any, BoxCopies] = LRUCache(_KEPT)
        self._sequences: LRUCache[Any, CopySequence] = LRUCache(_KEPT)

    @property
    def staging(self) -> bytes:
        """Where the staging lies, packed; b"" if there is none."""
        if self._block is not None and self._buffer is None:
            assert self._lane is not None, "whose buffer it is"
            if not self._lane.holds({_STAGING: self._block}):  # it has grown, or was released
                self._block, self._place = None, b""
        return self._place

    def stage(self, move: OneMove) -> None:
        """Reserve heap memory for a packed result. Raises HeapExhausted."""
        rank = self._context.rank
        nbytes = prod(move.transfer.dst.local_shape(rank)) * move.transfer.itemsize
        if self._lane is not None and nbytes <= KEPT_STAGING:
            self._block = self._lane.buffer(_STAGING, nbytes).block
        else:
            self._buffer = self._context.allocate_shared(nbytes)
            self._block = self._buffer.block
        strides = staging_strides(move, rank)
        self._place = Exposed(self._block.location, nbytes, 0, strides).pack()

    def staging_used_on(self, stream: int) -> None:
        """The staging is used by what was put on `stream`."""
        self._stream = stream

    @property
    def staging_address(self) -> int:
        """Where it lies, once there is some."""
        assert self._block is not None, "staged"
        return self._block.address

    def copies(self, key: Any, make: Callable[[], BoxCopies]) -> BoxCopies:
        """The copies for arrays of such strides, made when they are first needed."""
        return self._copies.made(key, make)

    def sequence(self, key: Any) -> CopySequence | None:
        """What copies between arrays at such places, where it is known."""
        return self._sequences.find(key)

    def keep_sequence(self, key: Any, sequence: CopySequence) -> CopySequence:
        """Keep it for the next execution."""
        return self._sequences.keep(key, sequence)

    def end_call(self) -> None:
        """After an execution: give back what is not to be kept for the next."""
        if self._lane is not None and self._buffer is not None:
            self.release()

    def discard_staging(self) -> None:
        """Undo `stage`, whose memory nothing has used."""
        self.release()
        if self._lane is not None:
            self._lane.drop(_STAGING)

    def release(self) -> None:
        """Give the staging back, when what uses it has ended. The lane's stays."""
        if self._buffer is None:
            return
        self._sequences.clear()
        self._place, self._block = b"", None
        team = self._context.team
        if team is not None:
            team.synchronize(self._stream)
        self._buffer = None
