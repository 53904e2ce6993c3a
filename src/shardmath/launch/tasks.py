"""Ranks on the workers of a cluster that the user has already: Dask's or Ray's.

Each rank is a task of the cluster's, which forks a process from its worker, and returns what that
process has reported. So a worker keeps nothing of a job, may have several ranks, and the ranks end
with it. The ranks meet over TCP, at a port of the worker that has rank 0, and know each other by a
key made for the job: see `group.tcp`. The function and its arguments travel as the cluster sends
them, to workers that trust it; results and failures travel as from any rank of `spawn`.

Nothing of either library is imported here but by whoever passes it.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from shardmath.base import config
from shardmath.base.immutable import Immutable
from shardmath.group.handshake import new_key
from shardmath.launch.failure import Failure, rebuild
from shardmath.launch.forked import fork_job, late

Report = tuple[bytes, bytes]  # a result, or else a failure; neither of a rank that took too long

_LOST = 30.0  # seconds that the cluster has to bring reports of ranks whose time is up


class _Job(Immutable):
    """What all ranks of a job are told."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    size: int
    hub: str  # host and port
    key: str
    timeout: float | None


def spawn_on(
    cluster: Any,
    function: Callable[..., Any],
    n: int,
    args: tuple[Any, ...],
    timeout: float | None,
) -> list[bytes]:
    """The encoded results of `n` ranks on the workers of `cluster`. See `spawn`."""
    kind = type(cluster).__module__.partition(".")[0]
    if kind == "distributed":
        begin: Callable[..., tuple[str, Callable[..., Sequence[Report]]]] = _dask
    elif getattr(cluster, "__name__", "") == "ray":
        begin = _ray
    else:
        raise TypeError(
            f"on is a dask.distributed.Client, or the module ray, and not {cluster!r}; without it, "
            "ranks are on this host"
        )
    hub, perform = begin(cluster, n)
    job = _Job(function, args, n, hub, new_key().hex(), timeout)
    reports = perform(job, None if timeout is None else timeout + _LOST)
    failures = [Failure.decode(failure) for _, failure in reports if failure]
    if failures:
        raise rebuild(min(failures, key=lambda failure: failure.order))
    unfinished = [rank for rank, report in enumerate(reports) if not any(report)]
    if unfinished:
        raise late(timeout, unfinished)
    return [result for result, _ in reports]


# -- on a worker -----------------------------------------------------------------------------------


def _be_rank(job: _Job, rank: int) -> Report:
    """A task: one rank, to its end."""
    variables = {
        f"{config.PREFIX}RANK": str(rank),
        f"{config.PREFIX}SIZE": str(job.size),
        f"{config.PREFIX}HUB": job.hub,
        f"{config.PREFIX}KEY": job.key,
    }
    deadline = None if job.timeout is None else time.monotonic() + job.timeout
    watched = fork_job(1, job.function, job.args, first=rank, variables=variables)
    watched.watch(deadline=deadline)
    failure = watched.first_failure
    return watched.results.get(rank, b""), b"" if failure is None else failure.encode()


def _free_port(host: str) -> str:
    """A task: where rank 0 can listen, on this worker's host."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        return f"{host}:{listener.getsockname()[1]}"


# -- Dask ------------------------------------------------------------------------------------------


def _dask(client: Any, n: int) -> tuple[str, Callable[..., Sequence[Report]]]:
    """Where the ranks meet, and what performs a job, in tasks of Dask's.

    A worker has as many ranks as threads at most: tasks that wait for each other all have to run.
    Raises ValueError where there are too few.
    """
    workers = client.scheduler_info(n_workers=-1)["workers"]
    threads = [address for address, facts in workers.items() for _ in range(facts["nthreads"])]
    if len(threads) < n:
        raise ValueError(f"{n} ranks need {n} threads of workers, and there are {len(threads)}")
    places = threads[:n]
    host = urlsplit(places[0]).hostname or "127.0.0.1"

    def submitted(place: str, task: Callable[..., Any], *args: Any) -> Any:
        fixed = {"workers": [place], "allow_other_workers": False, "pure": False, "retries": 0}
        return client.submit(task, *args, **fixed)

    def perform(job: _Job, most: float | None) -> Sequence[Report]:
        futures = [submitted(place, _be_rank, job, rank) for rank, place in enumerate(places)]
        try:
            reports = client.submit(_all, *futures, pure=False).result(timeout=most)
        except TimeoutError:
            unfinished = [rank for rank, future in enumerate(futures) if not future.done()]
            raise late(job.timeout, unfinished) from None
        finally:
            client.cancel(futures)
        return list(reports)

    return str(submitted(places[0], _free_port, host).result()), perform


def _all(*reports: Report) -> tuple[Report, ...]:
    """A task that gathers the reports of all ranks' tasks."""
    return reports


# -- Ray -------------------------------------------------------------------------------------------


def _ray(ray: Any, n: int) -> tuple[str, Callable[..., Sequence[Report]]]:
    """The same in tasks of Ray's, of one CPU each.

    Raises ValueError where there are not so many: tasks that wait for each other all have to run.
    """
    there = int(ray.cluster_resources().get("CPU", 0))
    if there < n:
        raise ValueError(f"{n} ranks need {n} CPUs of Ray's, and there are {there}")
    strategies = sys.modules["ray.util.scheduling_strategies"]

    def begun(task: Callable[..., Any], *args: Any, node: str = "", cpus: int = 1) -> Any:
        strategy = strategies.NodeAffinitySchedulingStrategy(node, soft=False) if node else "SPREAD"
        options = {"num_cpus": cpus, "max_retries": 0, "scheduling_strategy": strategy}
        return ray.remote(**options)(task).remote(*args)

    node, hub = ray.get(begun(_free_port_of_node, cpus=0))

    def perform(job: _Job, most: float | None) -> Sequence[Report]:
        # Rank 0 where the port is free, the others wherever Ray has room.
        tasks = [begun(_be_rank, job, rank, node="" if rank else node) for rank in range(n)]
        done, running = ray.wait(tasks, num_returns=n, timeout=most)
        if running:
            for task in running:
                ray.cancel(task, force=True)
            raise late(job.timeout, [rank for rank, task in enumerate(tasks) if task not in done])
        return list(ray.get(tasks))

    return hub, perform


def _free_port_of_node() -> tuple[str, str]:
    """A task: the node that it runs on, and where rank 0 can listen there."""
    ray: Any = sys.modules["ray"]
    return ray.get_runtime_context().get_node_id(), _free_port(ray.util.get_node_ip_address())
