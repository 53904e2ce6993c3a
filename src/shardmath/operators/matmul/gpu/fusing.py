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

__all__ = ["Fused"]

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
        if not all(told):
            return False
        strategy, form = self._share.strategy, self._form
        columns = strategy.rows if form.turned else strategy.columns
        depth = strategy.problem.shape[2]
        most = max(part.length for part in columns)
        plain = Factor("C", depth)
        problem = GatheredProduct(form.rows, most, depth, strategy.problem.dtype, plain, plain)
        return strategy.problem.strategy == "all-gather" or fuses(problem)

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
