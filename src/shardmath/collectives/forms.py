"""Which part of a call all ranks share, and which is each rank's own: this lets calls run ahead.

A rank that knows the shared part of a call knows the call. Its kernels send its own part along with
the elements, and the peers' kernels check whether that fits. A host waits for the peers' hosts only
if it has to know their parts itself, for example for the shape of a new result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

from shardmath.collectives.operand import OutputSpec, Shape

UNKNOWN = (1 << 64) - 1  # in a row of counts that kernels send: the rank does not know this one
ANY_EXTENT = -1  # of a peer's operand: it follows from what the ranks receive
_OUT = 3  # where a spec has `out`

Spec = tuple[Any, ...]  # a rank's spec of a call: see `dispatch.Collective`


class OwnParts(NamedTuple):
    """What a rank knows by itself about a call that moves elements.

    `sent[r]` indices of the axis go to rank r, or all of them if `whole`; `expected[r]` come from
    it, if that is known. `shape` is the result's.
    """

    axis: int
    sent: Shape
    expected: Shape | None
    shape: Shape
    whole: bool


class Form:
    """How the calls of one collective run ahead. This one is a reduction's: all ranks share all of
    the spec but `out`.
    """

    counted = False  # whether ranks list words with a call

    def common(self, spec: Spec) -> Spec | None:
        """The shared part of a rank's spec; None if this rank does not know it."""
        return (*spec[:_OUT], *spec[_OUT + 1 :])

    def agreed(self, spec: Spec, plan: Any) -> Spec:
        """The shared part of a call on which all ranks have agreed."""
        common = self.common(spec)
        assert common is not None, "every rank has an array"
        return common

    def whole(self, common: Spec, words: Sequence[int] = ()) -> Spec:
        """The spec of a rank that has listed these words, and has no `out`."""
        return (*common[:_OUT], None, *common[_OUT:])

    def words(self, spec: Spec) -> Shape:
        """The words that a rank lists with a call: the rest of its spec."""
        return ()

    def fits(self, spec: Spec, result: OutputSpec) -> bool:
        """Whether `out` may be right; `result` is what it has to be, None if that is not known."""
        return spec[_OUT] in (None, result)

    def result(self, common: Spec) -> OutputSpec:
        """The spec that `out` must have, None if the shared part does not say."""
        return None

    def alone(self, spec: Spec) -> OwnParts | None:
        """What this rank knows by itself, if that is enough to make the call; else None."""
        return None

    def takes_counts(self, spec: Spec, arguments: tuple[Any, ...]) -> bool:
        """Whether such calls with the same first argument may have other counts, along axis 0."""
        return False

    def of_row(self, common: Spec, row: Sequence[int]) -> Spec:
        """The spec of a rank whose kernel has sent this row of counts; see exchange.cu."""
        return self.whole(common)


class OwnCount(Form):
    """A reduction that is scattered: each rank has its own count of indices to receive."""

    counted = True

    def common(self, spec: Spec) -> Spec | None:
        *shared, _ = spec
        return super().common(tuple(shared))

    def whole(self, common: Spec, words: Sequence[int] = ()) -> Spec:
        return (*super().whole(common), *(words or (0,)))

    def words(self, spec: Spec) -> Shape:
        return spec[-1:]


def _as_form_says(operand: Any, plan: Any) -> tuple[()]:
    return ()


class OnGPUs(NamedTuple):
    """How GPUs perform a collective, and how its calls run ahead.

    `launch(operand, plan)` gives the result, where `operand` is this rank's `DeviceOperand`.
    `result(operand, plan)` is (dtype, shape) of this rank's result in all such calls; () if `form`
    says it, and None if ranks have to meet for such calls.
    """

    form: Form
    launch: Callable[[Any, Any], Any]
    result: Callable[[Any, Any], tuple[()] | tuple[str, Shape] | None] = _as_form_says


