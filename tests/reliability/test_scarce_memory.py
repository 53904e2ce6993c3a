"""R9: memory is scarce. Symmetric memory that cannot be had is HeapExhausted, and never a signal.

The system's limits are a control group's (version 1 or 2), a full /dev/shm, and the address space.
The first two take root.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from mortal import run_job
from shardmath.collectives import all_reduce
from shardmath.context import startup
from shardmath.errors import HeapExhausted
from shardmath.handles.allocation import allocate_symmetric_memory as allocate
from shardmath.handles.rendezvous import rendezvous

MIB = 1 << 20
GROUPS = Path("/sys/fs/cgroup")
LIMIT = 192 * MIB  # of three ranks together, for what they take after they have entered
LENGTH = 8 * MIB  # bytes of an array
NEWNS = 0x00020000
PRIVATE = 0x40000 | 0x4000  # a mount whose changes, and those below it, nobody else sees


@contextmanager
def control_group():
    """A group of processes that may have LIMIT bytes of memory: the file by which one enters it."""
    if os.geteuid() != 0:
        pytest.skip("control groups take root")
    told = Path("/proc/self/cgroup").read_text().splitlines()
    first = next((line for line in told if "memory" in line.split(":")[1].split(",")), None)
    if first is not None:
        parent, limit = GROUPS / "memory" / first.split(":")[2].lstrip("/"), "memory.limit_in_bytes"
    else:
        whole = next((line for line in told if line.startswith("0::")), "0::/")
        parent, limit = GROUPS / whole.split(":")[2].lstrip("/"), "memory.max"
    group = parent / f"shardmath-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        try:
            (group / limit).write_text(str(LIMIT))
        except OSError as error:
            pytest.skip(f"this control group limits no memory: {error}")
        yield group / "cgroup.procs"
    finally:
        with suppress(OSError):
            group.rmdir()


def fill(context):
    """Allocate until there is no more, together; what the error says, and how much there was."""
    kept = []
    while len(kept) < 200:
        try:
            kept.append(allocate(LENGTH, np, dtype="uint8"))
        except HeapExhausted as error:
            return len(kept), str(error), error.need, error.have
        kept[-1][:] = len(kept)  # every page is there: nobody gets SIGBUS
        handle, peer = rendezvous(kept[-1]), (context.rank + 1) % context.size
        handle.barrier()
        assert (handle.get_buffer(peer, (LENGTH,), "u1") == len(kept)).all()
    raise AssertionError("there was memory without an end")


def fill_alone(context):
    """The same, each rank for itself, all at once."""
    kept = []
    context.barrier()
    while len(kept) < 200:
        try:
            kept.append(allocate(LENGTH, np, dtype="uint8", skip_symmetric_check=True))
        except HeapExhausted as error:
            return len(kept), str(error), error.need, error.have
        kept[-1][:] = 7
    raise AssertionError("there was memory without an end")


@pytest.mark.parametrize("how", [fill, fill_alone], ids=["together", "alone"])
def test_a_control_group_that_is_full_is_an_error(how):
    with control_group() as entrance:

        def body(group):
            entrance.write_text(str(os.getpid()))
            context = startup.initialize("cpu", group)
            found = []
            for _ in range(2):
                found.append(how(context))
                context.barrier()  # behind which memory can be had again that all have dropped
            total = int(all_reduce(1))
            startup.finalize()
            return found, total

        outcomes = run_job(3, body)
        assert None not in outcomes, "a rank was killed"
    for found, total in outcomes:
        assert total == 3
        for count, text, need, have in found:
            assert count and need >= LENGTH > have, (count, text, need, have)
            assert "available" in text and f"{need:,}" in text, text
    arrays = [[found[turn][0] for found, _ in outcomes] for turn in range(2)]
    assert all(sum(counts) * LENGTH > LIMIT / 4 for counts in arrays), arrays


def test_nothing_is_asked_of_a_full_shared_folder():
    """Where /dev/shm is small and full, as in many containers, all works as elsewhere."""
    if os.geteuid() != 0:
        pytest.skip("mounts take root")
    libc = ctypes.CDLL(None, use_errno=True)

    def full_folder():
        """Give this process a /dev/shm of its own, of a page that is full."""
        if libc.unshare(NEWNS):
            return f"no namespace of mounts: {os.strerror(ctypes.get_errno())}"
        libc.mount(b"none", b"/", None, PRIVATE, None)
        if libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=4096"):
            return f"no mount: {os.strerror(ctypes.get_errno())}"
        with suppress(OSError), Path("/dev/shm/full").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(512))
        return ""

    def body(group):
        why = full_folder()
        if why:
            return why, None
        context = startup.initialize("cpu", group)
        array = allocate(3 * MIB, np)
        array[:] = context.rank
        handle = rendezvous(array)
        handle.barrier()
        peer = (context.rank + 1) % context.size
        right = bool((handle.get_buffer(peer, array.shape, "f8") == peer).all())
        result = right, int(all_reduce(1)), sorted(os.listdir("/dev/shm"))  # noqa: PTH208
        startup.finalize()
        return "", result

    outcomes = run_job(3, body)
    if outcomes[0] and outcomes[0][0]:
        pytest.skip(outcomes[0][0])
    assert outcomes == [("", (True, 3, ["full"]))] * 3


def test_an_address_space_that_is_full_is_an_error():
    """One rank may map no more: all hear of it, and go on."""

    def body(group):
        context = startup.initialize("cpu", group)
        signal.signal(signal.SIGBUS, signal.SIG_DFL)
        before = resource.getrlimit(resource.RLIMIT_AS)
        if context.rank == 1:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            most = pages * os.sysconf("SC_PAGE_SIZE") + 16 * MIB
            resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
        kept, said = [], ""
        try:
            for _ in range(9):
                kept.append(allocate(64 * MIB, np, dtype="uint8"))
        except HeapExhausted as error:
            said = str(error)
        resource.setrlimit(resource.RLIMIT_AS, before)
        del kept
        context.barrier()
        total = int(all_reduce(1))
        allocate(64 * MIB, np, dtype="uint8")
        startup.finalize()
        return said, total

    outcomes = run_job(3, body)
    for outcome in outcomes:
        said, total = outcome
        assert total == 3 and "rank 1" in said and "ulimit -v" in said, outcome
