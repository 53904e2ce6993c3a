"""Whether two runs of a program give the same bits: SHARDMATH_DIGESTS, with SHARDMATH_CHECK=1.

The first run notes in a file for each rank, for each call of its main thread, digests of the call's
arguments and of its results. A later run with as many ranks compares its own calls with the notes,
and warns of the first whose results have other bits. If its arguments have the same bits, the call
itself is at fault; otherwise the difference came from outside.

An argument that a call changes counts as a result. New memory that nothing was written to is not
compared.
"""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import wraps
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from shardmath.arrays.detect import library_of
from shardmath.base.caller import caller_place, file_line
from shardmath.base.recorder import operands_of, this_process

R = TypeVar("R")

_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
_UNWRITTEN = ("allocate", "empty")  # how the functions begin whose results are new memory


def start(folder: str, rank: int, size: int) -> None:
    """Note this process's calls in `folder`, or compare them with the notes there. Once.

    Raises OSError where the files cannot be read or written, ValueError where they are damaged.
    """
    if this_process.compared is None:
        this_process.compared = _Digests(Path(folder), rank, size).around


class _Digests:
    """The notes of one rank: those of an earlier run, or in the first run those being written.

    Raises OSError where they cannot be read or written, ValueError where they are something else.
    """

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self._path = folder / f"rank-{rank}-of-{size}.jsonl"
        self._rank = rank
        self._number = 0
        self._before: list[list[str]] | None = None
        self._file: Any = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self._path.exists():
                self._before = [_read(line) for line in self._path.read_text().splitlines()]
            else:
                self._file = self._path.open("x")
        except OSError as error:
            raise OSError(f"SHARDMATH_DIGESTS: {self._path}: {error.strerror}") from error
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"SHARDMATH_DIGESTS: {self._path} was not written by an earlier run; remove it"
            ) from error

    def around(self, function: Callable[..., R]) -> Callable[..., R]:
        """`function`, whose call is noted or compared."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> R:
            if threading.current_thread() is not threading.main_thread():
                return function(*args, **kwargs)  # the order of threads may differ between runs
            arguments = [*_values((args, kwargs))]
            before = [_digest(x) for x in arguments]
            result = function(*args, **kwargs)
            after = [_digest(x) for x in arguments]
            same = [a for a, b in zip(after, before, strict=True) if a == b]
            made = [a for a, b in zip(after, before, strict=True) if a != b]
            if not function.__name__.startswith(_UNWRITTEN):
                made += [_digest(x) for x in _values(result)]
            self._note(function.__qualname__, operands_of(args), _joined(same), _joined(made))
            return result

        return call

    def _note(self, name: str, operands: str, given: str, made: str) -> None:
        file, number = caller_place()
        line = file_line(file, number)
        self._number += 1
        if self._file is not None:
            self._file.write(json.dumps([name, line, given, made]) + "\n")
            self._file.flush()
        elif self._before is not None and self._number <= len(self._before):
            problem = self._difference(name, given, made)
            if problem:
                self._before = None
                who = f"rank {self._rank}: {name} of {operands or 'no array'}, {line}"
                text = f"{who}, call {self._number} of this rank, {problem}"
                warnings.warn_explicit(text, UserWarning, file, number)

    def _difference(self, name: str, given: str, made: str) -> str:
        """How this call differs from the one of its number in the earlier run; "" if not at all."""
        assert self._before is not None, "there was an earlier run"
        called, line, before, then = self._before[self._number - 1]
        if called != name:
            return f"was {called}, {line}, in the run of {self._path}: the rest is not compared"
        if made == then:
            return ""
        same = given == before
        cause = "though this rank gave it the same" if same else "and this rank gave it others"
        return f"gives other bits than in the run of {self._path}, {cause}"


def _read(line: str) -> list[str]:
    """The name, line and digests of one call. Raises ValueError or TypeError."""
    name, place, given, made = json.loads(line)
    return [name, place, given, made]


def _values(x: Any) -> Iterator[Any]:
    """The arrays and plain values in arguments or results, whatever they are packed in."""
    if isinstance(x, dict):
        for value in x.values():
            yield from _values(value)
    elif isinstance(x, (tuple, list)):
        for value in x:
            yield from _values(value)
    else:
        yield getattr(x, "local", x)  # a distributed array stands for its local part


def _digest(x: Any) -> str:
    """A digest of the bits of an array's elements, or of a plain value; "" of anything else."""
    if isinstance(x, _PLAIN):
        return _hashed(f"{type(x).__name__} {x!r}".encode())
    try:
        view = library_of(x).host_view(x)
    except (ValueError, TypeError):
        return ""
    head = f"{view.dtype} {view.shape}".encode()
    return _hashed(head, np.ascontiguousarray(view).reshape(-1).view(np.uint8).data)


def _hashed(*parts: Any) -> str:
    whole = blake2b(digest_size=12)
    for part in parts:
        whole.update(part)
    return whole.hexdigest()


def _joined(digests: list[str]) -> str:
    return _hashed(" ".join(digests).encode())
