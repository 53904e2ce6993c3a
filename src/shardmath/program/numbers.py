"""The numbers of a call: values that may differ from one call to the next, and not between ranks.

They are no part of a plan. Each rank sends its own with the note of every call, and all ranks
compare those that a program takes from all alike.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

from shardmath.context.agreement import checked, require_equal
from shardmath.symmetric.board import Board

Number = float | complex | None
Numbers = Mapping[str, Number]

_NUMBER = struct.Struct("<?dd")  # whether it is known to the host; real and imaginary part
PLAIN = frozenset([float, complex, type(None)])  # types that need no conversion


def number(name: str, value: Any) -> Number:
    """`value` as a number of Python's, None for None. Raises ValueError for what is none."""
    if value is None:
        return None
    is_complex = isinstance(value, complex) or "complex" in str(getattr(value, "dtype", ""))
    try:
        if not isinstance(value, (str, bytes)):
            return complex(value) if is_complex else float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(f"{name} is a number, not {value!r}")


def real(numbers: Numbers, name: str) -> float:
    """A number that is known and has no imaginary part."""
    number = numbers[name]
    assert isinstance(number, float), name
    return number


def numbers_bytes(names: Sequence[str]) -> int:
    """How long the packed numbers of these names are."""
    return len(names) * _NUMBER.size


def pack_numbers(numbers: Numbers) -> bytes:
    """The numbers, in order, as a note begins with them."""
    return b"".join(
        _NUMBER.pack(False, 0, 0) if x is None else _NUMBER.pack(True, x.real, x.imag)
        for x in numbers.values()
    )


def agree_on_numbers(
    board: Board, names: Sequence[str], equal: Sequence[str], notes: Sequence[bytes]
) -> None:
    """Raise CollectiveMismatch on all ranks where they differ in a number that is to be `equal`.

    `notes`, of all ranks, begin with their numbers of these `names`. One that is not known to the
    host on some rank is compared on the others.
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
    """A number as it is best shown."""
    return complex(real, imaginary) if imaginary else real
