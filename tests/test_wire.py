"""What travels between ranks comes back equal, and nothing else is accepted."""

from __future__ import annotations

import json
import math
import struct
from datetime import date
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from shardmath.base import wire

PLAIN = [
    None,
    True,
    -(2**70),
    1.5,
    -0.0,
    float("inf"),
    1 - 2j,
    "text é \n",
    b"",
    bytes(range(256)) * 3,
    (),
    (1, [2, (3,)], {"tuple": [1], "": None}),
    {0: 1.5, (1, "a"): {None: b"x" * 999}, "1": 2, 1: [3]},
]


@pytest.mark.parametrize("value", PLAIN)
def test_plain_data(value: Any) -> None:
    back = wire.decode(wire.encode(value))
    assert back == value and type(back) is type(value)
    assert repr(back) == repr(value)


def test_nan() -> None:
    assert math.isnan(wire.decode(wire.encode(float("nan"))))


DTYPES = ["?", "i1", "<u2", ">i4", "f2", "f4", "f8", "c8", "c16", "S3", "U4", ml_dtypes.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7, 9), (2, 0, 3), (31, 33)])
def test_arrays(dtype: Any, shape: tuple[int, ...]) -> None:
    array = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    for value in (array, array.T, array[::-1] if shape else array):
        back, mark = wire.decode(wire.encode((value, "mark")))
        np.testing.assert_array_equal(back, value)
        assert (back.dtype, back.shape, mark) == (value.dtype, value.shape, "mark")
        assert isinstance(back, np.ndarray) and back.flags.writeable
    if shape == ():
        scalar = wire.decode(wire.encode(array[()]))
        assert scalar == array[()]
        if array.dtype.kind not in "SU":  # which are Python's own strings, a little dressed up
            assert type(scalar) is type(array[()])


@pytest.mark.parametrize("name", ["float32", "bfloat16", "complex64", "bool", "float8_e4m3fn"])
@pytest.mark.parametrize("shape", [(), (0,), (7, 9), (31, 33)])
def test_torch_tensors(name: str, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(math.prod(shape)).remainder(5).reshape(shape).to(getattr(torch, name))
    for value in (tensor, tensor.T if len(shape) == 2 else tensor):
        back = wire.decode(wire.encode([value]))[0]
        assert (back.dtype, back.shape) == (value.dtype, value.shape)
        wide = torch.complex64 if name == "complex64" else torch.float32
        assert torch.equal(back.to(wide), value.to(wide))
    if name == "complex64":
        assert torch.equal(wire.decode(wire.encode(tensor.conj())), tensor.conj().resolve_conj())


REFUSED = [
    object(),
    len,
    {1, 2},
    {1: object()},
    date(2020, 1, 1),
    np.array([object()]),
    np.zeros(2, "i4,f4"),
    np.datetime64("2020"),
    torch.zeros(2).to_sparse(),
    torch.zeros(2, device="meta"),
]


@pytest.mark.parametrize("value", REFUSED)
def test_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be sent"):
        wire.encode([value])


def message(value: Any, rest: bytes = b"") -> bytes:
    text = json.dumps(value).encode()
    return struct.pack("<Q", len(text)) + text + rest


MALFORMED = [
    b"",
    b"1234567",
    struct.pack("<Q", 1 << 62),
    struct.pack("<Q", 1) + b"{",
    struct.pack("<Q", 1) + b"\xff",
    message({}),
    message({"a": 1, "b": 2}),
    message({"eval": "1"}),
    message({"tuple": 3}),
    message({"bytes": "no base64!"}),
    message({"bytes": 5}, b"1234"),
    message({"bytes": 5}, b"123456"),
    message({"bytes": -1}, b""),
    message({"array": ["<f8", [2], 8]}, b"12345678"),
    message({"array": ["<f8", [-1], 8]}, b"12345678"),
    message({"array": ["|O", [1], 8]}, b"12345678"),
    message({"array": ["os", [1], 8]}, b"12345678"),
    message({"tensor": ["load", [1], 8]}, b"12345678"),
    struct.pack("<Q", 100_000) + b"[" * 100_000,
]


@pytest.mark.parametrize("data", MALFORMED)
def test_malformed(data: bytes) -> None:
    with pytest.raises(ValueError, match="malformed message"):
        wire.decode(data)


def test_truncated_everywhere() -> None:
    data = wire.encode((np.arange(200.0), {"a": np.float32(1)}, [b"x" * 300]))
    for size in range(0, len(data), 13):
        with pytest.raises(ValueError):
            wire.decode(data[:size])
