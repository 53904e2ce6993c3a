"""Any transform of any distribution in any memory, against scipy.fft on the global array."""

from __future__ import annotations

import math
from unittest.mock import patch

import fft_cases
import numpy as np
from fft_cases import placed, to_host, untouched
from hypothesis import given

import shardmath.fft
from arrangements import part_of
from draws import drawn
from shardmath.arrays import library_of
from shardmath.arrays.dtypes import to_numpy
from shardmath.geometry import decode
from shardmath.handles.allocation import is_symmetric
from shardmath.program import passes

FUNCTIONS = {"C2C": "fft", "C2C inverse": "ifft", "R2C": "rfft", "C2R": "irfft"}


def run_case(context, case):
    # Small arrays in many blocks and passes, as large ones are, and by plans made for these.
    with (
        patch.object(passes, "BLOCK_BYTES", case["block"]),
        patch.object(context, "caches", {}),
    ):
        check_case(context, case)


def check_case(context, case):
    rank, size = context.rank, context.size
    form = case["library"]
    array = fft_cases.operand_of(case)
    full = fft_cases.wanted(case, array)
    source = decode(case["inputs"][rank])
    target = source if case["outputs"] is None else decode(case["outputs"][rank])
    part, want = part_of(array, source, rank, size), part_of(full, target, rank, size)
    operand, around = placed(context, form, part, case["stores"][rank])
    dtype = to_numpy(fft_cases.result_dtype(case))
    out, whole = None, None
    if case["out"] == "operand" and (part.shape, part.dtype) == (want.shape, dtype):
        out = operand
    elif case["out"] not in ("none", "operand"):
        out, whole = placed(context, form, np.zeros(want.shape, dtype), case["out"])
    options = fft_cases.options_of(case)
    with context:
        got = getattr(shardmath.fft, FUNCTIONS[case["kind"]])(
            operand,
            distribution=source if case["outputs"] is None else (source, target),
            axes=case["axes"],
            norm=case["norm"],
            options=options,
            out=out,
        )
    assert options == fft_cases.options_of(case)
    assert out is None or got is out
    assert type(got) is type(operand)
    host = to_host(got)
    assert (host.dtype, host.shape) == (dtype, want.shape)
    axes = range(array.ndim) if case["axes"] is None else case["axes"]
    assert fft_cases.close(host, want, math.prod(full.shape[axis] for axis in axes))
    if out is None and not form.endswith("cpu"):
        assert is_symmetric(got) == case["stores"][rank].startswith("heap")
        assert want.ndim < 2 or library_of(got).spec(got).order != "strided"
    if out is not operand:
        assert to_host(operand).tobytes() == part.tobytes()
    assert untouched(around, part.shape)
    assert untouched(whole, want.shape)


@drawn(160)
@given(case=fft_cases.cases())
def test_any_transform(contexts, case):
    contexts.run(run_case, case, ranks=case["size"])
