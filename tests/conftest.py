"""What every test may use."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import one_thread  # noqa: F401  (before NumPy)
from loaded import find_libraries
from ranks import Pool, with_context

# The files that take most of a core, 8 s or more of a slow one, the longest first, so that what is
# left for the end is short.
LONG = [
    "matmul/test_float8_products",
    "launchers/test_threads_counted",
    "matmul/test_matmul_behaviour",
    "program/test_gpu_transforms",
    "reliability/test_interrupts",
    "matmul/test_scaled_products",
    "docs/test_pages",
    "launchers/test_one_program",
    "matmul/test_matmul_any",
    "launchers/test_bodies_everywhere",
    "fft/test_fft_any",
    "collectives/test_reducing",
    "hosts/test_far_memory",
    "hosts/test_far_bodies",
    "autograd/test_gradients",
    "test_layers",
    "redistribution/test_redistribute_any",
    "matmul/test_matmul_epilogs",
    "reliability/test_mismatches",
    "group/test_slow_starts",
    "reliability/test_compiled_callers",
    "launch/test_run",
    "local/test_epilog",
    "program/test_products",
    "collectives/test_moving",
    "program/test_pretended_gpus",
    "matmul/test_matmul_bad_input",
    "reliability/test_words",
    "matmul/test_matmul_strategies",
    "group/test_launchers",
]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where several processes share out the files, begin with those that take longest."""
    if hasattr(config, "workerinput"):
        folder = Path(__file__).parent
        places = {folder / f"{name}.py": place for place, name in enumerate(LONG)}

        def place(item: pytest.Item) -> int:
            on_gpus = item.path.is_relative_to(folder / "cuda")  # all that one of them does
            return -1 if on_gpus else places.get(item.path, len(LONG))

        items.sort(key=place)


def pytest_collection_finish() -> None:
    """Now all is loaded that tests import."""
    find_libraries()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each process whole files, and one of them all of tests/cuda: GPUs are not shared.

    Of what `make torture` runs each test is by itself.
    """
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False  # by their numbers of tests

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if "cuda/" in file:
                return "cuda"
            return nodeid if config.option.markexpr == "torture" else file

    return ByFile(config, log)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Six ranks that stay: `pool.run(function, *args, ranks=k)`."""
    with Pool(6) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def contexts() -> Iterator[Pool]:
    """Six ranks that stay, each with a context: functions get it before their arguments."""
    with Pool(6, with_context) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def compiling_contexts() -> Iterator[Pool]:
    """As `contexts`, of two ranks forked when torch's compiler, which takes long, was loaded."""
    importlib.import_module("torch._dynamo.backends.debugging")
    with Pool(2, with_context) as ranks:
        yield ranks
