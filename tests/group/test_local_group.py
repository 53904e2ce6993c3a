"""The group of our launcher: agreement on bytes, and every way in which it can fail."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ranks import Pool
from shardmath.errors import BootstrapError, CollectiveMismatch, RankFailure
from shardmath.group.links import FRAME_LIMIT, star
from shardmath.group.local import LocalProcessGroup
from shardmath.launch import spawn
from shardmath.process_group import ProcessGroup, ReductionOp

SIZES = [0, 1, 7, 8, 9, 300_000]
RANKS = [1, 2, 3, 6]


class Minimal(ProcessGroup):
    """A group as a user may write it: the four abstract members, over another group."""

    def __init__(self, inner: ProcessGroup) -> None:
        self.inner = inner

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def nranks(self) -> int:
        return self.inner.nranks

    def broadcast_buffer(self, array: Any, *, root: int = 0) -> None:
        self.inner.broadcast_buffer(array, root=root)

    def allreduce_buffer(self, array: Any, *, op: ReductionOp) -> None:
        self.inner.allreduce_buffer(array, op=op)


def content(rank: int, size: int) -> bytes:
    return bytes((rank * 31 + index) % 251 for index in range(size + rank % 3))


def gather(group: ProcessGroup, size: int) -> None:
    expected = [content(rank, size) for rank in range(group.nranks)]
    for one in (group, Minimal(group)):
        assert one.allgather_bytes(content(group.rank, size)) == expected


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("size", SIZES)
def test_allgather_bytes(pool: Pool, size: int, ranks: int) -> None:
    pool.run(gather, size, ranks=ranks)


def reduce(group: ProcessGroup, dtype: str, shape: tuple[int, ...]) -> None:
    inputs = [np.full(shape, rank + 1, dtype).T for rank in range(group.nranks)]
    for op, oracle in ((0, np.add), (1, np.minimum), (2, np.maximum)):
        array = inputs[group.rank].copy(order="F")
        group.allreduce_buffer(array, op=ReductionOp(op))
        np.testing.assert_array_equal(array, oracle.reduce(inputs).astype(dtype))
        assert array.dtype == dtype
    for root in range(group.nranks):
        array = inputs[group.rank].copy()
        group.broadcast_buffer(array, root=root)
        np.testing.assert_array_equal(array, inputs[root])


@pytest.mark.parametrize("dtype", ["int64", "uint8", "float16", "float64", "complex64"])
@pytest.mark.parametrize("shape", [(), (0,), (7, 9)])
def test_buffers(pool: Pool, dtype: str, shape: tuple[int, ...]) -> None:
    if dtype == "complex64":  # NumPy orders complex numbers too: real part first
        assert np.minimum(1j, 2) == 1j
    for ranks in (1, 3):
        pool.run(reduce, dtype, shape, ranks=ranks)


def reduce_object(group: ProcessGroup) -> Any:
    with contextlib.suppress(TypeError):
        group.allreduce_object(object(), op=lambda a, b: a)
        raise AssertionError("an object travelled")
    return group.allreduce_object({"ranks": [group.rank]}, op=merge)


def merge(a: Any, b: Any) -> Any:
    return {"ranks": a["ranks"] + b["ranks"]}


def test_allreduce_object_folds_in_the_order_of_ranks(pool: Pool) -> None:
    assert pool.run(reduce_object, ranks=3) == [{"ranks": [0, 1, 2]}] * 3


def mismatch(group: ProcessGroup) -> str:
    array = np.zeros(3 if group.rank == 1 else 2)
    try:
        group.allreduce_buffer(array, op=ReductionOp.SUM)
    except CollectiveMismatch as error:
        group.allgather_bytes(b"the group still works")
        return str(error)
    return ""


def test_different_arrays_are_reported_on_every_rank(pool: Pool) -> None:
    for message in pool.run(mismatch, ranks=3):
        assert "rank 1 passed an array of dtype and shape ('float64', (3,))" in message


def bad_root(group: ProcessGroup) -> None:
    for root in (-1, group.nranks):
        with pytest.raises(ValueError, match="root is"):
            group.broadcast_buffer(np.zeros(1), root=root)


def test_bad_root(pool: Pool) -> None:
    pool.run(bad_root, ranks=1)
    pool.run(bad_root, ranks=2)


def local_group(timeout: float) -> LocalProcessGroup:
    """A second group over the sockets that the rank was started with."""
    descriptors = [int(part) for part in os.environ["SHARDMATH_LAUNCHER_FD"].split(",")]
    rank, size = int(os.environ["SHARDMATH_RANK"]), int(os.environ["SHARDMATH_SIZE"])
    return LocalProcessGroup.from_descriptors(rank, size, descriptors, timeout=timeout)


def outcome(call: Callable[[], object]) -> Any:
    try:
        return "done", call()
    except (BootstrapError, RankFailure) as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_rank_that_ended_is_named_by_all(lost: int) -> None:
    def function() -> Any:
        group = local_group(86400.0)  # longer than any test: they notice it of themselves
        group.allgather_bytes(b"")
        if group.rank == lost:
            for descriptor in os.environ["SHARDMATH_LAUNCHER_FD"].split(","):
                os.close(int(descriptor))
            group.close()
            return None
        return outcome(lambda: group.allgather_bytes(b"")), outcome(
            lambda: group.allgather_bytes(b"")
        )

    for rank, seen in enumerate(spawn(function, 3)):
        if rank == lost:
            continue
        (kind, message), (again, since) = seen
        assert (kind, again) == ("RankFailure", "BootstrapError")
        assert f"rank {lost} ended" in message and message in since


@pytest.mark.parametrize("late", [0, 2])
def test_a_rank_that_does_not_come_is_named_at_the_deadline(late: int) -> None:
    def function() -> Any:
        group = local_group(86400.0)
        group.allgather_bytes(b"")  # all have come, and one will be late
        group._timeout = 1.0
        if group.rank == late:
            for descriptor in os.environ["SHARDMATH_LAUNCHER_FD"].split(","):
                hung_up = select.poll()  # stay until the others have given up
                hung_up.register(int(descriptor), 0)
                hung_up.poll()
            return None
        return outcome(lambda: group.allgather_bytes(b""))

    seen = [one for one in spawn(function, 3) if one is not None]
    assert len(seen) == 2
    for kind, message in seen:
        assert kind == "BootstrapError" and f"rank {late} did not arrive" in message
        assert "SHARDMATH_STARTUP_TIMEOUT" in message


def header(magic: bytes = b"SMG1", kind: int = 0, number: int = 0, length: int = 0) -> bytes:
    return struct.pack("<4sB3xIQ", magic, kind, number, length)


FRAMES = [
    ("garbage", b"\xff" * 64, "malformed frame"),
    ("text", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "malformed frame"),
    ("magic", header(magic=b"SMG0"), "malformed frame"),
    ("kind", header(kind=9), "malformed frame"),
    ("length", header(length=FRAME_LIMIT + 1), "malformed frame"),
    ("1 GiB announced", header(length=1 << 30), "malformed frame"),
    ("replay", header(number=7), "is at exchange 7, this rank at 0"),
    ("short", header(length=9) + b"12345678", "did not arrive"),
    ("half a header", header()[:11], "did not arrive"),
    ("news that is none", header(kind=1, length=2) + b"[]", "words that make no sense"),
    ("news of ranks that are none", header(kind=1, length=2) + b"{}", "words that make no sense"),
]


@pytest.mark.parametrize(("frame", "message"), [case[1:] for case in FRAMES])
@pytest.mark.parametrize("rank", [0, 1])
def test_frames_that_are_none(rank: int, frame: bytes, message: str) -> None:
    ends = star(2)
    with ends[0][0], ends[1][0]:
        group = LocalProcessGroup(rank, 2, ends[rank], timeout=0.05)
        ends[1 - rank][0].sendall(frame)
        with pytest.raises(BootstrapError, match=message):
            group.allgather_bytes(b"hello")


def test_a_malformed_answer() -> None:
    for answer in (b"", b"\x00" * 7, struct.pack("<QQ", 0, 5), struct.pack("<QQ", 1 << 60, 0)):
        ends = star(2)
        with ends[0][0], ends[1][0]:
            group = LocalProcessGroup(1, 2, ends[1], timeout=0.05)
            ends[0][0].sendall(header(length=len(answer)) + answer)
            with pytest.raises(BootstrapError, match="malformed answer"):
                group.allgather_bytes(b"hello")


def test_a_message_over_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardmath.group.links.FRAME_LIMIT", 10)
    ends = star(2)
    with ends[0][0], ends[1][0]:
        group = LocalProcessGroup(1, 2, ends[1], timeout=0.05)
        with pytest.raises(BootstrapError, match="a message of 19 bytes; the limit is 10"):
            group.allgather_bytes(b"x" * 11)


def test_descriptors_that_are_no_sockets() -> None:
    reading, writing = os.pipe()
    for descriptor in (reading, 9999):
        with pytest.raises(BootstrapError, match=f"descriptor {descriptor} is not a socket"):
            LocalProcessGroup.from_descriptors(1, 2, [descriptor])
    os.close(reading)
    os.close(writing)


def test_the_wrong_number_of_sockets() -> None:
    for rank, size, count in ((0, 3, 1), (1, 3, 0), (3, 3, 1), (-1, 1, 0)):
        with pytest.raises(ValueError, match=f"rank {rank} of {size}"):
            LocalProcessGroup(rank, size, [socket.socket() for _ in range(count)])
