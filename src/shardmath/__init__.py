"""Matrix multiplication, FFT and redistribution on arrays that are split across processes.

Importing this package starts nothing and imports nothing heavy: every name below is found in its
module when it is first used. `shardmath.autograd`, which needs torch, is left out of
`from shardmath import *`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from shardmath import autograd as autograd
    from shardmath import (
        collectives,
        distributed,
        distribution,
        errors,
        fft,
        linalg,
        nn,
        process_group,
        reshape,
        symmetric_memory,
    )
    from shardmath.context.context import DistributedContext, get_context
    from shardmath.context.startup import finalize, initialize, new_context
    from shardmath.distributed import (
        DistributedArray,
        arange,
        array,
        communication,
        empty,
        explain,
        eye,
        from_dtensor,
        from_global,
        from_jax,
        fromfunction,
        full,
        linspace,
        load,
        ones,
        random,
        save,
        standard_normal,
        to_dtensor,
        to_jax,
        zeros,
    )
    from shardmath.group import ProcessGroup
    from shardmath.group.mpi import MPIProcessGroup
    from shardmath.group.torch import TorchProcessGroup
    from shardmath.handles.allocation import allocate_symmetric_memory, free_symmetric_memory
    from shardmath.launch import spawn
    from shardmath.tools.doctor import show_config

# Where the names of `__all__` are that are neither modules nor names of `distributed`.
_HOME = {
    "DistributedContext": "context.context",
    "MPIProcessGroup": "group.mpi",
    "ProcessGroup": "group",
    "TorchProcessGroup": "group.torch",
    "allocate_symmetric_memory": "handles.allocation",
    "finalize": "context.startup",
    "free_symmetric_memory": "handles.allocation",
    "get_context": "context.context",
    "initialize": "context.startup",
    "new_context": "context.startup",
    "show_config": "tools.doctor",
    "spawn": "launch",
}
_MODULES = (
    "autograd",
    "collectives",
    "distributed",
    "distribution",
    "errors",
    "fft",
    "linalg",
    "nn",
    "process_group",
    "reshape",
    "symmetric_memory",
)

__all__ = [
    "DistributedArray",
    "DistributedContext",
    "MPIProcessGroup",
    "ProcessGroup",
    "TorchProcessGroup",
    "__version__",
    "allocate_symmetric_memory",
    "arange",
    "array",
    "collectives",
    "communication",
    "distributed",
    "distribution",
    "empty",
    "errors",
    "explain",
    "eye",
    "fft",
    "finalize",
    "free_symmetric_memory",
    "from_dtensor",
    "from_global",
    "from_jax",
    "fromfunction",
    "full",
    "get_context",
    "initialize",
    "linalg",
    "linspace",
    "load",
    "new_context",
    "nn",
    "ones",
    "process_group",
    "random",
    "reshape",
    "save",
    "show_config",
    "spawn",
    "standard_normal",
    "symmetric_memory",
    "to_dtensor",
    "to_jax",
    "zeros",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"shardmath.{name}")
    if name in __all__:
        home = _HOME.get(name, "distributed")
        return getattr(importlib.import_module(f"shardmath.{home}"), name)
    raise AttributeError(f"module 'shardmath' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
