"""Operands from `allocate_operand`: every kind of transform takes their memory for its result."""

from __future__ import annotations

import importlib
import itertools

import fft_cases
import numpy as np
import pytest

import shardmath.fft
from arrangements import part_of
from shardmath.arrays import library_named
from shardmath.arrays.dtypes import to_numpy
from shardmath.geometry import BlockCyclic, Box, ProcessGrid, Slab

FUNCTIONS = {"C2C": "fft", "R2C": "rfft", "C2R": "irfft"}
KINDS = [
    *(("C2C", dtype, "even") for dtype in ("complex64", "complex128", "complex32")),
    *(("R2C", dtype, "even") for dtype in ("float32", "float64", "float16", "bfloat16")),
    ("R2C", "float16 halves", "even"),
    *(("C2R", dtype, "even") for dtype in ("complex64", "complex128", "complex32")),
    *(("C2R", dtype, "odd") for dtype in ("complex64", "complex128", "complex32")),
]
SHAPES = [(9, 7), (8, 5), (7, 6, 5), (2, 4), (7, 1)]  # of some of them some ranks have nothing
HOWS = ["X", "Y", "X to Y", "Y to X", "boxes", "cyclic", "cyclic to X"]


def table(library_name):
    """Transforms as `fft_cases` describes them, and how they are split: all kinds in all ways, and
    over all kinds every shape in every way.
    """
    offers = library_named(library_name).offers
    kinds = itertools.product(KINDS, HOWS)
    for ((kind, dtype, parity), how), shape in zip(kinds, itertools.cycle(SHAPES)):
        case = {"kind": kind, "dtype": dtype, "shape": shape, "axes": None, "norm": None}
        case["parity"] = parity
        none = kind == "C2R" and parity == "even" and shape[-1] == 1  # of length 0
        types = (dtype, fft_cases.result_dtype(case))
        if not none and ("complex32" not in types or offers("complex32")):
            yield case, how


def split(how, shape, result, rank, size):
    """(distribution of operand, of result, what is passed, option redistribute)."""
    slabs = {"X": Slab.X, "Y": Slab.Y}
    cyclic = BlockCyclic(ProcessGrid(shape=(size, *[1] * (len(shape) - 1))), [2] * len(shape))
    if how == "boxes":
        pair = box(shape, 0, rank, size), box(result, 1, rank, size)
        return *pair, pair, True
    if how == "cyclic to X":
        return cyclic, Slab.X, (cyclic, Slab.X), True
    if how == "cyclic":
        return cyclic, cyclic, cyclic, True
    return slabs[how[0]], slabs[how[-1]], slabs[how[0]], len(how) == 1


