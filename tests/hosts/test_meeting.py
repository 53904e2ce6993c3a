"""How ranks know each other at start-up, what strangers can take of them, and where they listen."""

from __future__ import annotations

import errno
import ipaddress
import os
import select
import socket
import threading
from contextlib import ExitStack, closing, suppress

import pytest

from shardmath.errors import BootstrapError, RankFailure
from shardmath.group import handshake, meeting
from shardmath.group.handshake import Stranger
from shardmath.group.liveness import PeerWatch
from shardmath.group.meeting import Call, Place, meet
from shardmath.transport import far

KEY = bytes(range(32))
NAMES = ["rank 0", "rank 1", "rank 2"]


# -- the words -------------------------------------------------------------------------------------


def first_words(key=KEY, rank=1):
    side = handshake.call(key, rank=rank, peer=0)
    return side, next(side)[0]


def listener(nonces, key=KEY):
    side = handshake.answer(key, lambda rank: rank in (1, 2), nonces)
    assert next(side) == (b"", handshake._HELLO.size)
    return side


def test_both_sides_prove_the_key():
    caller, words = first_words()
    answering = listener(set())
    words, wanted = answering.send(words)
    words, _ = caller.send(words)
    assert len(words) == wanted
    words, wanted = answering.send(words)
    assert wanted == 0
    with pytest.raises(StopIteration) as ends:
        caller.send(words)
    assert ends.value.value == 0
    with pytest.raises(StopIteration) as ends:
        answering.send(b"")
    assert ends.value.value == 1


def test_only_first_words_of_a_rank_are_answered():
    nonces = set()
    _, words = first_words()
    changed = [
        words[:place] + bytes([words[place] ^ 1]) + words[place + 1 :] for place in range(56)
    ]
    for said in (*changed, first_words(bytes(32))[1], first_words(rank=3)[1], bytes(56)):
        with pytest.raises(Stranger):
            listener(nonces).send(said)
    listener(nonces).send(words)
    with pytest.raises(Stranger):  # who repeats what a rank has said
        listener(nonces).send(words)


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_no_later_word_is_believed_that_is_wrong(turn):
    """The listener's answer, the caller's proof, the listener's welcome."""
    caller, words = first_words()
    sides = [listener(set()), caller]
    for number in range(turn + 1):
        words, _ = sides[number % 2].send(words)
    with pytest.raises(Stranger):
        sides[(turn + 1) % 2].send(bytes([words[0] ^ 1]) + words[1:])


# -- the meeting -----------------------------------------------------------------------------------


def listening(backlog=meeting.BACKLOG):
    one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one.bind("")  # the system finds a name
    one.listen(backlog)
    return one


def called(one):
    name = one.getsockname()
    return Call([Place("there", socket.AF_UNIX, socket.SOCK_SEQPACKET, name)], KEY)


class Meeting(threading.Thread):
    """A rank in a thread: `end()` is what `meet` returns or raises."""

    def __init__(self, rank, one, calls=(), awaited=(), timeout=30.0):
        super().__init__(daemon=True)
        self.arguments = (rank, [one], KEY)
        self.options = {"calls": dict(calls), "awaited": awaited, "timeout": timeout}
        self.start()

    def run(self):
        try:
            with closing(PeerWatch({})) as watch:
                self.result = meet(*self.arguments, names=NAMES, watch=watch, **self.options)
        except (OSError, RankFailure) as error:  # BootstrapError is one
            self.result = error

    def end(self):
        self.join(60)
        return self.result


def stranger(one):
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(30)
    connection.connect(one.getsockname())
    return connection


def close(*results):
    for result in results:
        for connection in result.values():
            connection.close()


def test_all_ranks_meet_whoever_comes_first():
    doors = [listening() for _ in range(3)]
    calls = [{peer: called(doors[peer]) for peer in range(rank)} for rank in range(3)]
    later = [range(rank + 1, 3) for rank in range(3)]
    for order in ((0, 1, 2), (2, 1, 0)):
        ranks = {rank: Meeting(rank, doors[rank], calls[rank], later[rank]) for rank in order}
        made = [ranks[rank].end() for rank in range(3)]
        for rank, peer in ((0, 1), (0, 2), (1, 2)):
            made[rank][peer].send(b"%d" % peer)
            made[peer][rank].setblocking(True)
            assert made[peer][rank].recv(9) == b"%d" % peer
        close(*made)
    for door in doors:
        door.close()


