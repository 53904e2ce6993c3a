"""Handles, signals and the ends of ranks where some peers have no address."""

from __future__ import annotations

import functools
import gc
import mmap
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from far_program import check as check_program

import preloaded
from heap_use import settled_use
from mortal import ENDLESS, Job, Raised, limit_waits, on_ranks, run_job
from shardmath import symmetric_memory
from shardmath.context import startup
from shardmath.errors import OpTimeout
from shardmath.group.mpi import MPIProcessGroup
from shardmath.handles.allocation import allocate_symmetric_memory as allocate
from shardmath.handles.rendezvous import rendezvous
from shardmath.transport import mesh
from shardmath.transport.cores.mpi import MPITransport
from shardmath.transport.mesh import hosts_of

TWO_HOSTS = {"SHARDMATH_FAKE_HOSTS": "2"}
PROGRESS = memoryview(mmap.mmap(-1, 64)).cast("Q")


def within(body):
    """`body`, with its context the current one."""

    @functools.wraps(body)
    def run(context, *arguments):
        with context:
            return body(context, *arguments)

    return run


def raised(call):
    """What `call` raises, as (type, text)."""
    try:
        call()
    except Exception as error:
        return type(error), str(error)
    return None, ""


@pytest.mark.parametrize(
    ("identities", "pretended", "wanted"),
    [
        ("a", 1, (0,)),
        ("a", 2, (0,)),
        ("aa", 2, (0, 1)),
        ("aaa", 2, (0, 0, 1)),
        ("aaaaa", 2, (0, 0, 0, 1, 1)),
        ("aaa", 5, (0, 1, 2)),
        ("abab", 1, (0, 1, 0, 1)),
        ("abab", 2, (0, 1, 2, 3)),
        ("aabb", 2, (0, 0, 1, 1)),
    ],
)
def test_which_ranks_share_a_host(identities, pretended, wanted):
    assert hosts_of(identities, [pretended] * len(identities)) == wanted


