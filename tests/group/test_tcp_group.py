"""Ranks that variables name, and no library joins."""

import socket
import sys
import threading
from contextlib import suppress
from importlib import util

import pytest

from shardmath.base.config import Settings
from shardmath.errors import BackendUnavailable, BootstrapError
from shardmath.group import as_process_group, tcp
from shardmath.group.tcp import connected, first_host, hub_of

PATIENCE = 60.0
HERE = "127.0.0.1"

HOSTS = {
    "vm": "vm",
    "vm,node7": "vm",
    "node[07-09,12],gpu3": "node07",
    "node[3,5]": "node3",
    "a1,node[3,5]": "a1",
    "rack[2-4]x": "rack2x",
}


@pytest.mark.parametrize("nodes", HOSTS)
def test_the_first_of_slurms_hosts(nodes):
    assert first_host(nodes) == HOSTS[nodes]


STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[1-2]"}
SAID = {"MASTER_ADDR": "n9", "MASTER_PORT": "29500"}


def test_where_rank_0_listens():
    host, port = hub_of(STEP)
    assert host == "n1" and 61000 <= port < 65500
    assert hub_of({**STEP, "SLURM_STEP_NUM_NODES": "1"}) == (HERE, port)
    assert hub_of({**STEP, "SLURM_STEP_ID": "1"}) != (host, port)
    assert hub_of({**STEP, **SAID, "SLURM_STEP_NUM_NODES": "1"}) == ("n9", 29500)
    assert hub_of({**STEP, "MASTER_PORT": "29500"}) == ("n1", 29500)
    for unknown in ({}, {"MASTER_ADDR": "n9"}, {**SAID, "MASTER_ADDR": ""}):
        with pytest.raises(BootstrapError, match="set MASTER_ADDR and MASTER_PORT"):
            hub_of(unknown)
    for port in ("x", "0", "65536", " ", "-1"):
        with pytest.raises(BootstrapError, match=f"^MASTER_PORT='{port}' is no port: set it to"):
            hub_of({**SAID, "MASTER_PORT": port})


@pytest.fixture
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "shardmath" / "key"


def free_port():
    with socket.create_server((HERE, 0)) as listener:
        return listener.getsockname()[1]


def on_threads(size, body):
    """What `body(rank)` returns, or raises, on a thread for each rank."""
    found = [None] * size

    def run(rank):
        try:
            found[rank] = body(rank)
        except BootstrapError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in reversed(range(size))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return found


@pytest.mark.parametrize("size", [2, 5])
def test_they_meet_and_gather(home, size):
    hub, settings = ("localhost", free_port()), Settings(startup_timeout=PATIENCE)

    def body(rank):
        group = connected(rank, size, hub, settings)
        told = [group.allgather_bytes(bytes([rank]) * n) for n in (0, 1, 100_000)]
        group.close()
        return told

    expected = [[bytes([rank]) * n for rank in range(size)] for n in (0, 1, 100_000)]
    assert on_threads(size, body) == [expected] * size
    assert home.stat().st_mode & 0o777 == 0o600 and len(home.read_bytes()) == 32
    assert list(home.parent.iterdir()) == [home]


def test_strangers_are_let_go_and_ranks_come(home):
    settings = Settings(startup_timeout=PATIENCE)
    hub, words = (HERE, free_port()), [b"", b"GET / HTTP/1.0\r\n\r\n" * 9, bytes(56)]
    listens = threading.Event()

    def body(rank):
        if rank == 0:
            return len(connected(0, 2, hub, settings).allgather_bytes(b""))
        strangers = []
        while len(strangers) < len(words):
            try:
                strangers.append(socket.create_connection(hub))
                strangers[-1].sendall(words[len(strangers) - 1])
            except ConnectionRefusedError:  # it does not listen yet
                listens.wait(0.01)
        found = len(connected(1, 2, hub, settings).allgather_bytes(b""))
        for each in strangers:
            with suppress(ConnectionResetError):
                assert each.recv(99) == b""
            each.close()
        return found

    assert on_threads(2, body) == [2, 2]


