"""The rates that every kind of processor has."""

from __future__ import annotations

import math
from collections.abc import Mapping

from shardmath.base.immutable import Immutable


class Rates(Immutable):
    """One rank's processor: operations, bytes and seconds.

    `products` are floating-point operations per second of large matrix products, by dtype, with
    "float8" for all eight-bit floats: a multiply-add counts as two, a complex product as one.
    `transforms` is the rate of Fourier transforms in single precision.

    Arithmetic reads and writes `memory` bytes per second, or `cached` where it touches fewer than
    `cache` bytes in all; transforms, whose blocks are strided, `strided` bytes. A matrix product
    first copies its operands into blocks that suit it, and in the end adds blocks to the result,
    at `packing` bytes per second, in addition to the time of its operations. A product with a
    vector copies nothing, nor does a GPU.

    A factorisation of a large matrix has panels of `panel` columns. What one rank computes alone
    may take `room` bytes of its memory.

    `link` bytes per second come from peers, and the synchronisation of an exchange takes `latency`
    seconds. In addition to the time of its bytes, a product takes `gathering` seconds where
    operands come from peers, and `finishing` seconds for each step after it, as sums over ranks and
    moving the result. These are synchronisation and work of the host.
    """

    products: Mapping[str, float]
    transforms: float
    memory: float
    strided: float
    link: float
    latency: float
    gathering: float
    finishing: float
    cached: float = 0.0
    cache: int = 0
    packing: float = math.inf
    panel: int = 128
    room: float = 1.2e10

    def product(self, dtype: str) -> float:
        """Operations per second of a large matrix product of such elements."""
        return self.products[dtype.partition("_")[0]]

    def touching(self, nbytes: float) -> float:
        """Seconds to read or write so many bytes once."""
        return nbytes / (self.cached if nbytes < self.cache else self.memory)
