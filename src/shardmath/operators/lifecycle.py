"""The life of an operator object: made with operands, planned, executed, reset, freed.

An object owns what its plan needs, never its operands: it only refers to them until they are reset
or released. Whatever is wrong with a call on one rank is raised on all: checks of state run inside
the agreement that the call begins with.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from logging import Logger
from typing import Any, ClassVar, Protocol, Self, TypeVar

from shardmath.base.lru_cache import LRUCache
from shardmath.base.untraced import untraced_methods
from shardmath.context.context import Context
from shardmath.errors import ShardmathError

T = TypeVar("T")

LOGGER = logging.getLogger(__name__)
_LOGGED = partial(LRUCache[int, weakref.ref[Any]], 256)  # plans of a context, by their identity


@untraced_methods
class Lifecycle:
    """What all operator classes share. A subclass names itself (`noun`) and its `invalid` error.

    `context` is the one it was made in, `number` its name there, the same on all ranks, and
    `_operands` the operands by name, None where there is none (released, or never given).
    """

    noun: ClassVar[str]
    invalid: ClassVar[type[ShardmathError]]

    def __init__(self, context: Context, operands: Mapping[str, Any]) -> None:
        """Call after the ranks have agreed on the object: from then on it exists on all of them."""
        self.context = context
        self.number = context.next_shared_id()
        self._operands = dict(operands)
        self._has_operands = True
        self._planned = False
        self._freed = False

    def __repr__(self) -> str:
        state = "freed" if self._freed else "planned" if self._planned else "not planned"
        return f"<{self.noun} #{self.number}, {state}>"

    def __enter__(self) -> Self:
        self._require_alive()
        return self

    def __exit__(self, *_: object) -> None:
        self.free()

    def free(self) -> None:
        """Give back what the plan holds. Local. A second call does nothing; other methods raise."""
        if not self._freed:
            self._freed = True
            self._release()
            self._release_operands()

    def _release(self) -> None:
        """Give back the plan's resources. For subclasses."""

    def _release_operands(self) -> None:
        """Drop the references to the operands."""
        self._operands = dict.fromkeys(self._operands)
        self._has_operands = False

    def _set_operands(self, **operands: Any) -> None:
        """Refer to these operands from now on."""
        self._operands.update(operands)
        self._has_operands = True

    def _gather(self, method: str, describe: Callable[[], bytes | None]) -> list[bytes]:
        """All ranks' `describe()` for a method. Collective. Raises if this object was freed."""
        self._require_open()

        def described() -> bytes:
            self._require_alive()
            return describe() or b""

        return self.context.gather(f"{self.noun}.{method} #{self.number}", described)

    def _require_open(self) -> None:
        """Raise unless the context is open. To be called before an agreement."""
        try:
            self.context.require_open()
        except RuntimeError:
            self._require_alive()  # what was freed says so, even when its context has ended
            raise

    def _require_alive(self) -> None:
        if self._freed:
            raise self.invalid(f"this {self.noun} was freed; make a new one")

    def _require_ready(self) -> None:
        """Raise unless it can be executed."""
        self._require_alive()
        if not self._planned:
            raise RuntimeError(f"this {self.noun} is not planned yet; call plan() before execute()")
        if not self._has_operands:
            raise RuntimeError(
                f"this {self.noun} has no operands: they were released; reset them first"
            )


def check_stream(stream: Any) -> None:
    """Raise TypeError unless `stream` is None, a stream's address, or a stream object.

    Operands in host memory have no stream: what is accepted here is not used.
    """
    known = ("__cuda_stream__", "cuda_stream", "ptr")
    if stream is None or (isinstance(stream, int) and not isinstance(stream, bool)):
        return
    if not any(hasattr(stream, name) for name in known):
        raise TypeError(
            f"stream is None, an integer or a CUDA stream object, not {type(stream).__name__}"
        )


def check_logger(logger: Any) -> None:
    """Raise TypeError unless `logger` is None or a logging.Logger."""
    if logger is not None and not isinstance(logger, Logger):
        raise TypeError(f"logger is a logging.Logger or None, not {logger!r}")


class _Explained(Protocol):
    """A plan that says in words what it is."""

    def explain(self) -> str: ...


def log_plan(context: Context, logger: Logger | None, plan: _Explained) -> None:
    """Tell the user's logger what was planned. Local.

    Without one the package's is told, whose records reach the handlers of the root logger: of each
    plan once, so that a program whose root logger is at INFO is not told the same at each call.
    """
    if logger is None:
        if not LOGGER.isEnabledFor(logging.INFO):
            return
        logged: LRUCache[int, weakref.ref[Any]] = context.cache("plans in the log", _LOGGED)
        seen = logged.find(id(plan))
        if seen is not None and seen() is plan:
            return
        logged.keep(id(plan), weakref.ref(plan))
    (logger or LOGGER).info("%s", plan.explain())


def check_blocking(blocking: Any) -> None:
    """Raise ValueError unless `blocking` is True or "auto"."""
    if blocking is not True and not (isinstance(blocking, str) and blocking == "auto"):
        raise ValueError(f'blocking is True or "auto", not {blocking!r}')


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
    """The one object of a kind of frozen options that has no field set."""
    return kind()
