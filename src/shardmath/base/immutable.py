"""Immutable objects of named values, declared as frozen dataclasses are.

`dataclass` writes the source of each method of each class, and compiles it where the class is
defined. That takes a millisecond for a class, and a hundred are defined before the first call ends.
Here the methods are written once. Dataclasses are options, what is mutable, and what geometry makes
by the thousand; what else users make has an `__init__` of its own, which says what it takes.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, FrozenInstanceError, field
from inspect import get_annotations
from operator import attrgetter
from typing import Any, ClassVar, NoReturn, dataclass_transform


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Immutable:
    """The base of a class whose annotations name its values, with `dataclasses.field` for a default
    that is made for each object, and for a value that is not shown, or not compared.

    Objects of the same class with equal values are equal; with `eq=False` in the line of the class,
    one equals itself alone. `__post_init__`, if there is one, may refuse the values.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]] = {}  # `dataclasses.replace` reads them
    _compared: ClassVar[attrgetter[Any]]

    def __init_subclass__(cls, *, eq: bool = True) -> None:
        super().__init_subclass__()
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
        cls._compared = attrgetter("__class__", *[name for name, x in fields.items() if x.compare])
        if not eq:
            cls.__eq__, cls.__hash__ = object.__eq__, object.__hash__  # type: ignore[method-assign]

    def __init__(self, *values: Any, **named: Any) -> None:
        if named or len(values) != len(self.__dataclass_fields__):
            values = self._completed(values, named)
        self.__dict__.update(zip(self.__dataclass_fields__, values, strict=True))
        self.__post_init__()

    def __post_init__(self) -> None:
        """Raise what is wrong with the values."""

    def _completed(self, values: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """All values in order, with the defaults of those that were not given."""
        names, kind = tuple(self.__dataclass_fields__), type(self).__name__
        given = {**dict(zip(names, values, strict=False)), **named}
        for name, x in self.__dataclass_fields__.items():
            if name not in given:
                given[name] = x.default if x.default_factory is MISSING else x.default_factory()
        missing = [name for name in names if given[name] is MISSING]
        if missing:
            raise TypeError(f"{kind} needs {', '.join(missing)}")
        if len(values) + len(named) > len(names) or not named.keys() <= {*names[len(values) :]}:
            raise TypeError(f"{kind} has these values, each once: {', '.join(names)}")
        return tuple([given[name] for name in names])

    def __eq__(self, other: object) -> bool:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return bool(self._compared(self) == self._compared(other))

    def __hash__(self) -> int:
        return hash(self._compared(self))

    def __repr__(self) -> str:
        shown = [name for name, x in self.__dataclass_fields__.items() if x.repr]
        values = ", ".join([f"{name}={getattr(self, name)!r}" for name in shown])
        return f"{type(self).__qualname__}({values})"

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise FrozenInstanceError(f"{type(self).__name__} is immutable: its {name} stays")

    def __delattr__(self, name: str) -> NoReturn:
        raise FrozenInstanceError(f"{type(self).__name__} is immutable: its {name} stays")
