"""One rank's transforms on its GPU: every plan that there is for packed arrays, beside NumPy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from shardmath.local.plan_many import plan_many
from shardmath.operators.fft.local_steps import strided
from shardmath.program.rank_program import packed

ORDERS = [(0, 1, 2), (2, 1, 0), (1, 0, 2), (2, 0, 1)]
AXES = [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)]
NAMES = {"C2C": ("complex", "complex"), "R2C": ("float", "complex"), "C2R": ("complex", "float")}
WIDTHS = {("complex", False): "complex64", ("complex", True): "complex128",
          ("float", False): "float32", ("float", True): "float64"}  # fmt: skip


def in_memory(buffer, view):
    """Its strides over the bytes of a buffer on the GPU, as a host copy and back."""
    from shardmath.cuda.driver import call

    raw = np.zeros(max(1, view.size * view.itemsize), np.uint8)
    array = np.ndarray(view.shape, view.dtype, raw.data, 0, view.strides)

    def upload():
        call("cuMemcpyHtoD", buffer.block.address, raw.ctypes.data, raw.nbytes)

    def download():
        call("cuMemcpyDtoH", raw.ctypes.data, buffer.block.address, raw.nbytes)
        return array

    return array, upload, download


def check_plans(context, kind, double, grid):
    from shardmath.local.gpu.fft import CuFFT

    device = context.team.device
    device.activate()
    cufft = CuFFT.of(device)
    wrong, plans = [], 0
    rng = np.random.default_rng(3)
    for axes, orders in itertools.product(AXES, itertools.product(ORDERS, ORDERS)):
        half = (*grid[: axes[-1]], grid[axes[-1]] // 2 + 1, *grid[axes[-1] + 1 :])
        shapes = {"C2C": (grid, grid), "R2C": (grid, half), "C2R": (half, grid)}[kind]
        views = [
            packed(place, shape, WIDTHS[name, double], order)
            for place, shape, name, order in zip("ab", shapes, NAMES[kind], orders, strict=True)
        ]
        found = plan_many(kind, axes, *(strided(view) for view in views))
        if found is None:
            continue
        plans += 1
        buffers = [context.heap.allocate(view.size * view.itemsize) for view in views]
        source, upload, _ = in_memory(buffers[0], views[0])
        _, _, download = in_memory(buffers[1], views[1])
        source[...] = rng.standard_normal(source.shape)
        if kind != "R2C":
            source += 1j * rng.standard_normal(source.shape).astype(source.real.dtype)
        upload()
        cufft.prepare(kind, double=double, plan=found, stream=0)
        for forward in (True, False) if kind == "C2C" else (kind == "R2C",):
            cufft.run(
                kind,
                *(buffer.block.address for buffer in buffers),
                0,
                double=double,
                plan=found,
                forward=forward,
            )
            got = download()
            sizes = [grid[axis] for axis in axes]
            if kind == "C2C" and forward:
                want = np.fft.fftn(source, axes=axes)
            elif kind == "C2C":
                want = np.fft.ifftn(source, axes=axes, norm="forward")
            elif kind == "R2C":
                want = np.fft.rfftn(source, axes=axes)
            else:
                want = np.fft.irfftn(source, s=sizes, axes=axes, norm="forward")
            error = np.abs(got - want).max() / max(np.abs(want).max(), 1e-30)
            if not error < (1e-13 if double else 3e-6):
                wrong.append((axes, orders, forward, float(error)))
    return wrong, plans


@pytest.mark.parametrize("grid", [(5, 4, 6), (1, 7, 2), (31, 3, 1), (16, 37, 13)])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", ["C2C", "R2C", "C2R"])
def test_plans(gpus, kind, double, grid):
    ((wrong, plans),) = gpus.run(check_plans, kind, double, grid, ranks=1)
    assert plans >= 28
    assert wrong == []


def check_scale(context):
    from shardmath.local.gpu.fft import scale

    device = context.team.device
    device.activate()
    wrong = []
    for source, target, shape, order in [
        ("float16", "float32", (7, 9, 3), (2, 0, 1)),
        ("bfloat16", "float32", (70, 900), (1, 0)),
        ("float32", "float32", (3, 1, 5, 2, 4, 3, 2, 3, 2, 2), tuple(range(10))[::-1]),
        ("float64", "float64", (100_003,), (0,)),
        ("float64", "float64", (0, 3), (0, 1)),
    ]:
        import importlib

        importlib.import_module("ml_dtypes")
        views = [packed("a", shape, source, order), packed("b", shape, target)]
        buffers = [context.heap.allocate(view.size * view.itemsize) for view in views]
        given, upload, _ = in_memory(buffers[0], views[0])
        _, _, download = in_memory(buffers[1], views[1])
        given[...] = np.random.default_rng(5).standard_normal(shape)
        upload()
        scale(
            device,
            *(buffer.block.address for buffer in buffers),
            shape,
            (views[0].strides, views[1].strides),
            0,
            dtypes=(source, target),
            factor=0.375,
        )
        if not np.array_equal(download(), given.astype(target) * np.dtype(target).type(0.375)):
            wrong.append((source, target, shape))
    return wrong


def test_scale(gpus):
    assert gpus.run(check_scale, ranks=1) == [[]]
