"""Transforms on ranks with GPUs: the host's random cases, and what only GPUs have.

Arrays are NumPy's and torch's in host memory, which are staged, and CuPy's and torch's on the GPU.
A rank tells what went wrong instead of raising, so that one ride shows all failures.
"""

from __future__ import annotations

import importlib
import traceback
import weakref
from functools import partial

import fft_cases
import numpy as np
import pytest
import test_allocated_operands
import test_fft_any
import test_trigonometric
from fft_cases import fill, placed, to_host
from hypothesis import given
from hypothesis import strategies as st
from visible import GPUS, RANKS, gpu_of

from arrangements import part_of
from draws import drawn


def use(context):
    for name in ("torch", "cupy"):
        module = importlib.import_module(name)
        if name == "torch":
            module.cuda.set_device(context.device_id)
        else:
            module.cuda.Device(context.device_id).use()


def run_case(context, case):
    """What goes wrong in the body of the host's tests."""
    body = test_trigonometric if "name" in case else test_fft_any
    use(context)
    try:
        body.check_case(context, case)
    except Exception:
        return traceback.format_exc(limit=-3)


@st.composite
def on_gpus(draw, cases):
    case = draw(cases)
    forms = ["torch cpu", "torch gpu"]
    if "complex32" not in (case["dtype"], fft_cases.result_dtype(case)):
        forms += ["numpy cpu", "cupy gpu"]
    case["library"] = draw(st.sampled_from(forms))
    if case["library"] == "torch cpu" and case["out"] == "reversed":
        case["out"] = "strided"
    return case


def wrong_transforms(pool, cases, count):
    """What goes wrong in so many of the host's cases, each with its case."""
    wrong = []

    @drawn(count, shrunk=False)
    @given(case=on_gpus(cases))
    def each(case):
        if len(wrong) > 8:
            return
        try:
            found = [text for text in pool.run(run_case, case, ranks=case["size"]) if text]
        except Exception as error:
            found = [repr(error)]
        if found:
            wrong.append(f"{found[0]}\n{case}")

    each()
    return wrong


def test_any_transform(gpus, size):
    wrong = wrong_transforms(gpus, fft_cases.cases(size), 60)
    assert not wrong, "\n\n".join(wrong)


def test_any_cosines_and_sines(gpus, size):
    wrong = wrong_transforms(gpus, test_trigonometric.cases(size), 60)
    assert not wrong, "\n\n".join(wrong)


def check_chunks(context, cases):
    """Transforms in chunks, several times without waiting, and again from a CUDA graph."""
    import torch

    import shardmath
    from shardmath.distribution import Slab
    from shardmath.operators.fft import stages

    use(context)
    small = tuple((n, stages.Chunking(*cuts)) for n, cuts in SMALL_CHUNKINGS)
    stages._ONE_EXCHANGE = stages._TWO_EXCHANGES = stages._MULTI_HOST = small
    rank, size = context.rank, context.size
    wrong = []
    for name, shape, kind, dtype, one, two, norm, heap in cases:
        try:
            case = {"shape": shape, "kind": kind, "parity": "even", "norm": norm, "axes": None}
            case["dtype"] = dtype
            options = fft_cases.options_of(case)
            array = fft_cases.operand_of(case)
            full = fft_cases.wanted(case, array)
            source, target = getattr(Slab, one), getattr(Slab, two)
            part, want = part_of(array, source, rank, size), part_of(full, target, rank, size)
            operand, _ = placed(context, "torch gpu", part, "heap C" if heap else "C")
            function = getattr(shardmath.fft, test_fft_any.FUNCTIONS[kind])

            call = partial(
                function, operand, distribution=(source, target), norm=norm, options=options
            )

            def transform(out=None, call=call):
                with context:
                    return call(out=out)

            results = [transform() for _ in range(4)]
            for _ in range(5):  # from the second time on, one graph
                transform(results[-1])
            context.team.synchronize(0)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results += [transform() for _ in range(2)]
            for _ in range(3):
                graph.replay()
            torch.cuda.synchronize()
            context.team.check()
            for number, result in enumerate(results):
                host = to_host(result)
                if not fft_cases.close(host, want, full.size):
                    error = np.abs(fft_cases.wide(host) - want).max() / np.abs(want).max()
                    wrong.append(f"rank {rank}: {name}: result {number}: {error}")
                    break
            if to_host(operand).tobytes() != part.tobytes():
                wrong.append(f"rank {rank}: {name}: the operand has changed")
        except Exception:
            wrong.append(f"{name}: {traceback.format_exc(limit=-4)}")
            break
    context.barrier()
    return wrong


