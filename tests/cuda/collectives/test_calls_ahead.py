"""Hosts that run ahead on GPUs: calls that all ranks know are put on streams without a meeting.

In the middle of such calls the last rank makes another one. No byte of a result is written from
there on, and all ranks raise the same, at that call, a later one, or where they meet.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

from shardmath.collectives import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter

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
        self.square = self.x.reshape(-1, 10)
        self.sum = self.filled(N)
        self.results = []

    def filled(self, count, value=UNTOUCHED):
        return self.torch.full((count,), value, device="cuda")

    def out(self, count=N, dtype=None):
        found = self.filled(count).to(dtype or self.torch.float32)
        self.results.append(found)
        return found

    def rows(self, count):
        return self.out(10 * count).reshape(count, 10)

    def known(self):
        """What all ranks have agreed on."""
        for op in ("sum", "max"):
            all_reduce(self.x, op=op, out=self.sum)
        all_reduce(self.wide)
        all_reduce(self.whole)
        reduce_scatter(self.x)
        for move in (all_gather, all_to_all, broadcast):
            for x in (self.x, self.whole, self.square):
                move(x)

    def same(self, base):
        """The call that all ranks make, once more."""
        size = self.group.size
        calls = {
            "all_reduce": lambda: all_reduce(self.x, out=self.out()),
            "all_gather": lambda: all_gather(self.x, out=self.out(size * N)),
            "all_to_all": lambda: all_to_all(self.x, out=self.out(self.received())),
            "broadcast": lambda: broadcast(self.x, out=self.out()),
        }
        return calls[base]

    def received(self):
        size, rank = self.group.size, self.group.rank
        return size * (N // size + (rank < N % size))

    def other(self, kind):
        """The call that one rank makes."""
        group, total = self.group, self.group.size * N
        fewer = [0] * (group.size - 2)
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
            "sum": lambda: all_reduce(self.x, out=self.out()),
            "integers": lambda: all_gather(self.whole, out=self.out(total, self.torch.int32)),
            "square": lambda: all_gather(self.square, out=self.rows(total // 10)),
            "too few": lambda: all_gather(self.x[1:], out=self.out(total)),
            "new result of fewer": lambda: all_gather(self.x[1:]),
            "larger out": lambda: all_gather(self.x, out=self.out(total + 1)),
            "other counts": lambda: all_to_all(
                self.x, send_counts=[N - 1, *fewer, 1], out=self.out(self.received())
            ),
            "other expected": lambda: all_to_all(
                self.x, receive_counts=[self.received() - 1, *fewer, 1]
            ),
            "axis": lambda: all_to_all(self.square, axis=1),
            "root": lambda: broadcast(self.x, root=1, out=self.out()),
            "no array, other out": lambda: broadcast(None, out=self.out(N + 1)),
        }
        return calls[kind]

    def untouched(self):
        self.torch.cuda.synchronize()
        return all(bool((each == UNTOUCHED).all()) for each in self.results)


# What all make, what the last rank makes instead, and what all raise.
WORDS = {
    ("all_reduce", "known op"): ("CollectiveMismatch", "op must be equal on all ranks: rank 0 has sum, rank {} has max"),  # noqa: E501
    ("all_reduce", "new op"): ("CollectiveMismatch", "op must be equal on all ranks: rank 0 has sum, rank {} has product"),  # noqa: E501
    ("all_reduce", "known size"): ("CollectiveMismatch", "the shape of x must be equal"),
    ("all_reduce", "new size"): ("CollectiveMismatch", "the shape of x must be equal"),
    ("all_reduce", "known type"): ("CollectiveMismatch", "the dtype of x must be equal"),
    ("all_reduce", "known operation"): ("CollectiveMismatch", "rank {} called reduce_scatter"),
    ("all_reduce", "operation"): ("CollectiveMismatch", "rank {} called all_gather"),
    ("all_reduce", "barrier"): ("CollectiveMismatch", "rank {} called barrier"),
    ("all_reduce", "wrong op"): ("ValueError", "rank {}: op is one of"),
    ("all_reduce", "wrong out"): ("ValueError", "rank {}: out is a torch on GPUs array of float32 (3001,)"),  # noqa: E501
    ("all_gather", "sum"): ("CollectiveMismatch", "rank {} called all_reduce"),
    ("all_gather", "integers"): ("CollectiveMismatch", "the dtype of x must be equal"),
    ("all_gather", "square"): ("CollectiveMismatch", "the ndim of x must be equal"),
    ("all_gather", "too few"): ("ValueError", "rank 0: out is a torch on GPUs array of float32"),
    ("all_gather", "new result of fewer"): ("ValueError", "rank 0: out is a torch on GPUs array"),
    ("all_gather", "larger out"): ("ValueError", "rank {}: out is a torch on GPUs array"),
    ("all_gather", "barrier"): ("CollectiveMismatch", "rank {} called barrier"),
    ("all_to_all", "other counts"): ("ValueError", "rank 0: out is a torch on GPUs array"),
    ("all_to_all", "other expected"): ("CollectiveMismatch", "rank {} expects receive_counts"),
    ("all_to_all", "axis"): ("CollectiveMismatch", "must be equal"),
    ("all_to_all", "square"): ("CollectiveMismatch", "rank {} called all_gather"),
    ("broadcast", "root"): ("CollectiveMismatch", "root must be equal on all ranks"),
    ("broadcast", "sum"): ("CollectiveMismatch", "rank {} called all_reduce"),
    ("broadcast", "no array, other out"): ("ValueError", "rank {}: out is a torch on GPUs array of float32 (3001,)"),  # noqa: E501
    ("broadcast", "barrier"): ("CollectiveMismatch", "rank {} called barrier"),
}  # fmt: skip


def said(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "fine", ""


def check_mismatch(context, base, kind, after=AFTER):
    group = context.split(0)
    with group:
        calls = Calls(group)
        last = group.rank == group.size - 1
        calls.known()
        for _ in range(BEFORE):
            calls.same(base)()
        right, calls.results = calls.results, []
        calls.torch.cuda.synchronize()  # a failed context ends what is still on its way
        context.barrier()
        found = "fine", ""
        for number in range(after):
            found = said(calls.other(kind) if last and number == 0 else calls.same(base))
            if found[0] != "fine":
                break
        if found[0] == "fine":
            calls.torch.cuda.synchronize()
            found = said(group.barrier)
        total = group.size if base == "all_reduce" else 1
        kept = all(bool((each == total).all()) for each in right)
        again, _ = said(lambda: all_reduce(calls.x))
    context.barrier()
    return found, kept, calls.untouched(), again


@pytest.mark.parametrize(("base", "kind"), WORDS)
def test_one_rank_makes_another_call(gpus, size, base, kind):
    require_mismatch(gpus, size, base, kind, AFTER)


@pytest.mark.parametrize(("base", "kind"), [("all_gather", "sum"), ("all_gather", "too few")])
def test_a_barrier_raises_what_kernels_have_found(gpus, size, base, kind):
    """No call follows in which the ranks could have heard of it."""
    require_mismatch(gpus, size, base, kind, 1)


def require_mismatch(gpus, size, base, kind, after):
    if size == 1:
        pytest.skip("one rank agrees with itself")
    name, words = WORDS[base, kind]
    results = gpus.run(check_mismatch, base, kind, after, ranks=size)
    for found, *rest in results:
        assert found == results[0][0]
        assert rest == [True, True, "RankFailure"]
    assert results[0][0][0] == name and words.format(size - 1) in results[0][0][1]


def check_late(context):
    """Each rank's host sleeps in turn; what others put on their streams meanwhile is right."""
    torch = torch_on(context)
    found, rank, size = [], context.rank, context.size
    with context:
        x, out = (torch.zeros(N, device="cuda") for _ in range(2))
        everyone, shown = torch.zeros(size * N, device="cuda"), torch.zeros(N, device="cuda")
        all_reduce(x, out=out)
        for move in (all_gather, all_to_all):
            move(x)
        for root in range(size):
            broadcast(x, root=root)
        met = context.board.rounds
        for number in range(40):
            if number % size == rank:
                time.sleep(0.002)
            x.fill_(number + rank)
            all_reduce(x, out=out)
            x.copy_(out)
            total = all_reduce(x)
            sums = size * sum(number + r for r in range(size))
            x.fill_(number + rank)
            # How much each rank sends changes, and who says what it expects.
            sent = [[(number * 7 + 3 * s + d) % 90 for d in range(size)] for s in range(size)]
            received = [row[rank] for row in sent]
            moved = all_to_all(
                x[: sum(sent[rank])],
                send_counts=sent[rank],
                receive_counts=received if number % 3 else None,
                out=None if number % 3 == 1 else torch.empty(sum(received), device="cuda"),
            )
            parts = [torch.full((received[s],), float(number + s)) for s in range(size)]
            count = size * N - sum(range(size))
            gathered = all_gather(x[: N - rank], out=everyone[:count])
            whole = [torch.full((N - s,), float(number + s)) for s in range(size)]
            root = number % size
            new = broadcast(x if rank == root or number % 2 else None, root=root, out=shown)
            found += [(total, torch.full((N,), float(sums))), (moved, torch.cat(parts))]
            found += [(gathered.clone(), torch.cat(whole))]
            found += [(new.clone(), torch.full((N,), float(number + root)))]
        rounds = context.board.rounds - met
    context.barrier()
    return rounds, [n for n, (x, y) in enumerate(found) if not torch.equal(x.cpu(), y)]


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
        z, parts = torch.zeros_like(x), torch.zeros(context.size * N, device="cuda")
        all_gather(x)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            all_reduce(x, out=x)
            all_gather(x, out=parts)
            all_reduce(x, out=x)
        for _ in range(3):
            graph.replay()
            all_gather(z, out=parts)
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


