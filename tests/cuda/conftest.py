"""Ranks with a GPU each. The parent never touches CUDA: no fork survives that."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from visible import RANKS, gpu_of

from ranks import Pool
from shardmath.base import config
from shardmath.context.startup import new_context
from shardmath.cuda import compile as compiling
from shardmath.errors import BackendUnavailable

# Bodies of the host's tests, and what files of one folder take from those of another.
HERE = Path(__file__).parent
HOST = (
    "arrays",
    "autograd",
    "collectives",
    "distributed",
    "factorisations",
    "fft",
    "launch",
    "local",
    "matmul",
    "program",
    "redistribution",
    "reliability",
    "symmetric",
)
sys.path += [str(folder) for folder in HERE.iterdir() if folder.is_dir()]
sys.path += [str(HERE.parent / name) for name in HOST]

SIZES = [size for size in (1, 2, 3, 4, 8) if size <= max(RANKS, 1)]


def make_gpu_context(group):
    return new_context(gpu_of(group.rank), group)


def pytest_collection_modifyitems(items):
    if not RANKS:
        for item in items:
            if "gpus" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.skip(reason="this machine has no GPU"))


def pytest_generate_tests(metafunc):
    if "size" in metafunc.fixturenames and "gpus" in metafunc.fixturenames:
        metafunc.parametrize("size", SIZES)


@pytest.fixture(scope="session")
def gpus() -> Iterator[Pool]:
    """`visible.RANKS` ranks: `gpus.run(function, *args, ranks=k)` calls function(context, ...)."""
    with Pool(RANKS, make_gpu_context) as ranks:
        yield ranks


def why_not(_):
    try:
        compiling._nvrtc()
    except BackendUnavailable as missing:
        return str(missing)
    return ""


@pytest.fixture(scope="session")
def compiler() -> Iterator[Pool]:
    """A rank that can compile kernels: loading the compiler is nothing for the parent."""
    with Pool(1) as ranks:
        (reason,) = ranks.run(why_not)
        if reason:
            pytest.skip(reason)
        yield ranks


def make_mapped(group):
    config.export({"SHARDMATH_FAKE_HOSTS": "2", "SHARDMATH_TRANSPORT": "cuda"})
    return new_context(gpu_of(group.rank), group)


def make_nvshmem(group):
    heap = str(1 << 30)
    config.export({"SHARDMATH_FAKE_HOSTS": "2", "SHARDMATH_TRANSPORT": "nvshmem"})
    config.export({"SHARDMATH_GPU_HEAP_BYTES": heap})
    return new_context(gpu_of(group.rank), group)


@pytest.fixture(scope="session", params=[make_mapped, make_nvshmem], ids=["cuda", "nvshmem"])
def far_gpus(request) -> Iterator[Pool]:
    """As many ranks as GPUs, half of them on each host."""
    if RANKS < 2:
        pytest.skip("two hosts take two GPUs")
    with Pool(RANKS, request.param) as ranks:
        yield ranks
