"""Connections between hosts: who may join, and what becomes of what they send."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

import pytest

from shardmath.base import wire
from shardmath.errors import BootstrapError
from shardmath.group import handshake
from shardmath.group.base import GatheringGroup
from shardmath.group.liveness import PeerWatch
from shardmath.transport.far import connect_far
from shardmath.transport.wires import _FRAME, Wires


class Pair:
    """A group of two ranks that are threads: what they gather passes through lists."""

    def __init__(self) -> None:
        self.cards: list[list[bytes | None]] = []
        self.lock = threading.Condition()

    def rank(self, rank):
        return _Rank(self, rank)


class _Rank(GatheringGroup):
    def __init__(self, pair, rank):
        super().__init__(rank, 2)
        self.pair, self.turn = pair, 0

    def allgather_bytes(self, data):
        pair = self.pair
        with pair.lock:
            while len(pair.cards) <= self.turn:
                pair.cards.append([None, None])
            row = pair.cards[self.turn]
            row[self.rank] = data
            pair.lock.notify_all()
            assert pair.lock.wait_for(lambda: None not in row)
        self.turn += 1
        return list(row)


def connected(before=None, timeout=30.0):
    """Both ranks' connections; `before(cards)` runs between the exchange and the calls."""
    pair, made = Pair(), {}

    def be(rank):
        group = pair.rank(rank)
        if before is not None and rank == 1:
            group.allgather_bytes = lambda data: before(_Rank.allgather_bytes(group, data))
        try:
            made[rank] = connect_far(
                group,
                address="127.0.0.1",
                timeout=timeout,
                watch=PeerWatch({}),
                names=["rank 0", "rank 1"],
            )[1 - rank]
        except BootstrapError as error:
            made[rank] = error

    threads = [threading.Thread(target=be, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made[0], made[1]


def wired():
    """The wires of two ranks, and what tells each which peers have ended."""
    watches = PeerWatch({}), PeerWatch({})
    ends = connected()
    return [Wires({1 - r: ends[r]}, watches[r]) for r in (0, 1)], watches


def until(condition, *wires):
    while not condition():
        for one in wires:
            one.poll()


def test_ranks_that_know_the_key_connect():
    first, second = connected()
    first.setblocking(True)
    second.sendall(b"hello")
    assert first.recv(5) == b"hello"
    first.close()
    second.close()


def test_who_does_not_know_the_key_is_no_rank():
    """Strangers of every kind call first: they are turned away, and the rank still connects."""

    def strangers(cards):
        ((_, port),), _, _ = wire.decode(cards[0])
        for text in (
            b"",
            b"GET / HTTP/1.1\r\n\r\n" + bytes(80),
            handshake._HELLO.pack(handshake._MAGIC, 1, bytes(16), bytes(32)),
            handshake._HELLO.pack(handshake._MAGIC, 7, bytes(16), bytes(32)),
        ):
            with socket.create_connection(("127.0.0.1", port)) as one:
                one.sendall(text)
        return cards

    first, second = connected(strangers)
    assert isinstance(first, socket.socket) and isinstance(second, socket.socket)
    first.close()
    second.close()


def elsewhere(cards, endpoints):
    """The cards, where rank 0 tells these endpoints too, before its own."""
    own, key, problem = wire.decode(cards[0])
    return [wire.encode(([*endpoints, *own], key, problem)), cards[1]]


def posing(heard):
    """The endpoint of one who does not know the key, and what was said to it, in `heard`."""
    impostor = socket.create_server(("127.0.0.1", 0))

    def pose():
        with impostor, impostor.accept()[0] as connection, suppress(ConnectionError):
            heard.append(connection.recv(100))
            connection.sendall(bytes(handshake._ANSWER.size))
            heard.append(connection.recv(100))

    threading.Thread(target=pose, daemon=True).start()
    return impostor.getsockname()[:2]


def test_who_does_not_prove_the_key_is_not_the_listener():
    """The caller finds another process behind the address: it says so, and sends no proof."""
    heard = []

    def swapped(cards):
        _, key, problem = wire.decode(cards[0])
        return [wire.encode(([posing(heard)], key, problem)), cards[1]]

    first, second = connected(swapped, timeout=2.0)
    assert isinstance(first, BootstrapError) and isinstance(second, BootstrapError)
    assert "not that rank" in str(second) and "SHARDMATH_ADDRESS" in str(second)
    assert len(heard[0]) == handshake._HELLO.size
    assert heard[1:] in ([], [b""])


def test_a_rank_is_found_at_the_one_of_its_addresses_where_it_answers():
    """At the others there are: nobody, one who is silent, one who poses, and no such name."""
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        places = [one.getsockname()[:2] for one in (silent, closed)]
        first, second = connected(
            lambda cards: elsewhere(cards, [*places, posing([]), ("no such name.invalid", 1)])
        )
    assert first.getpeername() == second.getsockname()
    first.close()
    second.close()


def test_messages_arrive_in_order_and_wait_for_their_channel():
    (one, two), _ = wired()
    sender = one.open("name", 0, lambda *_: None)
    early = [(place, bytes([place]) * place) for place in range(5)]
    sender.send([1], early[:3])
    sender.send([1], early[3:])
    until(lambda: two._early_bytes == 10, two)
    got = []
    channel = two.open("name", 0, lambda *message: got.append(message))
    assert got == [(0, place, data) for place, data in early]
    sender.send([1], [(9, b"now")])
    until(lambda: len(got) == 6, two)
    assert got[-1] == (0, 9, b"now") and two._early_bytes == 0
    channel.close()
    sender.send([1], [(9, b"late")])
    later = one.open("name", 2, lambda *_: None)
    later.send([1], [(1, b"for channel two")])
    until(lambda: two._early_bytes == 15, two)
    two.forget("name")
    assert two._early_bytes == 0 and len(got) == 6
    later.send([1], [(1, b"never")])
    other = one.open("other", 0, lambda *_: None)
    other.send([1], [(0, b"mark")])
    until(lambda: two._early_bytes == 4, two)
    for wires in (one, two):
        wires.close()


def test_more_than_the_connection_takes_is_sent_on_while_waiting():
    (one, two), _ = wired()
    sender = one.open("bulk", 0, lambda *_: None)
    got = bytearray()
    two.open("bulk", 0, lambda rank, place, data: got.extend(data))
    for number in range(400):
        sender.send([1], [(0, bytes([number % 256]) * 60_000)])
    until(lambda: len(got) == 24_000_000, one, two)
    assert got[::60_000] == bytes(number % 256 for number in range(400))
    for wires in (one, two):
        wires.close()


@pytest.mark.parametrize("data", [b"", _FRAME.pack(bytes(16), 0, 0, 1 << 30), bytes(17)])
def test_a_connection_that_ends_or_makes_no_sense_is_a_rank_that_ended(data):
    watch = PeerWatch({})
    first, second = connected()
    wires = Wires({1: first}, watch)
    second.setblocking(True)
    second.sendall(data)
    if len(data) != _FRAME.size:
        second.close()
    until(lambda: watch.dead() == {1}, wires)
    wires.poll()
    wires.close()
    second.close()


def test_the_last_words_arrive_before_the_end():
    (one, two), watches = wired()
    got = []
    two.open("name", 0, lambda *message: got.append(message))
    one.open("name", 0, lambda *_: None).send([1], [(0, b"farewell")])
    closing = threading.Thread(target=one.close)
    closing.start()
    until(lambda: watches[1].dead() == {0}, two)
    closing.join()
    assert got == [(0, 0, b"farewell")]
    two.close()
