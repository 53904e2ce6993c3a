"""The words by which two ranks know each other: each proves that it has the listener's key.

The listener has handed its key out through the group, and it is never sent here: a process that was
not in that exchange can neither connect nor pose as a rank. What travels afterwards is not
encrypted, as with MPI and NCCL.

    caller                                        listener
    magic, rank, nonce c, mac("hello", c)  ->
                                           <-     nonce a, mac("answer", c, a)
    mac("call", c, a)                      ->
                                           <-     mac("welcome", c, a)

Every mac is made with the key, and also of the caller's rank. The first words tell a rank from a
stranger, the third from a stranger who repeats what a rank has said. After the last, the caller
knows that it was not dropped meanwhile.

A side is a generator, which knows no sockets: it yields the bytes to be sent and how many it waits
for, and is sent these. A `Conversation` is a side on a connection.
"""

from __future__ import annotations

import errno
import hmac
import os
import socket
import struct
from collections.abc import Callable, Generator
from typing import Final

Side = Generator[tuple[bytes, int], bytes, int]

KEY_BYTES: Final = 32

_HELLO = struct.Struct("<4sI16s32s")  # magic, rank, nonce, proof
_ANSWER = struct.Struct("<16s32s")  # nonce, proof
_MAGIC = b"SMW2"
_PROOF = 32


def new_key() -> bytes:
    """A key that nobody can guess. To import `secrets` would take longer than a handshake."""
    return os.urandom(KEY_BYTES)


class Stranger(Exception):
    """The other side does not know the key."""


def call(key: bytes, *, rank: int, peer: int) -> Side:
    """The side of `rank`, which calls `peer`, whose key is `key`. It returns `peer`."""
    nonce = os.urandom(16)
    hello = _HELLO.pack(_MAGIC, rank, nonce, _proof(key, b"hello", rank, nonce))
    answered = yield hello, _ANSWER.size
    other, proof = _ANSWER.unpack(answered)
    _require(proof, _proof(key, b"answer", rank, nonce, other))
    proof = yield _proof(key, b"call", rank, nonce, other), _PROOF
    _require(proof, _proof(key, b"welcome", rank, nonce, other))
    return peer


def answer(key: bytes, expects: Callable[[int], bool], heard: set[bytes]) -> Side:
    """The side of the listener with `key`. It returns the rank of the caller.

    `expects(rank)` says whether the caller can be that rank. `heard` collects the nonces of first
    words, each of which counts once: a caller that repeats one is a stranger at once.
    """
    said = yield b"", _HELLO.size
    magic, rank, nonce, proof = _HELLO.unpack(said)
    if magic != _MAGIC:
        raise Stranger
    _require(proof, _proof(key, b"hello", rank, nonce))
    if nonce in heard or not expects(rank):
        raise Stranger
    heard.add(nonce)
    own = os.urandom(16)
    proof = yield _ANSWER.pack(own, _proof(key, b"answer", rank, nonce, own)), _PROOF
    _require(proof, _proof(key, b"call", rank, nonce, own))
    yield _proof(key, b"welcome", rank, nonce, own), 0
    return int(rank)


class Conversation:
    """A connection that does not block, and this rank's side of the handshake on it.

    `heard` counts the right words of the other side; `result` is there once all has been said.
    """

    def __init__(self, connection: socket.socket, side: Side, *, until: float) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.until = until
        self.heard = 0
        self.result: int | None = None
        self._side = side
        self._said = b""
        self._wanted = 0

    def go_on(self) -> None:
        """Begin; or read what has come, up to the bytes that are awaited, and answer.

        Raises Stranger, or OSError when the connection has ended.
        """
        if not self._wanted:
            self._say(*next(self._side))
        while self.result is None:
            try:
                part = self.connection.recv(self._wanted - len(self._said))
            except BlockingIOError:
                return
            if not part:
                raise ConnectionResetError(errno.ECONNRESET, "the connection was closed")
            self._said += part
            if len(self._said) == self._wanted:
                self._answer()

    def _answer(self) -> None:
        said, self._said = self._said, b""
        try:
            words, wanted = self._side.send(said)
            self.heard += 1
            self._say(words, wanted)
            if not wanted:
                self._side.send(b"")
        except StopIteration as end:
            self.result = end.value

    def _say(self, words: bytes, wanted: int) -> None:
        if words and self.connection.send(words, socket.MSG_NOSIGNAL) < len(words):
            raise ConnectionAbortedError(errno.ECONNABORTED, "the connection takes no words")
        self._wanted = wanted


def _proof(key: bytes, what: bytes, rank: int, *nonces: bytes) -> bytes:
    return hmac.digest(key, what + rank.to_bytes(4, "little") + b"".join(nonces), "sha256")


def _require(proof: bytes, wanted: bytes) -> None:
    if not hmac.compare_digest(proof, wanted):
        raise Stranger
