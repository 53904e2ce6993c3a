"""A mistake on one rank, or on all, is the same error on all ranks; then everything still works."""

from __future__ import annotations

import logging
from unittest.mock import patch

import numpy as np
import pytest
import scipy.fft
import torch

from mistakes import heard, listening, misses, no_memory
from shardmath.distribution import BlockCyclic, Box, ProcessGrid, Slab
from shardmath.errors import ShardmathError
from shardmath.fft import (
    FFT,
    FFTDirection,
    FFTOptions,
    allocate_operand,
    fft,
    ifft,
    irfft,
    rfft,
)
from shardmath.handles.allocation import allocate_symmetric_memory, free_symmetric_memory
from shardmath.program import passes

SHAPE = (9, 7)
RANKS = 3


def whole(dtype="c16"):
    numbers = np.arange(63).reshape(SHAPE)
    return (numbers * (1 - 0.5j)).astype(dtype) if np.dtype(dtype).kind == "c" else numbers / 7.0


def rows(rank, dtype="c16"):
    """This rank's three rows."""
    return np.array(whole(dtype)[3 * rank : 3 * rank + 3].astype(dtype))


def wanted(rank):
    return scipy.fft.fftn(whole())[3 * rank : 3 * rank + 3]


def blank(rank):
    return np.full((3, 7), -1.0 + 0j)


def freed():
    array = allocate_symmetric_memory((3, 7), np, dtype="c16", skip_symmetric_check=True)
    array[...] = 0
    free_symmetric_memory(array)
    return array


def read_only(rank):
    array = blank(rank)
    array.setflags(write=False)
    return array


def pair(rank, change=0):
    box = Box((3 * rank, 0), (3 * rank + 3, 7 - change))
    return (Box((3 * rank, 0), (3 * rank + 3, 7)), box)


# name: (what is changed on the mistaken ranks, built-in type, words of the message)
MISTAKES = {
    # The four that leave nvmath.distributed waiting for ever when one rank makes them.
    "real operand": (lambda r: {"operand": rows(r, "f8")}, ValueError, "float64"),
    "Slab.Z of a matrix": (lambda r: {"distribution": Slab.Z}, ValueError, "Slab(2)"),
    "invalid option": (lambda r: {"options": {"fft_type": "C2X"}}, ValueError, "'C2X'"),
    "unsupported type": (lambda r: {"operand": rows(r).real.astype("i4")}, ValueError, "int32"),
    # The rest of the table.
    "operand a list": (lambda r: {"operand": [1.0]}, ValueError, "list"),
    "operand None": (lambda r: {"operand": None}, ValueError, "NoneType"),
    "operand of no axes": (lambda r: {"operand": np.array(1j)}, ValueError, "no axes"),
    "operand freed": (lambda r: {"operand": freed()}, RuntimeError, "freed"),
    "distribution a name": (lambda r: {"distribution": "X"}, TypeError, "'X'"),
    "distribution a class": (lambda r: {"distribution": Slab}, TypeError, "Slab"),
    "no pair": (lambda r: {"distribution": [Slab.X]}, ValueError, "pair"),
    "three distributions": (lambda r: {"distribution": [Slab.X] * 3}, ValueError, "pair"),
    "a pair of names": (lambda r: {"distribution": ("X", "Y")}, TypeError, "'X'"),
    "three axes for two": (
        lambda r: {"distribution": Slab(0, 3)},
        ValueError,
        "the operand has ndim 2",
    ),
    "grid of four": (
        lambda r: {"distribution": BlockCyclic(ProcessGrid(shape=(4, 1)), (2, 2))},
        ValueError,
        "(4, 1)",
    ),
    "options a number": (lambda r: {"options": 3}, TypeError, "options"),
    "option unknown": (lambda r: {"options": {"redo": True}}, TypeError, "'redo'"),
    "complex halves in numpy": (
        lambda r: {"options": {"halves": True}},
        ValueError,
        "complex32, which numpy does not have",
    ),
    "option redistribute": (lambda r: {"options": {"redistribute": 2}}, ValueError, "redistribute"),
    "option parity": (
        lambda r: {"options": {"last_axis_parity": "both"}},
        ValueError,
        "last_axis_parity",
    ),
    "option blocking": (lambda r: {"options": {"blocking": False}}, ValueError, "blocking"),
    "option logger": (lambda r: {"options": {"logger": "root"}}, TypeError, "logger"),
    "option of another function": (
        lambda r: {"options": {"fft_type": "R2C"}},
        ValueError,
        "R2C",
    ),
    "in place with out": (
        lambda r: {"options": {"inplace": True}, "out": blank(r)},
        ValueError,
        "out=",
    ),
    "stream a name": (lambda r: {"stream": "default"}, TypeError, "stream"),
    "norm unknown": (lambda r: {"norm": "unit"}, ValueError, "'unit'"),
    "no axes": (lambda r: {"axes": ()}, ValueError, "axes"),
    "axis too large": (lambda r: {"axes": (0, 2)}, ValueError, "axes"),
    "axis too small": (lambda r: {"axes": -3}, ValueError, "axes"),
    "axis twice": (lambda r: {"axes": (0, -2)}, ValueError, "twice"),
    "axes a name": (lambda r: {"axes": "xy"}, ValueError, "'xy'"),
    "out a list": (lambda r: {"out": [0.0]}, ValueError, "list"),
    "out too small": (lambda r: {"out": blank(r)[:-1]}, ValueError, "shape"),
    "out of complex64": (lambda r: {"out": blank(r).astype("c8")}, ValueError, "complex64"),
    "out real": (lambda r: {"out": blank(r).real.copy()}, ValueError, "float64"),
    "out a tensor": (lambda r: {"out": torch.from_numpy(blank(r))}, ValueError, "torch"),
    "out read-only": (lambda r: {"out": read_only(r)}, ValueError, "read-only"),
    "out broadcast": (
        lambda r: {"out": np.lib.stride_tricks.as_strided(blank(r), strides=(0, 16))},
        ValueError,
        "broadcast",
    ),
    "out freed": (lambda r: {"out": freed()}, RuntimeError, "freed"),
}

