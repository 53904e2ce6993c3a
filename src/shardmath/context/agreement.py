"""All ranks agree, or all ranks raise the same error.

Each rank describes its call in plain data. One exchange gathers the descriptions, and a pure
function of all of them, the same on every rank, returns what was agreed or raises. A rank that
cannot describe its call sends its error instead, so that no peer is left waiting. After agreement
nothing may fail on one rank only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NoReturn, TypeVar

from shardmath.base import wire
from shardmath.base.collective_call import settled
from shardmath.errors import CollectiveMismatch
from shardmath.symmetric.board import Board
from shardmath.symmetric.messages import TRAVELLING, body, difference, header

Agreed = TypeVar("Agreed")
T = TypeVar("T")

_DESCRIBED, _REFUSED = b"+", b"-"
_FACTS = ("need", "have", "ranks")  # what our exceptions carry besides words


def agree(
    board: Board, operation: str, describe: Callable[[], Any], check: Callable[[list[Any]], Agreed]
) -> Agreed:
    """`check` of every rank's `describe()`, in rank order. Collective.

    Raises on every rank what `describe` raised on the first rank where it did, whatever it had
    called (the message then begins with that rank), what `check` raises, or CollectiveMismatch when
    the operations differ.
    """
    return agree_keeping(board, operation, lambda: (None, describe()), check)[1]


def agree_keeping(
    board: Board,
    operation: str,
    describe: Callable[[], tuple[T, Any]],
    check: Callable[[list[Any]], Agreed],
) -> tuple[T, Agreed]:
    """As `agree`, where `describe()` also returns something that this rank keeps, before the
    description. Returns that, and what was agreed. Collective.
    """

    def packed() -> tuple[T, bytes]:
        kept, description = describe()
        return kept, wire.encode(description)

    kept, text = described(board, operation, packed)
    texts = _exchanged(board, operation, text)
    return kept, checked(board, check, [wire.decode(text) for text in texts])


def gather(board: Board, operation: str, describe: Callable[[], bytes]) -> list[bytes]:
    """Every rank's `describe()`, bytes, in rank order: agreement without a `check`. Collective.

    Raises on every rank what `describe` raised on the first rank where it did, or
    CollectiveMismatch when the operations differ.
    """
    return _exchanged(board, operation, described(board, operation, describe))


def _exchanged(board: Board, operation: str, text: bytes) -> list[bytes]:
    texts, _ = board.exchange_raw(operation, beginning(operation) + text)
    return require_accepted(board, operation, texts)


def described(board: Board, operation: str, describe: Callable[..., T], *arguments: Any) -> T:
    """`describe(*arguments)`, this rank's description of its call.

    Where it raises, all ranks raise the error of the first rank that has one; collective then.
    """
    board.enter(operation)
    try:
        return describe(*arguments)
    except Exception as error:
        mistake = error
    try:
        refuse(board, operation, mistake)
    finally:
        del mistake  # its traceback refers to this frame: a cycle that would keep the operands


@lru_cache(maxsize=256)
def beginning(operation: str) -> bytes:
    """How the text of a rank begins that can describe its call."""
    return header(operation) + _DESCRIBED


def require_accepted(board: Board, operation: str, texts: Sequence[bytes]) -> list[bytes]:
    """The descriptions in all ranks' texts. Raises as `gather` where one sent something else."""
    prefix = beginning(operation)
    for text in texts:
        if not text.startswith(prefix):
            _raise_refusal(board, operation, texts, None)
    start = len(prefix)
    return [text[start:] for text in texts]


def refuse(board: Board, operation: str, mistake: Exception) -> NoReturn:
    """Send an error in place of a description, and raise the first rank's on all of them."""
    try:
        texts, _ = board.exchange_raw(operation, header(operation) + _refusal(mistake))
        _raise_refusal(board, operation, texts, mistake)
    finally:
        del mistake
    raise AssertionError("one was sent")


def checked(board: Board, check: Callable[[T], Agreed], told: T) -> Agreed:
    """`check(told)`, where all ranks were told the same: what it raises, all ranks raise.

    `check` is pure. An exception that it does not raise again, when called once more, comes from a
    signal handler on this rank alone.
    """
    try:
        return check(told)
    except Exception as error:
        if _is_raised_again(check, told, error):
            _noted(board, error)
        raise


def _is_raised_again(check: Callable[[T], object], told: T, error: Exception) -> bool:
    try:
        check(told)
    except Exception as again:
        return type(again) is type(error) and str(again) == str(error)
    return False


def require_equal(what: str, values: Sequence[Any]) -> Any:
    """The one value that all ranks gave. Raises CollectiveMismatch, naming a rank that differs."""
    for rank, value in enumerate(values):
        if value != values[0] and repr(value) != repr(values[0]):  # NaN equals NaN here
            raise CollectiveMismatch(
                f"{what} must be equal on all ranks: rank 0 has {values[0]}, "
                f"rank {rank} has {value}"
            )
    return values[0]


def _refusal(error: Exception) -> bytes:
    """The bytes that a rank sends instead of its description: its error."""
    facts = {name: getattr(error, name) for name in _FACTS if hasattr(error, name)}
    name, text = _travelling_name(error), str(error)
    if name != type(error).__name__:  # it is raised as what it derives from, or RuntimeError
        text = f"{type(error).__name__}: {text}".rstrip(": ")
    return _REFUSED + wire.encode((name, text, facts))


def _raise_refusal(
    board: Board, operation: str, texts: Sequence[bytes], own: Exception | None
) -> None:
    """Raise the error of the first rank that sent one; `own`, this rank's, becomes its cause.

    An error that every rank sent is said to be every rank's. `own` is no cause where it is the same
    error, which would only be shown twice. Where ranks called different operations, and one of them
    refused its own, its error says more than CollectiveMismatch, which becomes a note.
    """
    mismatch, messages = difference(texts, operation), [body(text) for text in texts]
    for rank, text in enumerate(messages):
        if text[:1] == _REFUSED:
            everywhere = len(messages) > 1 and all(other == text for other in messages)
            same = own is None or text == _refusal(own)
            who = "every rank" if everywhere else f"rank {rank}"
            note = f"Besides, {mismatch}." if mismatch else ""
            raise _noted(board, _rebuilt(who, text[1:], note)) from (None if same else own)
    if mismatch:
        raise _noted(board, CollectiveMismatch(mismatch))


def refused_by(rank: int, error: Exception) -> Exception:
    """The error that all ranks raise where `rank` sends `error` instead of its description."""
    return _rebuilt(f"rank {rank}", _refusal(error)[1:])


def _noted(board: Board, error: Exception) -> Exception:
    """`error`, which all ranks raise, with a note of where they are."""
    board.names.note(error)
    return settled(error)


def _travelling_name(error: Exception) -> str:
    for kind in type(error).__mro__:
        if TRAVELLING.get(kind.__name__) is kind:
            return kind.__name__
    return "RuntimeError"


def _rebuilt(who: str, data: bytes, note: str = "") -> Exception:
    name, text, facts = wire.decode(data)
    error = TRAVELLING.get(name, RuntimeError)(f"{who}: {text}")
    for fact, value in facts.items():
        if fact in _FACTS and hasattr(error, fact):
            setattr(error, fact, value)
    if note:
        error.add_note(note)
    return error
