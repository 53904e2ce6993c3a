"""Train a transformer block whose tokens are split over the ranks, as one process would.

python -m shardmath run -n 2 examples/sequence_parallel.py

Every rank has some of the tokens, but for what each step needs besides:

    attention   q, k, v         tokens -> heads    all tokens of some heads (Ulysses' exchange)
                softmax(q k') v                    on one rank alone
                their sums      heads -> tokens    and back
    perceptron  h @ w1          rows of h are gathered, each rank has some columns of w1
                gelu(.) @ w2    sums are scattered by rows, each rank has those rows of w2

What all ranks have, and use on tokens of their own, is a `copies` of it: its gradients are summed.
The text that is learnt is this one.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

import shardmath
from shardmath.collectives import all_reduce
from shardmath.distribution import Replicated, Slab, redistribute
from shardmath.linalg.advanced import matmul

try:
    import torch
    from torch.nn import functional

    from shardmath.autograd import copies
except ImportError as reason:
    print(f"this example needs torch: {reason}")
    raise SystemExit(0) from None

TOKENS, HEADS, WIDTH, HIDDEN, STEPS = 75, 6, 24, 50, 10
SHAPES = {
    "letters": (128, WIDTH),
    "places": (TOKENS, WIDTH),
    "norms": (3, WIDTH),
    "qkv": (WIDTH, 3 * WIDTH),
    "mix": (WIDTH, WIDTH),
    "w1": (WIDTH, HIDDEN),
    "w2": (HIDDEN, WIDTH),
    "next": (WIDTH, 128),
}
SPLIT = {"w1": Slab.Y, "w2": Slab.X}  # every rank has all of the others
BY_TOKENS, BY_HEADS = Slab(0), Slab(2)  # of q, k and v: tokens, which of three, heads, numbers


def main() -> None:
    """Train on all ranks, and then alone: losses and weights are the same."""
    context = shardmath.initialize("cpu")
    text = torch.tensor(list(__doc__.encode())[: TOKENS + 1])
    rows = Slab.X.slices(context.rank, (TOKENS,))[0]
    own = {}
    for name, w in weights().items():
        part = SPLIT[name].slices(context.rank, w.shape) if name in SPLIT else ...
        own[name] = w[part].clone().requires_grad_()
    losses = train(own, text[:-1][rows], torch.arange(TOKENS)[rows], text[1:][rows], together())

    whole = {name: w.requires_grad_() for name, w in weights().items()}
    expected = train(whole, text[:-1], torch.arange(TOKENS), text[1:], alone())
    assert np.allclose(losses, expected)
    with torch.no_grad():
        for name, w in own.items():
            all_of_it = redistribute(w, SPLIT[name], Replicated()) if name in SPLIT else w
            assert torch.allclose(all_of_it, whole[name]), name
    if context.rank == 0:
        print(f"{TOKENS} tokens, {HEADS} heads on {context.size} rank(s)")
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, as in one process")
    shardmath.finalize()


def weights() -> dict[str, torch.Tensor]:
    """The same on all ranks."""
    random = np.random.default_rng(3)
    made = {
        name: torch.tensor(random.standard_normal(shape) * shape[0] ** -0.5)
        for name, shape in SHAPES.items()
    }
    return made | {"norms": torch.ones(SHAPES["norms"], dtype=torch.float64)}


def together() -> SimpleNamespace:
    """What a block does with the ranks: all arrays of tokens are split by tokens."""
    x, everywhere = Slab.X, Replicated()
    return SimpleNamespace(
        product=lambda h, w: matmul(h, w, distributions=[x, everywhere, x]),
        widen=lambda h, w: matmul(h, w, distributions=[x, SPLIT["w1"], Slab.Y]),
        narrow=lambda h, w: matmul(h, w, distributions=[Slab.Y, SPLIT["w2"], x]),
        to_heads=lambda qkv: redistribute(qkv, BY_TOKENS, BY_HEADS),
        to_tokens=lambda made: redistribute(made, Slab(0), Slab(1)),
        copies=copies,
        total=all_reduce,
    )


def alone() -> SimpleNamespace:
    """The same on one process."""

    def same(x: torch.Tensor) -> torch.Tensor:
        return x

    multiply = torch.matmul
    return SimpleNamespace(
        product=multiply,
        widen=multiply,
        narrow=multiply,
        to_heads=same,
        to_tokens=same,
        copies=same,
        total=same,
    )


def train(w, letters, places, targets, ranks) -> list[float]:
    """Take steps down the gradient; the loss before each. Every rank updates what it holds."""
    optimizer = torch.optim.AdamW(w.values(), lr=0.01)
    losses = []
    for _ in range(STEPS):
        h = ranks.copies(w["letters"])[letters] + ranks.copies(w["places"])[places]
        scores = ranks.product(block(h, w, ranks), w["next"])
        loss = ranks.total(functional.cross_entropy(scores, targets, reduction="sum")) / TOKENS
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def block(h: torch.Tensor, w: dict[str, torch.Tensor], ranks: SimpleNamespace) -> torch.Tensor:
    """Attention to the tokens before each, and a perceptron, of tokens x WIDTH."""
    first, second, last = ranks.copies(w["norms"])
    h = h + attention(functional.rms_norm(h, (WIDTH,), first), w, ranks)
    wide = ranks.widen(functional.rms_norm(h, (WIDTH,), second), w["w1"])
    h = h + ranks.narrow(functional.gelu(wide), w["w2"])
    return functional.rms_norm(h, (WIDTH,), last)


def attention(h: torch.Tensor, w: dict[str, torch.Tensor], ranks: SimpleNamespace) -> torch.Tensor:
    """What each head finds, of tokens x WIDTH. q, k and v go to their heads in one exchange."""
    qkv = ranks.product(h, w["qkv"]).reshape(len(h), 3, HEADS, WIDTH // HEADS)
    q, k, v = ranks.to_heads(qkv).permute(1, 2, 0, 3)  # heads x tokens x numbers
    scores = q @ k.mT / q.shape[-1] ** 0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    made = scores.masked_fill(later, -torch.inf).softmax(-1) @ v
    back = ranks.to_tokens(made)  # all heads of some tokens
    return ranks.product(back.transpose(0, 1).reshape(len(h), WIDTH), w["mix"])


if __name__ == "__main__":
    main()
