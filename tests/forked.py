"""Run a function on forked ranks, each with a context, and collect what each returns."""

from __future__ import annotations

import os
import select
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import shardmath.group
from shardmath import wire
from shardmath.group.links import star
from shardmath.group.local import LocalProcessGroup

if not hasattr(shardmath.group, "as_process_group"):
    shardmath.group.as_process_group = lambda group, _: group


def on_ranks(size: int, body: Callable[[Any], Any], timeout: float = 30.0) -> list[Any]:
    """`body(context)` on `size` ranks; the results (plain data) in rank order.

    Raises AssertionError with the traceback of the first rank where the body raises.
    """
    ends = star(size)
    started = []
    for rank in range(size):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            _be_rank(rank, size, ends, writing, body)
        os.close(writing)
        started.append((pid, reading))
    for rank_ends in ends:
        for end in rank_ends:
            end.close()
    texts = []
    deadline = time.monotonic() + timeout
    for pid, reading in started:
        text = b""
        while chunk := _read(reading, deadline):
            text += chunk
        texts.append(text or b"-died or timed out")
        if not text:
            os.kill(pid, 9)
        os.close(reading)
        os.waitpid(pid, 0)
    bad = [f"rank {r}: {t[1:].decode()}" for r, t in enumerate(texts) if t[:1] != b"+"]
    assert not bad, "\n".join(bad)
    return [wire.decode(text[1:]) for text in texts]


def _read(reading: int, deadline: float) -> bytes:
    if not select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
        return b""
    return os.read(reading, 1 << 16)


def _be_rank(rank: int, size: int, ends: Any, writing: int, body: Callable[[Any], Any]) -> None:
    try:
        from shardmath import context as contexts

        for other, rank_ends in enumerate(ends):
            if other != rank:
                for end in rank_ends:
                    end.close()
        context = contexts.initialize("cpu", LocalProcessGroup(rank, size, ends[rank]))
        answer = b"+" + wire.encode(body(context))
        contexts.finalize()
    except BaseException:
        answer = b"-" + traceback.format_exc().encode()
    os.write(writing, answer)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
