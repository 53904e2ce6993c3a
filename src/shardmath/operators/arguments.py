"""Arguments that all operators take: options, streams and loggers, to which plans are logged."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from logging import Logger
from typing import Any, Protocol, TypeVar

from shardmath.base.log import INFO, is_heard, package_logger
from shardmath.base.lru_cache import LRUCache
from shardmath.context.context import Context

T = TypeVar("T")

_LOGGED = partial(LRUCache[int, weakref.ref[Any]], 256)  # plans of a context, by identity


def check_stream(stream: Any) -> None:
    """Raise TypeError unless `stream` is None, a stream's address, or a stream object.

    For operands in host memory the stream is checked, and not used.
    """
    known = ("__cuda_stream__", "cuda_stream", "ptr")
    if stream is None or (isinstance(stream, int) and not isinstance(stream, bool)):
        return
    if not any(hasattr(stream, name) for name in known):
        raise TypeError(
            f"stream is None, an integer or a CUDA stream object, not {type(stream).__name__}"
        )


def check_common(options: Any, flags: Sequence[str] = ()) -> None:
    """Raise TypeError or ValueError for the options that operators have in common: `logger`,
    `blocking`, which is True or "auto", and options of these names, which are True or False.
    """
    check_logger(options.logger)
    blocking = options.blocking
    if blocking is not True and not (isinstance(blocking, str) and blocking == "auto"):
        raise ValueError(f'blocking is True or "auto", not {blocking!r}')
    for name in flags:
        if not isinstance(getattr(options, name), bool):
            raise ValueError(f"{name} is True or False, not {getattr(options, name)!r}")


def check_logger(logger: Any) -> None:
    """Raise TypeError unless `logger` is None or a logging.Logger."""
    if logger is not None and not isinstance(logger, Logger):
        raise TypeError(f"logger is a logging.Logger or None, not {logger!r}")


class _Explained(Protocol):
    """A plan that describes itself."""

    def explain(self) -> str: ...


def log_plan(context: Context, logger: Logger | None, plan: _Explained) -> None:
    """Log the plan to the user's logger, at each call. Local.

    Without one it goes to the package's logger, whose records reach the root logger: each plan
    once, so that a program whose root logger is at INFO is not flooded.
    """
    if logger is None:
        if not is_heard(INFO):
            return
        logged: LRUCache[int, weakref.ref[Any]] = context.cache("plans in the log", _LOGGED)
        seen = logged.find(id(plan))
        if seen is not None and seen() is plan:
            return
        logged.keep(id(plan), weakref.ref(plan))
    (logger or package_logger()).info("%s", plan.explain())


def options_of(kind: type[T], value: Any, name: str = "options") -> T:
    """`value` as a `kind`: one already, a dictionary of its fields, or None for the defaults.

    Raises TypeError, naming the argument, for anything else and for unknown fields.
    """
    if value is None:
        default: T = _default(kind)  # type: ignore[arg-type]
        return default
    if isinstance(value, kind):
        return value
    if isinstance(value, Mapping):
        known: tuple[str, ...] = kind.__match_args__  # type: ignore[attr-defined]
        unknown = sorted(str(name) for name in set(value) - set(known))
        if unknown:
            raise TypeError(f"{name} has no field {unknown[0]!r}; it has {', '.join(known)}")
        return kind(**value)
    raise TypeError(f"{name} is a {kind.__name__}, a dictionary or None, not {value!r}")


@lru_cache(maxsize=32)
def _default(kind: type[Any]) -> Any:
    """The default options of a kind. They are frozen: one object serves all calls."""
    return kind()
