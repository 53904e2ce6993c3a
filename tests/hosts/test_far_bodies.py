"""The test bodies of one host, unchanged, on two pretended hosts that share no memory."""

from __future__ import annotations

from contextlib import contextmanager

import fft_cases
import matmul_cases
import numpy as np
import pytest
import redistribution_cases
import test_fft_any
import test_matmul_any
import test_moving
import test_operators_of_torch
import test_redistribute_any
import test_reducing
import test_rows_of_torch
import torch
from hypothesis import given
from samples import digest, reduced, same, values
from torch_operators import operators

from draws import drawn
from mortal import run_job
from shardmath.collectives import all_reduce
from shardmath.context.startup import initialize
from shardmath.distribution import Redistribute, Slab
from shardmath.program import two_shots

FEW = drawn(15)

SHAPES = [(), (0,), (1,), (7, 9), (3, 0, 2), (20, 801)]

# Name, ranks, body and its arguments; each rank returns the list of what is wrong.
BODIES = [
    ("broadcast", 5, test_moving.check_broadcast, (3, ["float32", "complex128"], SHAPES)),
    ("all_gather, short", 3, test_moving.check_gather, ((7, 3), 1, "complex64")),
    ("all_gather, long", 3, test_moving.check_gather, ((2, 90_000), 1, "float32")),
    ("all_to_all, uneven", 3, test_moving.check_exchange, (((9, 7), 1, "int16"), True)),
    ("all_to_all, long", 2, test_moving.check_exchange, (((7, 20_000), 0, "float32"), False)),
    ("all_to_all, inner", 4, test_moving.check_exchange, (((3, 20_000), 1, "float32"), False)),
]


@pytest.mark.parametrize(
    ("size", "body", "arguments"), [row[1:] for row in BODIES], ids=[row[0] for row in BODIES]
)
def test_collectives(far_contexts, size, body, arguments):
    assert far_contexts.run(body, *arguments, ranks=size) == [[]] * size


@contextmanager
def two_shots_of(context, block, least=two_shots._ONE_SHOT_BYTES):
    """A group of all ranks that combines arrays of more bytes than `least` in blocks of `block`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(two_shots, "_BLOCK_BYTES", block)
        patch.setattr(two_shots, "_ONE_SHOT_BYTES", least)
        group = context.split(0)
        yield group
        group.close()


def check_forms(context, *arguments):
    with two_shots_of(context, 1 << 12, 1 << 13) as group:
        return test_reducing.check_forms(group, *arguments)


def check_lengths(context, *arguments):
    with two_shots_of(context, 1 << 18) as group:
        return test_reducing.check_lengths(group, *arguments)


def test_all_reduce_of_every_form_in_blocks(far_contexts):
    assert far_contexts.run(check_forms, (60, 45), "float32", ranks=4) == [[]] * 4


@pytest.mark.parametrize(
    ("size", "body", "arguments"),
    [
        (2, test_reducing.check_types, (["float32", "bfloat16"],)),
        (6, test_reducing.check_types, (["complex64"],)),
        (3, check_lengths, ((513, 16385, 262145), "float32", "sum")),
    ],
)
def test_all_reduce_gives_all_ranks_the_same_bits(far_contexts, size, body, arguments):
    results = far_contexts.run(body, *arguments, ranks=size)
    assert [wrong for wrong, _ in results] == [[]] * size
    assert all(digests == results[0][1] for _, digests in results)


@pytest.mark.parametrize(
    "case",
    [
        (2, ((7,), 0, None)),
        (3, ((5, 8), -1, (1, 3, 4))),
        (4, ((0, 4), 0, None)),
        (3, ((2, 3, 200_000), 2, None)),
    ],
)
def test_reduce_scatter(far_contexts, case):
    size, scattered = case
    assert all(
        far_contexts.run(test_reducing.check_scatter, scattered, "float16", "sum", ranks=size)
    )


def signals_with_values(context):
    with context:
        test_operators_of_torch.check_values(context)


def test_signals_have_values(far_contexts):
    far_contexts.run(signals_with_values, ranks=3)


def rows_to_experts(context):
    with context:
        ops = operators(context)
        test_rows_of_torch.there_and_back(ops, context, 2, (3,), torch.bfloat16)


def test_rows_to_experts_and_back(far_contexts):
    far_contexts.run(rows_to_experts, ranks=4)


def bytes_of_sums(context, dtype, op, length):
    """Of an all_reduce in blocks: bytes that came from other hosts, the host, whether the result
    is right, and its digest.
    """
    came, transport = [], context.heap.transport
    get = transport.get

    def counted(rank, index, offset, into, stream=0):
        came.append(0 if context.same_host(rank) else into.nbytes)
        get(rank, index, offset, into, stream)

    parts = [values(dtype, (length,), rank) for rank in range(context.size)]
    with two_shots_of(context, 1 << 12, 1 << 13) as group, pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "get", counted)
        found = all_reduce(parts[group.rank], op=op, context=group)
    return sum(came), context.hosts[context.rank], same(found, reduced(op, parts)), digest(found)


def check_bytes(results, length, each):
    """All have the right bits; `each[h]` bytes of each element came to host h."""
    assert all(right for *_, right, _ in results) and len({bits for *_, bits in results}) == 1
    for host, nbytes in enumerate(each):
        came = sum(came for came, where, *_ in results if where == host)
        assert came == pytest.approx(nbytes * length, rel=0.01), host


@pytest.mark.parametrize(
    ("size", "dtype", "op", "each"),
    [(size, "float32", "sum", 4) for size in (2, 3, 4, 5, 6)] + [(5, "int32", "mean", 8)],
)
def test_a_sum_sends_an_element_once_between_two_hosts(far_contexts, size, dtype, op, each):
    """A partial sum one way, a result the other way; or half of each where a host has one rank."""
    length = 5 * 1024 + 3
    check_bytes(far_contexts.run(bytes_of_sums, dtype, op, length, ranks=size), length, [each] * 2)


def test_a_sum_goes_from_host_to_host():
    """Partial sums to the second and the third, and the result to the first and the second."""

    length = 30 * 1024 + 3  # of fewer blocks, every rank reduces a part

    def body(group):
        return bytes_of_sums(initialize("cpu", group), "float32", "mean", length)

    check_bytes(run_job(5, body, {"SHARDMATH_FAKE_HOSTS": "3"}), length, [4, 8, 4])


def test_operands_may_be_overwritten_as_soon_as_the_call_returns(far_contexts):
    assert (
        far_contexts.run(test_moving.check_alternation, 24, (3, 2000, 30_000, 12_000), ranks=4)
        == [0] * 4
    )


def test_groups_within_and_across_hosts(far_contexts):
    far_contexts.run(test_moving.check_groups, 100_000, ranks=5)


@FEW
@given(case=redistribution_cases.cases())
def test_any_distribution_to_any_other(far_contexts, case):
    far_contexts.run(test_redistribute_any.run_case, case, ranks=case[0])


def explain(context):
    with context, Redistribute(np.zeros((2, 6)), Slab.X, Slab.Y) as redistribution:
        return redistribution.explain()


def test_how_bytes_travel_is_explained(far_contexts):
    first, *others = far_contexts.run(explain, ranks=3)
    assert others == [first] * 2 and "2 hosts: read in place" in first


@FEW
@given(case=matmul_cases.cases())
def test_any_product(far_contexts, case):
    far_contexts.run(test_matmul_any.run_case, case.plain(), ranks=case.size)


@FEW
@given(case=fft_cases.cases())
def test_any_transform(far_contexts, case):
    far_contexts.run(test_fft_any.run_case, case, ranks=case["size"])
