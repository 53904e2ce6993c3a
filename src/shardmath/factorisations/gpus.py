"""Performing factorisations on GPUs, by cuSOLVER and cuBLAS on blocks of buffers, on two streams.

Steps between a synchronisation and an arrival go to a stream of their own; steps after the arrival
go to the user's stream, once those before are done. So ranks copy the next panel while they
multiply. The rank that factorises it does so before its own product: beside that, each of the many
short kernels of a panel would wait for blocks of the product to end. The other ranks multiply
meanwhile, and none waits for long, because ranks have panels in turn.

    panels   meet ─ pull k ─ subtract from k+1 ─ factorise k+1 ┬─ meet ─ pull k+1 ─ ...
    user's                                                     └─ subtract k from the rest ─ ...

A panel is copied to one of two places in turn: the last but one is not read any more. Solutions by
factors that are complete wait for no peer: panels are copied one ahead of the one that is used.

    panels   pull k ─ pull k+1 ──┬─ pull k+2 ─ ...
    user's         └─ use k ─────┴─ use k+1 ─ ...

No host waits for its GPU: pivots and faults of numbers stay there until the results are read.

Products in a lower precision than their type become steps that pack their factors, in memory of
each stream's own, and steps that multiply these (`local/gpu/packing.py`). Consecutive products with
rows of one panel share its packing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any, ClassVar, NamedTuple

from shardmath.factorisations.steps import (
    NOT_PIVOTS,
    CheckFinite,
    Clear,
    Conjugate,
    CopyDiagonal,
    Cut,
    ExchangeRows,
    FactoriseCholesky,
    FactoriseLU,
    Fill,
    KeepLower,
    SetIdentity,
    Substitute,
    Subtract,
)
from shardmath.geometry import Layout
from shardmath.handles.operand import Operand
from shardmath.local.gpu import Matrix, lapack, packing
from shardmath.local.gpu.blaslt import WORKSPACE
from shardmath.local.gpu.gemm import multiply
from shardmath.local.lapack import Op, Precision
from shardmath.operators.lanes import LANES, Lane
from shardmath.program.gpu_performing import Execution, Facts, Given, GPUArrays, GPUPerformer
from shardmath.program.gpu_steps import GPUProgram, Launch, Memories
from shardmath.program.performing import Arguments, Plan, Turn
from shardmath.program.rank_program import Copy, RankProgram, View, lane_memories, packed
from shardmath.program.steps import (
    Arrive,
    Await,
    Combine,
    Memory,
    Move,
    On,
    Program,
    Record,
    Step,
    Synchronise,
)
from shardmath.redistribution import TransferPlan

AHEAD = "panels"  # the stream on which the next panel is factorised
_BLAS, _BLAS_AHEAD, _SOLVER = "blas", "blas of panels", "solver"  # memories
_BRINGS = (Synchronise, Move)  # what brings a panel
_PIVOTS = "pivots"  # the operand that every rank has whole


class Least(Step, words="the least of {source} to {target}"):
    """The least number of `source` goes to the one element of `target`."""

    source: str
    target: str


class PackFactor(Step):
    """op(source), a factor of a product in that precision, is packed in `target`: a left factor, or
    a `right` one.
    """

    source: Cut
    op: Op
    precision: Precision
    right: bool
    target: View

    def __str__(self) -> str:
        return f"pack {self.source}{'' if self.op == 'N' else '^' + self.op} in {self.precision}"


class SubtractPacked(Step, words="subtract the product of packed factors from {target}"):
    """`target` minus the product of two packed factors."""

    target: Cut
    left: View
    right: View


# -- the program -----------------------------------------------------------------------------------


def lowered(
    program: Program, users: Mapping[str, View], rank: int, size: int, *, staged: Collection[str]
) -> RankProgram:
    """The program of a rank for its GPU. `users` are its operands and results. Pure.

    `staged` are operands that some peer does not reach: where peers read them, they are copied to
    memory that all reach.
    """
    arrays = {**users, **_workspace(program, rank)}
    steps: list[Any] = []
    for name in program.published:
        if name in users and name in staged:
            arrays[name] = packed(f"factors: {name}", users[name].shape, users[name].dtype, "F")
            steps.append(Copy(users[name], arrays[name]))
    for step in _by_chunks(program.steps):
        if isinstance(step, Combine):
            of_all = f"{step.source} of all"
            arrays[of_all] = packed(f"factors: {of_all}", (size,), "int64")
            everywhere = Layout.replicated((size,), size)
            plan = TransferPlan(Layout.slab((size,), size, axis=0), everywhere, 8)
            steps += [Move(plan, step.source, of_all), Least(of_all, step.target)]
        elif isinstance(step, CopyDiagonal):
            view, (lo, hi) = _part(arrays[step.block.buffer], step.block), step.place
            diagonal = replace(view, shape=(hi - lo,), strides=(sum(view.strides),))
            steps.append(Copy(diagonal, arrays[step.target].part(0, lo, hi)))
        else:
            steps.append(step)
    shared = {arrays[name].memory for name in program.published}
    panels = {name for name, array in program.workspace.items() if array.memory}
    steps, packed_factors = _with_packed_factors(_on_streams(steps, panels), arrays)
    memories = lane_memories([*arrays.values(), *packed_factors], users, shared)
    return RankProgram(tuple(steps), arrays, memories, tuple(sorted(shared)), "F", pulls=True)


def _workspace(program: Program, rank: int) -> dict[str, View]:
    """The views of the buffers of the workspace. Those of one memory use two places in turn, and
    have the same distance between columns, so that cuBLAS sees alike products.
    """
    sharing: dict[str, list[tuple[int, ...]]] = {}
    for array in program.workspace.values():
        sharing.setdefault(array.memory, []).append(array.local_shape(rank))
    found, turns = {}, Counter[str]()
    for name, array in program.workspace.items():
        memory, shape = array.memory, array.local_shape(rank)
        view = packed(f"factors: {memory or name}", shape, array.dtype, "F")
        if memory:
            tallest = max(1, *(each[0] for each in sharing[memory]))
            strides = view.itemsize, view.itemsize * tallest
            place = f"{view.memory} {turns[memory] % 2}"
            view = View(place, shape, strides[: len(shape)], array.dtype)
            turns[memory] += 1
        found[name] = view
    return found


def _part(view: View, cut: Cut) -> View:
    """The block of a matrix."""
    return view.part(0, *cut.rows).part(1, *cut.columns)


def _by_chunks(steps: Iterable[Any]) -> list[Any]:
    """The steps, with exchanges of rows in another order: not all exchanges in one block of columns
    after the other, but one chunk of exchanges after the other in all blocks at once.
    """
    made: list[Any] = []
    run: list[ExchangeRows] = []
    for step in [*steps, None]:
        follows = isinstance(step, ExchangeRows) and not step.backward
        if follows and (not run or _goes_on(run[-1], step)):
            run.append(step)
            continue
        for one, behind in zip(run, [*run[1:], None], strict=False):
            lo, end = one.place
            hi = end if behind is None else behind.place[0]
            columns = run[0].target.columns[0], one.target.columns[1]
            target = one.target._replace(columns=columns)
            made.append(replace(one, place=(lo, hi), target=target))
        run = [step] if follows else []
        if step is not None and not follows:
            made.append(step)
    return made


def _goes_on(last: ExchangeRows, step: ExchangeRows) -> bool:
    """Whether `step` makes the later ones of the same exchanges, in the next columns."""
    return (
        (step.pivots, step.place[1], step.target.buffer)
        == (last.pivots, last.place[1], last.target.buffer)
        and step.target.columns[0] == last.target.columns[1]
        and step.place[0] - step.first == last.place[0] - last.first
        and step.place[0] >= last.place[0]
    )


def _on_streams(steps: Iterable[Any], panels: Collection[str]) -> list[Any]:
    """The steps on their streams; see the top of this module. `panels` are the buffers that lie in
    one of two places in turn.
    """
    made: list[Any] = []
    rests = 0  # how many times both streams have been in use
    for segment in _segments(steps):
        arrival = next((at for at, step in enumerate(segment) if isinstance(step, Arrive)), None)
        if arrival is None:
            if rests:
                made += [On(AHEAD, Record("next")), Await("next")]
                rests = 0
            made += _with_panels_ahead(segment, panels)
            continue
        last_but_one, last = f"rest {rests % 2}", f"rest {1 - rests % 2}"
        if not rests:  # peers will read what the user's stream has done so far
            made += [Record(last_but_one), Record(last), On(AHEAD, Await(last))]
        ahead = segment[:arrival]
        come = next((at for at, x in enumerate(ahead) if not isinstance(x, _BRINGS)), arrival)
        made += [On(AHEAD, step) for step in (ahead[0], Await(last_but_one), *ahead[1:come])]
        made += [On(AHEAD, step) for step in (Await(last), *ahead[come:])]
        made += [On(AHEAD, Record("panel")), Await("panel")]
        made += [*segment[arrival + 1 :], Record(last_but_one)]
        rests += 1
    return made


class _Factor(NamedTuple):
    """What products with the same rows or columns of a factor have in common."""

    buffer: str
    op: Op
    right: bool
    depth: tuple[int, int]  # the rows or columns of the buffer along which products sum

    @classmethod
    def of(cls, product: Subtract, *, right: bool) -> _Factor:
        """The left factor of a product, or the right one."""
        cut, op = (product.left, product.right)[right], product.ops[right]
        depth = cut.rows if right is (op == "N") else cut.columns
        return cls(cut.buffer, op, right, depth)

    @property
    def has_rows(self) -> bool:
        """Whether a line of the factor is a row of the buffer."""
        return self.right is not (self.op == "N")

    def lines(self, product: Subtract) -> tuple[int, int]:
        """The lines of a product's factor: rows or columns of the buffer."""
        cut = (product.left, product.right)[self.right]
        return cut.rows if self.has_rows else cut.columns

    def cut(self, lines: tuple[int, int]) -> Cut:
        """The block of the buffer that these lines are."""
        rows, columns = (lines, self.depth) if self.has_rows else (self.depth, lines)
        return Cut(self.buffer, rows, columns)


