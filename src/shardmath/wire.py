"""Plain data as bytes and back: what ranks say to each other, with nothing executable in it.

The form is JSON, with a one-key object for each type that JSON lacks, and raw bytes in base64. Only
plain data travels: None, bool, int, float, complex, str, bytes, tuple, list, dict with string keys,
and NumPy arrays and scalars of ordinary dtypes. Nothing a peer sends can run code here.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np

__all__ = ["decode", "encode"]


def encode(value: Any) -> bytes:
    """The bytes of `value`. Raises TypeError for anything that is not plain data."""
    return json.dumps(_pack(value), separators=(",", ":")).encode()


def decode(data: bytes) -> Any:
    """The value that `encode` was given. Raises ValueError when `data` is not of its form."""
    try:
        return _unpack(json.loads(data))
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"malformed message: {error}") from None


def _pack(value: Any) -> Any:
    if value is None or isinstance(value, (bool, str)) or type(value) in (int, float):
        return value
    if isinstance(value, list):
        return [_pack(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [_pack(item) for item in value]}
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("only dictionaries with string keys travel between ranks")
        return {"dict": {key: _pack(item) for key, item in value.items()}}
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufcSUV":
        array = np.asarray(value)
        payload = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        return {kind: [array.dtype.str, list(array.shape), payload]}
    raise TypeError(
        f"{type(value).__module__}.{type(value).__qualname__} does not travel between ranks; "
        "send numbers, strings, bytes, tuples, lists, dictionaries or NumPy arrays"
    )


def _unpack(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpack(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, body),) = value.items()
    if kind == "tuple":
        return tuple(_unpack(item) for item in body)
    if kind == "dict":
        return {key: _unpack(item) for key, item in body.items()}
    if kind == "bytes":
        return base64.b64decode(body)
    if kind == "complex":
        return complex(*body)
    if kind in ("array", "scalar"):
        dtype, shape, payload = body
        array = np.frombuffer(base64.b64decode(payload), np.dtype(dtype)).reshape(shape).copy()
        return array if kind == "array" else array[()]
    raise ValueError(f"malformed message: unknown kind {kind!r}")
