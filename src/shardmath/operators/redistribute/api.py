"""`redistribute` and `Redistribute`: a call, and an object planned once and executed often."""

from __future__ import annotations

from typing import Any, ClassVar, Generic

from shardmath.arrays import Array
from shardmath.base.collective_call import collective_call, differentiable
from shardmath.base.untraced import untraced_methods
from shardmath.call.driver import call
from shardmath.call.planned import Planned
from shardmath.errors import InvalidRedistributeState
from shardmath.geometry import Distribution
from shardmath.operators.redistribute.operation import REDISTRIBUTE, RedistributeOptions
from shardmath.program.performing import Arguments


@differentiable
def redistribute(
    operand: Array,
    /,
    input_distribution: Distribution,
    output_distribution: Distribution | None = None,
    *,
    sync_symmetric_memory: bool = True,
    options: RedistributeOptions | dict[str, Any] | None = None,
    stream: Any = None,
    out: Any = None,
) -> Array:
    """Change the distribution of an array; return this rank's part of it. Collective.

        y = redistribute(x, Slab.X, Slab.Y)

    `operand` is this rank's local array: any number of axes, any element type and strides. A `Box`
    is this rank's own; any other distribution is the same on all ranks. The result is `out` if
    given; otherwise a new array of the operand's library, in its memory order, and on the symmetric
    heap if the operand is there. For a DistributedArray x, redistribute(x, Slab.Y) returns one.
    `sync_symmetric_memory` is accepted for programs written for nvmath.distributed: agreement
    orders the ranks anyway.

    Raises the same error on all ranks, before anything is written. ValueError: library, dtype,
    number of axes or options differ between ranks; local shapes do not fit the distributions; boxes
    overlap or leave gaps; `out` has another library, dtype or shape, is read-only, or overlaps the
    operand. TypeError: a distribution, an option or a stream that is not one. RuntimeError: before
    `initialize`, or after the array was freed.
    Source: nvmath.distributed.distribution.redistribute; `out` is ours.
    """
    words = (input_distribution, output_distribution)
    made: Array = call(REDISTRIBUTE, Arguments((operand,), (out,), words, options, stream))
    return made


@untraced_methods
class Redistribute(Planned, Generic[Array]):
    """A redistribution that is planned once and executed many times.

        with Redistribute(x, Slab.X, Slab.Y) as redistribution:
            redistribution.plan()
            y = redistribution.execute()

    Arguments and errors as `redistribute`. All methods but `reset_operand_unchecked`,
    `release_operand` and `free` are collective: an error on one rank is raised on all. After `free`
    they raise InvalidRedistributeState. Source: nvmath.distributed.distribution.Redistribute.
    """

    noun: ClassVar[str] = "Redistribute"
    invalid = InvalidRedistributeState

    def __init__(
        self,
        operand: Array,
        /,
        input_distribution: Distribution,
        output_distribution: Distribution,
        *,
        options: RedistributeOptions | dict[str, Any] | None = None,
        stream: Any = None,
    ) -> None:
        words = (input_distribution, output_distribution)
        super().__init__(REDISTRIBUTE, Arguments((operand,), (None,), words, options, stream))

    @collective_call
    def execute(
        self,
        stream: Any = None,
        release_workspace: bool = False,
        sync_symmetric_memory: bool = True,
        out: Any = None,
    ) -> Array:
        """The redistributed array: `out`, or a new one. Collective.

        With `release_workspace` the memory through which ordinary operands are read is freed.
        Raises RuntimeError before `plan` and after `release_operand`; errors of `out` as
        `redistribute`.
        """
        made: Array = self._execute((out,), stream, release_workspace=release_workspace)
        return made

    def reset_operand(self, operand: Array, *, stream: Any = None) -> None:
        """Execute on `operand` from now on; strides and memory may differ from before. Collective.

        Raises ValueError for None and for another dtype, device or shape, TypeError for another
        library.
        """
        self._reset({"operand": operand}, stream)

    def reset_operand_unchecked(self, operand: Array, *, stream: Any = None) -> None:
        """Execute on `operand` from now on; the next `execute` finds what is wrong. Local."""
        self._require_alive()
        self._set_operands(operand=operand)

    def release_operand(self) -> None:
        """Drop the reference to the operand; then `reset_operand` must come first. Local."""
        self._require_alive()
        self._release_operands()
