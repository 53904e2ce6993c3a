"""This package's own functions, called with arrays that know how they are split."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.fft
from split_arrays import agree, elements, host

import shardmath
from shardmath import collectives, fft
from shardmath.distribution import Box, Replicated, Slab, redistribute
from shardmath.linalg.advanced import MatmulEpilog, matmul


def products(context):
    a, b, c = elements((6, 5), "f8"), elements((5, 7), "f8", 1), elements((6, 7), "f8", 2)
    with context:
        x, y = shardmath.from_global(a, Slab.X), shardmath.from_global(b, Slab.Y)
        agree(matmul(x, y), a @ b, close=True)
        assert matmul(x, y).distribution == Slab.X
        z = shardmath.from_global(c, Slab.Y)
        result = matmul(x, y, z, alpha=2, beta=-1, epilog=MatmulEpilog.RELU)
        assert result.distribution == Slab.Y
        agree(result, np.maximum(2 * a @ b - c, 0), close=True)
        whole = shardmath.from_global(a.T, Replicated())
        agree(matmul(whole, x, alpha=0.5), a.T @ a / 2, close=True)


def transforms(context):
    a = elements((6, 5), "f8")
    with context:
        x = shardmath.from_global(a, Slab.X)
        spectrum = fft.rfft(x, distribution=Slab.Y)
        assert spectrum.distribution == Slab.Y
        agree(spectrum, np.fft.rfft2(a), close=True)
        again = fft.irfft(spectrum, norm="backward", options={"last_axis_parity": "odd"})
        agree(again, a, close=True)
        out = shardmath.empty((6, 5), complex, distribution=Slab.X)
        z = x + 0j
        assert fft.fft(z, out=out) is out
        agree(out, np.fft.fft2(a), close=True)
        agree(fft.ifft(fft.fft(z, axes=[0]), axes=[0]), 6 * a.astype(complex), close=True)
        boxes = z[1:]
        assert isinstance(boxes.distribution, Box) or context.size == 1
        agree(fft.fft(boxes, norm="ortho"), np.fft.fft2(a[1:], norm="ortho"), close=True)
        agree(fft.rfft(x[1:]), np.fft.rfft2(a[1:]), close=True)


def moves(context):
    a = elements((6, 5), "f4")
    with context:
        x = shardmath.from_global(a, Slab.X)
        agree(redistribute(x, Slab.Y), a)
        out = shardmath.empty((6, 5), "f4", distribution=Slab.Y)
        assert redistribute(x, Slab.Y, out=out) is out
        agree(out, a)
        agree(collectives.all_gather(x), a)
        size, rank = context.size, context.rank
        same = shardmath.array(np.full((3, 2), rank, "f8"), Box((3 * rank, 0), (3 * rank + 3, 2)))
        total = np.full((3, 2), sum(range(size)), "f8")
        agree(collectives.all_reduce(same), total)
        agree(collectives.broadcast(same, root=size - 1), np.full((3, 2), size - 1.0))
        scattered = collectives.reduce_scatter(same, axis=-2)
        assert scattered.distribution == Slab.X
        agree(scattered, total)
        every = shardmath.ones(3, distribution=Replicated())
        assert collectives.all_reduce(every, out=every) is every
        assert host(every).tolist() == [size] * 3


def by_keyword(context):
    a = elements((6, 5), "f8")
    with context:
        x = shardmath.from_global(a, Slab.X)
        whole = shardmath.ones(3, distribution=Replicated())
        agree(collectives.all_reduce(x=whole), np.full(3, context.size, "f8"))
        assert collectives.all_reduce(op="max", x=whole, out=whole) is whole
        agree(collectives.all_gather(axis=0, x=x), a)
        agree(collectives.broadcast(x=whole), np.ones(3))
        assert collectives.reduce_scatter(x=whole, axis=0).distribution == Slab.X
        agree(redistribute(x, distribution=Slab.Y), a)
        agree(redistribute(x, output_distribution=Slab.Y), a)
        agree(fft.dct(axis=0, x=x, type=3), scipy.fft.dct(a, 3, axis=0), close=True)
        agree(matmul(x, x.T, c=x @ x.T, beta=1), 2 * a @ a.T, close=True)


def mistakes(context):
    with context:
        x = shardmath.ones((4, 4), distribution=Slab.X)
        part = x.local
        arrays_first = context.rank == 0
        for call in (
            lambda: matmul(x, part, distributions=[Slab.X] * 3),
            lambda: matmul(x, x) if arrays_first else matmul(x, part),
            lambda: collectives.all_reduce(x, out=part),
            lambda: collectives.all_reduce(part, out=x),
            lambda: collectives.all_reduce(x=part if arrays_first else x, out=x),
            lambda: redistribute(x, Slab.Y, out=part),
            lambda: fft.rfft(x, out=part.astype(complex)),
        ):
            with pytest.raises(TypeError, match=r"make arrays of the parts"):
                call()
        with pytest.raises(TypeError, match="leave out distributions="):
            matmul(x, x, distributions=[Slab.X] * 3)
        with pytest.raises(ValueError, match="three Distribution objects"):
            matmul(part, part)
        with pytest.raises(ValueError, match="cannot be multiplied"):
            matmul(x, x[:3])
        with pytest.raises(NotImplementedError, match=r"x\.T"):
            matmul(x, x, qualifiers=[(False, False)] * 3)
        with pytest.raises(TypeError, match=r"redistribute\(x, Slab\.Y\)"):
            redistribute(x, Slab.X, Slab.Y)
        with pytest.raises(TypeError, match=r"redistribute\(x, Slab\.Y\)"):
            redistribute(x, Slab.X, output_distribution=Slab.Y)
        with pytest.raises(TypeError, match="positional"):
            redistribute(operand=x, output_distribution=Slab.Y)
        with pytest.raises(NotImplementedError, match=r"call it with x\.local"):
            collectives.all_to_all(x)
        with pytest.raises(NotImplementedError, match=r"async_op=True .*call it with x\.local"):
            collectives.all_gather(x, async_op=True)
        with pytest.raises(ValueError, match="every rank: norm is"):
            fft.rfft(x, norm="none")
        assert matmul(x, x).sum() == 64


def body(context):
    for check in (products, transforms, moves, by_keyword):
        check(context)
    if context.size == 2:
        mistakes(context)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_functions_take_arrays(contexts, ranks):
    contexts.run(body, ranks=ranks)
