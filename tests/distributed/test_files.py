"""Arrays in files: NumPy reads what ranks have saved, and ranks load it split in any other way."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import itertools
import os
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from split_arrays import agree, elements, host, lists_of, placed, shapes, splits

import shardmath
from draws import drawn
from shardmath.collectives import all_reduce
from shardmath.distributed import shared_file
from shardmath.distribution import BlockCyclic, ProcessGrid, Replicated, Slab
from shardmath.errors import CollectiveMismatch, RankFailure
from shardmath.geometry import decode

DTYPES = ("bool", "int16", "float16", "bfloat16", "float64", "complex64", "S3", "<M8[s]", ">f8")
OF_TORCH = DTYPES[:-3]
BYTES = {"bfloat16": "V2"}  # as NumPy reads them


@st.composite
def files(draw, size):
    """An array: its shape, type, order, split, the split in which it is loaded, the library."""
    shape = draw(shapes())
    library = draw(st.sampled_from(("numpy", "numpy", "torch")))
    dtype = draw(st.sampled_from(OF_TORCH if library == "torch" else DTYPES))
    return shape, dtype, draw(st.booleans()), draw(splits(shape, size)), draw(
        splits(shape, size)
    ), library  # fmt: skip


def names_in(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def array_of(shape, dtype):
    if dtype in OF_TORCH:
        return elements(shape, dtype)
    return elements(shape, "int8").astype(dtype)


@contextlib.contextmanager
def cut_to(short, turn):
    """Runs of so many bytes, and rounds, and rows that are moved, of so many."""
    lengths = {"WRITTEN": short, "READ": short, "ROUND": turn, "MOVED": turn}
    usual = {name: getattr(shared_file, name) for name in lengths}
    vars(shared_file).update(lengths)
    try:
        yield
    finally:
        vars(shared_file).update(usual)


def saved(context, cases, folder, lengths):
    with cut_to(*lengths):
        save_and_load(context, cases, folder)


def save_and_load(context, cases, folder):
    for shape, dtype, fortran, split, other, library in cases:
        a = array_of(shape, dtype)
        x = placed(context, a, split, library)
        if fortran:
            part = x.library.from_host(np.asfortranarray(host(x)))
            x = x.like(part, x.distribution, x.layout)
        path = f"{folder}/a.npy"
        shardmath.save(path, x)
        got = np.load(path)
        assert got.dtype == BYTES.get(dtype, a.dtype) and got.tobytes() == a.tobytes()
        package = importlib.import_module(library)
        named = dtype if dtype in BYTES else None
        target = decode(other[context.rank])
        loaded = shardmath.load(
            path, distribution=target, dtype=named, package=package, context=context
        )
        agree(loaded, a)
        assert names_in(folder) == ["a.npy"]


@drawn(4)
@given(
    cases=lists_of(files, most=12), lengths=st.sampled_from([(1, 7), (64, 1 << 20), (1 << 16, 24)])
)
def test_save_and_load(contexts, tmp_path_factory, cases, lengths):
    size, calls = cases
    folder = tmp_path_factory.mktemp("files")
    contexts.run(saved, calls, str(folder), lengths, ranks=size)


def columns(context, folder):
    """Short runs, which are brought to slabs a few rows at a time."""
    a = np.arange(1 * 37 * 5 * 2.0).reshape(1, 37, 5, 2)
    path = f"{folder}/columns.npy"
    grid = ProcessGrid(shape=(1, 1, context.size, 1))
    with context, cut_to(1 << 20, 200):
        for split in (Slab(2), Slab(3), BlockCyclic(grid, (1, 37, 1, 2)), Replicated()):
            x = shardmath.from_global(a, split)
            shardmath.save(path, x)
            assert (np.load(path) == a).all()
            agree(shardmath.load(path, distribution=split), a)
            shardmath.save(path, x[:, ::-2, 1:])
            assert (np.load(path) == a[:, ::-2, 1:]).all()


def test_short_runs_are_brought_to_slabs_in_turns(contexts, tmp_path):
    contexts.run(columns, str(tmp_path), ranks=3)


def fewer(context, folder):
    """What four ranks have saved, three load, block-cyclic, and one."""
    x = placed(context, elements((13, 6), "float64"), [Slab.Y.encode()] * 4)
    shardmath.save(Path(folder, "x.npy"), x)
    for ranks in (3, 1):
        part = context.split(0 if context.rank < ranks else None)
        if part is None:
            continue
        with part:
            cyclic = BlockCyclic(ProcessGrid(shape=(ranks, 1)), (2, 6))
            loaded = shardmath.load(f"{folder}/x.npy", distribution=cyclic)
            agree(loaded, elements((13, 6), "float64"))
            shardmath.save(f"{folder}/again.npy", loaded)


def test_other_numbers_of_ranks(contexts, tmp_path):
    contexts.run(fewer, str(tmp_path), ranks=4)
    assert np.load(tmp_path / "again.npy").tolist() == elements((13, 6), "float64").tolist()


OLD = np.arange(3)


@contextlib.contextmanager
def refused(folder, kind, match, names=("old.npy",)):
    """The same exception on every rank; what was there is there, and nothing else."""
    with pytest.raises(kind, match=match):
        yield
    assert names_in(folder) == sorted(names)
    if "old.npy" in names:
        assert np.load(f"{folder}/old.npy").tolist() == OLD.tolist()


def files_that_cannot_be_read(folder):
    """Those files, and what is said of them."""
    np.save(f"{folder}/whole.npy", np.arange(40.0))
    data = Path(folder, "whole.npy").read_bytes()
    made = {
        "short.npy": (data[:-1], "truncated: it has 447 bytes of 448"),
        "header.npy": (data[:60], "cannot be read as .npy"),
        "text.npy": (b"no header", "cannot be read as .npy: the magic string is not correct"),
        "empty.npy": (b"", "cannot be read as .npy"),
    }
    for name, (content, _) in made.items():
        Path(folder, name).write_bytes(content)
    np.save(f"{folder}/objects.npy", np.array([None]))
    np.save(f"{folder}/fields.npy", np.zeros(2, [("a", "f4")]))
    words = {name: said for name, (_, said) in made.items()}
    return words | {"objects.npy": "Python objects", "fields.npy": "moved as plain bytes"}


def unreadable(context, folder, words):
    with context:
        for name, said in words.items():
            with pytest.raises(ValueError, match=f"every rank: .*{said}"):
                shardmath.load(f"{folder}/{name}", distribution=Slab.X)
        with pytest.raises(FileNotFoundError, match=r"every rank: .*none\.npy"):
            shardmath.load(f"{folder}/none.npy", distribution=Slab.X)
        whole = f"{folder}/whole.npy"
        with pytest.raises(ValueError, match="has elements of float64, not of bfloat16"):
            shardmath.load(whole, distribution=Slab.X, dtype="bfloat16")
        with pytest.raises(ValueError, match=r"distribution: .*ndim 2 or more"):
            shardmath.load(whole, distribution=Slab.Y)
        with pytest.raises(TypeError, match=r"such as Slab\.X"):
            shardmath.load(whole, distribution="rows")
        with pytest.raises(FileNotFoundError, match="is no checkpoint"):
            shardmath.load(f"{folder}/text.txt", distribution=Slab.X)
        with pytest.raises(CollectiveMismatch, match="the path must be equal"):
            other = f"{folder}/whole.npy" if context.rank else f"{folder}/twin.npy"
            shardmath.load(other, distribution=Slab.X)
        with pytest.raises(CollectiveMismatch):
            if context.rank:
                shardmath.load(whole, distribution=Slab.X)
            else:
                shardmath.save(whole, shardmath.zeros(3, distribution=Slab.X))
        shardmath.load(whole, distribution=Slab.X)


def test_files_that_cannot_be_read(contexts, tmp_path):
    words = files_that_cannot_be_read(tmp_path)
    np.save(tmp_path / "twin.npy", np.arange(40.0))
    contexts.run(unreadable, str(tmp_path), words, ranks=2)


@contextlib.contextmanager
def limited(nbytes):
    """No file of this rank grows beyond so many bytes: where it would, the disk is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def unwritable(context, folder, closed):
    with context:
        x = shardmath.arange(9000, distribution=Slab.X)
        for rank in range(context.size):
            mine = limited(20_000) if context.rank == rank else contextlib.nullcontext()
            with mine, refused(folder, OSError, "rank .*File too large"):
                shardmath.save(f"{folder}/old.npy", x if rank != 1 else x[::-1])
        with refused(folder, FileNotFoundError, "rank 0: .*no folder to save in: .*none"):
            shardmath.save(f"{folder}/none/x.npy", x)
        with refused(folder, NotADirectoryError, "rank 0: .*Not a directory"):
            shardmath.save(f"{folder}/old.npy/x.npy", x)
        with refused(
            folder, TypeError, "rank 1: save takes a DistributedArray or a dict.*, not ndarray"
        ):
            shardmath.save(f"{folder}/x.npy", x.local if context.rank else x)
        with refused(
            folder,
            CollectiveMismatch,
            "the array must be equal on all ranks: rank 0 has int64, 8999",
        ):
            shardmath.save(f"{folder}/x.npy", x if context.rank else x[1:])
        with refused(folder, ValueError, "an array by itself has the suffix"):
            shardmath.save(f"{folder}/x", x)
        with refused(folder, ValueError, "ranks write no .npz"):
            shardmath.save(f"{folder}/x.npz", {"x": x})
        if closed:
            with refused(closed, PermissionError, "rank 0: .*Permission denied", []):
                os.seteuid(65534)
                try:
                    shardmath.save(f"{closed}/x.npy", x)
                finally:
                    os.seteuid(0)
        shardmath.save(f"{folder}/old.npy", x)


