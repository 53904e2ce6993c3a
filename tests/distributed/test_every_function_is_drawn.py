"""Every function of arrays is drawn: a Hypothesis test compares it with what NumPy has.

A name counts where a drawn test of this folder calls it, as an attribute, or has it in a table or a
list of names that it goes through, in any function of its file that the test gets to.
"""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

from shardmath import distributed
from shardmath.distributed import protocols, standard

# What says nothing of elements, and has other tests.
NOT_OF_ELEMENTS = {"DistributedArray", "communication", "explain"}


def drawn_names():
    """All names that drawn tests call, or go through."""
    found = set()
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        if file.name != Path(__file__).name:
            found |= names_of(ast.parse(file.read_text()))
    return found


def names_of(tree):
    """Those of one file."""
    parts = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [node]
        for name in (getattr(target, "id", getattr(target, "name", "")) for target in targets):
            parts[name] = node
    waiting = [name for name, node in parts.items() if is_drawn(node)]
    found, seen = set(), set(waiting)
    while waiting:
        for node in ast.walk(parts[waiting.pop()]):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                found.add(node.func.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
            elif isinstance(node, ast.Attribute) and ast.unparse(node) == "standard.NAMES":
                found.update(standard.NAMES)
            elif isinstance(node, ast.Name) and node.id in parts and node.id not in seen:
                seen.add(node.id)
                waiting.append(node.id)
    return found


def is_drawn(node):
    """Whether it is a test that Hypothesis gives arguments, or one that has such a function."""
    if isinstance(node, ast.Assign):
        return ast.unparse(node.value).startswith("drawn_cases(")
    if not getattr(node, "name", "").startswith("test_"):
        return False
    functions = (one for one in ast.walk(node) if isinstance(one, ast.FunctionDef))
    decorators = (one for function in functions for one in function.decorator_list)
    return any(ast.unparse(one).startswith("given(") for one in decorators)


def functions():
    """The names that are to be drawn, of the namespace and of NumPy's functions that it answers."""
    own = {*distributed.__all__} - {*standard.TYPES, "fft", "linalg"}
    yield from (name for name in own if callable(getattr(distributed, name)))
    for name in ("fft", "linalg"):
        yield from (f"{name}.{one}" for one in getattr(distributed, name).__all__)
    for prefix, space in (("", np), ("fft.", np.fft), ("linalg.", np.linalg)):
        for name in dir(space):
            function = getattr(space, name)
            if callable(function) and protocols.ours(function):
                yield prefix + name


def test_every_function_is_drawn():
    found = drawn_names()
    needed = {*functions()} - NOT_OF_ELEMENTS
    assert {"einsum", "sin", "linalg.solve", "fft.dct", "to_jax", "save", "cumsum"} <= needed
    missing = {name for name in needed if not found.intersection((name, name.split(".")[-1]))}
    assert not missing, f"compare with NumPy, in a drawn test: {sorted(missing)}"


def test_a_function_that_is_added_is_missed(monkeypatch):
    monkeypatch.setattr(distributed, "quantile", lambda x: x, raising=False)
    monkeypatch.setattr(distributed, "__all__", [*distributed.__all__, "quantile"])
    with pytest.raises(AssertionError, match=r"drawn test: \['quantile'\]"):
        test_every_function_is_drawn()
