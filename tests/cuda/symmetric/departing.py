"""One rank ends, in one of several ways, while its peers compute: a program, and who starts it.

`run` starts `departing.py FOLDER HOW WHERE MOMENT` under a launcher. Every rank leaves one file in
the folder: the rank that ends, when it did so; the others, what they raised, when, and whether
their GPUs were usable after that. Times are of the monotonic clock, which all processes share.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from shardmath.base import config

# How it ends: by a signal, or by itself; interrupted, it closes its context and stays, or catches
# nothing ("Ctrl-C"); or it closes one of its two contexts only.
HOWS = ("SIGKILL", "SIGTERM", "exit", "raise", "interrupt", "Ctrl-C", "finalize", "leave one")
# Where its peers wait: in calls of ours, or in torch.cuda.synchronize() for a kernel of a handle or
# of a graph's; or they do not wait, and only ask the stream.
WHERES = ("ours", "synchronize", "graph", "python")
# When: between two steps, the others being in the next; or at any time.
MOMENTS = ("apart", "anywhere")
JOBS = [  # a handle's kernels know nothing of the context that is left
    (how, where)
    for how in HOWS
    for where in WHERES
    if how != "leave one" or where in ("ours", "graph")
]
STEPS = 8  # that all ranks make before one of them ends
DEADLINE = 60.0  # seconds, of every wait: what must not pass
SHARED = Path(__file__).resolve().parents[2]


# -- the program -----------------------------------------------------------------------------------


class Rank:
    """One rank, which computes in the manner of `where`."""

    def __init__(self, folder: str, where: str) -> None:
        import torch
        from visible import gpu_of

        import shardmath
        from shardmath import symmetric_memory

        self.folder, self.where, self.torch = Path(folder), where, torch
        self.context = shardmath.initialize(gpu_of(_rank_here()))
        self.rank, self.size = self.context.rank, self.context.size
        torch.cuda.set_device(self.context.device_id)
        self.x = torch.ones(300_000, device="cuda")
        self.handle = symmetric_memory.rendezvous(
            symmetric_memory.empty(1024, dtype=torch.float32, device="cuda")
        )
        self.split = self.context.split(0)
        self.reduce(self.split)
        self.reduce(self.context)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.reduce(self.split)
        torch.cuda.synchronize()

    def reduce(self, context: Any) -> None:
        from shardmath.collectives import all_reduce

        all_reduce(self.x, op="max", out=self.x, context=context)

    def step(self) -> None:
        """A call or two, and a wait for the GPU where the user would wait."""
        torch = self.torch
        if self.where == "ours":
            self.reduce(self.split)
            self.split.barrier()  # the call before has waited for nobody
            self.handle.barrier()
            self.handle.synchronize()
        elif self.where == "synchronize":
            self.handle.barrier()
            torch.cuda.synchronize()
        elif self.where == "graph":
            self.graph.replay()
            torch.cuda.synchronize()
            self.reduce(self.split)
        else:
            self.handle.barrier()
            while not torch.cuda.current_stream().query():
                sum(range(1000))
        self.handle.check()

    def say(self, **facts: Any) -> None:
        """Leave this rank's file."""
        part = self.folder / f"{self.rank}.part"
        part.write_text(json.dumps({"rank": self.rank, "pid": os.getpid(), **facts}))
        part.rename(self.folder / f"{self.rank}.json")

    def survive(self) -> None:
        """Step until something is raised; say what, and go on alone."""
        torch = self.torch
        try:
            while True:
                self.step()
        except Exception as error:
            raised = time.monotonic()
            kind, ranks, text = type(error).__name__, list(getattr(error, "ranks", [])), str(error)
        waiting = [each.name for each in threading.enumerate() if "departures" in each.name]
        usable = float(torch.ones(1000, device="cuda").sum()) == 1000.0
        self.split.close()
        self.context.close()
        again = float(torch.full((1000,), 2.0, device="cuda").sum()) == 2000.0
        self.say(
            raised=raised,
            kind=kind,
            ranks=ranks,
            text=text,
            usable=usable and again,
            threads=len(waiting),
        )

    def end(self, how: str, moment: str) -> None:
        """Step as the others do, and then end: between two steps, or anywhere."""
        for _ in range(STEPS):
            self.step()
        signum = {"interrupt": signal.SIGINT, "Ctrl-C": signal.SIGINT}.get(how)
        signum = signum or getattr(signal, how, None)
        try:
            if moment == "anywhere" and signum is not None:
                threading.Timer(random.uniform(0.0, 0.05), self._signal, [signum]).start()
                while True:
                    self.step()
            if moment == "anywhere":
                for _ in range(random.randrange(20)):
                    self.step()
            else:
                select.select([], [], [], 0.3)  # the others have come to the next step
            self._end(how, signum)
        except KeyboardInterrupt:
            if how == "Ctrl-C":
                raise
            self.context.close()
            self._stay()

    def _signal(self, signum: int) -> None:
        self.say(ended=time.monotonic())
        os.kill(os.getpid(), signum)

    def _end(self, how: str, signum: int | None) -> None:
        if signum is not None:
            self._signal(signum)
            select.select([], [], [], 60.0)  # it comes in here
        self.say(ended=time.monotonic())
        if how == "exit":
            os._exit(3)
        if how == "raise":
            raise OSError("no such file")
        if how == "leave one":
            self.split.close()
        else:
            import shardmath

            shardmath.finalize()
        self._stay()

    def _stay(self) -> None:
        """A process that ends would be told from one that has only left."""
        while len(list(self.folder.glob("*.json"))) < self.size:
            select.select([], [], [], 0.01)


