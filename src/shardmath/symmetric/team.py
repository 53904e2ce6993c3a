"""A context's ranks as their GPUs see them: pads of signals, and the kernels that wait on them.

`structs` has the layout of a pad, which is that of `kernels/symm.cuh`. A kernel whose wait expires
notes in host memory whom it waited for, and ends; the host raises at its next call or at
`synchronize`. Then everything can be used again: the next call waits anew for a barrier that did
not come. A wait for a rank that has gone, as `departures` knows, ends early in the same
way.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Self

from shardmath.base.caller import caller_line
from shardmath.base.collective_call import settled
from shardmath.base.integers import up
from shardmath.base.lru_cache import LRUCache
from shardmath.cuda.device import Device
from shardmath.cuda.driver import bindings, call, status_of
from shardmath.cuda.kernel import Argument, Kernel, ReadyLaunch, kernel
from shardmath.cuda.stream import StreamOrder
from shardmath.errors import CudaError, OpTimeout, RankFailure
from shardmath.symmetric import structs
from shardmath.symmetric.board import Board
from shardmath.symmetric.departures import Departures, report_of
from shardmath.symmetric.heap import Buffer, Location
from shardmath.symmetric.messages import AFTER_FAILURE
from shardmath.transport.base import DeviceBytes, Transport

CHANNELS = 64  # of a context's team
RESERVED = CHANNELS - 1  # from here on they are the collectives'
_WORD = 8
_LAUNCHES = 512  # that are kept ready
_LAST_KERNELS = 2.0  # seconds that recover() gives GPUs to end what they do
_LONGEST_NAP = 2e-3  # seconds, between two looks at a stream


class _Operation(NamedTuple):
    """The words for an operation whose wait has expired, and for the number of its place.

    `breaks`: the counts that kernels of these ranks keep are in no known state then.
    """

    words: str
    place: str = "channel"
    breaks: bool = False


_OPERATIONS = {
    structs.OF_BARRIER: _Operation("barrier"),
    structs.OF_SIGNAL: _Operation("wait_signal"),
    structs.OF_COLLECTIVE: _Operation("a collective", "block", breaks=True),
    structs.OF_USER: _Operation("a kernel of the user's"),
    structs.OF_FLAG: _Operation("put_signal"),
    structs.OF_PRODUCT: _Operation("a product", "chunk", breaks=True),
    structs.OF_SHARD: _Operation("a product of gathered rows", "part"),
    structs.MISMATCH: _Operation("another collective", breaks=True),
    structs.MISFIT: _Operation("an exchange of other counts", breaks=True),
    structs.OF_WORD: _Operation("a wait for a value", "word"),
}
_REFUSED = {
    structs.NO_CHANNEL: "named channel {seen}; there are {expected}, numbered from 0",
    structs.NO_PEER: "named rank {seen}; there are {expected}, numbered from 0",
    structs.WRONG_RANKS: "was compiled for {seen} ranks, not {expected}; see compile_options",
}
# Errors, which all ranks find alike, of an exchange of rows that GPUs count.
_MISCOUNTS = {
    structs.NO_ROOM: "{seen} rows come to rank {place}, whose out has room for {expected}",
    structs.BAD_ROWS: "chunk {seen} of rank {place} is not within the {expected} rows of its input",
    structs.OTHER_ROWS: "rank {place} exchanges rows of another size, or in another order",
}


class Team:
    """The GPU side of one group of ranks.

    `pads[rank]` is the address of a rank's pad for this device; `own` keeps this rank's alive. The
    operations take a stream's handle and return at once; they can be captured in CUDA graphs and
    replayed. One channel is used by one stream at a time; different channels are independent.
    """

    def __init__(
        self,
        device: Device,
        board: Board,
        own: Buffer,
        pads: Sequence[int],
        *,
        channels: int = CHANNELS,
        departures: Departures | None = None,
        shares_device: bool = False,
    ) -> None:
        self.device = device
        self.channels = channels
        self.rank = board.rank
        self.size = board.size
        self.pads = tuple(pads)
        self.timeout = board.policy.timeout
        self.broken = ""  # why the counts of collectives are in no known state
        self.shares_device = shares_device  # whether a peer computes on the same GPU
        self.meets = False  # whether hosts meet at each call: SHARDMATH_CHECK on some rank
        # The error of all ranks where kernels found that the tags of their calls, by rank, differ.
        self.explain: Callable[[Mapping[int, int]], Exception] | None = None
        # The error where a rank has no room for what it gets in a launch of this tag.
        self.explain_misfit: Callable[[int, int], Exception] | None = None
        self._expired = False  # whether a kernel's wait has ever expired
        self._board = board
        self._own = own
        self._report = report_of(device, structs.gone_place(self.size) // 8 + 1)
        self._notes = self._report.words[:-1]  # what kernels write
        if departures is None and self.size > 1:
            departures = Departures.of(device, board)
            departures.ask(self.gave_up_counts)
        self._departures = departures  # one for all teams of these ranks
        if departures is not None:
            self._report.words[-1] = departures.address
        self._launches: LRUCache[tuple[Any, ...], ReadyLaunch] = LRUCache(_LAUNCHES)
        self._orders: dict[int, StreamOrder] = {}  # of `ordered_barrier`, by channel

    def with_pads(
        self, own: Buffer, pads: Sequence[int], far: Mapping[int, Location], channels: int
    ) -> Self:
        """A team of the same ranks with other pads; `far` says where those of other hosts lie."""
        return type(self)(
            self.device,
            self._board,
            own,
            pads,
            channels=channels,
            departures=self._departures,
            shares_device=self.shares_device,
        )

    @property
    def defines(self) -> tuple[str, ...]:
        """Macros with which a kernel that includes symm.cuh is compiled."""
        return (f"SHARDMATH_RANKS={self.size}",)

    def kernel(self, file: str, function: str, defines: Sequence[str] = (), **how: Any) -> Kernel:
        """A kernel for this number of ranks. `how` goes to `cuda.kernel.kernel`."""
        return kernel(self.device, file, function, (*self.defines, *defines), **how)

    @property
    def ring_order(self) -> list[int]:
        """All ranks, from the next one to this one: every rank begins with another one."""
        return [(self.rank + step) % self.size for step in range(1, self.size + 1)]

    def packed(self, timeout: float | None = None) -> bytes:
        """The struct `Team` of symm.cuh. `timeout` in seconds; None is the context's."""
        limit = self.timeout if timeout is None else timeout
        nanoseconds = max(1, min(int(limit * 1e9), 1 << 62))
        words = (self.channels, 0, nanoseconds, self._report.address, *self.pads)
        return struct.pack(f"iiIIQQ{self.size}Q", self.rank, self.size, *words)

    @property
    def report_address(self) -> int:
        """The address of the word that is not 0 once a kernel has reported something."""
        return int(self._notes.ctypes.data)

    # -- operations on a stream --------------------------------------------------------------------

    def barrier(self, stream: int, *, channel: int = 0, timeout: float | None = None) -> None:
        """Put a barrier of all ranks on `stream`: they see after it what was written before."""
        self.device.activate()
        self.enqueue_barrier(stream, channel=channel, timeout=timeout)

    def enqueue_barrier(
        self, stream: int, *, channel: int = 0, timeout: float | None = None
    ) -> None:
        """Put a barrier on `stream`, for a thread that has the device's context already."""
        self.check()
        self._require(channel)
        if self.size > 1:
            tail = struct.pack("Ii", channel, 0)
            self._launch("team_barrier", stream, timeout, tail, threads=self._barrier_threads)

    def ordered_barrier(self, stream: int, *, channel: int, timeout: float | None = None) -> None:
        """`barrier`, after the last ordered one of its channel, on whichever stream that was."""
        self._require(channel)
        order = self._orders.get(channel)
        if order is None:
            order = self._orders[channel] = StreamOrder(self.device)
        with order.section(stream):
            self.enqueue_barrier(stream, channel=channel, timeout=timeout)

    def flag(
        self,
        function: str,
        peer: int,
        stream: int,
        *,
        slot: int,
        channel: int,
        timeout: float | None = None,
    ) -> None:
        """`raise_flag` or `lower_flag` of signals.cu, on the 32-bit word at address `slot`."""
        self.check()
        self.device.activate()
        self._launch(function, stream, timeout, struct.pack("QIi", slot, channel, peer))

    def word(
        self,
        function: str,
        stream: int,
        address: int,
        value: int,
        peer: int | None = None,
        at_least: bool = False,
    ) -> None:
        """`set_word` or `await_word` of signals.cu, on the word of 64 bits at `address`.

        `peer` sets the word that is waited for; None where it is not known who.
        """
        self.check()
        self.device.activate()
        src = -1 if peer is None else peer
        tail = struct.pack("QQiI", address, value & (1 << 64) - 1, src, at_least)
        self._launch(function, stream, None, tail)

    def _launch(
        self,
        function: str,
        stream: int,
        timeout: float | None,
        tail: bytes,
        *,
        file: str = "signals",
        threads: int = 1,
    ) -> None:
        """Launch a kernel of one block. `tail` is its argument after the struct `Team`."""
        key = (function, timeout, tail)
        launch = self._launches.find(key)
        if launch is None:
            argument = Argument(self.packed(timeout) + tail)
            made, early = self.kernel(file, function), file == "signals"
            launch = self._launches.keep(key, made.ready(1, threads, argument, early=early))
        launch.put(stream)

    @property
    def _barrier_threads(self) -> int:
        return min(1024, up(self.size, 32))

    def _require(self, channel: int) -> None:
        if not 0 <= channel < self.channels:
            raise ValueError(
                f"channel {channel} does not exist: there are {self.channels}, numbered from 0"
            )

    # -- errors ------------------------------------------------------------------------------------

    def synchronize(self, stream: int) -> None:
        """Wait for `stream`; raises as `check` does. A signal's handler may interrupt it."""
        self.device.activate()
        busy, start = bindings().CUresult.CUDA_ERROR_NOT_READY, time.perf_counter()
        while status_of("cuStreamQuery", stream)[0] == busy:
            time.sleep(min((time.perf_counter() - start) / 8, _LONGEST_NAP))
        call("cuStreamSynchronize", stream)
        self.check()

    def check(self) -> None:
        """Raise what a kernel has reported: OpTimeout, RankFailure for a rank that has ended, or
        ValueError for a channel or a rank that does not exist.

        Costs one load where nothing has gone wrong. After the error, the team can be used again.
        """
        if self._notes[0]:
            raise settled(self._reported_error())

    def check_collectives(self) -> None:
        """`check`, for reports after which no collective can follow."""
        if self._notes[0] and self.gave_up_counts():
            raise settled(self._reported_error())

    def require_usable(self) -> None:
        """`check`, and raise RankFailure after an operation of these ranks was given up."""
        self.check()
        if self.broken:
            raise RankFailure(
                f"{self._who()}: an earlier operation of this context was given up "
                f"({self.broken}); {AFTER_FAILURE}"
            )

    def gave_up(self) -> bool:
        """Whether an operation may have ended here before the peers were done with it."""
        return self._expired or bool(self._notes[0]) or self._board.failure is not None

    def failed(self) -> bool:
        """Whether a collective, or the group, has ended here before the peers were done."""
        return self.gave_up_counts() or self._board.failure is not None

    def gave_up_counts(self) -> bool:
        """Whether a wait has expired here that leaves peers waiting for this rank in vain."""
        if self.broken:
            return True
        late = self._notes[1:].reshape(self.size, 3)[:, 0]
        return bool(self._notes[0]) and any(_breaks_counts(int(operation)) for operation in late)

    def abort(self) -> None:
        """End all waits of kernels in teams of these ranks: their group is at its end."""
        if self._departures is not None:
            self._departures.end_all()

    def leave(self) -> None:
        """Tell the peers, once this rank's kernels have ended, that they have. See Departures."""
        if self._departures is not None:
            self._departures.leave()

    def wait_for_kernels(self) -> None:
        """When all ranks leave: wait until their kernels, which wait no more, have ended."""
        if self._departures is not None:
            self._departures.wait(min(_LAST_KERNELS, self._board.policy.timeout))

    @property
    def drop(self) -> Callable[[], None] | None:
        """`leave` for the garbage collector, without a reference to the team; None on one rank."""
        return None if self._departures is None else self._departures.drop

    def _reported_error(self) -> Exception:
        with suppress(CudaError):  # other waits end now, and report, too
            self.device.synchronize()
        self._expired = True
        late = self._notes[1:].reshape(self.size, 3).copy()
        self._notes[:] = 0
        call("cuMemsetD8", self.pads[self.rank] + structs.FAILED, 0, 8)
        refused = late[self.rank].tolist()
        if refused[0] in _REFUSED:
            reason = _REFUSED[refused[0]].format(expected=refused[1], seen=_signed(refused[2]))
            return ValueError(f"{self._who()}: a kernel {reason}")
        miscount = _MISCOUNTS.get(refused[0] & 0xFFFFFFFF)
        if miscount is not None:
            place = refused[0] >> 32
            self.broken = miscount.format(expected=refused[1], seen=refused[2], place=place)
            error = ValueError(f"in an exchange whose counts are on GPUs {self.broken}")
            return self._board.concluded(error, by_all=True)
        ranks = [rank for rank in range(self.size) if late[rank, 0]]
        reasons = [
            f"{self._board.names.described([rank])} had come to {seen} of {expected} in "
            f"{_place(int(operation))}"
            for rank in ranks
            for operation, expected, seen in [late[rank].tolist()]
        ]
        if any(_breaks_counts(int(late[rank, 0])) for rank in ranks):
            self.broken = "; ".join(reasons)
        different = [rank for rank in ranks if late[rank, 0] & 0xFFFFFFFF == structs.MISMATCH]
        if different and self.explain is not None:
            own = int(late[different[0], 1])
            tags = dict.fromkeys(range(self.size), own)
            tags |= {rank: int(late[rank, 2]) for rank in different}
            return self._board.concluded(self.explain(tags), by_all=True)
        if refused[0] & 0xFFFFFFFF == structs.MISFIT and self.explain_misfit is not None:
            misfit = self.explain_misfit(refused[1], refused[2])
            return self._board.concluded(misfit, by_all=True)
        gone = self._board.peers.silent_error(ranks)
        if gone is not None:
            return self._board.concluded(gone)
        return OpTimeout(
            f"{self._who()} waited in vain: {'; '.join(reasons)}; raise SHARDMATH_TIMEOUT, or the "
            "timeout of the call, if they were only slow",
            ranks,
        )

    def _who(self) -> str:
        """This rank, its GPU and the user's line, for a message."""
        name = self._board.names.name(self.rank)
        return f"{name} on GPU {self.device.ordinal}, {caller_line()}"


