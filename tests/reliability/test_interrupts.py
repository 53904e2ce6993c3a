"""An exception that leaves a call at any place gives no wrong number, then or later.

A place is a bytecode with its chain of callers. `make test` takes a sample of the places, `make
torture` all of them.
"""

import numpy as np
import pytest
from interrupts import CALLS, INTERRUPTED, Alarm, Interrupted, Part, Trials, run_trials

import started
from mortal import Job, Raised, run_job
from ranks import Pool
from shardmath.call.driver import Driver
from shardmath.collectives import all_reduce
from shardmath.context import startup
from shardmath.distribution import Slab, redistribute
from shardmath.errors import RankFailure
from shardmath.symmetric.board import Board
from shardmath.symmetric.rows import Rows

RANKS = 3
PARTS = 32  # of all of them
VARIABLES = {"SHARDMATH_TIMEOUT": "100", "SHARDMATH_NOTICE": "100"}
IN_PYTHON = VARIABLES | {"SHARDMATH_COMPILED": "0"}
WAYS = {"compiled": VARIABLES, "in Python": IN_PYTHON}  # the first, where a compiler was
# Places of each step that are to strike. Most code in Python is executed in both ways.
SAMPLES = {"compiled": 2, "in Python": 1}


def try_all(name, chosen, way):
    """What the rank that is interrupted returns of its trials, all of which are acceptable."""
    outcomes = run_job(
        RANKS, lambda group: run_trials(group, name, chosen), WAYS[way], timeout=3500
    )
    require_acceptable(outcomes)
    return outcomes[INTERRUPTED]


def require_acceptable(outcomes):
    assert not any(isinstance(each, Raised) or each is None for each in outcomes), outcomes
    assert not any(failures for _, _, failures, _ in outcomes), [each[2] for each in outcomes]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CALLS)
def test_no_interrupt_gives_a_wrong_number(name, way):
    _, struck, _, _ = try_all(name, SAMPLES[way], way)
    # Of first calls as many strike as are to; the places of later, compiled ones may all be such
    # as a rank comes to only when a peer is late.
    assert struck >= SAMPLES[way]


def test_the_first_call_in_a_context_has_more_places_than_a_later_one():
    """Whatever the Python is: some trace code by bytecodes only from its second call on."""

    def body(group):
        trials = Trials(group, "all_reduce")
        counts = [len(trials.places(0, warm=warm)) for warm in (0, 2)]
        startup.finalize()
        return counts

    outcomes = run_job(RANKS, body, IN_PYTHON, timeout=60)
    first, later = outcomes[INTERRUPTED]
    assert first > later > 1000


@pytest.mark.torture
@pytest.mark.parametrize("number", range(PARTS), ids="part{:02}".format)
def test_no_interrupt_at_any_place_gives_a_wrong_number(number):
    """What one call, or one way, has in common with another is tried once."""
    part = Part(number, PARTS)
    made_in_all, struck_in_all = 0, 0
    for way in WAYS:
        for name in CALLS:
            made, struck, _, seen = try_all(name, part, way)
            part.seen.update(seen)
            made_in_all += made
            struck_in_all += struck
    print(f"{struck_in_all} of {made_in_all} trials struck")
    assert struck_in_all > 0.9 * made_in_all


@pytest.fixture(scope="module", params=["shardmath", "torchrun", "mpirun"])
def launched(request):
    if started.missing(request.param):
        pytest.skip(started.missing(request.param))
    with Pool(RANKS, launcher=request.param) as pool:
        yield pool


@pytest.mark.parametrize("name", ["all_reduce", "redistribute"])
def test_no_launcher_changes_that(launched, name):
    outcomes = launched.run(run_trials, name, 1, timeout=100)
    require_acceptable(outcomes)
    assert outcomes[INTERRUPTED][0] > 0


PLACES = {
    "between the number of a round and its word": (Rows, "write", 6, 3),
    "between the two exchanges of a new plan": (Board, "exchange", 0, 5),
    "before anything is published": (Board, "exchange_raw", 2, 3),
}


