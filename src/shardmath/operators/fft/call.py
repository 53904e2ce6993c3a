"""One call of a transform: its arguments, read once, inside the agreement.

A plan depends only on what all ranks described; the latest are cached, for `FFT` objects and for
function calls.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal

from shardmath.arrays import ArraySpec, library_and_spec
from shardmath.context import Context
from shardmath.local.fft import Kind
from shardmath.lru_cache import LRUCache
from shardmath.operators.call_cache import CachedCall, cached_call
from shardmath.operators.fft import host
from shardmath.operators.fft.allocation import in_place_array
from shardmath.operators.fft.float16 import widened
from shardmath.operators.fft.host import Plan
from shardmath.operators.fft.options import (
    REAL_OF,
    FFTDirection,
    FFTOptions,
    direction_of,
    options_from,
)
from shardmath.operators.fft.problem import Description, Problem, check, describe, kind_of
from shardmath.operators.fft.search import choose
from shardmath.operators.fft.strategy import ON_GPUS, ON_GPUS_OF_HOSTS
from shardmath.operators.lifecycle import check_stream, log_plan

if TYPE_CHECKING:
    from shardmath.operators.fft.device import Execution
    from shardmath.operators.fft.rank_plan import DevicePlan
    from shardmath.symmetric.device_array import Blank

__all__ = [
    "CachedTransform",
    "Call",
    "NewArray",
    "execute",
    "make_plan",
    "plan_of",
    "spec_of",
]


NewArray = tuple[tuple[int, ...], str, Literal["C", "F"]]  # shape, dtype and order

_MAX_NEW_RESULTS = 16  # of one call


class CachedTransform(CachedCall):
    """`new_results`, by the operand's fingerprint: the form of the last one, and its maker."""

    description: Description

    def __init__(self, description: Hashable) -> None:
        super().__init__(description)
        self.new_results: LRUCache[Hashable, tuple[NewArray, Blank]] = LRUCache(_MAX_NEW_RESULTS)


@dataclass
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
    cached: CachedTransform = field(init=False)
    execution: Execution = field(init=False)  # on GPUs

    @cached_property
    def spec(self) -> ArraySpec:
        """Of the operand. Raises TypeError or ValueError for what is none."""
        return spec_of(self.operand, "operand")

    @cached_property
    def out_spec(self) -> ArraySpec | None:
        """Of the array given for the result, if any."""
        return None if self.out is None else spec_of(self.out, "out")

    @property
    def description(self) -> Description:
        """The call in plain data, once it is described."""
        return self.cached.description

    def describe(self, context: Context) -> CachedTransform:
        """The call as it was described. Raises what is wrong with it on this rank."""
        self.read_options = options_from(self.options)
        check_stream(self.stream)
        given = (
            *(self.spec, self.distribution, self.axes, self.norm, self.kind, self.direction),
            *(self.read_options, self.out_spec),
        )
        self.cached = cached_call(context, CachedTransform, given, self._described)
        return self.cached

    def _described(self) -> Description:
        kind = self._kind(self.spec.dtype)
        return describe(
            self.spec,
            self.distribution,
            self.axes,
            self.norm,
            kind,
            self._direction(kind),
            self.read_options,
            self.out_spec,
        )

    def note(self, context: Context) -> bytes:
        """What the peers have to know of this execution. Raises what is wrong on this rank."""
        if context.team is None:
            return b""
        from shardmath.operators.fft.device import Execution

        self.execution = Execution(context, self)
        return self.execution.note(self)

    def target(self, context: Context, problem: Problem) -> Any:
        """The array that the result is written to, None for a new one.

        Raises RuntimeError when it is to take the memory of an operand that is too small for it.
        """
        return in_place_array(context, self.operand, problem) if problem.inplace else self.out

    def log(self, context: Context, plan: Plan | DevicePlan) -> None:
        """Tell the user's logger, or the package's, what was planned."""
        log_plan(context, self.read_options.logger, plan)

    def _kind(self, dtype: str) -> Kind:
        asked = self.read_options.fft_type
        if self.kind is None:
            return kind_of(dtype, asked)
        if asked not in (None, self.kind):
            raise ValueError(f"options.fft_type is {asked}, and the call is {self.kind}")
        if self.kind == "R2C" and dtype in REAL_OF:
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


def spec_of(array: Any, name: str) -> ArraySpec:
    """The spec. Raises ValueError, naming the argument, for what is no array of ours."""
    return library_and_spec(array, name)[1]


def make_plan(context: Context, descriptions: tuple[Description, ...]) -> Plan | DevicePlan:
    """The plan for the ranks of a context, of cores or of GPUs."""
    if context.team is None:
        return plan_of(descriptions)
    return _device_plan_of(descriptions, context.hosts)


def execute(context: Context, plan: Any, notes: list[bytes], call: Call) -> Any:
    """The transform of the operand. Collective. Raises as the `execute` of cores or GPUs."""
    if context.team is None:
        return host.execute(
            context,
            plan,
            lambda: host.Arrays.read(context, call.operand, call.target(context, plan.problem)),
        )
    return call.execution.perform(call, plan, notes)


@lru_cache(maxsize=64)
def plan_of(descriptions: tuple[Description, ...]) -> Plan:
    """The plan that all ranks' descriptions make. Pure; raises the same on all ranks."""
    problem = check(descriptions)
    return Plan(problem, choose(widened(problem)))


@lru_cache(maxsize=64)
def _device_plan_of(descriptions: tuple[Description, ...], hosts: tuple[int, ...]) -> DevicePlan:
    """As `plan_of`, for ranks with GPUs, of which these are the numbers of the hosts."""
    from shardmath.operators.fft.rank_plan import DevicePlan

    problem = check(descriptions)
    model = ON_GPUS_OF_HOSTS if len(set(hosts)) > 1 else ON_GPUS
    return DevicePlan(problem, choose(problem, model), hosts)
