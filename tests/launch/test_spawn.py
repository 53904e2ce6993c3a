"""`spawn`: results, exceptions, and nothing left of the parent in the ranks."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import linecache
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shardmath.base import current
from shardmath.context import startup
from shardmath.errors import BootstrapError, HeapExhausted, OpTimeout, RankFailure
from shardmath.group import as_process_group
from shardmath.group.local import LocalProcessGroup
from shardmath.launch import spawn


def rank() -> int:
    return int(os.environ["SHARDMATH_RANK"])


def forever() -> None:
    while True:
        signal.pause()


def test_results_in_order() -> None:
    factor = 10  # closures work

    def function(start: int) -> Any:
        group = as_process_group(None)
        assert isinstance(group, LocalProcessGroup)
        everybody = group.allgather_bytes(b"%d" % group.rank)
        return start + factor * group.rank, everybody, np.full(group.rank, 1.5)

    for size in (1, 2, 3):
        results = spawn(function, size, 5)
        names = [b"%d" % number for number in range(size)]
        for number, (value, everybody, array) in enumerate(results):
            assert (value, everybody) == (5 + factor * number, names if size > 1 else [b"0"])
            np.testing.assert_array_equal(array, np.full(number, 1.5))
        assert len(results) == size


def test_large_and_torch_results() -> None:
    def function() -> Any:
        import torch

        big = torch.arange(300_000, dtype=torch.float32) + rank()
        return big, torch.ones((2, 0), dtype=torch.bfloat16), np.arange(700_000) * rank()

    for number, (big, empty, array) in enumerate(spawn(function, 2)):
        assert str(big.dtype) == "torch.float32" and big[-1] == 299_999 + number
        assert str(empty.dtype) == "torch.bfloat16" and tuple(empty.shape) == (2, 0)
        assert array[-1] == 699_999 * number


class SpecialError(Exception):
    """An exception that the parent could not be asked to build."""


def fail_with(error: BaseException) -> Callable[[], None]:
    def function() -> None:
        if rank() == 1:
            raise error
        forever()

    return function


def die(action: Callable[[], object]) -> Callable[[], None]:
    def function() -> None:
        if rank() == 1:
            action()
        forever()

    return function


FAILURES = [
    (fail_with(KeyError("x")), KeyError, "rank 1: 'x'"),
    (fail_with(HeapExhausted("full")), HeapExhausted, "rank 1: full"),
    (fail_with(RankFailure("gone", (3,))), RankFailure, "rank 1: gone"),
    (fail_with(ValueError("rank 1: no")), ValueError, "rank 1: no"),
    (fail_with(OpTimeout("rank 1 in barrier: late", (3,))), OpTimeout, "rank 1 in barrier: late"),
    (fail_with(ValueError("rank 12: no")), ValueError, "rank 1: rank 12: no"),
    (fail_with(SpecialError("odd")), RuntimeError, "rank 1 raised test_spawn.SpecialError: odd"),
    (fail_with(UnicodeDecodeError("a", b"", 0, 1, "b")), RuntimeError, "rank 1 raised Unicode"),
    (fail_with(KeyboardInterrupt()), RuntimeError, "rank 1 raised builtins.KeyboardInterrupt"),
    (
        die(lambda: os.kill(os.getpid(), signal.SIGKILL)),
        RankFailure,
        "rank 1 was killed by SIGKILL",
    ),
    (die(lambda: os._exit(0)), RankFailure, "rank 1 ended before it returned a result"),
    (die(lambda: sys.exit(4)), RankFailure, "rank 1 exited with status 4"),
]


@pytest.mark.parametrize(("function", "kind", "message"), FAILURES)
def test_the_first_failure_is_raised(
    function: Callable[[], None], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind) as caught:
        spawn(function, 3)
    assert type(caught.value) is kind
    assert caught.value.args[0].startswith(message)
    if kind is not RankFailure:
        (note,) = caught.value.__notes__
        assert "fail_with" not in note and "in function" in note
        assert note.startswith("The traceback of rank 1:\nTraceback")


def test_a_result_that_cannot_travel() -> None:
    with pytest.raises(TypeError, match=r"rank \d: builtins.object cannot be sent"):
        spawn(object, 2)
    with pytest.raises(TypeError, match=r"rank \d: a NumPy array of dtype object cannot be sent"):
        spawn(lambda: np.array([None]), 2)


def test_what_cannot_be_called() -> None:
    with pytest.raises(TypeError, match="function is called on every rank, and 3 cannot be called"):
        spawn(3, 2)  # type: ignore[arg-type]


def test_timeout_names_the_ranks() -> None:
    def function() -> None:
        if rank() != 1:
            forever()

    with pytest.raises(OpTimeout, match="ranks 0, 2") as caught:
        spawn(function, 3, timeout=2.0)  # in which rank 1 has to end
    assert caught.value.ranks == (0, 2)


def test_output_is_prefixed(capsys: pytest.CaptureFixture[str]) -> None:
    def function() -> None:
        print("line", rank())
        print("to stderr", file=sys.stderr)
        os.write(1, b"unfinished")

    spawn(function, 2)
    captured = capsys.readouterr()
    assert sorted(captured.out.splitlines()) == [
        "[0] line 0",
        "[0] unfinished",
        "[1] line 1",
        "[1] unfinished",
    ]
    assert sorted(captured.err.splitlines()) == ["[0] to stderr", "[1] to stderr"]


def test_the_parents_context_and_exit_hooks_stay_behind(tmp_path: Path) -> None:
    def of_parent() -> None:
        (tmp_path / "parent").touch()

    def function() -> Any:
        atexit.register((tmp_path / f"rank{rank()}").touch)
        return current.get() is None

    atexit.register(of_parent)
    current.set_default(SimpleNamespace(rank=0, size=1))
    try:
        assert spawn(function, 2) == [True, True]
        assert current.get() is not None
    finally:
        current.set_default(None)
        atexit.unregister(of_parent)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0", "rank1"]


def test_no_descriptor_stays_open() -> None:
    spawn(rank, 2)
    before = open_descriptors()
    for _ in range(3):
        spawn(rank, 3)
        with pytest.raises(OpTimeout):
            spawn(forever, 2, timeout=0.01)
    assert open_descriptors() == before


def open_sockets() -> set[str]:
    names = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own descriptor
            names.add(str(link.readlink()))
    return {name for name in names if name.startswith("socket:")}


def test_what_a_notebook_put_into_pythons_place_stays_with_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its hook and its input talk to the notebook's own process; its source is in no file."""
    name, source = "<cell 7>", "def fails():\n    raise OSError('of the cell')\n"
    lines = source.splitlines(keepends=True)
    monkeypatch.setitem(linecache.cache, name, (len(source), None, lines, name))
    cell: dict[str, Any] = {}
    exec(compile(source, name, "exec"), cell)

    def talks(*_: object) -> str:
        os.write(2, b"to the notebook")
        return "an answer that never comes"

    monkeypatch.setattr(sys, "excepthook", talks)
    monkeypatch.setattr(builtins, "input", talks)

    class Shell:
        cleared = 0

        @classmethod
        def clear_instance(cls) -> None:
            cls.cleared += 1

    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=Shell))
    assert spawn(lambda: Shell.cleared, 2) == [1, 1]
    assert Shell.cleared == 0
    with pytest.raises(OSError, match="rank 0: of the cell") as error:
        spawn(cell["fails"], 1)
    assert "raise OSError('of the cell')" in error.value.__notes__[0]
    with pytest.raises(EOFError, match="rank 0: ranks of spawn read no input: ask before spawn"):
        spawn(lambda: input("? "), 1)
    assert capfd.readouterr().err == ""


