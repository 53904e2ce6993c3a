"""What Python and Triton know of symm.cuh's structs is what the compiler makes of them.

Needs NVRTC, but no GPU; a rank of its own, as NVRTC looks at the driver.
"""

from __future__ import annotations

import pytest

from ranks import Pool
from shardmath.cuda import compile as compiling
from shardmath.errors import BackendUnavailable
from shardmath.symmetric import structs

HEAD = """
#include "symm.cuh"
using namespace shardmath;
#define at(type, member) __INTADDR__(&((type*)0)->member)
"""


def facts(size):
    """A C++ expression, and what it is here."""
    return {
        "sizeof(Pad)": structs.PAD_BYTES,
        "sizeof(Channel)": structs.CHANNEL_BYTES * size,
        "alignof(Channel)": structs.PAD_ALIGNMENT,
        "at(Pad, failed)": structs.FAILED,
        "at(Channel, signal)": structs.SIGNAL * size,
        "at(Channel, barrier)": structs.BARRIER * size,
        "at(Channel, round)": structs.ROUND * size,
        "at(Channel, sent)": structs.SENT * size,
        "at(Channel, taken)": structs.TAKEN * size,
        "at(Team, rank)": 0,
        "at(Team, size)": 4,
        "at(Team, channels)": structs.TEAM_CHANNELS,
        "at(Team, timeout)": structs.TEAM_TIMEOUT,
        "at(Team, status)": structs.TEAM_STATUS,
        "at(Team, pad)": structs.TEAM_PADS,
        "sizeof(Team)": structs.TEAM_BUFFERS + 8 * size,
        "sizeof(SymmetricMemory)": structs.TEAM_BUFFERS + 24 * size,
        "at(Status, late)": structs.LATE,
        "at(Status, gone)": structs.gone_place(size),
        "sizeof(Late)": structs.LATE_BYTES,
        "at(Late, expected)": 8,
        "at(Late, seen)": 16,
        "kBarrier": structs.OF_BARRIER,
        "kSignal": structs.OF_SIGNAL,
        "kCollective": structs.OF_COLLECTIVE,
        "kUser": structs.OF_USER,
        "kFlag": structs.OF_FLAG,
        "kNoChannel": structs.NO_CHANNEL,
        "kNoPeer": structs.NO_PEER,
        "kWrongRanks": structs.WRONG_RANKS,
        "kProduct": structs.OF_PRODUCT,
        "kWord": structs.OF_WORD,
        "kNoRoom": structs.NO_ROOM,
        "kBadRows": structs.BAD_ROWS,
        "kOtherRows": structs.OTHER_ROWS,
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
