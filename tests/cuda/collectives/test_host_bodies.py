"""The host's test bodies for collectives, on ranks with GPUs.

The bodies run as they are, with NumPy arrays, which are then staged; and with arrays of CuPy and
torch on the GPU in place of the forms that the host has.
"""

from __future__ import annotations

import importlib
from unittest.mock import patch

import numpy as np
import pytest
import samples
from visible import GPUS, gpu_of

from shardmath.arrays import dtypes, library_named

FORMS = [
    "cupy",
    "cupy_fortran",
    "cupy_strided",
    "cupy_heap",
    "torch",
    "torch_strided",
    "torch_heap",
    "torch_cpu",
]
plain = {"formed": samples.formed, "elements_of": samples.elements_of, "framed": samples.framed}


def on_gpu(host, library, context):
    """A packed array of that library on the rank's GPU."""
    spec = dtypes.of(host.dtype)
    device = f"cuda:{context.device_id}"
    buffer = context.heap.allocate(host.nbytes)
    strides = [int(np.prod(host.shape[axis + 1 :])) for axis in range(host.ndim)]
    heap = library_named(library).on_device(buffer, spec, host.shape, strides)
    if host.nbytes:
        from shardmath.cuda.driver import call

        context.team.device.activate()
        packed = np.ascontiguousarray(host)
        call("cuMemcpyHtoD", buffer.block.address, packed.ctypes.data, packed.nbytes)
    ordinary = library_named(library).empty(host.shape, spec, "C", device)
    ordinary[...] = heap
    return heap, ordinary


def formed(form, elements, context):
    if form in ("plain", "fortran", "strided", "reversed"):
        return plain["formed"](form, elements, context)
    if form == "heap":  # a NumPy array is never on a GPU's heap
        return plain["formed"]("plain", elements, context)
    if form == "torch_cpu":
        return plain["formed"]("torch", elements, context)
    library, _, kind = form.partition("_")
    heap, ordinary = on_gpu(elements, library, context)
    if kind == "heap":
        return heap
    if kind == "":
        return ordinary
    device = f"cuda:{context.device_id}"
    if kind == "fortran":
        array = library_named(library).empty(elements.shape, elements.dtype, "F", device)
    else:
        shape = [2 * n + 1 for n in elements.shape]
        array = library_named(library).empty(shape, elements.dtype, "C", device)
        array = array[tuple(slice(0, 2 * n, 2) for n in elements.shape)]
    array[...] = ordinary
    return array


def elements_of(array):
    if hasattr(array, "get"):
        return array.get()
    if hasattr(array, "cpu"):
        return plain["elements_of"](array.cpu())
    return np.asarray(array)


def framer(form, context):
    def framed(shape, dtype, library="numpy"):
        if form in ("plain", "torch_cpu"):
            return plain["framed"](shape, dtype, library)
        whole = np.full([2 * n + 3 for n in shape], samples.SENTINEL)
        whole = whole.astype(samples.numpy_dtype(dtype))
        inside = tuple(slice(1, 2 * n + 1, 2) for n in shape)
        _, device = on_gpu(whole, form.partition("_")[0], context)

        def untouched(also_inside=False):
            now = elements_of(device).copy()
            if not also_inside:
                now[inside] = whole[inside]
            return now.tobytes() == whole.tobytes()

        return device[inside], untouched

    return framed


def check(context, module, body, form, args):
    if form.startswith("torch"):
        importlib.import_module("torch").cuda.set_device(context.device_id)
    elif form.startswith("cupy"):
        importlib.import_module("cupy").cuda.Device(context.device_id).use()
    bodies = importlib.import_module(module)
    values = {
        "formed": formed,
        "elements_of": elements_of,
        "framed": framer(form, context),
        "FORMS": [form],
    }
    known = {name: value for name, value in values.items() if hasattr(bodies, name)}
    with patch.multiple(bodies, **known):
        found = getattr(bodies, body)(context, *args)
    context.team.synchronize(0)
    context.barrier()
    return found[0] if isinstance(found, tuple) else found


