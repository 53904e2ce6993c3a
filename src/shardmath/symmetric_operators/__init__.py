"""torch.ops.symm_mem by the collectives and the symmetric memory of this package.

torch defines these operators, and has kernels for GPUs only. `serve` adds kernels for CPU tensors,
and shapes for torch's compiler where torch has none. Where a context computes on GPUs, `serve_gpus`
replaces torch's kernels by ours, because torch's know nothing of our heap. A kernel is as
collective as torch's, over the group that its `group_name` names.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed._symmetric_memory  # it defines a part of the operators

from shardmath.base.collective_call import collective_call
from shardmath.symmetric_operators import moves, products, rows, sums

__all__ = ["serve", "serve_gpus", "sums"]

_Kernels = dict[str, Callable[..., Any]]
_EVERYWHERE: _Kernels = {
    name: collective_call(kernel)
    for kernels in (sums.KERNELS, moves.KERNELS, rows.KERNELS)
    for name, kernel in kernels.items()
}
# On GPUs torch's own overlap the products with what is gathered, scattered or awaited.
_ON_CORES: _Kernels = {name: collective_call(made) for name, made in products.KERNELS.items()}


def _defined(kernels: _Kernels) -> _Kernels:
    """The kernels of the operators that this torch defines: earlier versions define fewer."""
    return {name: kernel for name, kernel in kernels.items() if hasattr(torch.ops.symm_mem, name)}


@cache
def serve(memset32: Callable[..., Any]) -> Any:
    """Register the kernels for CPU tensors, once in a process: the torch.library.Library of them.

    `memset32(tensor, offset, value, count)` writes uint32 elements.
    """
    kernels = _defined({**_written(memset32), **_EVERYWHERE, **_ON_CORES})
    library = torch.library.Library("symm_mem", "IMPL")
    for name, kernel in kernels.items():
        library.impl(name, kernel, "CPU")
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"symm_mem::{name}", "Meta"):
            library.impl(name, _SHAPES.get(name, _nothing), "Meta")
    return library


@cache
def serve_gpus(memset32: Callable[..., Any]) -> Any:
    """Register our kernels, except for products, for tensors on GPUs, too: the Library of them."""
    library = torch.library.Library("symm_mem", "IMPL")
    kernels = _defined({**_written(memset32), **_EVERYWHERE})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        for name, kernel in kernels.items():
            library.impl(name, kernel, "CUDA", allow_override=True)
    return library


def _written(memset32: Callable[..., Any]) -> _Kernels:
    def memset32_(x: Any, offset: int, val: int, count: int) -> Any:
        return memset32(x, offset, val, count)

    def stream_write_value32_(x: Any, offset: int, val: int) -> Any:
        return memset32(x, offset, val)

    return {"memset32_": memset32_, "stream_write_value32_": stream_write_value32_}


# -- shapes for torch's compiler -------------------------------------------------------------------


def _nothing(*arguments: Any, **words: Any) -> None:
    """The shape of nothing: an operator that only writes into its arguments."""


def _first(x: Any, *_: Any) -> Any:
    return x


def _last(*arguments: Any) -> Any:
    return arguments[-1]


_SHAPES: _Kernels = {
    "one_shot_all_reduce": lambda x, *_: torch.empty_like(x),
    "one_shot_all_reduce_copy": lambda buffer, x, *_: torch.empty_like(x),
    "one_shot_all_reduce_out": _last,
    "one_shot_all_reduce_copy_out": _last,
    "two_shot_all_reduce_": _first,
    "two_shot_all_reduce_out": _last,
    "reduce_scatter_out": _last,
    "nvshmem_broadcast": _first,
    "nvshmem_all_to_all": lambda x, out, _: out,
    "memset32_": _first,
    "stream_write_value32_": _first,
    "_async_input_mm": lambda a, b, *_: a.new_empty(a.shape[0], b.shape[1]),
}
