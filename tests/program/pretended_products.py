"""Products performed by what performs them on GPUs, where host memory stands for the GPU's.

Of ranks in one process, launches go to queues, one for each stream of each rank, and are performed
when all ranks have put theirs there, in an order in which streams might. Ranks that are processes,
on the pretended GPUs of `pretended`, launch at once. What is launched is `gpu_arithmetic`.
"""

from __future__ import annotations

import random
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import gpu_arithmetic as arithmetic
import numpy as np
from gpu_interpreter import program_of
from pretended import Device, Lane
from rank_interpreter import PERFORM
from streams import schedule

from shardmath.base.integers import up
from shardmath.handles.operand import Exposed
from shardmath.local.epilog import MatmulEpilog
from shardmath.local.gpu import Matrix
from shardmath.operators.matmul.gpu import performing, product_program
from shardmath.operators.matmul.gpu.product_program import ProductProgram
from shardmath.program import gpu_performing, gpu_steps
from shardmath.program.binding import round_into
from shardmath.program.gpu_performing import GPUPerformer
from shardmath.program.gpu_steps import Memories
from shardmath.program.steps import Await, Memory, On, Record, Synchronise
from shardmath.symmetric.heap import Location

__all__ = ["block_at", "perform_programs", "products_at_once"]

SYNCHRONISE = Synchronise(())


@dataclass(frozen=True, eq=False)
class Launched:
    """What is done when its turn has come."""

    run: Any


def block_at(address):
    """A block of the heap which begins there: its address is where peers find it."""
    return SimpleNamespace(address=address, location=Location(0, address), nbytes=1 << 40)


class Rank:
    """As context, lane and device of one rank. `steps` is what has been launched."""

    processors, number = 132, 0

    def __init__(self, rank, everyone, size):
        self.rank, self.everyone, self.size = rank, everyone, size
        self.steps, self.held, self.events = [], {}, {}
        self.team = SimpleNamespace(device=self)
        self.pushes = SimpleNamespace(push_to_all=self.push)

    def put(self, step, stream):
        self.steps.append(On(str(stream), step) if stream else step)

    def launch(self, stream, function, *args, **named):
        self.put(Launched(lambda: function(*args, **named)), stream)

    # -- a lane --

    def buffer(self, name, nbytes):
        if name not in self.held or self.held[name].nbytes < nbytes:
            self.held[name] = arithmetic.room(nbytes)
        return SimpleNamespace(block=block_at(self.address(name)))

    def private(self, name, nbytes):
        return self.buffer(name, nbytes).block.address

    def address(self, name):
        return arithmetic.address_of(self.held[name])

    def stream(self, name):
        return ["", "side", "copies"].index(name)

    def event(self, name):
        return name

    def section(self, stream):
        return nullcontext()

    def barrier(self, stream):
        self.put(SYNCHRONISE, stream)

    def push(self, source, targets, nbytes, stream):
        assert not any(word % 16 for word in (source, nbytes, *targets))
        for target in targets:
            self.launch(stream, arithmetic.move_bytes, target, source, nbytes)

    # -- a context --

    def announce(self, block): ...

    def cache(self, name, make):
        return self

    def peer_address(self, rank, location, nbytes):
        return location.offset

    # -- collectives --

    def all_reduce(self, source, target, size, dtype, how, stream):
        self.add_up(source, 0, target, size, dtype, stream)

    def reduce_scatter(self, source, target, counts, dtype, how, stream):
        first = sum(counts[: self.rank])
        self.add_up(source, first, target, counts[self.rank], dtype, stream)

    def add_up(self, source, first, target, size, dtype, stream):
        def line(address):
            return Matrix(address, 1, size, max(1, size), 1, dtype.name)

        def read():
            parts = [line(each.source + first * dtype.itemsize) for each in self.everyone]
            self.sum = arithmetic.room(size * dtype.itemsize)
            arithmetic.add_up(line(self.sum.ctypes.data), parts)

        self.source = source
        self.put(SYNCHRONISE, stream)
        self.launch(stream, read)
        self.put(SYNCHRONISE, stream)
        self.launch(
            stream, lambda: arithmetic.move_bytes(target, self.sum.ctypes.data, self.sum.nbytes)
        )


