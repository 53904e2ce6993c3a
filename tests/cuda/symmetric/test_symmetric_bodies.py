"""The host's test bodies for handles, allocation and groups, on ranks with GPUs.

A test of the host forks ranks and runs a body on each. Here every rank runs the test itself, and
forking is replaced: the body runs on the rank's own context, and the ranks exchange its results.
"""

from __future__ import annotations

import importlib
import traceback
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
from test_device_handle import PACKAGES, ready

from shardmath.handles.allocation import allocate_symmetric_memory

# How many ranks, which test, and its arguments, where PACKAGE stands for the array library. The far
# ones pass where ranks have no address of each other's memory, too.
PACKAGE = "<package>"
FAR_BODIES = [
    (2, "test_handle.test_what_is_out_of_reach_raises", []),
    (2, "test_handle.test_mistakes_name_the_rank_and_the_argument", []),
    (3, "test_handle.test_ordinary_memory_on_one_rank_is_an_error_on_all", []),
    (1, "test_allocation.test_uneven_sizes_are_padded_or_skipped", [PACKAGE, 1]),
    (3, "test_allocation.test_uneven_sizes_are_padded_or_skipped", [PACKAGE, 3]),
    (2, "test_allocation.test_sizes_in_the_message_and_facts_on_every_rank", []),
    (3, "test_groups.test_subsets_keep_the_order_given_and_are_the_same_again", []),
    (2, "test_groups.test_a_color_and_a_key_are_integers", [1.5, 0]),
    (2, "test_groups.test_nested_splits_and_subsets", []),
    *[(4, "test_groups.test_overlapping_groups_in_any_order", [seed]) for seed in range(3)],
    (4, "test_groups.test_a_process_group_means_its_ranks_and_is_asked_once", []),
]
BODIES = [
    *FAR_BODIES,
    (3, "test_handle.test_views_are_the_peers_memory", [PACKAGE]),
    (2, "test_handle.test_a_view_of_an_array_has_its_own_offset_by_rank", [PACKAGE]),
    (2, "test_handle.test_signals_order_a_stream_of_messages", []),
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


def allocate(module, shape, package, **options):
    """As the host's, where `module` is for NumPy, with its default."""
    if package is np:
        package, options = module, {"dtype": "float64", **options}
    return allocate_symmetric_memory(shape, package, **options)


def fetched(module, context, handle):
    """As `values` of test_groups, without views."""
    device = {"device": f"cuda:{context.device_id}"} if module.__name__ == "torch" else {}
    found = module.zeros(4, dtype=module.int64, **device)
    values = []
    handle.barrier()
    for rank in range(handle.world_size):
        handle.get(found, rank)
        values.append(int(found[3]))
    handle.barrier()
    return values


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
        "allocate": partial(allocate, module),
    }
    if part.multi_host:
        values["values"] = partial(fetched, module, part)
    known = {key: value for key, value in values.items() if hasattr(bodies, key)}
    with patch.multiple(bodies, **known):
        try:
            getattr(bodies, test)(*(module if arg == PACKAGE else arg for arg in args))
        except BaseException:
            return traceback.format_exc()
    return ""


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(("ranks", "name", "args"), BODIES)
def test_a_body_of_the_hosts(gpus, package, ranks, name, args):
    if ranks > gpus.size:
        pytest.skip(f"there are {gpus.size} ranks with GPUs")
    assert gpus.run(check, ranks, name, package, args, ranks=ranks) == [""] * ranks


def test_groups_of_torch_distributed(gpus, tmp_path):
    if gpus.size < 3:
        pytest.skip(f"there are {gpus.size} ranks with GPUs")
    name = "test_groups.test_torch_groups_and_their_names"
    assert gpus.run(check, 3, name, "torch", [str(tmp_path)], ranks=3) == [""] * 3
