"""Imported by what forks ranks: what each of them would load or find anew, in its first calls.

That takes a rank longer than all else that it does before its first call.
"""

import contextlib
import ctypes
import importlib
import pkgutil
from pathlib import Path

__all__ = ["find_libraries", "use_huge_pages"]

_HUGE = 1 << 21  # bytes of a huge page
_MADV_COLLAPSE = 25

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


def use_huge_pages() -> None:
    """Let what this process holds by now lie in huge pages, where Linux can do that (since 6.1).

    To fork it then takes half of the time: an entry is copied, and dropped in the end, for each of
    hundreds of pages, and not for each of a hundred thousand.
    """
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, _, _, inode, *name = line.split(maxsplit=5)
        if (rights, inode) == ("rw-p", "0") and name in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in addresses.split("-"))
            start, end = -(-start // _HUGE) * _HUGE, end // _HUGE * _HUGE
            if start < end:
                madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_COLLAPSE)
