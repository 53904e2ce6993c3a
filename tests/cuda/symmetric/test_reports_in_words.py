"""What a kernel's wait has found, in words: who waited, where, for whom. Some needs no GPU."""

from __future__ import annotations

import mmap
import os
import socket
from types import SimpleNamespace

import numpy as np
import pytest

from shardmath.errors import OpTimeout, RankFailure
from shardmath.symmetric import structs, team
from shardmath.symmetric.board import Board
from shardmath.symmetric.rows import Rows, board_bytes
from shardmath.symmetric.team import Team
from shardmath.symmetric.waiting import WaitPolicy


def boards(size, members):
    """The board of rank 0 of all `size` ranks, and that of rank 0 of the part `members`."""
    made = []
    for ranks in (range(size), members):
        count = len(ranks)
        memory = mmap.mmap(-1, board_bytes(count))
        rows = [Rows(memory, rank=rank, size=count) for rank in range(count)]
        made += [
            [
                Board(
                    rows[rank],
                    watch=None,
                    numbers=ranks,
                    processes=[f"pid {100 + r} on node7" for r in ranks],
                    policy=WaitPolicy(1, notice=100, spin=0.0),
                    job=made[0][number] if made else None,
                )
                for rank, number in enumerate(ranks)
            ]
        ]
    return made


def reporting(board, words):
    """A team without a GPU of which a kernel has reported these words."""
    made = object.__new__(Team)
    made.rank, made.size, made.pads, made.broken = board.rank, board.size, (0,) * board.size, ""
    made.device = SimpleNamespace(ordinal=3, synchronize=lambda: None)
    made._board, made._notes = board, np.array(words, np.uint64)
    return made


REPORTS = {
    "barrier": (structs.OF_BARRIER | 5 << 32, "in barrier, channel 5"),
    "signal": (structs.OF_SIGNAL | 2 << 32, "in wait_signal, channel 2"),
    "collective": (structs.OF_COLLECTIVE | 7 << 32, "in a collective, block 7"),
    "word": (structs.OF_WORD, "in a wait for a value, word 0"),
}
# What kernels have found wrong with a rank: all ranks find the same.
MISCOUNTS = {
    structs.NO_ROOM: "3 rows come to rank 2, whose out has room for 4",
    structs.BAD_ROWS: "chunk 3 of rank 2 is not within the 4 rows of its input",
    structs.OTHER_ROWS: "rank 2 exchanges rows of another size, or in another order",
}


@pytest.mark.parametrize("part", [False, True], ids=["all", "part"])
@pytest.mark.parametrize("name", REPORTS)
def test_a_report_in_words(name, part, monkeypatch):
    monkeypatch.setattr(team, "call", lambda *_: None)
    operation, place = REPORTS[name]
    whole, some = boards(4, (1, 3))
    whole[3 if part else 1].operation = "fft"
    board = (some if part else whole)[0]
    words = [1, *[0] * 3, operation, 4, 3, *[0] * (3 * board.size - 6)]
    found = reporting(board, words)
    with pytest.raises(OpTimeout) as caught:
        found.check()
    text = str(caught.value)
    assert caught.value.ranks == (1,)
    who = "rank 0 (rank 1 of the job, pid 101 on node7)" if part else "rank 0 (pid 100 on node7)"
    whom = "rank 1 (rank 3 of the job, pid 103 on node7" if part else "rank 1 (pid 101 on node7"
    for words in (
        who,
        "on GPU 3, test_reports_in_words.py:",
        whom,
        "its last operation was fft",
        place,
    ):
        assert words in text, (words, text)
    assert "had come to 3 of 4" in text and "raise SHARDMATH_TIMEOUT" in text
    if found.broken:
        with pytest.raises(RankFailure) as caught:
            found.require_usable()
        assert who in str(caught.value) and "call recover() of the context" in str(caught.value)


@pytest.mark.parametrize("operation", MISCOUNTS)
def test_miscounts_in_words(operation, monkeypatch):
    """The rank that reads it tells its peers, and none of them goes on."""
    monkeypatch.setattr(team, "call", lambda *_: None)
    board, peer = boards(4, (1, 3))[0][:2]
    found = reporting(board, [1, operation | 2 << 32, 4, 3, *[0] * (3 * board.size - 3)])
    with pytest.raises(ValueError, match=MISCOUNTS[operation]):
        found.check()
    with pytest.raises(RankFailure, match=MISCOUNTS[operation]):
        found.require_usable()
    with pytest.raises(ValueError, match=MISCOUNTS[operation]):
        peer.barrier("barrier")


def check_words(context, library, part):
    """The text of what rank 0 finds when no signal comes, and this rank's process."""
    own = context.split(context.rank % 2) if part else context
    text = ""
    if own.rank == 0 and own.size > 1:
        stream, memory = library_stream(context, library), context.heap.allocate(8)
        slot = memory.block.address
        own.team.device.zero(slot, 8)
        own.team.flag("lower_flag", 1, stream, slot=slot, channel=0, timeout=0.2)
        try:
            own.team.synchronize(stream)
        except OpTimeout as error:
            text = str(error)
    context.barrier()
    return text, f"pid {os.getpid()} on {socket.gethostname()}"


def library_stream(context, library):
    torch = pytest.importorskip(library)
    return torch.cuda.current_stream(context.device_id).cuda_stream


@pytest.mark.parametrize("part", [False, True], ids=["all", "part"])
def test_a_signal_that_does_not_come(gpus, part):
    need = 4 if part else 2
    if gpus.size < need:
        pytest.skip(f"needs {need} ranks with GPUs")
    results = gpus.run(check_words, "torch", part, ranks=need)
    for reader, other in ((0, 2), (1, 3)) if part else ((0, 1),):
        text = results[reader][0]
        wanted = [results[reader][1], results[other][1], "rank 0", "rank 1", "wait_signal"]
        wanted += [f"rank {each} of the job" for each in (reader, other) if part]
        assert not [each for each in wanted if each not in text], text
