"""Which of cuFFT's plans are kept, with plans and a device that only take notes."""

import pytest

from shardmath.local.gpu import fft
from shardmath.local.plan_many import DataLayout, PlanMany

CAPTURED, ORDINARY = 1, 0  # streams


class Device:
    def activate(self):
        pass

    def synchronize(self):
        pass


class Plan:
    work_bytes = 0
    destroyed = ()  # lengths

    def __init__(self, kind, plan):
        self.captured = False
        self._length = plan.lengths[0]

    def bind(self, stream, work_area):
        pass

    def execute(self, source, target, forward):
        pass

    def destroy(self):
        Plan.destroyed += (self._length,)


# Lengths as they come, each with its stream, and the plans that have to go; two are kept.
CASES = [
    ([(3, ORDINARY), (4, ORDINARY), (3, ORDINARY)], []),
    ([(3, ORDINARY), (4, ORDINARY), (5, ORDINARY)], [3]),
    ([(3, ORDINARY), (4, ORDINARY), (3, ORDINARY), (5, ORDINARY)], [4]),
    ([(3, CAPTURED), (4, ORDINARY), (5, ORDINARY), (6, ORDINARY)], [4, 5]),
    ([(3, ORDINARY), (3, CAPTURED), (4, CAPTURED), (5, ORDINARY), (6, ORDINARY)], [5]),
]


@pytest.mark.parametrize(("calls", "gone"), CASES)
def test_plans_that_a_graph_needs_stay(calls, gone, monkeypatch):
    monkeypatch.setattr(fft, "_MAX_PLANS", 2)
    monkeypatch.setattr(fft, "_Plan", Plan)
    monkeypatch.setattr(fft.streams, "capturing", lambda stream: stream == CAPTURED)
    monkeypatch.setattr(Plan, "destroyed", ())
    cufft = fft.CuFFT(Device())
    for length, stream in calls:
        layout = DataLayout((length,), 1, length)
        plan = PlanMany((length,), layout, layout, 1, ((0, 0),))
        cufft.run("C2C", 0, 0, stream, double=False, plan=plan, forward=True)
    assert list(Plan.destroyed) == gone
