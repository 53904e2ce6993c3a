"""`torch.ops.symm_mem` on tensors in host memory, after `symmetric_memory.register()`."""

import re
from pathlib import Path

import pytest
import torch

from mortal import on_ranks
from shardmath import symmetric_memory as symm_mem

PAGE = Path(__file__).parents[2] / "docs" / "from-symmetric-memory.md"
RANKS = 3


def operators(context):
    symm_mem.register()
    symm_mem.register()
    symm_mem.set_group_info("g", context.rank, context.size)
    return torch.ops.symm_mem


def of_rank(rank, shape, dtype=torch.float64):
    count = torch.Size(shape).numel()
    return (torch.arange(count).reshape(shape) % 7 + 10 * rank).to(dtype)


def summed(shape, size, dtype=torch.float64):
    return sum(of_rank(rank, shape, dtype) for rank in range(size))


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
        ops.reduce_scatter_out(x, "g", True, columns)
        whole = summed((2, 6), context.size, dtype)
        assert torch.equal(columns, whole.chunk(context.size, 1)[context.rank])
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


def test_rows_to_ranks_that_tensors_count():
    table = torch.tensor([[2, 0, 1], [0, 0, 0], [3, 1, 4]])

    def body(context):
        ops, rank = operators(context), context.rank
        x, out = of_rank(rank, (9, 2)), torch.full((7, 2), -1.0, dtype=torch.float64)
        said = torch.full((2, 3), -1, dtype=torch.int64)
        ops.all_to_all_vdev(x, out, table[rank], said, "g")
        parts = [of_rank(other, (9, 2))[: table[other].sum()] for other in range(3)]
        came = torch.cat([part.split(table[n].tolist())[rank] for n, part in enumerate(parts)])
        assert torch.equal(out[: len(came)], came) and (out[len(came) :] == -1).all()
        counts = table[:, rank]
        assert torch.equal(said, torch.stack([counts, counts.cumsum(0) - counts]))
        small = torch.empty((4, 2), dtype=torch.float64)
        with pytest.raises(ValueError, match="rank 0: 5 rows come, and out has room for 4"):
            ops.all_to_all_vdev(x, small, table[rank], said, "g")
        with pytest.raises(ValueError, match="rank 0 sends 12 rows of an input of 9"):
            ops.all_to_all_vdev(x, out, torch.tensor([4, 4, 4]), said, "g")

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
        if rank == 0:
            ops.nvshmem_put(t, 1)
        handle.barrier()
        assert (t == [0, 0, 2][rank]).all()
        handle.barrier()
        if rank == 0:
            ops.nvshmem_get(t, 2)
        handle.barrier()
        assert (t == [2, 0, 2][rank]).all()
        words = torch.zeros(5, dtype=torch.uint32)
        assert ops.memset32_(words, 1, 2**32 - 1, 2) is words
        ops.stream_write_value32_(words, 4, 7)
        assert words.tolist() == [0, 2**32 - 1, 2**32 - 1, 0, 7]

    on_ranks(RANKS, body)


def test_products():
    def body(context):
        ops, rank, size = operators(context), context.rank, context.size
        cases = [
            (0, lambda n: (2, 5, 4)),
            (1, lambda n: (2, 3 + n, 4)),
            (0, lambda n: (7 - n, 4)),
            (0, lambda n: (n, 4)),
        ]
        for dim, shape_of in cases:
            parts = [of_rank(n, shape_of(n)) for n in range(size)]
            bs = [of_rank(0, (4, n)) for n in (3, 1, 0)]
            whole = torch.cat(parts, dim)
            a, made = ops.fused_all_gather_matmul(parts[rank], bs, dim, "g")
            assert torch.equal(a, whole)
            for b, c in zip(bs, made, strict=True):
                torch.testing.assert_close(c, whole @ b)
            kept, _ = ops.fused_all_gather_matmul(parts[rank], bs, dim, "g", return_A=False)
            assert kept is None
        for dim, shape in [(0, (5, 2, 4)), (1, (2, 7, 4)), (0, (2, 4))]:
            b = of_rank(1, (4, 3))
            for op in ("sum", "avg"):
                made = ops.fused_matmul_reduce_scatter(of_rank(rank, shape), b, op, dim, "g")
                whole = summed(shape, size) @ b / (size if op == "avg" else 1)
                lengths = [len(range(whole.shape[dim])[n::size]) for n in range(size)]
                torch.testing.assert_close(made, whole.split(lengths, dim)[rank])

    on_ranks(RANKS, body)


def test_compiled():
    def body(context):
        ops = operators(context)

        def called(x):
            return ops.one_shot_all_reduce(x + 1, "sum", "g") * 2

        x = of_rank(context.rank, (4, 2))
        made = torch.compile(called, backend="aot_eager", fullgraph=True)(x)
        assert torch.equal(made, called(x))

    on_ranks(2, body)


def test_the_page_says_of_each_operator_what_there_is():
    """The table of the page has every operator of torch's, and says which of them are served."""
    symm_mem.register()
    defined = {
        name.removeprefix("symm_mem::").partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("symm_mem::")
    }
    rows = re.findall(r"^\| `(\w+)` \| (served|not served)", PAGE.read_text(), re.MULTILINE)
    assert len(dict(rows)) == len(rows)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    expected = {
        name: "served" if has_kernel(f"symm_mem::{name}", "CPU") else "not served"
        for name in defined
    }
    assert dict(rows) == expected
