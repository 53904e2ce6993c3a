"""Any transform of any distribution in any memory, against scipy.fft on the global array."""

from __future__ import annotations

import math
from unittest.mock import patch

import fft_cases
import numpy as np
from hypothesis import HealthCheck, given, settings

import shardmath.fft
from arrangements import part_of
from shardmath.arrays import library_named
from shardmath.arrays.dtypes import to_numpy
from shardmath.geometry import decode
from shardmath.handles.allocation import empty_on_heap, is_symmetric
from shardmath.program import blocks

FUNCTIONS = {"C2C": "fft", "C2C inverse": "ifft", "R2C": "rfft", "C2R": "irfft"}


def placed(context, library, part, store):
    """`part` as the user would hold it: (array, its NumPy view, the whole around it).

    Strided arrays lie in a larger one whose other elements are sentinels.
    """
    order = "F" if store.endswith("F") else "C"
    strided = store.endswith(("strided", "reversed"))
    shape = tuple(2 * n + 3 for n in part.shape) if strided else part.shape
    if store.startswith("heap"):
        whole = empty_on_heap(context, library, shape, part.dtype, order)
    else:
        whole = library.empty(shape, part.dtype, order)
    array = whole
    if strided:
        library.host_view(whole)[...] = 77
        array = whole[tuple(slice(1, 1 + 2 * n, 2) for n in part.shape)]
    if store == "reversed":
        array = array[(slice(None, None, -1),) * part.ndim]
    view = library.host_view(array)
    view[...] = part
    return array, view, library.host_view(whole) if strided else None


def untouched(whole, shape):
    """Whether the sentinels around a strided array are as they were."""
    if whole is None:
        return True
    rest = whole.copy()
    rest[tuple(slice(1, 1 + 2 * n, 2) for n in shape)] = 77
    return bool((fft_cases.wide(rest).real == 77).all())


def run_case(context, case):
    # Small arrays in many blocks and passes, as large ones are, and by plans made for these.
    with (
        patch.object(blocks, "BLOCK_BYTES", case["block"]),
        patch.object(context, "caches", {}),
    ):
        check_case(context, case)


def check_case(context, case):
    rank, size = context.rank, context.size
    library = library_named(case["library"])
    array = fft_cases.operand_of(case)
    full = fft_cases.wanted(case, array)
    source = decode(case["inputs"][rank])
    target = source if case["outputs"] is None else decode(case["outputs"][rank])
    part, want = part_of(array, source, rank, size), part_of(full, target, rank, size)
    operand, view, around = placed(context, library, part, case["stores"][rank])
    dtype = to_numpy(fft_cases.result_dtype(case))
    out, whole = None, None
    if case["out"] == "operand" and (part.shape, part.dtype) == (want.shape, dtype):
        out = operand
    elif case["out"] not in ("none", "operand"):
        blank = np.zeros(want.shape, dtype)
        out, _, whole = placed(context, library, blank, case["out"])
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
    host = library.host_view(got)
    assert (host.dtype, host.shape) == (dtype, want.shape)
    axes = range(array.ndim) if case["axes"] is None else case["axes"]
    assert fft_cases.close(host, want, math.prod(full.shape[axis] for axis in axes))
    if out is None:
        assert is_symmetric(got) == case["stores"][rank].startswith("heap")
    if out is not operand:
        assert view.tobytes() == part.tobytes()
    assert untouched(around, part.shape)
    assert untouched(whole, want.shape)


@settings(max_examples=500, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(case=fft_cases.cases())
def test_any_transform(contexts, case):
    contexts.run(run_case, case, ranks=case["size"])
