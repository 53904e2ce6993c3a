"""Words of 64 bits on symmetric memory, which one rank sets on another and that one waits for.

A word lies at the same place of every rank's array, or of every rank's signal pad: `word_at` finds
those of the peers from this rank's. A rank that sees the value of a word also sees what its setter
wrote before. These are NVSHMEM's signals; `put_signal` and `wait_signal` of a handle have no
values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np

from shardmath.arrays import library_of
from shardmath.base.immutable import Immutable
from shardmath.context.context import Context, open_contexts
from shardmath.handles.allocation import require_live
from shardmath.handles.rendezvous_state import RendezvousState
from shardmath.symmetric.heap import Location
from shardmath.symmetric.rows import order
from shardmath.transport.base import Bytes, DeviceBytes

if TYPE_CHECKING:
    from shardmath.symmetric.team import Team

WORD = 8
_STATES = "states of pads"


def note_pad(context: Context, state: RendezvousState) -> None:
    """Let `word_at` find words on the pads of `state`, as long as it lives."""
    _states_of_pads(context)[state.pad_buffer.block.address] = state


def _states_of_pads(context: Context) -> WeakValueDictionary[int, RendezvousState]:
    return context.cache(_STATES, WeakValueDictionary)


class Word(Immutable, words="byte {start} of rendezvous {state.number}"):
    """One word on every rank: `start` bytes into the pads of `state`, or into its arrays.

    `stream` is the stream for this rank's uses of it, on GPUs.
    """

    context: Context
    state: RendezvousState
    start: int
    in_pad: bool
    stream: int

    def set(self, peer: int, value: int) -> None:
        """Set the word of rank `peer`, which then sees all that this rank has written there before.

        Raises ValueError for a rank that does not exist, NotImplementedError for one on another
        host, on GPUs.
        """
        context, memory = self.context, self._memory(self._known(peer))
        if isinstance(memory, DeviceBytes):
            self._team.word("set_word", self.stream, memory.address, value)
        elif memory is not None:
            order()
            memory.view(np.uint64)[0] = value
            context.board.ring()
        elif context.team is None:
            words = np.array([value], np.uint64).view(np.uint8)
            context.put(peer, self._location(peer), words)
        else:
            raise NotImplementedError(
                f"rank {peer} is on another host, where no kernel of this GPU can write; put, and "
                "put_signal of the handle, reach it"
            )

    def wait(self, value: int, peer: int | None, *, at_least: bool = False) -> None:
        """Wait until this rank's word is `value`, or `at_least` that; `peer` sets it, if known.

        On a GPU the stream waits, and errors of the wait are raised by the handle. Raises
        OpTimeout, RankFailure where that rank has ended, ValueError where it does not exist.
        """
        context, memory = self.context, self._memory(self.context.rank)
        peer = None if peer is None else self._known(peer)
        assert memory is not None, "a rank's own"
        if isinstance(memory, DeviceBytes):
            self._team.word("await_word", self.stream, memory.address, value, peer, at_least)
            return
        words = memory.view(np.uint64)
        others = [rank for rank in range(context.size) if rank != context.rank]
        missing = (others or [context.rank]) if peer is None else [peer]

        def arrived() -> bool:
            return bool(words[0] >= value if at_least else words[0] == value)

        context.board.enter("wait for a signal's value")
        if not arrived():
            context.board.wait(arrived, lambda: missing, f"wait for the signal {value}")
        order()

    @property
    def _team(self) -> Team:
        assert self.state.team is not None, "made for GPUs"
        return self.state.team

    def _known(self, peer: int) -> int:
        if not 0 <= peer < self.context.size:
            raise ValueError(
                f"rank {self.context.rank}: peer {peer} does not exist; there are "
                f"{self.context.size} ranks"
            )
        return peer

    def _location(self, peer: int) -> Location:
        place = self.state.peers[peer]
        if self.in_pad:
            return place.pad.behind(self.start)
        return place.location.behind(place.array_offset + self.start)

    def _memory(self, peer: int) -> Bytes | DeviceBytes | None:
        """The word of `peer`, for this rank; None where it has no address here."""
        place = self.state.peers[peer]
        memory = (self.state.pads if self.in_pad else self.state.memory)[peer]
        size = place.pad_size if self.in_pad else place.nbytes
        start = self.start + (0 if self.in_pad else place.array_offset)
        if not 0 <= start <= size - WORD:
            raise ValueError(
                f"rank {self.context.rank}: the signal lies beyond the {size} bytes of rank {peer}"
            )
        if isinstance(memory, DeviceBytes):
            return DeviceBytes(memory.address + start, WORD, memory.device)
        return None if memory is None else memory[start : start + WORD]


def word_at(tensor: Any) -> Word:
    """The word with which `tensor` begins, of this rank and of its peers. Local.

    `tensor` lies on a signal pad, or on an array that the ranks have brought to a rendezvous.
    Raises ValueError for any other, and for a word that is not aligned; UseAfterFree.
    """
    library = library_of(tensor, "sigpad")
    spec, address = library.spec(tensor), library.pointer(tensor)
    if spec.nbytes < WORD or address % WORD:
        raise ValueError(f"a signal is {WORD} bytes at a multiple of {WORD}, not {spec}")
    for context in open_contexts():
        found = _found(context, address)
        if found is not None:
            stream = 0 if context.team is None else library.stream(context.team.device.ordinal)
            if context.observer is not None:  # it does not know how words order accesses
                context.observer.look_away()
            return Word(context, *found, stream)
    raise ValueError(
        "the signal is on no signal pad, and on no array that was brought to a rendezvous; take "
        "get_signal_pad(rank) of a handle"
    )


def _found(context: Context, address: int) -> tuple[RendezvousState, int, bool] | None:
    """The rendezvous of `context` that memory belongs to, the place in it, and if in the pad."""
    block = context.heap.find(address)
    if block is None:
        return None
    require_live(block, "sigpad")
    skipped, buffer = address - block.address, block.buffer()
    state = _states_of_pads(context).get(block.address)
    if state is not None:
        return state, skipped, True
    known = {} if buffer is None else buffer.rendezvous_states
    starts = [start for number, start in known if number == context.number and start <= skipped]
    if not starts:
        return None
    return known[context.number, max(starts)], skipped - max(starts), False