def test_a_full_backlog_is_waited_for(monkeypatch):
    put_off, refused = meeting._Caller.put_off, threading.Event()

    def told(self, place, reason):
        assert reason == os.strerror(errno.EAGAIN)
        refused.set()
        put_off(self, place, reason)

    monkeypatch.setattr(meeting._Caller, "put_off", told)
    with listening(backlog=0) as one, stranger(one):
        caller = Meeting(1, one, {0: called(one)})
        assert refused.wait(30)
        host = Meeting(0, one, awaited=[1])
        close(caller.end(), host.end())


def test_whoever_has_said_something_right_is_not_dropped_for_those_who_have_not(monkeypatch):
    monkeypatch.setattr(meeting, "_HELD", 4)
    hold, most = meeting._Meeting._hold, []

    def counted(self, connection):
        hold(self, connection)
        most.append(len(self._held))

    monkeypatch.setattr(meeting._Meeting, "_hold", counted)
    with listening() as one, ExitStack() as stack:
        host = Meeting(0, one, awaited=[1])
        known = stack.enter_context(stranger(one))
        side, words = first_words()
        known.send(words)
        words, _ = side.send(known.recv(100))
        strangers = [stack.enter_context(stranger(one)) for _ in range(20)]
        for oldest in strangers[:16]:
            assert oldest.recv(1) == b""
        known.send(words)
        with pytest.raises(StopIteration):
            side.send(known.recv(100))
        close(host.end())
        assert max(most) == 1 + 4
        assert all(last.recv(1) == b"" for last in strangers[16:])  # the meeting is over


def test_a_stranger_has_one_deadline_for_all_its_words(monkeypatch):
    monkeypatch.setattr(meeting, "_PATIENCE", 0.2)
    with listening() as one, stranger(one) as slow:
        host = Meeting(0, one, awaited=[1], timeout=60.0)
        ended = select.poll()
        ended.register(slow, select.POLLIN)
        _, words = first_words()
        said = 0
        while not ended.poll(50):  # each byte comes within the time that all of them have
            with suppress(BrokenPipeError):
                slow.send(words[said : said + 1])
            said += 1
        assert 0 < said < len(words)
        close(Meeting(1, one, {0: called(one)}).end(), host.end())


class Short(socket.socket):
    """A listener that fails so often with `code` before it accepts."""

    code, left = 0, 0

    def accept(self):
        if self.left:
            type(self).left -= 1
            raise OSError(self.code, os.strerror(self.code))
        return super().accept()


