"""What a rank says of its call of a collective, for all ranks to compare."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

from shardmath.arrays.spec import ArraySpec
from shardmath.collectives.forms import Form
from shardmath.collectives.operand import OutputSpec, Shape

if TYPE_CHECKING:
    from shardmath.collectives.device_operand import DeviceOperand

__all__ = ["NO_ROOT", "Call", "call_spec"]

NO_ROOT = "the root of a broadcast passes an array, not None"


class Call(NamedTuple):
    """A collective on GPUs and the arguments of one call, but for `x` and `out`.

    `x` may be left out where it is `optional`, and this rank is none that `gives` it.
    `describe(spec)` is the arguments in normal form for an `x` like that, None without one, for all
    ranks to compare; it raises for wrong ones. `build` makes the plan of the specs of all ranks
    (`call_spec`), as for `agree_plan`. `on_device(operand, plan)` gives the result.

    `form` says how such calls run ahead. `result(operand, plan)`, for a call whose result has the
    same dtype and shape each time, is these of this rank's; None where its ranks meet all the same.
    """

    operation: str
    arguments: tuple[Any, ...]
    describe: Callable[[ArraySpec | None], tuple[Hashable, ...]]
    build: Callable[[list[Any]], Any]
    on_device: Callable[[DeviceOperand, Any], Any]
    form: Form
    result: Callable[[DeviceOperand, Any], tuple[str, Shape] | None] | None = None
    gives: bool = True
    optional: bool = False


def call_spec(
    kind: str, spec: ArraySpec, out: OutputSpec, arguments: tuple[Hashable, ...]
) -> tuple[Hashable, ...]:
    """A rank's spec of a call; `kind` is the library of `x`, and where its memory is."""
    return (kind, spec.dtype, spec.shape, out, *arguments)
