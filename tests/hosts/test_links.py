"""The links between hosts: by which address a host is reached, and when a link counts as cut."""

import os
import select
import shutil
import socket
import subprocess
import sys
from contextlib import closing

import pytest

from mortal import ENDLESS
from shardmath.transport import far
from shardmath.transport.liveness import PeerWatch
from shardmath.transport.wires import Wires
from started import PATIENCE

HOSTS = "smtest0", "smtest1"
PROGRAM = """
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
    print(error.ranks)
"""


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def end_hosts():
    for host in HOSTS:
        subprocess.run(["ip", "netns", "del", host], check=False, capture_output=True)


@pytest.fixture
def two_hosts():
    """Two network namespaces, joined by a link: 10.77.0.1 and 10.77.0.2."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("network namespaces take root, and iproute2")
    end_hosts()
    try:
        for host in HOSTS:
            ip("netns", "add", host)
        first, second = HOSTS
        ends = "name", "link0", "netns", second
        ip("link", "add", "link0", "netns", first, "type", "veth", "peer", *ends)
        for number, host in enumerate(HOSTS):
            ip("-n", host, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "link0")
            for device in ("lo", "link0"):
                ip("-n", host, "link", "set", device, "up")
    except subprocess.CalledProcessError as error:
        end_hosts()
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    yield HOSTS
    end_hosts()


def test_a_link_that_is_cut_is_noticed_long_before_time_is_up(two_hosts, tmp_path):
    """The ranks find each other by MASTER_ADDR alone."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    place = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29511", "SLURM_NTASKS": "2"}
    ranks = []
    for rank, host in enumerate(two_hosts):
        variables = os.environ | ENDLESS | place | {"SLURM_PROCID": str(rank)}
        command = ["ip", "netns", "exec", host, sys.executable, str(script)]
        pipe = subprocess.PIPE
        ranks.append(subprocess.Popen(command, env=variables, stdout=pipe, text=True))
    try:
        assert [rank.stdout.readline() for rank in ranks] == ["met\n"] * 2
        ip("-n", two_hosts[1], "link", "set", "link0", "down")
        said = [rank.communicate(timeout=PATIENCE)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert said == ["(1,)\n", "(0,)\n"]


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
        far, "_resolved", lambda host, port: met.get(host) or [(int(socket.AF_INET), (host, port))]
    )
    assert far._outward() == [(int(socket.AF_INET), ("10.77.0.2", 0))]


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
