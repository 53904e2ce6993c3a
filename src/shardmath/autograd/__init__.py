"""How torch traces and differentiates this package's functions: each is an operator of torch's.

    y = matmul(x, w, distributions=[Slab.X, Slab.Y, Slab.Y])
    loss = all_reduce((y * y).sum())
    loss.backward()                                   # x.grad and w.grad, split as x and w are

`matmul`, `redistribute`, `fft`, `ifft`, `rfft`, `irfft` and the collectives call these operators,
`torch.ops.shardmath.*`, where a tensor requires grad, or where torch traces or transforms the call:
`torch.compile`, `torch.func`, autocast. All other calls never come here.

A gradient has the shape and the distribution of what it is the gradient of, and passes through our
own operators: a backward pass is as collective as the call was, and all ranks run it. What has a
distribution is one global array, also where it is replicated; and so is the sum of `all_reduce`: a
loss that every rank has from it is one loss. What the other collectives return is each rank's own,
and its gradients are those of as many copies: `all_gather` sums them by `reduce_scatter`.
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
