"""The verbs of symm.cuh and of Triton in kernels of the user's: right, late, and misused."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from shardmath import symmetric_memory
from shardmath.errors import CudaError, OpTimeout
from shardmath.handles.allocation import allocate_symmetric_memory
from shardmath.handles.rendezvous import rendezvous

SOURCE = (Path(__file__).parent / "verbs.cu").read_text()


def installed(name):
    return importlib.util.find_spec(name) is not None


def shared(context, nbytes, package="torch"):
    """Bytes on every rank, and the handle on them. Rank r has r * 64 more than it needs."""
    module = importlib.import_module(package)
    if package == "torch":
        module.cuda.set_device(context.device_id)
    else:
        module.cuda.Device(context.device_id).use()
    with context:
        shape = (nbytes + 64 * context.rank,)
        array = allocate_symmetric_memory(shape, module, dtype="uint8", skip_symmetric_check=True)
    array[...] = 0
    return array, rendezvous(array, context)


def words(context, count=4):
    import torch

    return torch.full((count,), -1, dtype=torch.int64, device=f"cuda:{context.device_id}")


def pattern(rank, count):
    import torch

    return (torch.arange(count, dtype=torch.int64) * 7 + 31 * rank + 1).to(torch.uint8)


def parts_of(array, nbytes, shift):
    """The bytes at source, landing, got and taken of verbs.cu, and all others but the packets."""
    part = -(-(nbytes + shift + 16) // 16) * 16
    whole = array[: 4 * part].cpu()
    found = [whole[i * part + shift : i * part + shift + nbytes].clone() for i in range(4)]
    for i in range(4):
        whole[i * part + shift : i * part + shift + nbytes] = 0
    return found, int(whole.count_nonzero())


SHAPES = [1, 33, 256, (8, 4, 4), (31, 7), 1024]


def check_verbs(context, lengths, shifts):
    array, handle = shared(context, 4 * (max(lengths) + 64) + 2 * max(lengths) + 64)
    kernel, out = handle.kernel(SOURCE, "verbs"), words(context)
    left = (context.rank - 1) % context.size
    wrong, number = [], 0
    for nbytes in lengths:
        for shift in shifts:
            array.zero_()  # packets, too
            array[shift : shift + nbytes] = pattern(context.rank, nbytes).to(array.device)
            handle.barrier()
            for threads in SHAPES if nbytes < 5000 else (256,):
                number += 1
                kernel(1, threads, handle, nbytes, shift, number, out)
                handle.synchronize()
                value, fine, size, _ = out.tolist()
                if (value, fine, size) != (2000 + left, 1, handle.buffer_sizes[left]):
                    wrong.append((nbytes, shift, threads, value, fine, size))
                (own, landing, got, taken), rest = parts_of(array, nbytes, shift)
                theirs = pattern(left, nbytes)
                if not all(bool((part == theirs).all()) for part in (landing, got, taken)):
                    wrong.append((nbytes, shift, threads, "bytes"))
                if rest or not bool((own == pattern(context.rank, nbytes)).all()):
                    wrong.append((nbytes, shift, threads, "beyond"))
    handle.barrier()
    handle.synchronize()
    return wrong


@pytest.mark.parametrize("shift", [0, 1, 8])
def test_every_verb(gpus, size, shift):
    lengths = [0, 1, 7, 8, 17, 4096, 4099, 300_000]
    assert gpus.run(check_verbs, lengths, [shift], ranks=size) == [[]] * size


# -- doors -----------------------------------------------------------------------------------------


def by_handle(handle, out, context):
    handle.kernel(SOURCE, "meet_by_value")(1, 64, handle, out)
    handle.kernel(SOURCE, "meet")((1, 1), [32, 2], handle.device_argument(), out)


def by_torch(handle, out, context):
    import torch

    options = [text for text in handle.compile_options if text.startswith("-D")]
    kernel = torch.cuda._compile_kernel(
        SOURCE, "meet", cuda_include_dirs=[symmetric_memory.include_path()], nvcc_options=options
    )
    kernel((1, 1, 1), (64, 1, 1), [handle.device_argument(), out])


def by_cupy(handle, out, context):
    import cupy

    module = cupy.RawModule(code=SOURCE, options=handle.compile_options)
    with cupy.cuda.Device(context.device_id):
        by_value = module.get_function("meet_by_value")
        by_value((1,), (64,), (handle.kernel_argument(), out))
        module.get_function("meet")((1,), (64,), (handle.device_argument(), out))


def by_cuda_core(handle, out, context):
    from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch

    device = Device(context.device_id)
    device.set_current()
    options = ProgramOptions(
        std="c++17",
        arch=f"sm_{device.arch}",
        include_path=[symmetric_memory.include_path()],
        define_macro=[("SHARDMATH_RANKS", str(handle.world_size))],
    )
    kernel = Program(SOURCE, "c++", options).compile("cubin").get_kernel("meet")
    stream = device.create_stream()
    arguments = [handle.device_argument().data_ptr(), out.data_ptr()]
    launch(stream, LaunchConfig(grid=1, block=64), kernel, *arguments)
    stream.sync()


def by_triton(handle, out, context):
    import triton_verbs

    triton_verbs.meet[1,](handle.device_argument(), out)


def by_both(handle, out, context):
    """Ranks with an odd number speak Triton."""
    if context.rank % 2:
        by_triton(handle, out, context)
    else:
        handle.kernel(SOURCE, "meet")(1, 64, handle.device_argument(), out)


DOORS = {
    "handle": (by_handle, "torch", "torch"),
    "torch": (by_torch, "torch", "torch"),
    "cupy": (by_cupy, "cupy", "cupy"),
    "cuda.core": (by_cuda_core, "torch", "cuda"),
    "triton": (by_triton, "torch", "triton"),
    "both": (by_both, "torch", "triton"),
}


def check_door(context, door):
    sys.path.insert(0, str(Path(__file__).parent))
    call, package, needs = DOORS[door]
    if not installed(needs) or (door == "cuda.core" and not installed("cuda.core")):
        return "not installed"
    _, handle = shared(context, 64, package)
    if package == "cupy":
        import cupy

        out = cupy.zeros(4, cupy.int64)
        cupy.cuda.Device().synchronize()
    else:
        import torch

        out = words(context)
        torch.cuda.synchronize()
    context.barrier()
    call(handle, out, context)
    handle.synchronize()
    found = int(out[0])
    context.barrier()
    return found


@pytest.mark.parametrize("door", DOORS)
def test_doors(gpus, size, door):
    found = gpus.run(check_door, door, ranks=size)
    if "not installed" in found:
        pytest.skip(f"{door} is not installed")
    assert found == [100 + (rank - 1) % size for rank in range(size)]


def check_triton(context, lengths):
    sys.path.insert(0, str(Path(__file__).parent))
    if not installed("triton"):
        return "not installed"
    import triton_verbs

    part = max(lengths) + 64
    array, handle = shared(context, 3 * part)
    memory, out = handle.device_argument(), words(context)
    left = (context.rank - 1) % context.size
    wrong = []
    for nbytes in lengths:
        for warps in (1, 4, 8):
            array.zero_()
            array[:nbytes] = pattern(context.rank, nbytes).to(array.device)
            handle.barrier()
            triton_verbs.verbs[1,](memory, part, nbytes, out, BLOCK=512, num_warps=warps)
            handle.synchronize()
            theirs, host = pattern(left, nbytes), array.cpu()
            if out.tolist()[:2] != [2000 + left, 1]:
                wrong.append((nbytes, warps, out.tolist()))
            for at in (part, 2 * part):
                same = bool((host[at : at + nbytes] == theirs).all())
                if not same or int(host[at + nbytes : at + part].count_nonzero()):
                    wrong.append((nbytes, warps, at))
            handle.barrier()
    handle.synchronize()
    return wrong


def test_every_verb_in_triton(gpus, size):
    found = gpus.run(check_triton, [0, 1, 511, 512, 70_001], ranks=size)
    if "not installed" in found:
        pytest.skip("triton is not installed")
    assert found == [[]] * size


# -- graphs ----------------------------------------------------------------------------------------


def check_graph(context):
    import torch

    array, handle = shared(context, 4096)
    out = words(context)
    kernel = handle.kernel(SOURCE, "meet_by_value")
    theirs = array[:8].view(torch.int64)
    total = torch.zeros(1, dtype=torch.int64, device=array.device)
    kernel(1, 32, handle, out)
    handle.synchronize()
    context.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            theirs.zero_()
            handle.barrier(8)
            kernel(1, 32, handle, out)
            total.add_(out[:1])
    for _ in range(50):
        graph.replay()
    handle.synchronize()
    context.barrier()
    return int(total)


def test_graphs_replay_kernels_and_handles(gpus, size):
    wanted = [150 * (100 + (rank - 1) % size) for rank in range(size)]
    assert gpus.run(check_graph, ranks=size) == wanted


# -- late and wrong --------------------------------------------------------------------------------


def check_late(context, language, kind):
    """All wait for the last rank, which comes later; each wait can then be had again."""
    import torch

    sys.path.insert(0, str(Path(__file__).parent))
    if language == "triton" and not installed("triton"):
        return "not installed"
    _, handle = shared(context, 4096)
    out, last = words(context), context.size - 1
    if language == "triton":
        import triton_verbs

        def wait_for(timeout_ms):
            triton_verbs.wait_for[1,](handle.device_argument(timeout_ms), kind, last, out)

        def give(dst):
            triton_verbs.give[1,](handle.device_argument(), kind, dst)
    else:
        wait, put = (handle.kernel(SOURCE, name) for name in ("wait_for", "give"))

        def wait_for(timeout_ms):
            wait(1, 64, handle.kernel_argument(timeout_ms), kind, last, out)

        def give(dst):
            put(1, 64, handle, kind, dst)

    # Compiles everywhere, so that only the last rank is late.
    if kind == 0:
        wait_for(40_000)
        give(0)
    else:
        give(context.rank)
        array_of = handle.get_buffer(context.rank, (4096,), "uint8")
        handle.synchronize()
        array_of.zero_()
    handle.synchronize()
    torch.cuda.synchronize()
    context.barrier()
    late = None
    if context.rank != last:
        wait_for(400)
        wait_for(86_400_000)  # ends with the first, not when its own time is up
        try:
            handle.synchronize()
        except OpTimeout as error:
            late = (error.ranks, f"rank {last}" in str(error), int(out[0]))
    context.barrier()
    if context.rank == last:
        for dst in range(context.size) if kind else [0]:
            give(dst)
        came = 1
    else:
        wait_for(20_000)
        handle.synchronize()
        came = int(out[0])
    handle.synchronize()
    context.barrier()
    x = torch.ones(64, 64, device="cuda")
    return late, came, float((x @ x).sum())


@pytest.mark.parametrize("language", ["cuda", "triton"])
@pytest.mark.parametrize("kind", [0, 1, 2, 3, 4])
def test_a_late_rank_is_named(gpus, size, language, kind):
    if size == 1:
        pytest.skip("nobody to wait for")
    if language == "triton" and kind == 4:
        pytest.skip("packets are for CUDA C++")
    found = gpus.run(check_late, language, kind, ranks=size)
    if "not installed" in found:
        pytest.skip("triton is not installed")
    good = (((size - 1,), True, 0), 1, 64.0 * 64 * 64)
    assert found == [good] * (size - 1) + [(None, 1, good[2])]


WRONG = [
    "named channel {channels}; there are {channels}",
    "named rank {size}; there are {size}",
    "named rank -1; there are {size}",
    "named rank {beyond}; there are {size}",
    "named channel -2147483648; there are {channels}",
    "named rank {size}; there are {size}",
    "named rank -2; there are {size}",
]
WRONG_IN_TRITON = [
    "named channel 1048576; there are {channels}",
    *WRONG[1:4],
    "named channel -1; there are {channels}",
]


def check_misuse(context, language):
    sys.path.insert(0, str(Path(__file__).parent))
    if language == "triton" and not installed("triton"):
        return "not installed"
    _, handle = shared(context, 64)
    memory, out, wrong = handle.device_argument(), words(context), []
    size, channels = context.size, handle.channels
    facts = {"size": size, "beyond": size + 3, "channels": channels}
    texts = WRONG_IN_TRITON if language == "triton" else WRONG
    for kind, text in enumerate(texts):
        if language == "triton":
            import triton_verbs

            triton_verbs.misuse[1,](memory, kind, out)
        else:
            handle.kernel(SOURCE, "misuse")(1, 64, memory, kind, out)
        try:
            handle.synchronize()
        except ValueError as error:
            if text.format(**facts) not in str(error) or int(out[0]):
                wrong.append((kind, str(error), int(out[0])))
        else:
            wrong.append((kind, "nothing was said"))
    if language == "cuda":
        from shardmath.handles.device_handle import HandleKernel

        other = HandleKernel(handle, SOURCE, "misuse", [f"-DSHARDMATH_RANKS={size + 1}"])
        other(1, 64, memory, 7, out)
        try:
            handle.check()
            handle.synchronize()
        except ValueError as error:
            if f"compiled for {size + 1} ranks, not {size}" not in str(error):
                wrong.append(str(error))
        else:
            wrong.append("the number of ranks was accepted")
    handle.check()
    context.barrier()
    handle.barrier()
    handle.synchronize()
    return wrong


@pytest.mark.parametrize("language", ["cuda", "triton"])
def test_what_does_not_exist_is_refused(gpus, size, language):
    found = gpus.run(check_misuse, language, ranks=size)
    if "not installed" in found:
        pytest.skip("triton is not installed")
    assert found == [[]] * size


def check_arguments(context):
    import numpy as np
    import torch

    _, handle = shared(context, 64)
    kernel = handle.kernel(SOURCE, "misuse")
    refused = []
    for call in (
        lambda: kernel(1, 1, "text"),
        lambda: kernel(1, 1, torch.zeros(3)),
        lambda: kernel(1, 1, np.zeros(3), stream="text"),
        lambda: kernel((1, 1, 1, 1), 1),
        lambda: handle.kernel(SOURCE, "nothing"),
        lambda: handle.kernel("nonsense", "nothing"),
        lambda: handle.kernel_argument(-1),
        lambda: kernel(1, 2048, handle.device_argument(), 3, words(context)),
    ):
        try:
            call()
            refused.append("accepted")
        except (CudaError, TypeError, ValueError) as error:
            refused.append(type(error).__name__)
    again = handle.kernel(SOURCE, "misuse")
    assert again._kernel is kernel._kernel, "compiled once"
    handle.synchronize()
    context.barrier()
    return refused


def test_arguments(gpus, size):
    types = ["ValueError", "ValueError", "TypeError", "ValueError", "CudaError", "CudaError"]
    wanted = [*types, "ValueError", "CudaError"]
    assert gpus.run(check_arguments, ranks=size) == [wanted] * size
