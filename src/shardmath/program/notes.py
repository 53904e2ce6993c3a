"""Notes: what a rank sends in every call beside the digest of its spec.

    numbers   such as alpha and beta, which are no part of a plan: they may differ between calls
    tag       of the plan for which the rank has prepared, or UNPREPARED
    parts     of any length, such as the places where peers read the rank's arrays

The ranks compare the numbers that a program needs to be equal on all.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shardmath.context.agreement import checked, require_equal
from shardmath.symmetric.board import Board

Number = float | complex | None
Numbers = Mapping[str, Number]

TAG_BYTES = 8
UNPREPARED = bytes(TAG_BYTES)
_LENGTH = struct.Struct("<H")
_NUMBER = struct.Struct("<?dd")  # whether it is known to the host; real and imaginary part
PLAIN = frozenset([float, complex, type(None)])  # types that need no conversion


def number(name: str, value: Any) -> Number:
    """`value` as a Python number, None for None. Raises ValueError if it is not a number."""
    if value is None:
        return None
    try:
        if not isinstance(value, (str, bytes)):
            return complex(value) if is_complex(value) else float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(f"{name} is a number, not {value!r}")


def is_complex(value: Any) -> bool:
    """Whether a number, or an array of one, is complex by its type."""
    return isinstance(value, complex) or "complex" in str(getattr(value, "dtype", ""))


def real(numbers: Numbers, name: str) -> float:
    """The real number of that name, which is known to the host."""
    number = numbers[name]
    assert isinstance(number, float), name
    return number


def numbers_bytes(names: Sequence[str]) -> int:
    """The bytes of the packed numbers of these names."""
    return len(names) * _NUMBER.size


def pack_numbers(numbers: Numbers) -> bytes:
    """The numbers in order, packed for the beginning of a note."""
    return b"".join(
        _NUMBER.pack(False, 0, 0) if x is None else _NUMBER.pack(True, x.real, x.imag)
        for x in numbers.values()
    )


def agree_on_numbers(
    board: Board, names: Sequence[str], equal: Sequence[str], notes: Sequence[bytes]
) -> None:
    """Raise CollectiveMismatch on all ranks if they differ in a number that has to be `equal`.

    All ranks' `notes` begin with their numbers of these `names`. If the host of a rank does not
    know a number, it is compared on the other ranks.
    """
    length = numbers_bytes(names)
    if not equal or all(note[:length] == notes[0][:length] for note in notes):
        return

    def compare(notes: Sequence[bytes]) -> None:
        numbers_by_rank = [list(_NUMBER.iter_unpack(note[:length])) for note in notes]
        for index, name in enumerate(names):
            if name not in equal:
                continue
            known = [own[index] for own in numbers_by_rank if own[index][0]]
            values = [own[index] if own[index][0] else known[0] for own in numbers_by_rank if known]
            require_equal(name, [_plain(real, imaginary) for _, real, imaginary in values])

    checked(board, compare, notes)


def _plain(real: float, imaginary: float) -> complex:
    """A number as messages show it."""
    return complex(real, imaginary) if imaginary else real


def pack_parts(parts: Iterable[bytes]) -> bytes:
    """The parts of a note, each preceded by its length."""
    return b"".join([_LENGTH.pack(len(part)) + part for part in parts])


def unpack_parts(note: bytes, start: int = 0) -> list[bytes]:
    """The parts of a note, which begin at byte `start`."""
    parts = []
    while start < len(note):
        (length,) = _LENGTH.unpack_from(note, start)
        start += _LENGTH.size + length
        parts.append(note[start - length : start])
    return parts
