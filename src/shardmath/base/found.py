"""Classes that are found by the name of their module: a file added to a folder adds one."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any


def modules_of(package: ModuleType) -> list[str]:
    """The names of the modules in the folders of a package, in alphabetical order.

    `pkgutil` finds them too, and takes longer to import than this takes.
    """
    paths = [path for folder in package.__path__ for path in Path(folder).glob("*.py")]
    return sorted({path.stem for path in paths} - {"__init__"})


def class_in(package: ModuleType, name: str, base: type[Any]) -> type[Any]:
    """The one subclass of `base` that the module `name` of a package defines."""
    module = import_module(f"{package.__name__}.{name}")
    [found] = [
        member
        for member in vars(module).values()
        if isinstance(member, type)
        and issubclass(member, base)
        and member.__module__ == module.__name__
    ]
    return found
