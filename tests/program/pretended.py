"""A pretended GPU: programs are lowered, agreed on and launched as on GPUs, and NumPy copies.

Host memory stands for the GPU's: launches happen at once, or when the graph is launched into which
they were captured, and a barrier on a stream is one on the board. What the driver, the notes of
ranks, push, pull and staging do is the package's own.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
from rank_interpreter import turned

from copying import perform
from shardmath.arrays.dtypes import to_numpy
from shardmath.arrays.libraries.numpy import NumPy
from shardmath.context.context import Context
from shardmath.handles import device_array
from shardmath.operators.fft import gpus as fft_gpus
from shardmath.operators.fft import lowering
from shardmath.operators.fft.gpus import TransformProgram
from shardmath.operators.fft.local_steps import LocalFFT, Scale, Turn
from shardmath.program import gpu_performing, gpu_steps, gpus
from shardmath.program.binding import round_into
from shardmath.redistribution import Window

__all__ = ["pretended_gpu"]

NAME = "cuda:0"
BESIDE, CAPTURING = 1, 2  # the lane's own stream, and that on which graphs are captured; 0: user's


class Copies:
    """As BoxCopies."""

    def __init__(self, device, boxes):
        self.boxes = list(boxes)

    def launch(self, stream, sources, targets, *, blocks=0):
        Device.launch(stream, self.copy, tuple(sources), tuple(targets))

    def copy(self, sources, targets):
        windows = {number: Window(address, (), None) for number, address in enumerate(sources)}
        for box in self.boxes:
            perform([box], windows, Window(targets[box.dst], (), None))

    def ready(self, sources, targets):
        sources, targets = tuple(sources), tuple(targets)
        return SimpleNamespace(put=lambda stream: self.launch(stream, sources, targets))


class Team:
    """As symmetric.team.Team."""

    def __init__(self):
        self.device = Device()

    def check(self):
        pass

    check_collectives = check

    def synchronize(self, stream):
        pass


class Device:
    """As cuda.device.Device."""

    name, ordinal, arch, processors = NAME, 0, "pretended", 132
    captured = None  # what is launched while a graph is captured

    @classmethod
    def launch(cls, stream, function, *args, **named):
        run = partial(function, *args, **named)
        if cls.captured is None:
            run()
        else:
            cls.captured.append(run)

    @classmethod
    def graph(cls, launches):
        cls.captured = captured = []
        try:
            launches(CAPTURING)
        finally:
            cls.captured = None
        return SimpleNamespace(launch=lambda stream: [run() for run in captured])

    def activate(self):
        pass

    def synchronize(self):
        pass


class CuFFT:
    """As local.gpu.fft.CuFFT, which prepares what is then done by `transformed`."""

    def prepare(self, kind, *, double, plan, stream):
        pass


class Lane:
    """As operators.lanes.Lane, for one stream."""

    def __init__(self, context, number):
        self.number = number
        self._context, self._buffers = weakref.proxy(context), {}
        self.team, self.version = Team(), 0

    @classmethod
    def numbered(cls, context, number):
        return context.cache(f"lane {number}", lambda: cls(context, number))

    @classmethod
    def of(cls, context, stream):
        return cls.numbered(context, 0)

    @property
    def pushes(self):
        return SimpleNamespace(push_to_all=push_to_all)

    @contextmanager
    def section(self, stream):
        yield SimpleNamespace(captured=False)

    def barrier(self, stream):
        Device.launch(stream, self._context.board.barrier, "lane")

    def buffer(self, name, nbytes):
        held = self._buffers.get(name)
        if held is None or held.block.nbytes < nbytes:
            self.version += 1
            self._buffers[name] = self._context.allocate_shared(nbytes)
        return self._buffers[name]

    def room(self, nbytes):
        held = self._buffers.get("new result") if nbytes else None
        return None if held is None or held.block.nbytes < nbytes else held.block

    def make_room(self, nbytes):
        if nbytes and self.room(nbytes) is None:
            self.buffer("new result", nbytes)

    def has(self, name, nbytes):
        return name in self._buffers and self._buffers[name].block.nbytes >= nbytes

    def shared(self, name, nbytes):
        return self.buffer(name, nbytes).block.address

    def private(self, name, nbytes):
        return self.buffer(name, nbytes).block.address

    def memory(self):
        return {name: buffer.block for name, buffer in self._buffers.items()}

    def stream(self, name):
        return BESIDE

    def event(self, name):
        return 0

    def address(self, name):
        return self._buffers[name].block.address

    def holds(self, memory):
        return all(
            name in self._buffers and self._buffers[name].block is block
            for name, block in memory.items()
        )

    def graph(self, launches):
        return Device.graph(launches)

    def launch(self, graph, copy, stream):
        graph.launch(stream)
        self.copy(copy, stream)

    def copy(self, copy, stream):
        if copy is not None:
            ctypes.memmove(*copy)

    def keep(self, used):
        pass

    def drop(self, *names):
        for name in names:
            self.version += self._buffers.pop(name, None) is not None


class Pool:
    """Memory of arrays, which the next array of that size has when one is dropped, as torch's."""

    def __init__(self):
        self.free = {}

    def maker(self, shape, dtype, order, device=NAME):
        """As Library.maker."""
        native = to_numpy(dtype)
        nbytes = 16 + math.prod(shape) * native.itemsize

        def make():
            free = self.free.setdefault(nbytes, [])
            memory = free.pop() if free else np.empty(nbytes, np.uint8)
            owner = (ctypes.c_char * nbytes).from_buffer(memory)  # one for this array and its views
            weakref.finalize(owner, free.append, memory)
            start = -memory.ctypes.data % 16
            return np.ndarray(shape, native, owner, start, order=order)

        return make


