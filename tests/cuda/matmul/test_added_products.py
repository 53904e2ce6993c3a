"""Products that one collective adds up: in every order and type, and on two streams at once."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest

from arrangements import part_of
from shardmath.distribution import Replicated, Slab

RESULTS = {"everywhere": Replicated(), "rows": Slab.X, "columns": Slab.Y}


def in_order(x, order):
    return x.t().contiguous().t() if order == "F" else x.contiguous()


def added(context, kind, orders, dtype, shape, more):
    """What is wrong with three products of operands in this rank's order, and how many went so."""
    import torch

    from shardmath.linalg.advanced import MatmulEpilog, matmul
    from shardmath.operators.matmul.gpu.product_program import ProductProgram
    from shardmath.operators.matmul.gpu.steps import Collective

    torch.cuda.set_device(context.device_id)
    size, rank = context.size, context.rank
    order, (m, n, k) = orders[rank % len(orders)], shape
    native = getattr(torch, dtype)
    rng = np.random.default_rng(9)

    def sample(*shape):
        x = rng.standard_normal(shape)
        if native.is_complex:
            x = x + 1j * rng.standard_normal(shape)
        return torch.from_numpy(x).cuda().to(native)

    def mine(x, d):
        index = np.arange(x.numel()).reshape(x.shape)
        chosen = torch.from_numpy(np.array(part_of(index, d, rank, size))).cuda()
        return in_order(x.reshape(-1)[chosen.reshape(-1)].reshape(chosen.shape), order)

    whole = torch.complex128 if native.is_complex else torch.float64
    a, b, c, bias = sample(m, k), sample(k, n), sample(m, n), sample(m)
    want, dist = a.to(whole) @ b.to(whole), RESULTS[kind]
    given = [mine(a, Slab.Y), mine(b, Slab.X)]
    named = {"distributions": (Slab.Y, Slab.X, dist), "options": {"strategy": "stationary a"}}
    if more:
        given.append(mine(c, dist))
        rows = mine(bias[:, None].expand(m, n).contiguous(), dist)[:, 0].contiguous()
        named |= {"alpha": 0.5, "beta": 2, "epilog": MatmulEpilog.BIAS}
        named["epilog_inputs"] = {"bias": rows}
        want = 0.5 * want + 2 * c.to(whole) + bias.to(whole)[:, None]
    want = mine(want, dist)
    ran, performers = [], ProductProgram.PERFORMERS

    def counted(*args):
        launch = original(*args)
        return lambda stream: ran.append(launch(stream))

    original = performers[Collective]

    wrong, seen = [], []
    with context, patch.dict(performers, {Collective: counted}):
        for turn in range(3):
            d = matmul(*given, **named)
            context.team.synchronize(torch.cuda.current_stream().cuda_stream)
            unit = {"bfloat16": 2.0**-8, "float16": 2.0**-11}.get(dtype, 2.0**-20)
            off = (d.to(whole) - want).abs() - 4 * unit * want.abs()
            if off.numel() and not off.max() <= 8 * unit * k**0.5:
                wrong.append((turn, off.max().item()))
            seen.append(d)
            given[0] = given[0].clone(memory_format=torch.preserve_format)  # not the same again
    if not all(x.equal(seen[0]) for x in seen):
        wrong.append("the bits differ")
    return [wrong, len(ran)]


@pytest.mark.parametrize("more", [False, True], ids=["plain", "with all that follows"])
@pytest.mark.parametrize("orders", ["C", "F", "CF"])
@pytest.mark.parametrize("kind", RESULTS)
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("float32", (70, 90, 33)),
        ("bfloat16", (7, 9, 64)),
        ("float16", (800, 700, 129)),  # large enough for parts to be rounded
        ("complex64", (40, 31, 20)),
        ("float64", (1, 17, 3)),
    ],
)
def test_products_that_add_up(gpus, size, kind, orders, dtype, shape, more):
    if size == 1:
        pytest.skip("one rank has nothing to add up")
    found = gpus.run(added, kind, orders, dtype, shape, more, ranks=size)
    assert [wrong for wrong, _ in found] == [[]] * size
    natural = {"everywhere": "CF", "rows": "C", "columns": "F"}[kind]
    if min(shape) >= size > 1 and orders in natural and len(orders) == 1:
        assert all(count == 3 for _, count in found), found


def side_by_side(context):
    """Two graphs, each with two products that add up, are replayed on two streams at once."""
    import torch

    from shardmath.linalg.advanced import Matmul

    torch.cuda.set_device(context.device_id)
    m, n, k = 96, 256, 16 * context.size
    wrong, made = [], []
    with context:
        for _ in range(2):
            a = torch.ones(Slab.Y.shape(context.rank, (m, k)), device="cuda")
            b = torch.ones(Slab.X.shape(context.rank, (k, n)), device="cuda")
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                named = {"distributions": (Slab.Y, Slab.X, Replicated())}
                mm = Matmul(a, b, **named, options={"strategy": "stationary a"})
                mm.plan()
                mm.execute()  # compiles, and takes memory
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                results = [mm.execute() for _ in range(2)]
            made.append((stream, graph, mm, a, results))
        context.barrier()
        for turn in range(6):
            for stream, _, _, a, _ in made:
                with torch.cuda.stream(stream):
                    a.fill_(turn + 1)
            order = made if (turn + context.rank) % 2 else made[::-1]
            for stream, graph, *_ in order:  # not in the same order on all ranks
                with torch.cuda.stream(stream):
                    graph.replay()
                    graph.replay()
            torch.cuda.synchronize()
            context.team.check()
            for *_, results in made:
                if not all(bool((d == k * (turn + 1)).all()) for d in results):
                    wrong.append((turn, [d.flatten()[:2].tolist() for d in results]))
    return wrong


def test_graphs_on_two_streams(gpus, size):
    if size == 1:
        pytest.skip("one rank has nothing to add up")
    assert gpus.run(side_by_side, ranks=size) == [[]] * size
