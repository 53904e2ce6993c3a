"""One call of a transform: its arguments, read once, inside the agreement.

A plan depends only on what all ranks described; the ones used last are kept, for objects and
function calls that look the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from shardmath.arrays import ArraySpec, library_of
from shardmath.context import DistributedContext
from shardmath.local.fft import Kind
from shardmath.operators.fft.allocation import memory_behind
from shardmath.operators.fft.host import Arrays, Plan
from shardmath.operators.fft.options import FFTDirection, FFTOptions, direction_of, options_from
from shardmath.operators.fft.problem import Description, Problem, check, describe, kind_of
from shardmath.operators.fft.strategy import choose
from shardmath.operators.lifecycle import check_stream

__all__ = ["Call", "plan_of"]


@dataclass(kw_only=True)
class Call:
    """One rank's arguments, as they were given. `kind` is that of the function called, if any."""

    operand: Any
    distribution: Any
    axes: Any
    norm: Any
    options: Any
    stream: Any
    direction: Any = None
    out: Any = None
    kind: Kind | None = None
    read_options: FFTOptions = field(init=False)

    def described(self) -> Description:
        """The call in plain data. Raises what is wrong with it on this rank."""
        self.read_options = options_from(self.options)
        check_stream(self.stream)
        spec = spec_of(self.operand)
        kind = self._kind(spec.dtype)
        out = None if self.out is None else spec_of(self.out)
        return describe(
            spec,
            self.distribution,
            self.axes,
            self.norm,
            kind,
            self._direction(kind),
            self.read_options,
            out,
        )

    def arrays(self, context: DistributedContext, problem: Problem) -> Arrays:
        """The arrays of this execution.

        Raises ValueError when `out` cannot be written to, RuntimeError when the result is to take
        the memory of an operand that is too small for it.
        """
        out = self.out
        if problem.inplace:
            out = memory_behind(context, self.operand, problem)
        return Arrays.read(context, self.operand, out)

    def log(self, plan: Plan) -> None:
        """Tell the user's logger what was planned."""
        if self.read_options.logger is not None:
            self.read_options.logger.info("%s", plan.explain())

    def _kind(self, dtype: str) -> Kind:
        asked = self.read_options.fft_type
        if self.kind is None:
            return kind_of(dtype, asked)
        if asked not in (None, self.kind):
            raise ValueError(f"options.fft_type is {asked}, and the call is {self.kind}")
        if self.kind == "R2C" and dtype in ("complex64", "complex128"):
            raise RuntimeError(f"the operand has dtype {dtype}; rfft takes a real one: call fft")
        return kind_of(dtype, self.kind)

    def _direction(self, kind: Kind) -> FFTDirection:
        only = {"R2C": FFTDirection.FORWARD, "C2R": FFTDirection.INVERSE}.get(kind)
        if self.direction is None:
            return only or FFTDirection.FORWARD
        given = direction_of(self.direction)
        if only not in (None, given):
            raise ValueError(f"a {kind} transform has no direction {given.name}")
        return given


def spec_of(array: Any) -> ArraySpec:
    """The spec; TypeError for a tensor of complex halves, with which no library computes here."""
    if str(getattr(array, "dtype", "")) == "torch.complex32":
        raise TypeError("transforms take complex64 and complex128, not complex32")
    return library_of(array).spec(array)


@lru_cache(maxsize=64)
def plan_of(descriptions: tuple[Description, ...]) -> Plan:
    """The plan that all ranks' descriptions make. Pure; raises the same on all ranks."""
    problem = check(descriptions)
    return Plan(problem, choose(problem))
