"""Threads with a context each compute at once, on memory and sockets that their ranks share."""

import threading
import traceback

import numpy as np
import pytest

from mortal import on_ranks
from shardmath import fft
from shardmath.collectives import all_gather, all_reduce
from shardmath.distribution import Replicated, Slab, redistribute
from shardmath.handles.allocation import allocate_symmetric_memory as allocate
from shardmath.handles.rendezvous import rendezvous
from shardmath.linalg.advanced import matmul

THREADS = 4


def whole(part):
    return redistribute(part, Slab.X, Replicated())


def product(own, x, context):
    y = matmul(own, x.T.copy(), distributions=[Slab.X, Replicated(), Slab.X])
    return whole(y), x @ x.T


def transform(own, x, context):
    return whole(fft.fft(own + 0j, distribution=Slab.X)), np.fft.fft2(x)


def gathered(own, x, context):
    return all_gather(own), x


def summed(own, x, context):
    return all_reduce(x), context.size * x


def peers_array(own, x, context):
    array = allocate((x.size,), np)
    array[:] = context.rank
    handle = rendezvous(array)
    handle.barrier()
    found = np.empty(x.size)
    handle.get(found, context.size - 1)
    handle.barrier()
    return found, np.full(x.size, context.size - 1.0)


CALLS = {"product": product, "transform": transform, "gathered": gathered, "summed": summed}
CALLS["peers_array"] = peers_array


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("calls", [["transform"], list(CALLS)], ids="+".join)
def test_threads_compute_at_once(calls, hosts, monkeypatch):
    monkeypatch.setenv("SHARDMATH_FAKE_HOSTS", str(hosts))

    def body(context):
        wrong = []

        def compute(number, own_context):
            random = np.random.default_rng(number)
            try:
                with own_context:
                    for round in range(4):
                        x = random.standard_normal((60 + 40 * round, 31 + number))
                        own = redistribute(x, Replicated(), Slab.X)
                        for name in calls:
                            found, expected = CALLS[name](own, x, own_context)
                            if not np.allclose(found, expected):
                                wrong.append((number, round, name))
            except BaseException:
                wrong.append((number, traceback.format_exc()))

        contexts = [context.split(0) for _ in range(THREADS)]
        threads = [threading.Thread(target=compute, args=each) for each in enumerate(contexts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return wrong

    assert on_ranks(3, body) == [[]] * 3
