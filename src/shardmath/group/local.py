"""The ranks of one host, joined by anonymous sockets: our launcher's group.

Rank 0 is the hub: in one exchange every rank sends it a frame and receives the frames of all. There
is no name in the file system, no port and no third process. What fails on the hub fails on every
rank in the same exchange; what fails on another rank shuts its socket, so that the next exchange
fails on all. A group that failed once stays failed.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
import weakref
from collections.abc import Sequence

from shardmath.base.config import Settings
from shardmath.errors import BootstrapError, RankFailure
from shardmath.group.base import GatheringGroup
from shardmath.group.links import Link, receive_all, send_all, tell_failure, too_few_descriptors

_LENGTH = struct.Struct("<Q")


class LocalProcessGroup(GatheringGroup):
    """Ranks on this host that `python -m shardmath run` or `shardmath.spawn` started.

    `sockets` are this rank's ends of `shardmath.group.links.star`; the group owns them. Waits end
    after `timeout` seconds, by default SHARDMATH_STARTUP_TIMEOUT.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        sockets: Sequence[socket.socket],
        *,
        timeout: float | None = None,
    ) -> None:
        peers = range(1, size) if rank == 0 else (0,)
        if not 0 <= rank < size or len(sockets) != len(peers):
            raise ValueError(f"rank {rank} of {size} with {len(sockets)} sockets")
        super().__init__(rank, size)
        self._timeout = Settings.from_environment().startup_timeout if timeout is None else timeout
        self._links = [
            Link(sock, rank=rank, peer=peer) for sock, peer in zip(sockets, peers, strict=True)
        ]
        self._number = 0
        self._broken: str | None = None
        weakref.finalize(self, _close, self._links)  # also where nobody calls close

    @classmethod
    def from_descriptors(
        cls, rank: int, size: int, descriptors: Sequence[int], *, timeout: float | None = None
    ) -> LocalProcessGroup:
        """The group over duplicates of inherited descriptors, which stay open for the next group.

        Raises BootstrapError when one of them is not a connected Unix socket.
        """
        sockets: list[socket.socket] = []
        try:
            for descriptor in descriptors:
                sockets.append(_duplicate(descriptor, rank))
            return cls(rank, size, sockets, timeout=timeout)
        except BaseException:
            for sock in sockets:
                sock.close()
            raise

    @property
    def awaited(self) -> list[int]:
        """The ranks that rank 0 waits for; the others wait for its answer, and do not know."""
        return [link.peer for link in self._links if link.is_awaited and self._rank == 0]

    def allgather_bytes(self, data: bytes) -> list[bytes]:
        """The `data` of every rank, in the order of the ranks. Collective; sizes may differ.

        Raises RankFailure when a rank has ended and BootstrapError when one does not arrive, on
        every rank.
        """
        if self._broken is not None:
            raise BootstrapError(f"rank {self._rank}: this group failed before: {self._broken}")
        if self._nranks == 1:
            return [bytes(data)]
        deadline = time.monotonic() + self._timeout
        try:
            gathered = (self._hub if self._rank == 0 else self._spoke)(bytes(data), deadline)
        except BaseException as error:
            self._broken = str(error) or type(error).__name__
            for link in self._links:
                link.shut()
            raise
        self._number += 1
        return gathered

    def close(self) -> None:
        """Close this rank's sockets: peers that wait for it raise RankFailure."""
        _close(self._links)
        self._broken = self._broken or "it was closed"

    def _hub(self, data: bytes, deadline: float) -> list[bytes]:
        try:
            received = receive_all(self._links, self._number, deadline=deadline)
            parts = [data, *(self._part_of(peer, received[peer]) for peer in sorted(received))]
            # The spokes wait as long as this rank did, and then for the answer.
            send_all(
                self._links, self._number, _join(parts), deadline=time.monotonic() + self._timeout
            )
        except (RankFailure, BootstrapError) as error:
            tell_failure(self._links, error)
            raise
        return parts

    def _part_of(self, peer: int, payload: bytes) -> bytes:
        """The data in what a peer has sent, behind the number of ranks that it was told of."""
        size = int.from_bytes(payload[: _LENGTH.size], "little")
        if size != self._nranks:
            raise BootstrapError(
                f"rank 0 was started as one of {self._nranks} ranks, and rank {peer} as one of "
                f"{size}: set WORLD_SIZE, or what else says how many there are, alike on all ranks"
            )
        return payload[_LENGTH.size :]

    def _spoke(self, data: bytes, deadline: float) -> list[bytes]:
        sent = _LENGTH.pack(self._nranks) + data
        send_all(self._links, self._number, sent, deadline=deadline)
        # A little more than the hub allows itself, so that its account of who is missing wins.
        deadline += min(1.0, 0.25 + self._timeout / 10)
        answer = receive_all(self._links, self._number, deadline=deadline)
        return _split(answer[0], self._nranks)


def _close(links: Sequence[Link]) -> None:
    for link in links:
        link.socket.close()


def _duplicate(descriptor: int, rank: int) -> socket.socket:
    copy = -1
    try:
        copy = os.dup(descriptor)
        return socket.socket(fileno=copy)
    except OSError as error:
        if copy >= 0:
            os.close(copy)
        if error.errno == errno.EMFILE:
            raise too_few_descriptors(rank) from None
        raise BootstrapError(
            f"rank {rank}: descriptor {descriptor} is not a socket of the launcher's "
            f"({error.strerror}); start the program with python -m shardmath run"
        ) from None


def _join(parts: Sequence[bytes]) -> bytes:
    return b"".join(piece for part in parts for piece in (_LENGTH.pack(len(part)), part))


def _split(data: bytes, count: int) -> list[bytes]:
    parts, position = [], 0
    try:
        for _ in range(count):
            (length,) = _LENGTH.unpack_from(data, position)
            position += _LENGTH.size
            parts.append(data[position : position + length])
            position += length
    except struct.error:
        position = -1
    if position != len(data):
        raise BootstrapError("rank 0 sent a malformed answer")
    return parts