# Mistakes that only a difference between ranks can be.
DIFFERENCES = {
    "complex64": (lambda r: {"operand": rows(r, "c8")}, ValueError, "complex64"),
    "a tensor": (lambda r: {"operand": torch.from_numpy(rows(r))}, ValueError, "torch"),
    "a row too many": (lambda r: {"operand": np.zeros((5, 7), complex)}, ValueError, "(5, 7)"),
    "another axis": (lambda r: {"operand": np.zeros((3, 7, 1), complex)}, ValueError, "ndim"),
    "another slab": (lambda r: {"distribution": Slab.Y}, ValueError, "Slab(1)"),
    "a pair": (lambda r: {"distribution": pair(r)}, ValueError, "pair"),
    "another norm": (lambda r: {"norm": "ortho"}, ValueError, "norm"),
    "other axes": (lambda r: {"axes": (0,)}, ValueError, "axes"),
    "the axes in another order": (lambda r: {"axes": (1, 0)}, ValueError, "axes"),
    "another parity": (
        lambda r: {"options": {"last_axis_parity": "odd"}},
        ValueError,
        "options.last_axis_parity must be equal",
    ),
    "redistribute": (lambda r: {"options": {"redistribute": False}}, ValueError, "redistribute"),
    "in place": (lambda r: {"options": {"inplace": True}}, ValueError, "inplace"),
}