REDUCING = [
    ("check_types", [["float32", "int16", "bool", "bfloat16", "complex64", "float64", "uint64"]]),
    ("check_lengths", [(511, 513, 16385, 262145), "float32", "sum"]),
    ("check_lengths", [(511, 16385), "int16", "mean"]),
    ("check_complex_means", []),
    ("check_overlap", []),
    ("check_numbers", []),
]
MOVING = [
    ("check_broadcast", [0, ["float32", "bool", "bfloat16"]]),
    ("check_gather_of_all_dtypes", []),
    ("check_gather_in_place", []),
    ("check_alternation", []),
]


@pytest.mark.parametrize(("body", "args"), REDUCING)
def test_reductions_of_numpy_arrays(gpus, size, body, args):
    assert gpus.run(check, "test_reducing", body, "plain", args, ranks=size) == [[]] * size


@pytest.mark.parametrize(("body", "args"), MOVING)
def test_moves_of_numpy_arrays(gpus, size, body, args):
    found = gpus.run(check, "test_moving", body, "plain", args, ranks=size)
    assert found in ([[]] * size, [0] * size)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_reductions_of_every_form(gpus, size, form, dtype):
    for shape in ((7, 9), (600, 701)):
        args = [shape, dtype]
        assert (
            gpus.run(check, "test_reducing", "check_forms", form, args, ranks=size) == [[]] * size
        )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("shape", "axis", "dtype"),
    [
        ((7,), 0, "float64"),
        ((7, 3), 1, "complex64"),
        ((8, 9, 2), -2, "bfloat16"),
        ((0, 9), 1, "float32"),
        ((3, 2_000_000), 0, "float32"),
        ((3, 100_000), -2, "float32"),
    ],
)
def test_all_gather_of_every_form(gpus, size, form, shape, axis, dtype):
    args = [shape, axis, dtype]
    assert gpus.run(check, "test_moving", "check_gather", form, args, ranks=size) == [[]] * size


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize(
    ("shape", "axis", "dtype"),
    [
        ((8,), 0, "float64"),
        ((9, 7), 1, "int16"),
        ((2, 7, 3), -2, "bfloat16"),
        ((24, 600_000), 0, "float32"),
    ],
)
def test_all_to_all_of_every_form(gpus, size, form, uneven, shape, axis, dtype):
    args = [(shape, axis, dtype), uneven]
    assert gpus.run(check, "test_moving", "check_exchange", form, args, ranks=size) == [[]] * size


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("dtype", ["float16", "int64"])
def test_reduce_scatter(gpus, size, op, dtype):
    for shape, axis in (((7,), 0), ((5, 8), 1), ((3, 2, 9), 1), ((0, 4), 0), ((9, 40_000), 0)):
        args = [(shape, axis, None), dtype, op]
        found = gpus.run(check, "test_reducing", "check_scatter", "plain", args, ranks=size)
        assert found == [True] * size, shape


def check_spaces(context):
    """One rank in host memory, the others on GPUs; an array of another GPU; an `out` elsewhere, or
    of which several indices are one element.
    """
    import torch

    from shardmath.collectives import all_reduce

    torch.cuda.set_device(context.device_id)
    context = context.split(0)  # where no call is known: errors are raised where they are
    size, rank = context.size, context.rank
    on = [torch.ones(3, device="cpu" if rank == size - 1 else "cuda"), torch.ones(3, device="cuda")]
    calls = [
        (lambda: all_reduce(on[0], context=context), "CollectiveMismatch", size > 1),
        (lambda: all_reduce(on[1], out=torch.ones(3), context=context), "ValueError", True),
        (lambda: all_reduce(on[1], out=on[1][:1].expand(3), context=context), "ValueError", True),
        (lambda: all_reduce(on[1], context=context), "", False),  # all goes on
    ]
    if min(GPUS, size) > 1:
        other = torch.ones(3, device=f"cuda:{gpu_of(rank + 1)}")
        calls.append((lambda: all_reduce(other, context=context), "ValueError", True))
    wrong = []
    for number, (call, error, raises) in enumerate(calls):
        try:
            call()
            found = ""
        except Exception as caught:
            found = type(caught).__name__
        if found != (error if raises else ""):
            wrong.append((number, found))
    return wrong


def test_memory_spaces_are_not_mixed(gpus, size):
    assert gpus.run(check_spaces, ranks=size) == [[]] * size
