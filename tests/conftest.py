"""What every test may use."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest

import one_thread  # noqa: F401  (before NumPy)
from ranks import Pool, with_context


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each process whole files, and one of them all of tests/cuda: GPUs are not shared."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "cuda" if "cuda/" in file else file

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
