"""Which products are computed by one kernel that moves data too, and how they are found.

A share says whether its strategy has the form of such a product, a rank whether its arrays lie as
the kernel wants them. All ranks tell, and all decide the same: the kernel where every rank can, the
phases of `execution` where one cannot, or where the kernel would be slower.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from hashlib import blake2b

from shardmath.context import DistributedContext
from shardmath.cuda.device import Device
from shardmath.local.gpu import Matrix
from shardmath.operators.matmul.gpu.all_gather import AllGatherGemm
from shardmath.operators.matmul.gpu.form import Form
from shardmath.operators.matmul.gpu.gathered import Factor, GatheredProduct, fuses
from shardmath.operators.matmul.gpu.share import Operands, Share
from shardmath.operators.showing import matrix_of

__all__ = ["Fused", "notes", "pays"]

_ALIGNMENT = 16


class Fused:
    """One execution by one kernel on one rank. `told` is what to tell the peers: b"" where it
    cannot be.
    """

    def __init__(self, form: Form, share: Share, operands: Operands, device: Device) -> None:
        self._form = form
        self._share = share
        self._operands = operands
        self._a, self._b = map(matrix_of, operands.factors)
        self._out = matrix_of(operands.out)
        if form.turned:
            self._a, self._b = self._b.transposed(), self._a.transposed()
            self._out = self._out.transposed()
        self._problem = self._described(device)
        self.told = b""
        if self._problem is not None:
            text = repr((form.kind, form.turned, self._problem)).encode()
            self.told = blake2b(text, digest_size=16).digest()

    def chosen(self, told: Sequence[bytes]) -> bool:
        """Whether all ranks, which have told this, can, and it is predicted to be faster."""
        return all(told) and pays(self._share)

    def run(self, context: DistributedContext, told: Sequence[bytes]) -> None:
        """Put it on the stream. Collective."""
        key = (self._form.kind, tuple(told))
        kept = self._share.kept
        if key not in kept:
            assert self._problem is not None
            kept[key] = made = AllGatherGemm.together(context, self._problem)
            weakref.finalize(self._share, made.free).atexit = False
        order = _factor(self._out)
        assert order is not None
        a, b, out = self._a.address, self._b.address, self._out.address
        kept[key].launch(a, b, out, self._operands.stream, pitch=order.pitch)

    def _described(self, device: Device) -> GatheredProduct | None:
        """The product as the kernel takes it; None where the arrays do not lie as it wants."""
        operands, problem, out = self._operands, self._share.strategy.problem, self._out
        a, b = _factor(self._a), _factor(self._b)
        order = _factor(out)
        plain = operands.alpha == 1 and (operands.c is None or operands.beta == 0)
        if a is None or b is None or order is None or not plain or out.dtype != problem.dtype:
            return None
        if any(x.size and x.address % _ALIGNMENT for x in (self._a, self._b)):
            return None
        depth = problem.shape[2]
        made = GatheredProduct(
            rows=self._form.rows,
            columns=self._b.columns,
            depth=depth,
            dtype=problem.dtype,
            a=a,
            b=b,
            out=order.order,
        )
        return None if made.misfit(device) else made


def pays(share: Share) -> bool:
    """Whether the kernel for the share's form is predicted to be faster than the phases, or was
    asked for by the name of its kind. The same on all ranks.
    """
    strategy, form = share.strategy, share.form
    if form is None:
        return False
    problem, depth = strategy.problem, strategy.problem.shape[2]
    columns = strategy.rows if form.turned else strategy.columns
    plain = Factor("C", depth)
    most = max(part.length for part in columns)
    largest = GatheredProduct(form.rows, most, depth, problem.dtype, plain, plain)
    return problem.strategy == form.kind or fuses(largest)


def notes(share: Share) -> list[str]:
    """What `explain` adds about how the steps are done on GPUs."""
    form = share.form
    if form is None or share.strategy.problem.dtype not in ("float16", "bfloat16"):
        return []
    whose = "columns of b" if form.turned else "rows of a"
    if pays(share):
        return [
            f"in one kernel: {whose} go around a ring while those that are here are multiplied, "
            "where all arrays lie in memory as it wants them"
        ]
    return [f"in phases: gathering first is predicted to be faster than passing {whose} around"]


def _factor(x: Matrix) -> Factor | None:
    """How a matrix lies, None where neither rows nor columns are contiguous."""
    if x.columns <= 1 or x.column_stride == 1:
        pitch = x.row_stride if x.rows > 1 else _rounded(x.columns)
        return Factor("C", pitch) if pitch >= x.columns else None
    if x.rows <= 1 or x.row_stride == 1:
        pitch = x.column_stride if x.columns > 1 else _rounded(x.rows)
        return Factor("F", pitch) if pitch >= x.rows else None
    return None


def _rounded(number: int) -> int:
    return -(-number // 8) * 8
