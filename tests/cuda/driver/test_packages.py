"""Where packages for GPUs are missing, one line names them all. Needs no GPU."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from pathlib import Path

import pytest

from shardmath.cuda import packages
from shardmath.errors import BackendUnavailable
from shardmath.local.gpu import cublaslt

PROJECT = Path(__file__).parents[3] / "pyproject.toml"
# Who asks for which module, which is not there.
DOORS = {
    "the driver": ("shardmath.cuda.driver", "bindings", "cuda.bindings", "cu13"),
    "the compiler": ("shardmath.cuda.compile", "_nvrtc", "cuda.bindings", "cu13"),
    "products": ("shardmath.local.gpu.blaslt", "bindings", "nvmath.bindings", "cu13"),
    "factorisations": ("shardmath.local.gpu.lapack", "bindings", "nvmath.bindings", "cu13"),
    "transforms": ("shardmath.local.gpu.fft", "_cufft", "nvmath.bindings", "cu13"),
    "NVSHMEM": ("shardmath.transport.gpus.nvshmem", "_bindings", "nvshmem", "cu13,hosts-cu13"),
}


@pytest.mark.parametrize("extra", packages.EXTRAS)
def test_the_packages_are_those_of_the_extra(extra):
    wanted = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"][extra]
    assert {re.split("[<>=]", each)[0] for each in wanted} == set(packages.EXTRAS[extra])


@pytest.mark.parametrize("name", DOORS)
def test_all_that_is_missing_is_named_in_one_line(name, monkeypatch):
    module, function, missing, extras = DOORS[name]
    monkeypatch.setattr(packages, "_is_installed", lambda each: each == "nvidia-cublas")
    monkeypatch.setattr(cublaslt, "_NAMES", ("libcublasLt.so.of.none",))
    cublaslt._library.cache_clear()
    for loaded in [each for each in sys.modules if each.startswith(missing)]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, missing, None)
    door = getattr(importlib.import_module(module), function)
    with pytest.raises(BackendUnavailable) as caught:
        getattr(door, "__wrapped__", door)()
    (line,) = str(caught.value).splitlines()
    assert f'pip install "shardmath[{extras}]"' in line and "pip" not in line.partition("pip")[2]
    assert "cuda-bindings, nvidia-cuda-nvrtc, nvidia-cufft, nvidia-cusolver" in line
    assert "nvidia-cublas" not in line


def test_a_library_that_does_not_load_is_named(monkeypatch):
    monkeypatch.setattr(packages, "_is_installed", lambda _: True)
    error = packages.unavailable("transforms need cuFFT", RuntimeError("no libcufft.so\nin any"))
    assert "transforms need cuFFT (no libcufft.so): pip install" in str(error)
