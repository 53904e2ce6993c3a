"""Jobs that start while others connect to their sockets, and where they listen meanwhile."""

from __future__ import annotations

import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from mortal import Job, Raised
from shardmath.context import startup
from shardmath.transport import mesh
from strangers import Halting, Listener, Strangers, await_listeners, descendants

EACH = 200  # strangers at every listener
HOSTS = {"one host": {}, "two pretended hosts": {"SHARDMATH_FAKE_HOSTS": "2"}}
# Less than strangers who are served one after another would take, and far more than a start does.
LIMIT = {"SHARDMATH_STARTUP_TIMEOUT": "30", "SHARDMATH_NOTICE": "60"}


def started(
    size: int,
    body: Callable[[Any], Any],
    visit: Callable[[list[Listener]], None],
    variables: Mapping[str, str],
    exchanges: int,
) -> list[Any]:
    """The outcomes of `body(group)` on `size` ranks; `visit` is told where they listen, each time.

    The last rank halts where all listen: before the exchanges that tell them of each other, of
    which there is one on one host, and two on several.
    """
    halts, goes = os.pipe(), os.pipe()

    def halt(_: int) -> None:
        os.write(halts[1], b"!")
        os.read(goes[0], 1)

    def run(group: Any) -> Any:
        return body(Halting(group, halt) if group.rank == size - 1 else group)

    with ExitStack() as undo:
        for descriptor in (*halts, *goes):
            undo.callback(os.close, descriptor)
        job = undo.enter_context(Job(size, run, {**LIMIT, **variables}))
        for exchange in range(exchanges):
            os.read(halts[0], 1)
            visit(await_listeners(lambda: job.pids, size, near=exchange == 0))
            os.write(goes[1], b"!")
        return [job.outcome(rank, 60.0) for rank in range(size)]


def start(group: Any) -> Any:
    context = startup.initialize("cpu", group)
    context.barrier()
    startup.finalize()
    return context.size


def start_unseen(group: Any) -> Any:
    """Start as in containers, where the system does not say which process it is that connects."""
    mesh.Mesh._admits = lambda self, connection, peers: True  # type: ignore[method-assign]
    return start(group)


def start_with_few_descriptors(group: Any) -> Any:
    """Start where less than half of the strangers can be held."""
    free = sorted(set(range(1000)) - {int(link.name) for link in Path("/proc/self/fd").iterdir()})
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[60], hard))
    return start_unseen(group)


@pytest.mark.parametrize("body", [start, start_unseen, start_with_few_descriptors])
@pytest.mark.parametrize("hosts", HOSTS)
def test_strangers_do_not_hold_up_a_start(hosts: str, body: Callable[[Any], Any]) -> None:
    with Strangers(EACH) as strangers:
        exchanges = 1 + len(HOSTS[hosts])
        assert started(3, body, strangers.visit, HOSTS[hosts], exchanges) == [3] * 3
        assert strangers.calls == 3 * EACH * exchanges
        assert strangers.hung_up() == strangers.calls


def start_as_if_apart(group: Any) -> Any:
    """Start as if every rank had a machine of its own."""
    mesh.host_identity = lambda: f"machine {group.rank}"  # type: ignore[assignment]
    return start(group)


@pytest.mark.parametrize("address", ["", "127.0.0.1", "198.51.100.9"])
def test_ranks_listen_only_where_they_are_called(address: str) -> None:
    # The last is an address of others, as behind a translation of addresses: here there is none.
    others = address.startswith("198")
    wanted = ["BootstrapError"] * 3 if others else [3] * 3
    limit = {"SHARDMATH_STARTUP_TIMEOUT": "2"} if others else {}
    seen: list[list[Any]] = []

    def visit(listeners: list[Listener]) -> None:
        seen.append([where[0] for family, _, where in listeners if family != socket.AF_UNIX])

    variables = {"SHARDMATH_ADDRESS": address, **limit}
    ends = started(3, start_as_if_apart, visit, variables, 2)
    assert [end.kind if isinstance(end, Raised) else end for end in ends] == wanted
    if isinstance(ends[2], Raised):
        assert all(words in ends[2].text for words in (address, "rank 0 (pid", "SHARDMATH_"))
    assert seen[0] == []
    assert len(seen[1]) >= 3
    assert not {"0.0.0.0", "::"} & set(seen[1])
    if address == "127.0.0.1":
        assert set(seen[1]) == {address}


