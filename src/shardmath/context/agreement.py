"""All ranks agree, or all ranks raise the same error.

Each rank describes its call in plain data. One exchange gathers the descriptions, and one pure
function of all of them, the same everywhere, returns what was agreed or raises. An error on one
rank travels instead of its description, so that no peer is left waiting; nothing after agreement
may fail on one rank only.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NoReturn, TypeVar

from numpy.linalg import LinAlgError

from shardmath import errors
from shardmath.base import wire
from shardmath.base.collective_call import settled
from shardmath.errors import CollectiveMismatch
from shardmath.symmetric.board import Board
from shardmath.symmetric.messages import header

Agreed = TypeVar("Agreed")
T = TypeVar("T")

_DESCRIBED, _REFUSED = b"+", b"-"
_NAMES = (
    "ValueError TypeError RuntimeError MemoryError NotImplementedError KeyError IndexError "
    "OverflowError ImportError OSError AttributeError FileNotFoundError FileExistsError "
    "IsADirectoryError NotADirectoryError PermissionError"
)
_TRAVELLING: dict[str, type[Exception]] = {
    **{name: getattr(builtins, name) for name in _NAMES.split()},
    **{name: getattr(errors, name) for name in errors.__all__},
    "LinAlgError": LinAlgError,
}
_FACTS = ("need", "have", "ranks")  # what our exceptions carry besides words


def agree(
    board: Board,
    operation: str,
    describe: Callable[[], Any],
    check: Callable[[list[Any]], Agreed],
) -> Agreed:
    """`check` of every rank's `describe()`, in rank order. Collective.

    Raises on every rank what `describe` raised on the first rank where it did (its message preceded
    by that rank), or what `check` raises, or CollectiveMismatch when the operations differ.
    """
    texts = gather(board, operation, lambda: wire.encode(describe()))
    return checked(board, check, [wire.decode(text) for text in texts])


def agree_keeping(
    board: Board,
    operation: str,
    describe: Callable[[], tuple[T, Any]],
    check: Callable[[list[Any]], Agreed],
) -> tuple[T, Agreed]:
    """As `agree`, where `describe()` returns what this rank keeps, too, and the description second:
    that, and what was agreed. Collective.
    """

    def packed() -> tuple[T, bytes]:
        kept, description = describe()
        return kept, wire.encode(description)

    kept, text = described(board, operation, packed)
    texts, _ = board.exchange_raw(operation, beginning(operation) + text)
    accepted = require_accepted(board, operation, texts)
    return kept, checked(board, check, [wire.decode(text) for text in accepted])


def gather(board: Board, operation: str, describe: Callable[[], bytes]) -> list[bytes]:
    """Every rank's `describe()`, in rank order: agreement on what is packed already. Collective.

    Raises on every rank what `describe` raised on the first rank where it did, or
    CollectiveMismatch when the operations differ.
    """
    text = beginning(operation) + described(board, operation, describe)
    texts, _ = board.exchange_raw(operation, text)
    return require_accepted(board, operation, texts)


def described(board: Board, operation: str, describe: Callable[..., T], *arguments: Any) -> T:
    """`describe(*arguments)`, what this rank has to say of its call; an error is raised on all
    ranks: that of the first rank that has one. Collective where there is one.
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
    """The beginning of the text of a rank that can describe its call."""
    return header(operation) + _DESCRIBED


def require_accepted(board: Board, operation: str, texts: Sequence[bytes]) -> list[bytes]:
    """All ranks' descriptions. Raises as `gather` where one has sent something else."""
    prefix = beginning(operation)
    for text in texts:
        if not text.startswith(prefix):
            _raise_refusal(board, board.bodies(texts, operation), None)
    start = len(prefix)
    return [text[start:] for text in texts]


def refuse(board: Board, operation: str, mistake: Exception) -> NoReturn:
    """Send an error in place of a description, and raise the first rank's on all of them."""
    try:
        texts, _ = board.exchange_raw(operation, header(operation) + _refusal(mistake))
        _raise_refusal(board, board.bodies(texts, operation), mistake)
    finally:
        del mistake
    raise AssertionError("one was sent")


def checked(board: Board, check: Callable[[T], Agreed], told: T) -> Agreed:
    """`check(told)`, of what all ranks have told; what it raises, it raises on all ranks.

    `check` is pure. An exception that it does not raise a second time is not its own: a signal
    handler has raised it, on this rank alone.
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
    """The error that a rank met, as it sends it instead of its description."""
    facts = {name: getattr(error, name) for name in _FACTS if hasattr(error, name)}
    name, text = _travelling_name(error), str(error)
    if name != type(error).__name__:  # it is raised as what it derives from, or RuntimeError
        text = f"{type(error).__name__}: {text}".rstrip(": ")
    return _REFUSED + wire.encode((name, text, facts))


def _raise_refusal(board: Board, messages: Sequence[bytes], own: Exception | None) -> None:
    """Raise the error of the first rank that sent one; `own`, this rank's, becomes its cause.

    What every rank sent is said of every rank. Where `own` says the same as what is raised, it
    would only be shown twice.
    """
    for rank, text in enumerate(messages):
        if text[:1] == _REFUSED:
            everywhere = len(messages) > 1 and all(other == text for other in messages)
            same = own is None or text == _refusal(own)
            who = "every rank" if everywhere else f"rank {rank}"
            raise _noted(board, _rebuilt(who, text[1:])) from (None if same else own)


def refused_by(rank: int, error: Exception) -> Exception:
    """The error that all ranks raise where `rank` sends `error` instead of its description."""
    return _rebuilt(f"rank {rank}", _refusal(error)[1:])


def _noted(board: Board, error: Exception) -> Exception:
    """`error`, which all ranks raise, with a note of this rank and the others."""
    board.names.note(error)
    return settled(error)


def _travelling_name(error: Exception) -> str:
    for kind in type(error).__mro__:
        if _TRAVELLING.get(kind.__name__) is kind:
            return kind.__name__
    return "RuntimeError"


def _rebuilt(who: str, data: bytes) -> Exception:
    name, text, facts = wire.decode(data)
    error = _TRAVELLING.get(name, RuntimeError)(f"{who}: {text}")
    for fact, value in facts.items():
        if fact in _FACTS and hasattr(error, fact):
            setattr(error, fact, value)
    return error
