"""Train a transformer block whose tokens are split over the ranks, as one process would.

python -m shardmath run -n 2 examples/sequence_parallel.py          (on GPUs: ... .py cuda)

The block reads handwritten digits. The 64 pixels of an image are tokens, and a 65th token asks
which digit it is; 2 ranks cannot share 65 evenly. Arrays are images x tokens x features, and every
rank has some of the tokens. Only these steps need more:

    attention   q, k, v             tokens -> heads   all tokens of some heads (Ulysses' exchange)
                softmax(q k') v                       on one rank alone
                their sums          heads -> tokens   and back
    perceptron  gelu(h @ w1' + b1)  tokens of h are gathered; each rank has some features
                . @ w2' + b2        sums are scattered by tokens; each rank has those columns of w2

It is trained with float64 and, in torch's autocast, with bfloat16; each time on all ranks, and once
more in one process to compare.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np

import shardmath
from shardmath import nn
from shardmath.collectives import all_reduce, broadcast
from shardmath.distribution import Replicated, Slab, redistribute

try:
    import torch
    from torch.nn import functional

    from shardmath.autograd import copies
except ImportError as reason:
    print(f"this example needs torch: {reason}")
    raise SystemExit(0) from None

IMAGES, TOKENS, HEADS, WIDTH, HIDDEN, STEPS = 24, 65, 3, 24, 50, 8
SHAPES = {
    "brightness": (17, WIDTH),
    "places": (TOKENS, WIDTH),
    **dict.fromkeys(("q", "k", "v", "mix"), (WIDTH, WIDTH)),
    "w1": (HIDDEN, WIDTH),
    "b1": (HIDDEN,),
    "w2": (WIDTH, HIDDEN),
    "b2": (WIDTH,),
    "digits": (10, WIDTH),
}
SPLIT = {"w1": Slab(0), "b1": Slab(0), "w2": Slab(1)}  # every rank has all of the others
EVERYWHERE, BY_TOKENS, BY_FEATURES = Replicated(), Slab(1), Slab(2)


def main(device: str = "cpu") -> None:
    """Train on all ranks, and then alone: losses and weights are the same."""
    context = shardmath.initialize(device)
    if device != "cpu":
        torch.cuda.set_device(context.device_id)
    torch.set_default_device(device)
    images, labels = read_digits(context.rank)
    for dtype, error in ((torch.float64, 1e-9), (torch.bfloat16, 0.02)):
        whole = weights(torch.promote_types(dtype, torch.float32))
        own = {name: part(w, SPLIT.get(name, EVERYWHERE)) for name, w in whole.items()}
        mine = part(images, BY_TOKENS), part(torch.arange(TOKENS), Slab(0))
        losses = train(own, *mine, labels, together(), dtype)
        expected = train(whole, images, torch.arange(TOKENS), labels, alone(), dtype)
        assert np.allclose(losses, expected, rtol=error), (losses, expected)
        assert losses[-1] < 0.9 * losses[0]
        with torch.no_grad():
            for name, w in own.items() if dtype == torch.float64 else ():
                all_of_it = redistribute(w, SPLIT[name], EVERYWHERE) if name in SPLIT else w
                assert torch.allclose(all_of_it, whole[name]), name
        if context.rank == 0:
            print(f"{TOKENS} tokens, {HEADS} heads on {context.size} rank(s), {dtype}")
            print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}, as in one process")
    shardmath.finalize()


def read_digits(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The brightness of each pixel, 0 to 16, as images x tokens, and the digits."""
    if rank != 0:
        return broadcast(None), broadcast(None)
    try:
        from sklearn.datasets import load_digits  # a large library: only the reader loads it
    except ImportError:
        sys.exit("this example needs scikit-learn: pip install 'shardmath[demo]'")

    found = load_digits()
    pixels = torch.tensor(found.data[:IMAGES], dtype=torch.int64)
    asking = torch.zeros(IMAGES, 1, dtype=torch.int64)
    return broadcast(torch.cat([asking, pixels], 1)), broadcast(torch.tensor(found.target[:IMAGES]))


