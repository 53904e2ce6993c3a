"""What Python and Triton know of symm.cuh's structs is what the compiler makes of them.

Needs NVRTC, but no GPU; a rank of its own, as NVRTC looks at the driver.
"""

from __future__ import annotations

import pytest

from ranks import Pool
from shardmath.cuda import compile as compiling
from shardmath.errors import BackendUnavailable
from shardmath.symmetric import layout

HEAD = """
#include "symm.cuh"
using namespace shardmath;
#define at(type, member) __INTADDR__(&((type*)0)->member)
"""


def facts(size):
    """A C++ expression, and what it is here."""
    return {
        "sizeof(Pad)": layout.PAD_BYTES,
        "sizeof(Channel)": layout.CHANNEL_BYTES * size,
        "alignof(Channel)": layout.PAD_ALIGNMENT,
        "at(Pad, failed)": layout.FAILED,
        "at(Channel, signal)": layout.SIGNAL * size,
        "at(Channel, barrier)": layout.BARRIER * size,
        "at(Channel, round)": layout.ROUND * size,
        "at(Channel, sent)": layout.SENT * size,
        "at(Channel, taken)": layout.TAKEN * size,
        "at(Team, rank)": 0,
        "at(Team, size)": 4,
        "at(Team, channels)": layout.TEAM_CHANNELS,
        "at(Team, timeout)": layout.TEAM_TIMEOUT,
        "at(Team, status)": layout.TEAM_STATUS,
        "at(Team, pad)": layout.TEAM_PADS,
        "sizeof(Team)": layout.TEAM_BUFFERS + 8 * size,
        "sizeof(SymmetricMemory)": layout.TEAM_BUFFERS + 24 * size,
        "at(Status, late)": layout.LATE,
        "sizeof(Late)": layout.LATE_BYTES,
        "at(Late, expected)": 8,
        "at(Late, seen)": 16,
        "kBarrier": layout.OF_BARRIER,
        "kSignal": layout.OF_SIGNAL,
        "kCollective": layout.OF_COLLECTIVE,
        "kUser": layout.OF_USER,
        "kFlag": layout.OF_FLAG,
        "kNoChannel": layout.NO_CHANNEL,
        "kNoPeer": layout.NO_PEER,
        "kWrongRanks": layout.WRONG_RANKS,
        "kProduct": layout.OF_PRODUCT,
    }


def check(_, size, off_by):
    try:
        compiling._nvrtc()
    except BackendUnavailable as missing:
        return f"missing: {missing}"
    lines = [
        f'static_assert({what} == {value + off_by}, "");' for what, value in facts(size).items()
    ]
    source = "\n".join([HEAD, *lines])
    try:
        compiling.compiled_source(source, [f"-DSHARDMATH_RANKS={size}"], "sm_90")
    except compiling.CudaError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("size", [1, 2, 3, 8, 72])
def test_structs(size):
    with Pool(1) as ranks:
        (found,) = ranks.run(check, size, 0)
        if found.startswith("missing"):
            pytest.skip(found)
        assert found == ""
        (found,) = ranks.run(check, size, 1)
        assert found.count("static assertion failed") == len(facts(size))


def test_the_number_of_ranks_must_be_said():
    with Pool(1) as ranks:
        (found,) = ranks.run(check_unsaid)
        if found.startswith("missing"):
            pytest.skip(found)
        assert "SHARDMATH_RANKS" in found


def check_unsaid(_):
    try:
        compiling.compiled_source('#include "symm.cuh"\n', [], "sm_90")
    except BackendUnavailable as missing:
        return f"missing: {missing}"
    except compiling.CudaError as error:
        return str(error)
    return ""
