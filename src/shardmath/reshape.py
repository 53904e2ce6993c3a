"""`reshape` and `Reshape`: redistribution under the names of nvmath.distributed 0.9, box to box.

The global shape does not change. Each rank gives the box that it holds and the box that it wants.
"""

from __future__ import annotations

from typing import Any

from shardmath.arrays import Array
from shardmath.geometry import Box
from shardmath.operators.redistribute.api import Redistribute, redistribute
from shardmath.operators.redistribute.operation import RedistributeOptions

__all__ = ["Reshape", "ReshapeOptions", "reshape"]


def __dir__() -> list[str]:
    return sorted(__all__)


ReshapeOptions = RedistributeOptions


def reshape(
    operand: Array,
    /,
    input_box: Box,
    output_box: Box,
    *,
    sync_symmetric_memory: bool = True,
    options: ReshapeOptions | dict[str, Any] | None = None,
    stream: Any = None,
    out: Any = None,
) -> Array:
    """Return `output_box` of the array of which `operand` is this rank's `input_box`. Collective.

    Errors and everything else as `shardmath.distribution.redistribute`.
    Source: nvmath.distributed.reshape.reshape, version 0.9.
    """
    return redistribute(
        operand,
        input_box,
        output_box,
        sync_symmetric_memory=sync_symmetric_memory,
        options=options,
        stream=stream,
        out=out,
    )


class Reshape(Redistribute[Array]):
    """`Redistribute` under its older name, from box to box.

    Source: nvmath.distributed.reshape.Reshape, version 0.9.
    """

    noun = "Reshape"

    def __init__(
        self,
        operand: Array,
        /,
        input_box: Box,
        output_box: Box,
        *,
        options: ReshapeOptions | dict[str, Any] | None = None,
        stream: Any = None,
    ) -> None:
        super().__init__(operand, input_box, output_box, options=options, stream=stream)
