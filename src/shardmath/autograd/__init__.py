"""Gradients: each public function is an operator of torch's, which it differentiates and traces.

    y = matmul(x, w, distributions=[Slab.X, Slab.Y, Slab.Y])
    loss = all_reduce((y * y).sum())
    loss.backward()                                   # x.grad and w.grad, split as x and w are

`matmul`, `redistribute`, `fft`, `ifft`, `rfft`, `irfft` and the collectives call these operators,
`torch.ops.shardmath.*`, where a tensor requires grad, or where torch traces or transforms the call:
`torch.compile`, `torch.func`, autocast. All other calls never come here.

A gradient has the shape and the distribution of its operand, and is computed by the same operators.
A backward pass is therefore collective, as the call was: all ranks run it. An operand with a
distribution is one global array, even if it is replicated, and the result of `all_reduce` is one
array too: a loss that all ranks have from it counts once. The results of other collectives belong
to each rank, so their gradients are summed: that of `all_gather` is a `reduce_scatter`.
"""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    from shardmath.errors import BackendUnavailable

    raise BackendUnavailable(
        f"shardmath.autograd works on torch tensors, and torch cannot be imported ({error}): "
        "pip install 'shardmath[torch]'"
    ) from error

from shardmath.autograd.functions import copies
from shardmath.base.untraced import tell_compiler

__all__ = ["copies"]


def __dir__() -> list[str]:
    return sorted(__all__)


tell_compiler()
