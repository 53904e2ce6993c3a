"""Which executions are replayed, with lanes that only keep names of memory."""

import pytest

from shardmath.operators.replay import ReplayCache


class Lane:
    def __init__(self, **held):
        self.held = held

    def memory(self):
        return dict(self.held)

    def holds(self, memory):
        return all(self.held.get(name) is each for name, each in memory.items())


def kept(replays, lane, *keys):
    for key in keys:
        replays.keep(key, replays.next_number(), f"told {key}", lane)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda replays, lane: None, "told a"),
        (lambda replays, lane: lane.held.update(more=object()), "told a"),
        (lambda replays, lane: lane.held.update(room=object()), None),  # it has grown
        (lambda replays, lane: lane.held.clear(), None),  # it was released
        (lambda replays, lane: kept(replays, Lane(room=object()), "a"), "told a"),  # in another
        (lambda replays, lane: kept(replays, lane, *range(200)), None),  # only the latest stay
    ],
    ids=["as it was", "another buffer", "grown", "released", "another lane", "long ago"],
)
def test_an_execution_comes_again_while_all_is_as_it_was(change, found):
    replays, lane = ReplayCache(), Lane(room=object())
    kept(replays, lane, "a")
    assert replays.find("b") is None
    change(replays, lane)
    replay = replays.find("a")
    assert (replay and replay.agreed) == found


def test_numbers_go_on():
    replays, lane = ReplayCache(), Lane()
    kept(replays, lane, "a", "b", "a")
    assert (replays.find("a").number, replays.find("b").number) == (3, 2)
