"""`save` and `load`: arrays in files; every rank writes or reads its part."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from shardmath.arrays import Library, dtypes, library_named, library_of_package
from shardmath.base.collective_call import collective_call
from shardmath.collectives.operand import context_of
from shardmath.context.agreement import require_equal
from shardmath.context.context import DistributedContext, require_context
from shardmath.distributed import checkpoints, hdf5, npy, parts, zarr_files
from shardmath.distributed.creation import device_of, require_distribution
from shardmath.distributed.distributed_array import DistributedArray
from shardmath.distributed.movement import rearranged
from shardmath.distributed.selections import layout_of_slices, read_slices
from shardmath.distributed.shared_file import LOAD, SAVE, layout_in_file, read_part
from shardmath.geometry import Distribution, Layout, unbound
from shardmath.operators.layouts import bind_layout, result_order

_ONE = ""  # the name of a single array
_NPY = ".npy"
_FORMATS: dict[str, Any] = {".h5": hdf5, ".hdf5": hdf5, ".zarr": zarr_files}  # by suffix
_PLAIN = (bool, int, float, str, type(None))


@collective_call
def save(path: str | os.PathLike[str], x: DistributedArray | Mapping[str, Any]) -> None:
    """Save an array, or a dictionary of arrays. Collective.

        shardmath.save("u.npy", u)
        shardmath.save("ocean", {"u": u, "v": v, "step": 120})

    The suffix chooses the format: .npy is NumPy's file of one array, in Fortran order if all parts
    are so in memory; .h5 and .hdf5 are h5py's files of a dictionary; .zarr is zarr-python's folder
    of an array or a dictionary. A dictionary at any other path becomes a checkpoint, a folder with
    a .npy file for each array. Besides arrays a dictionary may hold numbers, strings, booleans and
    None that are the same on all ranks.

    Every rank writes its part, whatever the distribution. The file appears whole or not at all: an
    error, or the end of a rank, leaves what was there before. Elements of bfloat16, float8 and
    complex32, for which .npy has no names, become bytes, as NumPy writes them.

    Raises the same on all ranks: OSError, as open does, and for a full disk; ValueError for a
    suffix that does not fit; TypeError for anything but an array or a dictionary of arrays, or for
    elements that the format does not have; CollectiveMismatch where the ranks pass different paths
    or arrays; BackendUnavailable without h5py or zarr.
    """
    given = x if isinstance(x, Mapping) else {_ONE: x}
    arrays = {name: one for name, one in given.items() if isinstance(one, DistributedArray)}
    values = {name: one for name, one in given.items() if name not in arrays}
    context = next((one.context for one in arrays.values()), None) or require_context()

    def described() -> tuple[Any, ...]:
        _require_saveable(x, arrays, values)
        specs = {name: one.library.spec(one.local) for name, one in arrays.items()}
        facts = {  # boxes look alike: the number tells them apart
            name: f"{specs[name].dtype}, {one.layout} [{hash(one.layout) & 0xFFFFFFFF:08x}]"
            for name, one in arrays.items()
        }
        return str(_place(path, x)), facts, values, [spec.order for spec in specs.values()]

    def compared(specs: list[Any]) -> list[bool]:
        paths, facts, given_values, orders = zip(*specs, strict=True)
        require_equal("the path", paths)
        require_equal("the names of the arrays", [list(names) for names in facts])
        for name in facts[0]:
            require_equal(f"array {name}" if name else "the array", [of[name] for of in facts])
        require_equal("what is saved beside arrays", given_values)
        return [result_order(of) == "F" for of in zip(*orders, strict=True)]

    fortran = context.agree(SAVE, described, compared)
    place = _place(path, x)
    if isinstance(x, DistributedArray) and place.suffix == _NPY:
        npy.save_array(x, place, fortran=fortran[0])
    else:
        ordered = dict(zip(arrays, zip(arrays.values(), fortran, strict=True), strict=True))
        _format(place).save_arrays(context, place, ordered, values)


@collective_call
def load(
    path: str | os.PathLike[str],
    *,
    distribution: Distribution | Mapping[str, Distribution],
    dtype: Any = None,
    package: ModuleType | None = None,
    context: DistributedContext | None = None,
) -> Any:
    """The array in a .npy file, or the dictionary in a checkpoint, HDF5 or Zarr. Collective.

        u = shardmath.load("u.npy", distribution=Slab.X)
        ocean = shardmath.load("ocean", distribution={"u": Slab.X, "v": Slab.Y})

    Every rank reads its part; it does not matter who has written the file, on how many ranks. For a
    dictionary one distribution applies to all arrays, while a dictionary of distributions names the
    arrays to load; values that were saved beside arrays are always loaded.

    `package` is the library of the parts, as in `full`. `dtype` names the type of elements that a
    .npy file has as bytes, such as "bfloat16". The ranks are those of `context`, by default the
    current one.

    Raises the same on all ranks: OSError where a rank cannot read a file; ValueError where it is of
    another format, truncated, or of Python objects, where `dtype` is not its type, and where the
    distribution does not fit; KeyError for an array that is not there; CollectiveMismatch where the
    ranks pass different arguments; BackendUnavailable as `save`.
    """
    context = context_of(LOAD, context)
    library = library_named("numpy") if package is None else library_of_package(package)

    def described() -> tuple[Any, ...]:
        place = _place(path, None)
        stored, values = _stored(place, dtype)
        wanted = _by_name(distribution, stored, place)
        for name in wanted:
            native = dtypes.to_numpy(stored[name].dtype)
            parts.on_device(np.empty(0, native), library, device_of(context, library))
        facts = {name: tuple(stored[name]) for name in wanted}
        encoded = {name: unbound(one).encode() for name, one in wanted.items()}
        return str(place), library.name, facts, values, encoded

    def bound(specs: list[Any]) -> tuple[list[tuple[str, npy.Stored, Layout]], dict[str, Any]]:
        *alike, encoded = zip(*specs, strict=True)
        names = "the path", "the package", "what is there", "what is there beside arrays"
        for what, said in zip(names, alike, strict=True):
            require_equal(what, said)
        arrays = []
        for name, facts in alike[2][0].items():
            stored = npy.Stored(*facts)
            layout = bind_layout("distribution", [of[name] for of in encoded], stored.shape)
            arrays.append((name, stored, layout))
        return arrays, alike[3][0]

    arrays, values = context.agree(LOAD, described, bound)
    loaded = {}
    for name, stored, layout in arrays:
        one = distribution[name] if isinstance(distribution, Mapping) else distribution
        loaded[name] = _loaded(context, name, stored, layout, one, library)
    return loaded[_ONE] if list(loaded) == [_ONE] else loaded | values


def _loaded(
    context: DistributedContext,
    name: str,
    stored: npy.Stored,
    layout: Layout,
    distribution: Distribution,
    library: Library,
) -> DistributedArray:
    """An array in a file, brought to the layout of a distribution. Collective."""
    native, fortran = dtypes.to_numpy(stored.dtype), stored.fortran
    if stored.offset is None:
        held = layout_of_slices(layout)
        with _format(Path(stored.file)).opened(Path(stored.file), name) as chunked:
            host = read_slices(context, chunked, held, native)
    else:
        own = layout.transposed() if fortran else layout
        held = layout_in_file(own, native.itemsize, written=False)
        host = read_part(context, Path(stored.file), stored.offset, held, native)
    if fortran:
        host, held = host.T, held.transposed()
    local = context.on_all_ranks(
        LOAD, partial(parts.on_device, host, library, device_of(context, library))
    )
    made = DistributedArray.of(local, unbound(distribution), held, context)
    if held == layout:
        return made
    return made.like(rearranged(made, layout), made.distribution, layout)


def _stored(place: Path, dtype: Any) -> tuple[dict[str, npy.Stored], dict[str, Any]]:
    """The arrays in a file or folder, and the values beside them. Local."""
    if place.suffix == _NPY:
        return {_ONE: npy.read_stored(place, dtype)}, {}
    if dtype is not None:
        raise ValueError("dtype= is for .npy: other formats know the types of their arrays")
    stored: tuple[dict[str, npy.Stored], dict[str, Any]] = _format(place).stored_arrays(place)
    return stored


def _format(place: Path) -> Any:
    """The module for the format of a dictionary at a path."""
    return _FORMATS.get(place.suffix, checkpoints)


def _by_name(distribution: Any, stored: Mapping[str, Any], place: Path) -> dict[str, Distribution]:
    """The distribution of each array to load. Raises KeyError for an array that is not there,
    TypeError where it is given something else than distributions.
    """
    is_named = isinstance(distribution, Mapping)
    wanted = dict(distribution) if is_named else dict.fromkeys(stored, distribution)
    for name, one in wanted.items():
        if name not in stored:
            raise KeyError(f"{place} has no array {name}; it has {', '.join(stored)}")
        require_distribution(one)
    return wanted


def _require_saveable(
    x: Any, arrays: Mapping[str, DistributedArray], values: Mapping[str, Any]
) -> None:
    """Raise TypeError for what cannot be saved, ValueError for arrays of different contexts."""
    for name, value in values.items():
        if not isinstance(x, Mapping):
            raise TypeError(
                f"save takes a DistributedArray or a dictionary of such, not {type(x).__name__}; "
                "a rank's part becomes one by shardmath.array(part, distribution)"
            )
        if not isinstance(value, _PLAIN):
            raise TypeError(
                f"{name!r}: a checkpoint has arrays, numbers, strings, booleans and None, not "
                f"{type(value).__name__}"
            )
    if wrong := [name for name in (*arrays, *values) if not isinstance(name, str)]:
        raise TypeError(f"names in a checkpoint are strings, not {wrong[0]!r}")
    if len({id(one.context) for one in arrays.values()}) > 1:
        raise ValueError("the arrays are split over the ranks of different contexts")


def _place(path: Any, x: Any) -> Path:
    """The path of the file or the folder, links resolved. Raises ValueError where the suffix does
    not fit `x`, which is to be saved.
    """
    place = Path(os.path.realpath(os.fspath(path)))
    if isinstance(x, DistributedArray) and place.suffix not in (_NPY, ".zarr"):
        raise ValueError(f"{place}: an array by itself has the suffix {_NPY} or .zarr")
    if isinstance(x, Mapping) and place.suffix == _NPY:
        raise ValueError(f"{place}: a file {_NPY} has one array; a checkpoint is a folder")
    if place.suffix == ".npz":
        raise ValueError(
            f"{place}: ranks write no .npz: save a checkpoint, {place.with_suffix('')}"
        )
    return place