def check_taken_for_equal(context, count):
    """Results have room for equal parts, and sometimes one rank has fewer, another more: those with
    their share take all parts for equal. By and by, and in a graph.
    """
    torch = torch_on(context)
    rank, size = context.rank, context.size
    into = torch.empty(2, size * count, device="cuda")
    found, wanted, inputs = [], [], []

    def both(x, counts):
        all_gather(x[: counts[rank]], out=into[0])
        all_to_all(x[: sum(counts)], send_counts=counts, receive_counts=None, out=into[1])
        found.append(into.clone())

    with context:
        for turn in range(8):
            counts = [count] * size
            if turn % 3 and size > 1:
                counts[turn % size] += 1
                counts[(turn + 1) % size] -= 1
            x = torch.arange(size * count + 1, device="cuda") + float(1000 * turn + 100 * rank)
            inputs.append((x, counts))
            gathered = [
                np.arange(n, dtype=np.float32) + 1000 * turn + 100 * r for r, n in enumerate(counts)
            ]
            # Every rank sends the same counts: so a rank receives as much of each.
            start, own = sum(counts[:rank]), counts[rank]
            parts = [np.arange(start, start + own) + 1000.0 * turn + 100 * r for r in range(size)]
            wanted.append((np.concatenate(gathered), np.concatenate(parts)))

        def each():
            for x, counts in inputs:
                if counts[rank] == count:
                    both(x, counts)
                    continue
                all_gather(x[: counts[rank]], out=into[0])
                other = torch.empty(size * counts[rank], device="cuda")
                all_to_all(x[: sum(counts)], send_counts=counts, out=other)
                found.append((into[0].clone(), other))

        each()
        each()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            each()
        graph.replay()
        graph.replay()
        torch.cuda.synchronize()
    context.barrier()
    return [
        (n, what)
        for n, results in enumerate(found)
        for what in range(2)
        if not np.array_equal(results[what].cpu().numpy(), wanted[n % len(wanted)][what])
    ]


