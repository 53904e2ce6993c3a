"""What every test may use."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

import one_thread  # noqa: F401  (before NumPy)
import preloaded
from huge_pages import keep_memory, use_huge_pages
from loaded import find_libraries
from ranks import Pool, with_context
from shardmath.symmetric import waiting
from shardmath.symmetric.waiting import WaitPolicy

# The files that take most of a core, 8 s or more of a slow one, the longest first, so that what is
# left for the end is short.
LONG = [
    "program/test_gpu_products",
    "docs/test_pages",
    "reliability/test_interrupts",
    "matmul/test_float8_products",
    "reliability/test_faults",
    "distributed/test_decompositions",
    "autograd/test_gradients",
    "autograd/test_compiled_gradients",
    "program/test_calls_that_come_again",
    "collectives/test_reducing",
    "program/test_pretended_products",
    "program/test_gpu_transforms",
    "reliability/test_mismatches",
    "launchers/test_threads_counted",
    "hosts/test_far_memory",
    "hosts/test_far_bodies",
    "matmul/test_matmul_behaviour",
    "reliability/test_words",
    "collectives/test_moving",
    "reliability/test_given_up",
    "reliability/test_limits",
    "reliability/test_recovery",
    "program/test_new_results",
    "types/test_types",
    "launch/test_run",
    "matmul/test_matmul_epilogs",
    "test_layers",
    "matmul/test_matmul_any",
    "launch/test_spawn",
    "reliability/test_compiled_callers",
    "reliability/test_killed_ranks",
    "reliability/test_strangers",
    "symmetric/test_departures",
    "redistribution/test_redistribute_any",
    "launchers/test_one_program",
    "matmul/test_matmul_bad_input",
    "distributed/test_parts_of_other_libraries",
    "symmetric/test_operators_of_torch",
    "factorisations/test_factorisations_any",
    "reliability/test_races",
    "launch/test_trace",
    "local/test_epilog",
    "symmetric/test_handle",
    "symmetric/test_groups",
    "program/test_pretended_gpus",
]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where several processes share out the files, begin with those that take longest."""
    if hasattr(config, "workerinput"):
        folder = Path(__file__).parent
        places = {folder / f"{name}.py": place for place, name in enumerate(LONG)}
        assert all(path.exists() for path in places), "LONG names files that are not here"

        def place(item: pytest.Item) -> int:
            on_gpus = item.path.is_relative_to(folder / "cuda")  # all that one of them does
            return -1 if on_gpus else places.get(item.path, len(LONG))

        items.sort(key=place)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collect the tests, and no garbage: what is loaded and collected stays until the end.

    Tests make thousands of small objects, of which few are in cycles: garbage is looked for more
    rarely than Python does, here and in the ranks that are forked.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Now all is loaded that tests import."""
    share_cores(getattr(session.config, "workerinput", {}).get("workercount", 1))
    find_libraries()
    keep_memory()
    use_huge_pages()
    preloaded.python()


def share_cores(processes: int) -> None:
    """Let ranks wait as they do where so many times as many are on this host, and sleep soon: those
    of the tests that run beside these compute while these neither spin nor look again and again.
    """
    setattr(waiting, "_YIELDS", 10)  # noqa: B010
    alone = WaitPolicy.of

    def of(timeout: float, notice: float, local_ranks: int) -> WaitPolicy:
        return alone(timeout, notice, processes * local_ranks)

    setattr(WaitPolicy, "of", of)  # noqa: B010


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
