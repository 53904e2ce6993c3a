"""Products of bfloat16 that torch multiplies and rounds: what follows one is left to us."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch

from arrangements import part_of
from shardmath.arrays.libraries import torch as torch_arrays
from shardmath.distribution import BlockCyclic, ProcessGrid, Replicated, Slab
from shardmath.linalg.advanced import MatmulEpilog, matmul
from shardmath.program import binding

X, Y, R = Slab.X, Slab.Y, Replicated()


def layouts(size):
    blocks = BlockCyclic(ProcessGrid(shape=(size, 1), layout=ProcessGrid.Layout.COL_MAJOR), (5, 3))
    return [(X, X, X), (X, Y, X), (Y, Y, Y), (X, R, X), (Y, X, R), (blocks, blocks, blocks)]


def always():
    """Whatever the cores have, and however small."""
    return (
        patch.object(torch_arrays, "_multiplies_bfloat16", lambda: True),
        patch.object(torch_arrays, "_WORTH", 0),
    )


def part(x, d, context, order="C"):
    local = np.array(part_of(x, d, context.rank, context.size), order=order)
    return torch.from_numpy(local).bfloat16()


def check(context, shape):
    """The worst error of each layout and order, in what one rounding of exact sums may be off by;
    and how many products were torch's.
    """
    m, n, k = shape
    rng = np.random.default_rng(3)
    a, b = (torch.from_numpy(rng.normal(size=s)).bfloat16().double() for s in ((m, k), (k, n)))
    exact = a @ b
    bound = 2.0**-8 * abs(exact) + (k + 2) * 2.0**-24 * (abs(a) @ abs(b)) + 1e-37
    found, limited, unlimited = [], *always()
    plain = torch_arrays.Torch.matmul

    def counted(self, *args):
        taken = plain(self, *args)
        done.append(taken)
        return taken

    with context, limited, unlimited, patch.object(torch_arrays.Torch, "matmul", counted):
        for dists in layouts(context.size):
            for order in "CF":
                done: list[bool] = []
                mine = [
                    part(x.numpy(), d, context, order) for x, d in zip((a, b), dists, strict=False)
                ]
                d = matmul(*mine, distributions=dists).double().numpy()
                want, most = (
                    part_of(x.numpy(), dists[2], context.rank, context.size) for x in (exact, bound)
                )
                found.append((float((abs(d - want) / most).max(initial=0)), all(done)))
    return found


@pytest.mark.parametrize("shape", [(40, 24, 36), (7, 9, 8), (64, 1, 130)])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_sum_is_rounded_once(contexts, thin_contexts, shape, size):
    for pool in (contexts, thin_contexts):
        for found in pool.run(check, shape, ranks=size):
            assert all(error <= 1 and done for error, done in found), found


FORMS = {
    "plain": (True, lambda a, b, c: matmul(a, b, distributions=[X] * 3)),
    "alpha": (False, lambda a, b, c: matmul(a, b, alpha=2, distributions=[X] * 3)),
    "c": (False, lambda a, b, c: matmul(a, b, c, beta=1, distributions=[X] * 3)),
    "epilog": (
        False, lambda a, b, c: matmul(a, b, epilog=MatmulEpilog.RELU, distributions=[X] * 3),
    ),
    "wide": (
        False, lambda a, b, c: matmul(a, b, options={"result_type": 0}, distributions=[X] * 3),
    ),
    "float32": (False, lambda a, b, c: matmul(a.float(), b.float(), distributions=[X] * 3)),
    "float16": (False, lambda a, b, c: matmul(a.half(), b.half(), distributions=[X] * 3)),
    "reduces": (
        False,
        lambda a, b, c: matmul(
            a.T.contiguous(), b, distributions=[Y, X, X], options={"strategy": "reduce-scatter"}
        ),
    ),
}  # fmt: skip


def check_forms(context):
    """Which forms torch multiplied; and whether all are right."""
    a, b, c = (torch.full((8, 8 * context.size), float(v)).bfloat16() for v in (1, 1, 3))
    results, limited, unlimited = {}, *always()
    plain = torch_arrays.Torch.matmul
    for name, (_, call) in FORMS.items():
        taken = []

        def counted(self, *args, taken=taken):
            taken.append(plain(self, *args))
            return taken[-1]

        with context, limited, unlimited, patch.object(torch_arrays.Torch, "matmul", counted):
            d = call(a, b, c)
        wanted = 8 * context.size * (2 if name == "alpha" else 1) + 3 * (name == "c")
        results[name] = any(taken), bool((d == wanted).all())
    with context, limited, unlimited, patch.object(binding, "_WHOLE_ELEMENTS", 0):
        d = matmul(a, b, distributions=[X] * 3)
    return results, bool((d == 8 * context.size).all())


def test_only_what_nothing_follows_is_torch_s(contexts):
    wanted = {name: (taken, True) for name, (taken, _) in FORMS.items()}
    for found in contexts.run(check_forms, ranks=2):
        assert found == (wanted, True)


def test_what_torch_cannot_express_is_left_to_us():
    limited, unlimited = always()
    library = torch_arrays.Torch()
    a, out = (library.host_view(torch.full((8, 8), v).bfloat16()) for v in (1.0, 0.0))
    frozen = a.copy()
    frozen.flags.writeable = False
    with limited, unlimited:
        assert [library.matmul(x, a, out) for x in (a, a[::-1], frozen)] == [True, False, False]
    assert (out == 8).all()
