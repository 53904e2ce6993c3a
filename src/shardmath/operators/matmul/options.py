"""The options of a matrix product, and where they are checked.

Options are frozen; a dictionary is accepted in their place. Numbers for types and algorithms are
those of nvmath.distributed, so that programs written for it need no change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from logging import Logger
from typing import Any, Literal

import numpy as np

from shardmath.arrays import dtypes
from shardmath.arrays.dtypes import FLOAT8, HALVES
from shardmath.base.untraced import constant_to_compiler
from shardmath.operators.arguments import check_common, options_of

matrix_qualifiers_dtype = np.dtype(
    [("structure", object), ("is_transpose", "<i1"), ("is_conjugate", "<i1")]
)


class MatmulComputeType(IntEnum):
    """The type in which products are summed; the values are cuBLAS's."""

    COMPUTE_16F = 64
    COMPUTE_16F_PEDANTIC = 65
    COMPUTE_32F = 68
    COMPUTE_32F_PEDANTIC = 69
    COMPUTE_64F = 70
    COMPUTE_64F_PEDANTIC = 71
    COMPUTE_32I = 72
    COMPUTE_32I_PEDANTIC = 73
    COMPUTE_32F_FAST_16F = 74
    COMPUTE_32F_FAST_16BF = 75
    COMPUTE_32F_FAST_TF32 = 77
    COMPUTE_32F_EMULATED_16BFX9 = 78
    COMPUTE_64F_EMULATED_FIXEDPOINT = 79


class MatmulAlgoType(IntEnum):
    """The algorithms of nvmath.distributed, accepted and not used: see `MatmulOptions.strategy`."""

    DEFAULT = 0
    SPLIT_P2P = 1
    SPLIT_MULTICAST = 2
    ATOMIC_P2P = 3
    ATOMIC_MULTICAST = 4
    NO_OVERLAP = 5


@constant_to_compiler
@dataclass(frozen=True)
class MatmulOptions:
    """How a product is computed.

    `inplace`: the result overwrites c. `compute_type`, `scale_type`, `result_type`, `algo_type`:
    numbers of nvmath.distributed, None for the default; `result_type` may be wider than the
    operands' type, and any floating type of up to 32 bits for float8 operands. `result_amax`: the
    greatest absolute value of a float8 result, before it is scaled and rounded, is returned too, as
    "result_amax". `logger` is told what each call plans; without one, a logger below "shardmath" is
    told of each plan once. `strategy` names the strategy to use instead of the one predicted to be
    fastest, by its kind ("all-gather", "stationary-c", "reduce-scatter", "all-reduce", "replicate",
    "redistribute", ...) or by its label in what `explain` prints ("grid 2 x 2 x 1"). `blocking`:
    True, or "auto" (operands in host memory always block). `algo_type` and
    `sm_count_communication`, the number of multiprocessors that are to communicate, are compared
    between the ranks and otherwise have no effect: `strategy` chooses. `block_scaling` is refused,
    as no supported GPU has it.

    Raises ValueError or TypeError for a value that is not of its option's kind. Source:
    nvmath.distributed.linalg.advanced.MatmulOptions; `strategy` is ours.
    """

    inplace: bool = False
    compute_type: int | None = None
    scale_type: int | None = None
    result_type: int | None = None
    algo_type: int | None = None
    result_amax: bool = False
    block_scaling: bool = False
    sm_count_communication: int | None = None
    logger: Logger | None = None
    blocking: Literal[True, "auto"] = "auto"
    strategy: str | None = None

    @property
    def compared(self) -> tuple[tuple[str, Any], ...]:
        """The options that must be equal on all ranks, by name, as plain data."""
        flags = ((name, bool(getattr(self, name))) for name in _FLAGS)
        numbers = ((name, getattr(self, name)) for name in _NUMBERS)
        plain = ((name, None if number is None else int(number)) for name, number in numbers)
        return (*flags, *plain, ("blocking", self.blocking), ("strategy", self.strategy))

    def __post_init__(self) -> None:
        check_common(self)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), (bool, np.bool_)):
                raise ValueError(f"{name} is True or False, not {getattr(self, name)!r}")
        for name in _NUMBERS:
            number = getattr(self, name)
            whole = isinstance(number, (int, np.integer)) and not isinstance(number, bool)
            if number is not None and not whole:
                raise ValueError(f"{name} is a whole number or None, not {number!r}")
        if self.strategy is not None and not isinstance(self.strategy, str):
            raise TypeError(f"strategy is a name that explain() prints, not {self.strategy!r}")

    def check(self, dtype: str) -> None:
        """Raise ValueError for a value out of range, or one that does not suit this dtype."""
        if self.algo_type is not None and self.algo_type not in set(MatmulAlgoType):
            raise ValueError(f"algo_type {self.algo_type!r} is not a MatmulAlgoType")
        computes, scalars = dtypes.of(dtype).computes, dtypes.of(dtype).scalars
        if self.compute_type is not None and self.compute_type not in computes:
            names = ", ".join(MatmulComputeType(value).name for value in sorted(computes))
            raise ValueError(
                f"compute_type {self.compute_type!r} does not suit operands of {dtype}; use {names}"
            )
        if self.scale_type is not None and self.scale_type not in scalars:
            names = " or ".join(str(dtypes.numbered(value)) for value in sorted(scalars))
            raise ValueError(
                f"scale_type {self.scale_type!r} does not suit operands of {dtype}; use {names}"
            )
        if (self.result_amax or self.block_scaling) and dtype not in FLOAT8:
            raise ValueError(f"result_amax and block_scaling want float8 operands, not {dtype}")
        if self.block_scaling:
            raise NotImplementedError(
                "block_scaling asks for scales of MX formats, which only GPUs of capability 10.0 "
                "have; for blocks of 128 x 128 or 1 x 128 elements leave it out, and pass float32 "
                "matrices as quantization_scales"
            )


