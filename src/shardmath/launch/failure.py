"""How a rank failed: what it says to its launcher, and what the launcher says to the user.

The first failing rank is the one whose failure came first, but a failure that says "a peer of mine
is gone" (`RankFailure`) is a consequence, and comes after every other. A rank that dies without a
word is dated from when it was last known to be alive.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import json
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from types import TracebackType

from shardmath import errors
from shardmath.base.immutable import Immutable


class Failure(Immutable):
    """One rank's failure. `status` is what a shell would show; `when` is on the monotonic clock.

    `error` is the module and the name of the exception's class, `message` its text, `text` its
    traceback, `ranks` the peers that it names: all empty for a rank that died without a word.
    """

    rank: int
    when: float
    status: int
    error: tuple[str, str] = ("", "")
    message: str = ""
    text: str = ""
    ranks: tuple[int, ...] = ()

    @property
    def is_consequence(self) -> bool:
        """Whether it says no more than that a peer is gone."""
        return self.error == (errors.__name__, errors.RankFailure.__name__)

    @property
    def order(self) -> tuple[bool, float, int]:
        """The key by which the first failure of a job is the smallest."""
        return self.is_consequence, self.when, self.rank

    def __str__(self) -> str:
        """In words, such as `rank 2 was killed by SIGKILL`."""
        if self.error[1]:
            return f"rank {self.rank} raised {self.error[1]}"
        if self.status > 128:
            with contextlib.suppress(ValueError):
                return f"rank {self.rank} was killed by {signal.Signals(self.status - 128).name}"
        if self.status == 0:
            return f"rank {self.rank} ended before it returned a result"
        return f"rank {self.rank} exited with status {self.status}"

    def encode(self) -> bytes:
        """The bytes of this failure, for the pipe to the launcher."""
        return json.dumps([*vars(self).values()]).encode()

    @classmethod
    def decode(cls, data: bytes) -> Failure:
        """The failure that `encode` was called on."""
        rank, when, status, error, message, text, ranks = json.loads(data)
        return cls(rank, when, status, (error[0], error[1]), message, text, tuple(ranks))


def from_exception(rank: int, error: BaseException, *, hide: Sequence[str] = ()) -> Failure:
    """The failure of `rank` by an exception that nothing caught; the traceback as Python shows it.

    The outermost frames are left out as long as they are in the files `hide`. `sys.exit` is a
    failure without a class: its status, and its message if it has one.
    """
    when = time.monotonic()
    if isinstance(error, SystemExit):
        code = error.code
        status = 0 if code is None else code & 0xFF if isinstance(code, int) else 1
        text = "" if code is None or isinstance(code, int) else f"{code}\n"
        return Failure(rank, when, status, text=text)
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in hide:
        frames = frames.tb_next
    kind = type(error)
    return Failure(
        rank,
        when,
        128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1,
        (kind.__module__, kind.__qualname__),
        _text(error),
        _shown(error, frames),
        tuple(getattr(error, "ranks", ())) if isinstance(error, errors.ShardmathError) else (),
    )


def died(rank: int, wait_status: int, *, when: float) -> Failure:
    """The failure of a rank that ended without a report; `when` it was last known to be alive."""
    code = wait_status if wait_status >= 0 else 128 - wait_status
    return Failure(rank, when, code)


def rebuild(failure: Failure) -> Exception:
    """The exception to raise where the ranks were started.

    Its class is the rank's when that is a built-in or shardmath's, RankFailure when the rank died,
    else RuntimeError. It names the rank, and carries the rank's traceback as a note.
    """
    if not failure.error[1]:
        error: Exception = errors.RankFailure(str(failure), (failure.rank,))
    else:
        error = _same_class(failure)
    if failure.text:
        error.add_note(f"The traceback of rank {failure.rank}:\n{failure.text.rstrip()}")
    return error


def _same_class(failure: Failure) -> Exception:
    module, name = failure.error
    home = {"builtins": builtins, errors.__name__: errors}.get(module)
    kind = getattr(home, name, None)
    who = f"rank {failure.rank}"
    says_who = failure.message.startswith((f"{who}:", f"{who} "))
    message = failure.message if says_who else f"{who}: {failure.message}"
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return RuntimeError(f"{who} raised {module}.{name}: {failure.message}")
    try:
        if issubclass(kind, (errors.RankFailure, errors.OpTimeout)):
            return kind(message, failure.ranks)
        return kind(message)
    except TypeError:  # a class such as UnicodeDecodeError, which takes more than a message
        return RuntimeError(f"{who} raised {name}: {failure.message}")


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "<no text>"


def _shown(error: BaseException, frames: TracebackType | None) -> str:
    """The traceback as the user's `sys.excepthook` writes it, or else as Python does.

    Python's own hook is not called: it cannot show source that is in no file, as in notebooks.
    """
    plain = traceback.format_exception(type(error), error, frames)
    if sys.excepthook is sys.__excepthook__:
        return "".join(plain)
    page = io.StringIO()
    try:
        with contextlib.redirect_stderr(page):
            sys.excepthook(type(error), error.with_traceback(frames), frames)
    except Exception:
        page = io.StringIO()
    return page.getvalue() or "".join(plain)