def _with_packed_factors(
    steps: Iterable[Any], arrays: Mapping[str, View]
) -> tuple[list[Any], list[View]]:
    """The steps, with products in a lower precision than their type as products of packed factors;
    and the views of these.

    No product of a run reads what another one writes, so the factors of all are packed first.
    """
    made: list[Any] = []
    views: list[View] = []
    for of_run, run in groupby(steps, _run_of):
        if of_run is None:
            made += run
            continue
        stream, precision, factors = of_run
        products = [step.step if isinstance(step, On) else step for step in run]
        packs, parts = zip(
            *(_packed_once(factor, products, precision, stream, arrays) for factor in factors),
            strict=True,
        )
        views += [pack.target for pack in packs]
        own = [
            SubtractPacked(product.target, left, right)
            for product, left, right in zip(products, *parts, strict=True)
        ]
        made += [On(stream, step) if stream else step for step in (*packs, *own)]
    return made, views


def _packed_once(
    factor: _Factor,
    products: Sequence[Subtract],
    precision: Precision,
    stream: str,
    arrays: Mapping[str, View],
) -> tuple[PackFactor, list[View]]:
    """The step that packs all lines of a factor that these products read, in the stream's place for
    such factors, and what each product reads.
    """
    lines = [factor.lines(product) for product in products]
    whole = min(lo for lo, _ in lines), max(hi for _, hi in lines)
    dtype, side = arrays[factor.buffer].dtype, "right" if factor.right else "left"
    extents = whole[1] - whole[0], factor.depth[1] - factor.depth[0]
    shape, kind = packing.packed_form(*extents, dtype, precision, right=factor.right)
    view = packed(" ".join(["factors: packed", side, stream]).rstrip(), shape, kind, "F")
    each = packing.lines_of_each(dtype, right=factor.right)
    parts = [view.part(1, *(each * (end - whole[0]) for end in one)) for one in lines]
    return PackFactor(factor.cut(whole), factor.op, precision, factor.right, view), parts


