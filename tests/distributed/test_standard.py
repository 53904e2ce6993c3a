"""The functions of the array API standard on arrays split at random, against NumPy on the whole."""

from __future__ import annotations

import math
import operator
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from split_arrays import agree, drawn_cases, elements, placed, shapes, splits

import shardmath
from draws import drawn
from shardmath import distributed
from shardmath.collectives import all_reduce
from shardmath.distributed import protocols, standard
from shardmath.distribution import BlockCyclic, ProcessGrid, Replicated, Slab

DTYPES = ("bool", "int8", "int64", "uint8", "float32", "float64", "complex128")
LIBRARIES = ("numpy", "numpy", "numpy", "torch")


def axis_of(draw, shape):
    return draw(st.integers(-len(shape), len(shape) - 1))


def factored(draw, count):
    """Some shape of so many elements."""
    shape = []
    for prime in (5, 3, 2, 2, 2, 2, 2, 2):
        if count and count % prime == 0:
            count //= prime
            shape.append(prime)
    shape = draw(st.permutations([*shape, count, *([1] * draw(st.integers(0, 1)))]))
    while len(shape) > 1 and draw(st.integers(0, 2)):
        place = draw(st.integers(0, len(shape) - 2))
        shape[place : place + 2] = [shape[place] * shape[place + 1]]
    return tuple(shape)


def alike(draw, shape, axis):
    """The shapes of a few arrays that differ along an axis."""
    count = draw(st.integers(0, 2))
    extents = [draw(st.integers(0, 5)) for _ in range(count)]
    return [(*shape[:axis], n, *shape[axis + 1 :]) for n in extents]


def joined(draw, shape):
    axis = axis_of(draw, shape) % len(shape)
    return alike(draw, shape, axis), [], {"axis": axis - draw(st.integers(0, 1)) * len(shape)}


def rolled(draw, shape):
    if draw(st.booleans()):
        return [], [draw(st.integers(-9, 9))], {}
    axes = draw(st.lists(st.integers(-len(shape), len(shape) - 1), min_size=1, max_size=2))
    return [], [tuple(draw(st.integers(-9, 9)) for _ in axes)], {"axis": tuple(axes)}


def taken(draw, shape):
    axis = axis_of(draw, shape)
    n = shape[axis]
    numbers = draw(st.lists(st.integers(-n, n - 1), max_size=9)) if n else []
    return [], [np.array(numbers, np.int64).tobytes()], {"axis": axis}


def repeated(draw, shape):
    axis = draw(st.none() | st.integers(-len(shape), len(shape) - 1))
    n = math.prod(shape) if axis is None else shape[axis]
    if draw(st.booleans()):
        return [], [draw(st.integers(0, 3))], {"axis": axis}
    times = [draw(st.integers(0, 2)) for _ in range(n)]
    return [], [np.array(times, np.int64).tobytes()], {"axis": axis}


def cumulated(draw, shape):
    words = {"axis": axis_of(draw, shape), "include_initial": draw(st.booleans())}
    return [], [], words | ({"dtype": "float64"} if draw(st.booleans()) else {})


def moved(draw, shape):
    count = draw(st.integers(0, len(shape)))
    axes = [draw(st.permutations(range(-len(shape), 0)))[:count] for _ in range(2)]
    return [], axes, {}


def widened(draw, shape):
    target = [*([draw(st.integers(0, 3))] * draw(st.integers(0, 2)))]
    return [], [(*target, *(draw(st.integers(0, 4)) if n == 1 else n for n in shape))], {}


def contracted(draw, shape):
    """Another array of which some axes are as the last of this."""
    count = draw(st.integers(0, len(shape)))
    other = (*shape[len(shape) - count :], draw(st.integers(0, 4)))
    if draw(st.booleans()):
        return [other], [], {"axes": count}
    axes = draw(st.permutations(range(len(shape))))[:count]
    return [(*(shape[axis] for axis in axes), 3)], [], {"axes": (axes, list(range(count)))}


def multiplied(draw, shape):
    """A matrix, a vector or a stack for a stack of matrices."""
    other = (shape[-1], draw(st.integers(0, 3)))
    if draw(st.booleans()):
        return [other if draw(st.booleans()) else other[:1]], [], {}
    stack = tuple(1 if draw(st.booleans()) else n for n in shape[:-2])
    return [(*stack[draw(st.integers(0, len(stack))) :], *other)], [], {}


