"""Which ranks share a host: real ones, and pretended ones for tests on one machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardmath.errors import CollectiveMismatch

__all__ = ["host_identity", "hosts_of"]


def host_identity() -> str:
    """Names the machine and its network namespace, within which abstract sockets are visible."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/net').readlink()}"


def hosts_of(identities: Sequence[str], pretended: Sequence[int]) -> tuple[int, ...]:
    """The number of each rank's host, in order of appearance.

    All of `pretended` are equal: into so many hosts the ranks are split, as evenly as possible,

        rank   0 1 2 3 4
        host   0 0 0 1 1      of 2

    and two ranks share a host when they share the real and the pretended one. Raises
    CollectiveMismatch where `pretended` differ, ValueError where they are less than 1.
    """
    if len(set(pretended)) > 1:
        raise CollectiveMismatch(
            f"SHARDMATH_FAKE_HOSTS must be equal on all ranks; it is {list(pretended)}"
        )
    count, size = pretended[0], len(identities)
    if count < 1:
        raise ValueError(f"SHARDMATH_FAKE_HOSTS={count}: there is 1 host at least")
    keys = [(name, rank * count // size) for rank, name in enumerate(identities)]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return tuple(numbers[key] for key in keys)