def test_another_key_and_a_rank_that_does_not_come():
    hub = HERE, free_port()
    keys = ["one", "one", "other", "one"]

    def body(rank):
        if rank == 3:
            return None
        group = connected(rank, 4, hub, Settings(startup_timeout=0.5, key=keys[rank]))
        return group.allgather_bytes(b"")

    first, second, third, _ = on_threads(4, body)
    assert "waited 0.5 s at start-up for rank 2, rank 3" in str(first)
    assert "SHARDMATH_KEY" in str(first)
    assert str(second) == f"rank 1: told by {first}"
    assert "rank 2 (pid" in str(third) and "for rank 0 (127.0.0.1:" in str(third)
    assert "the connection was closed" in str(third) and "SHARDMATH_KEY" in str(third)


def test_a_host_that_is_not_known():
    settings = Settings(startup_timeout=0.1, key="x")
    with pytest.raises(
        BootstrapError, match=r"^rank 1 .*: waited 0.1 s, .* nobody.invalid, does not"
    ):
        connected(1, 2, ("nobody.invalid", 29500), settings)


def test_ranks_that_were_told_of_different_numbers_of_ranks(home):
    hub = HERE, free_port()

    def body(rank):
        settings = Settings(startup_timeout=PATIENCE)
        return connected(rank, [2, 3][rank], hub, settings).allgather_bytes(b"")

    for error in on_threads(2, body):
        assert "rank 0 was started as one of 2 ranks, and rank 1 as one of 3" in str(error)
        assert "set WORLD_SIZE" in str(error)


def test_a_port_in_use_and_an_address_of_nobody():
    with socket.create_server((HERE, 0)) as other:
        hub = other.getsockname()
        with pytest.raises(BootstrapError, match="Address already in use; set MASTER_ADDR"):
            connected(0, 2, hub, Settings(startup_timeout=PATIENCE, key="x"))
    with pytest.raises(BootstrapError, match="cannot listen at 192"):
        connected(0, 2, ("192.0.2.1", 29500), Settings(startup_timeout=PATIENCE, key="x"))


WRONG_KEYS = {"read by others": (32, 0o644), "short": (7, 0o600)}


@pytest.mark.parametrize("what", WRONG_KEYS)
def test_a_key_that_is_none(home, what):
    length, mode = WRONG_KEYS[what]
    home.parent.mkdir(parents=True)
    home.write_bytes(bytes(length))
    home.chmod(mode)
    with pytest.raises(BootstrapError, match="remove"):
        connected(0, 2, (HERE, free_port()), Settings())


def test_no_folder_for_a_key(home):
    home.parent.write_text("a file")
    with pytest.raises(BootstrapError, match="set SHARDMATH_KEY"):
        connected(0, 2, (HERE, free_port()), Settings())


TORCHS = {"RANK": "1", "WORLD_SIZE": "2", **SAID}
ON_ONE_HOST = [{**TORCHS, "MASTER_ADDR": host} for host in ("localhost", "127.0.1.1", "::1")]
SLURMS = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", **STEP, "SLURM_STEP_NUM_TASKS": "2"}


@pytest.mark.parametrize(
    ("environ", "with_torch"),
    [(TORCHS, False), (SLURMS, True), *((environ, True) for environ in ON_ONE_HOST)],
)
def test_who_meets_so(monkeypatch, home, environ, with_torch):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    asked = []

    def meet(rank, size, hub, settings):
        asked.append((rank, size, hub))
        raise BootstrapError("tried")

    monkeypatch.setattr(tcp, "connected", meet)
    found = util.find_spec
    spec = util.spec_from_loader("torch", None) if with_torch else None
    monkeypatch.setattr(util, "find_spec", lambda name: spec if name == "torch" else found(name))
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    with pytest.raises(BootstrapError, match="tried"):
        as_process_group(None, Settings())
    assert asked == [(1, 2, hub_of(environ))]


@pytest.mark.parametrize(
    ("environ", "has_folder"),
    [
        (TORCHS, True),
        ({**ON_ONE_HOST[0], "TORCHELASTIC_RUN_ID": "7"}, True),
        (ON_ONE_HOST[0], False),  # where no key can be kept
    ],
)
def test_who_meets_by_torch(monkeypatch, home, environ, has_folder):
    if not has_folder:
        home.parent.write_text("a file")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(util, "find_spec", lambda name: util.spec_from_loader(name, None))
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    with pytest.raises(BackendUnavailable, match="torchrun started 2 ranks, and torch"):
        as_process_group(None, Settings())
