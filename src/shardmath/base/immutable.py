"""Immutable objects of named values, declared as frozen dataclasses are.

`dataclass` writes and compiles the source of the methods of each class when it is defined. That
takes a millisecond for a class, and a hundred are defined before the first call ends. Here the
methods are written once. Dataclasses remain for options, for mutable objects and for those that
geometry makes by the thousand. Other classes that users instantiate write an `__init__`, which
shows its arguments.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, FrozenInstanceError, field
from inspect import get_annotations
from itertools import islice
from operator import attrgetter
from typing import Any, ClassVar, NoReturn, dataclass_transform


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Immutable:
    """The base of classes whose annotations name their values.

    `dataclasses.field` serves as in a dataclass: for a default that is made for each object, and
    for a value that is not shown or not compared. Objects of one class with equal values are equal;
    with the class argument `eq=False` an object equals only itself. With `hashes_once=True` it
    keeps its hash. `words` is the format string by which they print. `__post_init__` may check the
    values.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]] = {}  # `dataclasses.replace` reads them
    _defaults: ClassVar[dict[str, Any]] = {}  # MISSING where there is none, or it is made anew
    _without_default: ClassVar[list[str]] = []
    _compared: ClassVar[attrgetter[Any]]
    _printed: ClassVar[str] = ""

    def __init_subclass__(
        cls, *, eq: bool = True, hashes_once: bool = False, words: str = ""
    ) -> None:
        super().__init_subclass__()
        cls._printed = words or cls._printed
        fields = cls.__dataclass_fields__ = {**cls.__dataclass_fields__}
        for name, kind in get_annotations(cls).items():
            if str(kind).startswith(("ClassVar", "typing.ClassVar")):
                continue
            default = cls.__dict__.get(name, MISSING)
            if isinstance(default, Field):
                fields[name] = default
                if default.default is MISSING:
                    delattr(cls, name)
                else:
                    setattr(cls, name, default.default)
            else:
                fields[name] = field(default=default)
            fields[name].name = name
        cls._defaults = {name: x.default for name, x in fields.items()}
        cls._without_default = [name for name, x in fields.items() if x.default is MISSING]
        cls._compared = attrgetter("__class__", *[name for name, x in fields.items() if x.compare])
        if not eq:
            cls.__eq__, cls.__hash__ = object.__eq__, object.__hash__  # type: ignore[method-assign]
        if hashes_once:
            cls.__hash__ = _kept_hash  # type: ignore[method-assign]

    def __init__(self, *values: Any, **named: Any) -> None:
        fields, state = self.__dataclass_fields__, self.__dict__
        if named or len(values) != len(fields):
            state.update(self._defaults)
            state.update(zip(fields, values, strict=False))
            state.update(named)
            self._complete(values, named)
        else:
            state.update(zip(fields, values, strict=True))
        self.__post_init__()

    def __post_init__(self) -> None:
        """Raise where the values are wrong."""

    def _complete(self, values: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Make the defaults that each object has to itself; raise TypeError for wrong arguments."""
        fields, state, kind = self.__dataclass_fields__, self.__dict__, type(self).__name__
        missing = []
        for name in self._without_default:
            if state[name] is MISSING:
                factory = fields[name].default_factory
                if callable(factory):
                    state[name] = factory()
                else:
                    missing.append(name)
        if missing:
            raise TypeError(f"{kind} needs {', '.join(missing)}")
        twice = not named.keys().isdisjoint(islice(fields, len(values)))
        if twice or len(values) > len(fields) or len(state) > len(fields):
            raise TypeError(f"{kind} has these values, each once: {', '.join(fields)}")

    def __eq__(self, other: object) -> bool:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return bool(self._compared(self) == self._compared(other))

    def __hash__(self) -> int:
        return hash(self._compared(self))

    def __getstate__(self) -> dict[str, Any]:
        """The values, for copies and pickles, which must not keep the hash."""
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    def __repr__(self) -> str:
        shown = [name for name, x in self.__dataclass_fields__.items() if x.repr]
        values = ", ".join([f"{name}={getattr(self, name)!r}" for name in shown])
        return f"{type(self).__qualname__}({values})"

    def __str__(self) -> str:
        return self._printed.format_map(self.__dict__) if self._printed else repr(self)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise FrozenInstanceError(f"{type(self).__name__} is immutable: its {name} stays")

    def __delattr__(self, name: str) -> NoReturn:
        raise FrozenInstanceError(f"{type(self).__name__} is immutable: its {name} stays")


def _kept_hash(self: Immutable) -> int:
    kept = self.__dict__.get("_hash")
    if kept is None:
        kept = self.__dict__["_hash"] = hash(self._compared(self))
    found: int = kept
    return found
