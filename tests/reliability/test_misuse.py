"""R7 and R9, short: each misuse and each shortage is a named exception, and no more than that."""

import copy
import gc
import os
import pickle
import re
import resource
import signal
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from mortal import Job, Raised, on_ranks, run_job
from shardmath import get_context
from shardmath.base import current, wire
from shardmath.collectives import all_reduce
from shardmath.context import startup
from shardmath.errors import HeapExhausted, InvalidDevice, UseAfterFree
from shardmath.handles.allocation import allocate_symmetric_memory as allocate
from shardmath.handles.allocation import free_symmetric_memory
from shardmath.handles.rendezvous import rendezvous

MIB = 1 << 20


def name_of(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return "nothing"


def test_use_after_free_and_double_free():
    def body(context):
        array = allocate((4, 4), np)
        handle = rendezvous(array)
        handle.barrier()
        if context.rank == 0:  # on one rank only
            free_symmetric_memory(array[1:])
            assert name_of(lambda: free_symmetric_memory(array)) == "UseAfterFree"
            assert name_of(lambda: handle.get_buffer(1, (1,), "f8")) == "UseAfterFree"
        else:
            assert handle.get_buffer(0, (4, 4), "f8").shape == (4, 4)
        context.barrier()
        heard = "UseAfterFree" if context.rank == 0 else "nothing"
        assert name_of(lambda: rendezvous(array)) == heard
        handle.barrier()
        return issubclass(UseAfterFree, RuntimeError)

    assert on_ranks(2, body) == [True, True]


@pytest.mark.parametrize("ending", ["finalize", "kill"])
def test_a_view_outlives_its_owner(ending):
    def body(group):
        context = startup.initialize("cpu", group)
        array = allocate(300000, np)
        array[:] = 7 + context.rank
        handle = rendezvous(array)
        view = handle.get_buffer(1, (300000,), "f8")
        handle.barrier()
        if context.rank == 1:
            if ending == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            startup.finalize()
            return "finalized"
        failure = name_of(context.barrier) if ending == "kill" else None
        startup.finalize()
        del array, handle
        assert view.min() == view.max() == 8.0
        view[:] = 1.0
        return (failure, float(view.sum()))

    with Job(2, body) as job:
        outcome, other = job.outcome(0), job.outcome(1)
    expected = "RankFailure" if ending == "kill" else None
    assert outcome == (expected, 300000.0)
    assert other == (None if ending == "kill" else "finalized")


@pytest.mark.parametrize("kind", [TypeError, ValueError, InvalidDevice])
@pytest.mark.parametrize(
    "device",
    ["gpu", "0", "cpu:1", "cuda:x", "cuda:", torch.device("mps"), -1, None, True, 1.5, [0]],
)
def test_what_no_device_is(device, kind):
    """Programs written for nvmath.distributed expect a TypeError, of a text too."""
    with pytest.raises(kind, match=f'name such as "cuda:1"; not {re.escape(repr(device))}'):
        startup.initialize(device)


@pytest.mark.parametrize(
    ("given", "rank", "meant"),
    [
        *[("cpu", "1", "cpu"), ("cpu:0", "1", "cpu"), (torch.device("cpu"), "1", "cpu")],
        *[("cuda", "1", 1), ("cuda", None, 0), (torch.device("cuda"), "2", 2)],
        *[("cuda:3", "1", 3), (torch.device("cuda", 3), "1", 3), (2, "1", 2)],
    ],
)
def test_names_of_devices(monkeypatch, given, rank, meant):
    """Rank 1 of 4, of which its host has as many as the launcher says."""
    for name, value in (("PMI_RANK", "1"), ("PMI_SIZE", "4"), ("MPI_LOCALRANKID", rank)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert startup._index_or_name(given) == meant


def test_calls_after_finalize_and_a_second_initialize():
    def body(context):
        part = context.subset((0, 1))
        array = allocate(3, np)
        handle = rendezvous(array, part)
        again = name_of(lambda: startup.initialize("cpu"))
        startup.finalize()
        startup.finalize()
        calls = [
            lambda: allocate(3, np),
            lambda: rendezvous(array),
            lambda: rendezvous(array, part),
            lambda: free_symmetric_memory(array),
            handle.barrier,
            lambda: handle.put_signal(0),
            context.barrier,
            part.barrier,
            lambda: context.split(0),
            lambda: context.subset((0, 1)),
        ]
        return [again, *map(name_of, calls)]

    assert on_ranks(2, body) == [["RuntimeError"] * 11] * 2


def test_contexts_are_left_in_the_reverse_of_the_order_they_were_entered_in():
    def body(context):
        part = context.split(0)
        with context:
            with part:
                wrong = [name_of(lambda: context.__exit__(None, None, None))]
            wrong.append(name_of(lambda: part.__exit__(None, None, None)))
            wrong.append(name_of(context.barrier))
        return wrong

    assert on_ranks(1, body) == [["RuntimeError", "RuntimeError", "nothing"]]


def test_an_interrupt_at_the_end_of_a_block_leaves_no_context_current():
    def body(context):
        part = context.split(0)

        def ring(_):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt), part, part:
            current.restore, plain = ring, current.restore
        current.restore = plain
        return get_context() is context

    assert on_ranks(1, body) == [True]


def test_handles_and_contexts_are_neither_copied_nor_pickled():
    def body(context):
        handle = rendezvous(allocate(3, np))
        calls = [copy.copy, copy.deepcopy, pickle.dumps]
        return [name_of(partial(call, each)) for call in calls for each in (handle, context)]

    assert on_ranks(1, body) == [["TypeError"] * 6]


def test_two_threads_in_one_context_are_told_apart_or_refused():
    def body(context):
        parts = [context.split(0) for _ in range(2)]
        said = []

        def sums(part):
            for round in range(200):
                try:
                    value = all_reduce(np.full(8, round), context=part)
                    assert (value == round * context.size).all()
                except RuntimeError as error:
                    said.append(str(error))
                    return

        def both(*chosen):
            threads = [threading.Thread(target=sums, args=(part,)) for part in chosen]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        both(*parts)
        assert said == []
        entered, leave = threading.Event(), threading.Event()

        def hold():
            with parts[0].executing("a long call"):
                entered.set()
                leave.wait()

        holder = threading.Thread(target=hold)
        holder.start()
        entered.wait()
        names = [
            name_of(parts[0].barrier),
            name_of(lambda: all_reduce(np.ones(2), context=parts[0])),
        ]
        sums(parts[0])
        leave.set()
        holder.join()
        assert "another thread is in" in said[0] and "split()" in said[0]
        return [*names, name_of(parts[0].barrier), name_of(parts[1].barrier)]

    expected = ["RuntimeError", "RuntimeError", "RankFailure", "nothing"]
    assert on_ranks(2, body) == [expected] * 2


def test_a_forked_child_cannot_use_the_parents_context_and_does_it_no_harm():
    def body(context):
        array = allocate(3, np)
        array[:] = 1
        handle = rendezvous(array)
        handle.barrier()
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            calls = [
                lambda: allocate(3, np),
                lambda: rendezvous(array),
                lambda: free_symmetric_memory(array),
                handle.barrier,
                lambda: handle.wait_signal(0),
                context.barrier,
                startup.finalize,
            ]
            with pytest.raises(RuntimeError) as caught:
                all_reduce(3)
            os.write(writing, wire.encode([str(caught.value), *map(name_of, calls)]))
            os._exit(0)
        os.close(writing)
        said, *names = wire.decode(os.read(reading, 1 << 16))
        os.waitpid(child, 0)
        handle.barrier()
        context.barrier()
        assert "forked off a rank" in said
        return names

    assert on_ranks(2, body) == [["RuntimeError"] * 6 + ["nothing"]] * 2


def forget_all(kept):
    kept.clear()
    gc.collect()


def close_all(kept):
    for context in kept[:2]:
        context.close()
    startup.finalize()


def start_anew(kept):
    assert startup.initialize("cpu").size == 1 and all_reduce(3) == 3
    startup.finalize()


@pytest.mark.parametrize("hosts", ["1", "2"])
@pytest.mark.parametrize("doing", [forget_all, close_all, start_anew])
def test_what_a_forked_child_does_with_its_copies_is_nobodys_business(doing, hosts, monkeypatch):
    monkeypatch.setenv("SHARDMATH_FAKE_HOSTS", hosts)

    def body(group):
        kept = [startup.initialize("cpu", group)]
        kept.append(kept[0].split(0))
        array = allocate(1000, np)
        array[:] = kept[0].rank
        kept += [array, rendezvous(array)]
        kept[3].barrier()
        child = os.fork()
        if child == 0:
            del array
            try:
                doing(kept)
            except BaseException:
                os._exit(1)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        found, other = np.empty(1000), 1 - kept[0].rank
        kept[3].get(found, other)
        kept[3].barrier()
        sums = [int(all_reduce(1, context=context)) for context in kept[:2]]
        return status, sums, bool((found == other).all())

    assert run_job(2, body) == [(0, [2, 2], True)] * 2


def test_an_address_space_limit_is_heap_exhausted_on_all_ranks():
    def body(context):
        before = context.heap.used
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        used = pages * resource.getpagesize()
        if context.rank == 1:
            resource.setrlimit(resource.RLIMIT_AS, (used + 40 * MIB, resource.RLIM_INFINITY))
        try:
            allocate(100 * MIB, np, dtype="int8")
            raise AssertionError("it has 40 MiB")
        except HeapExhausted as error:
            text, need = str(error), error.need
        assert text.startswith("rank 1: ") and need >= 100 * MIB
        assert context.heap.used == before
        small = allocate(10 * MIB, np, dtype="int8")  # a smaller segment still fits
        small[:] = 1
        # Rank 0's segment is larger than what rank 1 can map: known to both at the rendezvous.
        nbytes = 90 * MIB if context.rank == 0 else 1
        large = allocate(nbytes, np, dtype="int8", skip_symmetric_check=True)
        used = context.heap.used
        assert name_of(lambda: rendezvous(large)) == "HeapExhausted"
        assert context.heap.used == used
        context.barrier()
        return int(small.sum())

    assert on_ranks(2, body) == [10 * MIB] * 2


def test_more_than_the_machine_has_is_refused_at_once():
    def body(context):
        with pytest.raises(HeapExhausted) as caught:
            allocate(1 << 40, np, dtype="int8")
        assert caught.value.need >= 1 << 40 > caught.value.have > 0
        assert context.heap.used == 0 and len(context.heap._segments) == 0
        return len(allocate(MIB, np))

    assert on_ranks(2, body) == [MIB, MIB]


def test_mortal_ranks_report_what_they_raise():
    """The helper itself: a test that cannot see a failure would prove nothing."""

    def body(group):
        if group.rank:
            raise ValueError("no")
        return [1, 2]

    with Job(2, body) as job:
        assert job.outcome(0) == [1, 2]
        outcome = job.outcome(1)
    assert isinstance(outcome, Raised) and (outcome.kind, outcome.text) == ("ValueError", "no")
