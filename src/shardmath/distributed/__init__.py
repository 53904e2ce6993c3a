"""Arrays that know how they are split: `DistributedArray`, and functions that make and take them.

It is the namespace of the array API standard (2024.12), `x.__array_namespace__()`. The standard's
names that need no function of ours, elementwise functions, types and constants, are in `standard`,
where they are found when they are used.
"""

from typing import Any

from shardmath.distributed import fft, linalg, standard
from shardmath.distributed.conversions import from_dtensor, from_jax, to_dtensor, to_jax
from shardmath.distributed.creation import (
    arange,
    array,
    empty,
    eye,
    from_global,
    fromfunction,
    full,
    linspace,
    ones,
    zeros,
)
from shardmath.distributed.distributed_array import DistributedArray
from shardmath.distributed.elementwise import (
    clip,
    empty_like,
    explain,
    full_like,
    ones_like,
    round,
    where,
    zeros_like,
)
from shardmath.distributed.files import load, save
from shardmath.distributed.manipulation import (
    broadcast_arrays,
    broadcast_to,
    concat,
    expand_dims,
    flip,
    matrix_transpose,
    meshgrid,
    moveaxis,
    permute_dims,
    repeat,
    reshape,
    roll,
    squeeze,
    stack,
    take,
    tile,
    tril,
    triu,
    unstack,
)
from shardmath.distributed.movement import communication
from shardmath.distributed.products import matmul, tensordot, vecdot
from shardmath.distributed.random_numbers import random, standard_normal
from shardmath.distributed.reductions import (
    all,
    any,
    argmax,
    argmin,
    max,
    mean,
    min,
    prod,
    std,
    sum,
    var,
)
from shardmath.distributed.scans import cumulative_prod, cumulative_sum, diff
from shardmath.distributed.searching import (
    argsort,
    count_nonzero,
    nonzero,
    searchsorted,
    sort,
    take_along_axis,
    unique_all,
    unique_counts,
    unique_inverse,
    unique_values,
)
from shardmath.distributed.standard import (
    asarray,
    astype,
    can_cast,
    finfo,
    from_dlpack,
    iinfo,
    isdtype,
    result_type,
)

__all__ = [
    "DistributedArray",
    "all",
    "any",
    "arange",
    "argmax",
    "argmin",
    "argsort",
    "array",
    "asarray",
    "astype",
    "broadcast_arrays",
    "broadcast_to",
    "can_cast",
    "clip",
    "communication",
    "concat",
    "count_nonzero",
    "cumulative_prod",
    "cumulative_sum",
    "diff",
    "empty",
    "empty_like",
    "expand_dims",
    "explain",
    "eye",
    "fft",
    "finfo",
    "flip",
    "from_dlpack",
    "from_dtensor",
    "from_global",
    "from_jax",
    "fromfunction",
    "full",
    "full_like",
    "iinfo",
    "isdtype",
    "linalg",
    "linspace",
    "load",
    "matmul",
    "matrix_transpose",
    "max",
    "mean",
    "meshgrid",
    "min",
    "moveaxis",
    "nonzero",
    "ones",
    "ones_like",
    "permute_dims",
    "prod",
    "random",
    "repeat",
    "reshape",
    "result_type",
    "roll",
    "round",
    "save",
    "searchsorted",
    "sort",
    "squeeze",
    "stack",
    "standard_normal",
    "std",
    "sum",
    "take",
    "take_along_axis",
    "tensordot",
    "tile",
    "to_dtensor",
    "to_jax",
    "tril",
    "triu",
    "unique_all",
    "unique_counts",
    "unique_inverse",
    "unique_values",
    "unstack",
    "var",
    "vecdot",
    "where",
    "zeros",
    "zeros_like",
]
__all__.extend(standard.NAMES)  # what the array API has besides: NumPy's objects

__array_api_version__ = standard.VERSION


def __array_namespace_info__() -> standard.Info:  # noqa: N807  (the standard's name)
    """What there is: types, devices, and what indices and shapes may be."""
    return standard.Info()


def __getattr__(name: str) -> Any:
    if name in standard.NAMES:
        return standard.NAMES[name]
    raise AttributeError(f"module 'shardmath.distributed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
