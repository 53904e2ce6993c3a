"""Some test bodies of other folders, on ranks that each launcher has started.

`TEST_LAUNCHER=torchrun pytest tests/collectives` runs all bodies of a folder so.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import mortal
import started
from ranks import Pool
from shardmath.context.context import Context
from shardmath.errors import RankFailure
from shardmath.geometry import Slab

for folder in ("collectives", "launch", "redistribution", "symmetric"):
    sys.path.append(str(Path(__file__).parent.parent / folder))

import test_groups  # noqa: E402
import test_handle  # noqa: E402
import test_moving  # noqa: E402
import test_pool  # noqa: E402
import test_redistribute_any  # noqa: E402
import test_reducing  # noqa: E402

SLABS = [[slab.encode()] * 2 for slab in (Slab.X, Slab.Y)]


@pytest.fixture(scope="module", params=["shardmath", "torchrun", "mpirun"])
def launched(request: pytest.FixtureRequest) -> Iterator[Pool]:
    if started.missing(request.param):
        pytest.skip(started.missing(request.param))
    with Pool(2, launcher=request.param) as pool:
        yield pool


@pytest.fixture(autouse=True)
def bodies_on_them(launched: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs a body on new ranks runs it on these."""
    monkeypatch.setattr(mortal, "launched", launched)


def collectives(context: Context) -> list[list[str]]:
    return [
        test_moving.check_gather(context, (7, 3), 1, "complex64"),
        test_moving.check_exchange(context, ((9, 7), 1, "int16"), True),
        test_reducing.check_forms(context, (600, 701), "bfloat16"),
    ]


def redistribution(context: Context) -> None:
    for library, dtype, stores, out in (
        ("numpy", "c16", ["C", "heap strided"], "none"),
        ("torch", "bfloat16", ["strided", "heap F"], "heap strided"),
    ):
        case = (2, (7, 9, 8), *SLABS, library, dtype, stores, out)
        test_redistribute_any.run_case(context, case)


def test_collectives() -> None:
    assert mortal.on_ranks(2, collectives) == [[[]] * 3] * 2


def test_redistribution() -> None:
    mortal.on_ranks(2, redistribution)


def test_symmetric_memory() -> None:
    test_handle.test_a_view_of_an_array_has_its_own_offset_by_rank(np)
    test_handle.test_signals_order_a_stream_of_messages()
    test_groups.test_nested_splits_and_subsets()


@pytest.mark.parametrize("launched", ["shardmath", "mpirun"], indirect=True)
def test_what_a_rank_raises_is_raised_here_and_new_ranks_follow(launched: Pool) -> None:
    before = launched.run(test_pool.process)
    with pytest.raises(KeyError, match="rank 1: 'not here'"):
        launched.run(test_pool.fail, 1)
    with pytest.raises(RankFailure, match=r"rank [01] ended"):
        launched.run(test_pool.die, 1)
    assert launched.run(test_pool.who, "x") == [("x", rank, [b"0", b"1"]) for rank in (0, 1)]
    assert not set(before) & set(launched.run(test_pool.process))