# Wrong together, or for another function than fft.
TOGETHER = {
    "box that is too small for the result": (
        lambda r: {"distribution": pair(r, 1)},
        ValueError,
        "no rank owns",
    ),
    "empty axis": (
        lambda r: {"operand": np.zeros((3, 0), complex)},
        ValueError,
        "axis 1",
    ),
    "rfft of complex": (lambda r: {"call": rfft}, RuntimeError, "complex128"),
    "irfft of real": (
        lambda r: {"call": irfft, "operand": rows(r, "f8")},
        ValueError,
        "float64",
    ),
    "rfft of one box": (
        lambda r: {"call": rfft, "operand": rows(r, "f8"), "distribution": pair(r)[0]},
        ValueError,
        "pair of boxes",
    ),
    "irfft of length 1": (
        lambda r: {"call": irfft, "operand": np.zeros((3, 1), complex)},
        ValueError,
        "odd",
    ),
    "irfft to boxes of another parity": (
        lambda r: {
            "call": irfft,
            "distribution": (pair(r)[0], Box((3 * r, 0), (3 * r + 3, 13))),
        },
        ValueError,
        "(9, 12)",
    ),
    "no transposed slab": (
        lambda r: {
            "distribution": BlockCyclic(ProcessGrid(shape=(3, 1)), (1, 1)),
            "options": {"redistribute": False},
        },
        ValueError,
        "transposed slab",
    ),
    "rfft in place without room": (
        lambda r: {
            "call": rfft,
            "operand": rows(r, "f4"),
            "options": {"inplace": True},
        },
        RuntimeError,
        "allocate_operand",
    ),
    "another slab in place, strided": (
        lambda r: {
            "operand": whole()[3 * r : 3 * r + 3, ::-1],
            "options": {"inplace": True, "redistribute": False},
        },
        RuntimeError,
        "not contiguous",
    ),
}

EVERY = {**MISTAKES, **DIFFERENCES, **TOGETHER}
TABLE = [(name, who) for name in MISTAKES for who in ("rank 1", "all")]
TABLE += [(name, "rank 1") for name in DIFFERENCES]
TABLE += [(name, "all") for name in TOGETHER]


def call(operand, call=fft, **rest):
    return call(operand, **rest)


def construct(operand, call=fft, out=None, options=None, **rest):
    """The same through the class; mistakes in `out` appear at execute."""
    types = {rfft: "R2C", irfft: "C2R", fft: "C2C"}
    if options is None or (isinstance(options, dict) and "fft_type" not in options):
        options = {**(options or {}), "fft_type": types[call]}
    with FFT(operand, options=options, **rest) as transform:
        transform.plan()
        return transform.execute(out=out)


def plain(x):
    """An ordinary array, whose contents can be compared."""
    return type(x) is np.ndarray and x.flags.owndata and x.size > 0


def mistaken(context, names, who):
    rank = context.rank
    said = {}
    with context:
        for name in names:
            for form in (call, construct):
                given = {"operand": rows(rank), "distribution": Slab.X, "axes": None, "norm": None}
                given |= {"options": None, "stream": None, "out": None}
                if who == "all" or rank == 1:
                    given |= EVERY[name][0](rank)
                kept = [np.array(x) for x in (given["operand"], given["out"]) if plain(x)]
                said[f"{name}, {form.__name__}"] = heard(lambda f=form, g=given: f(**g))
                now = [np.array(x) for x in (given["operand"], given["out"]) if plain(x)]
                assert all(a.tobytes() == b.tobytes() for a, b in zip(kept, now, strict=True)), name
                got = fft(rows(rank), distribution=Slab.X)
                assert np.allclose(got, wanted(rank)), name
    return said


# The message lists all ranks' shapes: which of them is wrong cannot be known.
ALL_SHAPES = {"a row too many"}
# The class finds these where it is made, with no function to contradict: other words.
ONLY_CALL = {
    "real operand",
    "unsupported type",
    "rfft of complex",
    "option of another function",
    "in place with out",
    "in place",
}


@pytest.mark.parametrize("who", ["rank 1", "all"])
def test_a_mistake_is_the_same_error_on_all_ranks(contexts, who):
    names = [name for name, whose in TABLE if whose == who]
    everywhere = contexts.run(mistaken, names, who, ranks=RANKS)

    def expected(case):
        name, _, form = case.rpartition(", ")
        _, kind, words = EVERY[name]
        if form == "construct" and name in ONLY_CALL:
            kind, words = Exception, ""
        return kind, words, "" if who == "all" or name in ALL_SHAPES else "rank 1"

    wrong = misses(everywhere, expected)
    assert not wrong, "\n".join(map(str, wrong))


def test_the_table_is_as_long_as_promised():
    assert len(TABLE) >= 90


# -- the life of an object ------------------------------------------------------------------------

