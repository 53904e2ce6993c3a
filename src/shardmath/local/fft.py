"""One rank's Fourier transforms, along axes that it holds whole.

scipy.fft where it is installed, NumPy's otherwise, and torch.fft for those who brought tensors: all
keep single precision and take any strides. What may be overwritten is overwritten, so a caller that
passes blocks of the size of a cache has the whole transform run there.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from shardmath.arrays.base import HostArray

__all__ = ["Kind", "Norm", "engine_for", "transform"]

Kind = Literal["C2C", "R2C", "C2R"]
Norm = Literal["backward", "ortho", "forward"] | None


def transform(
    x: HostArray,
    axes: Sequence[int],
    *,
    kind: Kind,
    forward: bool,
    norm: Norm,
    length: int = 0,
    engine: str = "scipy",
) -> HostArray:
    """The transform of `x` along `axes`; of complex input perhaps in its own memory.

    R2C halves the last of `axes`, C2R makes it `length` long, as numpy.fft.rfftn and irfftn do.
    `norm` None scales neither direction. Halves are transformed as float32.
    """
    scale = norm or ("backward" if forward else "forward")
    if kind == "R2C" and x.dtype.itemsize == 2:
        x = x.astype(np.float32)
    sizes = [x.shape[axis] for axis in axes[:-1]] + [length] if kind == "C2R" else None
    if engine == "torch":
        return _torch(x, axes, kind=kind, forward=forward, scale=scale, sizes=sizes)
    library: Any = _library(engine)
    more = {"overwrite_x": True} if engine == "scipy" else {}
    if kind == "R2C":
        made = library.rfftn(x, axes=axes, norm=scale)
    elif kind == "C2R":
        made = library.irfftn(x, s=sizes, axes=axes, norm=scale, **more)
    elif forward:
        made = library.fftn(x, axes=axes, norm=scale, **more)
    else:
        made = library.ifftn(x, axes=axes, norm=scale, **more)
    return np.asarray(made)


def engine_for(library: str) -> str:
    """Which transforms arrays of this library get: "torch", "scipy" or "numpy"."""
    return "torch" if library == "torch" else _installed()


@lru_cache(maxsize=1)
def _installed() -> str:
    try:
        importlib.import_module("scipy.fft")
    except ImportError:
        return "numpy"
    return "scipy"


def _library(engine: str) -> Any:
    return np.fft if engine == "numpy" else importlib.import_module("scipy.fft")


def _torch(
    x: HostArray,
    axes: Sequence[int],
    *,
    kind: Kind,
    forward: bool,
    scale: str,
    sizes: Sequence[int] | None,
) -> HostArray:
    torch: Any = sys.modules["torch"]  # whoever has a tensor has imported it
    if any(stride < 0 for stride in x.strides) or not x.flags.writeable:
        x = x.copy()
    tensor, axes = torch.from_numpy(x), list(axes)
    if kind == "R2C":
        made = torch.fft.rfftn(tensor, dim=axes, norm=scale)
    elif kind == "C2R":
        made = torch.fft.irfftn(tensor, s=sizes, dim=axes, norm=scale)
    elif forward:
        made = torch.fft.fftn(tensor, dim=axes, norm=scale)
    else:
        made = torch.fft.ifftn(tensor, dim=axes, norm=scale)
    return np.asarray(made.numpy())
