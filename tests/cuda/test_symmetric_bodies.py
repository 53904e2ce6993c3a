"""The host's test bodies for handles, allocation and groups, on ranks with GPUs.

A test of the host forks ranks and runs a body on each. Here every rank runs the test itself, and
forking is replaced: the body runs on the rank's own context, and the ranks exchange its results.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "symmetric"))

from test_device_handle import PACKAGES, ready

from shardmath.symmetric.allocation import allocate_symmetric_memory

# How many ranks, which test, and its arguments behind the package.
BODIES = [
    (3, "test_handle.test_views_are_the_peers_memory", []),
    (2, "test_handle.test_a_view_of_an_array_has_its_own_offset_by_rank", []),
    (1, "test_allocation.test_uneven_sizes_are_padded_or_skipped", [1]),
    (3, "test_allocation.test_uneven_sizes_are_padded_or_skipped", [3]),
    (3, "test_groups.test_subsets_keep_the_order_given_and_are_the_same_again", None),
    (2, "test_groups.test_nested_splits_and_subsets", None),
    (4, "test_groups.test_overlapping_groups_in_any_order", [0]),
]


def on_ranks(context, size, body, timeout=0.0):
    """As mortal's: the body's results on all ranks, which are here already."""
    assert context.size == size
    with context:
        result = body(context)
        context.team.synchronize(0)
        return context.agree("results", lambda: result, lambda results: results)


def mine(module, context, value):
    array = allocate_symmetric_memory(4, module, dtype="int64", skip_symmetric_check=True)
    array[...] = value
    return array


def check(context, size, name, package, args):
    """What went wrong on this rank, or "". Ranks that are too many look on."""
    module = ready(context, package)
    part = context if context.size == size else context.split(0 if context.rank < size else None)
    if part is None:
        return ""
    file, _, test = name.partition(".")
    bodies = importlib.import_module(file)
    values = {
        "on_ranks": partial(on_ranks, part),
        "mine": partial(mine, module),
    }
    known = {key: value for key, value in values.items() if hasattr(bodies, key)}
    with patch.multiple(bodies, **known):
        try:
            if args is None or file == "test_groups":
                getattr(bodies, test)(*(args or []))
            else:
                getattr(bodies, test)(module, *args)
        except BaseException:
            return traceback.format_exc()
    return ""


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(("ranks", "name", "args"), BODIES)
def test_a_body_of_the_hosts(gpus, package, ranks, name, args):
    if ranks > gpus.size:
        pytest.skip(f"this machine has {gpus.size} GPUs")
    assert gpus.run(check, ranks, name, package, args, ranks=ranks) == [""] * ranks