def test_files_that_cannot_be_written(contexts, tmp_path):
    folder = tmp_path / "open"
    folder.mkdir()
    np.save(folder / "old.npy", OLD)
    is_root = os.geteuid() == 0  # who is not has no other user to be
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    contexts.run(unwritable, str(folder), str(closed) if is_root else "", ranks=3)
    assert np.load(folder / "old.npy").tolist() == list(range(9000))


def full(context, folder):
    """A disk that is full before the file is there, and while it is written."""
    reserve = os.posix_fallocate
    with context, cut_to(1 << 20, 1 << 14):
        rows = shardmath.zeros(100_000, distribution=Slab.X)
        columns = shardmath.zeros((1000, 100), distribution=Slab.Y)  # in turns, of which some fit
        for x, function in itertools.product((rows, columns), (reserve, lambda *_: None)):
            os.posix_fallocate = function
            try:
                with refused(folder, OSError, "rank.*No space left on device"):
                    shardmath.save(f"{folder}/old.npy", x)
            finally:
                os.posix_fallocate = reserve
        shardmath.save(f"{folder}/small.npy", rows[:1000])


def test_a_full_disk(contexts, tmp_path):
    disk = "mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)
    mounted = subprocess.run(disk, capture_output=True, check=False, text=True)
    if mounted.returncode:
        pytest.skip(f"no small disk: {mounted.stderr.strip()}")
    try:
        np.save(tmp_path / "old.npy", OLD)
        contexts.run(full, str(tmp_path), ranks=2)
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def interrupted(context, folder):
    """Ctrl-C on one rank, in the middle of its part, at its beginning, and before the new name."""
    pwrite, fsync = os.pwrite, os.fsync
    for rank in (0, 1):
        for name, call, count in (
            ("pwrite", pwrite, 3),
            ("pwrite", pwrite, 1),
            ("fsync", fsync, 1),
        ):
            if (name, rank) == ("fsync", 1):
                continue  # rank 0 alone syncs the file
            part = context.split(0)
            calls = [None] * count

            def interrupt(*arguments, calls=calls, call=call):
                calls.pop()
                if not calls:
                    raise KeyboardInterrupt
                return call(*arguments)

            with part:
                x = shardmath.arange(9000, distribution=Slab.X)
                mine = context.rank == rank
                with refused(folder, KeyboardInterrupt if mine else RankFailure, ""):
                    if mine:
                        setattr(os, name, interrupt)
                    try:
                        with cut_to(1 << 16, 1 << 10):
                            shardmath.save(f"{folder}/old.npy", x)
                    finally:
                        os.pwrite, os.fsync = pwrite, fsync
            all_reduce(0, context=context)


