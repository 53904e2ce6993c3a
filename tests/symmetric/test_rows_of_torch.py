"""`torch.ops.symm_mem.all_to_all_vdev`, `_2d` and `_2d_offset` on cores, beside one process."""

import itertools
import random
import struct
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch_operators import operators

from mortal import on_ranks
from shardmath import symmetric_memory as symm_mem
from shardmath.base.lru_cache import LRUCache
from shardmath.collectives import experts
from shardmath.cuda.kernel import ReadyLaunch
from shardmath.errors import CollectiveMismatch
from shardmath.symmetric_operators import rows

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.complex128, torch.int64, torch.int8, torch.uint8, torch.uint16, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


def rows_of(rank, count, shape, dtype):
    """Rows with numbers of their own, as far as the type has them."""
    whole = torch.arange(count * torch.Size(shape).numel()).reshape(count, *shape)
    return ((whole + 31 * rank) % 120).to(dtype)


def same(x, y):
    """Whether two tensors have the same bits: float8 has no comparison."""
    return x.shape == y.shape and torch.equal(
        x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)
    )


def to_experts(inputs, splits, rank, align):
    """What comes to the experts of `rank`: rows by chunk, counts, and offsets, expert-major.

    `inputs` and `splits` are those of all ranks, whose chunks lie rank-major.
    """
    size, experts = len(inputs), splits.shape[1] // len(inputs)
    parts = [
        x.split([*row.tolist(), len(x) - int(row.sum())])
        for x, row in zip(inputs, splits, strict=True)
    ]
    chunks, offsets, start = [], [], 0
    for expert in range(experts):
        first = start
        for src in range(size):
            chunk = parts[src][rank * experts + expert]
            chunks.append(chunk)
            offsets.append(start)
            start += len(chunk)
        while start == first or (start - first) % align:
            start += 1
    return chunks, [len(chunk) for chunk in chunks], offsets


def tables(size, experts):
    """Counts of all ranks: uneven ones, none for some, and none at all."""
    draw = random.Random(size)
    for choices in (range(6), (0, 0, 9), (0,)):
        yield torch.tensor(
            [[draw.choice(choices) for _ in range(size * experts)] for _ in range(size)]
        )


def there_and_back(ops, context, experts, shape, dtype):
    """Rows to experts, from where they lie then back, with gaps between them."""
    rank, size = context.rank, context.size
    for table, align in itertools.product(tables(size, experts), (None, 4)):
        inputs = [rows_of(n, int(table[n].sum()) + n, shape, dtype) for n in range(size)]
        chunks, counts, offsets = to_experts(inputs, table, rank, align or 1)
        room = offsets[-1] + counts[-1] + 2
        out, told = rows_of(99, room, shape, dtype), torch.full((2, size * experts), -1)
        wanted = out.clone()
        for chunk, start in zip(chunks, offsets, strict=True):
            wanted[start : start + len(chunk)] = chunk
        ops.all_to_all_vdev_2d(inputs[rank], out, table[rank], told, "g", align)
        assert told.tolist() == [counts, offsets]
        assert same(out, wanted)
        back = rows_of(98, len(inputs[rank]), shape, dtype)
        wanted, sent = back.clone(), int(table[rank].sum())
        wanted[:sent] = inputs[rank][:sent]
        returned = torch.full_like(told, -1)
        ops.all_to_all_vdev_2d_offset(out, back, told, returned, "g")
        before = (table[rank].cumsum(0) - table[rank]).tolist()
        assert returned.tolist() == [table[rank].tolist(), before]
        assert same(back, wanted)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_rows_to_experts_and_back(size):
    def body(context):
        ops = operators(context)
        for count, shape in [(1, ()), (3, (2, 2)), (2, (0,))]:
            there_and_back(ops, context, count, shape, torch.float32)

    on_ranks(size, body)


def test_all_types():
    def body(context):
        ops = operators(context)
        for dtype in DTYPES:
            there_and_back(ops, context, 2, (3,), dtype)

    on_ranks(2, body)