class Broadcast(Form):
    """A broadcast: a rank that has an array, or an `out`, knows the whole call."""

    def common(self, spec: Spec) -> Spec | None:
        *given, out, root = spec
        kind = out if given[0] is None else given
        return None if kind is None else (*kind, root)

    def agreed(self, spec: Spec, plan: Any) -> Spec:
        return plan.library, plan.dtype, plan.shape, plan.root

    def result(self, common: Spec) -> OutputSpec:
        kind, dtype, shape, _ = common
        return kind, dtype, shape


class Gathered(Form):
    """An all_gather: each rank has its own extent along the axis."""

    counted = True

    def common(self, spec: Spec) -> Spec | None:
        kind, dtype, shape, _, axis = spec[:5]
        return kind, dtype, _others(shape, axis), axis

    def whole(self, common: Spec, words: Sequence[int] = ()) -> Spec:
        kind, dtype, others, axis = common
        return kind, dtype, _shape(others, axis, sum(words)), None, axis

    def words(self, spec: Spec) -> Shape:
        return (spec[2][spec[4]],)

    def fits(self, spec: Spec, result: OutputSpec) -> bool:
        kind, dtype, shape, out, axis = spec[:5]
        if out is None:
            return True
        into = out[2]
        alike = out[:2] == (kind, dtype) and len(into) == len(shape)
        return alike and _others(into, axis) == _others(shape, axis)

    def alone(self, spec: Spec) -> OwnParts | None:
        _, _, shape, out, axis = spec
        if out is None or prod(shape[:axis]) != 1:
            return None
        return OwnParts(axis, (shape[axis],), None, out[2], True)

    def of_row(self, common: Spec, row: Sequence[int]) -> Spec:
        return _with_room(self.whole(common, row[:1]), row)


class Scattered(Gathered):
    """An all_to_all: each rank has its own counts of what it sends and what it expects."""

    def whole(self, common: Spec, words: Sequence[int] = ()) -> Spec:
        return (*super().whole(common, words), tuple(words), None)

    def words(self, spec: Spec) -> Shape:
        sent: Shape = spec[5]
        return sent

    def fits(self, spec: Spec, result: OutputSpec) -> bool:
        out, axis, expected = spec[3], spec[4], spec[6]
        if not super().fits(spec, result):
            return False
        return out is None or expected is None or sum(expected) == out[2][axis]

    def alone(self, spec: Spec) -> OwnParts | None:
        _, _, shape, out, axis, sent, expected = spec
        if expected is not None:
            whole = _shape(_others(shape, axis), axis, sum(expected))
            return OwnParts(axis, sent, expected, whole, False)
        if out is None or prod(shape[:axis]) != 1:
            return None
        return OwnParts(axis, sent, None, out[2], False)

    def takes_counts(self, spec: Spec, arguments: tuple[Any, ...]) -> bool:
        return spec[4] == 0 and arguments[1] is not None

    def of_row(self, common: Spec, row: Sequence[int]) -> Spec:
        size = len(row) // 2
        *spec, _ = _with_room(self.whole(common, row[:size]), row)
        expected = tuple(row[size : 2 * size])
        return (*spec, None if UNKNOWN in expected else expected)


class Received(Gathered):
    """An all_to_all in which a rank knows what it receives from each rank, not what it sends."""

    def whole(self, common: Spec, words: Sequence[int] = ()) -> Spec:
        kind, dtype, others, axis = common
        return kind, dtype, _shape(others, axis, ANY_EXTENT), None, axis, tuple(words)

    def words(self, spec: Spec) -> Shape:
        received: Shape = spec[5]
        return received

    def alone(self, spec: Spec) -> OwnParts | None:
        return None


def _others(shape: Shape, axis: int) -> Shape:
    return (*shape[:axis], *shape[axis + 1 :])


def _shape(others: Shape, axis: int, extent: int) -> Shape:
    return (*others[:axis], extent, *others[axis:])


def _with_room(spec: Spec, row: Sequence[int]) -> Spec:
    """The spec with an `out` of the extent that the row ends with, or without one."""
    kind, dtype, shape, _, axis, *rest = spec
    room = row[-1]
    into = _shape(_others(shape, axis), axis, room)
    return (kind, dtype, shape, None if room == UNKNOWN else (kind, dtype, into), axis, *rest)
