"""An array library is one file: whatever takes arrays takes its arrays, and returns them."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import numpy as np
import pytest

import shardmath
from counted import calls_before
from mortal import run_job
from shardmath.arrays import detect, libraries, library_named, library_of
from shardmath.base.compiled import extension
from shardmath.collectives import all_gather, all_reduce
from shardmath.context import startup
from shardmath.distribution import Slab, redistribute
from shardmath.fft import fft, rfft
from shardmath.linalg.advanced import matmul

sys.path.append(str(Path(__file__).parent.parent / "program"))

from pretended import pretended_gpu

NUMBERS = np.arange(48.0).reshape(6, 8)
FOUND = str(Path(__file__).parent / "found")


@contextmanager
def one_more():
    """One more folder of libraries, for this process and the ranks that it forks."""
    caches = libraries, detect._library_of_type
    with patch.object(detect.package, "__path__", [*detect.package.__path__, FOUND]):
        for cache in caches:
            cache.cache_clear()
        yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture(autouse=True)
def _found():
    with one_more():
        yield


def tray_of(part, device="cpu", order="C"):
    tray = library_named("tray").empty(part.shape, part.dtype, order, device)
    tray.elements[...] = part
    return tray


def equal(tray, wanted, device="cpu"):
    assert (library_of(tray).name, tray.device) == ("tray", device)
    np.testing.assert_allclose(tray.elements, wanted, atol=1e-12)
    return True


def halves(whole, rank):
    """This rank's rows and columns of what two ranks have."""
    middle = [extent // 2 for extent in whole.shape]
    rows, columns = whole[: middle[0]], whole[:, : middle[1]]
    if rank:
        rows, columns = whole[middle[0] :], whole[:, middle[1] :]
    return rows, columns


def on_cores(group):
    """Whether calls are right, the first time and when they come again: then no public function is
    entered, if the library says how compiled code reads its arrays.
    """
    with startup.new_context("cpu", group) as context:
        (rows, columns), done, entered = halves(NUMBERS, context.rank), [], set()

        def check(call, wanted):
            results = [call() for _ in range(4)]
            entered.update(calls_before("", call))
            done.append(all(equal(each, wanted) for each in results))

        for order in "CF":
            x = tray_of(rows, order=order)
            check(partial(redistribute, x, Slab.X, Slab.Y), columns)
            transform = halves(np.fft.fft2(NUMBERS), context.rank)[0]
            check(partial(fft, tray_of(rows + 0j, order=order), distribution=Slab.X), transform)
            product = halves(NUMBERS @ NUMBERS.T, context.rank)[0]
            y = tray_of(halves(NUMBERS.T, context.rank)[1])
            check(partial(matmul, x, y, distributions=[Slab.X, Slab.Y, Slab.X]), product)
        check(partial(all_reduce, tray_of(NUMBERS)), 2 * NUMBERS)
        check(partial(all_gather, tray_of(rows)), NUMBERS)
        shared = shardmath.allocate_symmetric_memory(rows.shape, ModuleType("tray"), dtype="int32")
        shared.elements[...] = rows
        check(partial(redistribute, shared, Slab.X, Slab.Y), columns)
        read = extension("shardmath.call._direct") is not None and not context.multi_host
        read = read and library_named("tray").attributes() is not None
        assert read == entered.isdisjoint({"redistribute", "fft", "matmul", "all_reduce"})
        return done


def by_verbs(group):
    """As `on_cores`, for a library that compiled code cannot read."""
    with patch.object(type(library_named("tray")), "attributes", lambda self: None):
        return on_cores(group)


def on_gpus(group):
    with startup.new_context("cpu", group) as context:
        (rows, columns), done = halves(NUMBERS, context.rank), []
        context.barrier()
        with pretended_gpu(context), patch.object(type(library_named("tray")), "home", "cuda:0"):
            for order in "CF":
                x = tray_of(rows, "cuda:0", order)
                done.append(equal(redistribute(x, Slab.X, Slab.Y), columns, "cuda:0"))
                transform = halves(np.fft.rfft2(NUMBERS), context.rank)[0]
                done.append(equal(rfft(x, distribution=Slab.X), transform, "cuda:0"))
            context.board.barrier("done")
        return done


@pytest.mark.parametrize(("body", "calls"), [(on_cores, 9), (by_verbs, 9), (on_gpus, 4)])
@pytest.mark.parametrize("hosts", ["1", "2"])
def test_a_file_is_an_array_library(body, calls, hosts):
    assert run_job(2, body, {"SHARDMATH_FAKE_HOSTS": hosts}) == [[True] * calls] * 2


def test_numpy_comes_first_and_the_others_follow_by_name():
    assert list(libraries()) == ["numpy", "cupy", "torch", "tray"]
