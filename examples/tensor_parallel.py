"""Train a layer whose weights are split over the ranks: torch differentiates through the products.

python -m shardmath run -n 4 examples/tensor_parallel.py

             w1                    w2                 h = relu(x @ w1)   rows of x are gathered
         r0 r1 r2 r3         r0 +---------+           y = h @ w2         sums are scattered by rows
    x   +--+--+--+--+        r1 +---------+
 r0 --  |  |  |  |  |        r2 +---------+           Every rank has some tokens, some columns of
 r1 --  |  |  |  |  |        r3 +---------+           w1, and the rows of w2 that belong to them.
"""

from __future__ import annotations

import numpy as np

import shardmath
from shardmath.collectives import all_reduce
from shardmath.distribution import Replicated, Slab, redistribute
from shardmath.linalg.advanced import matmul

try:
    import torch
except ImportError as reason:
    print(f"this example needs torch: {reason}")
    raise SystemExit(0) from None

TOKENS, WIDTH, HIDDEN, STEPS = 30, 10, 22, 25


def main() -> None:
    """Train on all ranks, and then alone: losses and weights are the same."""
    context = shardmath.initialize("cpu")
    random = np.random.default_rng(7)
    x, target, w1, w2 = (
        torch.tensor(random.standard_normal(shape) / 3)
        for shape in [(TOKENS, WIDTH), (TOKENS, WIDTH), (WIDTH, HIDDEN), (HIDDEN, WIDTH)]
    )
    rows = Slab.X.slices(context.rank, x.shape)
    own1 = w1[Slab.Y.slices(context.rank, w1.shape)].clone().requires_grad_()
    own2 = w2[Slab.X.slices(context.rank, w2.shape)].clone().requires_grad_()
    losses = train(x[rows], target[rows], own1, own2, split_layer, all_reduce)

    alone = [w.clone().requires_grad_() for w in (w1, w2)]
    expected = train(x, target, *alone, whole_layer, lambda loss: loss)
    assert np.allclose(losses, expected)
    with torch.no_grad():
        assert torch.allclose(redistribute(own1, Slab.Y, Replicated()), alone[0])
    if context.rank == 0:
        print(f"{TOKENS} tokens, {WIDTH} x {HIDDEN} weights on {context.size} rank(s)")
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, as in one process")
    shardmath.finalize()


def train(x, target, w1, w2, layer, total) -> list[float]:
    """Take steps down the gradient; the loss before each. Every rank updates what it holds."""
    optimizer = torch.optim.SGD([w1, w2], lr=0.05)
    losses = []
    for _ in range(STEPS):
        loss = total(((layer(x, w1, w2) - target) ** 2).sum())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def split_layer(x, w1, w2):
    """Rows of x and of the result, columns of w1, rows of w2; no exchange between the products."""
    h = torch.relu(matmul(x, w1, distributions=[Slab.X, Slab.Y, Slab.Y]))
    return matmul(h, w2, distributions=[Slab.Y, Slab.X, Slab.X])


def whole_layer(x, w1, w2):
    """The same on one process."""
    return torch.relu(x @ w1) @ w2


if __name__ == "__main__":
    main()
