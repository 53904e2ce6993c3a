"""Write docs/configuration.md: `PYTHONPATH=src python tests/docs/configuration.py`."""

from __future__ import annotations

from pathlib import Path

from shardmath.base import config

PAGE = Path(__file__).parent.parent.parent / "docs" / "configuration.md"

HEAD = """\
# Configuration

The environment variables that shardmath reads, when a context is made. It warns of any other name
that begins with `SHARDMATH_`, with the nearest name of this table. `python -m shardmath env` prints
the same table. This page is written by `tests/docs/configuration.py`.

A rank's products and Fourier transforms on cores use `SHARDMATH_THREADS` threads, which
`python -m shardmath run --threads` sets; else `OMP_NUM_THREADS`; else as many as the cores that the
rank may run on, divided by the ranks of the job that may run on some of them. With threadpoolctl
installed, libraries of BLAS and OpenMP that are loaded when a context is made, NumPy's and torch's,
are limited to that until it ends; a library whose number of threads a variable sets is left alone.
Without threadpoolctl that takes `run`, or the variables.

| variable | type | default | meaning |
| --- | --- | --- | --- |
"""

TAIL = """
## Where ranks listen

On one host ranks find each other through abstract Unix sockets, and nothing listens on the network.
Between hosts every rank listens for the others while `initialize` runs, on a port that the system
chooses: at the addresses of `SHARDMATH_ADDRESS`, a number or a name; without it at the address
by which it reaches `MASTER_ADDR`, or the first host of Slurm's step; where these are not set, that
of the host's way out (its default route) and those that its own name stands for. It listens at no
others, and a firewall must let the other hosts through to it. Set `SHARDMATH_ADDRESS` on each host
where there are several networks, to use one of them. Where it is an address that the host does not
have itself, because a router translates it, the ranks there listen at the way out.

Others may connect meanwhile, as many as they like: they are refused on Unix sockets unless they are
this user's ranks, and everywhere unless they prove within 5 seconds that they know a key which only
the ranks have. They do not keep the ranks from meeting.

While a rank waits it asks the other hosts' systems whether they are there. A host that answers
nothing for `SHARDMATH_HEARTBEAT` seconds, or a link that is cut, ends the wait with RankFailure.
Processes that compute, or are stopped, do not: their system answers. Raise it where the network
loses what is sent for seconds.

## Who may join

Ranks that `srun` has started, and those that `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`
name where there is no torch, meet at rank 0, which listens there while `initialize` runs: at
`MASTER_ADDR` and `MASTER_PORT`; under Slurm, where these are not set, on the first host of the
step, at a port from 61000 on that follows from its number. A rank proves that it has the user's
key, and rank 0 proves the same, before anything else is said. The key is in
`~/.config/shardmath/key`, which only the user can read, and is made when it is first needed. On
hosts that do not share the user's home set `SHARDMATH_KEY` to a secret of your own.

Where srun offers PMI or PMIx as well (`--mpi`), ranks meet so all the same: no MPI is started,
since one that knows another PMI would end the process. A program that imports mpi4py before
`initialize` has its ranks found by that.

## The folder of compiled kernels

What is in it runs on the GPU as the user who reads it. So it must belong to that user, must not be
a symbolic link, and nobody else may be able to write to it (`chmod go-w`); it is made so where it
is missing. A folder that is not is neither read nor written: a warning says why, once in a process,
and every process compiles what it needs. A file in it that is another user's, a link, or open to
others' writing is replaced.
"""


def page() -> str:
    """The page, from the table in `shardmath.base.config`."""
    rows = [
        f"| `{name}` | {kind} | {f'`{default}`' if default else 'empty'} | {sentence} |"
        for name, kind, default, sentence in config.table()
    ]
    return HEAD + "\n".join(rows) + "\n" + TAIL


if __name__ == "__main__":
    PAGE.write_text(page())
