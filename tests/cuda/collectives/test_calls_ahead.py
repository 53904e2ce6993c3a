"""Hosts that run ahead on GPUs: calls that all ranks know are put on streams without a meeting.

In the middle of such calls the last rank makes another one. No byte of a result is written from
there on, and all ranks raise the same, at that call, a later one, or where they meet.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

from shardmath.collectives import all_gather, all_reduce, reduce_scatter

N, M = 3000, 200_000
BEFORE, AFTER = 5, 100  # calls: more than a rank may be ahead
UNTOUCHED = 7.0


def torch_on(context):
    import torch

    torch.cuda.set_device(context.device_id)
    return torch


class Calls:
    """Calls of a group, each into memory of its own that holds UNTOUCHED."""

    def __init__(self, group):
        self.torch, self.group = torch_on(group), group
        self.x = self.filled(N, 1.0)
        self.wide = self.filled(M, 1.0)
        self.whole = self.x.to(self.torch.int32)
        self.sum = self.filled(N)
        self.results = []

    def filled(self, count, value=UNTOUCHED):
        return self.torch.full((count,), value, device="cuda")

    def out(self, count=N, dtype=None):
        found = self.filled(count).to(dtype or self.torch.float32)
        self.results.append(found)
        return found

    def known(self):
        """What all ranks have agreed on."""
        for op in ("sum", "max"):
            all_reduce(self.x, op=op, out=self.sum)
        all_reduce(self.wide)
        all_reduce(self.whole)
        reduce_scatter(self.x)

    def other(self, kind):
        """The call that one rank makes."""
        group = self.group
        calls = {
            "known op": lambda: all_reduce(self.x, op="max", out=self.out()),
            "new op": lambda: all_reduce(self.x, op="product", out=self.out()),
            "known size": lambda: all_reduce(self.wide, out=self.out(M)),
            "new size": lambda: all_reduce(self.x[1:], out=self.out(N - 1)),
            "known type": lambda: all_reduce(self.whole, out=self.out(N, self.torch.int32)),
            "known operation": lambda: reduce_scatter(self.x),
            "operation": lambda: all_gather(self.x),
            "barrier": group.barrier,
            "wrong op": lambda: all_reduce(self.x, op="som"),
            "wrong out": lambda: all_reduce(self.x, out=self.out(N + 1)),
        }
        return calls[kind]

    def untouched(self):
        self.torch.cuda.synchronize()
        return all(bool((each == UNTOUCHED).all()) for each in self.results)


WORDS = {
    "known op": ("CollectiveMismatch", "op must be equal on all ranks: rank 0 has sum, rank {} has max"),  # noqa: E501
    "new op": ("CollectiveMismatch", "op must be equal on all ranks: rank 0 has sum, rank {} has product"),  # noqa: E501
    "known size": ("CollectiveMismatch", "the shape of x must be equal"),
    "new size": ("CollectiveMismatch", "the shape of x must be equal"),
    "known type": ("CollectiveMismatch", "the dtype of x must be equal"),
    "known operation": ("CollectiveMismatch", "rank {} called reduce_scatter"),
    "operation": ("CollectiveMismatch", "rank {} called all_gather"),
    "barrier": ("CollectiveMismatch", "rank {} called barrier"),
    "wrong op": ("ValueError", "rank {}: op is one of"),
    "wrong out": ("ValueError", "rank {}: out is a torch on GPUs array of float32 (3001,)"),
}  # fmt: skip


def said(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "fine", ""


def check_mismatch(context, kind):
    group = context.split(0)
    with group:
        calls = Calls(group)
        last = group.rank == group.size - 1
        calls.known()
        right = calls.filled(N)
        for _ in range(BEFORE):
            all_reduce(calls.x, out=right)
        found = "fine", ""
        for number in range(AFTER):
            found = said(
                calls.other(kind)
                if last and number == 0
                else lambda: all_reduce(calls.x, out=calls.out())
            )
            if found[0] != "fine":
                break
        if found[0] == "fine":
            calls.torch.cuda.synchronize()
            found = said(group.barrier)
        kept = bool((right == group.size).all())
        again, _ = said(lambda: all_reduce(calls.x))
    context.barrier()
    return found, kept, calls.untouched(), again


@pytest.mark.parametrize("kind", WORDS)
def test_one_rank_makes_another_call(gpus, size, kind):
    if size == 1:
        pytest.skip("one rank agrees with itself")
    name, words = WORDS[kind]
    results = gpus.run(check_mismatch, kind, ranks=size)
    for found, *rest in results:
        assert found == results[0][0]
        assert rest == [True, True, "RankFailure"]
    assert results[0][0][0] == name and words.format(size - 1) in results[0][0][1]


def check_late(context):
    """Each rank's host sleeps in turn; what others put on their streams meanwhile is right."""
    torch = torch_on(context)
    wrong = []
    with context:
        x, out = (torch.zeros(N, device="cuda") for _ in range(2))
        all_reduce(x, out=out)
        met = context.board.rounds
        for number in range(40):
            if number % context.size == context.rank:
                time.sleep(0.002)
            x.fill_(number + context.rank)
            all_reduce(x, out=out)
            x.copy_(out)
            total = all_reduce(x)
            wrong.append((total, context.size * sum(number + r for r in range(context.size))))
        rounds = context.board.rounds - met
    context.barrier()
    return rounds, [number for number, (x, y) in enumerate(wrong) if not bool((x == y).all())]


def test_late_hosts(gpus, size):
    assert gpus.run(check_late, ranks=size) == [(0, [])] * size


def check_replayed(context):
    """A graph of such calls, replayed beside others."""
    torch = torch_on(context)
    with context:
        x, y = (torch.full((N,), 1.0, device="cuda") for _ in range(2))
        all_reduce(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            all_reduce(x, out=x)
            all_reduce(x, out=x)
        for _ in range(3):
            graph.replay()
            all_reduce(y, out=y)
            all_reduce(y, out=y)
            x.div_(context.size**2)
            y.div_(context.size**2)
        torch.cuda.synchronize()
        good = bool((x == 1).all()) and bool((y == 1).all())
    context.barrier()
    return good


def test_graphs_beside_calls(gpus, size):
    assert gpus.run(check_replayed, ranks=size) == [True] * size


def check_alike(context):
    """Ranks differ in what is their own: how the operand lies, and whether there is an `out`."""
    torch = torch_on(context)
    wrong = []
    with context:
        for turn in range(12):
            step = 2 if (turn + context.rank) % 3 == 0 else 1
            x = torch.arange(N * step, device="cuda", dtype=torch.float32)[::step].clone()
            x = torch.stack([x, x], dim=1)[:, 0] if step == 2 else x  # not in C order
            x.copy_(torch.arange(N, device="cuda"))
            out = torch.empty(N, device="cuda") if (turn + context.rank) % 2 else None
            found = all_reduce(x, out=out)
            wanted = context.size * np.arange(N, dtype=np.float32)
            if not np.array_equal(found.cpu().numpy(), wanted):
                wrong.append(turn)
    context.barrier()
    return wrong


def test_what_is_each_ranks_own(gpus, size):
    assert gpus.run(check_alike, ranks=size) == [[]] * size
