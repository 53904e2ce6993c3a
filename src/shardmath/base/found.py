"""Classes that are found by the name of their module: a file added to a folder adds one."""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType
from typing import Any


def modules_of(package: ModuleType) -> list[str]:
    """The names of the modules in the folders of a package, in alphabetical order.

    `pkgutil` finds them too, and takes longer to import than this takes.
    """
    files = [file for folder in package.__path__ for file in os.listdir(folder)]
    names = {file.removesuffix(".py") for file in files if file.endswith(".py")}
    return sorted(names - {"__init__"})


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