@dataclass(frozen=True)
class MatmulEpilogPreferences:
    """Accepted with its defaults alone: float8 auxiliary outputs are not supported.

    Source: nvmath.distributed.linalg.advanced.MatmulEpilogPreferences.
    """

    aux_type: int | None = None
    aux_amax: bool = False


@dataclass(frozen=True)
class MatmulPlanPreferences:
    """Preferences of `plan`: `epilog`, a MatmulEpilogPreferences or a dictionary of its fields.

    Source: nvmath.distributed.linalg.advanced.MatmulPlanPreferences.
    """

    epilog: MatmulEpilogPreferences | Mapping[str, Any] | None = None

    def check(self) -> None:
        """Raise ValueError for a float8 auxiliary output, TypeError for an unknown preference."""
        epilog = options_of(MatmulEpilogPreferences, self.epilog, "preferences.epilog")
        if epilog.aux_type is not None or epilog.aux_amax:
            raise ValueError(
                "preferences.epilog: aux_type and aux_amax are for a float8 auxiliary output, "
                "which no epilog has here: leave both out. gelu_aux has the type of D, or of c "
                "(float16 without c) beside a float8 D"
            )


@dataclass(frozen=True)
class MatmulQuantizationScales:
    """Scales of float8 operands, and of a float8 result: D = d F(alpha (a A) @ (b B) + beta c C).

    a and b: a number, or a float32 array with one element, for the whole matrix; or a float32 array
    for this rank's part of it, m x k of op(A) or k x n of op(B):

        one scale for            a                         b
        each row, each column    (m,) or (m, 1)            (n,) or (1, n)
        128 elements along k     (m, ceil(k / 128))        (ceil(k / 128), n)
        128 x 128 elements       (ceil(m / 128), ...)      (..., ceil(n / 128))

    Blocks are counted from the first element of a rank's part, in any distribution. Scales of two
    axes are transposed where the operand is. Ranks that hold the same elements give the same
    scales; numbers must be equal on all ranks. c, for a float8 c, and d are numbers or arrays of
    one element. Arrays are of the operands' library, in the operands' memory or the host's.

    Source: nvmath.distributed.linalg.advanced.MatmulQuantizationScales, which takes numbers only.
    """

    a: Any = None
    b: Any = None
    c: Any = None
    d: Any = None


def result_dtype(options: MatmulOptions, dtype: str, addend: str | None = None) -> str:
    """The name of D's type for operands of `dtype`, and c of type `addend`.

    Raises ValueError where D cannot have the type that the options ask for.
    """
    if options.result_type is None:
        return addend if dtype in FLOAT8 and addend in FROM_FLOAT8 else dtype
    wanted = dtypes.numbered(options.result_type)
    allowed: tuple[str, ...] = (dtype,)
    if dtype in FLOAT8:
        allowed = FROM_FLOAT8
    elif dtype in HALVES:
        allowed = (dtype, dtypes.accumulator(dtype).name)
    if wanted is None or wanted.name not in allowed:
        shown = wanted or f"type number {options.result_type}"
        names = " or ".join(allowed)
        raise ValueError(f"operands of {dtype} give a result of {names}, not {shown}")
    return wanted.name


def extras_dtype(result: str, addend: str | None = None) -> str:
    """The type of a bias, of GELU's auxiliary matrix and of bias gradients: that of D, or beside a
    float8 D that of c, or float16 where there is no c of a wider type.
    """
    if result not in FLOAT8:
        return result
    return "float16" if addend is None or addend in FLOAT8 else addend


_FLAGS = ("inplace", "result_amax", "block_scaling")
_NUMBERS = ("compute_type", "scale_type", "result_type", "algo_type", "sm_count_communication")


MULTIPLIED = dtypes.names(lambda row: row.computes)
FROM_FLOAT8 = dtypes.names(lambda row: row.computes and row.kind == "f" and row.itemsize <= 4)
