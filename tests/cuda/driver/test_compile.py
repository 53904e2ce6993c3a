"""The cache of compiled kernels. Needs NVRTC, but no GPU.

Everything runs in a rank of its own: NVRTC looks at the driver, after which no process forks ranks.
"""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

import pytest

from shardmath.cuda import compile as compiling
from shardmath.errors import CudaError

DEFINES = ["SHARDMATH_RANKS=2"]


def made(folder, defines=DEFINES, arch="sm_90"):
    with patch.dict(os.environ, SHARDMATH_CACHE=str(folder)):
        return compiling.compiled("signals", defines, arch)


def entries(folder):
    return len(list(Path(folder).iterdir()))


def check_once(_, folder):
    code = made(folder)
    with patch.object(compiling, "_compile", side_effect=AssertionError("it was there already")):
        again = made(folder)
    return again == code, entries(folder)


def test_a_kernel_is_compiled_once(compiler, tmp_path):
    assert compiler.run(check_once, str(tmp_path / "cache")) == [(True, 1)]


def check_key(_, folder, change):
    cache, kernels = Path(folder, "cache"), Path(folder, "kernels")
    made(cache)
    kernels.mkdir()
    for path in compiling.KERNELS.iterdir():
        kernels.joinpath(path.name).write_bytes(path.read_bytes())
    if change == "defines":
        made(cache, ["SHARDMATH_RANKS=3"])
    elif change == "arch":
        made(cache, arch="sm_80")
    elif change == "compiler":
        with patch.object(compiling, "_compiler_version", return_value="nvrtc 99"):
            made(cache)
    else:
        with kernels.joinpath(change).open("a") as file:
            file.write("// changed\n")
        with patch.object(compiling, "KERNELS", kernels):
            compiling._headers.cache_clear()
            made(cache)
        compiling._headers.cache_clear()
    return entries(cache)


@pytest.mark.parametrize("change", ["defines", "arch", "compiler", "signals.cu", "elements.cuh"])
def test_whatever_a_kernel_is_made_from_is_in_its_name(compiler, tmp_path, change):
    assert compiler.run(check_key, str(tmp_path), change) == [2]


def check_race(_, folder):
    make = compiling._compile

    def another_is_faster(name, source, flags):
        Path(folder).mkdir(mode=0o700)
        made = Path(folder, f"{name}-{compiling._key(source, flags)}.cubin")
        made.touch(mode=0o600)
        made.write_bytes(b"the winner's")
        return make(name, source, flags)

    with patch.object(compiling, "_compile", another_is_faster):
        return made(folder), entries(folder)


def test_the_first_of_several_makers_is_believed(compiler, tmp_path):
    assert compiler.run(check_race, str(tmp_path / "cache")) == [(b"the winner's", 1)]


def check_without_cache(_, folder):
    os.chdir(folder)
    return bool(made(os.devnull)), bool(made("-")), entries(folder)


def test_a_cache_that_cannot_be_written_costs_only_time(compiler, tmp_path):
    assert compiler.run(check_without_cache, str(tmp_path)) == [(True, True, 0)]


def check_mistake(_, folder):
    try:
        made(folder, ["SHARDMATH_RANKS=nonsense"])
    except CudaError as error:
        return str(error), Path(folder).exists()
    return None


def test_a_mistake_is_told_in_the_compilers_words(compiler, tmp_path):
    ((text, unrounded),) = compiler.run(check_mistake, str(tmp_path / "cache"))
    assert "compiling signals.cu failed:\n" in text and "nonsense" in text
    assert not unrounded