def test_interrupts(contexts, tmp_path):
    np.save(tmp_path / "old.npy", OLD)
    contexts.run(interrupted, str(tmp_path), ranks=2)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def progress(context, folder):
    """A bar on rank 0, where there is a terminal, and the work has several turns."""
    for stream, turn in ((Terminal, 1 << 10), (Terminal, 1 << 20), (io.StringIO, 1 << 10)):
        screen = stream()
        terminal = patch.dict(os.environ, TERM="xterm"), patch.object(sys, "stderr", screen)
        with context, cut_to(1 << 14, turn), terminal[0], terminal[1]:
            shardmath.save(f"{folder}/x.npy", shardmath.arange(9000, distribution=Slab.X))
        is_shown = context.rank == 0 and stream is Terminal and turn == 1 << 10
        text = screen.getvalue()
        assert ("save" in text and "100%" in text) == is_shown == bool(text)


@pytest.mark.skipif(importlib.util.find_spec("rich") is None, reason="rich is not installed")
def test_a_progress_bar(contexts, tmp_path):
    contexts.run(progress, str(tmp_path), ranks=2)


# -- checkpoints -----------------------------------------------------------------------------------

VALUES = {"step": 12, "name": "ocean", "rate": 0.5, "done": False, "seed": None}
SHAPES = {"u": (13, 6), "layer/0: w.é": (4, 3, 5), "total": (), "none": (0, 3)}
TYPES = {"u": "float64", "layer/0: w.é": "bfloat16", "total": "int16", "none": "complex64"}
ONE, ROWS = Replicated(), Slab.X


