"""Messages of ranks about their operations, and how errors name ranks.

Each message of an exchange begins with a header, the name of the operation. Ranks that have called
different operations find out before one reads the message of another operation. A rank that gives
up an operation tells its `Reason`. Errors name ranks by number, process and last operation, which
is in the rank's row (`RankNames`). A rank of a context that was split off also has a number in the
job; messages give both numbers.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from numpy.linalg import LinAlgError

from shardmath import errors
from shardmath.base.caller import caller_line
from shardmath.base.immutable import Immutable
from shardmath.base.recorder import this_process
from shardmath.errors import CollectiveMismatch, OpTimeout, RankFailure
from shardmath.group.base import rank_names
from shardmath.symmetric.rows import NAME_BYTES, OPERATION, REASON_BYTES, Rows

AFTER_FAILURE = "call recover() of the context on all ranks that remain, or finalize and initialize"

_END = b"\0"
_DESCRIBED = 4  # ranks that a message names in full
_NOTED = 8  # the same for the note of an error that all ranks raise
_BUILTINS = (
    "ValueError TypeError RuntimeError MemoryError NotImplementedError KeyError IndexError "
    "OverflowError ImportError OSError AttributeError FileNotFoundError FileExistsError "
    "IsADirectoryError NotADirectoryError PermissionError"
)
# The exceptions that all ranks raise alike, wherever they come from.
TRAVELLING: dict[str, type[Exception]] = {
    **{name: getattr(builtins, name) for name in _BUILTINS.split()},
    **{name: getattr(errors, name) for name in errors.__all__},
    "LinAlgError": LinAlgError,
}


@lru_cache(maxsize=256)
def header(operation: str) -> bytes:
    """The header of all messages of this operation."""
    return operation.encode()[:NAME_BYTES] + _END


def bodies(texts: Sequence[bytes], operation: str) -> list[bytes]:
    """All ranks' messages without their header. Raises CollectiveMismatch where headers differ."""
    if mismatch := difference(texts, operation):
        raise CollectiveMismatch(mismatch)
    start = len(header(operation))
    return [text[start:] for text in texts]


def body(text: bytes) -> bytes:
    """A rank's message without its header, whatever operation that names."""
    return text.partition(_END)[2]


def difference(texts: Sequence[bytes], operation: str) -> str:
    """The words for ranks that called different operations; "" where all called this one."""
    prefix = header(operation)
    if all(text.startswith(prefix) for text in texts):
        return ""
    return different([text.partition(_END)[0].decode(errors="replace") for text in texts])


def different(names: Sequence[str | None]) -> str:
    """The words for ranks that called operations of different `names`; None is left out."""
    callers: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        if name is not None:
            callers.setdefault(name, []).append(rank)
    calls = "; ".join(f"{rank_names(ranks)} called {name}" for name, ranks in callers.items())
    return f"the ranks called different operations: {calls}"


class Reason(Immutable):
    """Why a rank gave up an operation, in words.

    `blamed` are the ranks at fault, if not this one; `late`: they did not come. `raised` names the
    exception that all ranks are to raise with the words of `why`, if any.
    """

    why: str
    blamed: Sequence[int] = ()
    late: bool = False
    raised: str = ""

    def pack(self) -> bytes:
        """REASON_BYTES bytes: a long text is cut off, a short one padded with zeros."""
        ranks = " ".join(map(str, self.blamed))
        kind = "late" if self.late else self.raised
        return f"{kind}|{ranks}|{self.why}".encode()[:REASON_BYTES].ljust(REASON_BYTES, b"\0")

    @classmethod
    def unpack(cls, data: bytes) -> Reason:
        """The reason in bytes that `pack` has made."""
        kind, _, rest = data.rstrip(b"\0").decode(errors="replace").partition("|")
        ranks, _, why = rest.partition("|")
        blamed = [int(rank) for rank in ranks.split() if rank.isdigit()]
        return cls(why, blamed, kind == "late", "" if kind == "late" else kind)

    @property
    def error(self) -> Exception | None:
        """The exception that all ranks are to raise, if there is one."""
        kind = TRAVELLING.get(self.raised)
        return None if kind is None else kind(self.why)


