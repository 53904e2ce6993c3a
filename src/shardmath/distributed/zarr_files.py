"""Zarr, with zarr-python: a folder of chunks for each array, of which every rank writes whole ones.

A dictionary is a group, a single array the root. The folder is written under another name, and
renamed when it is complete. Since no folder replaces another in one step, there must be nothing at
the path before.
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
from shardmath.distributed.distributed_array import DistributedArray
from shardmath.distributed.npy import Stored
from shardmath.distributed.selections import chunk_shape, write_chunks
from shardmath.distributed.shared_file import SAVE, appearing, extra, sync

_SYNCED = 256  # files after which the ranks meet


def save_arrays(
    context: DistributedContext,
    path: Path,
    arrays: Mapping[str, tuple[DistributedArray, bool]],
    values: Mapping[str, Any],
) -> None:
    """Save arrays, and values as attributes, the same on all ranks. Collective.

    Raises FileExistsError on all ranks where there is something at `path`.
    """
    chunks = {
        name: chunk_shape(x.shape, x.element_type.itemsize, context.size)
        for name, (x, _) in arrays.items()
    }

    def create(folder: Path) -> None:
        zarr = extra("zarr")
        if path.exists():
            raise FileExistsError(f"{path} is there: remove it, or save under another name")
        if list(arrays) != [""]:
            zarr.create_group(str(folder), attributes=dict(values))
        for name, (x, _) in arrays.items():
            known = x.element_type
            if known.carrier:
                raise TypeError(f"Zarr has no {known}: convert it, for example to {known.sums}")
            zarr.create_array(
                str(folder), name=name or None, shape=x.shape, chunks=chunks[name],
                dtype=np.dtype(known.name),
            )  # fmt: skip

    with appearing(context, path, create) as folder:
        for name, (x, _) in arrays.items():
            chunked = context.on_all_ranks(SAVE, partial(_open, folder, name, "r+"))
            write_chunks(x, chunked, chunks[name])
        written = sorted(folder.rglob("*"))
        for start in range(0, len(written), _SYNCED):
            mine = written[start : start + _SYNCED][context.rank :: context.size]
            context.on_all_ranks(SAVE, partial(_sync, mine))


def stored_arrays(path: Path) -> tuple[dict[str, Stored], dict[str, Any]]:
    """The arrays in a folder, and the attributes of its root. Local.

    Raises FileNotFoundError where there is no Zarr, ValueError for elements that are not numbers or
    strings of one length.
    """
    zarr = extra("zarr")
    root = zarr.open(str(path), mode="r")
    if isinstance(root, zarr.Array):
        return {"": _stored(path, root)}, {}
    members = root.members(max_depth=None)
    stored = {name: _stored(path, one) for name, one in members if isinstance(one, zarr.Array)}
    return stored, dict(root.attrs)


@contextmanager
def opened(path: Path, name: str) -> Iterator[Any]:
    """An array of the folder, opened to be read by slices."""
    yield _open(path, name, "r")


def _sync(written: list[Path]) -> None:
    for path in written:
        sync(path)


def _open(path: Path, name: str, mode: str) -> Any:
    return extra("zarr").open_array(str(path), path=name, mode=mode)


def _stored(path: Path, chunked: Any) -> Stored:
    return Stored(str(path), chunked.shape, dtypes.of(chunked.dtype).name, False, None)