LIFE = {
    "execute before plan": (lambda f, r: f.execute(), "RuntimeError", "plan()"),
    "execute after release": (
        lambda f, r: (f.plan(), f.release_operand(), f.execute()),
        "RuntimeError",
        "released",
    ),
    "execute after free": (lambda f, r: (f.plan(), f.free(), f.execute()), "RuntimeError", "freed"),
    "reset to None": (lambda f, r: f.reset_operand(None), "ValueError", "release_operand"),
    "reset to complex64": (
        lambda f, r: f.reset_operand(rows(r, "c8")),
        "ValueError",
        "complex64",
    ),
    "reset to another shape": (
        lambda f, r: f.reset_operand(np.zeros((4, 7), complex)),
        "ValueError",
        "(",
    ),
    "reset to a tensor": (
        lambda f, r: f.reset_operand(torch.from_numpy(rows(r))),
        "TypeError",
        "torch",
    ),
    "reset to no distribution": (
        lambda f, r: f.reset_operand(rows(r), distribution="X"),
        "TypeError",
        "'X'",
    ),
    "reset with a bad stream": (
        lambda f, r: f.reset_operand(rows(r), stream="s"),
        "TypeError",
        "stream",
    ),
    "direction unknown": (
        lambda f, r: (f.plan(), f.execute(direction="up")),
        "ValueError",
        "'up'",
    ),
    "execute with a bad stream": (
        lambda f, r: (f.plan(), f.execute(stream="s")),
        "TypeError",
        "stream",
    ),
    "execute into the wrong shape": (
        lambda f, r: (f.plan(), f.execute(out=np.zeros((1, 1), complex))),
        "ValueError",
        "(1, 1)",
    ),
    "unchecked reset to None": (
        lambda f, r: (f.plan(), f.reset_operand_unchecked(None), f.execute()),
        "ValueError",
        "None",
    ),
}


def lived(context, name, who):
    rank = context.rank
    with context:
        transform = FFT(rows(rank), distribution=Slab.X)
        if who == "all" or rank == 1:
            said = heard(lambda: LIFE[name][0](transform, rank))
        elif name == "execute before plan":
            said = heard(transform.execute)
        elif name.startswith("reset"):
            said = heard(lambda: transform.reset_operand(rows(rank)))
        else:
            said = heard(lambda: (transform.plan(), transform.execute()))
        transform.free()
        transform.free()
        assert np.allclose(fft(rows(rank), distribution=Slab.X), wanted(rank))
    return said


@pytest.mark.parametrize("who", ["rank 1", "all"])
@pytest.mark.parametrize("name", LIFE)
def test_a_mistake_in_the_life_of_an_object(contexts, name, who):
    said = contexts.run(lived, name, who, ranks=RANKS)
    _, kind, words = LIFE[name]
    assert all(each == said[0] for each in said)
    assert said[0][0] == kind
    assert words in said[0][1]
    assert who == "all" or "rank" in said[0][1]


def direction_differs(context):
    with context, FFT(rows(context.rank), distribution=Slab.X) as transform:
        transform.plan()
        way = FFTDirection.INVERSE if context.rank == 1 else FFTDirection.FORWARD
        return heard(lambda: transform.execute(direction=way))


def test_a_direction_that_differs_between_ranks(contexts):
    said = contexts.run(direction_differs, ranks=RANKS)
    assert said == [said[0]] * RANKS
    assert said[0][0] == "ValueError"
    assert "direction" in said[0][1]


def wrong_direction(context):
    with context, FFT(rows(context.rank, "f8"), distribution=Slab.X) as transform:
        transform.plan()
        return heard(lambda: transform.execute(direction="inverse"))


def test_a_real_transform_has_one_direction(contexts):
    said = contexts.run(wrong_direction, ranks=RANKS)
    assert said == [said[0]] * RANKS
    assert said[0][0] == "ValueError"