def differed(draw, shape):
    words = {"axis": axis_of(draw, shape), "n": draw(st.integers(0, 2))}
    ends = {end: 3 for end in ("prepend", "append") if draw(st.integers(0, 2)) == 0}
    return [], [], words | ends


def shifted(draw, shape):
    return [], [], {"axes": draw(st.none() | st.just(tuple({axis_of(draw, shape) % len(shape)})))}


def plainly(argument=None):
    """One argument, or none beside the array."""
    return lambda draw, shape: ([], [argument(draw, shape)] if argument else [], {})


def with_axis(draw, shape):
    return [], [], {"axis": axis_of(draw, shape)}


def with_axis_or_none(draw, shape):
    return [], [], {"axis": draw(st.none() | st.just(axis_of(draw, shape)))}


def sided(draw, shape):
    return [draw(shapes(0, 2))], [], {"side": draw(st.sampled_from(["left", "right"]))}


def squeezed(draw, shape):
    axes = [axis for axis, extent in enumerate(shape) if extent == 1]
    return [], [], {"axis": tuple(draw(st.sets(st.sampled_from(axes))) if axes else ())}


def stacked(draw, shape):
    return [shape] * draw(st.integers(0, 2)), [], {"axis": axis_of(draw, (*shape, 1))}


def tiled(draw, shape):
    return [], [tuple(draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)))], {}


def sizes(draw, shape):
    """Extents that an array is padded or cut to, and the axis."""
    n = draw(st.none() | st.integers(2, 9))
    return (
        [],
        [],
        {"n": n, "axis": axis_of(draw, shape), "norm": draw(st.sampled_from([None, "ortho"]))},
    )


CASES = {
    "argsort": with_axis,
    "astype": plainly(lambda draw, _: draw(st.sampled_from(["float32", "complex128"]))),
    "broadcast_arrays": lambda draw, shape: ([shape[draw(st.integers(0, len(shape))) :]], [], {}),
    "broadcast_to": widened,
    "clip": lambda draw, shape: ([], [draw(st.sampled_from([None, -1])), 1], {}),
    "concat": joined,
    "count_nonzero": with_axis,
    "cumulative_prod": cumulated,
    "cumulative_sum": cumulated,
    "diff": differed,
    "expand_dims": lambda draw, shape: ([], [], {"axis": axis_of(draw, (*shape, 1))}),
    "fft.fft": sizes,
    "fft.fftshift": shifted,
    "fft.hfft": sizes,
    "fft.ifft": sizes,
    "fft.ifftshift": shifted,
    "fft.ihfft": sizes,
    "fft.irfft": sizes,
    "fft.rfft": sizes,
    "flip": with_axis_or_none,
    "matmul": multiplied,
    "matrix_transpose": plainly(),
    "meshgrid": lambda draw, shape: ([(3,), (2,)][draw(st.integers(0, 2)) :], [], {}),
    "moveaxis": moved,
    "nonzero": plainly(),
    "permute_dims": plainly(lambda draw, shape: draw(st.permutations(range(len(shape))))),
    "repeat": repeated,
    "reshape": plainly(lambda draw, shape: factored(draw, math.prod(shape))),
    "roll": rolled,
    "round": plainly(),
    "searchsorted": sided,
    "sort": with_axis_or_none,
    "squeeze": squeezed,
    "stack": stacked,
    "take": taken,
    "take_along_axis": lambda draw, shape: ([], [], {"axis": axis_of(draw, shape)}),
    "tensordot": contracted,
    "tile": tiled,
    "tril": plainly(lambda draw, _: draw(st.integers(-3, 3))),
    "triu": plainly(lambda draw, _: draw(st.integers(-3, 3))),
    "unique_all": plainly(),
    "unique_counts": plainly(),
    "unique_inverse": plainly(),
    "unique_values": plainly(),
    "unstack": lambda draw, shape: ([], [], {"axis": axis_of(draw, shape)}),
}  # fmt: skip
OF_ANY_AXES = ("reshape", "broadcast_to", "expand_dims", "stack")
LISTED = ("concat", "stack")
LINES = ("searchsorted", "meshgrid")
MATRICES = ("matrix_transpose", "tril", "triu", "matmul")
FLOATING = ("tensordot", "matmul", "fft.fft", "fft.rfft", "fft.hfft", "fft.irfft", "fft.ihfft")
REAL = ("clip", "round", "sort", "argsort", "searchsorted", "fft.rfft", "fft.ihfft",
        "unique_all", "unique_inverse", "unique_counts", "unique_values")  # fmt: skip
