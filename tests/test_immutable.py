"""Immutable objects, against frozen dataclasses that are declared with the same words."""

import copy
import pickle
from dataclasses import FrozenInstanceError, dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import pytest

from shardmath.base.immutable import Immutable


class Point(Immutable):
    kind: ClassVar[str] = "point"

    x: int
    y: int = 2
    names: list[str] = field(default_factory=list)
    note: str = field(default="", repr=False)
    memory: object = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.x < 0:
            raise ValueError("x is negative")

    @cached_property
    def total(self) -> int:
        return self.x + self.y


class Solid(Point):
    z: int = 5


class Nothing(Immutable):
    pass


class NothingElse(Immutable):
    pass


class Alone(Immutable, eq=False):
    x: Any


class Hashed(Immutable, hashes_once=True):
    x: Any


def as_dataclass(kind, *bases, **how):
    """The class as `dataclass` makes it of the same declaration, and with the same name."""
    members = {name: value for name, value in vars(kind).items() if name in DECLARED}
    for name in kind.__annotations__:
        declared = kind.__dataclass_fields__.get(name)
        members |= {} if declared is None else {name: copy.copy(declared)}
    annotations = kind.__annotations__
    body = {**members, "__annotations__": annotations, "__module__": __name__}
    return dataclass(frozen=True, **how)(type(kind.__qualname__, bases, body))


DECLARED = ("__post_init__", "total", "kind", "__qualname__")
ORACLES = {Point: as_dataclass(Point)}
ORACLES[Solid] = as_dataclass(Solid, ORACLES[Point])
ORACLES |= {kind: as_dataclass(kind) for kind in (Nothing, NothingElse)}
ORACLES[Alone] = as_dataclass(Alone, eq=False)

MADE = [
    (Point, (1,), {}),
    (Point, (1, 2), {}),
    (Point, (1, 3), {"note": "a"}),
    (Point, (1,), {"memory": "m"}),
    (Point, (), {"y": 2, "x": 1}),
    (Point, (1, 2, ["a"], "b", None), {}),
    (Solid, (1,), {}),
    (Solid, (1, 2, [], "", None, 6), {}),
    (Solid, (1,), {"z": 6}),
    (Nothing, (), {}),
    (NothingElse, (), {}),
    (Alone, (1,), {}),
    (Alone, (), {"x": 1}),
]


def pairs():
    """Each object twice, as it is and as a dataclass."""
    return [
        (kind(*values, **named), ORACLES[kind](*values, **named)) for kind, values, named in MADE
    ]


def test_it_shows_and_compares_as_a_dataclass_does():
    for (one, like), (kind, _, _) in zip(pairs(), MADE, strict=True):
        assert repr(one) == repr(like)
        assert vars(one) == vars(like)
        for (other, another), (other_kind, _, _) in zip(pairs(), MADE, strict=True):
            assert (one == other) == (like == another), (one, other)
            if kind is Alone is other_kind:
                assert hash(one) != hash(other)
    assert Point(1) != 1
    assert [Point(1, names=()), Point(1, names=(), memory=3)].count(Point(1, names=())) == 2
    assert len({Point(1, names=()), Point(1, names=(), memory=3), Point(2, names=())}) == 2
    with pytest.raises(TypeError, match="unhashable"):
        hash(Point(1))


@pytest.mark.parametrize(
    ("values", "named", "error"),
    [
        ((), {}, "needs x"),
        ((), {"y": 1}, "needs x"),
        ((1,), {"x": 1}, "each once: x, y, names, note, memory"),
        ((1,), {"w": 1}, "each once"),
        ((1, 2, [], "", None, 6), {}, "each once"),
        ((1, 2, [], "", None, 6), {"w": 1}, "each once"),
        ((-1,), {}, "x is negative"),
    ],
)
def test_wrong_values_are_refused(values, named, error):
    with pytest.raises((TypeError, ValueError)) as raised:
        ORACLES[Point](*values, **named)
    with pytest.raises(raised.type, match=error):
        Point(*values, **named)


def test_it_stays_as_it_is():
    for one in (Point(1), ORACLES[Point](1)):
        for change in (
            lambda x: setattr(x, "y", 1),
            lambda x: delattr(x, "y"),
            lambda x: x.__setattr__("w", 1),
        ):
            with pytest.raises(FrozenInstanceError):
                change(one)
        assert one.total == 3
        assert replace(one, y=7).total == 8
        assert replace(one) == one
        with pytest.raises(TypeError):
            replace(one, w=1)
        with pytest.raises(ValueError, match="negative"):
            replace(one, x=-1)
        assert copy.deepcopy(one) == copy.copy(one) == one


def test_each_object_has_defaults_of_its_own():
    Point(1).names.append("a")
    assert Point(1).names == []
    assert not hasattr(Point, "names")
    assert Point.kind == "point"


def test_it_travels_between_processes():
    one = pickle.loads(pickle.dumps(Solid(1, note="a")))
    assert one == Solid(1, note="a")
    assert type(one) is Solid
    hashed = Hashed("a")
    assert hash(hashed) == hash(Hashed("a")) == hash(pickle.loads(pickle.dumps(hashed)))
    assert "_hash" not in vars(copy.copy(hashed))
