"""Which line of the user's program called, in which process: for messages, which name them."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

# The package's folder, and what its context managers run through.
PACKAGE = (f"{Path(__file__).parent.parent}/", contextlib.__file__)

# torch's own, through which its compiler and its operators call.
TORCH = ("/torch/_dynamo/", "/torch/_ops.py", "/torch/_library/", "/torch/autograd/function.py")


def caller_place() -> tuple[str, int]:
    """The file and the number of the innermost line on the stack that is not of this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _passed_through(frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def caller_line() -> str:
    """The innermost line of the user's, as `file.py:31`."""
    file, number = caller_place()
    return f"{Path(file).name}:{number}"


def process_name() -> str:
    """This process, as `pid 4711 on node7`."""
    return f"pid {os.getpid()} on {os.uname().nodename}"


def _passed_through(file: str) -> bool:
    """Whether it is no file of the user's."""
    return file.startswith(PACKAGE) or any(part in file for part in TORCH)
