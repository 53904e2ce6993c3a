"""What every test may use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ranks import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Six ranks that stay: `pool.run(function, *args, ranks=k)`."""
    with Pool(6) as ranks:
        yield ranks