def _with_panels_ahead(segment: Sequence[Any], panels: Collection[str]) -> list[Any]:
    """The steps of a segment that waits for no peer, with the copies of its panels on their own
    stream: each as soon as the steps that use the last panel but one, in the same place, are done.

    From the first copy on, no step of the segment writes what a copy reads.
    """
    runs: list[list[Any]] = [[]]  # from the first copy of a panel to the next panel's
    for last, step in pairwise([None, *segment]):
        if _copies(step, panels) and not _copies(last, panels):
            runs.append([])
        runs[-1].append(step)
    before, *of_panels = runs
    if len(of_panels) < 2:
        return [*segment]
    made = [*before, Record("rest 0"), Record("rest 1")]
    for number, run in enumerate(of_panels):
        rest = f"rest {number % 2}"
        copies = [step for step in run if _copies(step, panels)]
        made += [On(AHEAD, step) for step in (Await(rest), *copies, Record("panel"))]
        made += [Await("panel"), *run[len(copies) :], Record(rest)]
    return made


def _copies(step: Any, panels: Collection[str]) -> bool:
    """Whether a step copies a panel to its place, or its pivots."""
    return isinstance(step, Move) and step.target in panels


def _run_of(step: Any) -> tuple[str, Precision, tuple[_Factor, _Factor]] | None:
    """What products that share their packed factors have in common: stream, precision and factors;
    None for any other step.
    """
    stream, inner = (step.stream, step.step) if isinstance(step, On) else ("", step)
    if not isinstance(inner, Subtract) or inner.precision == "full":
        return None
    if any(cut.is_empty for cut in (inner.target, inner.left, inner.right)):
        return None
    return stream, inner.precision, (_Factor.of(inner, right=False), _Factor.of(inner, right=True))


