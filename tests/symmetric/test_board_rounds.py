"""Rounds of a board, by Python and by the compiled module: the same table, ranks as threads."""

from __future__ import annotations

import mmap
from concurrent.futures import ThreadPoolExecutor

import pytest

from built import module_from_c
from shardmath.errors import RankFailure
from shardmath.symmetric import board, rows, waiting
from shardmath.symmetric.board import Board
from shardmath.symmetric.rows import Rows, board_bytes
from shardmath.symmetric.waiting import WaitPolicy

CHUNK = board._CHUNK


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return module_from_c(board, "board.c", "_board", tmp_path_factory.mktemp("board"))


@pytest.fixture(params=["python", "compiled"])
def way(request, monkeypatch):
    """How rounds are done: the boards of the test get this."""
    found = None if request.param == "python" else request.getfixturevalue("compiled")
    monkeypatch.setattr(board, "extension", lambda _: found)
    return found


def boards(size, spin=50e-6):
    memory = mmap.mmap(-1, board_bytes(size))
    return [board_of(memory, rank, size, spin) for rank in range(size)]


def board_of(memory, rank, size, spin=50e-6):
    return Board(
        Rows(memory, rank=rank, size=size),
        watch=None,
        numbers=range(size),
        processes=[f"thread {each}" for each in range(size)],
        policy=WaitPolicy(60, 60, spin),
    )


# Bytes of each rank's text, and of its payload.
LENGTHS = [
    ((0, 0), (0, 0), (0, 0)),
    ((1, 0), (1, 0), (1, 0)),
    ((7, 0), (0, 9), (4000, 3)),
    ((CHUNK - 1, 0), (CHUNK, 0), (CHUNK + 1, 0)),
    ((CHUNK - 5, 5), (CHUNK - 5, 6), (0, CHUNK)),
    ((3, 0), (2 * CHUNK, CHUNK), (2 * CHUNK + 9, 1)),
    ((16, 1024), (16, 1024), (16, 1024)),
]


def text(rank, number, length):
    return bytes((rank * 7 + number + i) % 251 for i in range(length))


@pytest.mark.parametrize("spin", [0.0, 1e-6, 50e-6])
@pytest.mark.parametrize("size", [2, 3])
def test_all_get_all_texts_and_payloads(way, size, spin):
    """Short and long, again and again; where none spins each rank finds the others late."""

    def program(own):
        found = []
        for number, lengths in enumerate(LENGTHS):
            head, payload = (text(own.rank, number, length) for length in lengths[own.rank])
            found.append(own.exchange_raw("table", head, payload))
            own.barrier()
        return found

    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(program, boards(size, spin)))
    want = [
        tuple(
            tuple(text(rank, number, lengths[rank][part]) for rank in range(size))
            for part in (0, 1)
        )
        for number, lengths in enumerate(LENGTHS)
    ]
    assert results == [want] * size


def test_a_rank_that_has_taken_its_arrival_back_has_not_come(way):
    """Of three, one gives up the barrier when another has seen it: nobody comes out."""
    one, other, third = boards(3, spin=0.0)
    for each in (other, third):
        each._rows.publish(board.BARRIER, 2)
    third.fail("its time has passed")
    with pytest.raises(RankFailure, match=r"rank 2 .* gave up: its time has passed"):
        one.barrier()


def test_both_ways_meet(compiled, monkeypatch):
    """A rank where nothing was compiled agrees with one where it was."""
    memory, pair = mmap.mmap(-1, board_bytes(2)), []
    for rank, found in enumerate((compiled, None)):
        monkeypatch.setattr(board, "extension", lambda _, found=found: found)
        pair.append(board_of(memory, rank, 2))

    def program(own):
        return [own.exchange_raw("x", text(own.rank, number, 9))[0] for number in range(50)]

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(program, pair))
    assert results == [[tuple(text(r, number, 9) for r in range(2)) for number in range(50)]] * 2