def there_and_back(context):
    """One object, two directions, other operands, memories and distributions."""
    rank = context.rank
    options = FFTOptions(redistribute=False)
    with context, FFT(rows(rank), distribution=Slab.X, options=options, norm="ortho") as transform:
        transform.plan()
        transform.plan()
        made = transform.execute()
        columns = (slice(0, 3), slice(3, 5), slice(5, 7))[rank]
        want = scipy.fft.fftn(whole(), norm="ortho")[:, columns]
        assert np.allclose(made, want)
        assert transform.output_layout.local_shape(rank) == made.shape
        transform.reset_operand(made, distribution=Slab.Y)
        for out in (None, np.zeros((3, 7), complex, order="F")):
            back = transform.execute(direction="inverse", out=out, release_workspace=True)
            assert np.allclose(back, rows(rank))
        transform.release_operand()
        operand = allocate_symmetric_memory((3, 7), np, dtype="c16")
        operand[...] = 2 * rows(rank)
        transform.reset_operand_unchecked(operand, distribution=Slab.X)
        assert np.allclose(transform.execute(direction=-1), 2 * want)
        operand[...] = rows(rank)
        assert np.allclose(transform.execute(direction=FFTDirection.FORWARD), want)
        assert "transform" in transform.explain()
    with context, FFT(rows(rank), distribution=Slab.X, options={"reshape": False}) as transform:
        transform.plan()
        assert transform.execute().shape == want.shape
    return options == FFTOptions(redistribute=False)


def test_one_object_serves_many_operands(contexts):
    assert contexts.run(there_and_back, ranks=RANKS) == [True] * RANKS


def in_place(context):
    rank, found = context.rank, []
    real = whole("f8")
    with context:
        for kind, dtype, function, full in (
            ("R2C", "f8", rfft, scipy.fft.rfftn(real)),
            ("R2C", "f4", rfft, scipy.fft.rfftn(real)),
            ("C2C", "c16", fft, scipy.fft.fftn(whole())),
            ("C2R", "c16", irfft, scipy.fft.irfftn(whole(), s=(9, 12), norm="forward")),
        ):
            for redistribute in (True, False):
                x = allocate_operand(
                    (3, 7), np, input_dtype=dtype, distribution=Slab.X, fft_type=kind
                )
                x[...] = whole(dtype)[3 * rank : 3 * rank + 3]
                options = {"inplace": True, "redistribute": redistribute}
                y = function(x, distribution=Slab.X, options=options)
                slab = Slab.X if redistribute else Slab.Y
                (rl, rh), (cl, ch) = (r[0] for r in slab.index_ranges(rank, full.shape, size=3))
                tolerance = 1e-3 if dtype == "f4" else 1e-9
                assert np.allclose(y, full[rl:rh, cl:ch], atol=tolerance)
                found.append(bool(np.shares_memory(x, y)))
                found.append(y is x or kind != "C2C" or not redistribute)
        tensor = allocate_operand(
            (3, 7), torch, input_dtype=torch.complex128, distribution=Slab.X, memory_space="cpu"
        )
        tensor[...] = torch.from_numpy(rows(rank))
        found.append(fft(tensor, distribution=Slab.X, options={"inplace": True}) is tensor)
        assert np.allclose(tensor.numpy(), wanted(rank))
        mine = rows(rank)
        found.append(fft(mine, distribution=Slab.X, out=mine) is mine)
        assert np.allclose(mine, wanted(rank))
        twice = np.zeros((4, 7), complex)  # out overlaps the operand, one row further
        twice[:3] = rows(rank)
        assert np.allclose(fft(twice[:3], distribution=Slab.X, out=twice[1:]), wanted(rank))
        moved = np.zeros((4, 7), complex)
        moved[:3] = rows(rank)
        batch = fft(moved[:3], distribution=Slab.X, axes=1, out=moved[1:])
        assert np.allclose(batch, scipy.fft.fft(rows(rank), axis=1))
    return all(found)


def test_in_place(contexts):
    assert contexts.run(in_place, ranks=RANKS) == [True] * RANKS


