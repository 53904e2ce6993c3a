"""What executions come again as, by lanes that are only books."""

import pytest

from shardmath.operators.replay import Replays


class Lane:
    def __init__(self, **held):
        self.held = held

    def memory(self):
        return dict(self.held)

    def holds(self, memory):
        return all(self.held.get(name) is each for name, each in memory.items())


def kept(repeats, lane, *keys):
    for key in keys:
        repeats.keep(key, repeats.next(), f"told {key}", lane)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda repeats, lane: None, "told a"),
        (lambda repeats, lane: lane.held.update(more=object()), "told a"),
        (lambda repeats, lane: lane.held.update(room=object()), None),  # it has grown
        (lambda repeats, lane: lane.held.clear(), None),  # it was released
        (lambda repeats, lane: kept(repeats, Lane(room=object()), "a"), "told a"),  # in another
        (lambda repeats, lane: kept(repeats, lane, *range(200)), None),  # only the latest stay
    ],
    ids=["as it was", "another buffer", "grown", "released", "another lane", "long ago"],
)
def test_an_execution_comes_again_while_all_is_as_it_was(change, found):
    repeats, lane = Replays(), Lane(room=object())
    kept(repeats, lane, "a")
    assert repeats.find("b") is None
    change(repeats, lane)
    known = repeats.find("a")
    assert (known and known.agreed) == found


def test_numbers_go_on():
    repeats, lane = Replays(), Lane()
    kept(repeats, lane, "a", "b", "a")
    assert (repeats.find("a").number, repeats.find("b").number) == (3, 2)
