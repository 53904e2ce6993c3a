"""The rows of a board, one for each rank: what is in a row, and how it reaches the other ranks.

A rank writes only its own row and reads the others'. A row holds

    word 0  exchange   2n: this rank has published its n-th round of exchange;
                       2n-1: it had, and has taken that back
    word 1  barrier    the same for barriers
    word 2  state      RUNNING, LEFT, FAILED or MISMATCHED; the last two with GONE added where the
                       rank has left since
    word 3  recovery   the number of the last recovery of the group that this rank has asked for
    word 4  decision   the last recovery for which this rank has said who goes on
    word 5  kernels    SILENT: no kernel of this rank sends anything more; ENDED: the rank has left,
                       and all its kernels have ended
    word 6  refused    a digest of the name of the last board that this rank could not make
    word 7  bell       whether this rank sleeps until a peer publishes something: see `Rows.rest`
    operation          the name of the operation under way, for the other ranks' messages
    reason             why the rank failed or refused, and who is to blame; written before the
                       word that says so
    mail               two mailboxes, for even and for odd rounds: the number of the round, the
                       bytes of the whole message and of the payload at its end, a part of it
    calls              the calls with which the rank has run ahead: see `calls`

Ranks of one host map the same pages: a store is seen at once. A rank on another host has a copy of
the row, which messages from its owner change in the order in which it wrote. Either way a rank that
sees a word sees what was written before it.

A rank that waits for long sleeps until a peer rings, as each does after it has published a word.
Ranks of one host ring by a word of their rows, the bell, and the system's futex: `board.c` has both
halves, and says why no ring is lost. Where there are several hosts a rank sleeps until a message
comes. Its bell is 1 meanwhile, and ranks of its own host, whose words come without a message, send
it an empty one.
"""

from __future__ import annotations

import mmap
import os
import platform
import time
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardmath.transport.wires import Channel, Wires

EXCHANGE, BARRIER, STATE, RECOVERY, DECISION, KERNELS, REFUSED, BELL = range(8)  # words
RUNNING, LEFT, FAILED, MISMATCHED = range(4)  # values of STATE
GONE = 4  # is added to FAILED and to MISMATCHED
SILENT, ENDED = 1, 2  # values of KERNELS
WINDOW = 64  # a row lists tags and words of this many calls
MOST_WORDS = 16  # words that are listed with a call
WORD = 8  # bytes
NAME_BYTES, REASON_BYTES, MAIL_BYTES = 64, 512, 4096
# Where each begins in a row, in bytes.
OPERATION = 64
REASON = OPERATION + NAME_BYTES
MAIL = REASON + REASON_BYTES
CALLS = MAIL + 2 * MAIL_BYTES
TAGS = 4  # words of CALLS before the tags of calls
ROW_BYTES = CALLS + WORD * (TAGS + WINDOW + WINDOW * MOST_WORDS)

# On x86-64 stores become visible in program order. Elsewhere a fence must come between the data and
# the word that announces it, and between a word and the data read after it; a switch of threads in
# the kernel holds one.
ORDERED = platform.machine() in ("x86_64", "AMD64")

_YIELDS = 3
_LONG_YIELD = 3e-4  # seconds; ranks that only wait hand the core on sooner
_WITHOUT_YIELDS = 300  # waits

Rest = Callable[[int, Callable[[], bool], float], None]