CLOSE = ("fft.", "cumulative", "tensordot", "matmul")


@st.composite
def calls(draw, size):
    """A function, a library, arrays (shape, dtype, split), arguments."""
    name = draw(st.sampled_from(sorted(CASES)))
    least = 2 if name in MATRICES else 0 if name in OF_ANY_AXES else 1
    shape = draw(shapes(least, 1 if name in LINES else 3))
    if name.startswith("fft.") and "shift" not in name:
        shape = tuple(max(n, 2) for n in shape)
    dtypes = [t for t in DTYPES if t[0] == "f"] if name in FLOATING else DTYPES
    if name in REAL:
        dtypes = [t for t in dtypes if t[0] != "c"]
    library = draw(st.sampled_from(LIBRARIES))
    more, args, words = CASES[name](draw, shape)
    dtype = draw(st.sampled_from([t for t in dtypes if t != "bool" or library == "numpy"]))
    is_alike = library == "torch" or name in (*FLOATING, "searchsorted")
    arrays = [(shape, dtype, draw(splits(shape, size)))]
    for other in more:
        other_type = dtype if is_alike else draw(st.sampled_from(dtypes))
        arrays.append((other, other_type, draw(splits(other, size))))
    return name, library, arrays, args, words


def function_of(namespace, name):
    for part in name.split("."):
        namespace = getattr(namespace, part)
    return namespace


def expected_of(name, arrays, args, words):
    """What NumPy makes of it; of what its functions lack, as it is defined."""
    if name == "argsort":
        words = words | {"stable": True}
    if name == "count_nonzero":
        return np.asarray(np.count_nonzero(*arrays, **words))
    if name == "unique_values":
        return np.sort(np.unique_values(*arrays))
    return function_of(np, name)(*([arrays] if name in LISTED else arrays), *args, **words)


def compare(context, name, library, given_, args, words):
    """A call of the function, with arrays and with what NumPy has of them."""
    whole = [elements(shape, dtype, seed) for seed, (shape, dtype, _) in enumerate(given_)]
    splits_ = [split for _, _, split in given_]
    args = [np.frombuffer(a, np.int64) if isinstance(a, bytes) else a for a in args]
    if name == "searchsorted":
        whole[0].sort()
    if name == "take_along_axis":
        extent = whole[0].shape[words["axis"]]
        order = np.argsort(whole[0], axis=words["axis"], stable=True)
        whole.append(order - extent * (extent > 2))
        splits_.append(splits_[0])
    arrays = [placed(context, *one, library) for one in zip(whole, splits_, strict=True)]
    namespace = arrays[0].__array_namespace__("2024.12")
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        expected = expected_of(name, whole, args, words)
        function = function_of(namespace, name)
        got = function(*([arrays] if name in LISTED else arrays), *args, **words)
    several = isinstance(expected, tuple | list)
    for one, other in zip(got, expected, strict=True) if several else [(got, expected)]:
        agree(one, other, close=name.startswith(CLOSE), strict=library == "numpy")


def body(context, cases):
    for case in cases:
        try:
            compare(context, *case)
        except Exception as error:
            error.add_note(str(case))
            raise


test_functions_of_the_standard = drawn_cases(body, calls, 12, most=60)


TYPE = st.sampled_from(sorted(standard.TYPES))


@drawn(100)
@given(names=st.lists(TYPE, min_size=2, max_size=3), number=st.sampled_from([True, 1, 1.5, 1j]))
def test_functions_of_types(names, number):
    types = [np.dtype(name) for name in names]
    assert distributed.result_type(*types, number) == np.result_type(*types, number)
    assert distributed.can_cast(*types[:2]) == np.can_cast(*types[:2])
    for kind in ("bool", "integral", "unsigned integer", "numeric", ("bool", "real floating")):
        assert distributed.isdtype(types[0], kind) == np.isdtype(types[0], kind)
    assert distributed.isdtype(types[0], types[1]) == (types[0] == types[1])
    limits = "finfo" if types[0].kind in "fc" else "iinfo"
    if types[0].kind != "b":
        ours, numpys = (getattr(space, limits)(types[0]) for space in (distributed, np))
        assert (ours.bits, ours.max, ours.min) == (numpys.bits, numpys.max, numpys.min)


