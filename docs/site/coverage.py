"""The build fails where the reference leaves out a public name.

A name that several modules offer is described once: a page says by `:exclude-members:` what is
described elsewhere, under a module from which the same object comes.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.ext.autodoc.mock import mock
from sphinx.util import logging

LOGGER = logging.getLogger(__name__)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect it."""
    app.connect("env-check-consistency", _checked)
    return {"parallel_read_safe": True}


def _checked(app: Sphinx, env: BuildEnvironment) -> None:
    with mock(app.config.autodoc_mock_imports):
        _check(env)


def _check(env: BuildEnvironment) -> None:
    described = set(env.domains["py"].objects)
    modules = sorted(env.domains["py"].modules)
    homes = {id(_get(name)) for name in described if name not in modules and _get(name) is not None}
    for module in modules:
        for name in _public(module):
            found = getattr(importlib.import_module(module), name)
            is_ours = _is_ours(found) and found is not getattr(np, name, homes)
            if f"{module}.{name}" not in described and is_ours and id(found) not in homes:
                LOGGER.warning("%s.%s is in no page of docs/reference", module, name)
    folder = Path(importlib.import_module("shardmath").__file__ or "").parent
    for path in sorted(folder.glob("*.py")) + sorted(folder.glob("linalg/*.py")):
        parts = ["shardmath", *path.relative_to(folder).with_suffix("").parts]
        module = ".".join(part for part in parts if part != "__init__")
        if "\n__all__ = " in path.read_text() and module not in modules:
            LOGGER.warning("%s has no page in docs/reference", module)


def _public(module: str) -> Iterator[str]:
    found = importlib.import_module(module)
    for name in found.__all__:
        if not inspect.ismodule(getattr(found, name)) and name != "__version__":
            yield name


def _is_ours(found: object) -> bool:
    """Whether this package describes it: it is not handed on as it is, as NumPy's LinAlgError."""
    module = getattr(found, "__module__", None) or type(found).__module__
    return module.partition(".")[0] in ("builtins", "shardmath", "typing")


def _get(name: str) -> object:
    module, _, last = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), last, None)
    except ImportError:  # a method's class is no module
        return None
