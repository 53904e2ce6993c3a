"""Strided boxes between memories that this GPU can reach, copied by one kernel launch.

Boxes are pushes where a target is a peer's memory, pulls where a source is, and local copies
(gathering, transposing) where both are this GPU's: the kernel knows only addresses. It writes to
the targets, and reads from the sources, whole lines where the memory there is dense along some
axis: what is dense along different axes passes through shared memory. Accesses are 16 bytes wide
where addresses, strides and units allow it, and as narrow as needed where not. It neither signals
nor waits: order it against the peers with barriers of the team on the same stream.

`kernels/boxes.cu` runs blocks of 256 threads, 3 on a multiprocessor; each takes tiles of 4 to 64
KiB in an order in which the memories alternate. A launch with fewer `blocks` leaves multiprocessors
to others, and takes about 4 GB/s of a link for each block, as long as that is what limits it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from shardmath.cuda.constant import Constant
from shardmath.cuda.device import Device
from shardmath.cuda.kernel import Argument, ReadyLaunch, kernel
from shardmath.latest import Latest
from shardmath.redistribution.boxes import BASES, Box, tables

__all__ = ["Box", "BoxCopies"]

_THREADS, _BLOCKS_EACH = 256, 3
_KEPT = 16  # arguments of launches


class BoxCopies:
    """Boxes whose geometry is on the device, to be launched between any addresses, often.

    `nbytes` is what one launch copies. Peers' memories are written in the order in which they first
    appear in `copies`, in turns: begin with the next rank's, so that no two ranks begin with the
    same. Keep the object while a launch, or a CUDA graph that holds one, may still run.
    """

    def __init__(self, device: Device, copies: Iterable[Box]) -> None:
        """Raises ValueError for more memories than a launch has room for, HeapExhausted."""
        made = tables(copies)
        self.device = device
        self.nbytes = made.nbytes
        self._count = len(made.tiles)
        self._memories = made.sources, made.targets
        self._boxes = Constant(device, made.boxes)
        self._tiles = Constant(device, made.tiles)
        self._arguments: Latest[tuple[tuple[int, ...], tuple[int, ...]], Argument] = Latest(_KEPT)

    def __repr__(self) -> str:
        sources, targets = self._memories
        return (
            f"BoxCopies({self.nbytes:,} bytes from {sources} to {targets} memories, "
            f"{self._count} tiles)"
        )

    def launch(
        self, stream: int, sources: Sequence[int], targets: Sequence[int], *, blocks: int = 0
    ) -> None:
        """Put the copies on `stream`, between memories at these addresses. Never waits.

        The number of `blocks` is at most what is given, 0 for as many as the device holds.
        """
        if not self._count:
            return
        most = blocks or self.device.processors * _BLOCKS_EACH
        function = kernel(self.device, "boxes", "copy_boxes")
        argument = self._argument(tuple(sources), tuple(targets))
        function.launch(stream, min(self._count, most), _THREADS, argument)

    def ready(self, sources: Sequence[int], targets: Sequence[int]) -> ReadyLaunch | None:
        """The same as a launch that can be put on streams often; None where nothing is copied."""
        if not self._count:
            return None
        blocks = min(self._count, self.device.processors * _BLOCKS_EACH)
        function = kernel(self.device, "boxes", "copy_boxes")
        return function.ready(blocks, _THREADS, self._argument(tuple(sources), tuple(targets)))

    def _argument(self, sources: tuple[int, ...], targets: tuple[int, ...]) -> Argument:
        key = (sources, targets)
        argument = self._arguments.find(key)
        if argument is None:
            used, into = self._memories
            bases = [*sources[:used], *targets[:into]]
            assert len(bases) == used + into, "an address for every memory of the boxes"
            bases += [0] * (BASES - len(bases))
            words = (self._tiles.address, self._boxes.address, self._count, *bases)
            argument = Argument(struct.pack(f"{len(words)}Q", *words))
            self._arguments.keep(key, argument)
        return argument
