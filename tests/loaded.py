"""Imported by what forks ranks: what each of them would load or find anew, in its first calls.

That takes a rank longer than all else that it does before its first call.
"""

import contextlib
import importlib
import pkgutil

__all__ = ["find_libraries"]

for package in ("shardmath.arrays.libraries", "shardmath.transport.cores"):
    folders = importlib.import_module(package).__path__
    for module in pkgutil.iter_modules(folders, f"{package}."):
        importlib.import_module(module.name)

with contextlib.suppress(ModuleNotFoundError):
    importlib.import_module("ducc0")


def find_libraries() -> None:
    """Let ranks inherit where the libraries lie that are loaded by now, BLAS among them."""
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("threadpoolctl").threadpool_info()
