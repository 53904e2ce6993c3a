"""Operations on torch tensors that torch can differentiate: `matmul`, `redistribute`, `all_reduce`.

    y = autograd.matmul(x, w, distributions=[Slab.X, Slab.Y, Slab.Y])
    loss = autograd.all_reduce((y * y).sum())
    loss.backward()                                   # x.grad and w.grad, split as x and w are

They mean global arrays, of which each rank holds its part by the distribution; a replicated array
is one array. So a gradient has the shape and the distribution of what it is the gradient of, and a
loss that every rank computes is one loss, not as many as there are ranks. A backward pass is as
collective as the call was: all ranks run it, through the same operations. `torch.compile` leaves
these calls as they are, between the graphs of what is around them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

try:
    import torch
except ImportError as error:
    from shardmath.errors import BackendUnavailable

    raise BackendUnavailable(
        f"shardmath.autograd works on torch tensors, and torch cannot be imported ({error}): "
        "pip install 'shardmath[torch]'"
    ) from error

from shardmath.arrays import library_of
from shardmath.base.collective_call import collective_call
from shardmath.collectives import all_reduce as _all_reduce
from shardmath.context.agreement import require_equal
from shardmath.context.context import require_context
from shardmath.geometry import Distribution
from shardmath.operators.matmul import matmul as _matmul
from shardmath.operators.matmul.options import MatmulOptions, matrix_qualifiers_dtype
from shardmath.operators.redistribute import redistribute as _redistribute

__all__ = ["all_reduce", "matmul", "redistribute"]


@collective_call
def matmul(
    a: Any,
    b: Any,
    /,
    *,
    distributions: Sequence[Distribution],
    options: MatmulOptions | dict[str, Any] | None = None,
) -> Any:
    """The product a @ b, as `shardmath.linalg.advanced.matmul`. Collective, backward too.

    Raises as it does, and CollectiveMismatch on all ranks when they differ in which of a and b
    requires grad. What an epilog would do, do to the result with torch: the elements are local.
    """
    _agree("autograd.matmul", a, b)
    return _Matmul.apply(a, b, distributions, options)


@collective_call
def redistribute(
    operand: Any, /, input_distribution: Distribution, output_distribution: Distribution
) -> Any:
    """`operand` in another distribution, as `shardmath.distribution.redistribute`. Collective,
    backward too: gradients go the other way.
    """
    _agree("autograd.redistribute", operand)
    return _Redistribute.apply(operand, input_distribution, output_distribution)


@collective_call
def all_reduce(x: Any, *, op: str = "sum") -> Any:
    """The "sum" or "mean" of all ranks' `x`, on every rank, as `shardmath.collectives.all_reduce`.

    Collective; the backward pass is local. Raises ValueError for another `op` on all ranks.
    """
    _agree("autograd.all_reduce", x, op=op)
    return _AllReduce.apply(x, op)


def _agree(operation: str, *operands: Any, op: str = "sum") -> None:
    """Agree on which operands require grad: those gradients are computed together."""

    def describe() -> list[bool]:
        if op not in ("sum", "mean"):
            raise ValueError(f'op is "sum" or "mean" where there are gradients, not {op!r}')
        for operand in operands:
            library_of(operand).spec(operand)  # raises for what torch would refuse on one rank only
        return [library_of(operand).records(operand) for operand in operands]

    def check(specs: list[Any]) -> None:
        require_equal("which operands require grad", specs)

    require_context().agree(operation, describe, check)


class _Matmul(torch.autograd.Function):
    """D = A @ B: the gradients are D' @ B^H and A^H @ D', wanted as A and B are split."""

    @staticmethod
    def forward(ctx: Any, a: Any, b: Any, distributions: Any, options: Any) -> Any:
        ctx.context, ctx.distributions, ctx.options = require_context(), distributions, options
        ctx.save_for_backward(a, b)
        return _matmul(a, b, distributions=distributions, options=options)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:
        a, b = ctx.saved_tensors
        of_a, of_b, of_d = ctx.distributions
        wanted_a, wanted_b, *_ = ctx.needs_input_grad
        grads: list[Any] = [None, None]
        with ctx.context:
            if wanted_a:
                grads[0] = _matmul(
                    grad,
                    b,
                    distributions=[of_d, of_b, of_a],
                    qualifiers=_adjoint(second=True, conjugate=b.is_complex()),
                    options=ctx.options,
                )
            if wanted_b:
                grads[1] = _matmul(
                    a,
                    grad,
                    distributions=[of_a, of_d, of_b],
                    qualifiers=_adjoint(second=False, conjugate=a.is_complex()),
                    options=ctx.options,
                )
        return *grads, None, None


def _adjoint(*, second: bool, conjugate: bool) -> Any:
    """Qualifiers that take the adjoint of one of two factors."""
    qualifiers = np.zeros(3, dtype=matrix_qualifiers_dtype)
    qualifiers[int(second)]["is_transpose"] = True
    qualifiers[int(second)]["is_conjugate"] = conjugate
    return qualifiers


class _Redistribute(torch.autograd.Function):
    """Elements go to their new owners, and their gradients come back."""

    @staticmethod
    def forward(ctx: Any, operand: Any, source: Distribution, target: Distribution) -> Any:
        ctx.context, ctx.way_back = require_context(), (target, source)
        return _redistribute(operand, source, target)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:
        with ctx.context:
            return _redistribute(grad, *ctx.way_back), None, None


class _AllReduce(torch.autograd.Function):
    """The sum is one array, of which every rank's part has the same gradient."""

    @staticmethod
    def forward(ctx: Any, x: Any, op: str) -> Any:
        ctx.share = 1 if op == "sum" else require_context().size
        return _all_reduce(x, op=op)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad / ctx.share, None
