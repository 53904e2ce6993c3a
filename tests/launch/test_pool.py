"""The tests' own pool of ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launched import await_ends

from ranks import Pool
from shardmath.errors import OpTimeout, RankFailure
from shardmath.group import ProcessGroup


def who(group: ProcessGroup, text: str) -> Any:
    return text, group.rank, group.allgather_bytes(b"%d" % group.rank)


def process(group: ProcessGroup) -> int:
    return os.getpid()


def fail(group: ProcessGroup, rank: int) -> None:
    if group.rank == rank:
        raise KeyError("not here")
    group.allgather_bytes(b"")


def die(group: ProcessGroup, rank: int) -> None:
    if group.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    group.allgather_bytes(b"")


def hang_in_a_place(group: ProcessGroup) -> None:
    if group.rank == 1:
        signal.pause()


def doubled(group: ProcessGroup) -> Any:
    return [group, group]


def length(state: Any) -> int:
    return len(state)


def test_the_first_ranks_run(pool: Pool) -> None:
    for size in (3, 1, 6, 2, 3):
        names = [b"%d" % rank for rank in range(size)]
        assert pool.run(who, "x", ranks=size) == [("x", rank, names) for rank in range(size)]


def test_the_same_processes_run_every_call(pool: Pool) -> None:
    assert pool.run(process) == pool.run(process)
    assert pool.run(process, ranks=2) == pool.run(process)[:2]


def test_setup_makes_what_functions_get() -> None:
    with Pool(2, doubled) as pool:
        assert pool.run(length) == [2, 2]


def test_an_exception_is_raised_here_with_its_traceback() -> None:
    with Pool(3) as pool:
        with pytest.raises(KeyError, match="rank 1: 'not here'") as caught:
            pool.run(fail, 1)
        assert 'raise KeyError("not here")' in caught.value.__notes__[0]
        assert pool.run(who, "x", ranks=1) == [("x", 0, [b"0"])]  # by new processes


def test_a_dead_rank_is_named() -> None:
    with Pool(3) as pool, pytest.raises(RankFailure, match="rank 2 was killed by SIGKILL"):
        pool.run(die, 2)


def test_a_hung_call_shows_the_stacks(capfd: pytest.CaptureFixture[str]) -> None:
    with Pool(2) as pool:
        pool.run(who, "x")  # both are there
        with pytest.raises(OpTimeout, match=r"not finished: \[1\]") as caught:
            pool.run(hang_in_a_place, timeout=1.0)
    assert caught.value.ranks == (1,)
    assert "in hang_in_a_place" in capfd.readouterr().err


def test_only_functions_of_modules(pool: Pool) -> None:
    with pytest.raises(TypeError, match="not a function of a module"):
        pool.run(lambda group: None)


def test_it_dies_with_its_parent() -> None:
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "import signal, test_pool, ranks\n"
        "pool = ranks.Pool(3)\n"
        "print(*pool.run(test_pool.process), flush=True)\n"
        "signal.pause()\n"
    )
    here = Path(__file__).parent
    with subprocess.Popen(
        [sys.executable, "-c", code, str(here), str(here.parent)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pidfds = [os.pidfd_open(int(pid)) for pid in parent.stdout.readline().split()]
        parent.kill()
        assert len(pidfds) == 3
        await_ends(pidfds)
        for pidfd in pidfds:
            os.close(pidfd)