class RankNames:
    """The names of one board's ranks, for the messages of one of them.

    Rank r is number `numbers[r]` of the job, and `processes[r]` is its process. `job` has the names
    of all ranks of the job, where these are a part of them.
    """

    def __init__(
        self, rows: Rows, *, numbers: Sequence[int], processes: Sequence[str], job: RankNames | None
    ) -> None:
        self.rank = rows.rank
        self._rows = rows
        self._numbers = list(numbers)
        self._processes = list(processes)
        self._job = job

    def name(self, rank: int) -> str:
        """A rank by its number, its number in the job where that is another, and its process."""
        return f"rank {rank} ({self._process(rank)})"

    def where(self, *, counted: bool = False) -> str:
        """This rank, its operation, the user's line, and its process; where operations are
        `counted`, as in the table of all ranks, also the number of the one under way.
        """
        number = this_process.under_way if counted else 0
        doing = f"rank {self.rank} in {self.operation_of(self.rank)}, {caller_line()}"
        return f"{doing}{f', #{number}' if number else ''}, {self._process(self.rank)}"

    def call(self, verb: Callable[..., object], *arguments: Any) -> None:
        """Call a verb of the transport, and give its errors this board's numbers of ranks."""
        try:
            verb(*arguments)
        except (RankFailure, OpTimeout) as error:
            numbers = {peer: rank for rank, peer in enumerate(self._numbers)}
            of_job = "" if self._job is None else "of the ranks of the job, "
            ranks = [numbers[peer] for peer in error.ranks if peer in numbers]
            raise type(error)(f"{self.where()}: {of_job}{error}", ranks) from None

    def failure_of(self, ranks: Sequence[int], what: str) -> RankFailure:
        """The error for ranks that are gone; `what` is for example "died"."""
        reasons = "; ".join(f"{self.name(r)} {what}; {self.last_of(r)}" for r in ranks)
        return RankFailure(f"{self.where()}: {reasons}; {AFTER_FAILURE}", ranks)

    def note(self, error: Exception) -> None:
        """Add a note to an error that all ranks raise: where this rank is, and all ranks' names."""
        if len(self._numbers) > 1:
            names = ", ".join(map(self.name, range(min(len(self._numbers), _NOTED))))
            more = (
                f", and {len(self._numbers) - _NOTED} more" if len(self._numbers) > _NOTED else ""
            )
            error.add_note(
                f"All ranks raise this; here it is {self.where()}. They are {names}{more}."
            )

    def described(self, ranks: Sequence[int]) -> str:
        """Ranks by their names and last operations; after a few, by their numbers alone."""
        shown = [f"rank {r} ({self._process(r)}; {self.last_of(r)})" for r in ranks[:_DESCRIBED]]
        if len(ranks) > _DESCRIBED:
            shown.append(rank_names(ranks[_DESCRIBED:]))
        return ", ".join(shown)

    def _process(self, rank: int) -> str:
        """The rank's process, after its number in the job where this board is not of all ranks."""
        process = self._processes[rank]
        if self._job is None:
            return process
        return f"rank {self._numbers[rank]} of the job, {process}"

    def last_of(self, rank: int) -> str:
        """The last operation of a rank: in this context, and in the context of all ranks."""
        here = self.operation_of(rank)
        job = self._job
        everywhere = "" if job is None else job.operation_of(self._numbers[rank])
        done = [here] if here else []
        if everywhere:
            done.append(f"{everywhere} in the context of all ranks")
        return f"its last operation was {', and '.join(done)}" if done else "it has called nothing"

    def operation_of(self, rank: int) -> str:
        """The operation that a rank is in, or was in last; "" where it has called none."""
        text = bytes(self._rows.bytes[rank][OPERATION : OPERATION + NAME_BYTES])
        name, _, _ = text.rstrip(b"\0").partition(b", ")  # a comma begins the name of a part of it
        return name.decode(errors="replace")
