"""Lowering a strategy: one rank's program of steps on its GPU, in the order of the stages. Pure.

Stages follow each other whole, or slabs go in parts, as `chunking` says, so that exchanges overlap
with transforms. A part of an exchange is sent when it is ready, and awaited where it is needed. On
one host a kernel pushes it: see `pushes`. Between hosts it is packed, and two more streams bring
it: one synchronises and fetches, the other unpacks, so that the wire does not wait for unpacking. A
fetch buffer is filled again when its contents have been unpacked.

    user's      transform 0, pack 0 | transform 1, pack 1 |          await 0 | transform a | ...
    fetch                    synchronise, get 0 | synchronise, get 1 | ...
    unpack                                      unpack 0 |             unpack 1 | ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from shardmath.base.immutable import Immutable
from shardmath.geometry import Layout, Move, Run
from shardmath.machine import OnHosts
from shardmath.operators.fft.local_steps import LocalStep, Scale, local_steps
from shardmath.operators.fft.problem import Problem
from shardmath.operators.fft.pushes import (
    MAX_CHUNKS,
    Chunk,
    Start,
    arrived,
    joined,
    pushed_rows,
    ready,
    started,
)
from shardmath.operators.fft.stages import (
    Chunking,
    Stage,
    chunking_for,
    first_parts,
    split_axes,
    stages,
    weighted_ranges,
)
from shardmath.operators.fft.strategy import Strategy
from shardmath.program.hosts import delivered
from shardmath.program.rank_program import USERS, Copy, RankProgram, View, lane_memories, packed
from shardmath.program.steps import READ, TAKEN, Await, Memory, On, Record
from shardmath.program.steps import Move as MoveStep
from shardmath.redistribution import TransferPlan
from shardmath.redistribution.delivery import Delivery

USE_CHUNKS = True  # whether exchanges overlap with transforms, where they can and that pays

_FETCH, _UNPACK = "fetch", "unpack"  # streams of the lane
_FETCH_BUFFERS = 2  # for parts of peers' outboxes, in turn

_Ranges = tuple[tuple[int, int], ...]  # by rank: indices of its local array along an axis


class Results(NamedTuple):
    """Whether peers reach the results of all ranks, and all are packed in the problem's order."""

    reachable: bool
    packed: bool


class UserArrays(Immutable):
    """The operand and the result of one execution on one rank.

    `overlap`: writing the result may change the operand. `in_place`: the result takes the operand's
    place, element by element.
    """

    operand: View
    out: View
    overlap: bool = False
    in_place: bool = False


