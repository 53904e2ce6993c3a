"""How many random cases a test draws, and from where."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

__all__ = ["drawn", "seeds"]

# Times as many cases, other ones in every run; without it the same cases in every run.
TIMES = int(os.environ.get("SHARDMATH_TEST_DRAWS", "0"))


def drawn(examples: int, *, shrunk: bool = True) -> settings:
    """So many cases; `shrunk` where a failure is to be made small, for which new ranks would have
    to start where ranks perform the cases.
    """
    phases = [Phase.explicit, Phase.generate, *[Phase.shrink] * shrunk]
    return settings(
        max_examples=examples * max(TIMES, 1),
        derandomize=not TIMES,
        deadline=None,
        database=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=shrunk,
    )


def seeds(short: int, whole: int) -> list[Any]:
    """The seeds 0, 1, ... of a test: `short` of them in every run, the `whole` in the torture."""
    more = [pytest.param(seed, marks=pytest.mark.torture) for seed in range(short, whole)]
    return [*range(short), *more]
