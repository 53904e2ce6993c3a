"""What a rank says of its call of a collective, for all ranks to compare."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

from shardmath.arrays.spec import ArraySpec
from shardmath.collectives.operand import OutputSpec, Shape

if TYPE_CHECKING:
    from shardmath.collectives.device_operand import DeviceOperand

__all__ = ["Call", "call_spec"]


class Call(NamedTuple):
    """A collective on GPUs and the arguments of one call, but for `x` and `out`.

    `describe(spec)` is the arguments in normal form for an `x` like that, for all ranks to compare;
    it raises for wrong ones. `build` makes the plan of the specs of all ranks (`call_spec`), as for
    `agree_plan`. `on_device(operand, plan)` gives the result. `result(operand, plan)`, for a call
    in which a rank's arguments say what all ranks' are, is the dtype and shape of this rank's
    result; None where its ranks meet all the same.
    """

    operation: str
    arguments: tuple[Any, ...]
    describe: Callable[[ArraySpec], tuple[Hashable, ...]]
    build: Callable[[list[Any]], Any]
    on_device: Callable[[DeviceOperand, Any], Any]
    result: Callable[[DeviceOperand, Any], tuple[str, Shape] | None] | None = None


def call_spec(
    kind: str, spec: ArraySpec, out: OutputSpec, arguments: tuple[Hashable, ...]
) -> tuple[Hashable, ...]:
    """A rank's spec of a call; `kind` is the library of `x`, and where its memory is."""
    return (kind, spec.dtype, spec.shape, out, *arguments)
