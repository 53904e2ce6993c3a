"""What GPUs of a context may write that was given up is used again after `recover`: pretended GPUs.

Each rank's GPU is a word that says whether it has done what it was asked to.
"""

import gc
import weakref
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
from given_up import NBYTES, ROUNDS, give_up, use_below, used_in_each

from heap_use import settled_use
from mortal import run_job
from shardmath.collectives.ahead import Ahead
from shardmath.context import startup
from shardmath.context.runtime import Runtime
from shardmath.symmetric import departures, structs
from shardmath.symmetric import team as team_module
from shardmath.symmetric.departures import Departures
from shardmath.symmetric.heap import Heap
from shardmath.symmetric.team import Team

LATE = 2  # the rank whose GPU is
VARIABLES = {"SHARDMATH_TIMEOUT": "60", "SHARDMATH_NOTICE": "100"}


class PretendedGPU:
    """Ends at once what it is asked to do, or when the test says so."""

    def __init__(self):
        self.late = False
        self.asked = []  # words to be set when that is done

    def synchronize(self):
        pass

    def team(self, board, ranks):
        """As `Runtime.team`."""
        words = np.zeros(board.size + 1, np.uint64)
        made = object.__new__(Team)
        made.device, made._board, made.broken, made._expired = self, board, "", False
        made.rank, made.size, made.meets = board.rank, board.size, False
        made._notes = np.zeros(structs.gone_place(board.size) // 8, np.uint64)
        made._departures = Departures(board, words, lambda: self.mark(words))
        departures.watch(made._departures)
        return made

    def mark(self, words):
        self.asked.append(words)
        if not self.late:
            self.end()
        return True

    def end(self):
        self.late = False
        for words in self.asked:
            words[-1] = 1
        self.asked.clear()


def ranks_with_gpus(size, body):
    """`body(context, gpu)` on new ranks: what they return."""

    def on_rank(group):
        gpu = PretendedGPU()
        with (
            patch.object(Runtime, "team", gpu.team),
            patch.object(team_module, "_LAST_KERNELS", 0.2),
        ):
            context = startup.initialize("cpu", group)
            found = body(context, gpu)
            startup.finalize()
        return found

    return run_job(size, on_rank, VARIABLES, timeout=60)


def test_recover_gives_back_what_kernels_could_write():
    def body(context, _):
        return used_in_each(context)[1]

    assert ranks_with_gpus(3, body) == [[0] * (ROUNDS + 1)] * 3


def test_memory_comes_back_when_the_last_gpu_has_ended():
    def body(context, gpu):
        told = context.allocate_shared(NBYTES)
        place = told.block.address
        context.keep_for_kernels(context.heap.allocate(NBYTES))
        give_up(context)
        gpu.late = context.rank == LATE
        del told
        context = context.recover()
        used = [settled_use(context)]
        again = context.heap.allocate(NBYTES)
        assert (again.block.address == place) is (context.rank == LATE)  # whom nobody else delays
        del again
        context.barrier()
        gpu.end()
        used.append(use_below(context, NBYTES))
        return used

    kept = 2 * NBYTES
    assert ranks_with_gpus(LATE + 1, body) == [[kept, 0], [kept, 0], [0, 0]]


def test_a_group_that_is_closed_gives_back_what_was_kept_for_its_kernels():
    def body(context, _):
        used = []
        for ending in ("close", "drop"):
            part = context.split(0)
            part.keep_for_kernels(context.heap.allocate(NBYTES))
            if ending == "close":
                part.close()
            del part
            departures._settle()
            used.append(use_below(context, NBYTES))
        return used

    assert ranks_with_gpus(2, body) == [[0, 0]] * 2


def test_what_is_kept_ends_with_the_job():
    kept = SimpleNamespace()

    def body(context, _):
        buffer = context.heap.allocate(NBYTES)
        context.keep_for_kernels(buffer)
        kept.buffer, kept.context = weakref.ref(buffer), context
        del buffer
        startup.finalize()
        assert isinstance(kept.context.heap, Heap)
        return kept.buffer() is None

    assert ranks_with_gpus(2, body) == [True] * 2


def test_a_group_that_is_dropped_is_collected_whatever_its_peers_know_of_it():
    """Calls with which ranks run ahead have plans that refer to the context."""

    def body(context, _):
        part = context.split(0)
        ahead, form = Ahead.of(part), SimpleNamespace(counted=False)
        ahead.keep("all_reduce", form, (1,), None, None, partial(print, part))
        living = weakref.ref(part)
        del part, ahead
        gc.collect()
        return living() is None

    assert ranks_with_gpus(2, body) == [True] * 2
