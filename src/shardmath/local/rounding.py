"""Half precision on cores, where no library computes in it: to a wider type, and rounded back.

An array of complex32 is a NumPy array of pairs.
"""

from __future__ import annotations

import numpy as np

from shardmath.arrays.base import HostArray


def round_into(source: HostArray, target: HostArray) -> None:
    """Write the numbers of `source` to `target`, of another width, each rounded once.

    What is too large becomes infinite, as on GPUs.
    """
    with np.errstate(over="ignore"):
        if target.dtype.names is not None:
            target["real"], target["imag"] = source.real, source.imag
        elif source.dtype.names is not None:
            target.real, target.imag = source["real"], source["imag"]
        else:
            target[...] = source
