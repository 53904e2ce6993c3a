"""Collectives on addresses against NumPy, rank after rank."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest

from shardmath.arrays import dtypes
from shardmath.collectives.cells import DeviceCollectives, LaunchConfig, choose_all_reduce
from shardmath.collectives.pushes import chunked
from shardmath.cuda.driver import call
from shardmath.errors import OpTimeout, RankFailure
from shardmath.local.reduction import Reduction, reduce_local
from shardmath.symmetric.heap import Location

DTYPES = [
    "bool",
    "int8",
    "uint8",
    "int16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]
ON_ALL_SIZES = ("int8", "bfloat16", "float32", "complex128")
COUNTS = (1, 7, 8, 9, 511, 1025, 70001)
LARGE = (1 << 20, (3 << 20) + 17)


class Memory:
    """Device memory of an array: a sentinel lies behind it, and `shift` elements before it."""

    def __init__(self, values, shift=0):
        self.like, self.shift = values, shift
        self.nbytes = values.nbytes + 64
        self.base = int(call("cuMemAlloc", self.nbytes + shift * values.itemsize + 16))
        self.address = self.base + shift * values.itemsize
        whole = np.full(self.nbytes, 0xA5, np.uint8)
        whole[: values.nbytes] = values.reshape(-1).view(np.uint8)
        call("cuMemcpyHtoD", self.address, whole.ctypes.data, self.nbytes)

    def take(self):
        whole = np.empty(self.nbytes, np.uint8)
        call("cuMemcpyDtoH", whole.ctypes.data, self.address, self.nbytes)
        call("cuMemFree", self.base)
        assert (whole[self.like.nbytes :] == 0xA5).all(), "bytes behind the array were written"
        return whole[: self.like.nbytes].view(self.like.dtype)


def values(dtype, count, rank):
    rng = np.random.default_rng([count, rank])
    kind = dtypes.to_numpy(dtype)
    name = dtypes.of(dtype)
    if name.kind in "iub":
        raw = rng.integers(0, 256, count * name.itemsize, np.uint8)
        return raw.view(kind) if name.kind != "b" else (raw & 1).view(bool)
    x = rng.standard_normal(count) if name.kind == "f" else None
    if x is None:
        x = rng.standard_normal(count) + 1j * rng.standard_normal(count)
    x = x.astype(kind)
    if count > 8:
        x[rank % count] = np.nan
        x[3] = np.inf if name.kind == "f" else 1  # NumPy divides infinite complex numbers to NaN
        x[4] = -0.0
    return x


def expected(op, dtype, parts):
    reduction = Reduction.of(op, dtype)
    out = np.empty((1, parts[0].size), dtypes.to_numpy(reduction.result))
    with np.errstate(all="ignore"):
        reduce_local(reduction, [part[None] for part in parts], [out])
    return out[0]


def same(found, wanted):
    """Equal bits; a NaN is any NaN, and complex products may round differently."""
    if found.dtype == bool:
        return bool((found == wanted).all())
    if found.dtype.kind == "c":
        return np.allclose(found, wanted, rtol=1e-5, equal_nan=True)
    wide = np.float64 if wanted.dtype.kind in "fV" else wanted.dtype
    nan = np.isnan(wanted.astype(wide))
    if not (np.isnan(found.astype(wide)) == nan).all():
        return False
    bits = f"u{found.itemsize}"
    return bool((found.view(bits)[~nan] == wanted.view(bits)[~nan]).all())


def operations(dtype):
    kind = dtypes.of(dtype).kind
    named = ["sum", "product"] + (["min", "max"] if kind != "c" else [])
    return named + (["mean"] if kind in "fc" else [])


def check_all_reduce(context, names, counts, ops):
    moves = DeviceCollectives.of(context)
    wrong = []
    for dtype in names:
        for op in [op for op in operations(dtype) if op in ops]:
            for count in counts:
                parts = [values(dtype, count, rank) for rank in range(context.size)]
                wanted = expected(op, dtype, parts)
                nbytes = wanted.nbytes
                plans = [choose_all_reduce(nbytes, context.size), LaunchConfig("two_shot", 3, 64)]
                for shift, launch in enumerate((*plans, LaunchConfig("one_shot", 2, 96))):
                    if nbytes > 1 << 20 and shift == 2:
                        continue
                    source, target = (
                        Memory(parts[context.rank], shift),
                        Memory(np.zeros_like(wanted), shift),
                    )
                    moves.all_reduce(
                        source.address,
                        target.address,
                        count,
                        dtypes.of(dtype),
                        op,
                        0,
                        launch=launch,
                    )
                    context.team.synchronize(0)
                    if not same(target.take(), wanted):
                        wrong.append((dtype, op, count, launch.function))
                    source.take()
    context.barrier()
    return wrong


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_reduce(gpus, size, dtype):
    if dtype not in ON_ALL_SIZES and size not in (3, gpus.size):
        pytest.skip("each type takes seconds to compile for a number of ranks")
    ops = ("sum", "max", "mean") if dtype != "float32" else operations(dtype)
    assert gpus.run(check_all_reduce, [dtype], COUNTS, ops, ranks=size) == [[]] * size


@pytest.mark.parametrize("dtype", ["bfloat16", "int32"])
def test_all_reduce_of_many(gpus, size, dtype):
    assert gpus.run(check_all_reduce, [dtype], LARGE, ["sum"], ranks=size) == [[]] * size


def check_repeats(context, rounds):
    """Calls follow each other without a pause, with all kinds of kernels in between."""
    moves, team = DeviceCollectives.of(context), context.team
    sizes = [(7919 * (i + 1)) % 40000 + 1 for i in range(rounds)]
    bf16 = dtypes.of("float32")
    wrong, unrounded = [], []
    for number, count in enumerate(sizes):
        parts = [values("float32", count, rank + number) for rank in range(context.size)]
        wanted = expected("sum", "float32", parts)
        source, target = Memory(parts[context.rank]), Memory(np.zeros_like(wanted))
        everyone = Memory(np.zeros(context.size * count, np.float32))
        unrounded.append((source, target, everyone, wanted, np.concatenate(parts)))
    for (source, target, everyone, _, _), count in zip(unrounded, sizes, strict=True):
        function = ("one_shot", "two_shot")[count % 2]
        launch = LaunchConfig(function, 1 + count % 40, 32 * (1 + count % 16))
        moves.all_reduce(source.address, target.address, count, bf16, "sum", 0, launch=launch)
        table = [[count] * context.size] * context.size
        moves.move(source.address, everyone.address, table, 4, 0, whole=True)
    team.synchronize(0)
    for number, (source, target, everyone, wanted, gathered) in enumerate(unrounded):
        if not same(target.take(), wanted):
            wrong.append((number, "all_reduce"))
        if not same(everyone.take(), gathered):
            wrong.append((number, "all_gather"))
        source.take()
    context.barrier()
    return wrong


def test_calls_that_follow_each_other(gpus, size):
    assert gpus.run(check_repeats, 40, ranks=size) == [[]] * size


def check_moves(context):
    moves, rank, size = DeviceCollectives.of(context), context.rank, context.size
    wrong = []

    def tell(name, target, wanted):
        context.team.synchronize(0)
        if not (target.take() == wanted).all():
            wrong.append(name)

    # The last is more than fits in the slots of all lanes.
    for unit in (0, 1, 13, 8000, 100003, 700001, 20_000_003 // size):
        for shift in (0, 5):
            data = [
                np.random.default_rng([unit, r]).integers(0, 256, unit * (r + 1) * size, np.uint8)
                for r in range(size)
            ]
            # all_gather: rank r has unit * r bytes
            sizes = [unit * r for r in range(size)]
            source = Memory(data[rank], shift)
            wanted = np.concatenate([data[r][: sizes[r]] for r in range(size)])
            target = Memory(np.zeros_like(wanted), shift)
            table = [[nbytes] * size for nbytes in sizes]
            moves.move(source.address, target.address, table, 1, 0, whole=True)
            tell(("all_gather", unit), target, wanted)
            # all_to_all: r sends unit * (r + 1) bytes to rank p, one less for odd p
            table = [[max(0, unit * (r + 1) - p % 2) for p in range(size)] for r in range(size)]
            wanted = np.concatenate(
                [data[r][sum(table[r][:rank]) :][: table[r][rank]] for r in range(size)]
            )
            target = Memory(np.zeros_like(wanted), shift)
            moves.move(source.address, target.address, table, 1, 0)
            tell(("all_to_all", unit), target, wanted)
            for root in {0, size - 1}:
                wanted = data[root][:unit]
                target = Memory(np.zeros_like(wanted), shift)
                table = [[int(r == root)] * size for r in range(size)]
                moves.move(source.address, target.address, table, unit, 0, whole=True)
                tell(("broadcast", unit, root), target, wanted)
            source.take()
    context.barrier()
    return wrong


def test_moves(gpus, size):
    assert gpus.run(check_moves, ranks=size) == [[]] * size


def check_reduce_scatter(context):
    moves, rank, size = DeviceCollectives.of(context), context.rank, context.size
    wrong = []
    for dtype in ("bfloat16", "float64", "int32", "complex128"):
        for unit in (0, 1, 9, 5000):
            counts = [unit * r + (r == 0) for r in range(size)]
            parts = [values(dtype, sum(counts), r) for r in range(size)]
            start = sum(counts[:rank])
            wanted = expected("sum", dtype, parts)[start : start + counts[rank]]
            for shift in (0, 1):
                source, target = Memory(parts[rank], shift), Memory(np.zeros_like(wanted), shift)
                moves.reduce_scatter(
                    source.address, target.address, counts, dtypes.of(dtype), "sum", 0
                )
                context.team.synchronize(0)
                if not same(target.take(), wanted):
                    wrong.append((dtype, unit, shift))
                source.take()
    context.barrier()
    return wrong


def test_reduce_scatter_of_uneven_parts(gpus, size):
    assert gpus.run(check_reduce_scatter, ranks=size) == [[]] * size


def place_of(context, buffer):
    where = buffer.block.location
    return context.agree("t", lambda: (where.segment, where.offset), lambda found: found)


def check_pushes(context):
    moves, rank, size = DeviceCollectives.of(context), context.rank, context.size
    wrong = []
    for unit in (16, 16384, 16400, (1 << 20) + 48):
        nbytes = unit * size
        buffer = context.heap.allocate(2 * nbytes + 64)
        base = buffer.block.address
        whole = np.full(2 * nbytes + 64, 0xA5, np.uint8)
        call("cuMemcpyHtoD", base, whole.ctypes.data, whole.nbytes)
        context.announce(buffer.block)
        found = place_of(context, buffer)

        bases = [
            context.peer_address(r, Location(*place), 2 * nbytes + 64)
            for r, place in enumerate(found)
        ]
        data = [
            np.random.default_rng([unit, r]).integers(0, 256, nbytes, np.uint8) for r in range(size)
        ]
        source = Memory(data[rank])
        moves.barrier(0)
        moves.push_to_all(source.address, [b + rank * unit for b in bases], unit, 0)
        moves.push_to_each(
            [source.address + p * unit for p in range(size)],
            [b + nbytes + rank * unit for b in bases],
            [unit - 16 * (p % 2) for p in range(size)],
            0,
        )
        moves.barrier(0)
        context.team.synchronize(0)
        call("cuMemcpyDtoH", whole.ctypes.data, base, whole.nbytes)
        for r in range(size):
            if not (whole[r * unit :][:unit] == data[r][:unit]).all():
                wrong.append(("all", unit, r))
            sent = unit - 16 * (rank % 2)
            if not (whole[nbytes + r * unit :][:sent] == data[r][rank * unit :][:sent]).all():
                wrong.append(("each", unit, r))
            if not (whole[nbytes + r * unit + sent :][: unit - sent] == 0xA5).all():
                wrong.append(("beyond", unit, r))
        source.take()
        context.barrier()
    return wrong


def test_pushes_into_symmetric_memory(gpus, size):
    assert gpus.run(check_pushes, ranks=size) == [[]] * size


def check_into(context, names, counts, most, by_engine=1 << 30):
    """all_reduce_into: slices of at most `most` bytes, sources that are shifted, in place too.

    Slices of `by_engine` bytes are moved by a copy engine.
    """
    moves, rank = DeviceCollectives.of(context), context.rank
    wrong = []
    pushes = "shardmath.collectives.pushes"
    with (
        patch(f"{pushes}._SLICE_BYTES", most),
        patch(f"{pushes}._ENGINE_SLICE_BYTES", by_engine),
    ):
        for dtype in names:
            for count in counts:
                parts = [values(dtype, count, r) for r in range(context.size)]
                wanted = expected("sum", dtype, parts)
                nbytes = wanted.nbytes
                buffer = context.heap.allocate(nbytes + 64)
                base, whole = buffer.block.address, np.full(nbytes + 64, 0xA5, np.uint8)
                context.announce(buffer.block)
                targets = [
                    context.peer_address(r, Location(*place), nbytes + 64)
                    for r, place in enumerate(place_of(context, buffer))
                ]
                of = dtypes.of(dtype)
                for shift in (0, 1, None):  # None: in place
                    call("cuMemcpyHtoD", base, whole.ctypes.data, whole.nbytes)
                    source = Memory(parts[rank], shift or 0)
                    if shift is None:
                        call("cuMemcpyDtoD", base, source.address, nbytes)
                    at = base if shift is None else source.address
                    context.barrier()
                    moves.all_reduce_into(at, targets, count, of, "sum", 0)
                    context.team.synchronize(0)
                    found = np.empty(nbytes + 64, np.uint8)
                    call("cuMemcpyDtoH", found.ctypes.data, base, found.nbytes)
                    if not same(found[:nbytes].view(wanted.dtype), wanted):
                        wrong.append((dtype, count, shift))
                    if not (found[nbytes:] == 0xA5).all():
                        wrong.append((dtype, count, shift, "beyond"))
                    source.take()
                context.barrier()
    return wrong


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "complex128"])
def test_all_reduce_into_symmetric_memory(gpus, size, dtype):
    assert gpus.run(check_into, [dtype], COUNTS, 4096, ranks=size) == [[]] * size


@pytest.mark.parametrize("by_engine", [1 << 20, 1 << 30])
def test_all_reduce_of_many_into_symmetric_memory(gpus, size, by_engine):
    counts, most = (9 * (1 << 20) + 8, 9 * (1 << 20) + 3), 4 << 20
    assert gpus.run(check_into, ["float32"], counts, most, by_engine, ranks=size) == [[]] * size


@pytest.mark.parametrize(
    ("nbytes", "size", "most"),
    [(1, 1, 16), (1, 8, 16), (100, 3, 16), (4096, 2, 4096), (4097, 3, 1024), (1 << 20, 7, 16384)],
)
def test_slices_cover_the_array(nbytes, size, most):
    chunks = chunked(nbytes, size, most)
    at = 0
    for part in [part for slices in chunks for part in slices]:
        assert part.start == at and 0 <= part.nbytes <= most
        assert part.nbytes == 0 or part.start % 16 == 0
        at += part.nbytes
    assert at == nbytes and {len(slices) for slices in chunks} == {size}
    assert all(part.nbytes <= chunks[0][0].nbytes for slices in chunks for part in slices)


@pytest.mark.parametrize(
    ("nbytes", "size", "wanted"),
    [
        (1, 8, LaunchConfig("one_shot", 1, 128)),
        (2048, 8, LaunchConfig("one_shot", 1, 128)),
        (16 << 10, 8, LaunchConfig("one_shot", 8, 128)),
        (96 << 10, 8, LaunchConfig("one_shot", 48, 128)),
        (128 << 10, 8, LaunchConfig("two_shot", 8, 128)),
        (1 << 20, 8, LaunchConfig("two_shot", 64, 128)),
        (1 << 20, 2, LaunchConfig("one_shot", 128, 512)),
        (256 << 20, 8, LaunchConfig("two_shot", 132, 512)),
        (256 << 20, 1, LaunchConfig("one_shot", 132, 512)),
    ],
)
def test_the_choice_of_a_kernel(nbytes, size, wanted):
    assert choose_all_reduce(nbytes, size) == wanted


def check_late(context):
    """The last rank does not come: the others name it, and their collectives are at an end."""
    group = context.split(0)
    team, last = group.team, group.size - 1
    team.timeout = 0.3  # before the collectives are made, which keep it
    moves = DeviceCollectives.of(group)
    told = []
    for function in ("one_shot", "two_shot"):
        target = Memory(np.zeros(100, np.float32))
        if group.rank != last:
            try:
                moves.all_reduce(
                    target.address,
                    target.address,
                    100,
                    dtypes.of("float32"),
                    "sum",
                    0,
                    launch=LaunchConfig(function, 1, 32),
                )
                team.synchronize(0)
            except OpTimeout as error:
                told.append(("late", error.ranks == (last,)))
            except RankFailure as error:
                told.append(("ended", "given up" in str(error)))
        context.barrier()
    team.barrier(0, timeout=20)  # signals are not
    team.synchronize(0)
    context.barrier()
    return told


def test_a_collective_that_a_rank_does_not_join(gpus, size):
    told = [("late", True), ("ended", True)]
    if size > 1:
        assert gpus.run(check_late, ranks=size) == [told] * (size - 1) + [[]]