RISES = (1, 2, 3, 4, 4, 4, 4, 4)
SMALL_CHUNKINGS = [
    (1 << 19, (RISES, 8, 3)),
    (1 << 17, (RISES, 4, 2)),
    (1 << 15, ((1,) * 4, 1, 1)),
    (1, ((1, 1), 2, 1)),
]
CHUNKS = [
    ("X to Y", (48, 40, 64), "C2C", "complex64", "X", "Y", None, True),
    ("X to Y, ordinary", (48, 40, 128), "C2C", "complex64", "X", "Y", "ortho", False),
    ("X to X", (48, 48, 64), "C2C", "complex128", "X", "X", None, True),
    ("X to X, ordinary", (48, 48, 128), "C2C inverse", "complex64", "X", "X", None, False),
    ("Y to X", (44, 40, 64), "C2C inverse", "complex64", "Y", "X", "backward", True),
    ("real", (48, 40, 254), "R2C", "float32", "X", "Y", None, True),
    ("real, back", (48, 48, 254), "R2C", "float64", "X", "X", None, True),
    ("from half precision", (48, 40, 254), "R2C", "float16", "X", "Y", None, True),
    ("half precision", (48, 40, 128), "C2C", "complex32", "X", "Y", "ortho", True),
    (
        "half precision, back",
        (48, 48, 128),
        "C2C inverse",
        "complex32",
        "X",
        "X",
        "backward",
        False,
    ),
    ("to half precision", (48, 48, 510), "R2C", "float16 halves", "X", "Y", None, True),
    ("to real", (48, 48, 65), "C2R", "complex64", "Y", "X", None, True),
    ("uneven", (13, 22, 64), "C2C", "complex64", "X", "Y", None, True),
    ("fewer than ranks", (2, 22, 64), "C2C", "complex64", "X", "Y", None, True),
    ("matrix", (256, 9216), "C2C", "complex64", "X", "Y", None, True),
    ("large", (128, 144, 256), "C2C", "complex64", "X", "X", None, True),
]


def test_chunks(gpus, size):
    found = gpus.run(check_chunks, CHUNKS, ranks=size)
    assert found == [[]] * size, "\n".join(text for texts in found for text in texts)


@pytest.mark.parametrize("ranks", [5, 6, 7])
def test_chunks_of_other_numbers_of_ranks(gpus, ranks):
    """What pushes has no neighbours there: its blocks are no multiple of a cluster."""
    if ranks > RANKS:
        pytest.skip(f"there are {RANKS} ranks with GPUs")
    found = gpus.run(check_chunks, CHUNKS, ranks=ranks)
    assert found == [[]] * ranks, "\n".join(text for texts in found for text in texts)


def check_life(context, library):
    """The class, operands in place, a stream of the user's, and mistakes; what was wrong."""
    from shardmath.distribution import Slab
    from shardmath.fft import FFT, allocate_operand, fft

    use(context)
    module = importlib.import_module(library)
    rank, size = context.rank, context.size
    shape = (9, 10, 6)
    rng = np.random.default_rng(1)
    real = rng.standard_normal(shape)
    array = real + 1j * rng.standard_normal(shape)
    part = part_of(array, Slab.X, rank, size)
    want = np.fft.fftn(array)
    wrong = []

    def expect(what, got, wanted):
        if not np.allclose(to_host(got), wanted, rtol=1e-10, atol=1e-10 * np.abs(want).max()):
            wrong.append(what)

    with context:
        x, _ = placed(context, f"{library} gpu", part, "C")
        with FFT(x, distribution=Slab.X, options={"redistribute": False}) as transform:
            transform.plan()
            y = transform.execute()
            expect("forward", y, part_of(want, Slab.Y, rank, size))
            again = transform.execute(direction="inverse", release_workspace=True)
            expect("inverse", again, part_of(np.fft.ifftn(array) * array.size, Slab.Y, rank, size))
            transform.reset_operand(y, distribution=Slab.Y)
            back = transform.execute(direction="inverse")
            expect("back", back, part * array.size)
        for parity in (6, 5):
            r = part_of(real[..., :parity], Slab.X, rank, size)
            operand = allocate_operand(
                r.shape, module, input_dtype="float64", distribution=Slab.X, fft_type="R2C"
            )
            fill(operand, r)
            made = shardmath_rfft(operand, Slab.X)
            expect("in place", made, part_of(np.fft.rfftn(real[..., :parity]), Slab.X, rank, size))
        fft(x, distribution=Slab.X, options={"inplace": True})
        expect("itself", x, part_of(want, Slab.X, rank, size))
        fill(x, part)
        if library == "torch":
            for what, y in on_streams(x):
                expect(what, y, part_of(want, Slab.X, rank, size))
            lazy = fft(x.conj(), distribution=Slab.X)
            expect("conjugate", lazy, part_of(np.fft.fftn(array.conj()), Slab.X, rank, size))
        wrong += mistaken(context, module, x, part)
        expect("afterwards", fft(x, distribution=Slab.X), part_of(want, Slab.X, rank, size))
    context.team.synchronize(0)
    return wrong


