"""The mapping that keeps its latest entries, against a list of keys in the order of their uses."""

import random

import pytest

from shardmath.base.lru_cache import LRUCache


class Oracle:
    """The same by a list: the key used longest ago first."""

    def __init__(self, most):
        self.most, self.pairs = most, []

    def find(self, key):
        for pair in self.pairs:
            if pair[0] == key:
                self.pairs.remove(pair)
                self.pairs.append(pair)
                return pair[1]
        return None

    def made(self, key, make):
        if key in [known for known, _ in self.pairs]:
            return self.find(key)
        return self.keep(key, make())

    def keep(self, key, value):
        self.pairs = [pair for pair in self.pairs if pair[0] != key]
        if len(self.pairs) == self.most:
            del self.pairs[: max(1, self.most // 4)]
        self.pairs.append((key, value))
        return value

    def clear(self):
        self.pairs.clear()


def call(mapping, verb, key, value):
    if verb == "made":
        return mapping.made(key, lambda: value)
    arguments = {"find": (key,), "keep": (key, value), "clear": ()}[verb]
    return getattr(mapping, verb)(*arguments)


@pytest.mark.parametrize("most", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("seed", range(5))
def test_what_stays_is_what_was_used_last(most, seed):
    random.seed(seed)
    latest, oracle = LRUCache(most), Oracle(most)
    for _ in range(2000):
        verb = random.choices(["find", "made", "keep", "clear"], [40, 40, 20, 1])[0]
        key, value = random.randrange(2 * most + 1), random.choice([None, 0, "one", "other"])
        assert call(latest, verb, key, value) == call(oracle, verb, key, value)
        assert len(latest) == len(oracle.pairs)
        assert all(known in latest for known, _ in oracle.pairs)


@pytest.mark.parametrize("value", [None, 5, ()])
def test_a_value_that_several_keys_have_is_that_of_each(value):
    latest = LRUCache(2)
    latest.keep("a", value)
    latest.keep("b", value)
    latest.find("a")
    latest.keep("c", value)
    assert [key in latest for key in "abc"] == [True, False, True]


def test_what_cannot_be_made_is_not_kept():
    latest = LRUCache(2)
    with pytest.raises(ZeroDivisionError):
        latest.made("a", lambda: 1 // 0)
    assert "a" not in latest
    assert latest.made("a", lambda: None) is None
    assert latest.made("a", lambda: 1 // 0) is None


def test_a_key_without_hash_raises():
    with pytest.raises(TypeError):
        LRUCache(2).find([])