@within
def check_handle(context, library):
    package = {"numpy": np, "torch": torch}[library]
    rank, size = context.rank, context.size
    array = allocate((rank + 1, 5), package, dtype="float32", skip_symmetric_check=True)
    array[...] = rank
    handle = rendezvous(array)
    far = [r for r in range(size) if not context.same_host(r)]
    assert far == [r for r in range(size) if (r * 2 // size) != rank * 2 // size]
    assert [r for r in range(size) if not handle.buffer_ptrs[r]] == far
    assert [r for r in range(size) if not handle.signal_pad_ptrs[r]] == far
    for peer in range(size):
        kind, text = raised(lambda peer=peer: handle.get_buffer(peer, (5,), "float32"))
        refused = text.startswith(f"rank {rank}: the memory asked for is on another host")
        assert (kind is RuntimeError and refused) == (peer in far)
    handle.barrier()
    for peer in range(size):
        found = package.zeros(3, dtype=package.float32)
        symmetric_memory.get(found, handle, peer, 2)
        assert found.tolist() == [peer] * 3
    handle.barrier(1)
    after, before = (rank + 1) % size, (rank - 1) % size
    for turn in range(50):
        # Each word is overwritten only after it has been read: both ways are signals.
        if turn:
            handle.wait_signal(after, 3)
        symmetric_memory.put_signal(np.array([turn, rank], np.float32), handle, after)
        symmetric_memory.wait_signal(handle, before)
        assert array.reshape(-1)[:2].tolist() == [turn, before]
        handle.put_signal(before, 3)
    handle.wait_signal(after, 3)
    for call in (
        lambda: handle.get(np.zeros(3, np.float32), after, 5 * (after + 1) - 2),
        lambda: handle.get(np.zeros(3, np.float32), after, -1),
        lambda: handle.put(np.zeros((4, 4), np.float32)[:, ::2], after),
        lambda: handle.put(np.zeros(1), size),
    ):
        assert raised(call)[0] is ValueError
    handle.put(np.zeros(0), after)
    handle.barrier()
    return True


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_handle_reaches_every_rank(far_contexts, size, library):
    assert all(far_contexts.run(check_handle, library, ranks=size))


@within
def check_timeout(context):
    """A signal that does not come is a timeout that names the rank; the handle stays usable."""
    array = allocate(4, np)
    handle = rendezvous(array)
    peer = 1 - context.rank
    if context.rank == 0:
        with pytest.raises(OpTimeout) as caught:
            handle.wait_signal(peer, 2, timeout_ms=30)
        assert caught.value.ranks == (peer,)
    context.board.barrier("both")
    if context.rank == 1:
        handle.put_signal(peer, 2)
    else:
        handle.wait_signal(peer, 2)
    handle.barrier()
    return True


def test_a_signal_that_does_not_come(far_contexts):
    assert all(far_contexts.run(check_timeout, ranks=2))


@within
def check_messages(context):
    """Exchanges of every length, around the size of a mailbox and far above it."""
    for length in (0, 1, 4000, 4087, 4088, 4089, 100_000):
        own = bytes([context.rank]) * (length + context.rank)
        found = context.board.exchange("lengths", own)
        assert found == [bytes([r]) * (length + r) for r in range(context.size)]
    return True


@pytest.mark.parametrize("size", [2, 4, 6])
def test_exchanges_of_any_length(far_contexts, size):
    assert all(far_contexts.run(check_messages, ranks=size))


@within
def check_reuse(context):
    """Handles come and go; memory returns to use when all ranks have dropped it."""
    gc.collect()
    context.split(None)  # what groups of other tests shared is free once their ranks meet again
    before = settled_use(context)
    for turn in range(20):
        array = allocate(10_000 + turn, np)
        handle = rendezvous(array)
        handle.put(np.full(3, turn, "f8"), (context.rank + 1) % context.size)
        handle.barrier()
        assert array[:3].tolist() == [turn] * 3
        part = context.split(context.rank % 2)
        part.barrier()
        part.close()
        del array, handle, part
        gc.collect(0)
        context.barrier()
    context.barrier()
    context.barrier()
    return context.heap.used - before


def test_memory_returns_to_use(far_contexts):
    assert far_contexts.run(check_reuse, ranks=4) == [0] * 4


def busy(group, limit=None):
    """What ranks do together, until a peer fails; after a step no wait is longer than `limit`."""
    context = startup.initialize("cpu", group)
    size = context.size
    for number in range(1 << 30):
        array = allocate(1000 + number % 7, np)
        handle = rendezvous(array)
        handle.put(np.full(3, number, "f8"), (context.rank + 1) % size)
        handle.barrier()
        assert array[0] == number
        handle.put_signal((context.rank + 1) % size, 2)
        handle.wait_signal((context.rank - 1) % size, 2)
        context.agree("step", lambda n=number: (n, "x" * (n % 5000)), len)
        context.barrier()
        if limit is not None:
            limit_waits(context, limit)
        PROGRESS[context.rank] = number


def started(size):
    """Return when every rank has made a step."""
    while not all(PROGRESS[:size]):
        select.select([], [], [], 0.001)


@pytest.mark.parametrize("seed", range(6))
def test_every_survivor_names_the_killed_rank(seed):
    size = 2 + seed % 3
    victim = seed % size
    starting = seed == 5
    PROGRESS[:] = memoryview(bytes(64)).cast("Q")
    with Job(size, busy, {**TWO_HOSTS, **ENDLESS}) as job:
        if not starting:
            started(size)
        select.select([], [], [], 0.005 * (1 + seed))
        job.signal(victim, signal.SIGKILL)
        outcomes = {rank: job.outcome(rank) for rank in range(size)}
    assert outcomes.pop(victim) is None
    for outcome in outcomes.values():
        assert isinstance(outcome, Raised) and outcome.kind == "RankFailure", outcome
        assert victim in outcome.ranks, outcome


def test_a_stopped_rank_is_a_timeout_that_names_it():
    PROGRESS[:] = memoryview(bytes(64)).cast("Q")
    with Job(3, lambda group: busy(group, 0.5), TWO_HOSTS) as job:
        started(3)
        job.signal(2, signal.SIGSTOP)
        outcomes = [job.outcome(rank) for rank in (0, 1)]
        assert (2,) in [outcome.ranks for outcome in outcomes]
        assert {outcome.kind for outcome in outcomes} == {"OpTimeout"}
        job.signal(2, signal.SIGCONT)
        assert job.outcome(2).kind == "RankFailure"


def fork_and_wait(group):
    """Rank 0 has a child that outlives all: its copies of the sockets keep nobody waiting."""
    context = startup.initialize("cpu", group)
    context.barrier()
    if context.rank == 0:
        child = os.fork()
        if child == 0:
            while True:
                signal.pause()
        PROGRESS[7] = child
        os.kill(os.getpid(), signal.SIGKILL)
    context.barrier()


def test_a_child_of_a_rank_does_not_stand_for_it():
    with Job(2, fork_and_wait, {**TWO_HOSTS, **ENDLESS}) as job:
        outcome = job.outcome(1)
    assert outcome.kind == "RankFailure" and outcome.ranks == (0,)
    os.kill(PROGRESS[7], signal.SIGKILL)


def leave_at_once(group):
    """The last that a rank does is a collective: nobody waits for it to stay."""
    from shardmath.collectives import all_gather, all_reduce

    context = startup.initialize("cpu", group)
    for length in (10, 30_000, 600_000):
        mine = np.full(length, context.rank, "f4")
        assert all_reduce(mine)[-1] == sum(range(context.size))
        assert all_gather(mine)[-1] == context.size - 1
    return "done"


@pytest.mark.parametrize("turn", range(3))
def test_a_rank_may_end_as_soon_as_its_call_returns(turn):
    assert run_job(4, leave_at_once, TWO_HOSTS) == ["done"] * 4


def test_settings_that_make_no_sense():
    def body(context):
        return True

    outcomes = run_job(2, busy, {"SHARDMATH_FAKE_HOSTS": "0"})
    assert {outcome.kind for outcome in outcomes} == {"ValueError"}
    outcomes = run_job(2, busy, {"SHARDMATH_TRANSPORT": "smoke"})
    assert all(o.kind == "ValueError" and "host, mpi, tcp" in o.text for o in outcomes)
    outcomes = run_job(2, busy, {"SHARDMATH_TRANSPORT": "mpi"})
    assert all(o.kind == "BackendUnavailable" and "mpiexec" in o.text for o in outcomes)
    assert on_ranks(1, body) == [True]


MPIEXEC = Path(sys.executable).parent / "mpiexec"
PROGRAM = Path(__file__).parent / "far_program.py"


def test_mpi_is_chosen_between_machines():
    command = [str(MPIEXEC), "-n", "3", *preloaded.python(), str(PROGRAM), "apart"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.split() == ["mpi"] * 3


@pytest.mark.parametrize(
    ("hosts", "refused"),
    [
        (["a.far", "b.far"], ""),
        (["a.far", "b.far", "a.far"], ""),
        (["vm", "vm"], "2 hosts are called vm: "),
        (["vm.far", "vm.near"], "2 hosts are called vm: "),  # Open MPI drops the domain
    ],
)
def test_mpi_is_not_chosen_between_hosts_of_one_name(hosts, refused):
    """There Open MPI hangs where a window is opened."""
    group = Mock(spec=MPIProcessGroup, nranks=len(hosts))
    why = MPITransport.unreached(Mock(hosts=hosts, real_hosts=2), group)
    assert refused in why if refused else not why


def apart(group):
    """Ranks of two machines without MPI."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mesh, "host_identity", lambda: f"machine {group.rank % 2}")
        context = startup.initialize("cpu", group)
        check_program(context, 700_001)  # more than is asked for at once, 4 MiB
        return context.heap.transport.name


def test_tcp_is_chosen_between_machines_without_mpi():
    assert run_job(3, apart, {}) == ["tcp"] * 3


@pytest.mark.parametrize("transport", ["host", "mpi"])
def test_machines_that_a_transport_does_not_reach(transport):
    outcomes = run_job(3, apart, {"SHARDMATH_TRANSPORT": transport})
    said = "of one machine only" if transport == "host" else "start the program with mpiexec"
    assert all(one.kind == "BackendUnavailable" and said in one.text for one in outcomes), outcomes


@pytest.mark.parametrize(("size", "hosts"), [(1, 2), (2, 2), (3, 2), (2, 1)])
def test_mpi_windows(size, hosts):
    """The program of far_program.py, with memory that is reached through MPI."""
    command = [str(MPIEXEC), "-n", str(size), "-env", "SHARDMATH_TRANSPORT", "mpi"]
    command += ["-env", "SHARDMATH_FAKE_HOSTS", str(hosts), *preloaded.python(), str(PROGRAM)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert sorted(done.stdout.split()) == ["mpi"] * size
