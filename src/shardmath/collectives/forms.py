"""Which part of a call all ranks share, and which is each rank's own: what lets calls run ahead.

A rank that knows the shared part of a call knows the call: it sends what is its own along with its
elements, and the kernels of the peers see whether that fits what they have room for. Only where the
host has to know it, as for the shape of a new result, does it wait for the peers' hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

from shardmath.collectives.operand import OutputSpec, Shape

UNKNOWN = (1 << 64) - 1  # in a row that kernels send, what a rank does not know
_OUT = 3  # where `call_spec` has what `out` is

Spec = tuple[Any, ...]  # of a rank's call: `call_spec`


class OwnParts(NamedTuple):
    """What a rank knows of a call that moves elements when it has not heard of its peers.

    Of the axis, `sent[r]` indices go to rank r, or all that there are if `whole`; `expected[r]`
    come from it, where that is known. `shape` is the result's.
    """

    axis: int
    sent: Shape
    expected: Shape | None
    shape: Shape
    whole: bool


class Form:
    """How the calls of one collective run ahead: a reduction's, of which all ranks share all but
    `out`.
    """

    counted = False  # whether a rank lists words with a call

    def common(self, spec: Spec) -> Spec | None:
        """The shared part of a rank's spec; None where this rank does not know it."""
        return (*spec[:_OUT], *spec[_OUT + 1 :])

    def agreed(self, spec: Spec, plan: Any) -> Spec:
        """The shared part of a call on which all ranks have agreed."""
        common = self.common(spec)
        assert common is not None, "every rank has an array"
        return common

    def whole(self, common: Spec, words: Sequence[int] = ()) -> Spec:
        """The spec of a rank without `out`, given the words that it has listed."""
        return (*common[:_OUT], None, *common[_OUT:])

    def words(self, spec: Spec) -> Shape:
        """The words that a rank lists with a call: the rest of its spec."""
        return ()

    def fits(self, spec: Spec, result: OutputSpec) -> bool:
        """Whether `out` may be right; `result` is what it must be where that is known."""
        return spec[_OUT] in (None, result)

    def result(self, common: Spec) -> OutputSpec:
        """The spec that `out` must have, where the shared part says it."""
        return None

    def alone(self, spec: Spec) -> OwnParts | None:
        """The facts that this rank knows, where they suffice to make the call; else None."""
        return None

    def takes_counts(self, spec: Spec, arguments: tuple[Any, ...]) -> bool:
        """Whether the next such call, with the same first argument, may have other counts along the
        first axis.
        """
        return False

    def of_row(self, common: Spec, row: Sequence[int]) -> Spec:
        """The spec of the rank that has sent this row to its peers' kernels; see exchange.cu."""
        return self.whole(common)


def _as_form_says(operand: Any, plan: Any) -> tuple[()]:
    return ()


class OnGPUs(NamedTuple):
    """How GPUs perform a collective, and how its calls run ahead.

    `launch(operand, plan)` gives the result, of this rank's `DeviceOperand`. `result(operand,
    plan)` is the dtype and the shape of this rank's result in all such calls; () where `form` says
    it, and None where their ranks meet all the same.
    """

    form: Form
    launch: Callable[[Any, Any], Any]
    result: Callable[[Any, Any], tuple[()] | tuple[str, Shape] | None] = _as_form_says


class Broadcast(Form):
    """A broadcast, of which a rank that has an array, or an `out`, knows all."""

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
    """An all_gather: extents along the axis are each rank's own."""

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
    """An all_to_all: how much a rank sends to each is its own, and what it expects of each."""

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


def _others(shape: Shape, axis: int) -> Shape:
    return (*shape[:axis], *shape[axis + 1 :])


def _shape(others: Shape, axis: int, extent: int) -> Shape:
    return (*others[:axis], extent, *others[axis:])


def _with_room(spec: Spec, row: Sequence[int]) -> Spec:
    """The spec, with the `out` of which a row says how much it takes."""
    kind, dtype, shape, _, axis, *rest = spec
    room = row[-1]
    into = _shape(_others(shape, axis), axis, room)
    return (kind, dtype, shape, None if room == UNKNOWN else (kind, dtype, into), axis, *rest)