def box(shape, axis, rank, size):
    """This rank's part of an array that is split along `axis`, unevenly."""
    lower, upper = [0] * len(shape), list(shape)
    lower[axis], upper[axis] = (shape[axis] * r // size for r in (rank, rank + 1))
    return Box(lower, upper)


def check_operands(context, library_name, memory_space, space):
    """What is wrong with operands that are asked for in `memory_space` and should lie in `space`.

    Each is transformed in place, and back in place if it was real.
    """
    wrong = []
    with context:
        for case, how in table(library_name):
            found = check_operand(context, case, how, (library_name, memory_space, space))
            wrong += [f"{case} {how}: {each}" for each in found]
    return wrong


def check_operand(context, case, how, where):
    library_name, memory_space, space = where
    library, rank, size = library_named(library_name), context.rank, context.size
    array = fft_cases.operand_of(case)
    full = fft_cases.wanted(case, array)
    source, target, given, redistribute = split(how, array.shape, full.shape, rank, size)
    part, want = part_of(array, source, rank, size), part_of(full, target, rank, size)
    x = shardmath.fft.allocate_operand(
        part.shape,
        importlib.import_module(library_name),
        input_dtype=part.dtype if library_name != "torch" else library.empty((), part.dtype).dtype,
        distribution=given,
        memory_space=memory_space,
        fft_type=case["kind"],
    )
    spec = library.spec(x)
    if (spec.shape, spec.space, to_numpy(spec.dtype)) != (part.shape, space, part.dtype):
        yield f"allocated {spec}"
    fft_cases.fill(x, part)
    options = {**fft_cases.options_of(case), "inplace": True, "redistribute": redistribute}
    y = getattr(shardmath.fft, FUNCTIONS[case["kind"]])(x, distribution=given, options=options)
    got = fft_cases.to_host(y)
    if (got.shape, got.dtype) != (want.shape, to_numpy(fft_cases.result_dtype(case))):
        yield f"the result has {got.dtype} {got.shape}, not {want.shape}"
    elif not fft_cases.close(got, want, full.size):
        yield f"relative error {np.abs(fft_cases.wide(got) - want).max() / np.abs(full).max()}"
    if spec.size and got.size and library.pointer(y) != library.pointer(x):
        yield "the result lies elsewhere"
    if case["dtype"] not in ("float32", "float64"):
        return
    last = "odd" if array.shape[-1] % 2 else "even"
    options = {"inplace": True, "redistribute": redistribute, "last_axis_parity": last}
    given = (target, source) if isinstance(given, tuple) else target
    z = shardmath.fft.irfft(y, distribution=given, options=options)
    back = fft_cases.to_host(z)
    if (back.shape, back.dtype) != (part.shape, part.dtype):
        yield f"what comes back has {back.dtype} {back.shape}, not {part.dtype} {part.shape}"
    elif not fft_cases.close(back / array.size, part, array.size):
        yield "what comes back is not what was there"
    if spec.size and library.pointer(z) != library.pointer(x):
        yield "what comes back lies elsewhere"


@pytest.mark.parametrize(("library", "memory_space"), [("numpy", None), ("torch", "cpu")])
@pytest.mark.parametrize("size", [1, 3])
def test_operands_have_room_for_the_result(contexts, size, library, memory_space):
    args = (library, memory_space, "cpu")
    assert contexts.run(check_operands, *args, ranks=size) == [[]] * size


def check_lives(context, library_name, memory_space):
    """Whether an operand's memory is its own: alive with any view, and unknown afterwards."""
    package = importlib.import_module(library_name)
    wrong = []
    with context:
        for _ in range(3):
            shape, rows = (3, 7), 3 * context.size
            x = shardmath.fft.allocate_operand(
                shape,
                package,
                input_dtype=package.float32,
                distribution=Slab.X,
                memory_space=memory_space,
                fft_type="R2C",
            )
            part = np.arange(rows * 7, dtype=np.float32).reshape(rows, 7)
            part = part_of(part, Slab.X, context.rank, context.size)
            fft_cases.fill(x, part)
            later = x[1:]
            try:
                shardmath.fft.rfft(later, distribution=Slab.X, options={"inplace": True})
                wrong.append("a part of an operand has been extended")
            except RuntimeError:
                pass
            y = shardmath.fft.rfft(x, distribution=Slab.X, options={"inplace": True})
            del x, later
            first = fft_cases.to_host(y)
            others = [np.full(shape, 7, np.float32) for _ in range(50)]
            if not (fft_cases.to_host(y) == first).all() or not all((o == 7).all() for o in others):
                wrong.append("the memory of a result went with its operand")
    return wrong


@pytest.mark.parametrize(("library", "memory_space"), [("numpy", "cpu"), ("torch", None)])
def test_the_memory_of_an_operand_is_its_own(contexts, library, memory_space):
    assert contexts.run(check_lives, library, memory_space, ranks=3) == [[]] * 3


def check_orders(context, library_name, device, shape):
    """Transforms of operands in one order into results in another, or in place: what is wrong."""
    library, wrong = library_named(library_name), []
    rank, size = context.rank, context.size
    case = {"kind": "C2C", "dtype": "complex64", "shape": shape, "axes": None, "norm": None}
    array = fft_cases.operand_of(case)
    full = fft_cases.wanted(case, array)
    part = part_of(array, Slab.X, rank, size)
    with context:
        for target, order, into in itertools.product((Slab.X, Slab.Y), "CF", ("C", "F", "operand")):
            want = part_of(full, target, rank, size)
            operand = library.empty(part.shape, part.dtype, order, device)
            fft_cases.fill(operand, part)
            named = {"options": {"inplace": True}}
            if into != "operand":
                named = {"out": library.empty(want.shape, part.dtype, into, device)}
            got = shardmath.fft.fft(operand, distribution=(Slab.X, target), **named)
            if not fft_cases.close(fft_cases.to_host(got), want, full.size):
                wrong.append(f"{order} to {target} into {into}")
            elif into == "operand" and order == "F" and library.spec(got).order == "C":
                wrong.append(f"{order} to {target} in place is in order C")
    return wrong


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_orders_of_operand_and_result(contexts, size, library):
    args = (library, "cpu", (6, 12, 5))
    assert contexts.run(check_orders, *args, ranks=size) == [[]] * size


# (package, fft_type, the type of an operand for which none is given)
DEFAULTS = [
    *(("numpy", None, "float64"), ("numpy", "R2C", "float64"), ("numpy", "C2C", "complex64")),
    *(("torch", None, "float32"), ("torch", "R2C", "float32"), ("torch", "C2R", "complex64")),
]


def check_defaults(context):
    """The types that operands get where none is asked for."""
    found = []
    with context:
        for name, kind, _ in DEFAULTS:
            package = importlib.import_module(name)
            x = shardmath.fft.allocate_operand((2, 6), package, distribution=Slab.X, fft_type=kind)
            found.append(library_named(name).spec(x).dtype)
    return found


def test_types_of_operands_for_which_none_is_given(contexts):
    expected = [dtype for *_, dtype in DEFAULTS]
    assert contexts.run(check_defaults, ranks=2) == [expected] * 2
