"""The exceptions of shardmath, and when they are raised.

Each derives from the built-in that a caller would expect, so that `except TimeoutError` works, and
from `ShardmathError`, so that one clause catches them all. A message says what was given, what was
expected, on which rank, and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "BackendUnavailable",
    "BindDistributionError",
    "BootstrapError",
    "CollectiveMismatch",
    "ConvertDistributionError",
    "CudaError",
    "DataRace",
    "HeapExhausted",
    "InvalidDevice",
    "InvalidDirectSolverState",
    "InvalidFFTState",
    "InvalidMatmulState",
    "InvalidRedistributeState",
    "OpTimeout",
    "RankFailure",
    "ShardmathError",
    "UseAfterFree",
]


def __dir__() -> list[str]:
    return sorted(__all__)


class ShardmathError(Exception):
    """Base of every exception of this package."""


class RankFailure(ShardmathError, RuntimeError):
    """A peer died, or left, while this rank waited for it. `ranks` names the peers."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class OpTimeout(ShardmathError, TimeoutError):
    """A wait reached its deadline. `ranks` names the peers that had not arrived."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class CollectiveMismatch(ShardmathError, ValueError):
    """The ranks called different operations, or one operation with arguments that do not fit."""


class DataRace(ShardmathError, RuntimeError):
    """Two ranks used the same symmetric memory, one of them to write, and nothing orders the two.

    Raised only with SHARDMATH_CHECK=1, on the rank that finds it.
    """


class UseAfterFree(ShardmathError, RuntimeError):
    """Symmetric memory was used, or freed again, after it had been freed."""


class HeapExhausted(ShardmathError, MemoryError):
    """Symmetric memory could not grow. `need` and `have` are bytes."""

    def __init__(self, message: str, *, need: int = 0, have: int = 0) -> None:
        super().__init__(message)
        self.need = need
        self.have = have


class BootstrapError(ShardmathError, ConnectionError):
    """The ranks could not find each other at start-up."""


class BackendUnavailable(ShardmathError, ImportError):
    """A library that this call needs is missing; the message holds the pip line to run."""


class CudaError(ShardmathError, RuntimeError):
    """A call of the CUDA driver or compiler failed; the message names the call and the reason."""


class BindDistributionError(ShardmathError, ValueError):
    """A distribution does not fit the global shape, the local shape or the number of ranks."""


class ConvertDistributionError(ShardmathError, ValueError):
    """Two kinds of distribution cannot describe the same layout."""


class InvalidDevice(ShardmathError, TypeError, ValueError):
    """`device_id` is neither "cpu" nor the index of a CUDA device.

    nvmath.distributed raises TypeError for what is no integer.
    """


class InvalidDirectSolverState(ShardmathError, RuntimeError):
    """A `DirectSolver` was used after `free`."""


class InvalidFFTState(ShardmathError, RuntimeError):
    """An `FFT` was used after `free`."""


class InvalidMatmulState(ShardmathError, RuntimeError):
    """A `Matmul` was used after `free`."""


class InvalidRedistributeState(ShardmathError, RuntimeError):
    """A `Redistribute` or `Reshape` was used after `free`."""
