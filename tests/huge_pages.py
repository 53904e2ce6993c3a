"""Memory of a process that forks many: it loads nothing of ours."""

from __future__ import annotations

import ctypes
from itertools import count
from pathlib import Path

__all__ = ["before_forks", "keep_memory", "use_huge_pages"]

_HUGE = 1 << 21  # bytes of a huge page
_MADV_COLLAPSE = 25
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NUMBERS = count(1)  # of the jobs whose ranks this process forks


def keep_memory() -> None:
    """Let arrays of up to 32 MiB lie where others did, here and in what is forked.

    The C library would give the pages back, and Linux would fill new ones with zeros: that took
    half of the time of tests with arrays of some MiB. A library without `mallopt` goes on so.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)
    mallopt(_M_MMAP_THRESHOLD, 32 << 20)
    mallopt(_M_TRIM_THRESHOLD, 512 << 20)


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


def before_forks() -> None:
    """Collapse memory into huge pages again, before every 16th job whose ranks are forked.

    This process grows while tests run, and Linux splits a huge page that is written to while forked
    ranks share it. Forks would take several times as long after some hundred tests.
    """
    if next(_NUMBERS) % 16 == 0:
        use_huge_pages()
