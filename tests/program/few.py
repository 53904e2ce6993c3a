"""Settings for random cases that are performed by ranks."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings

__all__ = ["few"]


def few(examples):
    """So many examples, which are not shrunk: new ranks would have to start after each failure."""
    return settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
    )
