"""Which transports there are: the modules of `cores` and of `gpus`, each found by its name.

    memory     one host    several hosts
    cores      host        mpi where the ranks are MPI's, else tcp
    GPUs       cuda        nvshmem

The code has no such table: of the transports for such memory it takes the most preferred one that
reaches all ranks and whose probe succeeds on every rank. Under pretended hosts the
transports of one host serve too: they answer None for an address on another, and their `put` and
`get` reach there all the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardmath.base.found import class_in, modules_of
from shardmath.transport import cores, gpus
from shardmath.transport.base import Transport

AUTO = "auto"
_PACKAGES = {"cpu": cores, "cuda": gpus}


def names(kind: str) -> list[str]:
    """The transports for memory of "cpu" or "cuda"."""
    return modules_of(_PACKAGES[kind])


def transport_named(kind: str, name: str) -> type[Transport]:
    """The class that the module of that name defines."""
    return class_in(_PACKAGES[kind], name, Transport)


def candidates(kind: str, asked: str) -> list[type[Transport]]:
    """The transport `asked` for, or all of its kind for "auto", the most preferred first.

    Raises ValueError where there is none of that name for such memory.
    """
    known = names(kind)
    if asked not in (AUTO, *known):
        where = "cores" if kind == "cpu" else "GPUs"
        raise ValueError(
            f"SHARDMATH_TRANSPORT={asked!r}: for ranks that compute on {where} there are {AUTO}, "
            f"{', '.join(known)}"
        )
    transports = [transport_named(kind, name) for name in (known if asked == AUTO else [asked])]
    return sorted(transports, key=lambda transport: transport.preference)


def in_words(obstacles: Sequence[str]) -> str:
    """Why a transport cannot be used, by rank; empty where it can."""
    reasons = [(rank, why) for rank, why in enumerate(obstacles) if why]
    if len(reasons) == len(obstacles) and len(set(obstacles)) == 1:
        return obstacles[0]
    return "; ".join(f"rank {rank}: {why}" for rank, why in reasons)