def content(seed):
    return {name: elements(shape, TYPES[name], seed) for name, shape in SHAPES.items()}


def checkpoint_of(context, seed):
    """What is saved: arrays of both memory orders, and numbers."""
    size, arrays = context.size, content(seed)
    made = {
        "u": placed(context, arrays["u"].T.copy(), [ROWS.encode()] * size).T,
        "layer/0: w.é": placed(context, arrays["layer/0: w.é"], [Slab.Y.encode()] * size),
        "total": placed(context, arrays["total"], [ONE.encode()] * size),
        "none": placed(context, arrays["none"], [ROWS.encode()] * size),
    }
    return made | VALUES | {"step": seed}


def check(folder, seed, distributions=None):
    """The checkpoint that was made of `seed` is there, and no other file."""
    wanted = distributions or dict.fromkeys(SHAPES, ROWS) | {"total": ONE}
    loaded = shardmath.load(folder, distribution=wanted)
    assert {name: loaded.pop(name) for name in VALUES} == VALUES | {"step": seed}
    assert list(loaded) == list(wanted)
    for name, x in loaded.items():
        agree(x, content(seed)[name])
    assert len(names_in(folder)) == 1 + len(SHAPES)


def restarted(context, folder):
    """Written on four ranks, and again; read on three, all of it or a part."""
    whole = f"{folder}/whole"
    for seed in (1, 2):
        shardmath.save(whole, checkpoint_of(context, seed))
    part = context.split(0 if context.rank < 3 else None)
    if part is not None:
        with part:
            check(whole, 2)
            check(whole, 2, {"u": Slab.Y})
            again = shardmath.load(whole, distribution=Replicated())
            shardmath.save(Path(folder, "again"), again)
            check(f"{folder}/again", 2)


def test_checkpoints(contexts, tmp_path):
    contexts.run(restarted, str(tmp_path), ranks=4)
    names = names_in(tmp_path / "again")
    assert names[0] == "checkpoint.json" and names[-1].startswith("u-")
    assert np.load(tmp_path / "again" / names[-1]).tolist() == content(2)["u"].tolist()


