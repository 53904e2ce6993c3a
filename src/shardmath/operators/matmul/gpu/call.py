"""A product's call on a context of GPUs: its operands read, its result given as they came.

What can be wrong on one rank is raised before any rank has written anything. With operands on GPUs
the call returns when all is on the stream; operands in host memory are carried there and back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from shardmath.arrays import library_of
from shardmath.arrays.base import share_memory
from shardmath.context import Context
from shardmath.cuda import stream as streams
from shardmath.cuda.driver import call
from shardmath.local.epilog import Extra, requirements
from shardmath.local.gpu.blaslt import bindings
from shardmath.local.gpu.gemm import Algorithms
from shardmath.operators.lanes import LANES, Lane
from shardmath.operators.matmul.arguments import Arguments, agreed_scalars, packed_scalars
from shardmath.operators.matmul.gpu import tuning
from shardmath.operators.matmul.gpu.execution import Execution
from shardmath.operators.matmul.gpu.fusing import Fused, pays, shows_result
from shardmath.operators.matmul.gpu.share import Operands, Scales, Share
from shardmath.operators.matmul.problem import Call, Problem
from shardmath.operators.matmul.scaling import scales_in_order
from shardmath.operators.repeats import Known
from shardmath.operators.showing import matrix_of
from shardmath.symmetric import device_array
from shardmath.symmetric.device_array import DeviceArray, Result

__all__ = ["run", "tune"]

_ANEW, _AGAIN = b"\0", b"\1"
_ORDERS = ("", "C", "F")
# Sums that are faster, or slower, and not the usual.
_FAST_COMPUTE = frozenset({74, 75, 77, 78, 79})


class Agreed(NamedTuple):
    """How all ranks perform an execution: by one kernel or in phases, of which one collective adds
    up the products in an order; what each has told for it.
    """

    fuses: bool
    addition_order: str
    told: tuple[bytes, ...]


class _Made:
    """What one rank prepares for one execution.

    Ranks `say` what they are about to do, `hear` what all have said, and `launch`.
    """

    def __init__(
        self,
        context: Context,
        share: Share,
        call_: Call,
        given: Arguments,
        algorithms: Algorithms,
    ) -> None:
        self._context, self._given = context, given
        self.share = share
        self._problem: Problem = share.strategy.problem
        self._fused: Fused | None = None
        self._phases: Execution | None = None
        self._repeated: Known[Agreed] | None = None
        self.result: Result
        self.extras: dict[str, Result] = {}
        bindings()  # raises where there is no cuBLASLt
        first = call_.operands[0]
        assert first is not None
        self.stream = device_array.stream_of(context, first, given.stream)
        if algorithms.timings is not None and streams.capturing(self.stream):
            raise RuntimeError(
                "plan(autotune=True) waits for its stream, which is being captured into a CUDA "
                "graph; plan before the capture"
            )
        self.lane = Lane.of(context, self.stream)
        self.blocking = call_.options.blocking is True
        a, b = (device_array.read(context, x, n) for x, n in ((given.a, "a"), (given.b, "b")))
        c = None if given.c is None else device_array.read(context, given.c, "c")
        held = {n: device_array.read(context, x, n) for n, x in (given.inputs or {}).items()}
        self.result = self._place(call_, (a, b, c))
        out = self.result.array
        if call_.options.inplace and algorithms.timings is not None:
            out = device_array.laid_out_alike(context, out)  # what is timed spoils it
        self._make_extras()
        alpha, beta = given.scalars()
        compute = call_.options.compute_type
        self.operands = Operands(
            a=a.transposed() if call_.transpose[0] else a,
            b=b.transposed() if call_.transpose[1] else b,
            c=c,
            out=out,
            alpha=alpha,
            beta=beta,
            inputs=held,
            outputs={name: each.array for name, each in self.extras.items()},
            stream=self.stream,
            algorithms=algorithms,
            scales=self._scales(call_),
            compute=int(compute) if compute in _FAST_COMPUTE else None,
        )
        comes_again = algorithms.timings is None and not streams.capturing(self.stream)
        placed = self.operands.place if shows_result(share, self.operands) else ()
        self._key = (*self.operands.use, placed) if comes_again else None

    # -- what the ranks tell each other ------------------------------------------------------------

    def say(self) -> bytes:
        """What to tell the peers first: the execution that this one repeats, or all of it.

        Raises HeapExhausted.
        """
        if self._key is not None:
            self._repeated = self.share.repeats.find(self._key, self.lane)
        if self._repeated is None:
            return self._say_all()
        return _AGAIN + self._repeated.number.to_bytes(8, "little")

    def _say_all(self) -> bytes:
        """The lane, and whether one kernel could do it, else what phases need."""
        share, out = self.share, matrix_of(self.operands.out)
        order = share.addition_order("F" if out.by_columns else "C")
        if share.form is None or not pays(share):
            told = self._prepare_phases(order)
        else:
            self._fused = Fused(share.form, share, self.operands, self.lane.team.device)
            told = self._fused.told
        return _ANEW + bytes([self.lane.number, _ORDERS.index(order)]) + told

    def _prepare_phases(self, order: str) -> bytes:
        """Take memory for a product in phases; what to tell the peers. Raises HeapExhausted."""
        self._phases = self._in_phases(self.operands, order)
        return self._phases.prepare()

    def _in_phases(self, operands: Operands, order: str) -> Execution:
        return Execution(self._context, self.share, operands, self.lane, addition_order=order)

    def hear(self, operation: str, said: Sequence[bytes]) -> None:
        """Decide with what all ranks have said. Collective.

        What only some of them repeat, or not the same execution, is told once more by all.
        """
        if self._repeated is not None and said.count(said[0]) == len(said):
            self._agreed = self._repeated.agreed
            return
        self._repeated = None
        number = self.share.repeats.next()
        if any(text.startswith(_AGAIN) for text in said):
            said = self._context.gather(operation, self._say_all)
        told = [text[3:] for text in said]
        apart = len({text[1] for text in said}) > 1  # streams are numbered differently
        mixed = len({text[2] for text in said}) > 1  # results lie in different orders
        order = "" if mixed else _ORDERS[said[0][2]]
        if apart:
            self.lane = Lane.numbered(self._context, LANES - 1)
        fuses = self._fused is not None and self._fused.chosen(told)
        if not fuses and (apart or mixed or self._fused is not None):
            told = self._context.gather(operation, lambda: self._prepare_phases(order))
        if not fuses:
            assert self._phases is not None
            self._phases.meet()
        self._agreed = Agreed(fuses, order, tuple(told))
        if self._key is not None and not apart:
            self.share.repeats.keep(self._key, number, self._agreed, self.lane)

    # -- what is put on the stream -----------------------------------------------------------------

    def launch(self) -> None:
        """Put all of it on the stream."""
        if self._repeated is not None:
            place = self.operands.place
            self._repeated.launch(place, self.lane, self.stream, self._launch_anew)
        elif self._agreed.fuses:
            assert self._fused is not None
            self._fused.run(self._context, self._agreed.told)
        else:
            assert self._phases is not None
            self._phases.run(self._agreed.told)

    def _launch_anew(self, stream: int) -> None:
        """All of it as agreed in an earlier execution, on a stream that may be being captured."""
        operands = replace(self.operands, stream=stream)
        if self._agreed.fuses:
            assert self.share.form is not None
            one = Fused(self.share.form, self.share, operands, self.lane.team.device)
            one.run(self._context, self._agreed.told)
        else:
            phases = self._in_phases(operands, self._agreed.addition_order)
            phases.prepare()
            phases.meet()  # they have, when this was executed first
            phases.run(self._agreed.told)

    # -- memory ------------------------------------------------------------------------------------

    def _place(self, call_: Call, arrays: Sequence[DeviceArray | None]) -> Result:
        """D: c itself where the call is in place, else new, in the operands' order and memory."""
        context, given = self._context, self._given
        a, b, c = arrays
        assert a is not None and b is not None
        if call_.options.inplace:
            result = device_array.result_in(context, given.c)
            self._require_apart(result.array, a, b)
            return result
        specs = call_.operands
        column = (
            specs[2].order == "F"
            if specs[2] is not None
            else all(spec is not None and spec.order == "F" for spec in specs[:2])
        )
        on_heap = all(x.block is not None for x in (a, b, c) if x is not None)
        return device_array.new_result(
            context,
            given.a,
            self._problem.d.local_shape(context.rank),
            self._problem.result,
            "F" if column else "C",
            on_heap=on_heap,
        )

    def _scales(self, call_: Call) -> Scales | None:
        """The scales of eight-bit matrices: those of a and b lie as op(A) and op(B)."""
        scaling, context = self._problem.scaling, self._context
        if scaling is None:
            return None
        numbers = self._given.numbers(scaling)
        given = scales_in_order(self._given.scales)
        arrays: list[DeviceArray | None] = []
        for index, (number, scale) in enumerate(zip(numbers, given, strict=True)):
            if number is not None or scale is None:
                arrays.append(None)
                continue
            array = device_array.read(context, scale, f"the scale of {'abcd'[index]}")
            turned = index < 2 and call_.transpose[index] and len(array.shape) == 2
            arrays.append(array.transposed() if turned else array)
        return Scales(tuple(1.0 if x is None else x for x in numbers), tuple(arrays))

    def _require_apart(self, out: DeviceArray, a: DeviceArray, b: DeviceArray) -> None:
        """Raise ValueError when writing to c would change a or b."""
        given = self._given
        library = library_of(given.c)
        if library.spec(given.c).device == "cpu":
            target = library.host_view(given.c)
            shared = any(share_memory(target, library.host_view(x)) for x in (given.a, given.b))
        else:
            shared = out.overlaps(a) or out.overlaps(b)
        if shared:
            raise ValueError("c shares memory with a or b, and options.inplace=True overwrites it")

    def _make_extras(self) -> None:
        """Room for the epilog's outputs, zero where nothing will be written."""
        context, problem = self._context, self._problem
        m, n = problem.d.local_shape(context.rank)
        made_of = [*requirements(problem.epilog, m, n, problem.extras).outputs]
        if problem.scaling is not None and problem.scaling.amax:
            made_of.append(Extra("result_amax", ((1,),), "float32"))
        for extra in made_of:
            shape = extra.shape
            if extra.name == problem.epilog.makes_bgrad and not problem.epilog.gradient:
                layout, axis = (problem.a, 0) if extra.name == "bgrada" else (problem.b, 1)
                shape = (layout.global_shape[axis],)
            made = device_array.new_result(
                context, self._given.a, shape, extra.dtype, "F", on_heap=False
            )
            self.extras[extra.name] = made
            if made.array.size:
                nbytes = made.array.size * made.array.itemsize
                call("cuMemsetD8Async", made.array.address, 0, nbytes, self.stream)