STANDARD = """
e inf nan newaxis pi bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float32 float64
complex64 complex128 __array_namespace_info__ __array_api_version__
arange asarray empty empty_like eye from_dlpack full full_like linspace meshgrid ones ones_like tril
triu zeros zeros_like astype broadcast_arrays broadcast_to can_cast finfo iinfo isdtype result_type
abs acos acosh add asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_invert
bitwise_or bitwise_right_shift bitwise_xor ceil clip conj copysign cos cosh divide equal exp expm1
floor floor_divide greater greater_equal hypot imag isfinite isinf isnan less less_equal log log1p
log2 log10 logaddexp logical_and logical_not logical_or logical_xor maximum minimum multiply
negative nextafter not_equal positive pow real reciprocal remainder round sign signbit sin sinh
square sqrt subtract tan tanh trunc matmul matrix_transpose tensordot vecdot concat expand_dims flip
moveaxis permute_dims repeat reshape roll squeeze stack tile unstack argmax argmin count_nonzero
nonzero searchsorted where unique_all unique_counts unique_inverse unique_values argsort sort
cumulative_prod cumulative_sum max mean min prod std sum var take take_along_axis all any diff
fft.fft fft.ifft fft.fftn fft.ifftn fft.rfft fft.irfft fft.rfftn fft.irfftn fft.hfft fft.ihfft
fft.fftfreq fft.rfftfreq fft.fftshift fft.ifftshift
linalg.cholesky linalg.cross linalg.det linalg.diagonal linalg.eigh linalg.eigvalsh linalg.inv
linalg.matmul linalg.matrix_norm linalg.matrix_power linalg.matrix_rank linalg.matrix_transpose
linalg.outer linalg.pinv linalg.qr linalg.slogdet linalg.solve linalg.svd linalg.svdvals
linalg.tensordot linalg.trace linalg.vecdot linalg.vector_norm
"""
OF_ARRAYS = """
dtype device mT ndim shape size T __abs__ __add__ __and__ __array_namespace__ __bool__ __complex__
__dlpack__ __dlpack_device__ __eq__ __float__ __floordiv__ __ge__ __getitem__ __gt__ __index__
__int__ __invert__ __le__ __lshift__ __lt__ __matmul__ __mod__ __mul__ __ne__ __neg__ __or__ __pos__
__pow__ __rshift__ __setitem__ __sub__ __truediv__ __xor__ to_device
"""
REFLECTED = "add sub mul truediv floordiv pow mod and or xor lshift rshift"
ARRAYS_PAGE = Path(__file__).parents[2] / "docs" / "arrays.md"


def test_the_namespace_is_complete():
    for name in STANDARD.split():
        function_of(distributed, name)
    assert {*CASES} <= {*STANDARD.split()}
    operators = [f"__{how}{name}__" for name in REFLECTED.split() for how in ("r", "i")]
    for name in (*OF_ARRAYS.split(), *operators):
        assert hasattr(distributed.DistributedArray, name), name
    with pytest.raises(AttributeError, match="no attribute 'einsum'"):
        distributed.einsum  # noqa: B018


def test_the_page_lists_what_the_standard_asks():
    """Its table names in the second column what is there: all, but for what the third says."""
    rows = [line.split(" | ") for line in ARRAYS_PAGE.read_text().splitlines()
            if line.startswith("| ")]  # fmt: skip
    start = next(n for n, row in enumerate(rows) if row[0] == "| of the standard")
    named = [name for row in rows[start + 2 :] for name in re.findall("`([^`]+)`", row[1])]
    assert len(named) == len({*named})
    not_there = {"__dlpack__", "__dlpack_device__"}
    assert {*named} == {*STANDARD.split(), *OF_ARRAYS.split()} - not_there


