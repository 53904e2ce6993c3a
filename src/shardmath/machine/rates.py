"""The rates that every kind of processor has."""

from __future__ import annotations

import math
from collections.abc import Mapping

from shardmath.base.immutable import Immutable


class Rates(Immutable):
    """One rank's processor: operations, bytes and seconds.

    `products` are floating-point operations per second of large matrix products by dtype, of all
    eight-bit floats by "float8": a multiply-add counts as two, a complex product as one.
    `transforms` are those of Fourier transforms in single precision.

    Arithmetic reads and writes `memory` bytes per second, or `cached` where all that it touches is
    less than `cache` bytes; transforms, whose blocks lie at strides, `strided` bytes. A matrix
    product first copies its operands into blocks that suit it, and at last adds blocks to the
    result: `packing` bytes of these per second, beside the time of its operations. A product with a
    vector copies nothing, nor does a GPU.

    A factorisation has panels of `panel` columns where the matrix is large.

    `link` bytes per second come from peers, and an exchange costs `latency` seconds in
    synchronisation. Beside its bytes, a product spends `gathering` seconds where operands come from
    peers, and `finishing` seconds on each step after it: sums of several ranks, a result that
    moves. These are synchronisation and what the host does meanwhile.
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

    def product(self, dtype: str) -> float:
        """Operations per second of a large matrix product of such elements."""
        return self.products[dtype.partition("_")[0]]

    def touching(self, nbytes: float) -> float:
        """Seconds to read or write so many bytes once."""
        return nbytes / (self.cached if nbytes < self.cache else self.memory)
