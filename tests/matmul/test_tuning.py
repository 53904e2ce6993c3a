"""Ranks that have timed the same product choose the same algorithm."""

from __future__ import annotations

import pytest

from shardmath.operators.matmul.gpu.performing import fastest, tuning_notes

A, B = b"a" * 16, b"b" * 16


@pytest.mark.parametrize(
    ("ranks", "chosen"),
    [
        ([{}], {}),
        ([{A: [3.0, 1.0, 2.0]}], {A: 1}),
        ([{A: [1.0]}, {A: [2.0]}], {A: 0}),
        ([{A: [3.0, 1.0, 2.0]}, {A: [2.0, 9.0, 2.5]}], {A: 2}),  # the slowest rank decides
        ([{A: [1.0, 2.0]}, {B: [2.0, 1.0, 3.0]}, {}], {A: 0, B: 1}),
        ([{A: [1.0, 1.0]}, {A: [1.0, 1.0]}], {A: 0}),
    ],
)
def test_the_algorithm_whose_slowest_rank_is_fastest(ranks, chosen):
    assert fastest(ranks) == chosen


def test_what_explain_says():
    lines = tuning_notes({A: [3e-6, 1e-6]}, {A: 1})
    assert lines == ["autotuned: algorithm 2 of 2 takes 1.0 us here, the one named first 3.0 us"]
    assert "no product" in tuning_notes({}, {})[0]
