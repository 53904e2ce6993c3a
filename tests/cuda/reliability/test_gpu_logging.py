"""The host's test bodies for what is logged, on ranks with GPUs, where calls are replayed."""

from __future__ import annotations

import test_logging


def test_plans_reach_the_root_logger(gpus, size):
    assert gpus.run(test_logging.plan_each, ranks=size) == [[]] * size


def test_allocations_reach_the_root_logger(gpus, size):
    assert gpus.run(test_logging.allocate_each, ranks=size) == [["allocated"]] * size