def board_bytes(size: int) -> int:
    """Bytes of a board for `size` ranks, in whole pages."""
    return -(-size * ROW_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE


def order() -> None:
    """Keep loads and stores before this apart from those after it."""
    if not ORDERED:
        os.sched_yield()


class Rows:
    """The rows of ranks that all map `memory`: `bytes[rank]`, and `words[rank]` of 8 bytes."""

    needs_polling = False  # whether `poll` must be called for words to arrive

    def __init__(self, memory: mmap.mmap, *, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.peers = [r for r in range(size) if r != rank]
        self.memory = whole = memoryview(memory)
        self.bytes = [whole[r * ROW_BYTES : (r + 1) * ROW_BYTES] for r in range(size)]
        self.words: list[memoryview[int]] = [row.cast("Q") for row in self.bytes]
        self._page: Any = None

    def ring_by(self, page: Any) -> None:
        """Use a page of board.c to ring peers and to sleep until they ring."""
        self._page = page

    @property
    def rings(self) -> bool:
        """Whether peers ring when they publish, so that a rank can `rest` until then."""
        return self._page is not None

    def rest(self, peer: int, arrived: Callable[[], bool], seconds: float) -> None:
        """Sleep until `peer` publishes something, for `seconds` at most.

        Returns at once where `arrived()`.
        """
        rings = self._page.begin_sleep(peer)
        self._page.sleep(peer, rings, 0.0 if arrived() else seconds)

    def ring(self) -> None:
        """Wake the peers that sleep until this rank publishes something, which it has just done."""
        if self._page is not None:
            self._page.ring()

    def write(self, place: int, data: bytes) -> None:
        """Write into this rank's row; peers see it before the next word that it publishes."""
        self.bytes[self.rank][place : place + len(data)] = data

    def publish(self, word: int, value: int) -> None:
        """Set a word of this rank's row; peers that see it see all that was written before."""
        if not ORDERED:  # which spares the call
            order()
        self.words[self.rank][word] = value
        if self._page is not None:
            self._page.ring()

    def announce(self, word: int, value: int) -> None:
        """Set a word of this rank's row, in no order with other words. From any thread."""
        self.words[self.rank][word] = value

    def poll(self) -> None:
        """Receive what peers on other hosts have published."""

    def receive(self) -> None:
        """As `poll`, from any thread."""

    def flush(self) -> None:
        """Send ranks on other hosts what was written, with no word that announces it."""


class MultiHostRows(Rows):
    """Rows of ranks of several hosts.

    `far` are the ranks on other hosts, `near` the other ranks of this host, each with its number in
    the mesh.
    """

    needs_polling = True

    def __init__(
        self,
        memory: mmap.mmap,
        *,
        rank: int,
        size: int,
        far: Mapping[int, int],
        near: Mapping[int, int],
        wires: Wires,
        name: str,
    ) -> None:
        super().__init__(memory, rank=rank, size=size)
        copies = {r: memoryview(bytearray(ROW_BYTES)) for r in far}
        for r, copy in copies.items():
            self.bytes[r] = copy
            self.words[r] = copy.cast("Q")
        self._far = list(far.values())
        # The bells of the other ranks of this host, with their numbers in the mesh.
        self._near = [(self.words[r], peer) for r, peer in near.items()]
        self._wires = wires
        self._unsent: list[tuple[int, bytes]] = []
        self._yields = Yields()
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
        self._unsent.append((WORD * word, value.to_bytes(WORD, "little")))
        self.flush()
        self.ring()

    def ring(self) -> None:
        if self._near:
            asleep = [peer for words, peer in self._near if words[BELL]]
            if asleep:
                self._wires.nudge(asleep)

    @property
    def rings(self) -> bool:
        return True

    def rest(self, peer: int, arrived: Callable[[], bool], seconds: float) -> None:
        """Sleep until any message comes. See `Rows.rest`.

        `arrived` takes a lock, as `flush` does, which is a fence: so either it sees what a rank of
        this host has published, or that rank, when it rings, sees that this one sleeps.
        """
        if self._yields.until(arrived):
            return
        own = self.words[self.rank]
        own[BELL] = 1
        try:
            if not arrived():
                self._wires.rest(seconds)
        finally:
            own[BELL] = 0

    def announce(self, word: int, value: int) -> None:
        super().announce(word, value)
        self._channel.send(self._far, [(WORD * word, value.to_bytes(WORD, "little"))])

    def poll(self) -> None:
        self._wires.poll()

    def receive(self) -> None:
        self._wires.receive()

    def flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if unsent:
            self._channel.send(self._far, unsent)


class Yields:
    """Yields the core a few times before a rank sleeps: quicker where a late peer waits for it.

    Once another process has kept the core, the next waits do without.
    """

    def __init__(self) -> None:
        self._skipped = 0  # waits to come that do without

    def until(self, arrived: Callable[[], bool]) -> bool:
        """Yield, and return whether what is awaited has `arrived`."""
        if self._skipped:
            self._skipped -= 1
            return False
        for _ in range(_YIELDS):
            start = time.perf_counter()
            os.sched_yield()
            if time.perf_counter() - start > _LONG_YIELD:
                self._skipped = _WITHOUT_YIELDS
            if arrived():
                return True
            if self._skipped:
                break
        return False
