"""What an exception leaves of objects that a process keeps for its GPU: without one."""

import re
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

import shardmath
from shardmath.cuda import fence
from shardmath.cuda.fence import DeferredReuse
from shardmath.cuda.kernel import ReadyLaunch
from shardmath.local.gpu.fft import _Plan


class Interrupted(BaseException):
    """What a signal handler raises."""


class Bound:
    """A library that knows where a plan is bound, and is interrupted once at a name."""

    def __init__(self, interrupted):
        self.interrupted = interrupted
        self.bound = {}

    def _set(self, name, value):
        self.bound[name] = value
        if self.interrupted == name:
            self.interrupted = ""
            raise Interrupted

    def set_stream(self, handle, stream):
        self._set("stream", stream)

    def set_work_area(self, handle, address):
        self._set("work area", address)


@pytest.mark.parametrize("name", ["stream", "work area"])
def test_a_plan_of_transforms_is_bound_where_it_is_asked_for(name):
    plan = object.__new__(_Plan)
    plan._cufft, plan._handle, plan.work_bytes, plan._bound = Bound(""), 1, 8, (-1, -1)
    plan.bind(7, 70)
    plan._cufft.interrupted = name
    with pytest.raises(Interrupted):
        plan.bind(8, 80)
    plan.bind(7, 70)
    assert plan._cufft.bound == {"stream": 7, "work area": 70}


def test_a_launch_goes_to_the_stream_that_it_is_put_on():
    class Config:
        hStream = 0  # noqa: N815 - as the driver calls it
        interrupts = False

        def __setattr__(self, name, value):
            object.__setattr__(self, name, value)
            if name == "hStream" and self.interrupts:
                self.interrupts = False
                raise Interrupted

    config, put = Config(), []
    launch = ReadyLaunch(None, config, SimpleNamespace(address=0), (1, 1))
    with patch("shardmath.cuda.kernel.call", lambda *_: put.append(config.hStream)):
        launch.put(7)
        config.interrupts = True
        with pytest.raises(Interrupted):
            launch.put(8)
        launch.put(7)
    assert put == [7, 7]


def test_what_is_left_is_free_again_after_an_exception_that_left_its_lock_held():
    passed = SimpleNamespace(passed=lambda: True)
    left = DeferredReuse(None)
    left._lock.acquire()
    left.leave("memory")
    with patch.object(fence.DeviceFence, "behind", lambda device: passed):
        assert left.free() == ["memory"]


def test_every_lock_can_be_taken_again_by_the_thread_that_has_it():
    """An exception may leave a `with` block after its last statement, before the release."""
    sources = Path(shardmath.__file__).parent.rglob("*.py")
    locks = [path.name for path in sources if re.search(r"\bLock\(\)", path.read_text())]
    assert locks == []