def overlapping(context):
    """Results that are written where the operand is still to be read, in many small blocks."""
    rank = context.rank
    full = np.arange(12 * 16).reshape(12, 16) * (1 + 2j)
    mine = slice(6 * rank, 6 * rank + 6)
    boxes = [Box((0, 0), (6, 16)), Box((6, 0), (12, 16))]
    swapped = (boxes[rank], boxes[1 - rank])
    want = scipy.fft.fft(full, axis=1)
    small = patch.object(passes, "BLOCK_BYTES", 64)
    with context, small, patch.object(context, "caches", {}):
        room = np.zeros((7, 16), complex)
        room[:6] = full[mine]
        fft(room[:6], distribution=Slab.X, axes=1, out=room[1:])  # a row further, no exchange
        assert np.allclose(room[1:], want[mine])
        for where in ("heap", "ordinary"):
            x = np.zeros((6, 16), complex)
            if where == "heap":
                x = allocate_symmetric_memory((6, 16), np, dtype="c16")
            x[...] = full[mine]
            fft(x, distribution=swapped, axes=1, out=x)  # pulled and written in one pass
            assert np.allclose(x, want[6 * (1 - rank) :][:6])


def test_results_that_overlap_the_operand(contexts):
    contexts.run(overlapping, ranks=2)


ALLOCATIONS = {
    "another package": ({"package": logging}, "ValueError", "logging"),
    "memory on a device": ({"memory_space": "cuda"}, "ValueError", "'cuda'"),
    "memory unknown": ({"memory_space": "disk"}, "ValueError", "'disk'"),
    "dtype against type": ({"input_dtype": "f4", "fft_type": "C2C"}, "ValueError", "C2C"),
    "dtype of integers": ({"input_dtype": "i4"}, "ValueError", "int32"),
    "shape": ({"shape": (4, 7)}, "ValueError", "(4, 7)"),
    "distribution": ({"distribution": None}, "TypeError", "None"),
}


def allocated(context, name):
    changes = ALLOCATIONS[name][0] if context.rank == 1 else {}
    given = {"shape": (3, 7), "package": np, "distribution": Slab.X, **changes}
    with context:
        return heard(lambda: allocate_operand(given.pop("shape"), given.pop("package"), **given))


@pytest.mark.parametrize("name", ALLOCATIONS)
def test_a_mistake_in_allocating_an_operand(contexts, name):
    said = contexts.run(allocated, name, ranks=RANKS)
    _, kind, words = ALLOCATIONS[name]
    assert said == [said[0]] * RANKS
    assert said[0][0] == kind
    assert words in said[0][1]
    assert "rank" in said[0][1]


def exhausted(context):
    rank = context.rank
    with context:
        columns = Slab.Y.slices(rank, SHAPE, size=RANKS)
        wanted = scipy.fft.fftn(whole())[columns]
        out = np.full(wanted.shape, -1.0 + 0j)
        FFT(rows(rank), distribution=Slab.X).free()
        context.barrier()
        with FFT(rows(rank), distribution=(Slab.X, Slab.Y)) as transform:
            transform.plan()
            transform.execute(release_workspace=True)
            with no_memory(context):
                said = heard(lambda: transform.execute(out=out))
            assert (out == -1).all()
            assert np.allclose(transform.execute(out=out), wanted)
    return said


def test_want_of_memory_on_one_rank_is_an_error_on_all(contexts):
    said = contexts.run(exhausted, ranks=RANKS)
    assert said == [("MemoryError", "rank 1: no memory today")] * RANKS


def after_the_end(context):
    split = context.split(0)
    with split:
        transform = FFT(rows(context.rank)[:0], distribution=Slab.X, axes=1)
        transform.free()
    split.close()
    try:
        transform.execute()
    except ShardmathError as error:
        return type(error).__name__
    return "nothing"


def test_a_freed_object_says_so_after_its_context_has_ended(contexts):
    assert contexts.run(after_the_end, ranks=2) == ["InvalidFFTState"] * 2


def told(context):
    with context, listening() as (logger, lines):
        options = {"logger": logger}
        ifft(rows(context.rank), distribution=Slab.X, options=options)
    return lines if options == {"logger": logger} else []


def test_the_logger_is_told_what_is_planned(contexts):
    for lines in contexts.run(told, ranks=RANKS):
        assert len(lines) == 1
        assert "exchange" in lines[0]


def test_without_a_context_the_error_says_what_to_call():
    with pytest.raises(RuntimeError, match="initialize"):
        fft(np.zeros(3, complex), distribution=Slab.X)