@pytest.mark.parametrize("count", [4, 30_000])
def test_counts_that_are_taken_for_equal(gpus, size, count):
    assert gpus.run(check_taken_for_equal, count, ranks=size) == [[]] * size


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
            part = x[: 5 + (turn + context.rank) % 4]
            counts = [5 + (turn + r) % 4 for r in range(context.size)]
            out = torch.empty(sum(counts), device="cuda") if (turn + context.rank) % 3 else None
            found = all_gather(part, out=out)
            wanted = np.concatenate([np.arange(count, dtype=np.float32) for count in counts])
            if not np.array_equal(found.cpu().numpy(), wanted):
                wrong.append((turn, "all_gather"))
            table = part.reshape(1, -1).repeat(2, 1)
            out = torch.empty(2, sum(counts), device="cuda") if (turn + context.rank) % 2 else None
            found = all_gather(table, axis=1, out=out)
            if not np.array_equal(found.cpu().numpy(), np.stack([wanted, wanted])):
                wrong.append((turn, "all_gather along the second axis"))
            root = turn % context.size
            given = x if context.rank == root or (turn + context.rank) % 3 == 0 else None
            found = broadcast(given, root=root)
            if not np.array_equal(found.cpu().numpy(), np.arange(N, dtype=np.float32)):
                wrong.append((turn, "broadcast"))
    context.barrier()
    return wrong


def test_what_is_each_ranks_own(gpus, size):
    assert gpus.run(check_alike, ranks=size) == [[]] * size


def check_alone(context):
    """One rank hears at once that an `out` is wrong, also of a call that it knows."""
    torch = torch_on(context)
    x = torch.ones(N, device="cuda")
    found = []
    with context.split(context.rank):
        for count in (N, N, N + 1, N):
            out = torch.full((count,), UNTOUCHED, device="cuda")
            found.append(said(lambda out=out: all_gather(x, out=out))[0])
            found.append(said(lambda out=out: all_to_all(x, send_counts=[N], out=out))[0])
            if count > N:
                found.append(bool((out == UNTOUCHED).all()))
    context.barrier()
    return found


def test_one_rank_alone(gpus):
    fine, wrong = ["fine", "fine"], ["ValueError", "ValueError", True]
    assert gpus.run(check_alone, ranks=1) == [[*fine, *fine, *wrong, *fine]]
