"""One call of a collective on GPUs: inspect the arrays, agree, launch on the stream.

A program makes the same few calls for ever. What a call finds out about its arrays, and how its
kernel is launched, is cached for calls on arrays with the same library, type, shape, strides and
device, none of them lazy, freed or under a gradient. Arrays are inspected every time, since they
may lie elsewhere. A call is cached only where its kernel read the operand and wrote the result as
they lie, and the cache refers to no array.

Where this rank knows all ranks' arguments it waits for nobody: see `ahead`. Else all ranks agree
every time.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

from shardmath.arrays import Library, library_named
from shardmath.arrays.spec import ArraySpec
from shardmath.base.lru_cache import LRUCache
from shardmath.call.agreement import HashedSpec, agree
from shardmath.collectives.ahead import Ahead, tag_of_agreement, without_out
from shardmath.collectives.descriptions import Call, call_spec
from shardmath.collectives.device_operand import DeviceOperand
from shardmath.collectives.flat import DirectLaunch
from shardmath.collectives.repeats import Meeting, Repeats
from shardmath.context.context import Context
from shardmath.handles.fingerprint import inspect

__all__ = ["perform_on_device"]

_CACHE = partial(LRUCache[Any, Any], 256)  # calls of a context
_PLAIN = frozenset([int, str, tuple, list, type(None)])


def perform_on_device(context: Context, call: Call, x: Any, out: Any) -> Any:
    """See `perform`."""
    operation = call.operation
    context.require_open()
    context.board.enter(operation)
    calls: LRUCache[Hashable, _CachedCall] = context.cache("calls: collectives", _CACHE)
    ahead = Ahead.of(context)
    arrays = _inspected(context, call, x, out)
    cached = None if arrays is None else calls.find(arrays.key)
    if arrays is not None and cached is not None:
        known = ahead.find(operation, cached.common)
        if known is not None:
            with context.executing(operation):
                ahead.go(known)
                if cached.applies(arrays):
                    return cached.launch(context, arrays, out)
                operand = DeviceOperand(context, x, out, tag=known.tag)
                return call.on_device(operand, known.plan)
        with ahead.meeting(cached.spec.spec):
            _, agreement, _ = agree(context, operation, _repeated, call.build, cached)
        plan = agreement.plan
        with context.executing(operation):
            if plan is cached.plan and cached.applies(arrays):
                return cached.launch(context, arrays, out)
            tag = tag_of_agreement(agreement) if call.result is None else cached.tag
            return call.on_device(DeviceOperand(context, x, out, tag=tag), plan)

    found = _describe(context, call, x, out)
    known = None if isinstance(found, Exception) else ahead.find_fitting(operation, found.spec)
    if known is not None and not isinstance(found, Exception):
        operand, spec, plan = found.operand, found.spec, known.plan
        operand.tag = known.tag
        with context.executing(operation):
            ahead.go(known)
            result = call.on_device(operand, plan)
    else:
        try:
            with ahead.meeting(found if isinstance(found, Exception) else found.spec):
                own, agreement, _ = agree(context, operation, _raised, call.build, found)
        finally:
            del found  # its traceback refers to this frame: a cycle that would keep the operands
        operand, spec, plan = own.operand, own.spec, agreement.plan
        alike = call.result is not None
        operand.tag = ahead.tag(operation, spec) if alike else tag_of_agreement(agreement)
        with context.executing(operation):
            result = call.on_device(operand, plan)
        of_all = None if call.result is None else call.result(operand, plan)
        if of_all is not None:
            ahead.keep(operation, spec, (operand.kind, *of_all), plan, call.build)
    if arrays is not None:
        cached = _CachedCall.of(arrays, operand, spec, plan, result)
        if cached is not None:
            calls.keep(arrays.key, cached)
            if call.result is None or ahead.find(operation, cached.common) is not None:
                _keep_compiled(context, call, cached, x, result)
    return result


def _keep_compiled(context: Context, call: Call, cached: _CachedCall, x: Any, result: Any) -> None:
    """Let the next such call be made by compiled code, where that was built."""
    direct, (spec, _) = cached.direct, cached.array_specs
    repeats = Repeats.of(context)
    if repeats is None or direct.ready is None:
        return
    try:
        hash(call.arguments)
    except TypeError:
        return
    library, meeting = library_named(spec.library), None
    if call.result is None:
        meeting = Meeting(cached.spec, cached.plan, call.build, call.on_device)
    repeats.keep(
        (call.operation, *call.arguments),
        (library, spec, x),
        (library.spec(result), result),
        direct.ready,
        cached.tag,
        in_place=direct.in_place,
        meeting=meeting,
    )


class _DeviceCall(NamedTuple):
    """A call as this rank describes it, and its operand on the GPU."""

    spec: tuple[Any, ...]
    note: bytes
    operand: DeviceOperand
    payload: bytes = b""
    last: None = None


def _describe(context: Context, call: Call, x: Any, out: Any) -> _DeviceCall | Exception:
    """The call, or what is wrong with it on this rank."""
    try:
        operand = DeviceOperand(context, x, out)
        spec = call_spec(operand.kind, operand.spec, operand.into, call.describe(operand.spec))
        return _DeviceCall(spec, b"", operand)
    except Exception as error:
        return error


def _raised(found: _DeviceCall | Exception) -> _DeviceCall:
    if isinstance(found, Exception):
        raise found
    return found


def _repeated(cached: _CachedCall) -> _CachedCall:
    """What it was described as before."""
    return cached


class _Arrays:
    """The arrays of one call, `source` and `target` being their addresses. `key` is equal for calls
    that may share a cached one.
    """

    __slots__ = ("into", "key", "library", "source", "spec", "target")

    def __init__(
        self,
        key: Hashable,
        library: Library,
        x: tuple[ArraySpec, int],
        out: tuple[ArraySpec | None, int],
    ) -> None:
        self.key, self.library = key, library
        self.spec, self.source = x
        self.into, self.target = out


def _inspected(context: Context, call: Call, x: Any, out: Any) -> _Arrays | None:
    """None where the call cannot be cached, or has to check its arguments and to raise errors."""
    try:
        inspected = inspect(context, x)
        if inspected is None:
            return None
        library, spec, source, _ = inspected
        into, target = None, 0
        key: list[Hashable] = [call.operation, id(spec)]
        if out is not None:
            inspected = inspect(context, out)
            if inspected is None:
                return None
            _, into, target, _ = inspected
            key.append(id(into))
        for each in call.arguments:
            kind = type(each)
            if kind not in _PLAIN:  # True is no axis, though it equals 1
                return None
            key.append(tuple(each) if kind is list else each)
        hashable = tuple(key)
        hash(hashable)
        return _Arrays(hashable, library, (spec, source), (into, target))
    except Exception:
        return None


@dataclass(frozen=True, eq=False)
class _CachedCall:
    """A call that was one launch: this rank's `spec` of it, the plan, and the launch.

    `shape` and `dtype` are the result's. `array_specs` are kept since their identity is in the key.
    """

    note: ClassVar[bytes] = b""  # peers are told nothing
    payload: ClassVar[bytes] = b""
    last: ClassVar[None] = None

    array_specs: tuple[ArraySpec, ArraySpec | None]
    spec: HashedSpec
    common: tuple[Any, ...]  # of all ranks, for one that may run ahead
    plan: Any
    tag: int
    direct: DirectLaunch
    shape: tuple[int, ...]
    dtype: str
    nbytes: int  # of the result

    @classmethod
    def of(
        cls, arrays: _Arrays, operand: DeviceOperand, spec: tuple[Any, ...], plan: Any, result: Any
    ) -> _CachedCall | None:
        """None where it was not one launch, from the operand and to the result as they lie."""
        direct, found = operand.direct, arrays.library.spec(result)
        if direct is None or operand.on_host or found.order not in ("C", "both"):
            return None
        if (direct.source, direct.target) != (arrays.source, arrays.library.pointer(result)):
            return None
        return cls(
            (arrays.spec, arrays.into),
            HashedSpec(spec),
            without_out(spec),
            plan,
            operand.tag,
            direct,
            found.shape,
            found.dtype,
            found.nbytes,
        )

    def applies(self, arrays: _Arrays) -> bool:
        """Whether the result does not overlap the operand."""
        if arrays.into is None:
            return True
        source, target = arrays.source, arrays.target
        disjoint = target + self.nbytes <= source or source + arrays.spec.nbytes <= target
        return disjoint or (self.direct.in_place and target == source)

    def launch(self, context: Context, arrays: _Arrays, out: Any) -> Any:
        """The call on these arrays, into `out` or a new array."""
        library, spec, target = arrays.library, arrays.spec, arrays.target
        if out is None:
            out = library.empty(self.shape, self.dtype, "C", spec.device)
            target = library.pointer(out)
        assert context.team is not None, "a context of GPUs"
        stream = library.stream(context.team.device.ordinal)
        self.direct.launch(arrays.source, target, stream)
        return out
