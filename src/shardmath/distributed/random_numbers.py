"""Random numbers that are the same on any number of ranks, for every distribution.

NumPy's Philox generator is a function of a counter, so each element has a fixed place in its
stream: element i of the global array, in C order, takes word i, or words 2 i and 2 i + 1. A rank
starts the stream wherever a run of its part begins, and nothing is exchanged.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from shardmath.arrays import dtypes
from shardmath.arrays.base import HostArray
from shardmath.base.integers import integer
from shardmath.distributed.creation import Shape, of_host, placed
from shardmath.distributed.distributed_array import DistributedArray
from shardmath.distributed.layouts import runs
from shardmath.geometry import Distribution

_WORDS = 4  # words of 64 bits for each value of the counter


def random(
    shape: Shape,
    *,
    seed: int,
    distribution: Distribution,
    dtype: Any = float,
    package: ModuleType | None = None,
) -> DistributedArray:
    """Uniform numbers in [0, 1), the same for a seed on any number of ranks. Local.

        x = shardmath.random((n, m), seed=0, distribution=Slab.X)

    `dtype` is float64 or float32; `seed`, an integer from 0 to 2**128 - 1, is the same on all
    ranks. Arguments and errors otherwise as `full`.
    """
    return _of_words(shape, seed, distribution, dtype, package, 1, _uniform)


def standard_normal(
    shape: Shape,
    *,
    seed: int,
    distribution: Distribution,
    dtype: Any = float,
    package: ModuleType | None = None,
) -> DistributedArray:
    """Normal numbers of mean 0 and variance 1, the same for a seed on any number of ranks. Local.

    By the method of Box and Muller. Arguments and errors as `random`.
    """
    return _of_words(shape, seed, distribution, dtype, package, 2, _normal)


def _of_words(
    shape: Shape,
    seed: int,
    distribution: Distribution,
    dtype: Any,
    package: ModuleType | None,
    each: int,
    convert: Any,
) -> DistributedArray:
    """The array whose elements `convert` makes of `each` words."""
    require_seed(seed)
    kind = dtypes.to_numpy(dtype)
    if kind not in (np.float32, np.float64):
        raise ValueError(f"random numbers are float64 or float32, not {kind}")
    context, library, layout = placed(shape, distribution, package)
    runs_ = runs(layout.spans(context.rank), layout.global_shape)
    words = [_run(seed, first * each, count * each) for first, count in runs_]
    numbers = convert(np.concatenate([np.zeros(0, np.uint64), *words]))
    if kind == np.float32 and each == 1:  # no number may be rounded to 1
        numbers = np.floor(numbers * 2**24) * 2.0**-24
    host = numbers.astype(kind).reshape(layout.local_shape(context.rank))
    return of_host(host, library, layout, distribution)


def require_seed(seed: Any) -> None:
    """Raise ValueError unless `seed` is an integer from 0 to 2**128 - 1."""
    if integer(seed, "seed", least=0) >= 1 << 128:
        raise ValueError(f"seed must be less than 2**128, not {seed}")


def _uniform(words: HostArray) -> HostArray:
    """53 bits of each word, as a number in [0, 1)."""
    return np.asarray((words >> np.uint64(11)) * 2.0**-53)


def _normal(words: HostArray) -> HostArray:
    """A normal number for every two words."""
    radius = np.sqrt(-2 * np.log1p(-_uniform(words[0::2])))
    return np.asarray(radius * np.cos(2 * np.pi * _uniform(words[1::2])))


def _run(seed: int, first: int, count: int) -> HostArray:
    """`count` words of the stream from word `first` on."""
    block, skipped = divmod(first, _WORDS)
    generator = np.random.Philox(key=seed)
    generator.advance(block)
    return np.asarray(generator.random_raw(skipped + count)[skipped:])
