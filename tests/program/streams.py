"""Steps on streams of all ranks, in one process: in any order that their events allow.

A rank's streams run as they like: which of the steps that may come next is next, a random number
says. So a step that awaits nothing, or a synchronisation that is missing, gives another result for
another number.
"""

from __future__ import annotations

from itertools import pairwise

from shardmath.program.steps import Await, On, Record, Synchronise

__all__ = ["schedule"]


def schedule(ranks, chance, performers):
    """Perform all ranks' `steps`, in an order in which streams might.

    `performers` are called with a step and its rank, by type.
    """
    every = [streams_of(rank.steps) for rank in ranks]
    counts = {sum(isinstance(step, Synchronise) for step, _ in steps) for steps, _ in every}
    assert len(counts) <= 1, "all ranks synchronise alike"
    done, recorded = ([set() for _ in ranks] for _ in "dr")
    left = [{name: list(reversed(at)) for name, at in streams.items()} for _, streams in every]
    prefer = chance.choice(["", "side", None])  # the user's stream, what is beside it, or any

    def finish(number, name):
        last = left[number][name].pop()
        done[number].add(last)
        step, _ = every[number][0][last]
        if isinstance(step, Record):
            recorded[number].add(step.event)
        if not left[number][name]:
            del left[number][name]

    def is_free(step, after, number):
        """Whether all that a step awaits has been done, on this rank or on all."""
        if isinstance(step, Await) and step.everywhere:
            return all(step.event in events for events in recorded)
        return after <= done[number]

    def next_of(number):
        """The streams of a rank whose next step may come, and one that synchronises, or None."""
        ready, waiting, steps = [], [], every[number][0]
        for name, numbers in left[number].items():
            step, after = steps[numbers[-1]]
            if is_free(step, after, number):
                if isinstance(step, Synchronise):
                    waiting.append((numbers[-1], name))
                else:
                    ready.append((number, name))
        return ready, min(waiting, default=None)

    following = list(map(next_of, range(len(ranks))))
    while any(left):
        ready = [each for of_rank, _ in following for each in of_rank]
        if not ready:
            assert all(waiting for _, waiting in following), "all ranks synchronise"
            for number, (_, (_, name)) in enumerate(following):
                finish(number, name)
            following = list(map(next_of, range(len(ranks))))
            continue
        ready = [each for each in ready if bool(each[1]) == bool(prefer)] or ready
        number, name = chance.choice(ready)
        step = every[number][0][left[number][name][-1]][0]
        if not isinstance(step, Record | Await):
            performers[type(step)](step, ranks[number])
        finish(number, name)
        # What is recorded, all ranks may await.
        for other in range(len(ranks)) if isinstance(step, Record) else (number,):
            following[other] = next_of(other)


def streams_of(steps):
    """Each step and what it awaits; and by stream, the numbers of its steps."""
    found, streams, events = [], {}, {}
    for at, each in enumerate(steps):
        name, step = (each.stream, each.step) if isinstance(each, On) else ("", each)
        awaits = isinstance(step, Await) and not step.everywhere
        found.append((step, {events[step.event]} if awaits else set()))
        if isinstance(step, Record):
            events[step.event] = at
        streams.setdefault(name, []).append(at)
    follows = {two: one for each in streams.values() for one, two in pairwise(each)}
    joined, front = set(), streams.get("", [])[-1:]
    while front:
        at = front.pop()
        if at not in joined:
            joined.add(at)
            front += [*found[at][1], *([follows[at]] if at in follows else [])]
    loose = [str(found[at][0]) for at in range(len(found)) if at not in joined]
    assert not loose, f"what is beside the user's stream comes to it at last: {loose}"
    return found, streams
