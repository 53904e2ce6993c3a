"""The options of a Fourier transform, and where they are checked.

Options are frozen; a dictionary is accepted in their place.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from enum import IntEnum
from logging import Logger
from typing import Any, Literal

from shardmath.base.untraced import constant_to_compiler
from shardmath.operators.arguments import check_common

FFTType = Literal["C2C", "C2R", "R2C"]

# The options that must be equal on all ranks.
COMPARED = ("fft_type", "redistribute", "last_axis_parity", "inplace", "blocking", "halves")


class FFTDirection(IntEnum):
    """The sign of the exponent. Source: nvmath.distributed.fft.FFTDirection."""

    FORWARD = -1
    INVERSE = 1


@constant_to_compiler
@dataclass(frozen=True)
class FFTOptions:
    """How a transform is done.

    `fft_type`: "C2C", "R2C" or "C2R"; None follows the operand's type. `redistribute`: True gives
    the result in the operand's distribution; False leaves out the last exchange: a slab along a
    transformed axis becomes a slab along the first other axis (X becomes Y, all others X), and an
    operand that needs no exchange stays as it is. `last_axis_parity`: whether a C2R result is
    "even" or "odd" along its last transformed axis. `inplace`: the result takes the operand's
    memory. `halves`: a float16 torch tensor gives complex32, as in torch.fft, and not complex64.
    `logger` is told what each call plans; without one, a logger below "shardmath" is told of each
    plan once. `blocking`: True or "auto"; host operands always block. `reshape` is the older name
    of `redistribute`.

    Raises TypeError where `logger` is not a logging.Logger, ValueError for other invalid values.
    Source: nvmath.distributed.fft.FFTOptions; `inplace` and `halves` are ours.
    """

    fft_type: FFTType | None = None
    redistribute: bool = True
    last_axis_parity: Literal["even", "odd"] = "even"
    logger: Logger | None = None
    blocking: Literal[True, "auto"] = "auto"
    inplace: bool = False
    halves: bool = False
    reshape: InitVar[bool | None] = None

    def __post_init__(self, reshape: bool | None) -> None:
        if reshape is not None:
            object.__setattr__(self, "redistribute", reshape)
        if self.fft_type not in (None, "C2C", "C2R", "R2C"):
            raise ValueError(f'fft_type is "C2C", "R2C", "C2R" or None, not {self.fft_type!r}')
        if self.last_axis_parity not in ("even", "odd"):
            raise ValueError(f'last_axis_parity is "even" or "odd", not {self.last_axis_parity!r}')
        check_common(self, ("redistribute", "inplace", "halves"))

    def compared(self) -> tuple[Any, ...]:
        """The values of `COMPARED`, which must be equal on all ranks."""
        return tuple(getattr(self, name) for name in COMPARED)


Options = FFTOptions | dict[str, Any] | None  # as users give them


def direction_of(direction: Any) -> FFTDirection:
    """A direction given as an FFTDirection, -1, 1, "forward" or "inverse".

    Raises ValueError for anything else.
    """
    named = {"forward": FFTDirection.FORWARD, "inverse": FFTDirection.INVERSE}
    try:
        known = named[direction.lower()] if isinstance(direction, str) else FFTDirection(direction)
    except (KeyError, ValueError, TypeError):
        raise ValueError(
            f'direction is an FFTDirection, -1, 1, "forward" or "inverse", not {direction!r}'
        ) from None
    return known
