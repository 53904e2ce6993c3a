"""Which transport serves these ranks: the one asked for, or the first that reaches them all.

    memory     one host    several hosts
    cores      host        mpi where the ranks are MPI's, else tcp
    GPUs       cuda        nvshmem

Under pretended hosts the transports of one host serve too: they answer None for an address on
another, and their `put` and `get` reach there all the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardmath.errors import BackendUnavailable
from shardmath.group.base import ProcessGroup
from shardmath.group.mpi import MPIProcessGroup
from shardmath.transport.base import Transport
from shardmath.transport.mesh import Mesh

if TYPE_CHECKING:
    from shardmath.config import Settings
    from shardmath.cuda.device import Device

__all__ = ["choose", "make"]

_FOR_CORES, _FOR_GPUS = ("host", "mpi", "tcp"), ("cuda", "nvshmem")


def choose(mesh: Mesh, group: ProcessGroup, device: Device | None, asked: str) -> str:
    """The name of the transport. Local; the same on all ranks that ask for the same.

    Raises ValueError where `asked` is no transport for such memory, BackendUnavailable where it
    does not reach all ranks.
    """
    names = _FOR_CORES if device is None else _FOR_GPUS
    if asked not in ("auto", *names):
        kind = "cores" if device is None else "GPUs"
        raise ValueError(
            f"SHARDMATH_TRANSPORT={asked!r}: for ranks that compute on {kind} there are auto, "
            f"{', '.join(names)}"
        )
    if mesh.real_hosts == 1:
        return names[0] if asked == "auto" else asked
    if asked == names[0]:
        raise BackendUnavailable(
            f"the transport {asked} reaches the memory of one machine only, and the ranks are on "
            f"{mesh.real_hosts}: {', '.join(dict.fromkeys(mesh.hosts))}; leave SHARDMATH_TRANSPORT "
            "unset"
        )
    if asked != "auto":
        return asked
    return "tcp" if device is None and not isinstance(group, MPIProcessGroup) else names[1]


def make(name: str, mesh: Mesh, device: Device | None, settings: Settings) -> Transport:
    """The transport of that name. Local: `Transport.join` is what ranks do together."""
    if device is None:
        if name == "mpi":
            from shardmath.transport.mpi import MPITransport

            return MPITransport(mesh, timeout=settings.timeout)
        if name == "tcp":
            from shardmath.transport.tcp import TCPTransport

            return TCPTransport(mesh, timeout=settings.timeout)
        from shardmath.transport.host import HostTransport

        return HostTransport(mesh)
    if name == "nvshmem":
        from shardmath.transport.nvshmem import NVSHMEMTransport

        return NVSHMEMTransport(mesh, device, heap_bytes=settings.gpu_heap_bytes)
    from shardmath.transport.cuda import CudaTransport

    return CudaTransport(mesh, device)
