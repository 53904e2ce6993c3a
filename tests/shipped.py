"""Functions inside functions, and what they hold, as bytes: for ranks that were not forked.

The receiver takes the code from the source itself, so nothing but names and values travels.
"""

from __future__ import annotations

import importlib
import io
import pickle
import types
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["pack", "unpack"]


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, types.ModuleType):
            return importlib.import_module, (value.__name__,)
        if isinstance(value, types.FunctionType) and "<" in value.__qualname__:
            code = value.__code__
            held = {
                name: cell.cell_contents
                for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True)
            }
            where = (code.co_filename, code.co_firstlineno, code.co_qualname)
            return _rebuild, (value.__module__, where, value.__defaults__, held)
        return NotImplemented


def pack(function: Callable[..., Any]) -> bytes:
    """The function as bytes."""
    page = io.BytesIO()
    _Pickler(page).dump(function)
    return page.getvalue()


def unpack(data: bytes) -> Callable[..., Any]:
    """The function that `pack` was given."""
    made: Callable[..., Any] = pickle.loads(data)
    return made


def _rebuild(
    module: str, where: tuple[str, int, str], defaults: tuple[Any, ...] | None, held: dict[str, Any]
) -> types.FunctionType:
    file, line, name = where
    [code] = [
        code for code in _codes(file) if (code.co_firstlineno, code.co_qualname) == (line, name)
    ]
    cells = tuple(types.CellType(held[free]) for free in code.co_freevars)
    names = vars(importlib.import_module(module))
    return types.FunctionType(code, names, code.co_name, defaults, cells)


@cache
def _codes(file: str) -> list[types.CodeType]:
    """The code of every function in a file."""
    return list(_inside(compile(Path(file).read_text(), file, "exec", dont_inherit=True)))


def _inside(code: types.CodeType) -> Iterator[types.CodeType]:
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield value
            yield from _inside(value)