def test_ranks_that_hold_more_descriptors_than_select_can_name() -> None:
    def function() -> int:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(3000, hard), hard))
        kept = [os.dup(0) for _ in range(1100)]
        context = startup.initialize("cpu")
        context.barrier()
        return len(kept) - 1100 + context.size

    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 1500:
        pytest.skip("the hard limit of descriptors is below 1500")
    assert spawn(function, 3) == [3] * 3


@pytest.mark.parametrize("left", [0, 6, 12])
def test_ranks_that_may_hold_too_few_descriptors(left: int) -> None:
    def function() -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = sorted(set(range(1000)) - set(map(int, open_descriptors())))
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[left], hard))
        startup.initialize("cpu")

    words = r"^rank \d: it may open \d+ descriptors, and needs .*: raise ulimit -n"
    with pytest.raises(BootstrapError, match=words):
        spawn(function, 9)


def open_descriptors() -> list[str]:
    return sorted(link.name for link in Path("/proc/self/fd").iterdir())


def test_ranks_hold_only_their_own_sockets() -> None:
    inherited = open_sockets()
    counts = [len(set(names) - inherited) for names in spawn(lambda: sorted(open_sockets()), 3)]
    assert counts == [2, 1, 1]  # rank 0 is the hub


def test_refused_after_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(RuntimeError, match="CUDA does not survive a fork"):
        spawn(rank, 2)


def test_at_least_one_rank() -> None:
    with pytest.raises(ValueError, match="n is 0"):
        spawn(rank, 0)
    for number in ("2", 2.0, True, None):
        with pytest.raises(TypeError, match="n is an integer"):
            spawn(rank, number)  # type: ignore[arg-type]
