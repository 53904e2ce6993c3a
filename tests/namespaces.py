"""Two hosts on one machine: network namespaces, 10.77.0.1 and 10.77.0.2, and the link between them.

It takes root, iproute2 and util-linux. Nothing has a name, and all of it ends with its process.

    namespace 0  10.77.0.1 ── link0 ═══ link0 ── 10.77.0.2  namespace 1

The link is a pair of virtual Ethernet devices; or, with a delay or a loss, two devices of layer 3
and a process that carries packets between them, since few kernels have netem.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import shlex
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardmath.launch.ranks import die_with

ADDRESSES = "10.77.0.1", "10.77.0.2"
_DEVICE = "link0"
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 1, 0x1000
_UP = 5.0  # seconds in which a namespace is made


class Unavailable(Exception):
    """There are no network namespaces here: why."""


class Hosts:
    """Two namespaces, known by processes that do nothing else: `pids`."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.pids = tuple(pids)

    def enter(self, number: int) -> None:
        """Move the calling thread, and what it starts, to one of them."""
        with open(f"/proc/{self.pids[number]}/ns/net", "rb") as space:  # noqa: PTH123
            if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")

    def start(self, number: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on one of them."""
        return subprocess.Popen([*self.within(number), *command], **options)

    def within(self, number: int) -> list[str]:
        """What precedes a command that is to run on one of them."""
        return ["nsenter", f"--net=/proc/{self.pids[number]}/ns/net", "--"]

    def with_devices(self, number: int) -> list[str]:
        """As `within`, with a /sys that shows the devices there, where libraries look for them."""
        shown = 'mount -t sysfs sysfs /sys && exec "$@"'
        return [*self.within(number), "unshare", "--mount", "sh", "-c", shown, "sh"]

    def instead_of_ssh(self, folder: Path) -> Path:
        """A script in `folder` that a launcher calls as `ssh [options] ADDRESS COMMAND`."""
        lines = ["#!/bin/sh", 'while [ "${1#-}" != "$1" ]; do shift; done', "to=$1; shift"]
        for number, address in enumerate(ADDRESSES):
            command = shlex.join(self.with_devices(number))
            lines.append(f'[ "$to" = {address} ] && exec {command} sh -c "$*"')
        path = folder / "instead_of_ssh"
        path.write_text("\n".join([*lines, 'echo "there is no host $to" >&2; exit 1', ""]))
        path.chmod(0o700)
        return path

    def hydra(self, folder: Path, mpiexec: str, hosts: int, ranks: int) -> list[str]:
        """The command by which MPICH's mpiexec starts ranks on one or both of them, in order."""
        names = ",".join(ADDRESSES[:hosts])
        options = ["-launcher", "ssh", "-launcher-exec", str(self.instead_of_ssh(folder))]
        options += ["-iface", _DEVICE, "-hosts", names, "-ppn", str(ranks // hosts)]
        return [*self.with_devices(0), mpiexec, *options, "-n", str(ranks)]

    def cut(self) -> None:
        """Cut the link: from now on nothing arrives, and nobody is told."""
        self.ip(1, f"link set {_DEVICE} down")

    def ip(self, number: int, *commands: str) -> str:
        """What commands of `ip` print on one of them. Raises Unavailable."""
        done = subprocess.run(
            [*self.within(number), "ip", "-batch", "-"],
            check=False,
            input="\n".join(commands) + "\n",
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise Unavailable(f"no network namespaces here: {done.stderr.strip()}")
        return done.stdout


@contextmanager
def two_hosts(delay: float = 0.0, loss: float = 0.0) -> Iterator[Hosts]:
    """Two hosts, whose link takes so many seconds one way, and loses that part of the packets.

    Raises Unavailable.
    """
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "nsenter"))):
        raise Unavailable("network namespaces take root, iproute2 and util-linux")
    # They end with this process, as their standard input does.
    holders = [
        subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in ADDRESSES
    ]
    carrier = 0
    try:
        hosts = Hosts([_unshared(holder) for holder in holders])
        if delay or loss:
            carrier = _carried(hosts, delay, loss)
        else:
            ends = f"name {_DEVICE} netns {hosts.pids[1]}"
            hosts.ip(0, f"link add name {_DEVICE} type veth peer {ends}")
        for number, address in enumerate(ADDRESSES):
            up = [f"link set {device} up" for device in ("lo", _DEVICE)]
            hosts.ip(number, f"addr add {address}/24 dev {_DEVICE}", *up)
        for number in range(len(ADDRESSES)):
            _await_link(hosts, number)
        yield hosts
    finally:
        if carrier:
            os.kill(carrier, signal.SIGKILL)
            os.waitpid(carrier, 0)
        for holder in holders:
            holder.kill()
            holder.communicate()


def _await_link(hosts: Hosts, number: int) -> None:
    """Wait until the link carries packets, which it does a moment after both ends are up."""
    deadline = time.monotonic() + 60 * _UP
    while "LOWER_UP" not in hosts.ip(number, f"link show {_DEVICE}"):
        if time.monotonic() > deadline:
            raise Unavailable("the link between two network namespaces does not come up")
        time.sleep(1e-3)


def _unshared(holder: subprocess.Popen[bytes]) -> int:
    """The process, once it has a namespace of its own."""
    own = os.stat("/proc/self/ns/net").st_ino  # noqa: PTH116
    deadline = time.monotonic() + 60 * _UP
    while time.monotonic() < deadline:
        try:
            if os.stat(f"/proc/{holder.pid}/ns/net").st_ino != own:  # noqa: PTH116
                return holder.pid
        except OSError:
            pass
        if holder.poll() is not None:
            break
        time.sleep(1e-3)
    holder.kill()
    why = holder.communicate()[1].decode().strip()
    raise Unavailable(f"no network namespaces here: {why}")


def _carried(hosts: Hosts, delay: float, loss: float) -> int:
    """The process that carries packets between the two, each from its own device."""
    ready, told = os.pipe()
    carrier = os.fork()
    if carrier == 0:
        try:
            die_with(os.getppid())
            devices = []
            for number in range(len(ADDRESSES)):
                hosts.enter(number)
                devices.append(_device())
            os.write(told, b"+")
            _carry(devices, delay, loss)
        finally:
            os._exit(1)
    os.close(told)
    with os.fdopen(ready, "rb") as pipe:
        if pipe.read(1) != b"+":
            os.waitpid(carrier, 0)
            raise Unavailable("no tunnels here: /dev/net/tun cannot be used")
    return carrier


def _device() -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH22x", _DEVICE.encode(), _IFF_TUN | _IFF_NO_PI)
    fcntl.ioctl(device, _TUNSETIFF, request)
    return device


def _carry(devices: Sequence[int], delay: float, loss: float) -> None:
    """Carry packets for ever, in order; which of them are lost is the same in every run."""
    draw = random.Random(7)
    on_their_way: list[tuple[float, int, int, bytes]] = []
    waiting = select.poll()
    for device in devices:
        waiting.register(device, select.POLLIN)
    number = 0
    while True:
        soonest = on_their_way[0][0] - time.monotonic() if on_their_way else None
        for device, _ in waiting.poll(None if soonest is None else max(0.0, 1e3 * soonest)):
            packet = os.read(device, 1 << 16)
            number += 1
            if draw.random() >= loss:
                to = devices[1 - devices.index(device)]
                heapq.heappush(on_their_way, (time.monotonic() + delay, number, to, packet))
        while on_their_way and on_their_way[0][0] <= time.monotonic():
            _, _, to, packet = heapq.heappop(on_their_way)
            try:
                os.write(to, packet)
            except OSError:  # the device is down, or its queue is full
                continue
