"""All arguments of a call but its tensors, as one text: a constant in torch's compiled graphs.

The text has distributions as ranks send them to each other, and contexts by their numbers in this
process.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any

import numpy as np

from shardmath import geometry
from shardmath.base import current
from shardmath.base.untraced import constant
from shardmath.context.context import (
    DistributedContext,
    get_context,
    open_contexts,
    require_context,
)
from shardmath.geometry import Distribution

Words = Mapping[str, Any]  # hashable where `read_words` has made them
CURRENT = -1  # in place of a context's number: the context that is current at the call
_RANK_BITS = 24


@constant
def words_of(**given: Any) -> str:
    """The words of a call as text. Raises TypeError for what is neither plain data, nor a
    distribution or options.
    """
    return repr({name: plain(value) for name, value in given.items()})


def plain(value: Any) -> Any:
    """`value` as data that `ast.literal_eval` reads. Raises TypeError as `words_of`."""
    if isinstance(value, Distribution):
        return {"distribution": value.encode()}
    if isinstance(value, IntEnum):
        return int(value)
    if is_dataclass(value):
        pairs = ((field.name, vars(value)[field.name]) for field in fields(value))
        return {name: plain(x) for name, x in pairs if name != "logger" and x is not None}
    if isinstance(value, Mapping):
        return {str(name): plain(x) for name, x in value.items() if name != "logger"}
    if isinstance(value, list | tuple):
        return [plain(x) for x in value]
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | complex | str):
        return value
    raise TypeError(f"{value!r} is not what torch traces or differentiates: pass plain data")


class _ReadWords(dict[str, Any]):
    """The words of a text: one object, never changed, so that caches are keyed by it."""

    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


@lru_cache(maxsize=4096)
def read_words(text: str) -> Words:
    """The words in a text of `words_of`."""
    return _ReadWords({name: _value(x) for name, x in ast.literal_eval(text).items()})


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_value(x) for x in plain]
    if isinstance(plain, dict) and plain.keys() == {"distribution"}:
        return geometry.decode(plain["distribution"])
    return plain


def number_of(context: DistributedContext | None) -> int:
    """The number of a context that a caller of compiled code passes, or, for None, a number below
    `CURRENT`: that of any context in which this process has the same rank of as many, and which is
    current when the code runs. The shapes in the code depend on the two.
    """
    if context is None:
        return _number_of_place()
    if isinstance(context, DistributedContext):
        return context.number
    raise TypeError(f"context is a DistributedContext or None, not {context!r}")


@constant
def _number_of_place() -> int:
    context = require_context()
    return CURRENT - 1 - context.rank - (context.size << _RANK_BITS)


def context_of(number: int) -> DistributedContext:
    """The context of that number. Raises RuntimeError where it has been finalised, or where
    compiled code runs in no context, or in another than that in which it was compiled.
    """
    found = current.get()
    if isinstance(found, DistributedContext) and number in (CURRENT, found.number):
        return found
    if number == CURRENT:
        return require_context()
    if number < CURRENT:
        return _context_of_compiled(number)
    found = next((one for one in open_contexts() if one.number == number), None)
    if found is None:
        raise RuntimeError("the context of this call was finalised before its backward pass")
    return found


def _context_of_compiled(number: int) -> DistributedContext:
    size, rank = divmod(CURRENT - 1 - number, 1 << _RANK_BITS)
    context = get_context()
    if context is not None and (context.rank, context.size) == (rank, size):
        return require_context()
    here = "there is none" if context is None else f"this is rank {context.rank} of {context.size}"
    raise RuntimeError(
        f"this code was compiled where this process is rank {rank} of {size}, and in the context "
        f"that is current now {here}: run it, and its backward pass, within `with context:`"
    )
