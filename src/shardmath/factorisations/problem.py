"""A factorisation that all ranks have agreed on, and the options of the call. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from logging import Logger
from typing import Any, Literal

from shardmath.base.immutable import Immutable
from shardmath.geometry import BlockCyclic, Layout, ProcessGrid
from shardmath.machine import Machine
from shardmath.operators.arguments import check_logger

_LEAST_BLOCK = 16  # columns of a panel, where more would leave ranks without any
_PANELS_OF_A_RANK = 4


@dataclass(frozen=True)
class FactorisationOptions:
    """`logger` is told what each call plans; without one, a logger below "shardmath" is told of
    each plan once. `block_size` is the number of columns of a panel, by default that of the
    machine's table, or less where ranks would get less than four panels.

    Raises TypeError where `logger` is not a logging.Logger, ValueError for a `block_size` that is
    not a positive integer.
    """

    logger: Logger | None = None
    block_size: int | None = None

    def __post_init__(self) -> None:
        check_logger(self.logger)
        size = self.block_size
        if size is not None and not (type(size) is int and size > 0):
            raise ValueError(f"block_size is a positive integer or None, not {size!r}")


class Problem(Immutable):
    """The operation on an n x n matrix `a`, and perhaps on `b`, that all ranks have agreed on.

    `result` is the layout of the result. `flags` are the words of the call beside distributions;
    the last one says whether operands are checked for NaN and infinity. `block` is the number of
    columns of a panel that the caller asks for, None for that of the machine.
    """

    a: Layout
    b: Layout | None
    result: Layout
    dtype: str
    itemsize: int
    order: Literal["C", "F"]
    flags: tuple[Any, ...]
    block: int | None

    @property
    def n(self) -> int:
        """The number of rows and columns of the matrix."""
        return self.a.global_shape[0]

    @property
    def columns(self) -> int:
        """The number of right-hand sides."""
        if self.b is None:
            return 0
        return self.b.global_shape[1] if self.b.ndim == 2 else 1

    @property
    def check_finite(self) -> bool:
        """Whether operands are checked for NaN and infinity."""
        return bool(self.flags[-1])

    def block_on(self, machine: Machine) -> int:
        """The number of columns of a panel."""
        return self.block or panel_width(self.n, self.a.size, machine)


def panel_width(n: int, size: int, machine: Machine) -> int:
    """The number of columns of a panel of an n x n matrix on so many ranks."""
    share = n // (_PANELS_OF_A_RANK * size)
    return min(machine.rates.panel, max(_LEAST_BLOCK, share))


def dealt_columns(n: int, size: int, width: int) -> BlockCyclic:
    """Blocks of `width` columns, dealt to the ranks in turn: how factors are computed and read."""
    return BlockCyclic(ProcessGrid(shape=(1, size)), (max(n, 1), width))
