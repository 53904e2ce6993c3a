"""`torch.ops.symm_mem` on tensors in host memory, after `symmetric_memory.register()`."""

import itertools
import re
import time
from pathlib import Path

import pytest
import torch
from torch_operators import of_rank, operators, summed

from mortal import limit_waits, on_ranks
from shardmath import symmetric_memory as symm_mem
from shardmath.errors import CollectiveMismatch, OpTimeout

PAGE = Path(__file__).parents[2] / "docs" / "from-symmetric-memory.md"
RANKS = 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32, torch.complex64])
def test_sums(dtype):
    def body(context):
        ops = operators(context)
        for shape in [(6, 7), (3, 0), (6,), (3, 2, 3)]:
            x, expected = of_rank(context.rank, shape, dtype), summed(shape, context.size, dtype)
            out = torch.full_like(x, 99)
            assert torch.equal(ops.one_shot_all_reduce(x, "sum", "g"), expected)
            assert ops.one_shot_all_reduce_out(x, "sum", "g", out) is out
            assert torch.equal(out, expected)
            buffer = torch.full_like(x, 99)
            assert torch.equal(ops.one_shot_all_reduce_copy(buffer, x, "sum", "g"), expected)
            ops.one_shot_all_reduce_copy_out(buffer, x, "sum", "g", out.fill_(99))
            assert torch.equal(out, expected)
            assert ops.two_shot_all_reduce_out(x, "sum", "g", out.fill_(99)) is out
            assert torch.equal(x, of_rank(context.rank, shape, dtype))
            assert torch.equal(out, expected)
            strided = x.repeat_interleave(2, dim=-1)[..., ::2]
            assert ops.two_shot_all_reduce_(strided, "sum", "g") is strided
            assert torch.equal(strided, expected)
            rows = torch.full_like(x[: shape[0] // context.size], 99)
            ops.reduce_scatter_out(x, "g", False, rows)
            assert torch.equal(rows, expected.chunk(context.size)[context.rank])
            made = ops._low_contention_reduce_scatter(x, "sum", "g")
            assert torch.equal(made, rows)
        columns = torch.full((2, 2), 99, dtype=dtype)
        x = of_rank(context.rank, (2, 6), dtype)
        made = ops.one_shot_all_reduce(x.T, "sum", "g")
        assert made.stride() == x.T.stride()  # as torch's compiler is told
        ops.reduce_scatter_out(x, "g", True, columns)
        whole = summed((2, 6), context.size, dtype)
        assert torch.equal(columns, whole.chunk(context.size, 1)[context.rank])
        assert torch.equal(made.T, whole)
        x, sizes = of_rank(context.rank, (7, 2), dtype), [3, 2, 2]
        made = ops._low_contention_reduce_scatter(x, "sum", "g")
        assert torch.equal(made, summed((7, 2), context.size, dtype).split(sizes)[context.rank])

    on_ranks(RANKS, body)


def test_other_reductions():
    def body(context):
        ops, x = operators(context), of_rank(context.rank, (4, 3))
        parts = torch.stack([of_rank(rank, (4, 3)) for rank in range(context.size)])
        for op, expected in [
            ("avg", parts.mean(0)),
            ("min", parts.amin(0)),
            ("max", parts.amax(0)),
            ("product", parts.prod(0)),
        ]:
            torch.testing.assert_close(ops.one_shot_all_reduce(x, op, "g"), expected)
            assert torch.equal(x, of_rank(context.rank, (4, 3)))

    on_ranks(RANKS, body)


def test_tiles_are_summed_at_their_roots():
    def body(context):
        ops = operators(context)
        wide = of_rank(context.rank, (5, 6))
        tile, out = wide[1:4, 2:5], torch.full((3, 3), -1.0, dtype=torch.float64)
        ops.tile_reduce(tile, out, 1, "g")
        expected = summed((5, 6), context.size)[1:4, 2:5]
        assert torch.equal(out, expected if context.rank == 1 else torch.full_like(out, -1))
        tiles = [wide[:2, :2], wide[2:4, :2]]
        out = torch.full((2, 2), -1.0, dtype=torch.float64)
        ops.multi_root_tile_reduce(tiles, out, [2, 0], "g", "avg")
        mean = summed((5, 6), context.size) / context.size
        wanted = {2: mean[:2, :2], 0: mean[2:4, :2]}.get(context.rank, torch.full_like(out, -1))
        torch.testing.assert_close(out, wanted)
        for call, message in [
            (lambda: ops.tile_reduce(tile, out, 9, "g"), "root 9 is no rank of 3"),
            (lambda: ops.tile_reduce(tile, out, 0, "g"), "rank 0: out_tile is"),
            (lambda: ops.one_shot_all_reduce(tile, "xor", "g"), "reduce_op is one of"),
            (
                lambda: ops.multi_root_tile_reduce(tiles[context.rank // 2 :], out, [0, 1], "g"),
                "rank 2: 1 tiles need as many different roots",
            ),
        ]:
            with pytest.raises(ValueError, match=message):
                call()

    on_ranks(RANKS, body)


def test_blocks_are_summed_at_chosen_ranks():
    cases = [  # extents of a matrix, axis, ends of blocks, their ranks: None are torch's defaults
        ((6, 4), 0, None, None),
        ((4, 7), 1, None, None),
        ((5, 8), 1, [2, 2, 7], [2, 0, 0]),
        ((9, 3), 0, [1, 4, 5, 9], [1, 2, 1, 0]),
        ((9, 3), 0, [2, 3], [2, 2]),
        ((9, 3), 1, [], []),
    ]

    def body(context):
        ops, rank, size = operators(context), context.rank, context.size
        for shape, dim, ends, owners in cases:
            x, whole = of_rank(rank, shape, torch.bfloat16), summed(shape, size, torch.bfloat16)
            sizes = [len(range(shape[dim])[n::size]) for n in range(size)]
            cuts = list(itertools.accumulate(sizes)) if ends is None else ends
            blocks = [
                whole.narrow(dim, low, high - low) for low, high in itertools.pairwise([0, *cuts])
            ]
            own = owners if owners is not None else range(len(blocks))
            mine = [b for b, owner in zip(blocks, own, strict=True) if owner == rank]
            out = [torch.full_like(block.contiguous(), 99) for block in mine]
            ops.nccl_reduce_scatter_offset(x, out, "g", dim, ends, owners, "sum")
            assert all(map(torch.equal, out, mine))
            assert torch.equal(x, of_rank(rank, shape, torch.bfloat16))
            words = {"dim": dim, "offsets": ends, "dst_ranks": owners}
            symm_mem.reduce_scatter_offset(x, [each.fill_(99) for each in out], "g", **words)
            assert all(map(torch.equal, out, mine))
        x, out = of_rank(rank, (6, 4)), [torch.empty(2, 4, dtype=torch.float64)]
        for arguments, message in [
            ((x, out, "g", 2), "expected a matrix and dim 0 or 1"),
            ((x, out, "g", 0, [2, 7, 9]), "offsets rise up to 6"),
            ((x, out, "g", 0, [2, 4, 6], [0, 1, 3]), "dst_ranks names one of 3 ranks"),
            ((x, out * (1 + rank // 2), "g", 0), "rank 2: out is"),
            ((x, out, "g", 0, None, None, "xor"), "reduce_op is one of"),
        ]:
            with pytest.raises(ValueError, match=message):
                ops.nccl_reduce_scatter_offset(*arguments)
        with pytest.raises(CollectiveMismatch, match="offsets"):
            ops.nccl_reduce_scatter_offset(x, out, "g", 0, [2, 4, 6 - rank // 2])

    on_ranks(RANKS, body)


def test_moves():
    def body(context):
        ops, rank, size = operators(context), context.rank, context.size
        gathered = torch.cat([of_rank(other, (2, 3)) for other in range(size)])
        assert torch.equal(ops._low_contention_all_gather(of_rank(rank, (2, 3)), "g"), gathered)
        rows = [of_rank(other, (other, 3)) for other in range(size)]
        assert torch.equal(ops._low_contention_all_gather(rows[rank], "g"), torch.cat(rows))
        x = of_rank(rank, (4,))
        assert ops.nvshmem_broadcast(x, 2, "g") is x
        assert torch.equal(x, of_rank(2, (4,)))
        x, out = of_rank(rank, (size, 2)), torch.full((size, 2), -1.0, dtype=torch.float64)
        ops.nvshmem_all_to_all(x, out, "g")
        assert torch.equal(
            out, torch.stack([of_rank(other, (size, 2))[rank] for other in range(size)])
        )

    on_ranks(RANKS, body)


def test_memory_of_peers():
    def body(context):
        ops, rank = operators(context), context.rank
        t = symm_mem.empty(4, dtype=torch.float32, device="cpu").fill_(rank)
        handle = symm_mem.rendezvous(t, "g")
        handle.barrier()
        seen = [float(peer[0]) for peer in ops.get_remote_tensors(t, "g")]
        assert seen == [0, 1, 2]
        handle.barrier()
        for put, get in [(ops.nvshmem_put, ops.nvshmem_get), (ops.nccl_put, ops.nccl_get)]:
            if rank == 0:
                put(t, 1)
            handle.barrier()
            assert (t == [0, 0, 2][rank]).all()
            handle.barrier()
            if rank == 0:
                get(t, 2)
            handle.barrier()
            assert (t == [2, 0, 2][rank]).all()
            t.fill_(rank)
            handle.barrier()
        words = torch.zeros(5, dtype=torch.uint32)
        assert ops.memset32_(words, 1, 2**32 - 1, 2) is words
        ops.stream_write_value32_(words, 4, 7)
        assert words.tolist() == [0, 2**32 - 1, 2**32 - 1, 0, 7]

    on_ranks(RANKS, body)


def check_values(context):
    """Each rank sends to the next in turn: values are 64 bits wide, on pads and in arrays."""
    ops, rank, size = operators(context), context.rank, context.size
    t = symm_mem.empty(3, dtype=torch.float64, device="cpu")
    words = symm_mem.empty(5, dtype=torch.int64, device="cpu").zero_()
    handle, _ = symm_mem.rendezvous(t), symm_mem.rendezvous(words)
    pad = handle.get_signal_pad(rank)
    handle.barrier()
    for sigpad in (pad, pad[2:4], words, words[4:]):
        for value, src in itertools.product((5, 2**40 + 1, 7), range(size)):
            dst = (src + 1) % size
            t.fill_(10 * value + rank)
            handle.barrier()
            if rank == src:
                ops.nvshmem_put_with_signal(t, sigpad, value, dst)
            if rank == dst:
                ops.nvshmem_wait_for_signal(sigpad, value, src)
                assert (t == 10 * value + src).all()
            handle.barrier()
    pad.zero_()
    handle.barrier()
    if rank == 0:
        ops.nccl_put_with_signal(t.fill_(3), 9, 1)
    if rank == 1:
        for value in (4, 9):
            ops.nccl_wait_for_signal(t, value)
            assert (t == 3).all()
    handle.barrier()
    for call, message in [
        (lambda: ops.nvshmem_put_with_signal(t, pad, -1, 0), "64 bits"),
        (lambda: ops.nvshmem_put_with_signal(t, torch.zeros(2), 1, 0), "on no signal pad"),
        (lambda: ops.nvshmem_put_with_signal(t, pad[1:3], 1, 0), "at a multiple of 8"),
        (lambda: ops.nvshmem_wait_for_signal(pad, 1, size), f"peer {size} does not exist"),
        (lambda: ops.nvshmem_put_with_signal(t, pad, 1, size), f"dst_rank {size} does not"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


def test_signals_have_values():
    on_ranks(RANKS, check_values)


def test_memory_of_a_group():
    """What a group has brought to its rendezvous: ranks are those of the group."""

    def body(context):
        ops = operators(context)
        group = context.subset([0, 2]) if context.rank != 1 else None
        if group is not None:
            t = symm_mem.empty(3, dtype=torch.float64, device="cpu").fill_(group.rank)
            handle = symm_mem.rendezvous(t, group)
            pad = handle.get_signal_pad(group.rank)
            handle.barrier()
            if group.rank == 0:
                ops.nvshmem_put_with_signal(t.fill_(5), pad, 3, 1)
            else:
                ops.nvshmem_wait_for_signal(pad, 3, 0)
                assert (t == 5).all()
            t.fill_(group.rank)
            handle.barrier()
            if group.rank == 0:
                ops.nccl_get(t, 1)
            assert (t == 1).all()
        context.barrier()

    on_ranks(RANKS, body)


def test_a_signal_that_does_not_come():
    """The wait ends, names who would set it, and leaves all usable."""

    def body(context):
        ops = operators(context)
        t = symm_mem.empty(3, dtype=torch.float64, device="cpu").zero_()
        handle = symm_mem.rendezvous(t)
        pad, first = handle.get_signal_pad(context.rank), handle.get_remote_tensor(0, (3,), t.dtype)
        handle.barrier()
        policy = context.board.policy
        if context.rank == 0:
            limit_waits(context, 0.3)
            with pytest.raises(OpTimeout) as caught:
                ops.nvshmem_wait_for_signal(pad, 1, 1)
            assert caught.value.ranks == (1,)
            with pytest.raises(OpTimeout):
                ops._async_input_mm(
                    torch.ones(2, 2), torch.ones(2, 2), torch.zeros(1, dtype=torch.uint32), 0
                )
            t.fill_(1)
        context.board.policy = policy
        while first[0] == 0:  # outside of any operation: rank 1 is only late
            time.sleep(0.001)
        context.barrier()
        assert torch.equal(ops.one_shot_all_reduce(t.fill_(1), "sum", "g"), t * 2)

    on_ranks(2, body)


def test_compiled():
    """One that returns a new tensor, and one that writes into its arguments."""

    def body(context):
        ops = operators(context)

        def summed_twice(x):
            return ops.one_shot_all_reduce(x + 1, "sum", "g") * 2

        def exchanged(x):
            out, told = torch.zeros(8, 2, dtype=x.dtype), torch.zeros(2, 2, dtype=torch.int64)
            ops.all_to_all_vdev_2d(x + 1, out, torch.tensor([3, 1]), told, "g", 4)
            return out * told[0].sum()

        x = of_rank(context.rank, (4, 2))
        for called in (summed_twice, exchanged):
            made = torch.compile(called, backend="aot_eager", fullgraph=True)(x)
            assert torch.equal(made, called(x)) and made.any()

    on_ranks(2, body)


def test_the_page_says_of_each_operator_what_there_is():
    """The table of the page has every operator of torch's, what is served, and by which test."""
    symm_mem.register()
    defined = {
        name.removeprefix("symm_mem::").partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("symm_mem::")
    }
    line = r"^\| `(\w+)` \| (served|not served) \|[^|]*\| ([^|]*)\|$"
    rows = re.findall(line, PAGE.read_text(), re.MULTILINE)
    found = {name: said for name, said, _ in rows}
    assert len(found) == len(rows)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    expected = {
        name: "served" if has_kernel(f"symm_mem::{name}", "CPU") else "not served"
        for name in defined
    }
    assert found == expected
    texts = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    for name, said, tests in rows:
        named = re.findall(r"`(test_\w+)`", tests)
        assert bool(named) == (said == "served"), name
        assert all(f"def {test}(" in texts for test in named), name