def test_rows_that_lie_anywhere_come_back_by_rank():
    """Chunks in any order, with gaps, from a strided view, into another."""

    def body(context):
        ops, rank, size, experts = operators(context), context.rank, context.size, 2
        table = torch.tensor([[2, 0, 3, 1], [1, 4, 0, 2]])
        starts = torch.tensor([[9, 0, 4, 2], [3, 6, 0, 11]])
        xs = [rows_of(n, 13, (6,), torch.float64)[:, ::2] for n in range(size)]
        told, out = torch.full((2, 4), -1), torch.zeros(9, 6, dtype=torch.float64)[:, ::2]
        given = torch.stack([table[rank], starts[rank]])
        ops.all_to_all_vdev_2d_offset(xs[rank], out, given, told, "g")
        chunks = [
            xs[src][starts[src][n] :][: table[src][n]]
            for src in range(size)
            for n in (e * size + rank for e in range(experts))
        ]
        wanted = torch.cat(chunks)
        assert torch.equal(out[: len(wanted)], wanted) and not out[len(wanted) :].any()
        assert told[0].tolist() == [len(chunk) for chunk in chunks]

    on_ranks(2, body)


def test_rows_to_ranks():
    table = torch.tensor([[2, 0, 1], [0, 0, 0], [3, 1, 4]])

    def body(context):
        ops, rank = operators(context), context.rank
        x, out = rows_of(rank, 9, (2,), torch.float64), torch.full((7, 2), -1.0).double()
        told = torch.full((2, 3), -1)
        ops.all_to_all_vdev(x, out, table[rank], told, "g")
        parts = [rows_of(n, int(table[n].sum()), (2,), torch.float64) for n in range(3)]
        came = torch.cat([part.split(table[n].tolist())[rank] for n, part in enumerate(parts)])
        assert torch.equal(out[: len(came)], came) and (out[len(came) :] == -1).all()
        counts = table[:, rank]
        assert torch.equal(told, torch.stack([counts, counts.cumsum(0) - counts]))

    on_ranks(3, body)


def test_mistakes_are_errors_of_all_ranks():
    def body(context):
        ops, last = operators(context), context.rank == context.size - 1
        x, out, even = torch.ones(8, 2), torch.zeros(8, 2), torch.tensor([2, 2, 2, 2])
        told, both = torch.zeros(2, 4, dtype=torch.int64), torch.stack([even, 2 * torch.arange(4)])
        there, back = ops.all_to_all_vdev_2d, ops.all_to_all_vdev_2d_offset
        given = {"x": x, "out": out, "splits": even, "told": told, "align": 1}
        for changed, message in [
            ({"out": out[:7]}, "rank 1: 8 rows come, and out has room for 7"),
            ({"splits": torch.tensor([2, 2, 3, 2])}, "rank 1 sends rows 7 to 9 of an input of 8"),
            ({"splits": torch.tensor([2, 2, -1, 2])}, "rank 1: -1 is no count of rows"),
            ({"splits": even[:3]}, "3 counts are no multiple of 2 ranks"),
            ({"splits": even.float()}, "counts and offsets are integers"),
            ({"told": told[:, :3]}, "rank 1: expected in_splits of 4 counts"),
            ({"align": 0}, "major_align is 1 or more, not 0"),
            ({"out": out.double()}, "rank 1: out has rows of"),
            ({"out": out[:, :1]}, "rank 1: out has rows of"),
        ]:
            with pytest.raises(ValueError, match=message):
                x, o, s, t, a = (given | changed if last else given).values()
                there(x, o, s, t, "g", a)
        for changed, what in [
            ({"align": 2}, "the exchange"),
            ({"x": x.half(), "out": out.half()}, "the rows of input"),
        ]:
            with pytest.raises(CollectiveMismatch, match=what):
                x, o, s, t, a = (given | changed if last else given).values()
                there(x, o, s, t, "g", a)
        for starts, message in [
            ([0, 2, 4, 7], "rank 1 sends rows 7 to 9 of an input of 8"),
            ([-1, 2, 4, 6], "rank 1 sends rows -1 to 1 of an input of 8"),
        ]:
            wrong = torch.stack([even, torch.tensor(starts)])
            with pytest.raises(ValueError, match=message):
                back(given["x"], out, wrong if last else both, told, "g")
        with pytest.raises(ValueError, match="in_splits_offsets has two rows"):
            back(given["x"], out, even if last else both, told, "g")
        assert not out.any() and not told.any()
        back(given["x"], out, both, told, "g")
        assert out.all()

    on_ranks(2, body)


