"""The links between hosts: by which address a host is reached, and when a link counts as cut."""

import json
import os
import select
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from mortal import ENDLESS
from namespaces import ADDRESSES, Unavailable, two_hosts
from shardmath.group.liveness import PeerWatch
from shardmath.transport import far
from shardmath.transport.wires import Wires
from started import PATIENCE

CUT = """
import numpy as np
import shardmath
from shardmath.collectives import all_reduce

context = shardmath.initialize("cpu")
assert len(set(context.hosts)) == 2
print("met", flush=True)
try:
    while True:
        all_reduce(np.ones(3))
except shardmath.errors.RankFailure as error:
    print(list(error.ranks))
context = context.recover()
print(all_reduce(1), flush=True)
"""
RIGHT = """
import shardmath
from far_program import check

context = shardmath.initialize("cpu")
assert len(set(context.hosts)) == 2
check(context, longest=40_001)
print("right")
"""
LOST = """
import os

if os.environ["SLURM_PROCID"] == "2":
    os.environ["SHARDMATH_ADDRESS"] = os.environ["WRONG"]
import shardmath

try:
    shardmath.initialize("cpu")
except shardmath.errors.ShardmathError as error:
    print(type(error).__name__, error)
"""
LINKS = {"as it is": {}, "slow": {"delay": 2e-3}, "lossy": {"delay": 2e-4, "loss": 0.02}}


@pytest.fixture
def hosts(request):
    """Two network namespaces, joined by a link of LINKS."""
    try:
        with two_hosts(**LINKS[getattr(request, "param", "as it is")]) as found:
            yield found
    except Unavailable as why:
        pytest.skip(str(why))


def started(hosts, script, ranks, **variables):
    """Ranks of a program, half of them on each host, who find each other by MASTER_ADDR alone."""
    place = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29511", "SLURM_NTASKS": str(ranks)}
    folders = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    path = {"PYTHONPATH": os.pathsep.join(filter(None, folders))}
    return [
        hosts.start(
            2 * rank // ranks,
            [sys.executable, str(script)],
            env=os.environ | place | path | variables | {"SLURM_PROCID": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]


def said_by(ranks):
    """What is left of the ranks' output, when they have ended."""
    try:
        return [rank.communicate(timeout=PATIENCE)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.parametrize("size", [2, 4])
def test_a_link_that_is_cut_is_noticed_long_before_time_is_up(hosts, size, tmp_path):
    """Each host's ranks name one of the others', and go on among themselves."""
    script = tmp_path / "program.py"
    script.write_text(CUT)
    ranks = started(hosts, script, size, **ENDLESS)
    try:
        assert [rank.stdout.readline() for rank in ranks] == ["met\n"] * size
        hosts.cut()
    finally:
        said = said_by(ranks)
    half = size // 2
    for rank, text in enumerate(said):
        blamed, left = map(json.loads, text.splitlines())
        others = range(half, size) if rank < half else range(half)
        assert blamed and set(blamed) <= set(others)
        assert left == half


def test_who_cannot_start_keeps_nobody_on_the_other_host_waiting(hosts, tmp_path):
    """Rank 2 has an address that leads nowhere: rank 3 cannot call it, and all hear of that."""
    script = tmp_path / "program.py"
    script.write_text(LOST)
    nowhere = "198.51.100.7"
    ranks = started(hosts, script, 4, **ENDLESS, WRONG=nowhere)
    said = said_by(ranks)
    assert all(text.startswith(("BootstrapError", "RankFailure")) for text in said), said
    assert all("rank 3" in text for text in said), said
    assert nowhere in said[3]


@pytest.mark.parametrize("hosts", ["slow", "lossy"], indirect=True)
def test_results_are_right_whatever_the_link(hosts, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(RIGHT)
    assert said_by(started(hosts, script, 2)) == ["right\n"] * 2


def test_a_host_is_reached_where_the_ranks_meet(monkeypatch):
    """Not at what its name stands for, if anything."""
    monkeypatch.setattr(far, "environment", lambda: {"MASTER_ADDR": "n1", "MASTER_PORT": "7"})
    met = {"n1": [(int(socket.AF_INET), ("10.77.0.1", 7))]}

    class Probe:
        def __init__(self, *_):
            self.to = None

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def connect(self, where):
            self.to = where[0]

        def getsockname(self):
            return {"10.77.0.1": "10.77.0.2"}.get(self.to, "10.0.0.9"), 1

    monkeypatch.setattr(far.socket, "socket", Probe)
    monkeypatch.setattr(
        far, "resolved", lambda host, port: met.get(host) or [(int(socket.AF_INET), (host, port))]
    )
    assert far._outward() == [(int(socket.AF_INET), ("10.77.0.2", 0))]


def test_gloo_uses_the_device_by_which_the_ranks_meet(hosts):
    """The last address is that of no host."""
    code = "from shardmath.group import tcp; print([tcp.device_towards((a, 1)) for a in %r])"
    for number in (0, 1):
        command = [sys.executable, "-c", code % ((*ADDRESSES, "192.0.2.1"),)]
        with hosts.start(number, command, stdout=subprocess.PIPE, text=True) as asked:
            assert asked.communicate()[0] == "['link0', 'link0', '']\n", number


def connection():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        calling = socket.create_connection(listener.getsockname())
        called, _ = listener.accept()
    return calling, called


def test_who_computes_and_reads_nothing_is_not_lost():
    """Its system answers for it; what it was asked it finds, and drops."""
    calling, called = connection()
    for each in (calling, called):
        each.setblocking(False)
    with closing(PeerWatch({})) as watch:
        waiting = Wires({1: calling}, watch, heartbeat=0.0)
        asked = 0
        while asked < 3 * 28:  # three questions
            waiting.receive()
            assert watch.dead() == frozenset()
            if select.select([called], [], [], 0.01)[0]:
                asked = len(called.recv(1 << 16, socket.MSG_PEEK))
        heard = []
        computing = Wires({0: called}, watch, heartbeat=0.0)
        channel = computing.open("words", 0, lambda *word: heard.append(word))
        waiting.open("words", 0, lambda *_: None).send([1], [(8, b"word")])
        while not heard:
            computing.receive()
        assert heard == [(0, 8, b"word")]
        assert watch.dead() == frozenset()
        channel.close()
        for each in (waiting, computing):
            each.close()