@pytest.mark.parametrize("place", PLACES)
def test_an_interrupted_call_fails_its_context_at_once(place):
    """The others name the rank that was interrupted, the exception and its line."""
    owner, verb, before, count = PLACES[place]

    def body(group):
        context = startup.initialize("cpu", group)
        for number in range(before):
            assert all_reduce(np.full(count, number))[0] == 3 * number
        if context.rank == 1:
            plain = getattr(owner, verb)

            def ring(*_):
                setattr(owner, verb, plain)
                raise Interrupted("by a handler")

            setattr(owner, verb, ring)
        found = []
        for number in range(3):
            try:
                found.append(float(all_reduce(np.full(count, 10.0**number))[0]))
            except (Interrupted, RankFailure) as error:
                found.append(f"{type(error).__name__}: {error}")
        return found

    with Job(RANKS, body, IN_PYTHON) as job:  # where a round is a step of Python's after another
        outcomes = [job.outcome(rank, 60) for rank in range(RANKS)]
    assert outcomes[1][0] == "Interrupted: by a handler"
    for rank in (0, 2):
        assert outcomes[rank][0].startswith("RankFailure"), outcomes
        for words in ("rank 1", "test_interrupts.py:", "Interrupted: by a handler"):
            assert words in outcomes[rank][0]
    for found in outcomes:
        assert all(each.startswith("RankFailure") and "recover()" in each for each in found[1:])


def test_compiled_code_goes_on_after_no_exception():
    """Not even after one from what it only looks at: here, what the rank says that it is doing."""

    def body(group):
        context = startup.initialize("cpu", group)
        part = np.full((2, 6), 1.0)

        def total():
            return float(redistribute(part, Slab.X, Slab.Y).sum())

        outcomes = [total() for _ in range(6)]
        if context.rank == 1:
            plain = Board.operation

            def ring(_):
                Board.operation = plain
                raise Interrupted("by a handler")

            Board.operation = property(ring, plain.fset)
        for _ in range(2):
            try:
                outcomes.append(total())
            except (Interrupted, RankFailure) as error:
                outcomes.append(f"{type(error).__name__}: {error}")
        return outcomes, context.rank != 1 or Board.operation is plain

    outcomes, looked = zip(*run_job(RANKS, body, VARIABLES, timeout=60), strict=True)
    for rank, found in enumerate(outcomes):
        assert found[:6] == [12.0] * 6
        if not looked[1]:  # there was no compiler
            assert found[6:] == [12.0] * 2
        elif rank == 1:
            assert found[6] == "Interrupted: by a handler"
            assert found[7].startswith("RankFailure")
        else:
            assert all("rank 1" in text and "by a handler" in text for text in found[6:])


@pytest.mark.parametrize("way", WAYS)
def test_an_exception_where_a_peer_calls_otherwise_is_heard_by_all(way):
    """Rank 0 gives an array for the result, after calls without; an exception strikes in rank 1."""

    def body(group):
        context = startup.initialize("cpu", group)
        x, given = np.ones(3), np.zeros(3) if context.rank == 0 else None
        for _ in range(4):
            assert all_reduce(x)[0] == RANKS
        if context.rank == 1:
            plain = Driver.perform

            def ring(*_):
                Driver.perform = plain
                raise Interrupted("by a handler")

            Driver.perform = ring
        found = []
        for out in (given, None):
            try:
                found.append(float(all_reduce(x, out=out).sum()))
            except (Interrupted, RankFailure) as error:
                found.append(f"{type(error).__name__}: {error}")
        return found

    outcomes = run_job(RANKS, body, WAYS[way], timeout=60)
    assert outcomes[1][0] == "Interrupted: by a handler"
    assert all("by a handler" in found[1] and "RankFailure" in found[1] for found in outcomes)


def test_a_rank_that_refuses_a_split_while_peers_await_its_memory():
    """Rank 2, the first of the new order, meets an exception before it has sent anything."""

    def body(group):
        context = startup.initialize("cpu", group)
        if context.rank == 2:
            plain = context._runtime.board

            def ring(*_):
                raise Alarm("rang")

            context._runtime.board = ring
        try:
            context.split(0, key=-context.rank)
        except RuntimeError as error:
            found = str(error)
        if context.rank == 2:
            context._runtime.board = plain
        return found, context.split(0, key=-context.rank).rank, float(all_reduce(1))

    outcomes = run_job(RANKS, body, VARIABLES, timeout=60)
    assert [list(each[1:]) for each in outcomes] == [[2, 3.0], [1, 3.0], [0, 3.0]]
    assert all("rank 2" in each[0] for each in outcomes), outcomes


def test_a_lock_that_an_exception_left_held_stops_no_later_call():
    """As one does that strikes after the last statement of a `with` block, before its release."""

    def body(group):
        context = startup.initialize("cpu", group)
        transport = context._runtime.transport
        for lock in (transport._introducing, *transport._mesh._reading):
            lock.acquire()
        part = np.full((2, 12), float(context.rank))
        return redistribute(part, Slab.X, Slab.Y)[:, 0].tolist()

    with Job(RANKS, body, VARIABLES) as job:
        assert [job.outcome(rank, 60) for rank in range(RANKS)] == [[0, 0, 1, 1, 2, 2]] * RANKS
