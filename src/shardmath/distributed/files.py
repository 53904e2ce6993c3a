"""`save` and `load`: arrays in files, of which every rank writes or reads its part."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from shardmath.arrays import dtypes, library_named, library_of_package
from shardmath.base.collective_call import collective_call
from shardmath.collectives.operand import context_of
from shardmath.context.agreement import require_equal
from shardmath.context.context import DistributedContext, require_context
from shardmath.distributed import npy, parts
from shardmath.distributed.creation import device_of, require_distribution
from shardmath.distributed.distributed_array import DistributedArray
from shardmath.distributed.layouts import unbound
from shardmath.distributed.movement import rearranged
from shardmath.distributed.shared_file import (
    appearing,
    layout_in_file,
    read_part,
    together,
    write_part,
)
from shardmath.geometry import Distribution, Layout
from shardmath.operators.layouts import bind_layout, result_order

_SAVE, _LOAD = "save", "load"


@collective_call
def save(path: str | os.PathLike[str], x: DistributedArray) -> None:
    """Write the array to a file, which NumPy can read, too. Collective.

        shardmath.save("u.npy", u)

    Every rank writes its part, whatever the distribution. The file appears whole or not at all: an
    error, or the end of a rank, leaves what was there before. The array is in Fortran order in the
    file where all parts are so in memory. Elements of bfloat16, float8 and complex32, which the
    format has no names for, become bytes, as NumPy writes them; see `load`.

    Raises the same on all ranks: OSError, as open does, and for a disk that is full; ValueError for
    another suffix than .npy, TypeError for what is no DistributedArray; CollectiveMismatch where
    the ranks pass different paths or arrays.
    """
    context = x.context if isinstance(x, DistributedArray) else require_context()

    def described() -> tuple[Any, ...]:
        if not isinstance(x, DistributedArray):
            raise TypeError(f"save takes a DistributedArray, not {type(x).__name__}")
        spec = x.library.spec(x.local)
        return _path(path), spec.dtype, x.layout.describe(), hash(x.layout), spec.order

    def compared(specs: list[Any]) -> bool:
        *facts, orders = zip(*specs, strict=True)
        for what, values in zip(("path", "dtype", "layout", "layout"), facts, strict=True):
            require_equal(f"the {what}", values)
        return result_order(orders) == "F"

    fortran = context.agree(_SAVE, described, compared)
    dtype = dtypes.of(x.library.spec(x.local).dtype)
    header = npy.header_bytes(x.shape, dtype, fortran=fortran)

    def create(file: Path) -> None:
        with file.open("xb") as made:
            made.write(header)
            os.posix_fallocate(made.fileno(), 0, len(header) + x.size * dtype.itemsize)

    with appearing(context, _SAVE, Path(_path(path)), create) as file:
        write_part(x.transpose() if fortran else x, _SAVE, file, len(header))


@collective_call
def load(
    path: str | os.PathLike[str],
    *,
    distribution: Distribution,
    dtype: Any = None,
    package: ModuleType | None = None,
    context: DistributedContext | None = None,
) -> DistributedArray:
    """The array in a file of NumPy's format .npy, split by `distribution`. Collective.

        u = shardmath.load("u.npy", distribution=Slab.X)

    Every rank reads its part; who has written the file, and on how many ranks, does not matter.
    `package` is the library of the parts, as in `full`. `dtype` names the type of elements that the
    file has as bytes: "bfloat16", say. The ranks are those of `context`, or of the current one.

    Raises the same on all ranks: OSError where a rank cannot read the file, ValueError where it is
    no .npy file, truncated, or of Python objects, for another `dtype` than the file's, and where
    the distribution does not fit; CollectiveMismatch where the ranks pass different arguments.
    """
    context = context_of(_LOAD, context)
    library = library_named("numpy") if package is None else library_of_package(package)

    def described() -> tuple[Any, ...]:
        require_distribution(distribution)
        header = npy.read_header(Path(_path(path)))
        name = npy.named(header, dtype).name
        parts.on_device(np.empty(0, dtypes.to_numpy(name)), library, device_of(context))
        facts = header.shape, name, header.fortran, header.offset
        return _path(path), library.name, facts, unbound(distribution).encode()

    def bound(specs: list[Any]) -> tuple[Layout, Any]:
        *alike, encoded = zip(*specs, strict=True)
        for what, values in zip(("path", "package", "header"), alike, strict=True):
            require_equal(f"the {what}", values)
        facts = alike[-1][0]
        return bind_layout("distribution", encoded, facts[0]), facts

    layout, (_, name, fortran, offset) = context.agree(_LOAD, described, bound)
    native = dtypes.to_numpy(name)
    held = layout_in_file(layout.transposed() if fortran else layout, native.itemsize)
    host = read_part(context, _LOAD, Path(_path(path)), offset, held, native)
    if fortran:
        host, held = host.T, held.transposed()
    local = together(context, _LOAD, partial(parts.on_device, host, library, device_of(context)))
    made = DistributedArray.of(local, unbound(distribution), held, context)
    return (
        made if held == layout else made.like(rearranged(made, layout), made.distribution, layout)
    )


def _path(path: Any) -> str:
    """Where the file lies, links followed. Raises ValueError where its suffix names no format."""
    real: str = os.path.realpath(os.fspath(path))
    if Path(real).suffix != ".npy":
        raise ValueError(f"{real}: the suffix says what is written; there is .npy")
    return real