def _segments(steps: Iterable[Any]) -> list[list[Any]]:
    """The steps from each synchronisation to the next."""
    found: list[list[Any]] = [[]]
    for step in steps:
        if isinstance(step, Synchronise):
            found.append([])
        found[-1].append(step)
    return found


# -- what performs it ------------------------------------------------------------------------------


class FactorisationsOnGPUs(GPUPerformer):
    """Performs programs of factorisations on GPUs of one host, all in the last lane."""

    def read(self, arguments: Arguments) -> GPUArrays:
        """See Performer. Raises NotImplementedError where ranks are on several hosts, and
        BackendUnavailable without cuSOLVER.
        """
        if self._context.multi_host:
            raise NotImplementedError(
                f"{self._names.operation} computes on GPUs of one host, and ranks are on several: "
                'initialize("cpu"), and pass parts in host memory'
            )
        lapack.bindings()
        return super().read(arguments)

    def _lane(self, stream: int, decision: int) -> Lane:
        return Lane.numbered(self._context, LANES - 1)

    def _decide(self, plan: Plan, facts: Sequence[Facts]) -> int:
        """1, plus a bit for each operand that is staged, because a rank's is not reached."""
        reached = [all(ranks) for ranks in zip(*(rank.form for rank in facts), strict=True)]
        return 1 + sum(1 << at for at, is_reached in enumerate(reached) if not is_reached)

    def _facts(self, execution: Execution) -> Facts:
        return super()._facts(execution)._replace(form=_reached(execution.operands))

    def _foreseen(self, turn: Turn, stream: int) -> Facts:
        form = _reached(turn.known.arrays.operands)
        return super()._foreseen(turn, stream)._replace(form=form)

    def _given(self, execution: Execution) -> Given:
        arrays = {**execution.operands}
        arrays |= {name: result.array for name, result in execution.results.items()}
        turned = {name: arrays[name].transposed() for name in execution.plan.program.transposed}
        return Given({**arrays, **turned})

    def _program(self, execution: Execution, given: Given, decision: int) -> GPUProgram:
        context, lane, plan = self._context, execution.lane, execution.plan
        users = {name: View(name, x.shape, x.strides, x.dtype) for name, x in given.arrays.items()}
        split = [name for name in execution.operands if name != _PIVOTS]
        staged = {name for at, name in enumerate(split) if decision - 1 >> at & 1}

        def make() -> GPUProgram:
            program = lowered(plan.program, users, context.rank, context.size, staged=staged)
            return FactorisationProgram(context, lane, program)

        return self._programs.made((lane.number, plan, decision, *users.values()), make)


def _reached(operands: Mapping[str, Operand]) -> bytes:
    """Whether peers reach each operand that they may read, a byte for each."""
    split = (x for name, x in operands.items() if name != _PIVOTS)
    return bytes(x.block is not None or 0 in x.shape for x in split)


