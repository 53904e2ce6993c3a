"""Products by one kernel that moves data too: which can be, and what launches them.

Whether a strategy has the pattern of such a product follows from layouts, on all ranks alike.
Whether arrays are aligned and ordered as the kernel needs, each rank sees for itself, and all tell
each other. They choose the kernel where every rank can use it, unless it is predicted to be slower.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

from shardmath.arrays.dtypes import HALVES
from shardmath.base.integers import up
from shardmath.context.context import Context
from shardmath.cuda.device import Device
from shardmath.cuda.stream import StreamOrder
from shardmath.handles.operand import Exposed
from shardmath.local.gpu import Matrix
from shardmath.operators.matmul.gpu.all_gather import AllGatherGemm
from shardmath.operators.matmul.gpu.local_product import OperandLayout, SplitKProduct, even_rows
from shardmath.operators.matmul.gpu.rank_plan import RankPlan, matrix_of
from shardmath.operators.matmul.gpu.row_split import RowSplitProduct
from shardmath.operators.matmul.gpu.tile_sending import GemmAllReduce, GemmReduceScatter
from shardmath.program.gpu_performing import Given, Note
from shardmath.program.gpu_steps import Launch
from shardmath.symmetric.team import Team

_ALIGNMENT = 16
_KERNELS: dict[str, Any] = {
    "all-gather": AllGatherGemm,
    "reduce-scatter": GemmReduceScatter,
    "all-reduce": GemmAllReduce,
}


class FusedProduct:
    """One execution by one kernel on one rank. `form`, which the ranks compare, says whether it is
    transposed, and has a digest of the product; b"" where the kernel cannot do it.
    """

    def __init__(self, rank_plan: RankPlan, given: Given, team: Team) -> None:
        pattern = rank_plan.pattern
        assert pattern is not None, "a kernel is for a pattern"
        self._pattern = pattern
        self._device = team.device
        self._rank_plan = rank_plan
        self._given = given
        a, b, out = (matrix_of(given.arrays[name]) for name in "abd")
        transposed = out.by_columns if pattern.transposed is None else pattern.transposed
        if transposed:
            a, b, out = b.transposed(), a.transposed(), out.transposed()
        self._matrices = a, b, out
        layouts = tuple(x[1:] for x in self._matrices)
        key = ("described", transposed, layouts, self._is_supported())
        if key not in rank_plan.cache:
            problem = self._as_kernel_problem(team.device) if self._is_supported() else None
            digest = blake2b(repr((pattern.kind, problem)).encode(), digest_size=15).digest()
            rank_plan.cache[key] = problem, b"" if problem is None else bytes([transposed]) + digest
        self._problem, self.form = rank_plan.cache[key]

    @property
    def result_place(self) -> bytes:
        """The place on the heap where peers write the result, packed; b"" where they cannot write
        it in whole pieces of 16 bytes.
        """
        (*_, x), out = self._matrices, self._given.arrays["d"]
        layout = _layout(x)
        if layout is None or self._pattern.kind != "all-reduce" or out.block is None:
            return b""
        pieces = x.address // 2, layout.pitch, x.columns
        return b"" if any(piece % 8 for piece in pieces) else out.packed_place

    def bind(self, context: Context, told: Sequence[Note]) -> Launch:
        """The launch of the kernel, from what all ranks have told each other. Collective."""
        places = _addresses(context, [rank.places[0] for rank in told])
        key = (self._pattern.kind, *(rank.facts.form for rank in told), bool(places))
        cache = self._rank_plan.cache
        if key not in cache:
            named: dict[str, Any] = {"result_addresses": True} if places else {}
            product_plan = _KERNELS[self._pattern.kind].create(context, self._problem, **named)
            cache[key] = product_plan, StreamOrder(self._device)
            weakref.finalize(self._rank_plan, product_plan.free).atexit = False
        layout = _layout(self._matrices[2])
        assert layout is not None, "seen when it was described"
        product, order = cache[key]
        named = {"result_addresses": places} if places else {}
        addresses = [x.address for x in self._matrices]
        launch = partial(product.launch, *addresses, pitch=layout.pitch, **named)

        def run(stream: int) -> None:
            with order.section(stream):  # the kernel's counters serve one launch at a time
                launch(stream=stream)

        return run

    def _is_supported(self) -> bool:
        """Whether the kernels can do all that is asked for, and load the operands."""
        (arrays, numbers, _), dtype = self._given, self._rank_plan.strategy.problem.dtype
        a, b, out = self._matrices
        plain = numbers["alpha"] == 1 and ("c" not in arrays or numbers["beta"] == 0)
        aligned = not any(x.size and x.address % _ALIGNMENT for x in (a, b))
        return plain and aligned and out.dtype == dtype and dtype in HALVES

    def _as_kernel_problem(self, device: Device) -> RowSplitProduct | SplitKProduct | None:
        """The product as the kernel takes it; None where it cannot read or write the arrays."""
        a, b, out = map(_layout, self._matrices)
        if a is None or b is None or out is None:
            return None
        (left, right, _), product = self._matrices, self._rank_plan.strategy.problem
        rows, sizes = self._pattern.rows, (right.columns, left.columns)
        problem: RowSplitProduct | SplitKProduct | None = None
        if not self._pattern.adds:
            problem = RowSplitProduct(rows, *sizes, product.dtype, a, b, out.order)
        elif out.order == "C":
            rows = rows or even_rows(left.rows, product.size)
            problem = SplitKProduct(rows, *sizes, product.dtype, a, b)
        return None if problem is None or problem.unsupported(device) else problem


def _addresses(context: Context, places: Sequence[Exposed | None]) -> list[int]:
    """The addresses of all ranks' results, as this rank sees them; none unless all can be written,
    and their lines are equally far apart.
    """
    held = [place for place in places if place is not None]
    if len(held) < len(places) or len({place.strides for place in held}) > 1:
        return []
    addresses = []
    for rank, place in enumerate(held):
        address = context.peer_address(rank, place.location, place.nbytes)
        assert address is not None, "ranks of one host have an address for each other's memory"
        addresses.append(address + place.origin)
    return addresses


_NOTES = {
    "all-gather": "{rows} come from all ranks while those that are here are multiplied",
    "reduce-scatter": "tiles are sent to their owners while others are multiplied",
    "all-reduce": "tiles are sent to those who add them up, and who write the sums to all",
}


def notes(rank_plan: RankPlan) -> list[str]:
    """The lines of `explain` about how GPUs do the steps."""
    if rank_plan.multi_host:
        return [
            f"in phases, on {rank_plan.host_count} hosts: what peers take is packed by each "
            "rank, and read in place on the same host, fetched by `get` from another"
        ]
    pattern = rank_plan.pattern
    if pattern is None:
        return [] if rank_plan.strategy.problem.scaling is None else [_scaled_note(rank_plan)]
    if rank_plan.one_kernel:
        how = _NOTES[pattern.kind].format(
            rows="columns of b" if pattern.transposed else "rows of a"
        )
        return [f"in one kernel: {how}, where all arrays lie in memory as it wants them"]
    if pattern.adds:
        return [f"by cuBLAS and one collective, of {rank_plan.parts_dtype}"]
    if rank_plan.strategy.problem.dtype not in HALVES:
        return []
    return ["in phases, which are predicted to be faster than one kernel that moves data too"]


def _scaled_note(rank_plan: RankPlan) -> str:
    if not rank_plan.multiplies_elements:
        return "elements become float32 first: products of them do not fit what is asked for"
    a, b = rank_plan.modes
    how = "" if rank_plan.rounds is None else f"; {rank_plan.rounds}"
    return f"eight-bit elements are multiplied, scales of a: {a}, of b: {b}{how}"


def _layout(x: Matrix) -> OperandLayout | None:
    """The layout of a matrix; None where neither rows nor columns are contiguous."""
    if x.columns <= 1 or x.column_stride == 1:
        pitch = x.row_stride if x.rows > 1 else up(x.columns, 8)
        return OperandLayout("C", pitch) if pitch >= x.columns else None
    if x.rows <= 1 or x.row_stride == 1:
        pitch = x.column_stride if x.columns > 1 else up(x.rows, 8)
        return OperandLayout("F", pitch) if pitch >= x.rows else None
    return None
