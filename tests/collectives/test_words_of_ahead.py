"""What a rank says that meets the others where some of them have run ahead: without a GPU."""

from types import SimpleNamespace

import pytest

from shardmath.collectives.ahead import Ahead, KnownCall

TAG = 7


def ahead_of(rank, size, operation, own, build):
    """The known calls of a rank that meets its peers in `operation`: one, a broadcast."""
    made = object.__new__(Ahead)
    form = SimpleNamespace(of_row=None, words=lambda spec: (), whole=lambda common, words: common)
    made._rank, made._size, made._own = rank, size, own
    made._by_tag = {TAG: KnownCall("broadcast", form, ("known",), None, None, build, TAG)}
    made._board = SimpleNamespace(operation=operation, calls=None)
    return made


@pytest.mark.parametrize(
    ("tags", "words"),
    [
        ({0: TAG, 1: TAG}, "ranks 0, 1 called broadcast; rank 2 called barrier"),
        ({0: TAG}, "rank 0 called broadcast; ranks 1, 2 called barrier"),
        ({0: TAG, 1: None}, "rank 0 called broadcast; rank 2 called barrier"),
        ({0: None, 1: TAG}, "rank 1 called broadcast; rank 2 called barrier"),
        ({0: 99, 1: None}, "rank 0 called something else; rank 2 called barrier"),
    ],
)
def test_ranks_that_called_different_operations(tags, words):
    found = ahead_of(2, 3, "barrier", ("own",), None)._explain_passed(tags)
    assert str(found).endswith(f": {words}")


@pytest.mark.parametrize(
    ("tags", "specs"),
    [
        ({0: TAG, 1: TAG}, ["known", "known", "own"]),
        ({0: TAG}, ["known", "own", "own"]),
        ({0: TAG, 1: None}, ["known", "known", "own"]),
        ({0: None, 1: TAG}, ["known", "known", "own"]),
    ],
)
def test_who_has_not_come_is_not_blamed_for_another_spec(tags, specs):
    def build(given):
        raise ValueError(repr([word for (word,) in given]))

    found = ahead_of(2, 3, "broadcast", ("own",), build)._explain_passed(tags)
    assert str(found) == repr(specs)