def test_the_page_lists_functions_of_numpy_that_there_are():
    text = ARRAYS_PAGE.read_text()
    beyond = text[text.index("Beyond the standard there are") : text.index("and of scipy.fft")]
    for name in re.findall("`([a-z_.0-9]+)`", beyond):
        spaces = (np, np.linalg, np.fft)
        found = [function_of(space, name) for space in spaces if hasattr(space, name.split(".")[0])]
        assert any(protocols.ours(one) for one in found), name
    assert all(
        protocols.ours(getattr(np, name)) for name in ("median", "histogram", "pad", "einsum")
    )
    assert not protocols.ours(np.partition)


def plain(context):
    """What is asked of types, of devices, and of arrays by the standard's names."""
    with context:
        x = shardmath.ones((4, 6), distribution=Slab.X)
        xp = x.__array_namespace__()
        assert xp is distributed and xp.__array_api_version__ == "2024.12"
        with pytest.raises(ValueError, match=r"2024\.12"):
            x.__array_namespace__("2025.12")
        info = xp.__array_namespace_info__()
        assert info.default_device() == x.device == "cpu" and info.devices() == ["cpu"]
        assert info.default_dtypes()["real floating"] == x.dtype
        assert set(info.dtypes(kind="unsigned integer")) == {"uint8", "uint16", "uint32", "uint64"}
        assert info.capabilities()["boolean indexing"]
        assert xp.result_type(x, xp.float32, 1) == np.float64 and xp.can_cast(xp.int8, x)
        assert xp.isdtype(x.dtype, ("bool", "real floating")) and not xp.isdtype(x.dtype, xp.int8)
        assert xp.finfo(x).bits == 64 and xp.iinfo(xp.int8).max == 127
        assert x.to_device("cpu") is x and xp.zeros(3, device="cpu").distribution == Replicated()
        for device in (lambda: x.to_device("cuda"), lambda: xp.zeros(3, device="cuda")):
            with pytest.raises(ValueError, match="not on 'cuda'"):
                device()
        assert xp.asarray(x) is x and xp.asarray(x, copy=True) is not x
        agree(xp.asarray([1, 2, 3], xp.float32), np.array([1, 2, 3], "f4"))
        agree(xp.asarray(np.arange(6), distribution=Slab.X), np.arange(6))
        agree(xp.from_dlpack(np.arange(6)), np.arange(6))
        agree(xp.arange(3) * x[:, :3], np.arange(3) * np.ones((4, 3)))
        for n in (1, 8, 9):
            agree(xp.fft.fftfreq(n, 0.5, distribution=Slab.X), np.fft.fftfreq(n, 0.5))
            agree(xp.fft.rfftfreq(n, 0.5), np.fft.rfftfreq(n, 0.5))
        agree(x.mT, np.ones((6, 4)))
        agree(np.cumsum(x), np.cumsum(np.ones((4, 6))))
        agree(np.ravel(x), np.ones(24))
        agree(x.reshape(2, -1), np.ones((2, 12)))
        follows(x)
        mistakes(x)


def follows(x):
    """The distributions of results, and what moves by the way."""
    cyclic = BlockCyclic(ProcessGrid(shape=(2, 1)), (1, 6))
    with shardmath.communication("forbid"):
        assert np.reshape(x, (2, 2, 6)).distribution == Slab.X
        assert np.reshape(x, (4, 2, 3)).distribution == Slab.X
        assert np.concatenate([x, x], axis=1).distribution == Slab.X
        assert np.stack([x, x]).distribution == Slab.Y
        assert np.repeat(x.to(cyclic), 3, axis=0).distribution.block_sizes == (3, 6)
        assert np.take(x, [0, 5], axis=1).distribution == Slab.X
        assert np.sort(x, axis=1).distribution == Slab.X
        assert np.cumulative_sum(x, axis=0).distribution == Slab.X  # asked for by name
        for call in (
            lambda: np.roll(x, 1, axis=0),
            lambda: np.concatenate([x, x]),
            lambda: np.reshape(x, (3, 8)),
            lambda: np.take(x, [0], axis=0),
            lambda: np.sort(x[:, 0]),
        ):
            with pytest.raises(RuntimeError, match="is in force"):
                call()


