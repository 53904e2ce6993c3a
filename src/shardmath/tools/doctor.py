"""What works on this machine, and for what does not, why, and the command that fixes it."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from shardmath.base import compiled
from shardmath.context.startup import finalize, initialize
from shardmath.errors import BackendUnavailable, CudaError
from shardmath.launch import spawn
from shardmath.tools.hello import measured, median_seconds, rate
from shardmath.tools.tables import show

_WORDS = 76  # letters of a reason in one line
_RANKS = 2
_BYTES = 32 << 20  # of what is copied
# What a package is for: its module, itself, and our extra that brings it.
_PACKAGES = {
    "transforms and factorisations on cores": ("scipy", "scipy", "linalg"),
    "faster transforms on cores": ("ducc0", "ducc0", "ducc"),
    "arrays of torch, and torchrun": ("torch", "torch", "torch"),
    "mpiexec, and several hosts by MPI": ("mpi4py", "mpi4py", "mpi"),
    "float16's relatives": ("ml_dtypes", "ml_dtypes", "half"),
    "files .h5": ("h5py", "h5py", "hdf5"),
    "files .zarr": ("zarr", "zarr", "zarr"),
    "progress and tables": ("rich", "rich", "progress"),
    "GPUs": ("cuda.bindings", "cuda-bindings", "cu13"),
}
_LAUNCHERS = ("mpiexec", "torchrun", "srun")


def show_config() -> dict[str, Any]:
    """What `shardmath doctor` shows, except for its measurements, as plain data: dictionaries of
    texts and numbers. What does not work has a `reason`, and mostly `mend`, a command to run.
    """
    return {
        "versions": {
            "shardmath": sys.modules["shardmath"].__version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        },
        "cores": len(os.sched_getaffinity(0)),
        "gpus": _gpus(),
        "transports": {f"{name} ({kind})": _transport(kind, name) for kind, name in _transports()},
        "compiled": {name: _built(name) for name in compiled.BUILT},
        "packages": {what: _package(*names) for what, names in _PACKAGES.items()},
        "launchers": {name: _program(name) for name in _LAUNCHERS},
    }


def main() -> int:
    """Print what works here, with measurements. The exit status, 0."""
    config = show_config()
    facts = {**config["versions"], "cores": str(config["cores"]), "GPUs": _in_words(config["gpus"])}
    for name, path in config["launchers"].items():
        facts[name] = path or "not found"
    show("This machine", ("what", "is"), list(facts.items()))
    built = {
        compiled.BUILT[name].purpose if name in compiled.BUILT else name: found
        for name, found in _in_brief(config["compiled"]).items()
    }
    for title, parts in (
        ("Libraries", config["packages"]),
        ("Ways to other ranks' memory", config["transports"]),
        ("Compiled parts", built),
    ):
        rows = [_row(what, found) for what, found in parts.items()]
        show(title, ("works", "for", "by, or why not, and what to run"), rows, most=_WORDS)
    show("Measured", ("what", "is"), _measured())
    return 0


def _row(what: str, found: dict[str, str]) -> tuple[str, str, str]:
    """The row of a table for one thing; the command that fixes it is on a line of its own."""
    if "reason" not in found:
        return "yes", what, found.get("version", "")
    return "no", what, "\n".join(found[part] for part in ("reason", "mend") if part in found)


def _in_brief(parts: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """The compiled parts; where none was built, one row says so."""
    if any("reason" not in found for found in parts.values()):
        return parts
    return {"all of them": next(iter(parts.values()))}


def _in_words(gpus: dict[str, Any]) -> str:
    """The names of the GPUs that can be used, or else how many seem to be there."""
    if "names" in gpus:
        return ", ".join(gpus["names"]) or "none"
    there = len([*Path("/dev").glob("nvidia[0-9]*")])
    return f"{there}, which cannot be used as it is" if there else "none"


def _gpus() -> dict[str, Any]:
    from shardmath.cuda.driver import call

    try:
        call("cuInit", 0)
        count = call("cuDeviceGetCount")
        names = [call("cuDeviceGetName", 128, call("cuDeviceGet", i)) for i in range(count)]
    except BackendUnavailable as error:
        return _why(str(error))
    except CudaError as error:
        return {"reason": str(error)}
    return {"names": [name.rstrip(b"\0").decode() for name in names]}


def _transports() -> list[tuple[str, str]]:
    from shardmath.transport.choice import names

    return [(kind, name) for kind in ("cpu", "cuda") for name in names(kind)]


def _transport(kind: str, name: str) -> dict[str, str]:
    from shardmath.transport.choice import transport_named

    why = transport_named(kind, name).probe()
    return _why(why) if why else {}


def _why(text: str) -> dict[str, str]:
    """A reason, and the command in it that fixes it."""
    reason, _, mend = text.partition("; with device_id")[0].partition(": pip install ")
    return {"reason": reason, "mend": f"pip install {mend}"} if mend else {"reason": reason}


def _built(name: str) -> dict[str, str]:
    if compiled.is_built(name):
        return {"version": "compiled"}
    if not compiled.is_wanted():
        return {
            "reason": "done in Python: SHARDMATH_COMPILED=0 leaves it out",
            "mend": "unset SHARDMATH_COMPILED",
        }
    others = compiled.other_pythons(name)
    why = "built only where there is a C compiler"
    if others:
        this = f"{sys.version_info.major}.{sys.version_info.minor}"
        why = f"the compiled parts are for Python {', '.join(others)}, and this is {this}"
    return {
        "reason": f"done in Python: {why}",
        "mend": "pip install --force-reinstall --no-deps --no-binary shardmath shardmath",
    }


def _package(module: str, name: str, extra: str) -> dict[str, str]:
    with suppress(ModuleNotFoundError):  # of the package that it is in
        if find_spec(module) is not None:
            return {"version": f"{name} {_version(name)}"}
    return {"reason": f"{name} is not installed", "mend": f'pip install "shardmath[{extra}]"'}


def _program(name: str) -> str:
    """The path of a program, on PATH or beside this Python; "" where there is none."""
    beside = str(Path(sys.executable).parent)
    return shutil.which(name) or shutil.which(name, path=beside) or ""


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _measured() -> list[tuple[str, str]]:
    source, target = np.ones(_BYTES, np.uint8), np.zeros(_BYTES, np.uint8)
    copied = median_seconds(lambda: np.copyto(target, source))
    rows = [("a copy in memory", rate(_BYTES, copied))]
    if len(os.sched_getaffinity(0)) < _RANKS:
        return [*rows, (f"{_RANKS} ranks", "not measured: there is one core")]
    barrier, moved = spawn(_measure_ranks, _RANKS, timeout=60)[0]
    return [
        *rows,
        (f"a barrier of {_RANKS} ranks", f"{1e6 * barrier:.1f} us"),
        (f"all_gather of {_RANKS} ranks, each", rate(_BYTES, moved)),
    ]


def _measure_ranks() -> tuple[float, float]:
    times = measured(initialize("cpu"), _BYTES)
    finalize()
    return times


if __name__ == "__main__":
    sys.exit(main())