@pytest.mark.parametrize("size", [2, 3])
def test_texts_that_were_expected_are_not_made_anew(way, size):
    """Equal ones are the very tuple; one that is longer, shorter or different is seen."""
    turns = [(b"same",) * size, (b"sam",) * size, (b"some",) * size, (b"", *[b"same"] * (size - 1))]
    turns += [(b"same",) * (size - 1), (b"same",) * (size + 1), None]
    texts = (b"same",) * size

    def program(own):
        found = []
        for expected in turns:
            told, payloads = own.exchange_raw("x", texts[own.rank], b"%d" % own.rank, expected)
            assert payloads == tuple(b"%d" % rank for rank in range(size))
            found.append((told == texts, told is expected))
        return found

    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(program, boards(size)))
    assert results == [[(True, True)] + [(True, False)] * (len(turns) - 1)] * size


def test_a_mailbox_of_another_round_is_refused(way):
    one, other = boards(2)
    mailbox = board.MAIL + board.MAIL_BYTES  # of round 1
    other._rows.write(mailbox, board._MAIL_HEAD.pack(3, 5, 0) + b"wrong")
    other._rows.publish(board.EXCHANGE, 2)
    with pytest.raises(RankFailure, match="published round 1 with the message of round 3"):
        one.exchange_raw("x", b"text")
    assert one.failure


def test_who_has_left_waits_for_nobody(way):
    one, _ = boards(2)
    one.leave("close() has ended it")
    with pytest.raises(RankFailure, match="this rank has left the context: close"):
        one.barrier()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_who_sleeps_is_woken(compiled, size, monkeypatch):
    """Nobody wakes by itself: one lost ring, and the ranks sleep on. Long messages are Python's."""
    for module in (board, waiting):
        monkeypatch.setattr(module, "LONGEST_REST", 3600.0)
    monkeypatch.setattr(board, "extension", lambda _: compiled)

    def program(own):
        for number in range(400):
            length = CHUNK + 1 if number % 8 == own.rank else 9
            told, _ = own.exchange_raw("x", text(own.rank, number, length))
            assert told[own.rank] == text(own.rank, number, length)
            own.barrier()
        return own.rounds, own.barriers

    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(program, boards(size, spin=0.0)))
    assert len(set(results)) == 1 and results[0][1] == 400


def test_a_peer_that_gives_up_wakes_who_sleeps_for_it(compiled, monkeypatch):
    for module in (board, waiting):
        monkeypatch.setattr(module, "LONGEST_REST", 3600.0)
    monkeypatch.setattr(board, "extension", lambda _: compiled)
    one, other = boards(2, spin=0.0)

    def give_up():
        while not any(memory[8 * rows.BELL : 8 * rows.BELL + 8]):
            pass
        other.fail("it has had enough")

    memory = one._rows.bytes[0]
    with ThreadPoolExecutor(1) as pool:
        given_up = pool.submit(give_up)
        with pytest.raises(RankFailure, match="it has had enough"):
            one.barrier()
        given_up.result()


def test_bounds_are_checked(compiled):
    memory = bytearray(2 * 192)
    good = [memory, 0, 2, 192, 64, 48, 0.0, 0.0]
    for index, wrong in (
        (1, 2),
        (1, -1),
        (2, 0),
        (2, 3),
        (3, 384),
        (3, 128),
        (4, 12),
        (5, 80),
        (4, 56),
        (6, -1.0),
        (7, float("nan")),
    ):
        with pytest.raises(ValueError, match="no such rows"):
            compiled.Page(*good[:index], wrong, *good[index + 1 :])
    page = compiled.Page(*good)
    assert page.exchange(1, b"abc", b"de", None) is None
    assert memory[:8] == (2).to_bytes(8, "little") and memory[112 + 24 : 112 + 29] == b"abcde"
    assert page.arrive(3) is False
    assert memory[8:16] == (6).to_bytes(8, "little")
    with pytest.raises(ValueError, match="no mailbox holds"):
        page.exchange(1, bytes(20), bytes(5), None)
    for wrong in ((), (1, "text", b"", None), (1, b"", b"")):
        with pytest.raises(TypeError, match="exchange"):
            page.exchange(*wrong)
    for peer in (-1, 2):
        with pytest.raises(ValueError, match="no such peer"):
            page.begin_sleep(peer)
        with pytest.raises(ValueError, match="no such peer"):
            page.sleep(peer, 0, 0.0)
    with pytest.raises(ValueError, match="no such peer, or time"):
        page.sleep(1, 0, -1.0)
