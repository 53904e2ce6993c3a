"""One call of a collective on GPUs: inspect the arrays, agree, launch on the stream.

A program makes the same few calls for ever. What a call finds out about its arrays, and how its
kernel is launched, is cached for calls on arrays with the same library, type, shape, strides and
device, none of them lazy, freed or under a gradient. Arrays are inspected every time, since they
may lie elsewhere. A call is cached only where its kernel read the operand and wrote the result as
they lie, and the cache refers to no array.

A call that all ranks know waits for nobody, but where this rank's host has to learn from its peers
how much they send: see `ahead`. Else all ranks agree every time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

from shardmath.arrays import Library, library_named
from shardmath.arrays.spec import ArraySpec
from shardmath.base.lru_cache import LRUCache
from shardmath.call.agreement import HashedSpec, agree
from shardmath.collectives.ahead import Ahead, KnownCall
from shardmath.collectives.descriptions import NO_ROOT, Call, call_spec
from shardmath.collectives.device_operand import DeviceOperand, DeviceOutput, placeholder
from shardmath.collectives.flat import DirectLaunch
from shardmath.collectives.forms import Form, OwnParts
from shardmath.collectives.repeats import Repeats
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
    given = out if x is None and not call.gives else x  # nobody reads that
    arrays = _inspected(context, call, given, out)
    cached = None if arrays is None else calls.find(arrays.key)
    if arrays is not None and cached is not None:
        return _perform_again(context, call, cached, arrays, (given, out))
    found = _describe(context, call, x, out)
    known = None if isinstance(found, Exception) else _known(context, call, found)
    if known is not None and not isinstance(found, Exception):
        spec = found.spec
        with context.executing(operation):
            ahead.go(known, known.form.words(spec))
            plan = ahead.plan(known, spec)
            operand = found.taking(context, known.plan, out)
            operand.tag = known.tag
            result = _put(call.on_device, operand, plan)
    else:
        try:
            with ahead.meeting(found if isinstance(found, Exception) else found.spec):
                own, agreement, _ = agree(context, operation, _raised, call.build, found)
        finally:
            del found  # its traceback refers to this frame: a cycle that would keep the operands
        spec, plan = own.spec, agreement.plan
        common = call.form.agreed(spec, plan)
        with context.executing(operation):
            operand = own.taking(context, plan, out)
            operand.tag = ahead.tag(operation, common)
            result = call.on_device(operand, plan)
        of_all = () if call.result is None else call.result(operand, plan)
        if of_all is not None:
            into = (operand.kind, *of_all) if of_all else call.form.result(common)
            ahead.keep(operation, call.form, common, into, plan, call.build)
    if arrays is not None:
        _keep(context, call, arrays, (operand, spec, plan), result, known)
    return result


def _perform_again(
    context: Context, call: Call, cached: _CachedCall, arrays: _Arrays, given: tuple[Any, Any]
) -> Any:
    """The result of a call on arrays that look like those of a cached one."""
    ahead, operation, (x, out) = Ahead.of(context), call.operation, given
    known = ahead.find(operation, cached.common)
    if known is None:
        with ahead.meeting(cached.spec.spec):
            _, agreement, _ = agree(context, operation, _repeated, call.build, cached)
    with context.executing(operation):
        if known is None:
            plan, same = agreement.plan, agreement.plan is cached.plan
        else:
            ahead.go(known, cached.words)
            same = cached.others is None or cached.others == ahead.others(known, cached.words)
            plan = cached.plan if same else ahead.plan(known, cached.spec.spec)
        if same and cached.applies(arrays):
            return cached.launch(context, arrays, out)
        operand = DeviceOperand(context, x, out, tag=cached.tag)
        result = _put(call.on_device, operand, plan)
    if not same and known is not None:
        _keep(context, call, arrays, (operand, cached.spec.spec, plan), result, known)
    return result


def _keep(
    context: Context,
    call: Call,
    arrays: _Arrays,
    made: tuple[DeviceOperand, tuple[Any, ...], Any],
    result: Any,
    known: KnownCall | None,
) -> None:
    """Let the next such call be made faster; `made` are its operand, spec and plan."""
    operand, spec, plan = made
    ahead, form = Ahead.of(context), call.form
    others = None if known is None else ahead.asked(known, spec)
    cached = _CachedCall.of(arrays, operand, form, spec, plan, others, result)
    if cached is None:
        return
    met = known is None
    if known is None:
        known = ahead.find(call.operation, cached.common)
    if met and known is not None and form.counted:
        return  # the launch has the peers' parts of a call for which all have met
    calls: LRUCache[Hashable, _CachedCall] = context.cache("calls: collectives", _CACHE)
    calls.keep(arrays.key, cached)
    if known is not None:
        _keep_compiled(context, call, known, cached, operand.given, result)


def _put(on_device: Callable[[DeviceOperand, Any], Any], operand: DeviceOperand, plan: Any) -> Any:
    """The result of a known call, of which this rank may know its own part alone."""
    return operand.exchange(plan) if isinstance(plan, OwnParts) else on_device(operand, plan)


def _known(context: Context, call: Call, found: _DeviceCall) -> KnownCall | None:
    """The known call that this is, if it is one."""
    ahead, operation = Ahead.of(context), call.operation
    if call.form.common(found.spec) is None:
        return ahead.find_of(found.spec[-1], operation)
    return ahead.find_fitting(operation, call.form, found.spec)


def _keep_compiled(
    context: Context, call: Call, known: KnownCall, cached: _CachedCall, x: Any, result: Any
) -> None:
    """Let the next such call be made by compiled code, where that was built."""
    direct, (spec, into) = cached.direct, cached.array_specs
    operation, on_device, tag, own = call.operation, call.on_device, cached.tag, cached.spec.spec
    repeats = Repeats.of(context)
    if repeats is None or direct.ready is None:
        return
    try:
        hash(call.arguments)
    except TypeError:
        return
    counted = call.form.takes_counts(own, call.arguments)
    words, others = cached.words, cached.others
    asks = others is not None
    if counted and asks:
        return  # which of the launches is right, the peers' words say

    def end(context: Context, x: Any, out: Any) -> tuple[Any, bool]:
        ahead = Ahead.of(context)
        with context.executing(operation):
            plan, same = ahead.plan(known, own), ahead.others(known, words) == others
            return _put(on_device, DeviceOperand(context, x, out, tag=tag), plan), same

    repeats.keep(
        (operation, *(call.arguments[:1] if counted else call.arguments)),
        (library_named(spec.library), spec, x),
        (library_named(spec.library).spec(result), result),
        direct.ready,
        (tag, words),
        others,
        end,
        in_place=direct.in_place,
        given=not (asks and into is None),
        new=into is None or not call.form.counted,
        counted=counted,
    )


class _DeviceCall(NamedTuple):
    """A call as this rank describes it, and its operand on the GPU, if it gives one."""

    spec: tuple[Any, ...]
    note: bytes
    operand: DeviceOperand | None
    payload: bytes = b""
    last: None = None

    def taking(self, context: Context, plan: Any, out: Any) -> DeviceOperand:
        """The operand; where this rank gives none, what takes its place by that plan."""
        if self.operand is not None:
            return self.operand
        return placeholder(context, plan.library, plan.dtype, plan.shape, out)


def _describe(context: Context, call: Call, x: Any, out: Any) -> _DeviceCall | Exception:
    """The call, or what is wrong with it on this rank."""
    try:
        if x is None and call.optional:
            arguments = call.describe(None)
            if call.gives:
                raise ValueError(NO_ROOT)
            into = None if out is None else DeviceOutput(context, out).spec
            return _DeviceCall((None, None, None, into, *arguments), b"", None)
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
    common: tuple[Any, ...]  # what all ranks share of one that may run ahead,
    words: tuple[int, ...]  # what is this rank's own,
    others: Sequence[tuple[int, ...]] | None  # and each rank's, where the plan is made of that
    plan: Any
    tag: int
    direct: DirectLaunch
    shape: tuple[int, ...]
    dtype: str
    nbytes: int  # of the result

    @classmethod
    def of(
        cls,
        arrays: _Arrays,
        operand: DeviceOperand,
        form: Form,
        spec: tuple[Any, ...],
        plan: Any,
        others: Sequence[tuple[int, ...]] | None,
        result: Any,
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
            form.agreed(spec, plan),
            form.words(spec),
            others,
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
