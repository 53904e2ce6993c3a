"""Products that come again: one graph where all ranks repeat, put on the stream anew elsewhere."""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from unittest.mock import patch

import pytest

KINDS = {
    "gather": ("X", "X", "X"),
    "reduce": ("Y", "X", "X"),
    "move": ("X", "Y", "Y"),
    "share": ("Y", "X", None),  # on the heap peers write the results, and know where they lie
}


@contextmanager
def noted(note):
    """Within, `note()` is called where the graph of an earlier execution is launched."""
    from shardmath.cuda.graph import Graph

    original = Graph.launch

    def launch(self, *args):
        note()
        return original(self, *args)

    with patch.object(Graph, "launch", launch):
        yield


def repeated(context, kind, dtype, heap):
    """Wrong results; for each execution, whether it was launched again; and whether peers wrote
    the results, for all that one kernel made.
    """
    import torch

    from shardmath.arrays import library_named
    from shardmath.distribution import Replicated, Slab
    from shardmath.handles.allocation import empty_on_heap
    from shardmath.linalg.advanced import Matmul
    from shardmath.operators.matmul.gpu.tile_sending import GemmAllReduce

    torch.cuda.set_device(context.device_id)
    size, library = context.size, library_named("torch")
    dists = [Replicated() if name is None else getattr(Slab, name) for name in KINDS[kind]]
    named = {
        "distributions": dists,
        "options": {"strategy": "all-reduce"} if kind == "share" and size > 1 else None,
    }
    m, n, k = 64 * size, 32 * size, 32 * size

    def part(index, shape):
        local = dists[index].shape(context.rank, shape, size=size)
        if heap:
            return empty_on_heap(context, library, local, dtype).zero_()
        return torch.zeros(local, device="cuda", dtype=getattr(torch, dtype))

    a, other, b = part(0, (m, k)), part(0, (m, k)), part(1, (k, n))
    again, wrong, share = [], [], GemmAllReduce.launch

    def note():
        again[-1] = True

    def checked(product, value):
        again.append(False)
        d = product.execute()
        torch.cuda.synchronize()
        if not (d == k * value).all():
            wrong.append((len(again), d.flatten()[:3].tolist()))

    with (
        context,
        noted(note),
        patch.object(GemmAllReduce, "launch", autospec=True, side_effect=share) as shared,
    ):
        with Matmul(a, b, **named) as product:
            product.plan()
            for turn in range(6):  # results lie in several places
                a.fill_(turn)
                b.fill_(1)
                checked(product, turn)
            steady = again[3:]  # a result's place is another after the first, on the heap
            if context.rank == 0:  # one rank's operand lies elsewhere: that rank launches anew
                product.reset_operands_unchecked(a=other)
            other.fill_(3)
            a.fill_(3)
            for _ in range(5):
                checked(product, 3)
            changed = context.rank == 0 and again[6]
            steady = [*steady, *again[9:]]
        large = part(0, (m, k)).new_ones(dists[0].shape(context.rank, (16 * m, 16 * k), size=size))
        wide = large.new_ones(dists[1].shape(context.rank, (16 * k, n), size=size))
        with (
            Matmul(a, b, **named) as product,
            Matmul(large, wide, **named) as larger,
        ):  # whose workspace replaces what the graphs refer to
            product.plan()
            larger.plan()
            for each in (product, larger, product, product, product, larger, product):
                again.append(False)
                d = each.execute()
                torch.cuda.synchronize()
                if not (d == (3 * k if each is product else 16 * k)).all():
                    wrong.append(("larger", d.flatten()[:3].tolist()))
    return [wrong, steady, changed, addressed(shared)]


def addressed(launch):
    """For each call of GemmAllReduce.launch, whether peers write the results."""
    return ["result_addresses" in each.kwargs for each in launch.call_args_list]


