"""Gradients of distributed operations are those that torch finds in one process."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from arrangements import part_of
from shardmath import autograd, collectives, fft
from shardmath.distribution import BlockCyclic, ProcessGrid, Replicated, Slab, redistribute
from shardmath.linalg.advanced import Matmul, matmul

SHAPES = [(13, 7, 11), (2, 9, 1), (5, 1, 6)]  # m, n, k: on more than 2 ranks some parts are empty


def distributions(context):
    grid = ProcessGrid(shape=(context.size, 1), layout=ProcessGrid.Layout.ROW_MAJOR)
    return (Slab.X, Slab.Y, Replicated(), BlockCyclic(grid, (2, 3)))


def tensor(shape, dtype, device):
    random = np.random.default_rng(shape)
    values = random.standard_normal(shape)
    if dtype.is_complex:
        values = values + 1j * random.standard_normal(shape)
    return torch.tensor(values, dtype=dtype, device=device, requires_grad=True)


def loss_of(y):
    return (y * y.conj()).real.sum() + (y * (2 - 1j if y.is_complex() else 3)).real.sum()


def of_one_process(shape, dtype, device):
    """The factors of a product of m x k by k x n, and what their gradients are, on the host."""
    m, n, k = shape
    whole = tensor((m, k), dtype, device), tensor((k, n), dtype, device)
    (loss_of(whole[0] @ whole[1]) / 2).backward()
    return [
        x.resolve_conj().cpu().numpy()
        for x in (*(x.detach() for x in whole), *(x.grad for x in whole))
    ]


def check_products(context, dtype, device="cpu", shapes=SHAPES, kinds=4):
    """Every combination of distributions, of one shape each; results are redistributed."""
    wrong = []
    dtype = getattr(torch, dtype)
    known = {shape: of_one_process(shape, dtype, device) for shape in shapes}

    def part(x, distribution):
        mine = part_of(x, distribution, context.rank, context.size)
        return torch.tensor(mine, device=device)

    with context:
        combinations = itertools.product(distributions(context)[:kinds], repeat=3)
        for shape, (of_a, of_b, of_d) in zip(itertools.cycle(shapes), combinations, strict=False):
            *whole, of_first, of_second = known[shape]
            own = [part(x, of).requires_grad_() for x, of in zip(whole, (of_a, of_b), strict=True)]
            y = autograd.matmul(*own, distributions=[of_a, of_b, of_d])
            loss = autograd.all_reduce(loss_of(autograd.redistribute(y, of_d, Slab.X))) / 2
            loss.backward()
            wanted = part(of_first, of_a), part(of_second, of_b)
            for x, expected in zip(own, wanted, strict=True):
                if x.grad.shape != x.shape or not torch.allclose(x.grad, expected):
                    wrong.append((shape, repr((of_a, of_b, of_d))))
    return wrong


@pytest.mark.parametrize(("size", "dtype"), [(1, "float64"), (3, "float64"), (4, "complex128")])
def test_products(contexts, size, dtype):
    assert contexts.run(check_products, dtype, ranks=size) == [[]] * size


def check_partial(context):
    """Gradients of one factor only, of nothing, and of a mean."""
    with context:
        a, b = tensor((3, 4), torch.float64, "cpu"), tensor((4, 5), torch.float64, "cpu")
        everywhere = [Replicated()] * 3
        autograd.matmul(a, b.detach(), distributions=everywhere).sum().backward()
        assert torch.allclose(a.grad, b.detach().sum(1).expand(3, 4)) and b.grad is None
        assert not autograd.matmul(a.detach(), b.detach(), distributions=everywhere).requires_grad
        with torch.no_grad():
            assert not autograd.matmul(a, b, distributions=everywhere).requires_grad
        autograd.all_reduce(b, op="mean").sum().backward()
        return float(b.grad.sum()) == pytest.approx(20 / context.size)


def test_one_factor_none_and_a_mean(contexts):
    assert contexts.run(check_partial, ranks=3) == [True] * 3


REFUSED = {
    "matmul": lambda a: matmul(a, a, distributions=[Slab.X] * 3),
    "Matmul": lambda a: Matmul(a, a, distributions=[Slab.X] * 3),
    "redistribute": lambda a: redistribute(a, Slab.X, Slab.Y),
    "fft": lambda a: fft.rfft(a, distribution=Slab.X),
    "all_reduce": collectives.all_reduce,
    "out": lambda a: collectives.all_reduce(a.detach(), out=a),
    "all_gather": collectives.all_gather,
}


def check_compiled(context):
    """A layer that torch.compile has seen has the loss and the gradients that it had before."""
    x = tensor((6, 5), torch.float64, "cpu").detach()
    w = tensor((5, 4), torch.float64, "cpu")

    def layer(w):
        y = autograd.matmul(x, w, distributions=[Replicated(), Replicated(), Slab.X]) * 2
        y = autograd.redistribute(y, Slab.X, Slab.Y) + 1
        return autograd.all_reduce((y * y).sum()) / 2

    found = []
    with context:
        for call in (layer, torch.compile(layer, backend="eager")):
            loss = call(w)
            found.append((loss, *torch.autograd.grad(loss, w)))
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_compiled_layers(compiling_contexts):
    assert compiling_contexts.run(check_compiled, ranks=2) == [True] * 2


def say(context, call, differing):
    x = torch.ones((2, 2 * context.size), requires_grad=context.rank in differing)
    with context:
        try:
            call(x)
        except ValueError as error:
            return str(error)
        return "nothing"


@pytest.mark.parametrize("name", REFUSED)
def test_a_gradient_is_never_lost_without_a_word(contexts, name):
    (said,) = set(contexts.run(refuse, name, ranks=3))
    assert "rank 1" in said and "requires grad" in said and "torch.no_grad()" in said


def refuse(context, name):
    said = say(context, REFUSED[name], [1])
    with torch.no_grad():
        assert say(context, REFUSED["all_reduce"], [1]) == "nothing"
    return said


MISTAKES = {
    "requires grad on one rank": (
        lambda a: autograd.redistribute(a, Slab.X, Slab.Y),
        "rank 1 has [True]",
    ),
    "no array": (lambda a: autograd.all_reduce([1.0]), "got list"),
    "op": (lambda a: autograd.all_reduce(a, op="max"), "not 'max'"),
    "shape": (
        lambda a: autograd.matmul(a.detach(), a.detach()[:1], distributions=[Slab.X] * 3),
        "inner extents",
    ),
}


def mistake(context, name):
    return say(context, MISTAKES[name][0], [1])


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_raised_on_all_ranks(contexts, name):
    (said,) = set(contexts.run(mistake, name, ranks=2))
    assert MISTAKES[name][1] in said
