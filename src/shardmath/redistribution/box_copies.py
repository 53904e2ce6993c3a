"""Strided boxes between memories that this GPU can reach, copied by one kernel launch.

The kernel knows only addresses. A box is a push if its target is a peer's memory, a pull if its
source is, and a local copy (gathering, transposing) if both are this GPU's. Where memory is dense
along some axis it is read and written in whole lines; if source and target are dense along
different axes, elements pass through shared memory. Accesses are 16 bytes wide if addresses,
strides and units allow it, and for long rows in any case. The kernel neither signals nor waits:
order it against the peers with barriers of the team on the same stream.

`kernels/boxes.cu` runs blocks of 256 threads, 3 on a multiprocessor; each takes tiles of 4 to 64
KiB in an order in which the memories alternate. A launch with fewer `blocks` leaves multiprocessors
to others, and takes about 4 GB/s of a link for each block, as long as that is what limits it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from shardmath.base.lru_cache import LRUCache
from shardmath.cuda.allocation import Constant
from shardmath.cuda.device import Device
from shardmath.cuda.driver import beside_captures
from shardmath.cuda.kernel import Argument, Kernel, ReadyLaunch, kernel
from shardmath.redistribution.boxes import BASES, tables
from shardmath.redistribution.copies import StridedCopy

_THREADS, _BLOCKS_EACH = 256, 3
_KEPT = 16  # pairs of sources and targets


class BoxCopies:
    """Boxes whose geometry is on the device, to be launched between any addresses, often.

    One launch copies `nbytes`. Peers' memories are written in turns, in the order in which they
    first appear in `copies`: begin with the next rank's, so that no two ranks begin with the same.
    Keep the object while a CUDA graph that holds a launch may still run.
    """

    def __init__(self, device: Device, copies: Iterable[StridedCopy]) -> None:
        """Raises ValueError for more memories than a launch has room for, HeapExhausted."""
        made = tables(copies)
        self.device = device
        self.nbytes = made.nbytes
        self._unaligned = made.unaligned
        self._count = len(made.tiles)
        self._memories = made.sources, made.targets
        self._boxes = Constant(device, made.boxes)
        self._tiles = Constant(device, made.tiles)
        self._prepared_for: LRUCache[Any, tuple[Kernel, Argument]] = LRUCache(_KEPT)

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

        There are at most so many `blocks`; 0 stands for as many as the device holds.
        """
        if not self._count:
            return
        most = blocks or self.device.processors * _BLOCKS_EACH
        function, argument = self._prepared(tuple(sources), tuple(targets))
        function.launch(stream, min(self._count, most), _THREADS, argument)

    def ready(self, sources: Sequence[int], targets: Sequence[int]) -> ReadyLaunch | None:
        """The copies as a launch to be put on streams often; None if nothing is copied."""
        if not self._count:
            return None
        blocks = min(self._count, self.device.processors * _BLOCKS_EACH)
        function, argument = self._prepared(tuple(sources), tuple(targets))
        return function.ready(blocks, _THREADS, argument)

    def _prepared(
        self, sources: tuple[int, ...], targets: tuple[int, ...]
    ) -> tuple[Kernel, Argument]:
        """The kernel for memories at these addresses, and its argument."""
        prepared = self._prepared_for.find((sources, targets))
        if prepared is None:
            used, into = self._memories
            bases = [*sources[:used], *targets[:into]]
            assert len(bases) == used + into, "an address for every memory of the boxes"
            unaligned = self._unaligned or any(base % 16 for base in bases)
            function = _kernels(self.device)[unaligned]
            bases += [0] * (BASES - len(bases))
            words = (self._tiles.address, self._boxes.address, self._count, *bases)
            prepared = function, Argument(struct.pack(f"{len(words)}Q", *words))
            self._prepared_for.keep((sources, targets), prepared)
        return prepared


@cache
def _kernels(device: Device) -> tuple[Kernel, Kernel]:
    """The kernel for rows at multiples of 16 bytes, and the kernel for rows anywhere.

    Both are loaded when one is first needed. Later, a kernel may be running that waits for such
    copies, and loading would wait for that kernel.
    """
    with beside_captures():
        aligned, unaligned = (
            kernel(device, "boxes", "copy_boxes", (f"UNALIGNED={which}",)) for which in (0, 1)
        )
        aligned.load()
        unaligned.load()
    return aligned, unaligned
