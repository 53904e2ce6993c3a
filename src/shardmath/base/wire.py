"""Plain data as bytes and back: the messages between ranks, with nothing executable in them.

The form is JSON, with a one-key object for each type that JSON lacks; the elements of larger arrays
follow the JSON as they lie in memory. Only plain data is accepted: None, bool, int, float, complex,
str, bytes, tuple, list, dict, NumPy arrays and scalars of numbers and strings, and torch CPU
tensors. Nothing that a peer sends can run code here.

    length of the JSON (8 bytes) · JSON · the arrays, one after the other
"""

from __future__ import annotations

import binascii
import importlib
import json
import struct
from typing import Any

import numpy as np

_LENGTH = struct.Struct("<Q")
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError, ImportError)
_KNOWN = frozenset((str, int, float, bool, type(None)))  # to JSON; subclasses are converted first
_ENCODER = json.JSONEncoder(separators=(",", ":"), check_circular=False)  # _pack has looked
_INLINE = 256  # bytes; smaller arrays stand in the JSON itself


def encode(value: Any) -> bytes:
    """The bytes of `value`. Raises TypeError for anything that is not plain data."""
    blobs: list[bytes] = []
    text = _ENCODER.encode(_pack(value, blobs)).encode()
    return b"".join((_LENGTH.pack(len(text)), text, *blobs))


def decode(data: bytes) -> Any:
    """The value that `encode` was given. Raises ValueError when `data` is not of its form."""
    view = memoryview(data)
    try:
        (length,) = _LENGTH.unpack_from(view)
        start = _LENGTH.size
        text = str(view[start : start + length], "utf-8")
        if len(view) <= start + length:
            return _WITHOUT_BLOBS.decode(text)
        blobs = _Blobs(view[start + length :])
        value = json.JSONDecoder(object_hook=blobs.value).decode(text)
        blobs.finish()
        return value
    except (*_MALFORMED, struct.error) as error:
        raise ValueError(f"malformed message: {error}") from None


def _pack(value: Any, blobs: list[bytes]) -> Any:
    # Most of a message is tuples of plain values: testing these here saves a call for each.
    kind = type(value)
    if kind in _KNOWN:
        return value
    packed: Any
    if kind is tuple:
        packed = {"tuple": [x if type(x) in _KNOWN else _pack(x, blobs) for x in value]}
    elif kind is list:
        packed = [x if type(x) in _KNOWN else _pack(x, blobs) for x in value]
    elif isinstance(value, str):
        packed = value
    elif isinstance(value, list):
        packed = _pack(list(value), blobs)
    elif isinstance(value, tuple):
        packed = _pack(tuple(value), blobs)
    elif isinstance(value, dict):
        packed = {"items": [[_pack(key, blobs), _pack(value[key], blobs)] for key in value]}
    elif isinstance(value, (bytes, bytearray, memoryview)):
        packed = {"bytes": _pack_raw(bytes(value), blobs)}
    elif isinstance(value, complex) and not isinstance(value, np.generic):
        packed = {"complex": [value.real, value.imag]}
    elif isinstance(value, (np.ndarray, np.generic)) and _dtype_name(value.dtype):
        kind_of = "array" if isinstance(value, np.ndarray) else "scalar"
        raw = _pack_raw(value.tobytes(), blobs)
        packed = {kind_of: [_dtype_name(value.dtype), list(value.shape), raw]}
    elif kind.__module__.split(".")[0] == "torch" and hasattr(value, "untyped_storage"):
        packed = {"tensor": _pack_tensor(value, blobs)}
    else:
        raise TypeError(
            f"{_kind(value)} cannot be sent between ranks; send numbers, strings, bytes, tuples, "
            "lists, dictionaries, NumPy arrays of numbers or strings, or torch CPU tensors"
        )
    return packed


def _kind(value: Any) -> str:
    if isinstance(value, (np.ndarray, np.generic)):
        return f"a NumPy array of dtype {value.dtype}"
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _pack_raw(raw: bytes, blobs: list[bytes]) -> Any:
    """Small content as text, larger content as its size; it then follows the JSON."""
    if len(raw) <= _INLINE:
        return binascii.b2a_base64(raw, newline=False).decode()
    blobs.append(raw)
    return len(raw)


def _pack_tensor(tensor: Any, blobs: list[bytes]) -> list[Any]:
    if tensor.device.type != "cpu" or tensor.is_sparse or tensor.is_quantized:
        raise TypeError(
            f"a torch tensor on {tensor.device} with layout {tensor.layout} cannot be sent "
            "between ranks; send a dense CPU tensor"
        )
    torch = importlib.import_module("torch")
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    raw = plain.view(torch.uint8).numpy().tobytes()
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), _pack_raw(raw, blobs)]


def _dtype_name(dtype: np.dtype[Any]) -> str | None:
    """How the dtype is written; None for one that cannot be sent (objects, records, dates)."""
    if dtype.kind in "biufcSU":
        return dtype.str
    if dtype.type.__module__ == "ml_dtypes":
        return dtype.name
    return None


class _Blobs:
    """The arrays after the JSON, taken in order."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def take(self, raw: Any) -> bytearray:
        if isinstance(raw, str):
            return bytearray(binascii.a2b_base64(raw, strict_mode=True))
        if not isinstance(raw, int) or not 0 <= raw <= len(self._data):
            raise ValueError("it is shorter than it says")
        taken, self._data = self._data[:raw], self._data[raw:]
        return bytearray(taken)

    def value(self, encoded: dict[str, Any]) -> Any:
        """The value of an object of the JSON, whose contents have been decoded already."""
        ((kind, body),) = encoded.items()
        result: Any
        match kind:
            case "tuple":
                result = tuple(body)
            case "items":
                result = dict(body)
            case "bytes":
                result = bytes(self.take(body))
            case "complex":
                result = complex(*body)
            case "array":
                result = _unpack_array(body, self)
            case "scalar":
                result = _unpack_array(body, self)[()]
            case "tensor":
                result = _unpack_tensor(body, self)
            case _:
                raise ValueError(f"unknown kind {kind!r}")
        return result

    def finish(self) -> None:
        if len(self._data):
            raise ValueError("it is longer than it says")


_WITHOUT_BLOBS = json.JSONDecoder(object_hook=_Blobs(memoryview(b"")).value)


def _unpack_array(body: Any, blobs: _Blobs) -> Any:
    name, shape, raw = body
    if name[0] not in "<>|":
        importlib.import_module("ml_dtypes")  # it registers the names of its dtypes
    dtype = np.dtype(name)
    if dtype.hasobject:
        raise ValueError(f"dtype {name!r}")
    return np.frombuffer(blobs.take(raw), dtype).reshape(_checked_shape(shape))


def _unpack_tensor(body: Any, blobs: _Blobs) -> Any:
    name, shape, raw = body
    torch = importlib.import_module("torch")
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype {name!r}")
    content = blobs.take(raw)
    if not content:
        return torch.empty(_checked_shape(shape), dtype=dtype)
    return torch.frombuffer(content, dtype=torch.uint8).view(dtype).reshape(_checked_shape(shape))


def _checked_shape(shape: Any) -> tuple[int, ...]:
    if not all(type(extent) is int and extent >= 0 for extent in shape):
        raise ValueError(f"shape {shape!r}")
    return tuple(shape)