def weights(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The same on all ranks."""
    random = np.random.default_rng(3)
    return {
        name: torch.tensor(
            random.standard_normal(shape) * shape[-1] ** -0.5, dtype=dtype
        ).requires_grad_()
        for name, shape in SHAPES.items()
    }


def part(x: torch.Tensor, distribution: Replicated | Slab) -> torch.Tensor:
    """This rank's part of an array that all ranks have, trained if the whole is."""
    own = redistribute(x.detach(), EVERYWHERE, distribution).clone()
    return own.requires_grad_(x.requires_grad)


def together() -> SimpleNamespace:
    """The functions by which a block computes together with the other ranks."""

    def linear(x, w, bias=None, *, split, activation=None):
        return nn.linear(x, w, bias, distributions=split, activation=activation)

    return SimpleNamespace(
        linear=linear,
        to_heads=nn.tokens_to_heads,
        to_tokens=lambda y: nn.heads_to_tokens(y, token_axis=-2, head_axis=-3),
        copies=copies,
        total=all_reduce,
    )


def alone() -> SimpleNamespace:
    """The same functions in one process."""

    def same(x: torch.Tensor) -> torch.Tensor:
        return x

    def linear(x, w, bias=None, *, split, activation=None):
        if isinstance(w, list):
            return [functional.linear(x, each) for each in w]
        y = functional.linear(x, w, bias)
        return functional.gelu(y, approximate="tanh") if activation else y

    return SimpleNamespace(linear=linear, to_heads=same, to_tokens=same, copies=same, total=same)


def train(w, pixels, places, labels, ranks, dtype) -> list[float]:
    """Take steps down the gradient; the loss before each. Every rank updates what it holds."""
    optimizer = torch.optim.AdamW(w.values(), lr=0.01)
    losses = []
    for _ in range(STEPS):
        narrow = dtype == torch.bfloat16
        with torch.autocast(pixels.device.type, dtype=torch.bfloat16, enabled=narrow):
            h = ranks.copies(w["brightness"])[pixels] + ranks.copies(w["places"])[places]
            h = block(h, w, ranks)[:, places == 0]  # the token that asks, on the rank that has it
            scores = h.sum(1) @ ranks.copies(w["digits"]).T
            own = functional.cross_entropy(scores.to(h.dtype), labels) * (places == 0).sum()
            loss = ranks.total(own)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def block(h: torch.Tensor, w: dict[str, torch.Tensor], ranks: SimpleNamespace) -> torch.Tensor:
    """Attention to all tokens, and a perceptron."""
    h = h + attention(normed(h), w, ranks)
    split = [BY_TOKENS, SPLIT["w1"], BY_FEATURES]
    wide = ranks.linear(normed(h), w["w1"], w["b1"], split=split, activation="gelu")
    h = h + ranks.linear(wide, w["w2"], w["b2"], split=[BY_FEATURES, SPLIT["w2"], BY_TOKENS])
    return normed(h)


def normed(h: torch.Tensor) -> torch.Tensor:
    """Each token, scaled to numbers of about 1."""
    return functional.rms_norm(h, (WIDTH,))


def attention(h: torch.Tensor, w: dict[str, torch.Tensor], ranks: SimpleNamespace) -> torch.Tensor:
    """Attention of all heads, as images x tokens x features."""
    split = [BY_TOKENS, EVERYWHERE, BY_TOKENS]
    q, k, v = (
        ranks.to_heads(y.unflatten(-1, (HEADS, -1))).transpose(1, 2)
        for y in ranks.linear(h, [w[name] for name in "qkv"], split=split)
    )
    made = functional.scaled_dot_product_attention(q, k, v)  # images x heads x tokens x numbers
    return ranks.linear(ranks.to_tokens(made).transpose(1, 2).flatten(2), w["mix"], split=split)


if __name__ == "__main__":
    main(*sys.argv[1:])