def explained(context):
    """What calls would move, which no other rank has to make."""
    with context:
        x = shardmath.ones((4, 6), distribution=Slab.X)
        stack = shardmath.ones((4, 2, 2), distribution=Slab.X)
        if context.rank:
            return
        for function, given_, words, expected in (
            (np.concatenate, [[x, x]], {"axis": 1}, "nothing moves"),
            (np.concatenate, [[x, x]], {}, "what is assigned: 4 x 6 .* 96 bytes"),
            (np.roll, [x, 1], {"axis": 0}, "48 bytes change their rank"),
            (np.reshape, [x, (2, 12)], {}, "nothing moves"),
            (np.reshape, [x, (3, 8)], {}, "reshape: 24 .* 32 bytes change their rank"),
            (np.cumulative_sum, [x], {"axis": 0}, "2 x 6 on 2 ranks, axis 0 in 2 becomes"),
            (np.sum, [x], {"axis": 0}, "all_reduce of 48 bytes"),
            (np.sum, [x], {"axis": 1}, "nothing moves"),
            (np.tensordot, [x, x.T, 1], {}, "matmul: 4 x 6 .* @ 6 x 4"),
            (np.sort, [x], {"axis": 0}, "whole on each rank: .*\nsort: "),
            (np.sort, [x[:, 0]], {}, "the rest shows when it is done\nsort: "),
            (np.take, [x, [1, 2]], {"axis": 0}, "take: 2 indices of axis 0"),
            (np.take_along_axis, [x, x.astype(int)], {"axis": 0}, "all_reduce of 1 bytes"),
            (np.nonzero, [x], {}, "all_gather of how many"),
            (np.fft.fftn, [x], {}, "fft of 4 x 6"),
            (np.einsum, ["bij,bjk->bik", stack, stack], {}, "nothing moves"),
            (np.median, [x], {}, "sort: 24 on 2 ranks"),
            (x.to, [Slab.Y], {}, "to: 4 x 6 .* becomes 4 x 6 .* 96 bytes"),
            (x.numpy, [], {"root": 1}, "numpy: 4 x 6 .* 96 bytes"),
            (x.halo, [1], {}, "halo: rims of 1 of 4 x 6"),
            (all_reduce, [x], {}, "all_reduce of 4 x 6"),
            (operator.getitem, [x, [1, 3]], {}, "2 indices of axis 0, which is split"),
            (operator.setitem, [x, [1, 3], 7], {}, "nothing moves"),
            (operator.setitem, [x, 1, 7], {}, "nothing moves"),
            (operator.setitem, [x, x > 0, 7], {}, "nothing moves"),
            (operator.iadd, [x, 7], {}, "nothing moves"),
            (operator.iadd, [x, x], {}, "nothing moves"),
            (np.add, [x, x], {"out": x}, "stays"),
        ):
            assert re.search(expected, shardmath.explain(function, *given_, **words)), function
        assert (x.local == 1).all()  # to explain writes nothing


def test_what_moves_is_explained(contexts):
    contexts.run(explained, ranks=2)


