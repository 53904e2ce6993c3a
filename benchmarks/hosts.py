"""Control words and memory between two hosts, beside gloo and MPI: `python benchmarks/hosts.py`.

The hosts are two network namespaces of this machine, joined by a pair of virtual Ethernet devices;
that needs root and iproute2. There are one and two ranks a host, and four on one host, so that on
two cores some runs have more ranks than cores. Each process makes all libraries' calls in turn, so
that other load on the machine affects all. Figures are of the slowest rank: the median; the tenth
percentile, which is the time of a call when nothing else wants the cores; and the mean, which
includes the calls that waited for a core. `link_bytes` is what a call put on the link.

MPI is MPICH, whose mpiexec starts the ranks if it and mpi4py are installed; otherwise MPI has no
figures. By default its UCX finds that the processes share a machine, whatever their namespaces, and
uses shared memory. For two hosts it is told to use TCP, also within a host. Ranks that MPI started
would reach memory on other hosts by MPI: they are told to use this package's own transport.

`--beside FOLDER` also measures the package in that folder, one job after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import record
from on_cores import gloo

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parent / "src"
sys.path.append(str(HERE.parent / "tests"))

PORT, TURNS = "29551", 6
# Microseconds, by ranks and hosts.
GOALS = {
    (2, 2): {"barrier": 60.0, "all_reduce 24 B": 120.0, "all_reduce 8 MB": 18e3},
    (4, 2): {"barrier": 500.0},
    (4, 1): {"barrier": 500.0},
}


def main() -> None:
    import namespaces

    parser = argparse.ArgumentParser(description="words and memory between two hosts")
    parser.add_argument("--beside", type=Path, help="a folder with the package, to measure too")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        measure(Path(given.measure))
        return
    beside = {"beside": given.beside.resolve()} if given.beside else {}
    rows = []
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(namespaces.two_hosts())
        except namespaces.Unavailable as why:
            print(f"not measured: {why}")
            return
        for ranks, spread in GOALS:
            for turn in range(2):
                for source, folder in {"": SOURCES, **beside}.items():
                    facts = {"turn": turn, "source": source, "hosts": spread}
                    places = [rank * spread // ranks for rank in range(ranks)]
                    found = job(hosts, namespaces.ADDRESSES[0], places, folder)
                    rows += [with_goal({**facts, **row}) for row in found]
    record.write("hosts", rows)


def with_goal(row: dict[str, Any]) -> dict[str, Any]:
    """The row, and whether its goal was met, if it has one."""
    goal = GOALS[row["ranks"], row["hosts"]].get(row["what"])
    if goal is None or row["by"] != "shardmath" or row["source"]:
        return row
    return row | {"goal": goal, "met": row["us"] <= goal}


def job(hosts: Any, meeting: str, places: list[int], sources: Path) -> list[dict[str, Any]]:
    """The rows of one job, whose ranks are on these hosts, and meet at that address."""
    variables = {
        "PYTHONPATH": str(sources),
        "GLOO_SOCKET_IFNAME": "link0",
        "MASTER_ADDR": meeting,
        "MASTER_PORT": PORT,
        "OMP_NUM_THREADS": "1",
        "SHARDMATH_TRANSPORT": "tcp" if len(set(places)) > 1 else "host",
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = folder / "rows.json"
        program = [sys.executable, __file__, "--measure", str(found)]
        mpiexec = record.beside_python("mpiexec")
        if mpiexec and find_spec("mpi4py"):
            spread = len(set(places))
            variables |= {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "link0"} if spread > 1 else {}
            command = hosts.hydra(folder, mpiexec, spread, len(places))
            ranks = [subprocess.Popen([*command, *program], env=os.environ | variables)]
        else:
            ranks = []
            for rank, place in enumerate(places):
                own = {"SLURM_NTASKS": str(len(places)), "SLURM_PROCID": str(rank)}
                ranks.append(hosts.start(place, program, env=os.environ | variables | own))
        statuses = [rank.wait() for rank in ranks]
        if any(statuses):
            raise RuntimeError(f"ranks have failed: {statuses}")
        rows: list[dict[str, Any]] = json.loads(found.read_text())
        return rows


def measure(found: Path) -> None:
    """One rank's part of a job: rank 0 writes the rows."""
    import numpy as np
    import torch

    import shardmath
    from shardmath.collectives import all_reduce

    context = shardmath.initialize("cpu")
    address = f"tcp://{os.environ['MASTER_ADDR']}:{int(PORT) + 1}"
    library = sys.modules.get("mpi4py.MPI")  # by which the ranks have met, where MPI started them
    world = None if library is None else library.COMM_WORLD
    with gloo(context, address) as dist:
        ways, repeats = {}, {}
        ways["barrier", "shardmath"] = lambda: context.board.barrier("barrier")
        ways["barrier", "gloo"] = dist.barrier
        if world is not None:
            ways["barrier", "MPI"] = world.Barrier
        for name, count in (("24 B", 3), ("8 MB", 1_000_000)):
            x, into = np.ones(count), np.empty(count)
            tensor, what = torch.ones(count, dtype=torch.float64), f"all_reduce {name}"
            ways[what, "shardmath"] = lambda x=x, into=into: all_reduce(x, out=into)
            ways[what, "gloo"] = lambda tensor=tensor: dist.all_reduce(tensor)
            if world is not None:
                sums = np.empty(count)
                ways[what, "MPI"] = lambda x=x, sums=sums: world.Allreduce(x, sums)
            repeats[what] = 3 if count > 3 else 50
        times: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
        sent = dict.fromkeys(ways, 0)
        for turn in range(TURNS):
            for way, call in ways.items():
                context.barrier()
                call()
                context.barrier()
                before = on_the_link()
                taken = record.timed(call, repeats.get(way[0], 50))
                context.barrier()
                sent[way] = (on_the_link() - before) // len(taken)
                times[way] += taken if turn else []
        for way, taken in times.items():
            own = [*np.percentile(taken, [50, 10]), np.mean(taken)]
            times[way] = all_reduce(1e6 * np.array(own), op="max").tolist()
        names = ("us", "us_undisturbed", "us_mean")
        rows = [
            {"ranks": context.size, "what": what, "by": by}
            | dict(zip(names, times[what, by], strict=True))
            | {"link_bytes": sent[what, by]}
            for what, by in ways
        ]
        if context.rank == 0:
            found.write_text(json.dumps(rows))
    shardmath.finalize()


def on_the_link() -> int:
    """The bytes that have gone over the link so far, both ways, as this host's device counts."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "link0":
            return int(counts.split()[0]) + int(counts.split()[8])
    raise RuntimeError("this host has no link")


if __name__ == "__main__":
    main()
