"""Transforms on pretended GPUs, of one host and of two: the host's bodies, and all but CUDA itself.

Local transforms are NumPy's. How ranks find out where results lie, what they push, pull and
deliver, and in which memory, is the package's own.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from draws import drawn

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent.parent / "fft"))

import fft_cases
import test_fft_any
import test_repeated_transforms
import test_trigonometric
from hypothesis import given
from pretended import pretended_gpu

from shardmath.operators.fft import stages

BODIES = {
    body.__name__: body
    for body in (
        test_fft_any.check_case,
        test_repeated_transforms.exchanges,
    )
} | {"series": test_trigonometric.check_case}


def on_gpus(context, body, *args):
    """On several hosts all is delivered in parts, however small it is."""
    chunks = context.multi_host
    usual, stages._MULTI_HOST = stages._MULTI_HOST, ((1, stages.Chunking((1, 2), 2)),)
    context.barrier()
    try:
        with pretended_gpu(context, chunks=chunks):
            found = BODIES[body](context, *args)
            context.board.barrier("done")
    finally:
        stages._MULTI_HOST = usual
    return found


@drawn(28, shrunk=False)
@given(case=fft_cases.cases())
def test_any_transform(ranks, case):
    if case["library"] == "numpy":
        ranks.run(on_gpus, "check_case", case, ranks=case["size"])


@drawn(28, shrunk=False)
@given(case=test_trigonometric.cases())
def test_any_cosines_and_sines(ranks, case):
    if case["library"] == "numpy":
        ranks.run(on_gpus, "series", case, ranks=case["size"])


@pytest.mark.parametrize("given_out", [True, False])
@pytest.mark.parametrize("form", ["object", "function"])
@pytest.mark.parametrize("where", ["heap", "ordinary"])
def test_a_repeated_transform_is_one_exchange(ranks, where, given_out, form):
    for found in ranks.run(on_gpus, "exchanges", where, given_out, form, ranks=2):
        assert found[-1] == 1
