"""Products that come again: one graph where all ranks repeat, launched anew where one does not."""

from __future__ import annotations

from unittest.mock import patch

import pytest

KINDS = {
    "gather": ("X", "X", "X"),
    "reduce": ("Y", "X", "X"),
    "move": ("X", "Y", "Y"),
    "share": ("Y", "X", None),  # on the heap peers write the results, and know where they lie
}


def repeated(context, kind, dtype, heap):
    """Wrong results; for each execution, whether it was launched again; and whether peers wrote
    the results, for all that one kernel made.
    """
    import torch

    from shardmath.arrays import library_named
    from shardmath.distribution import Replicated, Slab
    from shardmath.linalg.advanced import Matmul
    from shardmath.operators.matmul.gpu.all_reduce import GemmAllReduce
    from shardmath.operators.repeats import Known
    from shardmath.symmetric.allocation import empty_on_heap

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
    again, wrong, launch, share = [], [], Known.launch, GemmAllReduce.launch

    def counted(self, *args):
        again[-1] = True
        launch(self, *args)

    def checked(product, value):
        again.append(False)
        d = product.execute()
        torch.cuda.synchronize()
        if not (d == k * value).all():
            wrong.append((len(again), d.flatten()[:3].tolist()))

    with (
        context,
        patch.object(Known, "launch", counted),
        patch.object(GemmAllReduce, "launch", autospec=True, side_effect=share) as shared,
    ):
        with Matmul(a, b, **named) as product:
            product.plan()
            for turn in range(6):  # results lie in several places
                a.fill_(turn)
                b.fill_(1)
                checked(product, turn)
            steady = again[1:]
            if context.rank == 0:  # one rank's operand lies elsewhere: all tell each other anew
                product.reset_operands_unchecked(a=other)
            other.fill_(3)
            a.fill_(3)
            for _ in range(5):
                checked(product, 3)
            changed, steady = again[6], [*steady, *again[7:]]
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
    return [wrong, steady, changed, ["shown" in each.kwargs for each in shared.call_args_list]]


@pytest.mark.parametrize("heap", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_all_ranks_repeat_is_one_graph(gpus, size, kind, dtype, heap):
    one_kernel = (kind, dtype) == ("share", "bfloat16") and size > 1
    for wrong, steady, changed, shown in gpus.run(repeated, kind, dtype, heap, ranks=size):
        assert (wrong, changed) == ([], False)
        assert set(shown) == ({heap, False} if one_kernel else set())  # the larger one's never
        # Where peers write results, those repeat that lie where others have lain.
        assert any(steady) if one_kernel and heap else all(steady)