def mistaken(context, folder):
    with context:
        whole = f"{folder}/whole"
        arrays = checkpoint_of(context, 3)
        shardmath.save(whole, arrays)
        refusals = [
            ({"u": arrays["u"].local}, TypeError, "'u': a checkpoint has arrays, numbers"),
            ({1: arrays["u"]}, TypeError, "names in a checkpoint are strings, not 1"),
            ({"step": context.rank}, CollectiveMismatch, "what is saved beside arrays"),
            ({str(context.rank): arrays["u"]}, CollectiveMismatch, "the names of the arrays"),
            ({"u": arrays["u"][context.rank :]}, CollectiveMismatch, "array u must be equal"),
            ({"x" * 300: arrays["u"]}, OSError, "rank 0: .*File name too long"),
        ]
        for wrong, kind, said in refusals:
            for path in (whole, f"{folder}/new"):
                with pytest.raises(kind, match=said):
                    shardmath.save(path, wrong)
                all_reduce(0)  # the others have removed theirs
        assert names_in(folder) == ["whole"]
        with pytest.raises(ValueError, match="a checkpoint is a folder"):
            shardmath.save(f"{folder}/x.npy", arrays)
        check(whole, 3)
        with pytest.raises(KeyError, match="has no array v; it has u, layer"):
            shardmath.load(whole, distribution={"v": ROWS})
        with pytest.raises(ValueError, match="other formats know the types"):
            shardmath.load(whole, distribution=ROWS, dtype="int8")
        with pytest.raises(ValueError, match="distribution: "):
            shardmath.load(whole, distribution=ROWS)  # of the array of no axes
        with pytest.raises(FileNotFoundError, match="is no checkpoint"):
            shardmath.load(folder, distribution=ROWS)
        for text in (
            "",
            "[]",
            '{"arrays": {}}',
            '{"arrays": {"u": {"file": "../u"}}, "values": {}}',
        ):
            all_reduce(0)
            Path(folder, "whole", "checkpoint.json").write_text(text)
            all_reduce(0)
            with pytest.raises(ValueError, match=r"every rank: .*checkpoint\.json names no arrays"):
                shardmath.load(whole, distribution=ROWS)


def test_checkpoints_that_cannot_be(contexts, tmp_path):
    contexts.run(mistaken, str(tmp_path), ranks=2)


class Stopped(BaseException):
    """What no one expects."""


def stopped_anywhere(context, folder):
    """A rank stops at each call of the system in turn: the old checkpoint is whole, or the new."""
    whole = f"{folder}/whole"
    shardmath.save(whole, checkpoint_of(context, 0))
    calls = {name: getattr(os, name) for name in ("open", "pwrite", "rename", "replace", "fsync")}
    old, seed = 0, 0
    for rank in (0, 1):
        place, ended = 0, False
        while not ended:
            place, seed = place + 1, seed + 1
            left = [place]

            def stop(*arguments, call, left=left, **words):
                left[0] -= 1
                if not left[0]:
                    raise Stopped
                return call(*arguments, **words)

            part = context.split(0)
            with part:
                arrays = {"u": placed(part, content(seed)["u"], [ROWS.encode()] * 2), "step": seed}
                try:
                    for name, call in calls.items():
                        if context.rank == rank:
                            setattr(os, name, partial(stop, call=call))
                    shardmath.save(whole, arrays)
                    ended = True
                except (Stopped, RankFailure):
                    pass
                finally:
                    for name, call in calls.items():
                        setattr(os, name, call)
            all_reduce(0, context=context)
            with context:
                found = shardmath.load(whole, distribution={})["step"]
                assert found in (old, seed) and (found == seed or not ended)
                old = found
                ended = bool(all_reduce(int(ended), op="max"))
        assert place > 2
    with context:
        agree(shardmath.load(whole, distribution=ROWS)["u"], content(seed)["u"])


def test_a_rank_that_stops_anywhere(contexts, tmp_path):
    contexts.run(stopped_anywhere, str(tmp_path), ranks=2)
