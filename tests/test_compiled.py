"""Libraries that were built from C, and none."""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from types import SimpleNamespace

import pytest

import built
from shardmath.base import compiled
from shardmath.base.compiled import Built, extension, library_beside
from shardmath.local import compiled_sum
from shardmath.tools import doctor


def test_beside_a_module(tmp_path, monkeypatch):
    monkeypatch.delenv("SHARDMATH_COMPILED", raising=False)
    module = str(tmp_path / "module.py")
    assert library_beside(module, "_made") is None
    built.built_from_c(compiled_sum, "sum.c", tmp_path)
    (tmp_path / "made.so").rename(tmp_path / f"_made{EXTENSION_SUFFIXES[0]}")
    found = library_beside(module, "_made")
    assert found is not None
    assert found.shardmath_sum_int32 is not None


def test_parts_that_are_for_other_pythons(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "__file__", str(tmp_path / "base" / "compiled.py"))
    (tmp_path / "local").mkdir()
    for tag in ("313t", "313", "39"):
        (tmp_path / "local" / f"_sum.cpython-{tag}-some-system.so").touch()
    monkeypatch.delenv("SHARDMATH_COMPILED", raising=False)
    assert not compiled.is_built("shardmath.local._sum")
    assert compiled.other_pythons("shardmath.local._sum") == ["3.9", "3.13", "3.13t"]
    parts = doctor.show_config()["compiled"]
    assert "are for Python 3.9, 3.13, 3.13t, and" in parts["shardmath.local._sum"]["reason"]
    assert "a C compiler" in parts["shardmath.base._record"]["reason"]


def test_what_is_no_library_is_not_loaded(tmp_path):
    (tmp_path / f"_no{EXTENSION_SUFFIXES[0]}").write_bytes(b"no library")
    assert library_beside(str(tmp_path / "module.py"), "_no") is None


@pytest.mark.parametrize(("given", "used"), [(2, True), (1, False), (3, False), (None, False)])
def test_a_module_of_older_sources_is_not_used(monkeypatch, given, used):
    module = SimpleNamespace() if given is None else SimpleNamespace(INTERFACE=given)
    built = {"found": Built("this test", 2), "another": Built("this test")}
    monkeypatch.setattr(compiled, "BUILT", built)
    monkeypatch.setattr(compiled, "import_module", lambda _: module)
    monkeypatch.delenv("SHARDMATH_COMPILED", raising=False)
    assert extension("found") is (module if used else None)
    assert extension("another") is (module if given is None else None)