def run(
    context: Context,
    operation: str,
    arguments: Arguments,
    ready: Callable[[], tuple[Any, Call]],
) -> Any:
    """As `api.run`, on GPUs. Collective."""
    one = _heard(context, operation, arguments, ready)
    with context.executing(operation):
        one.launch()
        if one.blocking:
            one.lane.team.synchronize(one.stream)
        out = one.result.give(context, one.stream)
        aux = {name: each.give(context, one.stream) for name, each in one.extras.items()}
    return (out, aux) if aux else out


def tune(
    context: Context,
    operation: str,
    arguments: Arguments,
    ready: Callable[[], tuple[Any, Call]],
) -> None:
    """Time the algorithms of the products of a plan, and choose for all its executions. Collective.

    Operands stay as they are. Waits for the stream. Raises RuntimeError on all ranks while one
    rank's is being captured.
    """
    timed = Algorithms(timings={})
    one = _heard(context, operation, arguments, ready, timed)
    assert timed.timings is not None
    with context.executing(operation):
        one.launch()
        one.lane.team.synchronize(one.stream)
    texts = context.gather(operation, lambda: tuning.packed(timed.timings or {}))
    chosen = tuning.fastest([tuning.unpacked(text) for text in texts])
    one.share.algorithms.chosen.update(chosen)
    one.share.repeats.forget()  # graphs have the algorithms of before
    one.share.kept["told"] = tuning.told(timed.timings, chosen)


def _heard(
    context: Context,
    operation: str,
    arguments: Arguments,
    ready: Callable[[], tuple[Any, Call]],
    algorithms: Algorithms | None = None,
) -> _Made:
    """What this rank has prepared, after all have agreed on how. Collective."""
    made: list[_Made] = []

    def prepare() -> bytes:
        plan, call_ = ready()
        chosen = algorithms or plan.share.algorithms
        made.append(_Made(context, plan.share, call_, arguments, chosen))
        scales = plan.problem.scaling and arguments.numbers(plan.problem.scaling)
        return packed_scalars(arguments.scalars(), scales or ()) + made[0].say()

    said = agreed_scalars(context.gather(operation, prepare))
    made[0].hear(operation, said)
    return made[0]