@pytest.mark.parametrize("heap", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_all_ranks_repeat_is_one_graph(gpus, size, kind, dtype, heap):
    one_kernel = (kind, dtype) == ("share", "bfloat16") and size > 1
    for wrong, steady, changed, result_addresses in gpus.run(
        repeated, kind, dtype, heap, ranks=size
    ):
        assert (wrong, changed) == ([], False)
        assert set(result_addresses) == (
            {heap, False} if one_kernel else set()
        )  # the larger one's never
        assert set(steady) == {True}


def varied(context, heap):
    """By form of the function's call: wrong results of calls that come again, and whether the last
    two were one graph.
    """
    import numpy as np
    import torch

    from shardmath.arrays import library_named
    from shardmath.distribution import Slab
    from shardmath.handles.allocation import empty_on_heap
    from shardmath.linalg.advanced import MatmulEpilog, MatmulOptions, matmul
    from shardmath.operators.matmul.options import matrix_qualifiers_dtype

    torch.cuda.set_device(context.device_id)
    size, rank = context.size, context.rank
    m, n, k = 16 * size, 8 * size, 8 * size
    library, numbers = library_named("torch"), torch.Generator().manual_seed(1)

    def whole(*shape):
        return torch.randint(-3, 4, shape, generator=numbers).double()

    def mine(full):
        part = full.tensor_split(size)[rank]
        if not heap:
            return part.cuda()
        return empty_on_heap(context, library, part.shape, "float64").copy_(part)

    a, b, c = whole(m, k), whole(k, n), whole(m, n)
    turned = np.zeros(3, matrix_qualifiers_dtype)
    turned["is_transpose"][0] = True
    x, y, z, at = mine(a), mine(b), mine(c), mine(a.T)
    weight = torch.nn.Parameter(mine(b))
    bias = torch.arange(1.0, x.shape[0] + 1).double().cuda()
    product = a @ b
    scales = itertools.cycle((2, 3))  # another number is another call: either comes again
    forms = {
        "plain": (lambda: matmul(x, y, **splits), product),
        "turned": (lambda: matmul(at, y, qualifiers=turned, **splits), product),
        "c": (lambda: matmul(x, y, z, beta=-1, **splits), product - c),
        "in place": (
            lambda: matmul(x, y, z.copy_(z), beta=0, options=MatmulOptions(inplace=True), **splits),
            product,
        ),
        "bias": (
            lambda: matmul(x, y, epilog=MatmulEpilog.BIAS, epilog_inputs={"bias": bias}, **splits),
            product + bias.cpu().repeat(size)[:, None],
        ),
        "outputs": (
            lambda: matmul(x, y, epilog=MatmulEpilog.RELU_AUX, **splits)[0],
            product.clamp(min=0),
        ),
        "parameter": (lambda: matmul(x, weight, **splits), product),
        "alpha": (lambda: matmul(x, y, alpha=next(scales), **splits), None),
    }
    splits, found = {"distributions": [Slab.X] * 3}, {}
    for name, (call, expected) in forms.items():
        again, wrong, seen = set(), [], [0]

        with context, torch.no_grad(), noted(lambda again=again, seen=seen: again.add(seen[-1])):
            for turn in range(10):
                seen.append(turn)
                full = product * (2 + turn % 2) if expected is None else expected
                if not torch.equal(call().cpu(), full.tensor_split(size)[rank]):
                    wrong.append(turn)
        found[name] = (wrong, {8, 9} <= again)
    return found


@pytest.mark.parametrize("heap", [True, False])
def test_calls_of_the_function_come_again(gpus, size, heap):
    for found in gpus.run(varied, heap, ranks=size):
        assert found == dict.fromkeys(found, ([], True))


def out_of_step(context):
    """Results where one rank's call of the function is new, and the others' come again."""
    import torch

    from shardmath.distribution import Slab
    from shardmath.linalg.advanced import matmul

    torch.cuda.set_device(context.device_id)
    size, rank, splits = context.size, context.rank, [Slab.X] * 3
    shape = (16, 16 * size)
    one, other = (torch.full(shape, float(v), device="cuda") for v in (1, 2))
    b = torch.ones(shape, device="cuda")
    sums = []
    with context:
        for turn in range(8):
            a = other if turn in (3, 4, 6) and rank == size - 1 else one
            sums.append(float(matmul(a, b, distributions=splits)[0, 0]) / (16 * size))
        if rank == 0:
            a = torch.ones((16, 16 * size + 1), device="cuda")
        said = None
        try:
            matmul(a, b, distributions=splits)
        except ValueError as error:
            said = str(error)
        sums.append(float(matmul(one, b, distributions=splits)[0, 0]) / (16 * size))
    return sums, said


def test_a_rank_whose_call_is_new_is_heard(gpus, size):
    found = gpus.run(out_of_step, ranks=size)
    for rank, (sums, said) in enumerate(found):
        last = rank == size - 1
        assert sums == [2.0 if turn in (3, 4, 6) and last else 1.0 for turn in range(9)]
        assert said == found[0][1] and said


def from_threads(context, heap):
    """Errors, and what an epilog's outputs hold, of calls that come again in threads that have not
    used CUDA so far: one on the current stream, one on a stream of its own.
    """
    import threading

    import torch

    from shardmath.arrays import library_named
    from shardmath.distribution import Slab
    from shardmath.handles.allocation import empty_on_heap
    from shardmath.linalg.advanced import MatmulEpilog, matmul

    torch.cuda.set_device(context.device_id)
    size, library, splits = context.size, library_named("torch"), [Slab.X] * 3
    device = torch.device("cuda", context.device_id)

    def full(shape, dtype, value):
        if heap:
            made = empty_on_heap(context, library, shape, str(dtype).removeprefix("torch."))
            return made.fill_(value)
        return torch.full(shape, value, dtype=dtype, device=device)

    x, y = (full(shape, torch.float64, 1) for shape in ((16, 8 * size), (8, 24)))
    side, results = torch.cuda.Stream(device), []
    side.wait_stream(torch.cuda.current_stream())

    def called(stream=None):
        with context, torch.no_grad():
            d, extras = matmul(
                x, y, distributions=splits, epilog=MatmulEpilog.RELU_AUX, stream=stream
            )
        results.append((d, extras["relu_aux"]))

    def in_a_thread(call):
        errors = []

        def run():
            try:
                call()
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return errors

    def on_side():
        with torch.cuda.stream(side):
            called()

    for call in (called, on_side) * 3:
        call()
    nbytes = results[-1][1].numel()
    dirty = [full((nbytes,), torch.uint8, 255) for _ in range(64)]
    torch.cuda.synchronize()
    del dirty
    assert context.heap.used >= 0  # what was dropped is free now, and as it was
    results.clear()
    errors = [in_a_thread(called), in_a_thread(on_side)]
    torch.cuda.synchronize()
    rows = [
        masks.cpu()[:2].unique().tolist() + masks.cpu()[2:].unique().tolist()
        for _, masks in results
    ]
    right = [bool((d == 8 * size).all()) for d, _ in results]
    return errors, rows, right


@pytest.mark.parametrize("heap", [True, False])
def test_outputs_of_an_epilog_in_a_thread_that_is_new(gpus, size, heap):
    wanted = ([[], []], [[255, 0]] * 2, [True] * 2)
    assert gpus.run(from_threads, heap, ranks=size) == [wanted] * size
