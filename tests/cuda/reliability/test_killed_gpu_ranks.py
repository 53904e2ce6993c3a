"""R23: a rank with a GPU is killed: the others say so, wherever they wait, and come to an end.

They notice it of themselves: their own time is never up.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import select
import signal
import statistics
import time
from collections import Counter

import pytest
from visible import gpu_of

from mortal import ENDLESS, Job, Raised
from shardmath.context import startup

PROGRESS = memoryview(mmap.mmap(-1, 64)).cast("Q")
BALLAST = 4 << 30  # bytes of a GPU's memory that a rank of the last test shares


def busy(group, what, ballast=0):
    """The same thing over and over, until a peer fails; then leave."""
    import torch

    from shardmath.collectives import all_reduce
    from shardmath.handles.allocation import allocate_symmetric_memory
    from shardmath.handles.rendezvous import rendezvous

    context = startup.new_context(gpu_of(group.rank), group)
    torch.cuda.set_device(gpu_of(group.rank))
    with context:
        x = allocate_symmetric_memory((300_000,), torch, dtype="float32")
        shared = allocate_symmetric_memory((300_000 + ballast // 4,), torch, dtype="float32")
    x.fill_(1)
    shared.fill_(2)
    handle = rendezvous(x, context)
    stream = torch.cuda.current_stream().cuda_stream
    try:
        for number in range(1, 1 << 30):
            if what == "all_reduce":
                all_reduce(x, op="max", out=x, context=context)
                context.team.synchronize(stream)
            elif what == "all_reduce, not waited for":
                all_reduce(x, op="max", out=x, context=context)
            elif what == "barrier":
                handle.barrier()
                handle.synchronize()
            else:  # the stream waits in a collective, the host in the handle
                all_reduce(x, op="max", out=x, context=context)
                handle.synchronize()
            PROGRESS[group.rank] = number
    finally:
        context.close()


def killed(size, what, ballast=0):
    """A job of which one rank is killed: the seconds until all others have raised."""
    victim = size // 2
    PROGRESS[:] = memoryview(bytes(64)).cast("Q")
    with Job(size, lambda group: busy(group, what, ballast), ENDLESS) as job:
        while not all(count >= 20 for count in PROGRESS[:size]):
            select.select([], [], [], 0.01)
        job.signal(victim, signal.SIGKILL)
        moment = time.monotonic()
        outcomes = {rank: job.outcome(rank) for rank in range(size)}
    assert outcomes.pop(victim) is None
    for rank, outcome in outcomes.items():
        assert isinstance(outcome, Raised), outcome
        assert outcome.kind == "RankFailure" and victim in outcome.ranks, (rank, outcome)
    return max(outcome.at for outcome in outcomes.values()) - moment


@pytest.mark.parametrize(
    "what", ["all_reduce", "all_reduce, not waited for", "barrier", "all_reduce, by the handle"]
)
def test_survivors_name_the_killed_rank(gpus, size, what, record_property):
    if size == 1:
        pytest.skip("nobody to survive")
    record_property("seconds", killed(size, what))


def test_the_memory_of_a_job_that_was_killed_is_free_again(gpus, size, record_property):
    """That of the killed rank, which its peers had mapped, too."""
    if size == 1:
        pytest.skip("nobody to survive")
    record_property("gpus", gpu_names())
    before = unowned_memory()
    killed(size, "all_reduce", BALLAST)
    left = [new - old for old, new in zip(before, unowned_memory(), strict=True)]
    assert max(left) < BALLAST // 2, left


class Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class Process(ctypes.Structure):
    """nvmlProcessInfo_t."""

    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


UNKNOWN = ctypes.c_ulonglong(-1).value  # what NVML says of processes that it does not account for
MOST = 1024  # processes on a GPU


@contextlib.contextmanager
def nvml():
    """NVML, which needs no CUDA context: its functions, by name, and the handles of the GPUs."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as missing:  # containers may have the driver's libraries for computing alone
        pytest.skip(f"NVML says who uses a GPU's memory: {missing}")

    def call(name, *arguments):
        status = getattr(library, f"nvml{name}")(*arguments)
        assert status == 0, f"nvml{name} returns {status}"

    call("Init_v2")
    try:
        count = ctypes.c_uint()
        call("DeviceGetCount_v2", ctypes.byref(count))
        devices = [ctypes.c_void_p() for _ in range(count.value)]
        for number, device in enumerate(devices):
            call("DeviceGetHandleByIndex_v2", number, ctypes.byref(device))
        yield call, devices
    finally:
        call("Shutdown")


def unowned_memory():
    """The used bytes of each GPU that belong to no process: other programs may share the GPUs.

    Where NVML cannot say what a process uses, as in some containers, its bytes are among these.
    """

    def unowned(call, device):
        memory, count, processes = Memory(), ctypes.c_uint(MOST), (Process * MOST)()
        call("DeviceGetMemoryInfo", device, ctypes.byref(memory))
        call("DeviceGetComputeRunningProcesses_v3", device, ctypes.byref(count), processes)
        owned = [process.used for process in processes[: count.value]]
        return memory.used - sum(used for used in owned if used != UNKNOWN)

    with nvml() as (call, devices):
        # A program that allocates between the two questions spoils one look, not five.
        return [statistics.median(unowned(call, device) for _ in range(5)) for device in devices]


def gpu_names():
    """The names of the GPUs, and how many there are of each: "2 NVIDIA H200"."""
    with nvml() as (call, devices):
        names = []
        for device in devices:
            name = ctypes.create_string_buffer(96)
            call("DeviceGetName", device, name, len(name))
            names.append(name.value.decode())
    return ", ".join(f"{count} {name}" for name, count in Counter(names).items())
