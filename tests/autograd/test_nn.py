"""Layers whose tokens, features or heads are split have the results and gradients of whole ones."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch

import shardmath
from shardmath import collectives, nn
from shardmath.autograd import table
from shardmath.distribution import Box, Replicated, Slab

ROWS, COLUMNS, EVERYWHERE = Slab(0), Slab(1), Replicated()
# On 3 ranks: tokens that are matrices, one batch, even and uneven ones, more axes, few and none.
# Shape, and the leading axis that is split.
SHAPES = [
    ((7, 4), 0),
    ((1, 7, 4), 1),
    ((2, 6, 4), 1),
    ((2, 7, 4), 1),
    ((7, 2, 4), 0),
    ((3, 2, 2, 4), 1),
    ((2, 1, 4), 1),
    ((0, 3, 4), 0),
    ((0, 7, 4), 1),
]
ACTIVATIONS = {
    None: lambda y: y,
    "relu": torch.relu,
    "gelu": lambda y: torch.nn.functional.gelu(y, approximate="tanh"),
}


def ways(axes, front):
    """Distributions of x, weight and result, where the leading axis `front` may be split."""
    tokens, features = Slab(front), Slab(axes - 1)
    return [
        (tokens, ROWS, features),
        (features, COLUMNS, tokens),
        (features, COLUMNS, EVERYWHERE),
        (features, COLUMNS, features),
        (EVERYWHERE, ROWS, features),
        (tokens, EVERYWHERE, tokens),
        (EVERYWHERE, EVERYWHERE, EVERYWHERE),
    ]


def part(context, x, distribution):
    return x[distribution.slices(context.rank, x.shape, size=context.size)]


def cases():
    """(number, shape, distributions, activation, whether there are biases)."""
    number = 0
    for shape, front in SHAPES:
        for split in ways(len(shape), front):
            number += 1
            yield number, shape, split, [*ACTIVATIONS][number % 3], number % 2 == 0


def whole_layers(shape, number, activation, has_bias):
    """x, two weights, two biases, and their layers' results, of one process."""
    random = np.random.default_rng(number)
    extents = [shape, (5, shape[-1]), (4, shape[-1]), (5,), (4,)]
    given = [torch.tensor(random.standard_normal(n), requires_grad=True) for n in extents]
    pairs = zip(given[1:3], given[3:], strict=True)
    made = [ACTIVATIONS[activation](given[0] @ w.T + (b if has_bias else 0)) for w, b in pairs]
    return given, [*made, made[0]]


def total(results):
    return sum((n + 1) * (y * y).sum() for n, y in enumerate(results))


def check_layers(context, kind):
    """The cases whose results, or gradients, are others than those of one process. Gradients are
    those of one weight or of both, and lie as the weights do, so that torch keeps them as they are.
    """
    wrong = []
    with context:
        for number, shape, split, activation, has_bias in cases():
            whole, expected = whole_layers(shape, number, activation, has_bias)
            of_x, of_w, of_y = split
            of_bias = ROWS if of_y == Slab(len(shape) - 1) else EVERYWHERE
            places = [of_x, of_w, of_w, of_bias, of_bias]
            own = [part(context, x.detach(), of) for x, of in zip(whole, places, strict=True)]
            if kind == "numpy":
                own = [x.numpy() for x in own]
            elif kind == "gradients":
                own = [x.clone().requires_grad_() for x in own]
            bound = [of_x.bind(shape), of_w, of_y] if number % 5 == 0 else split
            words = {"distributions": bound, "activation": activation}
            biases = own[3:] if has_bias else None
            one, both = kind == "numpy" or number // 2 % 2, kind == "numpy" or not number // 2 % 2
            made = list(nn.linear(own[0], own[1:3], biases, **words)) if both else []
            if one:
                made.append(nn.linear(own[0], own[1], biases and biases[0], **words))
            expected = [*expected[: 2 * both], *expected[2 : 2 + one]]
            pairs = [(y, part(context, z, of_y)) for y, z in zip(made, expected, strict=True)]
            if kind == "gradients":
                loss = total(made) if of_y == EVERYWHERE else collectives.all_reduce(total(made))
                used = [0, 1, *[2] * both, *[3] * has_bias, *[4] * (both and has_bias)]
                found = torch.autograd.grad(loss, [own[n] for n in used])
                right = torch.autograd.grad(total(expected), [whole[n] for n in used])
                each = zip(found, right, used, strict=True)
                pairs += [(x, part(context, y, places[n])) for x, y, n in each]
                if any(not x.is_contiguous() for x in found[1:]):
                    wrong.append(f"{shape} {split}: a gradient does not lie as its weight")
            for x, y in pairs:
                z = torch.as_tensor(x)
                if z.shape != y.shape or not torch.allclose(z, y):
                    wrong.append(f"{shape} {split} {activation} {has_bias}")
    return wrong


