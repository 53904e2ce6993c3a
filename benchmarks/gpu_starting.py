"""How long it takes until GPUs can work together, beside NCCL and torch's symmetric memory.

    python benchmarks/gpu_starting.py 4

CUDA itself is up before anything is timed, and the ranks begin each step together. "first" is the
first time in a process, including what it has to load; "again" is the median of later times.
Milliseconds, for the slowest rank.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import record
from on_gpus import command, facts

from shardmath.collectives import all_reduce
from shardmath.context import startup
from shardmath.handles.allocation import allocate_symmetric_memory, free_symmetric_memory
from shardmath.handles.rendezvous import rendezvous
from shardmath.launch.function import spawn

AGAIN = 5
MIB = 1 << 20
GOALS = {"initialize": "<= 700"}


class Starts:
    """What a rank times, each step begun by all ranks together."""

    def __init__(self, store: str, size: int) -> None:
        import torch
        import torch.distributed as dist

        self.torch, self.dist = torch, dist
        self.rank = int(os.environ["SHARDMATH_RANK"])
        torch.cuda.set_device(self.rank)
        torch.zeros(1, device="cuda")
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=self.rank, world_size=size
        )
        self.rows: list[dict[str, Any]] = []

    def step(
        self, what: str, call: Callable[[], Any], undo: Callable[[Any], object] | None = None
    ) -> Any:
        """Time `call`: once or, where `undo` says how, several times. What it returned last."""
        times = []
        for left in reversed(range(1 + AGAIN if undo else 1)):
            self.dist.barrier()
            start = time.perf_counter()
            made = call()
            self.torch.cuda.synchronize()
            times.append(self.slowest((time.perf_counter() - start) * 1e3))
            if undo and left:
                undo(made)
        row = {"what": what, "first_ms": round(times[0], 2)}
        if undo:
            row["again_ms"] = round(statistics.median(times[1:]), 3)
        self.rows.append(row | ({"goal": GOALS[what]} if what in GOALS else {}))
        return made

    def slowest(self, value: float) -> float:
        """The largest of all ranks' values."""
        found = self.torch.tensor([value], dtype=self.torch.float64)
        self.dist.all_reduce(found, op=self.dist.ReduceOp.MAX)
        return found.item()


def measure(store: str, size: int) -> list[Any]:
    """The rows of a rank, and what GPUs they are of."""
    starts = Starts(store, size)
    torch, dist = starts.torch, starts.dist
    starts.step("initialize", lambda: startup.initialize(starts.rank), _finalize)
    for mib in (64, 8192):
        starts.step(
            f"symmetric memory, {mib} MiB",
            lambda mib=mib: allocate_symmetric_memory(mib * MIB, torch, dtype=torch.uint8),
            free_symmetric_memory,
        )
    held = allocate_symmetric_memory(MIB, torch, dtype=torch.uint8)
    starts.step("rendezvous", lambda: rendezvous(held))
    operand = torch.ones(256, device="cuda")
    starts.step("all_reduce", lambda: all_reduce(operand), lambda _: None)
    free_symmetric_memory(held)
    _finalize(None)
    group = starts.step("NCCL: group and all_reduce", lambda: _first_of_nccl(dist, operand))
    starts.step("NCCL: all_reduce", lambda: dist.all_reduce(operand, group=group), lambda _: None)
    starts.step(
        "torch: symmetric memory and rendezvous, 64 MiB", lambda: _first_of_torch(torch, dist)
    )
    found = [starts.rows, facts(size)]
    dist.destroy_process_group()
    return found


def _finalize(_: Any) -> None:
    startup.finalize()


def _first_of_nccl(dist: Any, operand: Any) -> Any:
    group = dist.new_group(backend="nccl")
    dist.all_reduce(operand, group=group)
    return group


def _first_of_torch(torch: Any, dist: Any) -> Any:
    import torch.distributed._symmetric_memory as symmetric

    group = dist.new_group(backend="nccl").group_name
    buffer = symmetric.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    return buffer, symmetric.rendezvous(buffer, group)


if __name__ == "__main__":
    options = command(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows, about = spawn(measure, options.gpus, f"{folder}/store", options.gpus)[0]
    record.keep(f"gpu_starting_{options.gpus}", rows, options.commit, **about)