def on_streams(x):
    """The transform of a slab on a stream, and many on two streams, each with a name."""
    import torch

    from shardmath.distribution import Slab
    from shardmath.fft import fft

    streams = [torch.cuda.Stream() for _ in range(3)]
    for each in streams:
        each.wait_stream(torch.cuda.current_stream())
    first = fft(x, distribution=Slab.X, stream=streams[0])
    streams[0].synchronize()
    many = [fft(x, distribution=Slab.X, stream=each) for each in streams[1:] * 4]
    torch.cuda.synchronize()
    return [("on a stream", first), *(("on two streams", each) for each in many)]


# (library, memory_space, where it then lies)
SPACES = [
    *(("numpy", None, "cpu"), ("numpy", "cpu", "cpu"), ("torch", "cpu", "cpu")),
    *(("torch", None, "cuda"), ("torch", "cuda", "cuda"), ("cupy", None, "cuda")),
]


def check_allocated(context, body, *args):
    """A body of the host's tests of allocated operands."""
    use(context)
    return getattr(test_allocated_operands, body)(context, *args)


@pytest.mark.parametrize("args", SPACES, ids=lambda args: "-".join(map(str, args[:2])))
def test_operands_have_room_for_the_result(gpus, size, args):
    found = gpus.run(check_allocated, "check_operands", *args, ranks=size, timeout=300)
    assert found == [[]] * size, "\n".join(text for texts in found for text in texts)


@pytest.mark.parametrize("args", SPACES, ids=lambda args: "-".join(map(str, args[:2])))
def test_the_memory_of_an_operand_is_its_own(gpus, size, args):
    found = gpus.run(check_allocated, "check_lives", *args[:2], ranks=size)
    assert found == [[]] * size, found


def check_orders(context, name, where):
    """The host's body, of transforms in chunks, whose results peers write."""
    from shardmath.operators.fft import stages

    small = tuple((n, stages.Chunking(*cuts)) for n, cuts in SMALL_CHUNKINGS)
    stages._ONE_EXCHANGE = stages._TWO_EXCHANGES = stages._MULTI_HOST = small
    device = "cpu" if where == "cpu" else f"cuda:{context.device_id}"
    return check_allocated(context, "check_orders", name, device, (48, 48, 64))


@pytest.mark.parametrize("form", ["numpy cpu", "torch cpu", "torch gpu", "cupy gpu"])
def test_orders_of_operand_and_result(gpus, size, form):
    assert gpus.run(check_orders, *form.split(), ranks=size) == [[]] * size


def test_types_of_operands_for_which_none_is_given(gpus, size):
    expected = [dtype for *_, dtype in test_allocated_operands.DEFAULTS]
    assert gpus.run(check_allocated, "check_defaults", ranks=size) == [expected] * size


def check_results_go(context):
    """A result that nobody has goes at once: how many stayed."""
    import torch

    from shardmath.distribution import Slab
    from shardmath.fft import fft

    use(context)
    with context:
        x = torch.ones(Slab.X.shape(context.rank, (9, 10)), device="cuda", dtype=torch.complex64)
        made = [weakref.ref(fft(x, distribution=Slab.X)) for _ in range(4)]  # anew, and again
        stay = [result() is not None for result in made]
    context.team.synchronize(0)
    return sum(stay)


def test_results_that_nobody_has_go(gpus, size):
    assert gpus.run(check_results_go, ranks=size) == [0] * size


def mistaken(context, module, x, part):
    """Mistakes that did not raise what they should."""
    from shardmath.distribution import Slab
    from shardmath.fft import allocate_operand, fft

    def allocated_in(package, space):
        return allocate_operand((3, 3), package, distribution=Slab.X, memory_space=space)

    rank, size, wrong = context.rank, context.size, []
    mistakes = [
        ("real", lambda: fft(x.real, distribution=Slab.X), ValueError),
        ("host memory", lambda: fft(part if rank else x, distribution=Slab.X), ValueError),
        ("numpy", lambda: allocated_in(np, "cuda"), ValueError),
        ("cupy", lambda: allocated_in(importlib.import_module("cupy"), "cpu"), ValueError),
        ("memory unknown", lambda: allocated_in(module, "disk"), ValueError),
    ]
    if size == 1:
        del mistakes[1]
    if size % 2 == 0 and GPUS > 1:
        stranger = elsewhere(module, part.shape, gpu_of(rank ^ 1))
        mistakes.append(("another GPU", lambda: fft(stranger, distribution=Slab.X), ValueError))
    for what, call, kind in mistakes:
        try:
            call()
            wrong.append(f"{what}: no error")
        except kind:
            pass
    return wrong


def elsewhere(module, shape, device):
    """An array on another GPU."""
    if module.__name__ == "torch":
        return module.zeros(shape, dtype=module.complex128, device=f"cuda:{device}")
    with module.cuda.Device(device):
        return module.zeros(shape, dtype=module.complex128)


def shardmath_rfft(operand, distribution):
    import shardmath

    return shardmath.fft.rfft(operand, distribution=distribution, options={"inplace": True})


@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_life(gpus, size, library):
    assert gpus.run(check_life, library, ranks=size) == [[]] * size
