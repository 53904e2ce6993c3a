"""The line of the user's program that called, and the process: messages name both."""

from __future__ import annotations

import contextlib
import os
import sys
from functools import lru_cache

# How the files of the package begin, and that of the context managers it makes.
PACKAGE = (f"{os.path.dirname(os.path.dirname(__file__))}/", contextlib.__file__)
CALL = f"{PACKAGE[0]}base/collective_call.py"  # in the traceback of each operation

# Parts of the names of files through which torch and JAX call on the user's behalf, in a backward
# pass, a transform or a compiled program. The last two are of code that torch's compiler makes.
BETWEEN = (
    *("/torch/_", "/torch/autograd/", "/torch/library.py", "/torch/utils/checkpoint.py"),
    *("/jax/_src/", "<eval_with_key>", "/torchinductor_"),
)


def caller_place() -> tuple[str, int]:
    """The file and the line number of the innermost frame that is the user's own."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _passed_through(frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def caller_line() -> str:
    """The innermost line of the user's own, as `file.py:31`."""
    return file_line(*caller_place())


def file_line(file: str, number: int) -> str:
    """A line of a file, as `file.py:31`."""
    return f"{os.path.basename(file)}:{number}"


def who(rank: int) -> str:
    """This rank, its process and the user's line, as `rank 2 (pid 4711 on node7), file.py:31`."""
    return f"rank {rank} ({process_name()}), {caller_line()}"


def process_name() -> str:
    """This process, as `pid 4711 on node7`."""
    return f"pid {os.getpid()} on {os.uname().nodename}"


@lru_cache(maxsize=1024)
def _passed_through(file: str) -> bool:
    """Whether the file is this package's, or one that calls it on the user's behalf."""
    return file.startswith(PACKAGE) or any(part in file for part in BETWEEN)
