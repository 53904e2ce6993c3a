"""HDF5 files, with h5py: a dataset for each array, whose elements every rank writes itself.

Rank 0 makes the file, with contiguous datasets that are allocated at once. The library says at
which byte each begins, and the ranks write there as they write .npy: all at once, with any build of
h5py. Datasets of others, chunked or compressed, are read by slices. HDF5 has no bfloat16, float8
and complex32: these are opaque bytes, and an attribute names the type.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shardmath.arrays import dtypes
from shardmath.context.context import DistributedContext
from shardmath.distributed import parts
from shardmath.distributed.distributed_array import DistributedArray
from shardmath.distributed.npy import Stored, type_in_file
from shardmath.distributed.shared_file import SAVE, appearing, extra, write_part

_TYPE = "dtype"  # of the attribute


def save_arrays(
    context: DistributedContext,
    path: Path,
    arrays: Mapping[str, tuple[DistributedArray, bool]],
    values: Mapping[str, Any],
) -> None:
    """Save arrays, and values as attributes, the same on all ranks. Collective."""

    def create(file: Path) -> None:
        h5py = extra("h5py")
        with h5py.File(file, "x") as made:
            for name, value in values.items():
                made.attrs[name] = h5py.Empty("f") if value is None else value
            for name, (x, _) in arrays.items():
                _add_dataset(made, name, x)

    with appearing(context, path, create) as file:
        stored, _ = context.on_all_ranks(SAVE, partial(stored_arrays, file))
        for name, (x, _) in arrays.items():
            offset = stored[name].offset
            if offset is not None:  # else there are no elements, or the one is written
                write_part(x, file, offset)


def _add_dataset(file: Any, name: str, x: DistributedArray) -> None:
    """Add a dataset that is allocated in one piece, for ranks to write there."""
    h5py, known = extra("h5py"), x.element_type
    native = np.dtype(type_in_file(known))
    if x.ndim:
        room = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        room.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        room.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        dataset = file.create_dataset(name, x.shape, native, dcpl=room)
    else:  # h5py does not allocate these early; every rank has the element
        element = np.array(parts.on_host(x.local)).view(native)
        dataset = file.create_dataset(name, data=element)
    if known.carrier:
        dataset.attrs[_TYPE] = known.name


def stored_arrays(path: Path) -> tuple[dict[str, Stored], dict[str, Any]]:
    """The arrays in a file, and the attributes of its root. Local.

    Raises OSError for a file that cannot be read or is no HDF5, ValueError for elements of Python
    objects or named fields.
    """
    h5py, stored = extra("h5py"), {}

    def visit(name: str, found: Any) -> None:
        if isinstance(found, h5py.Dataset):
            native = found.attrs.get(_TYPE, found.dtype)
            stored[name] = Stored(
                str(path), found.shape, dtypes.of(native).name, False, found.id.get_offset()
            )

    with h5py.File(path, "r") as file:
        file.visititems(visit)
        return stored, {name: _plain(value) for name, value in file.attrs.items()}


def _plain(value: Any) -> Any:
    """An attribute as a Python value; we write no arrays as attributes."""
    if isinstance(value, extra("h5py").Empty):
        return None
    return value.item() if isinstance(value, np.generic) else value


@contextmanager
def opened(path: Path, name: str) -> Iterator[Any]:
    """An array of the file, opened to be read by slices."""
    with extra("h5py").File(path, "r") as file:
        yield file[name]
