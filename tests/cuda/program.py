"""A program for GPUs that any launcher can start: `program.py [mpi | torch]`.

The host's test bodies for collectives and for symmetric memory, with arrays of CuPy and torch:
first with the ranks as `initialize` finds them, then, if a library is named, with its communicator.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent, HERE.parent / "collectives", HERE.parent / "symmetric"):
    sys.path.insert(0, str(folder))

import test_host_bodies as collectives  # noqa: E402
import test_symmetric_bodies as symmetric  # noqa: E402

import shardmath  # noqa: E402

NAMES = ("SHARDMATH_RANK", "LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")


def bodies(library: str) -> list[tuple[str, str, list[Any]]]:
    """Module, name and arguments of the bodies for a form of arrays."""
    return [
        ("test_reducing", "check_forms", [(7, 9), "bfloat16"]),
        ("test_reducing", "check_forms", [(600, 701), "float32"]),
        ("test_moving", "check_gather", [(3, 2_000_000), 0, "float32"]),
        ("test_moving", "check_gather", [(8, 9, 2), -2, "complex64"]),
        ("test_moving", "check_exchange", [((9, 7), 1, "int16"), True]),
        ("test_moving", "check_exchange", [((24, 600_000), 0, "float32"), True]),
    ]


def check(context: Any) -> None:
    """Raise AssertionError unless every body is content."""
    for form in ("plain", "cupy", "torch", "torch_heap"):
        for module, body, args in bodies(form):
            assert collectives.check(context, module, body, form, args) == [], (form, body, args)
    for package in ("cupy", "torch"):
        for size, name, args in symmetric.BODIES:
            if size <= context.size:
                assert symmetric.check(context, size, name, package, args) == "", (package, name)


def group(library: str) -> Any:
    """The communicator of all ranks, of a library that the launcher belongs to."""
    if library == "mpi":
        from mpi4py import MPI

        return MPI.COMM_WORLD
    import torch.distributed

    assert torch.distributed.is_initialized(), "initialize() has started it under torchrun"
    return torch.distributed.group.WORLD


def main() -> None:
    device = next((int(os.environ[name]) for name in NAMES if name in os.environ), 0)
    importlib.import_module("torch").cuda.set_device(device)
    passed = []
    for library in ["environment", *sys.argv[1:]]:
        if library == "environment":
            context = shardmath.initialize(device)
        else:
            context = shardmath.initialize(device, group(library))
        check(context)
        passed.append(f"{library} {context.rank} of {context.size}")
        shardmath.finalize()
    # In one piece, so that the ranks' lines cannot mix.
    sys.stdout.write("; ".join(passed) + "\n")


if __name__ == "__main__":
    main()
