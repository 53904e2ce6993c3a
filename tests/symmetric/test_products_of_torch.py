"""Products of `torch.ops.symm_mem` on cores, beside one process: gathered, scattered and scaled."""

import itertools

import pytest
import torch
from torch_operators import of_rank, operators, slab

from mortal import on_ranks
from shardmath import symmetric_memory as symm_mem

EIGHT = torch.float8_e4m3fn


def is_gathered_first(x, dim):
    """Whether the gathered axis lies first in memory, unless it is the last, as torch's compiler is
    told.
    """
    last = dim % x.ndim == x.ndim - 1
    return (x if last else x.movedim(dim, 0)).is_contiguous()


@pytest.mark.parametrize("size", [1, 2])
def test_gathered(size):
    def body(context):
        ops, rank = operators(context), context.rank
        cases = [
            (0, lambda n: (2, 5, 4)),
            (1, lambda n: (2, 3 + n, 4)),
            (0, lambda n: (7 - n, 4)),
            (0, lambda n: (n, 4)),
            (-2, lambda n: (2, 3, n, 4)),
            (1, lambda n: (3, 1 + n)),
            (2, lambda n: (2, 3, 2)),
        ]
        for dim, shape_of in cases:
            parts = [of_rank(n, shape_of(n)) for n in range(size)]
            whole = torch.cat(parts, dim)
            bs = [of_rank(0, (whole.shape[-1], n)) for n in (3, 1, 0)]
            a, made = ops.fused_all_gather_matmul(parts[rank], bs, dim, "g")
            assert torch.equal(a, whole)
            assert a.is_contiguous() if size == 1 else is_gathered_first(a, dim)
            for b, c in zip(bs, made, strict=True):
                torch.testing.assert_close(c, whole @ b)
                assert is_gathered_first(c, dim)
            kept, _ = ops.fused_all_gather_matmul(parts[rank], bs, dim, "g", return_A=False)
            assert kept is None

    on_ranks(size, body)


def test_scattered():
    cases = [(0, (5, 2, 4)), (1, (2, 7, 4)), (0, (2, 4)), (1, (3, 4)), (2, (2, 1, 4))]
    dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.complex64]

    def body(context):
        ops, rank, size = operators(context), context.rank, context.size
        for (dim, shape), dtype, op in itertools.product(cases, dtypes, ("sum", "avg")):
            b = of_rank(1, (4, 5), dtype)
            made = ops.fused_matmul_reduce_scatter(of_rank(rank, shape, dtype), b, op, dim, "g")
            parts = [of_rank(n, shape, dtype) @ b for n in range(size)]
            whole = sum(parts) / (size if op == "avg" else 1)
            # Sums of bfloat16 are made in float32, and rounded once.
            torch.testing.assert_close(made, slab(whole, dim, rank, size), rtol=0.02, atol=0)

    on_ranks(2, body)


def scaled(a, b, a_scale, b_scale, dtype):
    """In one process, in float32: rounded once to the type."""
    return ((a.float() * a_scale) @ (b.float() * b_scale)).to(dtype)


def check(made, expected):
    assert made.dtype == expected.dtype
    torch.testing.assert_close(made.float(), expected.float(), rtol=0.02, atol=0)


def test_gathered_and_scaled():
    """Parts of other sizes, several factors with words of their own, A of any number of axes."""

    def body(context):
        ops, rank, size = operators(context), context.rank, context.size
        bs = [(of_rank(1, (16, n)) / 16).to(EIGHT).t().contiguous().t() for n in (16, 32)]
        columns = [torch.linspace(0.5, 1, b.shape[1]).reshape(1, -1) for b in bs]
        one, half, dtypes = torch.tensor(0.25), torch.tensor(0.5), [torch.float32, torch.bfloat16]
        for dim, shape_of in [(0, lambda n: (3 + n, 16)), (1, lambda n: (2, n, 16))]:
            parts = [(of_rank(n, shape_of(n)) / 8).to(EIGHT) for n in range(size)]
            whole = torch.cat([part.view(torch.uint8) for part in parts], dim).view(EIGHT)
            rows = torch.linspace(0.5, 2, whole[..., 0].numel()).reshape(*whole.shape[:-1], 1)
            own = rows.split([part.shape[dim] for part in parts], dim)[rank]
            for given, scale, b_scales in [
                (one, one, [half, half]),
                (own, rows, columns),  # of this rank's rows
                (rows, rows, columns),  # of all
            ]:
                a, made = ops.fused_all_gather_scaled_matmul(
                    *(parts[rank], bs, given, b_scales, dim, "g"),
                    *([None, None], [None, None], dtypes, [False, False]),
                )
                assert torch.equal(a.view(torch.uint8), whole.view(torch.uint8))
                assert is_gathered_first(a, dim)
                for b, b_scale, dtype, c in zip(bs, b_scales, dtypes, made, strict=True):
                    check(c, scaled(whole, b, scale, b_scale, dtype))

    on_ranks(2, body)


