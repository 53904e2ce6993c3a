"""What every benchmark on GPUs needs: ranks beside NCCL, a clock, one command line, one record.

A benchmark is a function of `Ranks` that yields rows. `run` starts it on as many ranks as the
command line says. Rank 0 prints each row as soon as it is measured, and its rows are recorded.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import tempfile
from collections.abc import Callable, Container, Iterable
from contextlib import suppress
from functools import cached_property
from typing import Any

import record

from shardmath.collectives.cells import DeviceCollectives
from shardmath.context import startup
from shardmath.launch.function import spawn
from shardmath.symmetric.heap import Location

REPEATS = 9
WARM = 12  # calls of each system before it is timed, at least


class Ranks:
    """What a rank measures with: its context, NCCL's group, and our collectives."""

    def __init__(self, store: str, size: int) -> None:
        import torch
        import torch.distributed as dist

        self.torch, self.dist = torch, dist
        self.rank, self.size = int(os.environ["SHARDMATH_RANK"]), size
        count = torch.cuda.device_count()
        self.share_gpus = size > count  # whether ranks share GPUs, which NCCL does not
        self.device = torch.device("cuda", self.rank % count)
        torch.cuda.set_device(self.device)
        self.context = startup.initialize(self.device.index)
        if self.share_gpus:
            return
        dist.init_process_group(
            "nccl",
            init_method=f"file://{store}",
            rank=self.rank,
            world_size=size,
            device_id=self.device,
        )
        self.group = dist.group.WORLD.group_name

    @cached_property
    def moves(self) -> DeviceCollectives:
        """Our collectives below the public functions. Collective at the first access."""
        return DeviceCollectives.of(self.context)

    def stream(self) -> int:
        """The stream that is current, or being captured."""
        return self.torch.cuda.current_stream().cuda_stream

    def largest(self, value: float) -> float:
        """The largest of all ranks' values."""
        return max(self.context.agree("largest", lambda: value, lambda values: values))

    def time(self, call: Callable[[], object], calls: int, *, graph: bool = True) -> float:
        """Microseconds per call, in a graph of so many or one by one: of all ranks, the slowest."""
        return self.times({"call": call}, calls, eager=() if graph else ("call",))["call"]

    def times(
        self, systems: dict[str, Callable[[], object]], calls: int, *, eager: Container[str] = ()
    ) -> dict[str, float]:
        """Microseconds per call of each system, of the slowest rank. The systems take turns, in
        another order each time, so that all run on GPUs that are equally warm.

        Those named in `eager`, which cannot be captured, are called one by one.
        """
        return self.run_times(
            {
                name: self.prepared(call, calls, graph=name not in eager)
                for name, call in systems.items()
            },
            calls,
        )

    def run_times(self, runs: dict[str, Callable[[], object]], calls: int) -> dict[str, float]:
        """`times` of systems that are `prepared`: each of `runs` makes so many calls."""
        torch = self.torch
        found: dict[str, list[float]] = {name: [] for name in runs}
        order, shuffled = list(runs), random.Random(REPEATS)  # alike on all ranks
        for _ in range(REPEATS):
            shuffled.shuffle(order)
            for name in order:
                torch.cuda.synchronize()
                self.context.barrier()
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                runs[name]()
                end.record()
                torch.cuda.synchronize()
                found[name].append(start.elapsed_time(end) * 1e3 / calls)
        self.context.team.check()
        return {name: self.largest(statistics.median(times)) for name, times in found.items()}

    def prepared(
        self, call: Callable[[], object], calls: int, *, graph: bool
    ) -> Callable[[], object]:
        """What makes so many calls, which have been made before, one by one or in a graph.

        Where the capture fails it raises; the streams are then as before, so others can go on.
        """

        def many() -> None:
            for _ in range(calls):
                call()

        for _ in range(-(-WARM // calls)):
            many()
        self.torch.cuda.synchronize()
        if not graph:
            return many
        captured = self.torch.cuda.CUDAGraph()
        current = self.torch.cuda.current_stream()
        # torch does not leave the stream of a capture that fails: the outer `with` does.
        with self.torch.cuda.stream(current), self.torch.cuda.graph(captured):
            many()
        captured.replay()
        return captured.replay

    def host_times(self, call: Callable[[], object], calls: int) -> list[float]:
        """Seconds until each of so many calls in a row returns, for whose kernels nobody waits. All
        ranks begin when their GPUs are idle.
        """
        self.torch.cuda.synchronize()
        self.context.barrier()
        return record.timed(call, calls)

    def seconds_until_done(self, call: Callable[[], object], calls: int) -> float:
        """Seconds of each of so many calls in a row, until all of them are done."""

        def row() -> None:
            for _ in range(calls):
                call()
            self.torch.cuda.synchronize()

        return self.host_times(row, 1)[0] / calls

    def slowest_us(self, seconds: Iterable[float]) -> float:
        """The median in microseconds, of the slowest rank."""
        return 1e6 * self.largest(statistics.median(seconds))

    def symmetric_memory(self, nbytes: int) -> tuple[Any, list[int]]:
        """Symmetric memory of so many bytes: the buffer, and where every rank's lies."""
        context, buffer = self.context, self.context.heap.allocate(nbytes)
        context.announce(buffer.block)
        where = buffer.block.location
        found = context.agree("shared", lambda: (where.segment, where.offset), lambda f: f)
        places = [context.peer_address(r, Location(*p), nbytes) for r, p in enumerate(found)]
        return buffer, places

    def torch_memory(self, count: int, dtype: Any) -> tuple[Any, Any]:
        """A tensor in torch's own symmetric memory, and the handle of its rendezvous."""
        import torch.distributed._symmetric_memory as symmetric

        made = symmetric.empty(count, dtype=dtype, device=self.device)
        return made, symmetric.rendezvous(made, self.group)

    def torch_barrier_us(self) -> float:
        """Microseconds of a barrier of torch's symmetric memory."""
        _, handle = self.torch_memory(64, self.torch.float32)
        return self.time(lambda: handle.barrier(channel=0), 200)

    def close(self) -> None:
        """Leave NCCL's group and the context; after a failure the figures are still good."""
        with suppress(Exception):
            self.torch.cuda.synchronize()
            if not self.share_gpus:
                self.dist.destroy_process_group()
            startup.finalize()


def facts(gpus: int) -> dict[str, Any]:
    """The GPUs of a run of so many ranks, and versions of what the peers' figures come from."""
    import torch

    return {
        "gpu": torch.cuda.get_device_name(),
        "ranks": gpus,
        "gpus": min(gpus, torch.cuda.device_count()),
        "versions": {
            "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "cuda": torch.version.cuda,
        },
    }


def in_turn(call: Callable[[int], object], count: int) -> Callable[[], object]:
    """A call that calls `call(0)`, `call(1)`, ... `call(count - 1)`, `call(0)`, ..."""
    turns = itertools.cycle(range(count))
    return lambda: call(next(turns))


def command(text: str | None) -> argparse.ArgumentParser:
    """The command line that all have: how many GPUs, or ranks on fewer, and which commit."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("gpus", type=int, nargs="?", default=8)
    parser.add_argument("--commit", default="", help="where the source has no repository")
    return parser


def run(
    name: str, measure: Callable[..., Iterable[dict]], options: argparse.Namespace, *args: Any
) -> list[dict]:
    """Print and keep the rows of `measure(ranks, *args)` on `options.gpus` ranks.

    They are kept in `results/<name>_<how many GPUs>.json`, or `..._<ranks>_on_<GPUs>.json`.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        found = spawn(_measured, options.gpus, measure, store, options.gpus, args)
    rows, about = found[0]
    name += f"_{options.gpus}" + (f"_on_{about['gpus']}" if about["gpus"] < options.gpus else "")
    record.keep(name, rows, options.commit, **about)
    return rows


def _measured(measure: Callable[..., Iterable[dict]], store: str, size: int, args: Any) -> list:
    ranks, rows = Ranks(store, size), list[dict]()
    for row in measure(ranks, *args):
        rows.append(row)
        if ranks.rank == 0:
            print(json.dumps({k: _short(v) for k, v in row.items()}), flush=True)
    found = [rows, facts(size)]
    ranks.close()
    return found


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value
