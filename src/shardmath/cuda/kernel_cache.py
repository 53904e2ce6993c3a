"""The folder of compiled kernels, read and written so that it never holds another user's code.

Code from this folder runs on the GPU as this user. So the folder and each file must belong to this
user, must be no link, and must not be writable by others. The folder is opened once in a call, and
files are opened relative to that descriptor: nobody can exchange the folder meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from shardmath.base.caller import caller_place

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def kept(folder: Path, name: str) -> bytes | None:
    """The contents of file `name` of `folder`; None where there is none that can be trusted.

    Warns once of a folder that cannot be trusted.
    """
    with contextlib.suppress(OSError), _opened(folder) as opened:
        return None if opened is None else _read(opened, name)
    return None


def keep(folder: Path, name: str, code: bytes) -> bytes:
    """Put `code` into file `name`, and return it, or the code of a process that was faster.

    Where the folder cannot be written to, is full or cannot be trusted, `code` is not kept.
    """
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _opened(folder) as opened:
            return code if opened is None else _placed(opened, name, code)
    return code


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int | None]:
    """The folder's descriptor; None, with a warning, where it cannot be trusted. Raises OSError."""
    if folder.is_symlink():
        _warn(folder, "is a symbolic link", "name the folder that it leads to")
        yield None
        return
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(opened)
        if status.st_uid != os.geteuid():
            _warn(folder, f"belongs to user {status.st_uid}", "name a folder of your own")
            yield None
        elif status.st_mode & _WRITABLE_BY_OTHERS:
            _warn(folder, "can be written by other users", f"chmod go-w {folder}, or name another")
            yield None
        else:
            yield opened
    finally:
        os.close(opened)


def _read(opened: int, name: str) -> bytes | None:
    """The contents of a file of this user's; None for anything else. Raises OSError."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe would block
    with os.fdopen(os.open(name, flags, dir_fd=opened), "rb") as file:
        status = os.fstat(file.fileno())
        is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        return file.read() if is_own and not status.st_mode & _WRITABLE_BY_OTHERS else None


def _placed(opened: int, name: str, code: bytes) -> bytes:
    """Write the file elsewhere and link it into place, so that a reader finds all or nothing."""
    made = f".making-{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(made, flags, 0o600, dir_fd=opened), "wb") as file:
            file.write(code)
        try:
            os.link(made, name, src_dir_fd=opened, dst_dir_fd=opened)
        except FileExistsError:
            with contextlib.suppress(OSError):
                faster = _read(opened, name)
                if faster is not None:
                    return faster
            os.replace(made, name, src_dir_fd=opened, dst_dir_fd=opened)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(made, dir_fd=opened)
    return code


@cache
def _warn(folder: Path, what: str, advice: str) -> None:
    """Warn, at the user's line and once in a process, that kernels are compiled each time."""
    file, line = caller_place()
    text = (
        f"compiled kernels are neither read nor kept: their folder {folder} {what}; {advice} "
        "(SHARDMATH_CACHE names the folder, and - none)"
    )
    warnings.warn_explicit(text, UserWarning, file, line)