@pytest.mark.parametrize("kind", ["numpy", "gradients"])
def test_layers(contexts, kind):
    assert contexts.run(check_layers, kind, ranks=3) == [[]] * 3


def count(context):
    """Which collectives three products of one x call, forward and backward."""
    calls = []

    def counted(function):
        def call(*given, **words):
            calls.append(function.__name__)
            return function(*given, **words)

        return call

    names = ("all_gather", "reduce_scatter", "all_reduce")
    counting = {name: counted(getattr(collectives, name)) for name in names}
    patched = (
        patch.multiple(collectives, **counting),
        patch.object(table, "multiply", counted(table.multiply)),
        patch.object(table, "reduce_scatter_by_own", counted(table.reduce_scatter_by_own)),
    )
    with context, patched[0], patched[1], patched[2]:
        x = torch.ones(1, 2, 4, requires_grad=True)
        weights = [torch.ones(3, 4, requires_grad=True) for _ in range(3)]
        made = nn.linear(x, weights, distributions=[Slab(1), ROWS, Slab(2)])
        sum(y.sum() for y in made).backward()
    return calls


def test_tokens_are_gathered_once_and_sums_scattered_once(contexts):
    assert contexts.run(count, ranks=2) == [["all_gather", "reduce_scatter_by_own"]] * 2


def check_heads(context):
    with context:
        x = torch.arange(2.0 * 7 * 5 * 3).reshape(2, 7, 5, 3)
        own = part(context, x, Slab(1)).requires_grad_()
        made = nn.tokens_to_heads(own)
        back = nn.heads_to_tokens(made, token_axis=1, head_axis=-2, global_shape=x.shape)
        (gradient,) = torch.autograd.grad((back * back).sum(), own)
        turned = nn.tokens_to_heads(own.movedim(2, 1), token_axis=-2, head_axis=-3)
        return (
            torch.equal(made, part(context, x, Slab(2))),
            torch.equal(back, own),
            torch.equal(gradient, 2 * own),
            torch.equal(turned, part(context, x, Slab(2)).movedim(2, 1)),
        )


def test_tokens_become_heads_and_heads_tokens(contexts):
    assert contexts.run(check_heads, ranks=3) == [(True,) * 4] * 3


TOKENS, FEATURES = Slab(1), Slab(2)
MISTAKES = {
    "activation": (lambda x, w: {"activation": "tanh"}, 'None, "relu" or "gelu"'),
    "two distributions": (lambda x, w: {"distributions": [TOKENS, ROWS]}, "three, a Slab"),
    "a box": (lambda x, w: {"distributions": [Box((0,), (1,))] * 3}, "three, a Slab"),
    "an axis too many": (lambda x, w: {"distributions": [Slab(3), ROWS, FEATURES]}, "axis 3"),
    "other axes": (
        lambda x, w: {"distributions": [TOKENS, ROWS, Slab(0)]},
        "other leading axes: [0, 1]",
    ),
    "one axis": (lambda x, w: {"x": x[0, 0]}, "two axes or more"),
    "no array": (lambda x, w: {"x": 1.0}, "not float"),
    "no part": (lambda x, w: {"weight": shardmath.array(w, Replicated())}, "pass x.local"),
    "other features": (lambda x, w: {"x": x[..., :3]}, "x has 3 features"),
    "biases": (lambda x, w: {"bias": [w[:, 0], w[:, 0]]}, "1 weight(s) have 2 biases"),
    "a bias": (lambda x, w: {"bias": w[0]}, "has a bias (4,)"),
    "uneven tokens": (
        lambda x, w: {"distributions": [TOKENS, COLUMNS, TOKENS]},
        "call redistribute first",
    ),
    "heads: no array": (lambda x, w: {"x": 1.0}, "arrays"),
    "heads: a matrix": (lambda x, w: {"x": w}, "x has 2 axes"),
    "heads: an axis too many": (lambda x, w: {"head_axis": 3}, "x has 3 axes"),
}


def mistake(context, name):
    """What is said where rank 1 makes it."""
    with context:
        x, w = np.ones((2, 3, 4)), np.ones((5, 4))
        call, given = nn.linear, {"x": x, "weight": w, "distributions": [TOKENS, ROWS, FEATURES]}
        if name.startswith("heads"):
            call, given = nn.tokens_to_heads, {"x": x}
        if context.rank == 1 or name in ("uneven tokens", "no part"):
            given |= MISTAKES[name][0](x, w)
        try:
            call(**given)
        except (TypeError, ValueError) as error:
            return str(error)
        return "nothing"


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_raised_on_all_ranks(contexts, name):
    (said,) = set(contexts.run(mistake, name, ranks=2))
    assert MISTAKES[name][1] in said
