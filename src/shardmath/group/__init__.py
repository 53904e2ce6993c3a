"""Who are the ranks? Start-up and agreement of a few bytes, never data.

Every group offers `ProcessGroup`'s members. Importing the package imports no library of the user's,
and a start imports only the module of the group that it finds.
"""

from __future__ import annotations

import sys
from typing import Any

from shardmath.base.config import Settings
from shardmath.group.base import ProcessGroup, ReductionOp
from shardmath.group.environment import from_environment

__all__ = ["ProcessGroup", "ReductionOp", "as_process_group"]


def as_process_group(
    obj: Any, settings: Settings | None = None, *, device_id: Any = "cpu"
) -> ProcessGroup:
    """The group that `obj` stands for: for None, that of the environment; a `ProcessGroup` itself.

    An mpi4py communicator and a torch.distributed process group are wrapped. A process group that
    serves GPUs only communicates through GPU `device_id`, which then has to be a number. torch's
    `DeviceMesh` stands for the group of its ranks. Raises ValueError for a group that this process
    is not in, and for a mesh of several axes without all ranks; TypeError for anything else.
    """
    settings = Settings.from_environment() if settings is None else settings
    if obj is None:
        return from_environment(settings)
    if isinstance(obj, ProcessGroup):
        return obj
    # Known by the class's name: whoever has such an object has imported its library.
    names = {(kind.__module__.split(".")[0], kind.__name__) for kind in type(obj).__mro__}
    if ("mpi4py", "Comm") in names:
        from shardmath.group.mpi import MPIProcessGroup

        return MPIProcessGroup(obj, timeout=settings.startup_timeout)
    if ("torch", "DeviceMesh") in names:
        obj = _group_of(obj)
        names = {("torch", "ProcessGroup")}
    if ("torch", "ProcessGroup") in names:
        from shardmath.group.torch import TorchProcessGroup

        is_gpu = isinstance(device_id, int) and not isinstance(device_id, bool)
        return TorchProcessGroup(
            device_id=device_id if is_gpu else "cpu",
            torch_process_group=obj,
            timeout=settings.startup_timeout,
        )
    if _is_another_ranks_group(obj):
        raise ValueError(
            "this process is not in the group, which is torch's NON_GROUP_MEMBER here: only the "
            "group's ranks may call"
        )
    raise TypeError(
        f"process_group is a {type(obj).__module__}.{type(obj).__qualname__}; expected None, an "
        "mpi4py communicator, a torch.distributed process group or DeviceMesh, or a shardmath "
        "ProcessGroup"
    )


def _group_of(mesh: Any) -> Any:
    """The process group of the ranks of a mesh. Raises ValueError where there is none."""
    if mesh.get_coordinate() is None:
        raise ValueError("this process is not in the mesh: only its ranks may call")
    if mesh.ndim == 1:
        return mesh.get_group()
    world = sys.modules["torch.distributed"].group.WORLD
    if mesh.size() != world.size():
        raise ValueError(
            f"a mesh of {tuple(mesh.shape)} has {mesh.size()} of {world.size()} ranks: pass a mesh "
            "of one axis, or of all ranks"
        )
    return world


def _is_another_ranks_group(obj: object) -> bool:
    """Whether it is what torch.distributed.new_group gives to processes outside the group."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return False
    outside = distributed.GroupMember.NON_GROUP_MEMBER
    return type(obj) is type(outside) and bool(obj == outside)
