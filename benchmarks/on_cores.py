"""What every benchmark on cores needs: ranks, calls that take turns, gloo beside them, one record.

A benchmark is a function of this rank's context that returns rows. `run` starts it on ranks of this
machine, and records what rank 0 returns.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import record

from shardmath.collectives import all_reduce
from shardmath.context import startup
from shardmath.context.context import DistributedContext
from shardmath.errors import BackendUnavailable
from shardmath.launch import spawn

Call = Callable[[], object]
Rows = list[dict[str, Any]]
Name = TypeVar("Name")
Found = TypeVar("Found")


def run(
    name: str,
    measure: Callable[..., Rows],
    ranks: int,
    *args: Any,
    timeout: float | None = None,
    **facts: Any,
) -> Rows:
    """The rows of `measure(context, *args)`, kept in `results/<name>.json` with these facts."""
    rows: Rows = on_ranks(measure, ranks, *args, timeout=timeout)
    record.write(name, rows, ranks=ranks, **facts)
    return rows


def on_ranks(
    measure: Callable[..., Any], ranks: int, *args: Any, timeout: float | None = None
) -> Any:
    """What `measure(context, *args)` returns on rank 0. Where a package is missing, this process
    ends with the line that says which.
    """
    try:
        return spawn(_measured, ranks, measure, args, timeout=timeout)[0]
    except BackendUnavailable as error:
        sys.exit(str(error))


def _measured(measure: Callable[..., Any], args: Sequence[Any]) -> Any:
    context = startup.initialize("cpu")
    found = measure(context, *args)
    startup.finalize()
    return found


def in_turn(
    names: Iterable[Name], turns: int, measured: Callable[[Name], Found]
) -> dict[Name, list[Found]]:
    """What is measured under each name, turn by turn. One follows the other, so that what else the
    machine does falls on all; the turn before, which plans and touches pages, does not count.
    """
    found: dict[Name, list[Found]] = {name: [] for name in names}
    for turn in range(turns + 1):
        for name, so_far in found.items():
            one = measured(name)
            if turn:
                so_far.append(one)
    return found


def together(context: DistributedContext, call: Call) -> tuple[float, float]:
    """Seconds from when all ranks begin a call until all are done, and those that this rank's
    threads work meanwhile.
    """
    context.barrier()
    start, worked = time.perf_counter(), time.process_time()
    call()
    worked = time.process_time() - worked
    context.barrier()
    return time.perf_counter() - start, worked


def alone(context: DistributedContext, call: Call) -> Call:
    """`call` on rank 0, for which the others wait."""
    return call if context.rank == 0 else lambda: None


def turns_within(
    context: DistributedContext, seconds: float, turn: float, *, least: int, most: int
) -> int:
    """How many turns there is time for, as rank 0 finds, for which one has taken `turn` seconds."""
    fit = min(most, max(least, int(seconds / turn)))
    texts = context.board.exchange("turns", fit.to_bytes(8, "little"))
    return int.from_bytes(texts[0], "little")


def row_of_calls(context: DistributedContext, call: Call, count: int) -> list[float]:
    """Seconds of each of so many calls in a row, which all ranks begin together."""
    context.barrier()
    return record.timed(call, count)


def slowest_us(
    times: Mapping[Name, Sequence[Any]], *percents: float
) -> dict[Name, tuple[float, ...]]:
    """Percentiles of the seconds of each call, in microseconds, of the slowest rank. Collective."""
    own = [np.percentile(taken, percents) for taken in times.values()]
    slowest = 1e6 * all_reduce(np.array(own), op="max")
    return {name: tuple(map(float, row)) for name, row in zip(times, slowest, strict=True)}


def speedup(base: Iterable[float], own: Iterable[float]) -> float:
    """How many times as fast as `base`: the median over turns, in each of which both had the same
    load.
    """
    return statistics.median(b / o for b, o in zip(base, own, strict=True))


def gflops(operations: float, spent: Sequence[float]) -> dict[str, float]:
    """The columns of the median and of the best rate of calls that took so many seconds."""
    return {
        "GFLOP/s": round(operations / statistics.median(spent) / 1e9, 1),
        "best GFLOP/s": round(operations / min(spent) / 1e9, 1),
    }


@contextmanager
def gloo(context: DistributedContext, address: str) -> Iterator[Any]:
    """torch.distributed's calls by gloo, of the ranks of a context, which meet at that address."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", address, rank=context.rank, world_size=context.size)
    yield dist
    dist.barrier()
    dist.destroy_process_group()
