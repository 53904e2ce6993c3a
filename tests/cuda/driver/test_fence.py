"""What may be used again behind fences, with fences that pass when told to."""

from __future__ import annotations

import pytest

from shardmath.cuda import fence
from shardmath.cuda.fence import DeferredReuse


class Device:
    """Fences are numbered; those up to `done` have passed. None can be set during a capture."""

    def __init__(self):
        self.made, self.done, self.captures = 0, 0, False


class Fence:
    def __init__(self, device):
        device.made += 1
        self._device, self._number = device, device.made

    @classmethod
    def behind(cls, device):
        return None if device.captures else cls(device)

    def passed(self):
        return self._number <= self._device.done


# Steps, each with what is free after it: a letter is left; a number of fences pass; a capture.
CASES = [
    (["a", 0, 1, 1], ["", "", "a", ""]),
    (["a", "b", 1, 2], ["", "", "a", "b"]),
    (["a", "b", 2, "c", 3], ["", "", "ab", "", "c"]),
    ([True, "a", False, 1], ["", "", "", "a"]),
    (["a", True, "b", 1, False, 2], ["", "", "", "a", "", "b"]),
    ([1, 2], ["", ""]),
]


@pytest.mark.parametrize(("steps", "free"), CASES)
def test_what_is_left_is_free_behind_a_fence(steps, free, monkeypatch):
    monkeypatch.setattr(fence, "DeviceFence", Fence)
    device = Device()
    leftovers = DeferredReuse(device)
    found = []
    for step in steps:
        if isinstance(step, str):
            leftovers.leave(step)
        elif isinstance(step, bool):
            device.captures = step
        else:
            device.done = step
        found.append("".join(leftovers.free()))
    assert found == free