def as_numpys(context):
    """What programs use besides the standard: comparisons, methods, older names."""
    a = np.array([[1.0, np.nan, np.inf, 3], [2, 2, -np.inf, 0], [1, 5, 2, 1]])
    b = a + np.array([1e-9, 0, 0, 1e-3])
    with context:
        x, y = shardmath.from_global(a, Slab.X), shardmath.from_global(b, Slab.Y)
        for equal_nan in (False, True):
            agree(np.isclose(x, y, equal_nan=equal_nan), np.isclose(a, b, equal_nan=equal_nan))
            assert np.array_equal(x, y.to(Slab.X), equal_nan=equal_nan) is False
            assert np.array_equal(x, x, equal_nan=equal_nan) is equal_nan
            assert np.allclose(x[:, 1:3], y[:, 1:3], equal_nan=equal_nan) is equal_nan
        assert np.allclose(x[1:], x[1:]) and not np.allclose(x[1:], y[1:], rtol=0, atol=1e-4)
        assert np.allclose(x[2], 3, atol=2) and not np.allclose(x[2], 3)
        assert not np.array_equal(x, x[1:])
        for got, expected in zip(np.where(x > 1), np.where(a > 1), strict=True):
            agree(got, expected)
        agree(np.unique(x[2]), np.unique(a[2]))
        agree(x[1:].clip(0, 2), a[1:].clip(0, 2))
        agree((x[2] / 3).round(1), (a[2] / 3).round(1))
        agree(x.ravel(), a.ravel())
        agree(x[:, :1].squeeze(1), a[:, 0])
        agree(x.swapaxes(0, 1), a.T)
        agree(x.take([2, 0], axis=1), a.take([2, 0], axis=1))
        agree(x.repeat(2, axis=0), a.repeat(2, axis=0))
        for key, name, *arguments in (
            (..., "argsort", 0), (..., "cumprod"), (..., "cumsum", 1), (..., "diagonal", 1),
            (2, "dot", a[2]), (..., "flatten"), ((2, slice(2)), "searchsorted", 2),
            (..., "take", 2, 1), (..., "take", 5), (..., "trace"),
        ):  # fmt: skip
            agree(getattr(x[key], name)(*arguments), getattr(a[key], name)(*arguments))
        for got, expected in zip((x > 1).nonzero(), (a > 1).nonzero(), strict=True):
            agree(got, expected)
        filled = x.copy()
        filled.fill(3)
        agree(filled, np.full((3, 4), 3.0))
        for equal_nan in (False, True):
            agree(np.unique(x * 0, equal_nan=equal_nan), np.unique(a * 0, equal_nan=equal_nan))
        agree(np.linalg.solve(np.eye(3), x[:, :1]), a[:, :1])
        agree(np.linalg.lstsq(x[1:, 3:], [0, 2], rcond=None)[0], np.array([2.0]), close=True)
        assert x.nbytes == a.nbytes and x.itemsize == 8
        for name in ("fft2", "ifft2", "rfft2", "irfft2"):
            own = getattr(np.fft, name)
            agree(own(x[1:, ::3] + 0), own(a[1:, ::3]), close=True)
        with pytest.raises(ValueError, match=r"use x\.any\(\)"):
            bool(x)
        with pytest.raises(NotImplementedError, match="unique_counts"):
            np.unique(x, return_counts=True)


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_numpy_has_besides(contexts, ranks):
    contexts.run(as_numpys, ranks=ranks)


def mistakes(x):
    for call, error, words in (
        (lambda: np.reshape(x, (5, 5)), ValueError, "cannot be reshaped"),
        (lambda: np.reshape(x, (2, 12), order="F"), NotImplementedError, r"x\.T\.reshape"),
        (lambda: np.concatenate([x, x[:, 1:]]), ValueError, "cannot be joined along axis 0"),
        (lambda: np.stack([x, x[1:]]), ValueError, "stack takes arrays of one shape"),
        (lambda: np.take(x, [4], axis=0), IndexError, "index 4 is out of range for axis 0"),
        (lambda: np.take(x, [0.5], axis=0), IndexError, "integers"),
        (lambda: np.take_along_axis(x, x.astype(int) * 6, 1), IndexError, "is out of range"),
        (lambda: np.squeeze(x, axis=1), ValueError, "has 6 elements"),
        (lambda: np.broadcast_to(x, (4, 5)), ValueError, "broadcast"),
        (lambda: np.moveaxis(x, (0, 1), 0), ValueError, "as many axes"),
        (lambda: np.sort(x + 1j), TypeError, "no order"),
        (lambda: np.cumulative_sum(x), ValueError, "pass axis="),
        (lambda: np.tensordot(x, x, 1), ValueError, "differ along axes"),
        (lambda: np.partition(x, 1), NotImplementedError, r"x\.numpy"),
        (
            lambda: np.linalg.pinv(x, hermitian=True),
            NotImplementedError,
            r"pinv\(x, \*, rtol=None\)",
        ),
        (lambda: np.take(x, [9], 0, mode="clip"), NotImplementedError, "take.*'mode'"),
        (lambda: np.from_dlpack(x), NotImplementedError, r"x\.local"),
        (lambda: np.repeat(x, -1, axis=0), ValueError, "repeats is -1"),
        (lambda: x[np.ones(3, bool)], IndexError, "a mask of shape"),
    ):
        with pytest.raises(error, match=words):
            call()


def test_types_devices_and_mistakes(contexts):
    contexts.run(plain, ranks=2)
