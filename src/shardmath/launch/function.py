"""`spawn`: one function on n ranks forked from this process, for notebooks and scripts.

Ranks are forked, so closures work and the parent's data is there without a copy. A rank never
returns into the parent's code: it ends in `os._exit`, whatever the function does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from shardmath.base.integers import index
from shardmath.launch.failure import rebuild
from shardmath.launch.forked import fork_job, late


def spawn(
    function: Callable[..., Any],
    n: int,
    *args: Any,
    timeout: float | None = None,
    on: Any = None,
) -> list[Any]:
    """Call `function(*args)` on `n` ranks of this host; their results, in the order of the ranks.

        def columns(x):
            context = shardmath.initialize("cpu")
            return x[:, context.rank :: context.size].sum()

        shardmath.spawn(columns, 3, np.ones((4, 7)))

    Each rank is a fork of this process: it sees the variables that exist here, and
    `shardmath.initialize("cpu")` finds its rank. Results are numbers, strings, bytes, tuples,
    lists, dictionaries, NumPy arrays and torch CPU tensors. Each line that a rank prints is shown
    with the rank in front. NumPy's global random state is the parent's on every rank: seed it by
    rank.

    The first rank that fails ends all ranks. Its exception is raised here, with the rank in the
    message and the rank's traceback as a note: of the same class if that is built-in or one of
    shardmath's, RankFailure if the rank died, else RuntimeError. Raises OpTimeout after `timeout`
    seconds, TypeError when `function` cannot be called or a result cannot be sent, ValueError for
    `n` below 1, RuntimeError when this process has used CUDA, which does not survive a fork.

    With `on`, a `dask.distributed.Client` or the module `ray` after `ray.init`, the ranks are on
    the workers of that cluster, each a fork of one. The function and its arguments travel there as
    the cluster sends them, and what ranks print is in the workers' logs. Raises ValueError where
    the cluster cannot run `n` tasks at once, and TypeError for another `on`.
    """
    n = index(n, "n")
    if not callable(function):
        raise TypeError(
            f"function is called on every rank, and {function!r} cannot be called: pass the "
            "function itself, and its arguments after n"
        )
    if n < 1:
        raise ValueError(f"n is {n}; a job has at least one rank")
    from shardmath.base import wire  # NumPy: loaded once, before the ranks are forked

    if on is not None:
        from shardmath.launch.tasks import spawn_on

        return [wire.decode(result) for result in spawn_on(on, function, n, args, timeout)]
    deadline = None if timeout is None else time.monotonic() + timeout
    job = fork_job(n, function, args)
    if not job.watch(deadline=deadline):
        raise late(timeout, [rank for rank in range(n) if rank not in job.results])
    if job.first_failure is not None:
        raise rebuild(job.first_failure)
    return [wire.decode(job.results[rank]) for rank in range(n)]