def test_ranks_of_one_machine_listen_on_its_loopback() -> None:
    seen: list[Listener] = []
    variables = HOSTS["two pretended hosts"]
    assert started(2, start, seen.extend, variables, 2) == [2, 2]
    assert len(seen) == 4
    assert {where[0] for family, _, where in seen if family != socket.AF_UNIX} == {"127.0.0.1"}


def start_as_another_user(group: Any) -> Any:
    if group.rank == 1:
        os.setresuid(65534, 65534, 65534)
    return start(group)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_process_is_refused_even_with_the_key() -> None:
    variables = {"SHARDMATH_STARTUP_TIMEOUT": "2"}
    ends = started(2, start_as_another_user, lambda _: None, variables, 1)
    assert "BootstrapError" in [end.kind for end in ends]
    for rank, end in enumerate(ends):  # its time is up, or it has seen the other one end
        assert end.kind in ("BootstrapError", "RankFailure")
        if end.kind == "BootstrapError":
            assert f"waited 2 s at start-up for rank {1 - rank} (pid" in end.text


def start_without_an_address(group: Any) -> Any:
    from shardmath.transport import far

    def listen(_: str) -> Any:
        raise OSError("can listen nowhere (of all places)")

    if group.rank == 1:
        far.listen = listen
    return start(group)


def test_a_rank_that_can_listen_nowhere_is_named_by_all() -> None:
    with Job(3, start_without_an_address, {**LIMIT, **HOSTS["two pretended hosts"]}) as job:
        for rank in range(3):
            end = job.outcome(rank)
            assert end.kind == "BootstrapError"
            assert end.text.startswith(f"rank 1 (pid {job.pids[1]} on ")
            assert end.text.endswith("can listen nowhere (of all places)")


# -- how long it takes -----------------------------------------------------------------------------

TESTS = Path(__file__).parent.parent
PROGRAM = """\
import os, socket, sys, time
import shardmath
from shardmath.base.config import Settings
from shardmath.group import as_process_group
from strangers import Halting

group, halted = as_process_group(None), 0.0


def halt(_):
    global halted
    before = time.monotonic()
    with socket.socket(socket.AF_UNIX) as door:
        door.connect(sys.argv[1])
        door.recv(1)
    halted += time.monotonic() - before


last = group.rank == group.nranks - 1
shardmath.initialize("cpu", Halting(group, halt) if last else group)
print(time.monotonic() - halted)
"""


def seconds_to_start(folder: Path, size: int, strangers: Strangers, hosts: str) -> float:
    """From the launcher's command until the last rank has started, without the visit's time.

    The last rank, which waits for the visit, is the one that counts.
    """
    program = folder / "program.py"
    program.write_text(PROGRAM)
    path = folder / "door"
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(path))
        door.listen()
        door.settimeout(60)
        before = time.monotonic()
        command = [sys.executable, "-m", "shardmath", "run", "-n", str(size), str(program), path]
        job = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                **LIMIT,
                **HOSTS[hosts],
                "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]),
            },
        )
        for exchange in range(1 + len(HOSTS[hosts])):
            guest, _ = door.accept()
            with guest:
                strangers.visit(
                    await_listeners(lambda: descendants(job.pid), size, near=exchange == 0)
                )
        text, _ = job.communicate(timeout=60)
        assert job.returncode == 0
        lasts = [line for line in text.splitlines() if line.startswith(f"[{size - 1}]")]
        return float(lasts[0].split()[1]) - before


@pytest.mark.torture
@pytest.mark.parametrize("hosts", HOSTS)
def test_a_start_among_strangers_takes_its_usual_time(tmp_path: Path, hosts: str) -> None:
    usual, among = [], []
    for _ in range(11):
        for seconds, each in ((usual, 0), (among, EACH)):
            with Strangers(each) as strangers:
                seconds.append(seconds_to_start(tmp_path, 4, strangers, hosts))
                assert strangers.calls == 4 * each * (1 + len(HOSTS[hosts]))
    medians = statistics.median(usual), statistics.median(among)
    ratio = medians[1] / medians[0]
    print(f"{hosts}: {medians[0]:.3f} s alone, {medians[1]:.3f} s among strangers: {ratio:.2f}")
    assert ratio <= 1.5
