"""Where the rows of a board lie, and how what a rank writes in its own reaches the others.

Ranks of one host map the same pages: a store is seen at once. A rank on another host has a copy,
which only messages from the row's owner change, in the order in which it wrote. So on both sides
whoever sees a word sees what was written before it.
"""

from __future__ import annotations

import mmap
import os
import platform
import weakref
from collections.abc import Mapping

from shardmath.transport.wires import Channel, Wires

# On x86-64 stores become visible in program order. Elsewhere a fence must come between the data and
# the word that announces it, and between a word and the data read after it; a switch of threads in
# the kernel holds one.
ORDERED = platform.machine() in ("x86_64", "AMD64")

_WORD = 8


class Rows:
    """The rows of ranks that all map `memory`: `bytes[rank]`, and `words[rank]` of 8 bytes."""

    needs_polling = False  # whether `poll` must be called for words to arrive

    def __init__(self, memory: mmap.mmap, *, rank: int, size: int, row_bytes: int) -> None:
        self.rank = rank
        self.memory = whole = memoryview(memory)
        self.bytes = [whole[r * row_bytes : (r + 1) * row_bytes] for r in range(size)]
        self.words: list[memoryview[int]] = [row.cast("Q") for row in self.bytes]

    def write(self, place: int, data: bytes) -> None:
        """Write into the own row; peers are to see it before the next word that is published."""
        self.bytes[self.rank][place : place + len(data)] = data

    def publish(self, word: int, value: int) -> None:
        """Set a word of the own row, after all that was written before."""
        if not ORDERED:
            os.sched_yield()
        self.words[self.rank][word] = value

    def announce(self, word: int, value: int) -> None:
        """Set a word of the own row, which says nothing of others. From any thread."""
        self.words[self.rank][word] = value

    def poll(self) -> None:
        """Let what peers have published arrive."""

    def receive(self) -> None:
        """Take in what peers have published, from any thread."""

    def flush(self) -> None:
        """Let peers see what was written, without a word that says so."""


class MultiHostRows(Rows):
    """Rows of ranks of several hosts: `far` are those elsewhere, with their numbers in the mesh."""

    needs_polling = True

    def __init__(
        self,
        memory: mmap.mmap,
        *,
        rank: int,
        size: int,
        row_bytes: int,
        far: Mapping[int, int],
        wires: Wires,
        name: str,
    ) -> None:
        super().__init__(memory, rank=rank, size=size, row_bytes=row_bytes)
        copies = {r: memoryview(bytearray(row_bytes)) for r in far}
        for r, copy in copies.items():
            self.bytes[r] = copy
            self.words[r] = copy.cast("Q")
        self._far = list(far.values())
        self._wires = wires
        self._unsent: list[tuple[int, bytes]] = []
        rows = {peer: copies[r] for r, peer in far.items()}

        def deliver(peer: int, place: int, data: bytes) -> None:
            row = rows.get(peer)
            if row is not None and place + len(data) <= len(row):
                row[place : place + len(data)] = data

        self._channel: Channel = wires.open(name, 0, deliver)
        weakref.finalize(self, wires.forget, name).atexit = False

    def write(self, place: int, data: bytes) -> None:
        super().write(place, data)
        self._unsent.append((place, bytes(data)))

    def publish(self, word: int, value: int) -> None:
        super().publish(word, value)
        self._unsent.append((_WORD * word, value.to_bytes(_WORD, "little")))
        self.flush()

    def announce(self, word: int, value: int) -> None:
        super().announce(word, value)
        self._channel.send(self._far, [(_WORD * word, value.to_bytes(_WORD, "little"))])

    def poll(self) -> None:
        self._wires.poll()

    def receive(self) -> None:
        self._wires.receive()

    def flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if unsent:
            self._channel.send(self._far, unsent)
