"""Arrays in HDF5 and Zarr: the libraries read what ranks have saved, and ranks what they have."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from split_arrays import agree, elements, lists_of, placed, shapes, splits

import shardmath
from draws import drawn
from shardmath.distributed import selections, shared_file
from shardmath.distribution import BlockCyclic, ProcessGrid, Slab
from shardmath.errors import BackendUnavailable, CollectiveMismatch
from shardmath.geometry import decode

INSTALLED = {
    name: pytest.param(name, marks=pytest.mark.skipif(
        importlib.util.find_spec(module) is None, reason=f"{module} is not installed"))
    for name, module in (("hdf5", "h5py"), ("zarr", "zarr"))
}  # fmt: skip
FORMATS = pytest.mark.parametrize("kind", INSTALLED.values())
SUFFIX = {"hdf5": ".h5", "zarr": ".zarr"}
DTYPES = ("bool", "int16", "float16", "bfloat16", "float64", "complex64")
VALUES = {"step": 12, "name": "ocean", "rate": 0.5, "done": False}


@st.composite
def arrays(draw, size):
    """An array: its shape, type, split, and the split in which it is loaded."""
    shape = draw(shapes())
    split = draw(splits(shape, size)), draw(splits(shape, size))
    return shape, draw(st.sampled_from(DTYPES)), split[0], split[1]


def read(kind, path, name):
    """An array of a file, by its library."""
    if kind == "hdf5":
        with importlib.import_module("h5py").File(path) as file:
            return file[name][()]
    return np.asarray(importlib.import_module("zarr").open_group(path, mode="r")[name][...])


def saved(context, cases, kind, path):
    """All arrays in one file, of which every element goes in small turns."""
    given_, whole, target = {}, {}, {}
    for number, (shape, dtype, split, other) in enumerate(cases):
        name = f"group {number % 2}/array {number}"
        is_none_of_zarrs = dtype == "bfloat16" and kind == "zarr"
        whole[name] = elements(shape, "float32" if is_none_of_zarrs else dtype)
        given_[name] = placed(context, whole[name], split)
        target[name] = decode(other[context.rank])
    with patch.object(shared_file, "ROUND", 24), patch.object(selections, "ROUND", 24), \
            patch.object(selections, "_CHUNK", 24), context:  # fmt: skip
        shardmath.save(path, given_ | VALUES)
        for name, a in whole.items():
            assert read(kind, path, name).tobytes() == a.tobytes()
        loaded = shardmath.load(path, distribution=target)
    assert {name: loaded.pop(name) for name in VALUES} == VALUES
    for name, x in loaded.items():
        agree(x, whole[name])


EMPTY = (0, 2), "bfloat16", [Slab.Y.encode()], [Slab.Y.encode()]


@FORMATS
@drawn(2)
@given(cases=lists_of(arrays, most=6))
@example(cases=(1, [EMPTY]))
def test_save_and_load(contexts, tmp_path_factory, kind, cases):
    size, calls = cases
    folder = tmp_path_factory.mktemp("files")
    contexts.run(saved, calls, kind, f"{folder}/x{SUFFIX[kind]}", ranks=size)
    assert [path.name for path in folder.iterdir()] == [f"x{SUFFIX[kind]}"]


def chunked(context, kind, path, a):
    """What the library has written in chunks, compressed, in any distribution."""
    with context:
        cyclic = BlockCyclic(ProcessGrid(shape=(2, 1)), (3, 7))
        for split in (Slab.X, Slab.Y, cyclic, BlockCyclic(ProcessGrid(shape=(1, 2)), (5, 1))):
            agree(shardmath.load(path, distribution=split)["a"], a)


@FORMATS
def test_chunks_of_others(contexts, tmp_path, kind):
    a, path = elements((11, 7), "float64"), str(tmp_path / f"x{SUFFIX[kind]}")
    if kind == "hdf5":
        with importlib.import_module("h5py").File(path, "w") as file:
            file.create_dataset("a", data=a, chunks=(4, 3), compression="gzip")
    else:
        group = importlib.import_module("zarr").create_group(path)
        group.create_array("a", shape=a.shape, dtype=a.dtype, chunks=(4, 3))[...] = a
    contexts.run(chunked, kind, path, a, ranks=2)


def mistakes(context, kind, folder):
    with context:
        path = f"{folder}/x{SUFFIX[kind]}"
        x = shardmath.zeros((6, 4), distribution=Slab.X)
        shardmath.save(path, {"x": x})
        wrong = FileExistsError if kind == "zarr" else TypeError
        dates = x.astype("<U3") if kind == "hdf5" else x
        with pytest.raises(wrong, match="rank 0: "):
            shardmath.save(path, {"x": dates})
        with pytest.raises(CollectiveMismatch):
            shardmath.save(path, {"x": x[context.rank :]})
        with pytest.raises((FileNotFoundError, OSError), match=r"every rank: "):
            shardmath.load(f"{folder}/none{SUFFIX[kind]}", distribution=Slab.X)
        with pytest.raises(KeyError, match="has no array y; it has x"):
            shardmath.load(path, distribution={"y": Slab.X})
        if kind == "zarr":
            shardmath.save(f"{folder}/one.zarr", x + 1)
            agree(shardmath.load(f"{folder}/one.zarr", distribution=Slab.Y), np.ones((6, 4)))
            half = x.astype("bfloat16")
            with pytest.raises(TypeError, match="rank 0: Zarr has no bfloat16: convert it"):
                shardmath.save(f"{folder}/half.zarr", {"x": half})
        else:
            with pytest.raises(ValueError, match=r"an array by itself has the suffix \.npy or"):
                shardmath.save(path, x)
        agree(shardmath.load(path, distribution=Slab.X)["x"], np.zeros((6, 4)))
        assert not list(Path(folder).glob(".*"))


@FORMATS
def test_mistakes(contexts, tmp_path, kind):
    contexts.run(mistakes, kind, str(tmp_path), ranks=2)


def missing(context, folder):
    with context, patch.dict("sys.modules", {"h5py": None, "zarr": None}):
        x = shardmath.zeros((6, 4), distribution=Slab.X)
        for suffix, extra in ((".h5", "hdf5"), (".hdf5", "hdf5"), (".zarr", "zarr")):
            for call in (
                lambda path: shardmath.save(path, {"x": x}),
                lambda path: shardmath.load(path, distribution=Slab.X),
            ):
                with pytest.raises(BackendUnavailable, match=rf"'shardmath\[{extra}\]'"):
                    call(f"{folder}/x{suffix}")


def test_missing_libraries(contexts, tmp_path):
    contexts.run(missing, str(tmp_path), ranks=2)
    assert not list(tmp_path.iterdir())
