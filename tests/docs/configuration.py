"""Write docs/configuration.md: `PYTHONPATH=src python tests/docs/configuration.py`."""

from __future__ import annotations

from pathlib import Path

from shardmath.base import config

PAGE = Path(__file__).parent.parent.parent / "docs" / "configuration.md"

HEAD = """\
# Configuration

After this page you can set the time limits, threads, transports and addresses of a job by
environment variables, which shardmath reads when a context is made. It warns of any other name
that begins with `SHARDMATH_`, with the nearest name of this table. `python -m shardmath env`
prints the same table. This page is written by `tests/docs/configuration.py`.

The number of threads for a rank's products and Fourier transforms on cores is
`SHARDMATH_THREADS`, which `python -m shardmath run --threads` sets; else `OMP_NUM_THREADS`; else
the number of cores that the rank may run on, divided by the ranks of the job that share some of
them. If threadpoolctl is installed, the BLAS and OpenMP libraries that are loaded when a context
is made, NumPy's and torch's, are limited to that number until the context ends; a library whose
number of threads a variable sets is left alone. Without threadpoolctl, use `run` or the variables
to limit them.

| variable | type | default | meaning |
| --- | --- | --- | --- |
"""

TAIL = """
## Where ranks listen

On one host ranks find each other through abstract Unix sockets, and nothing listens on the
network. Between hosts every rank listens for the others while `initialize` runs, on a port that
the system chooses. It listens at the addresses of `SHARDMATH_ADDRESS`, a number or a name.
Without that, it listens at the address by which it reaches `MASTER_ADDR` or the first host of
Slurm's step. If these are not set either, it listens at the address of the host's default route
and at those of its own name; on a host that has neither, at those of its network devices. It
listens at no others, and a firewall must let the other hosts through to it. If there are several
networks, set `SHARDMATH_ADDRESS` on each host to choose one. If it is an address that the host
itself does not have, because a router translates it, the ranks there listen at the default route's
address.

Where ranks meet by torch, torch's gloo would offer its peers the address of the host's name. If
that is loopback, `initialize` sets `GLOO_SOCKET_IFNAME`, unless it is set, to the network device
by which this host reaches `MASTER_ADDR`.

Others may connect meanwhile, any number of times. They are refused on Unix sockets unless they
are this user's ranks, and everywhere unless they prove within 5 seconds that they know a key
which only the ranks have. They do not keep the ranks from meeting.

While a rank waits, it asks the operating systems of the other hosts whether they are there. A
host that does not answer for `SHARDMATH_HEARTBEAT` seconds, or a link that is cut, ends the wait
with RankFailure. Processes that compute or are stopped do not end it, because their system
answers. Raise the variable if the network loses packets for seconds.

## Who may join

Ranks that `srun` started, and those that `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` name
on one host (`MASTER_ADDR` is `localhost`, `127.x.x.x` or `::1`) or where torch is not installed,
meet at rank 0, which listens while `initialize` runs: at `MASTER_ADDR` and `MASTER_PORT`; under
Slurm, if these are not set, on the first host of the step, at a port from 61000 on that follows
from the step's number. A rank proves that it has the user's key, and rank 0 proves the same, before
anything else is exchanged. The key is in `~/.config/shardmath/key`, which only the user can read,
and is made when it is first needed. On hosts that do not share the user's home directory, set
`SHARDMATH_KEY` to a secret of your own. If no key can be kept there, ranks that torch's variables
name meet by torch, where it is installed.

Ranks also meet this way if srun offers PMI or PMIx (`--mpi`): no MPI is started, because an MPI
that expects another PMI would end the process. If a program imports mpi4py before `initialize`,
mpi4py finds its ranks. Under mpiexec, mpi4py must load the MPI that mpiexec belongs to; if there
are several, `MPI4PY_MPIABI=openmpi` or `mpich` selects it.

## The folder of compiled kernels

Its files run on the GPU as the user who reads them. So the folder must belong to that user, must
not be a symbolic link, and nobody else may be able to write to it (`chmod go-w`); if it is
missing, it is made this way. A folder that does not meet this is neither read nor written: a
warning says why, once in a process, and every process compiles what it needs. A file in it that
belongs to another user, is a link, or can be written by others is replaced.
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