class GPUPlan(OnHosts, Immutable):
    """A strategy, for ranks on hosts of these numbers."""

    problem: Problem
    strategy: Strategy
    hosts: tuple[int, ...]

    @property
    def chunking(self) -> Chunking | None:
        """How exchanges overlap with transforms; None where they do not."""
        if not USE_CHUNKS:
            return None
        return chunking_for(
            self.problem, two_exchanges=self.strategy.exchanges > 1, multi_host=self.multi_host
        )

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of the strategy, the same for all ranks and arrays."""
        return stages(self.strategy)

    def part(
        self, whole: TransferPlan, u: int, sources: _Ranges, v: int, targets: _Ranges
    ) -> PartOfTransfer:
        """A part of the transfer of an exchange: one object for all executions."""
        ends, order = (whole.src, whole.dst, whole.itemsize), self.problem.order
        part = PartOfTransfer(*ends, whole, u, sources, v, targets, order)
        return self._parts.setdefault(part, part)

    @cached_property
    def _parts(self) -> dict[PartOfTransfer, PartOfTransfer]:
        return {}

    def __str__(self) -> str:
        """The strategy, and the steps of rank 0 where arrays are on the heap, and not in parts."""
        problem = self.problem
        shapes = problem.source.local_shape(0), problem.target.local_shape(0)
        arrays = UserArrays(
            packed("operand", shapes[0], problem.dtype, problem.order),
            packed("out", shapes[1], problem.result, problem.order),
        )
        steps = lowered(self, 0, arrays, Results(True, True)).steps
        lines = [str(self.strategy), "rank 0:", *map(str, steps)]
        if self.multi_host:
            lines.append(
                f"{self.host_count} hosts: each rank packs what its peers read, in place on "
                "the same host, by `get` from another"
            )
        if self.chunking is not None:
            lines.append(f"in parts, where these steps allow it: {self.chunking}")
        return "\n".join(lines)


def lowered(
    plan: GPUPlan,
    rank: int,
    arrays: UserArrays,
    results: Results,
    chunking: Chunking | None = None,
) -> RankProgram:
    """The program of `rank` for these arrays: in parts if all ranks can, else stage by stage."""
    sequence = plan.stages
    kind = _Deliveries if plan.multi_host else _Pushes
    if chunking is not None:
        lowering, parts, last = kind(plan, rank, arrays, results), sequence, list[Copy]()
        if len(sequence) == 4 and not (plan.multi_host or results.packed):
            # Peers push into one more receive buffer, which is then copied to the result.
            parts = (*sequence[:3], replace(sequence[3], target="receive 1"))
            received = packed("receive 1", arrays.out.shape, arrays.out.dtype, plan.problem.order)
            last += [Copy(received, arrays.out)] if received.size else []
        if lowering.in_parts(parts, chunking):
            lowering.steps += last
            return lowering.program()
    lowering = kind(plan, rank, arrays, results)
    lowering.whole(sequence)
    return lowering.program()


class PartOfTransfer(TransferPlan):
    """The part of a transfer between slabs, the `whole`, that is in `source_ranges` of the sources'
    arrays along axis `u`, and in `target_ranges` of the destinations' along axis `v`.

    Moves are between whole local arrays, packed in `order`.
    """

    whole: TransferPlan = field(repr=False)
    u: int
    source_ranges: _Ranges
    v: int
    target_ranges: _Ranges
    order: Literal["C", "F"]

    @cached_property
    def fits(self) -> bool:
        """Whether the kernel can push the rows of all ranks, and is worth it."""
        ranks = range(self.src.size)
        return all(row.fits for rank in ranks for row in pushed_rows(self, rank, self.order))

    def into(self, rank: int) -> tuple[Move, ...]:
        return self._once(("into", rank), lambda: tuple(self._cut(self.whole.into(rank))))

    def out_of(self, rank: int) -> tuple[Move, ...]:
        return self._once(("out of", rank), lambda: tuple(self._cut(self.whole.out_of(rank))))

    @cached_property
    def _parts_out(self) -> dict[int, list[tuple[int, int]]]:
        return {
            rank: sorted(
                (move.dst, move.elements) for move in self.out_of(rank) if move.dst != rank
            )
            for rank in range(self.src.size)
        }

    def _cut(self, moves: tuple[Move, ...]) -> Iterator[Move]:
        for move in moves:
            (first, end), (lo, hi) = self.source_ranges[move.src], self.target_ranges[move.dst]
            if first == end or lo == hi or not move.elements:
                continue
            one, two = move.runs[self.u], move.runs[self.v]
            cut = move.with_run(self.u, Run(1, end - first, first, 0, one.dst_start + first, 0))
            yield cut.with_run(self.v, Run(1, hi - lo, two.src_start + lo, 0, lo, 0))


class _Lowering:
    """The unfinished steps of one rank. `array` names the one that the last stage has written."""

    def __init__(self, plan: GPUPlan, rank: int, arrays: UserArrays, results: Results) -> None:
        self.plan, self.problem, self.rank, self.hosts = plan, plan.problem, rank, plan.hosts
        self.user, self.results = arrays, results
        self.arrays = {"operand": arrays.operand, "out": arrays.out}
        self.array = "operand"
        self.steps: list[Any] = []
        self.shared: list[str] = []  # memories that peers reach
        self.buffers: dict[str, int] = {}  # memories without an array, which peers reach
        self.exchanges = 0
        self.possible = True  # whether all ranks can do it in parts
        self.arrivals: list[str] = []  # the events of parts that nobody has awaited yet

    # -- what depends on where ranks are -----------------------------------------------------------

    def send(
        self, source: str, target: str, parts: Sequence[PartOfTransfer], *, signals: bool
    ) -> None:
        """Send these parts of an exchange. With `signals`, `arrive` can wait for each."""
        raise NotImplementedError

    def arrive(self) -> None:
        """Wait until the next part that signals has come from all ranks."""
        raise NotImplementedError

    def exchange(self, stage: Stage, source: str, target: str) -> None:
        """Do all of an exchange, and wait for it."""
        raise NotImplementedError

    def end(self) -> None:
        """Wait until all other streams are done."""
        raise NotImplementedError

    # -- stages ------------------------------------------------------------------------------------

    def whole(self, sequence: Sequence[Stage]) -> None:
        """Lower one stage after the other, each of whole arrays."""
        for stage in sequence:
            target = self._target(stage)
            if stage.kind is None:
                self.exchange(stage, self.array, target)
                self.exchanges += 1
            else:
                self._transform(stage, self._source(target), self.arrays[target])
            self.array = target
        self.end()

    def in_parts(self, sequence: Sequence[Stage], chunking: Chunking) -> bool:
        """Lower stages of slabs in parts; False, on all ranks, for stages that cannot be cut.

        The result may overlap the operand: it is not written before all of the operand was read.
        """
        axes = split_axes(sequence)
        if axes is None:
            return False
        u, v = axes[:2]
        first_fft, exchange, second_fft, *second_exchange = sequence
        work, received, transformed, *last = map(self._target, sequence)
        transfer = _transfer(exchange)
        part = self.plan.part
        firsts = _first_ranges(exchange.layout, u, chunking.first)
        seconds = _ranges(exchange.result, v, chunking.second)
        tail = len(firsts) - min(chunking.tail, len(firsts))  # the first part of the tail
        ends = zip(firsts[tail], firsts[-1], strict=True)
        rest = tuple((lo, hi) for (lo, _), (_, hi) in ends)
        for number, ranges in enumerate(firsts):
            self._transform(first_fft, self.arrays["operand"], self.arrays[work], u, ranges)
            parts, signals = list[PartOfTransfer](), number + 1 == len(firsts)
            if number < tail:
                (everything,) = _ranges(exchange.result, v, 1)
                parts = [part(transfer, u, ranges, v, everything)]
            elif signals:
                parts = [part(transfer, u, rest, v, needed) for needed in seconds]
            self.send(work, received, parts, signals=signals)
        self.exchanges += 1
        for number, ranges in enumerate(seconds, 1):
            self.arrive()
            self._transform(second_fft, self.arrays[received], self.arrays[transformed], v, ranges)
            for stage, target in zip(second_exchange, last, strict=True):
                (everything,) = _ranges(stage.result, axes[2], 1)
                parts = [part(_transfer(stage), v, ranges, axes[2], everything)]
                self.send(transformed, target, parts, signals=number == len(seconds))
        if last:
            self.arrive()
        self.end()
        return self.possible

    def program(self) -> RankProgram:
        """The program of these steps."""
        shared = tuple(dict.fromkeys(self.shared))
        buffers = {name: Memory(nbytes, shared=True) for name, nbytes in self.buffers.items()}
        views = [*self.arrays.values()]
        for step in self.steps:
            if isinstance(step, LocalStep):
                views += [step.target] if isinstance(step, Scale) else [step.source, step.target]
        memories = {**buffers, **lane_memories(views, USERS, shared)}
        return RankProgram(tuple(self.steps), self.arrays, memories, shared, self.problem.order)

    def _target(self, stage: Stage) -> str:
        """The name of the array that a stage writes."""
        if stage.target == "out":
            return stage.target
        shape = stage.result.local_shape(self.rank)
        view = packed(stage.target, shape, stage.result_dtype, self.problem.order)
        name, number = stage.target, 1
        while self.arrays.setdefault(name, view) != view:
            number += 1
            name = f"{stage.target}, array {number}"
        return name

    def _source(self, target: str) -> View:
        """The array to be transformed into `target`, or a copy of an operand that overlaps it."""
        source = self.arrays[self.array]
        if (self.array, target) != ("operand", "out") or not self.user.overlap:
            return source
        if self.user.in_place:
            return self.user.out
        kept = packed("pack operand", source.shape, source.dtype)
        self.steps.append(Copy(source, kept))
        return kept

    def _transform(
        self, stage: Stage, source: View, target: View, axis: int = 0, ranges: _Ranges = ()
    ) -> None:
        """A stage's transform, of all or of this rank's range along an axis."""
        assert stage.kind is not None, "a transform"
        if ranges:
            lo, hi = ranges[self.rank]
            source, target = source.part(axis, lo, hi), target.part(axis, lo, hi)
        self.steps += local_steps(
            stage.kind,
            stage.axes,
            source,
            target,
            preserve_input=source.memory == "operand",
            factor=stage.factor,
        )


class _Pushes(_Lowering):
    """Lowering on one host: a kernel pushes parts, and moves push or pull whole exchanges."""

    def __init__(self, plan: GPUPlan, rank: int, arrays: UserArrays, results: Results) -> None:
        super().__init__(plan, rank, arrays, results)
        self.chunks: list[Chunk] = []
        self.ready = 0

    def send(
        self, source: str, target: str, parts: Sequence[PartOfTransfer], *, signals: bool
    ) -> None:
        self.ready += 1
        memories = [self.arrays[name].memory for name in (source, target)]
        chunks = []
        for part in parts:
            self.possible = self.possible and part.fits
            rows = tuple(pushed_rows(part, self.rank, part.order))
            where = memories[0], memories[1], self.exchanges
            chunks.append(Chunk(rows, *where, self.ready, signals))
        names = [f"arrived {len(self.chunks) + number}" for number in range(len(chunks) * signals)]
        self.steps.append(ready(self.ready, chunks, names))
        self.arrivals += names
        self.chunks += chunks
        self.shared.append(memories[1])
        self.possible = self.possible and len(self.chunks) <= MAX_CHUNKS

    def arrive(self) -> None:
        self.steps.append(arrived(self.arrivals.pop(0)))

    def exchange(self, stage: Stage, source: str, target: str) -> None:
        """See _Lowering. The first push waits for owners, which may still use its target."""
        transfer = _transfer(stage)
        pulls = target == "out" and not self.results.reachable
        if pulls:
            self.steps.append(READ)
        elif not self.shared:
            self.steps.append(TAKEN)
        self.steps += [MoveStep(transfer, source, target), TAKEN if pulls else READ]
        self.shared.append(self.arrays[source if pulls else target].memory)

    def end(self) -> None:
        if self.chunks:
            pairs = dict.fromkeys((chunk.source, chunk.target) for chunk in self.chunks)
            sources, targets = zip(*pairs, strict=True)
            start = Start(len(self.hosts), tuple(self.chunks), sources, targets)
            self.steps = [started(start), *self.steps, joined()]


class _Deliveries(_Lowering):
    """Lowering between hosts: parts are packed, and brought by two streams beside the user's."""

    def __init__(self, plan: GPUPlan, rank: int, arrays: UserArrays, results: Results) -> None:
        super().__init__(plan, rank, arrays, results)
        axes = tuple(range(self.problem.source.ndim))
        self.axes = axes if self.problem.order == "C" else axes[::-1]  # of parcels: as the results
        self.sent = 0

    def send(
        self, source: str, target: str, parts: Sequence[TransferPlan], *, signals: bool
    ) -> None:
        """See _Lowering. Each part has an outbox of its own. Whole exchanges use two in turn: all
        ranks synchronise between them, after reading.
        """
        for part in parts:
            number = self.sent
            delivery = Delivery(part, self.rank, self.hosts, self.axes)
            outbox, fetched = self._buffers(delivery)
            pack, synchronise, get, unpack = delivered(delivery, source, target, outbox, fetched)
            self.steps += [pack, Record(f"packed {number}"), On(_FETCH, Await(f"packed {number}"))]
            if number >= _FETCH_BUFFERS:
                self.steps.append(On(_FETCH, Await(f"unpacked {number - _FETCH_BUFFERS}")))
            beside = (
                (_FETCH, (synchronise, get, Record(f"fetched {number}"))),
                (
                    _UNPACK,
                    (Await(f"fetched {number}"), unpack, Record(f"unpacked {number}")),
                ),
            )
            self.steps += [On(stream, step) for stream, steps in beside for step in steps]
            self.arrivals += [f"unpacked {number}"] * signals
            self.sent += 1

    def arrive(self) -> None:
        self.steps.append(Await(self.arrivals.pop(0)))

    def exchange(self, stage: Stage, source: str, target: str) -> None:
        self.send(source, target, [_transfer(stage)], signals=True)
        self.arrive()

    def end(self) -> None:
        if self.sent:
            self.steps += [On(_UNPACK, TAKEN), On(_UNPACK, Record("delivered")), Await("delivered")]

    def _buffers(self, delivery: Delivery) -> tuple[str, str]:
        """The outbox and the fetch buffer of the next delivery."""
        number = self.sent if isinstance(delivery.transfer, PartOfTransfer) else self.sent % 2
        outbox, fetched = f"outbox {number}", f"fetched {self.sent % _FETCH_BUFFERS}"
        self.shared.append(outbox)
        for name, nbytes in ((outbox, delivery.outbox.nbytes), (fetched, delivery.room)):
            self.buffers[name] = max(self.buffers.get(name, 0), nbytes)
        return outbox, fetched


def _transfer(stage: Stage) -> TransferPlan:
    assert stage.transfer is not None, "an exchange"
    return stage.transfer


def _first_ranges(layout: Layout, axis: int, weights: Sequence[int]) -> list[_Ranges]:
    """The ranges of all ranks for each part of the first transform: as many parts as the shortest
    extent has.
    """
    extents = [part.length for part in layout.column(axis)]
    ranges = [first_parts(extent, weights) for extent in extents]
    least = min(map(len, ranges))
    if least < len(weights):
        ranges = [first_parts(extent, [1] * least) for extent in extents]
    return list(zip(*ranges, strict=True))


def _ranges(layout: Layout, axis: int, count: int) -> list[_Ranges]:
    """The ranges of all ranks for each of `count` equal parts."""
    ranges = (weighted_ranges(own.length, [1] * count) for own in layout.column(axis))
    return list(zip(*ranges, strict=True))
