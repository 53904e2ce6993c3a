"""Arrays that know how they are split: `DistributedArray`, and functions that make and take them.

Names are those of the array API standard, and NumPy's.
"""

from shardmath.distributed.creation import (
    arange,
    array,
    empty,
    empty_like,
    eye,
    from_global,
    fromfunction,
    full,
    full_like,
    linspace,
    ones,
    ones_like,
    zeros,
    zeros_like,
)
from shardmath.distributed.distributed_array import DistributedArray
from shardmath.distributed.elementwise import explain, where
from shardmath.distributed.files import load, save
from shardmath.distributed.movement import communication
from shardmath.distributed.products import matmul, vecdot
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

__all__ = [
    "DistributedArray",
    "all",
    "any",
    "arange",
    "argmax",
    "argmin",
    "array",
    "communication",
    "empty",
    "empty_like",
    "explain",
    "eye",
    "from_global",
    "fromfunction",
    "full",
    "full_like",
    "linspace",
    "load",
    "matmul",
    "max",
    "mean",
    "min",
    "ones",
    "ones_like",
    "prod",
    "random",
    "save",
    "standard_normal",
    "std",
    "sum",
    "var",
    "vecdot",
    "where",
    "zeros",
    "zeros_like",
]