class Copies:
    """As BoxCopies."""

    def __init__(self, device, boxes):
        self.device, self.boxes = device, list(boxes)

    def ready(self, sources, targets):
        places, (target,) = dict(enumerate(sources)), targets
        copy = arithmetic.copy_between, self.boxes, places, target
        return SimpleNamespace(put=lambda stream: self.device.launch(stream, *copy))


class Panels:
    """As PanelGemm where copy engines do not suit; `unsupported` where it is not asked at all."""

    unsupported, memories = "", {"panel a": Memory(1 << 12)}

    def __init__(self, *_): ...

    def run(self, places, stream):
        return False


def multiply(device, a, b, d, *, stream, extras, bias, aux, conj_a, conj_b, **how):
    assert how.pop("workspace") and not how.pop("processors")
    epilog = MatmulEpilog.DEFAULT if extras.epilog == 1 else MatmulEpilog(extras.epilog)
    of_epilog = {
        "epilog": epilog,
        "bias": Matrix(bias, d.rows, 1, 1, 1, d.dtype) if bias else None,
        "aux": Matrix(aux, up(d.rows, 8), d.columns, 1, extras.aux_leading, d.dtype),
    }
    how = {name: how[name] for name in ("alpha", "beta", "c")}
    device.launch(stream, arithmetic.multiply, a, b, d, conj_a, conj_b, **how, **of_epilog)


def multiply_scaled(device, a, b, d, *, scale_a, scale_b, stream, **how):
    assert how.pop("workspace")
    how = {name: how.get(name) for name in ("alpha", "beta", "c", "quantized")}
    device.launch(stream, arithmetic.multiply_scaled, a, b, d, (scale_a, scale_b), **how)


def combine(device, stream, d, parts, *, bias=None, extra="", **how):
    if d.size:
        dtype = extra or d.dtype
        bias = None if bias is None else Matrix(bias[0], d.rows, 1, bias[1], 1, dtype)
        device.launch(stream, arithmetic.add_up, d, parts, bias=bias, extra=extra, **how)


def copy(device, stream, target, source):
    assert target.dtype == source.dtype
    device.launch(stream, lambda: round_into(arithmetic.view(source), arithmetic.view(target)))


def launches(function):
    """A function of `local.gpu` that launches one of `gpu_arithmetic`."""

    def launch(device, stream, *args, **named):
        device.launch(stream, function, *args, **named)

    return launch


def call_of(rank):
    """As cuda.driver.call."""

    def clear(address, pitch, width, lines):
        held = arithmetic.view(Matrix(address, lines, width, pitch, 1, "uint8"))
        held[...] = 0

    def call(name, *args):
        if name == "cuEventRecord":
            rank.put(Record(args[0]), args[1])
        elif name == "cuStreamWaitEvent":
            rank.put(Await(args[1]), args[0])
        elif name == "cuMemsetD8Async":
            address, value, nbytes, stream = args
            assert value == 0
            rank.launch(stream, clear, address, nbytes, nbytes, 1)
        else:
            assert name == "cuMemsetD2D8Async"
            address, pitch, value, width, lines, stream = args
            assert value == 0
            rank.launch(stream, clear, address, pitch, width, lines)

    return call


def fetch(rank, found, outboxes, target, stream):
    for each in found:
        source = outboxes[each.src].offset + each.offset
        rank.launch(stream, arithmetic.move_bytes, target + each.at, source, each.nbytes)