def push_to_all(source, targets, nbytes, stream):
    for target in targets:
        Device.launch(stream, ctypes.memmove, target, source, nbytes)


def fetch(context, found, outboxes, room, stream):
    """As redistribution.delivery.fetch."""

    def get(src, place, nbytes, target):
        data = np.ascontiguousarray(context.read_bytes(src, place, nbytes))
        ctypes.memmove(target, data.ctypes.data, nbytes)

    for each in found:
        where = outboxes[each.src]
        place = replace(where, offset=where.offset + each.offset)
        Device.launch(stream, get, each.src, place, each.nbytes, room + each.at)


def transformed(program, step, memories):
    """As TransformProgram's local transforms, by NumPy."""
    return lambda stream: Device.launch(stream, transform, program, step, memories)


def transform(program, step, memories):
    source, target = (array_at(memories, view) for view in (step.source, step.target))
    if isinstance(step, Scale):
        round_into(source * source.real.dtype.type(step.factor), target)
        return
    if isinstance(step, Turn):
        turned(step, source, target)
        return
    wide = source.astype(np.complex128 if source.dtype.kind == "c" else np.float64)
    if step.kind == "R2C":
        made = np.fft.rfftn(wide, axes=step.axes)
    elif step.kind == "C2R":
        sizes = [target.shape[axis] for axis in step.axes]
        made = np.fft.irfftn(wide, s=sizes, axes=step.axes, norm="forward")
    elif program.forward:
        made = np.fft.fftn(wide, axes=step.axes)
    else:
        made = np.fft.ifftn(wide, axes=step.axes, norm="forward")
    target[...] = made


def array_at(memories, view):
    """The array of a view."""
    dtype = to_numpy(view.dtype)
    if not view.size:
        return np.empty(view.shape, dtype)
    return Window(memories.address(view), view.strides, None).array(view.shape, dtype)


PERFORMERS = TransformProgram.PERFORMERS | dict.fromkeys((LocalFFT, Scale, Turn), transformed)


@contextmanager
def pretended_gpu(context, *, chunks=False):
    """Within, this rank's NumPy arrays are on its GPU, and its context is one of GPUs.

    With `chunks` transforms overlap with deliveries: there is no pretended push stream.
    """
    team = Team()
    plain_spec, pool = NumPy.spec, Pool()
    with ExitStack() as stack:
        for owner, name, stand_in in (
            (context, "team", team),
            (context, "caches", {}),
            (context, "again", {}),
            (gpus, "Lane", Lane),
            (gpu_performing, "stream_of", lambda context, spec, stream: 0),
            (gpu_performing, "beside_captures", nullcontext),
            (fft_gpus, "Lane", Lane),
            (fft_gpus, "Constant", lambda device, array: None),
            (fft_gpus, "CuFFT", SimpleNamespace(of=lambda device: CuFFT())),
            (lowering, "USE_CHUNKS", chunks),
            (TransformProgram, "PERFORMERS", PERFORMERS),
            (gpu_steps, "BoxCopies", Copies),
            (gpu_steps, "call", lambda *_: None),
            (gpu_steps, "fetch", fetch),
            (device_array, "stream_of", lambda context, spec, stream: 0),
            (NumPy, "spec", lambda self, x: replace(plain_spec(self, x), device=NAME)),
            (NumPy, "identity", lambda self, x: (self.spec(x), self.pointer(x))),
            (NumPy, "maker", pool.maker),
        ):
            stack.enter_context(patch.object(owner, name, stand_in))
        assert isinstance(context, Context)
        yield