class FactorisationProgram(GPUProgram):
    """The program of a factorisation, by routines of the GPU's libraries."""

    @property
    def memories(self) -> Mapping[str, Memory]:
        """The memories of the lane that are needed."""
        rooms = [
            lapack.room(self.device, self._block(step.panel), pivots=isinstance(step, FactoriseLU))
            for _, step in self.steps
            if isinstance(step, FactoriseCholesky | FactoriseLU)
        ]
        own = {_BLAS: WORKSPACE, _BLAS_AHEAD: WORKSPACE, _SOLVER: max(rooms, default=0)}
        return {**self.program.memories, **{name: Memory(n) for name, n in own.items()}}

    def prepare(self, own: Mapping[str, int], stream: int, span: tuple[int, int]) -> None:
        """See GPUProgram. Raises BackendUnavailable, and what compiling a kernel does."""
        super().prepare(own, stream, span)
        for dtype in {view.dtype for view in self.program.arrays.values()} & {*lapack.DTYPES}:
            lapack.load(self.device, dtype)
        packs = [step for _, step in self.steps if isinstance(step, PackFactor)]
        for dtype, precision in {(self._block(x.source).dtype, x.precision) for x in packs}:
            packing.load(self.device, dtype, precision)

    # -- where things lie --------------------------------------------------------------------------

    def _block(self, cut: Cut | str, memories: Memories | None = None) -> Matrix:
        """The block of a buffer, or all of it; without `memories`, relative to their beginning."""
        view = self.program.arrays[cut if isinstance(cut, str) else cut.buffer]
        if len(view.shape) == 1:
            (n,), (step,) = view.shape, view.strides
            view = replace(view, shape=(n, 1), strides=(step, max(1, n) * step))
        x = view.matrix
        if memories is not None:
            x = x._replace(address=memories.address(view))
        return x if isinstance(cut, str) else x.part(cut.rows, cut.columns)

    def _address(self, name: str, memories: Memories, at: int = 0) -> int:
        """The address of element `at` of a vector."""
        view = self.program.arrays[name]
        return memories.address(view) + at * view.strides[0]

    # -- steps -------------------------------------------------------------------------------------

    def _fill(self, step: Fill, memories: Memories) -> Launch:
        target = self._address(step.target, memories)
        return lambda stream: lapack.begin(self.device, stream, target, step.number)

    def _least(self, step: Least, memories: Memories) -> Launch:
        target, source = (self._address(name, memories) for name in (step.target, step.source))
        (count,) = self.program.arrays[step.source].shape
        return lambda stream: lapack.least(self.device, stream, target, source, count)

    def _check_finite(self, step: CheckFinite, memories: Memories) -> Launch:
        source, status = self._block(step.source, memories), self._address(step.status, memories)
        return lambda stream: lapack.check_finite(
            self.device, stream, source, status=status, code=step.code
        )

    def _conjugate(self, step: Conjugate, memories: Memories) -> Launch:
        target = self._block(step.target, memories)
        return lambda stream: lapack.conjugate(self.device, stream, target)

    def _set_identity(self, step: SetIdentity, memories: Memories) -> Launch:
        target = self._block(step.target, memories)
        return lambda stream: lapack.set_identity(self.device, stream, target, step.first)

    def _clear(self, step: Clear, memories: Memories) -> Launch:
        target = self._block(step.target, memories)
        return lambda stream: lapack.clear(self.device, stream, target)

    def _keep_lower(self, step: KeepLower, memories: Memories) -> Launch:
        columns = self._block(step.columns, memories)
        return lambda stream: lapack.keep_lower(self.device, stream, columns, step.first)

    def _factorise_cholesky(self, step: FactoriseCholesky, memories: Memories) -> Launch:
        panel, status = self._block(step.panel, memories), self._address(step.status, memories)
        workspace = memories.own[_SOLVER]
        return lambda stream: lapack.cholesky(
            self.device, stream, panel, workspace=workspace, status=status, first=step.first
        )

    def _factorise_lu(self, step: FactoriseLU, memories: Memories) -> Launch:
        panel, status = self._block(step.panel, memories), self._address(step.status, memories)
        pivots = self._address(step.pivots, memories, step.place[0])
        workspace = memories.own[_SOLVER]
        return lambda stream: lapack.lu(
            self.device,
            stream,
            panel,
            workspace=workspace,
            pivots=pivots,
            status=status,
            first=step.first,
        )

    def _exchange_rows(self, step: ExchangeRows, memories: Memories) -> Launch:
        target, status = self._block(step.target, memories), self._address(step.status, memories)
        (lo, hi), backward = step.place, step.backward
        pivots = self._address(step.pivots, memories, lo)
        named = {"first": step.first, "status": status, "code": NOT_PIVOTS}
        return lambda stream: lapack.exchange_rows(
            self.device, stream, target, pivots, hi - lo, backward=backward, **named
        )

    def _substitute(self, step: Substitute, memories: Memories) -> Launch:
        triangle, target = self._block(step.triangle, memories), self._block(step.target, memories)
        solve = self._solution(
            triangle, target, memories, lower=step.lower, op=step.op, unit=step.unit
        )
        if not step.status or step.unit:
            return solve
        status, first = self._address(step.status, memories), step.first

        def launch(stream: int) -> None:
            lapack.note_zeros(self.device, stream, triangle, status=status, first=first)
            solve(stream)

        return launch

    def _solution(self, a: Matrix, b: Matrix, memories: Memories, **flags: Any) -> Launch:
        """A launch of B = op(A)^-1 B, or of what the flags say."""

        def launch(stream: int) -> None:
            workspace = self._workspace_of_blas(stream, memories)
            beside = self._is_beside(stream)
            lapack.solve_triangular(
                self.device, stream, a, b, workspace=workspace, beside=beside, **flags
            )

        return launch

    def _is_beside(self, stream: int) -> bool:
        """Whether that is the stream of panels, which runs beside the user's, or in a capture
        beside the capturing one: routines on the two must not share memory.
        """
        return stream == int(self.lane.stream(AHEAD))

    def _workspace_of_blas(self, stream: int, memories: Memories) -> int:
        """The workspace of cuBLAS and cuBLASLt on that stream."""
        return memories.own[_BLAS_AHEAD if self._is_beside(stream) else _BLAS]

    def _subtract(self, step: Subtract, memories: Memories) -> Launch | None:
        target, left, right = (
            self._block(cut, memories) for cut in (step.target, step.left, step.right)
        )
        if not (target.size and left.size):
            return None
        is_complex = target.dtype.startswith("complex")
        one, two = (
            (x if op == "N" else x.transposed(), is_complex and op == "C")
            for x, op in zip((left, right), step.ops, strict=True)
        )

        def launch(stream: int) -> None:
            multiply(
                self.device,
                *(one[0], two[0], target),
                stream=stream,
                workspace=self._workspace_of_blas(stream, memories),
                alpha=-1.0,
                beta=1.0,
                conj_a=one[1],
                conj_b=two[1],
            )

        return launch

    def _pack_factor(self, step: PackFactor, memories: Memories) -> Launch:
        source, target = self._block(step.source, memories), _matrix(step.target, memories)
        lines = source.transposed() if step.right is (step.op == "N") else source
        how: dict[str, Any] = {"precision": step.precision, "right": step.right}
        how["conjugate"] = step.op == "C"
        return lambda stream: packing.pack(self.device, stream, lines, target, **how)

    def _subtract_packed(self, step: SubtractPacked, memories: Memories) -> Launch:
        target = self._block(step.target, memories)
        left, right = (_matrix(view, memories) for view in (step.left, step.right))

        def launch(stream: int) -> None:
            workspace = self._workspace_of_blas(stream, memories)
            packing.subtract_packed(self.device, stream, target, left, right, workspace=workspace)

        return launch

    PERFORMERS: ClassVar[Mapping[type, Any]] = {
        **GPUProgram.PERFORMERS,
        Fill: _fill,
        Least: _least,
        CheckFinite: _check_finite,
        Conjugate: _conjugate,
        SetIdentity: _set_identity,
        Clear: _clear,
        KeepLower: _keep_lower,
        FactoriseCholesky: _factorise_cholesky,
        FactoriseLU: _factorise_lu,
        ExchangeRows: _exchange_rows,
        Substitute: _substitute,
        Subtract: _subtract,
        PackFactor: _pack_factor,
        SubtractPacked: _subtract_packed,
    }


def _matrix(view: View, memories: Memories) -> Matrix:
    """A view of two axes as a matrix at its address."""
    return view.matrix._replace(address=memories.address(view))