@pytest.mark.parametrize(
    ("code", "times", "strangers"),
    [
        (errno.ECONNABORTED, 3, 0),
        (errno.EPROTO, 100, 0),
        (errno.ENFILE, 9, 0),
        (errno.ENOBUFS, 9, 1),
        (errno.EMFILE, 5, 9),
    ],
)
def test_a_start_outlives_what_accepting_raises(monkeypatch, code, times, strangers):
    with ExitStack() as stack:
        one = stack.enter_context(Short(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        one.bind("")
        one.listen(100)
        for _ in range(strangers):
            stack.enter_context(stranger(one))
        host = Meeting(0, one, awaited=[1])
        answered = stack.enter_context(stranger(one))
        answered.send(bytes(handshake._HELLO.size))
        assert answered.recv(1) == b""  # by now those who came before it are held
        monkeypatch.setattr(Short, "code", code)
        monkeypatch.setattr(Short, "left", times)
        close(Meeting(1, one, {0: called(one)}).end(), host.end())
        assert Short.left == 0


def test_too_few_descriptors_end_a_start_that_holds_nobody():
    with Short(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
        one.bind("")
        one.listen(100)
        Short.code, Short.left = errno.EMFILE, 1 << 30
        try:
            with stranger(one):
                end = Meeting(0, one, awaited=[1]).end()
        finally:
            Short.left = 0
    assert isinstance(end, OSError) and end.errno == errno.EMFILE


def test_who_does_not_come_is_named_at_the_deadline():
    with listening() as one, listening() as other:
        end = Meeting(1, one, {0: called(other)}, [2], timeout=0.05).end()
    assert isinstance(end, BootstrapError)
    assert str(end).startswith("rank 1 waited 0.05 s at start-up for rank 0, rank 2")


def nobody():
    """Where a rank listened, and does no more."""
    with listening() as one:
        return called(one)


def test_a_rank_that_listens_no_more_is_not_waited_for():
    with listening() as one:
        end = Meeting(1, one, {0: nobody()}, [2]).end()
    assert str(end) == "rank 1 cannot reach rank 0 (there: Connection refused)"


@pytest.mark.parametrize("late", [False, True], ids=["that were met", "that come later"])
def test_who_gives_up_tells_the_others(late):
    """Rank 2 cannot reach rank 0; rank 1 hears of it, and tells rank 3, which 2 has not met."""
    doors = [listening() for _ in range(4)]
    three = Meeting(3, doors[3], {1: called(doors[1])})
    if not late:
        one = Meeting(1, doors[1], {0: called(doors[0])}, [2, 3])
    two = Meeting(2, doors[2], {0: nobody(), 1: called(doors[1])}, [3])
    if late:
        one = Meeting(1, doors[1], {0: called(doors[0])}, [2, 3])
    cause = "rank 2 cannot reach rank 0 (there: Connection refused)"
    assert str(two.end()) == cause
    assert str(one.end()) == f"rank 1: told by {cause}"
    met = three.end()  # it had only one to meet
    assert isinstance(met, dict) or cause in str(met)
    close(*[met] * isinstance(met, dict))
    for door in doors:
        door.close()


def test_who_hangs_up_and_does_not_come_back_is_not_waited_for():
    doors = [listening() for _ in range(2)]
    zero = Meeting(0, doors[0], awaited=[1, 2])
    close(Meeting(1, doors[1], {0: called(doors[0])}).end())
    end = zero.end()
    assert isinstance(end, RankFailure) and end.ranks == (1,)
    assert str(end) == "rank 0 at start-up: rank 1 has hung up"
    for door in doors:
        door.close()


# -- where a rank listens --------------------------------------------------------------------------


def own_addresses():
    """What this host is called by where nothing is set."""
    endpoints, listeners = far.listen("")
    for one in listeners:
        one.close()
    return {host for host, _ in endpoints}


def resolving(monkeypatch, name, *addresses):
    """Let `name` stand for these addresses."""
    real = socket.getaddrinfo

    def found(host, port, **options):
        if host not in (name, name.encode()):
            return real(host, port, **options)
        return [each for one in addresses for each in real(one, port, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", found)


@pytest.mark.parametrize(
    ("address", "stands_for", "told", "bound"),
    [
        ("", [], None, None),
        ("127.0.0.1", [], ["127.0.0.1"], ["127.0.0.1"]),
        ("127.0.0.2", [], ["127.0.0.2"], ["127.0.0.2"]),
        ("node.test", ["127.0.0.1"], ["node.test"], None),  # as many hosts call themselves
        ("node.test", ["198.51.100.9"], ["node.test"], None),  # behind a translation of addresses
        ("198.51.100.9", [], ["198.51.100.9"], None),
        ("no such name.invalid", [], ["no such name.invalid"], None),
        ("0.0.0.0", [], ["0.0.0.0"], None),
        ("::", [], ["::"], None),
    ],
)
def test_a_rank_listens_where_its_peers_are_told(monkeypatch, address, stands_for, told, bound):
    own = own_addresses()
    if stands_for:
        resolving(monkeypatch, address, *stands_for)
    endpoints, listeners = far.listen(address)
    places = [one.getsockname() for one in listeners]
    for one in listeners:
        one.close()
    assert {host for host, _ in endpoints} == set(told or own)
    assert {place[0] for place in places} == set(bound or own)
    assert [port for _, port in endpoints] == [place[1] for place in places]
    assert not any(ipaddress.ip_address(place[0]).is_unspecified for place in places)


def test_a_rank_listens_at_every_own_address_of_a_name(monkeypatch):
    resolving(monkeypatch, "node.test", "198.51.100.9", *own_addresses())
    endpoints, listeners = far.listen("node.test")
    for one in listeners:
        one.close()
    assert {host for host, _ in endpoints} == own_addresses() - {"127.0.0.1"}


@pytest.mark.skipif(not socket.has_ipv6, reason="this Python knows no IPv6")
def test_ranks_meet_at_an_address_of_version_six():
    try:
        endpoints, listeners = far.listen("::1")
    except OSError as error:
        pytest.skip(f"there is no ::1 here: {error}")
    assert [host for host, _ in endpoints] == ["::1"]
    host = Meeting(0, listeners[0], awaited=[1])
    made = Meeting(1, listeners[0], {0: far._call(endpoints, KEY)}).end()
    assert made[0].getpeername()[:2] == endpoints[0]
    close(made, host.end())
    listeners[0].close()


def test_a_rank_that_can_listen_nowhere_says_so(monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))

    monkeypatch.setattr(socket, "create_server", refuse)
    with pytest.raises(
        OSError, match=r"listen nowhere \(.*127.0.0.1: Cannot assign.*_ADDRESS sets"
    ):
        far.listen("127.0.0.1")