class FarTeam(Team):
    """The GPUs of a context whose ranks are on several hosts: signals to other hosts are copies.

    The `pads` of ranks on other hosts have no address here, so they are 0, and no kernel can write
    there; `locate` says where they lie. A barrier is therefore three steps on the stream: a kernel
    that writes down the round, `put` of that word to each rank elsewhere, a kernel that waits for
    all. A signal is counted by a kernel, and `put`. Words and deadlines are as on one host.
    """

    def locate(
        self, transport: Transport, numbers: Sequence[int], places: Mapping[int, Location]
    ) -> None:
        """Say how ranks on other hosts are reached: their numbers for `transport`, and their pads.

        To be called once, before the first barrier.
        """
        self.transport = transport
        self.numbers = tuple(numbers)
        self._far = dict(places)

    def with_pads(
        self, own: Buffer, pads: Sequence[int], far: Mapping[int, Location], channels: int
    ) -> Self:
        team = super().with_pads(own, pads, far, channels)
        team.locate(self.transport, self.numbers, far)
        return team

    def enqueue_barrier(
        self, stream: int, *, channel: int = 0, timeout: float | None = None
    ) -> None:
        """Put a barrier of all ranks on `stream`: what was written before, all see after."""
        self.check()
        self._require(channel)
        tail, threads = struct.pack("Ii", channel, 0), self._barrier_threads
        self._launch("advance", stream, timeout, tail, file="far_signals", threads=threads)
        for rank in self._far:
            self.transport.quiet(self.numbers[rank], stream)
        for rank in self._far:
            inbox = structs.BARRIER * self.size + _WORD * self.rank
            self._put_word(rank, channel, structs.ROUND, inbox, stream)
        self._launch("await_round", stream, timeout, tail, file="far_signals", threads=threads)

    def flag(
        self,
        function: str,
        peer: int,
        stream: int,
        *,
        slot: int,
        channel: int,
        timeout: float | None = None,
    ) -> None:
        """See Team. Two counters of the channel take the place of the word at `slot`."""
        self.check()
        self.device.activate()
        tail = struct.pack("Ii", channel, peer)
        self._launch(function, stream, timeout, tail, file="far_signals")
        if peer in self._far:
            raises = function == "raise_flag"
            counter, half = (structs.SENT, 0) if raises else (structs.TAKEN, _WORD)
            self._put_counter(peer, channel, counter, half, stream)

    def _put_counter(self, peer: int, channel: int, counter: int, half: int, stream: int) -> None:
        """Put a counter into this half of `peer`'s inbox of signals, after earlier puts."""
        self.transport.quiet(self.numbers[peer], stream)
        inbox = structs.SIGNAL * self.size + 2 * _WORD * self.rank + half
        self._put_word(peer, channel, counter, inbox, stream)

    def _put_word(self, peer: int, channel: int, counter: int, inbox: int, stream: int) -> None:
        """Put this rank's word of `counter` for `peer` at byte `inbox` of the peer's channel."""
        start = structs.PAD_BYTES + structs.CHANNEL_BYTES * self.size * channel
        address = self.pads[self.rank] + start + counter * self.size + _WORD * peer
        word, pad = DeviceBytes(address, _WORD, self.device.name), self._far[peer]
        place = pad.offset + start + inbox
        self.transport.put(self.numbers[peer], pad.segment, place, word, stream)


def _breaks_counts(operation: int) -> bool:
    """Whether an expired wait of this kind and place leaves counts in no known state."""
    kind, number = operation & 0xFFFFFFFF, operation >> 32
    if kind == structs.OF_BARRIER:
        return number >= RESERVED
    return kind in _MISCOUNTS or (kind in _OPERATIONS and _OPERATIONS[kind].breaks)


def _signed(word: int) -> int:
    """A number of 32 bits from a kernel, which may be negative."""
    return word - (1 << 32) if word >> 31 == 1 else word


def _place(operation: int) -> str:
    kind, number = operation & 0xFFFFFFFF, operation >> 32
    known = _OPERATIONS.get(kind, _Operation(f"operation {kind}"))
    return f"{known.words}, {known.place} {number}"