def test_scattered_and_scaled():
    cases = [(0, (5, 16), False), (1, (2, 3, 16), True), (0, (4, 2, 16), True)]

    def body(context):
        ops, rank, size = operators(context), context.rank, context.size
        b = (of_rank(1, (16, 32)) / 16).to(EIGHT).t().contiguous().t()
        columns = torch.linspace(0.5, 1, 32).reshape(1, 32)
        for (dim, shape, by_row), dtype in itertools.product(
            cases, [torch.float32, torch.bfloat16]
        ):
            parts = [(of_rank(n, shape) / 8).to(EIGHT) for n in range(size)]
            rows = torch.linspace(0.5, 2, parts[0][..., 0].numel()).reshape(*shape[:-1], 1)
            scales = (rows, columns) if by_row else (torch.tensor(0.25), torch.tensor(0.5))
            flat = parts[rank].reshape(-1, 16)
            for op, a, a_scale in [
                ("sum", parts[rank], scales[0]),
                ("avg", flat, scales[0].reshape(-1, 1) if by_row else scales[0]),
            ]:
                made = ops.fused_scaled_matmul_reduce_scatter(
                    *(a, b, a_scale, scales[1], op, dim, dim, "g", [*shape[:-1], 32]),
                    out_dtype=dtype,
                )
                each = [scaled(part, b, *scales, torch.float32) for part in parts]
                whole = sum(each) / (size if op == "avg" else 1)
                check(made, slab(whole, dim, rank, size).to(dtype))

    on_ranks(2, body)


def test_mistakes_are_errors_of_all_ranks():
    def body(context):
        ops, last = operators(context), context.rank == context.size - 1
        a, b = torch.ones(2, 4), torch.ones(4, 3)
        wrong = torch.ones(5, 3) if last else b
        eight, one = a.to(EIGHT), torch.tensor(1.0)
        words = [None], [None], [torch.float32], [False]
        rows = torch.ones(2, 1)
        gather, scatter = ops.fused_all_gather_scaled_matmul, ops.fused_scaled_matmul_reduce_scatter
        for call, message in [
            (lambda: ops.fused_all_gather_matmul(a, [b, wrong], 0, "g"), "rank 1: A has 4 columns"),
            (lambda: ops.fused_all_gather_matmul(a, [b], 2 if last else 0, "g"), "axis|axes"),
            (
                lambda: ops.fused_all_gather_matmul(a, [b.double() if last else b], 0, "g"),
                "of its type",
            ),
            (lambda: ops.fused_matmul_reduce_scatter(a, wrong, "sum", 0, "g"), "mat1 and mat2"),
            (lambda: ops.fused_matmul_reduce_scatter(a, b, "xor", 0, "g"), "reduce_op is one of"),
            (
                lambda: gather(eight, [b.to(EIGHT)], one, [one] * (1 + last), 0, "g", *words),
                "each of 1 B has its scale",
            ),
            (
                lambda: gather(eight, [b.to(EIGHT)], rows, [one], 1, "g", *words),
                "cannot be gathered along the rows",
            ),
            (
                lambda: scatter(eight, wrong.to(EIGHT), one, one, "sum", 0, 0, "g", [2, 3]),
                "mat1|shapes|size",
            ),
        ]:
            with pytest.raises((ValueError, RuntimeError), match=message):
                call()
        assert ops.fused_matmul_reduce_scatter(a, b, "sum", 0, "g").shape == (1, 3)

    on_ranks(2, body)


def test_rows_that_come_while_they_are_multiplied():
    """Rank 1 writes chunks of rank 0's factor, the pivot first, and raises their signals."""

    def body(context):
        ops, chunks, pivot = operators(context), 4, 2
        a = symm_mem.empty((8, 5), dtype=torch.float64, device="cpu").fill_(-1)
        signals = symm_mem.empty(chunks, dtype=torch.uint32, device="cpu").zero_()
        handles = [symm_mem.rendezvous(x) for x in (a, signals)]
        whole, b = of_rank(3, (8, 5)), of_rank(1, (5, 3))
        handles[0].barrier()
        if context.rank == 1:
            theirs = handles[0].get_buffer(0, (8, 5), a.dtype)
            words = handles[1].get_buffer(0, (chunks,), torch.uint32)
            for step in range(chunks):
                chunk = (pivot + step) % chunks
                theirs[2 * chunk : 2 * chunk + 2] = whole[2 * chunk : 2 * chunk + 2]
                ops.stream_write_value32_(words, chunk, 1)
        else:
            assert torch.equal(ops._async_input_mm(a, b, signals, pivot), whole @ b)
            with pytest.raises(ValueError, match="A's rows in equal chunks"):
                ops._async_input_mm(a[:7], b, signals, pivot)
        handles[0].barrier()

    on_ranks(2, body)
