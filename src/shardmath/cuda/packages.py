"""Errors for missing GPU packages, which name all that are missing and one line to install them.

So a user need not start a job again for each package that is missed.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

from shardmath.errors import BackendUnavailable

# The packages of our extras, as pyproject.toml has them.
EXTRAS = {
    "cu13": (
        "cuda-bindings",
        "nvidia-cuda-nvrtc",
        "nvidia-cublas",
        "nvidia-cufft",
        "nvidia-cusolver",
        "nvmath-python",
    ),
    "hosts-cu13": ("nvshmem4py-cu13", "nvidia-nvshmem-cu13"),
}


def bindings_of(module: str, probe: str, what: str) -> Any:
    """A module of bindings, once its function `probe` has loaded the library.

    Raises BackendUnavailable, which says `what` needs it, with the line to run.
    """
    try:
        bindings = import_module(module)
        getattr(bindings, probe)()
    except (ImportError, RuntimeError) as error:
        raise unavailable(what, error) from None
    return bindings


def unavailable(what: str, error: Exception, extra: str = "cu13") -> BackendUnavailable:
    """The error where `error` says that `what` lacks a package, or a library of one."""
    extras = list(dict.fromkeys(["cu13", extra]))
    missing = [name for group in extras for name in EXTRAS[group] if not _is_installed(name)]
    reason = f"not installed: {', '.join(missing)}" if missing else str(error).partition("\n")[0]
    return BackendUnavailable(
        f'{what} ({reason}): pip install "shardmath[{",".join(extras)}]"; with device_id "cpu" '
        "cores compute"
    )


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