def _rank_here() -> int:
    """This process's rank, before there is a context: each launcher has its own variable."""
    for name in ("SHARDMATH_RANK", "RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK"):
        if name in config.environment():
            return int(config.environment()[name])
    raise SystemExit("started by no launcher that is known here")


def main(folder: str, how: str, where: str, moment: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    random.seed(f"{how} {where} {moment} {_rank_here()}")
    rank = Rank(folder, where)
    rank.context.barrier()
    if rank.rank == rank.size - 1:
        rank.end(how, moment)
    else:
        # The launcher answers the first end with SIGTERM: the others are to be heard all the same.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        rank.survive()


# -- who starts it ---------------------------------------------------------------------------------


def run(
    folder: Path, how: str, where: str, moment: str, *, launcher: str, size: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the rank that ends has said, and what the others have, in rank order.

    AssertionError, with the output, where they do not say anything in a minute.
    """
    from started import command

    words = command(launcher, size)
    if launcher.startswith("mpirun"):  # which would end all ranks at once
        recover = "--enable-recovery" if "--oversubscribe" in words else "-disable-auto-cleanup"
        words.insert(1, recover)
    places = [str(SHARED), str(SHARED.parent / "src")]
    variables = {
        **config.environment(),
        "PYTHONPATH": os.pathsep.join([*places, *filter(None, sys.path)]),
        "SHARDMATH_TIMEOUT": str(DEADLINE),
        "OMP_NUM_THREADS": "1",
    }
    files = [folder / f"{rank}.json" for rank in range(size)]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [*words, str(Path(__file__).resolve()), str(folder), how, where, moment],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        give_up = time.monotonic() + 2 * DEADLINE
        while not all(file.exists() for file in files) and time.monotonic() < give_up:
            if process.poll() is not None:
                break
            select.select([], [], [], 0.02)
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5.0)
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5.0)
    said = (folder / "output").read_text(errors="replace")
    missing = [file.stem for file in files if not file.exists()]
    assert not missing, f"ranks {missing} have said nothing: {said}"
    *others, victim = [json.loads(file.read_text()) for file in files]
    return victim, others


if __name__ == "__main__":
    sys.path.insert(0, str(SHARED))
    main(*sys.argv[1:])