def perform_programs(rank_plans, operands, addition_order="", *, seed=0, within=False):
    """See `interpret_products`."""
    ranks: list[Rank] = []
    ranks += [Rank(rank_plan.rank, ranks, len(rank_plans)) for rank_plan in rank_plans]
    panels, made, every, places = Panels if seed % 2 else REFUSED, [], [], []
    with (
        by_numpy(panels, within),
        patch.multiple(gpu_steps, BoxCopies=Copies, fetch=fetch),
    ):
        for rank, plan, given in zip(ranks, rank_plans, operands, strict=True):
            program = program_of(plan, given, addition_order)
            made.append(ProductProgram(rank, rank, program, plan))
            own = {
                name: x.address - x.address % ProductProgram.alignment
                for name, x in given.arrays.items()
            }
            for name, memory in made[-1].memories.items():
                own[name] = rank.private(name, memory.nbytes)
            made[-1].prepare(own, 0, (0, 0))
            performer = SimpleNamespace(_context=rank)
            texts = [
                GPUPerformer._shared_place(performer, rank, made[-1], given, name)
                for name in program.shared
            ]
            places.append([Exposed.unpack(text) if text else None for text in texts])
            every.append(own)
        for rank, each, own, given in zip(ranks, made, every, operands, strict=True):
            with (
                patch.object(product_program, "call", call_of(rank)),
                patch.object(gpu_steps, "call", call_of(rank)),
                patch.object(product_program, "collectives_of", lambda context, lane: lane),
            ):
                each.bind(Memories(own, places, 0, given.numbers))(0)
    PERFORM[Launched] = lambda step, rank: step.run()
    schedule(ranks, random.Random(seed), PERFORM)


REFUSED = type("Refused", (Panels,), {"unsupported": "not here"})


@contextmanager
def by_numpy(panels, within):
    """Within, what products launch is `gpu_arithmetic`."""
    with ExitStack() as stack:
        for owner, name, stand_in in (
            (product_program, "engine_copies", lambda boxes: None),
            (product_program, "multiply", multiply),
            (product_program, "has_algorithm", lambda *_, **__: within),
            (product_program, "combine", combine),
            (product_program, "copy", copy),
            (product_program, "row_sums", launches(arithmetic.sum_rows)),
            (product_program, "PanelGemm", panels),
            (product_program, "WORKSPACE", 1),
            (product_program.scaled, "multiply", multiply_scaled),
            (product_program.float8, "dequantize", launches(arithmetic.dequantize)),
            (product_program.float8, "quantize", launches(arithmetic.quantize)),
            (product_program.float8, "amax", launches(arithmetic.greatest)),
        ):
            stack.enter_context(patch.object(owner, name, stand_in))
        yield


class Sums:
    """As DeviceCollectives of ranks that are processes, by way of the hosts."""

    def __init__(self, context):
        self.context = context

    def all_reduce(self, source, target, size, dtype, how, stream):
        Device.launch(stream, self.add_up, source, (size,), 0, target, dtype)

    def reduce_scatter(self, source, target, counts, dtype, how, stream):
        Device.launch(stream, self.add_up, source, counts, self.context.rank, target, dtype)

    def add_up(self, source, counts, part, target, dtype):
        def line(address, size):
            return Matrix(address, 1, size, max(1, size), 1, dtype.name)

        own = arithmetic.view(line(source, sum(counts))).tobytes()
        held = [np.frombuffer(x, np.uint8).copy() for x in self.context.gather("", lambda: own)]
        first = sum(counts[:part]) * dtype.itemsize
        parts = [line(x.ctypes.data + first, counts[part]) for x in held]
        arithmetic.add_up(line(target, counts[part]), parts)


@contextmanager
def products_at_once():
    """Within, products of a `pretended_gpu` are performed when they are launched."""
    events = SimpleNamespace(put=lambda step, stream: None, launch=Device.launch)
    with (
        by_numpy(REFUSED, within=False),
        patch.object(performing, "Lane", Lane),
        patch.object(performing, "bindings", lambda: None),
        patch.object(product_program, "call", call_of(events)),
        patch.object(gpu_performing, "call", call_of(events)),
        patch.object(product_program, "collectives_of", lambda context, lane: Sums(context)),
        patch.object(performing, "collectives_of", lambda context, lane: None),
    ):
        yield