class Kernels(experts.Experts):
    """Exchanges of a rank without a GPU: `put` has the arguments of all launches, by part."""

    def __init__(self, context):
        self.put, self.calls, self._context = [], LRUCache(9), context
        self._capacity, self._tables = 16, [1, 2]
        device = SimpleNamespace(ordinal=-1, processors=1, context_address=1)
        team = SimpleNamespace(rank=context.rank, size=context.size, device=device)
        team.packed, team.require_usable = bytes, lambda: None
        team.kernel = lambda *_: SimpleNamespace(
            ready=lambda blocks, threads, argument: ReadyLaunch(
                0, None, argument, (blocks, threads)
            )
        )
        order = SimpleNamespace(continues=lambda _: True, put=self._launch)
        self._collectives = SimpleNamespace(team=team, order=order)

    def _launch(self, ready, stream):
        words = struct.unpack("=2I16Q", ready.parts[3])
        self.put.append((words[1:9], words[9:13], list(words[13:15])))
        self.last_tables = words[15:17]


def test_what_kernels_are_told(monkeypatch):
    """Of the ways of GPUs, on memory of the host: hosts meet where a call is new, and else not."""

    def body(context):
        kernels = Kernels(context)
        monkeypatch.setattr(experts.Experts, "of", lambda _: kernels)
        monkeypatch.setattr(experts, "libraries", lambda: {"torch": streams})
        streams = SimpleNamespace(stream=lambda _: 0)
        rank, size = context.rank, context.size
        x, told = torch.ones(8, 3), torch.zeros(2, 4, dtype=torch.int64)
        splits, both = torch.full((4,), 2), torch.full((2, 4), 2)
        out = symm_mem.empty(8 + rank, 3, dtype=torch.float32, device="cpu")

        def call(x=x, splits=splits, align=2, combines=False, told=told, experts=2):
            make = partial(rows.Shuffle, "there", size, experts, combines, align)
            given = x, out, splits, told, combines
            rows._exchange_on_gpus(context, ("there", align), make, *given)

        call()
        others = x.clone() if rank == 0 else x
        if rank == 0:  # alone, and with another tensor of the same kind
            call(others)
        context.barrier()
        call(align=1)
        call(splits=both, align=0, combines=True)
        call(splits=both.repeat(1, 2)[:, :4], align=0, combines=True)
        targets = symm_mem.rendezvous(out).array_ptrs
        assert targets[rank] == out.data_ptr()
        sent = [(x, splits, 2), (others, splits, 2), (x, splits, 1), (x, both, 0), (x, None, 0)]
        if rank == 1:
            del sent[1]
        tags = set()
        for (words, addresses, into), (rows_sent, counts, align) in zip(
            kernels.put, sent, strict=True
        ):
            combines, tag, *sizes = words
            tags.add(tag)
            assert (combines, sizes) == (align == 0, [12, 8, 8 + rank, 2, align, 4 + 16])
            assert into == targets and addresses[2:] == (told.data_ptr(), rows_sent.data_ptr())
            if counts is not None:  # else those of a copy
                assert addresses[0] == counts.data_ptr()
            assert addresses[1] == (addresses[0] + 8 * 4 if align == 0 else 0)
        assert len(tags) == 3
        for wrong, message in [
            (lambda: call(x[:, :2]), "contiguous"),
            (lambda: call(torch.ones(3, 8).T), "contiguous"),
            (lambda: call(splits=splits.int()), "int64"),
            (lambda: call(splits=splits[:2]), "expected in_splits of 4 counts"),
            (lambda: call(x.double()), "out has rows of"),
        ]:
            with pytest.raises(ValueError, match=message):
                wrong()
        assert len(kernels.put) == len(sent) and kernels.last_tables == (1, 2)
        monkeypatch.setattr(experts, "kernel_memory", lambda *_: [3, 4])
        call(splits=torch.zeros(18, dtype=torch.int64), told=torch.zeros(2, 18).long(), experts=9)
        assert len(kernels.calls) == 1  # others would use the smaller tables
        call(align=1)
        assert len(kernels.calls) == 2 and kernels.last_tables == (3, 4)

    on_ranks(2, body)
