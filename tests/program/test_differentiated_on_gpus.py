"""Calls of collectives on GPUs with gradients run ahead, as those without: hosts do not meet.

What lists calls, and what a host asks its peers' lists for, is the package's own; a stand-in for
kernels gives results of the right shape.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import torch
from pretended import Team

from shardmath import autograd, collectives
from shardmath.collectives import gpu_calls
from shardmath.errors import CollectiveMismatch

N = 4


class Operand:
    """As DeviceOperand."""

    direct, on_host = None, False

    def __init__(self, turn):
        (self.x,) = turn.arguments.operands
        self.kind, self.spec = turn.spec.spec[0], SimpleNamespace(shape=tuple(self.x.shape))
        self.context = SimpleNamespace(rank=turn.arguments.words[1])

    def is_pushed(self, reduction):
        return False


class Performer(gpu_calls.CollectivePerformer):
    """Performs a collective by no kernel."""

    def read(self, arguments):
        return None

    def operand(self, turn, problem, tag):
        turn.held = Operand(turn)
        return turn.held

    def perform(self, turn, agreement, plan):
        return (self.put(self.operand(turn, plan.problem, 0), plan),)

    def put(self, operand, plan):
        problem, rank = plan.problem, operand.context.rank
        if hasattr(problem, "transfer"):
            return operand.x.new_ones(problem.transfer.result_shape(rank))
        return operand.x.new_ones(problem.needed.local_shape(rank))


class Looks(gpu_calls.Repeats):
    """Compiled calls of which none is kept: which are looked for."""

    def __init__(self, context):
        self.calls, self.names = self, set()
        self._context = weakref.ref(context)

    def get(self, key):
        self.names.add(key[0][0])

    def clear(self):
        pass


@contextmanager
def pretended(group):
    """Within, collectives of the group are those of GPUs, whose hosts run ahead."""
    team = Team()
    team.meets = False
    with ExitStack() as stack:
        for owner, name, stand_in in (
            (group, "team", team),
            (group, "caches", {}),
            (group, "again", {}),
            (group, "repeats", Looks(group)),
            (gpu_calls, "CollectivePerformer", Performer),
            (gpu_calls.Repeats, "of", lambda context: None),
        ):
            stack.enter_context(patch.object(owner, name, stand_in))
        yield


CALLS = {
    "all_reduce": collectives.all_reduce,
    "all_gather": collectives.all_gather,
    "all_gather, columns": partial(collectives.all_gather, axis=1),
    "reduce_scatter": collectives.reduce_scatter,
    "all_to_all": collectives.all_to_all,
    "broadcast": collectives.broadcast,
    "copies": autograd.copies,
}


def count_meetings(context):
    """By name: meetings of hosts in calls and gradients that come again, where a gradient's shape
    is right; and the tags by which ranks list a call that requires grad on one of them only.
    """
    group, counted = context.split(0), {}
    with pretended(group), group:
        for name, call in CALLS.items():
            plain = torch.ones(N + (group.rank if "gather" in name else 0), N)
            if name.endswith("columns"):
                plain = plain.T.contiguous()
            recorded = plain.clone().requires_grad_()

            def forward_and_backward(call=call, recorded=recorded):
                call(recorded).sum().backward()

            counts = []
            for again in (partial(call, plain), forward_and_backward):
                for _ in range(3):
                    again()
                before = group.board.rounds
                again()
                counts.append(group.board.rounds - before)
            counted[name] = counts, recorded.grad.shape == plain.shape
        x = torch.ones(N, N)
        collectives.all_reduce(x.requires_grad_(group.rank == 1))
        said = ""
        try:
            group.board.listed_words(0)
        except CollectiveMismatch as error:
            said = str(error)
        names = group.repeats.names
    return counted, said, sorted(name for name in names if "all_reduce" in name)


def test_hosts_meet_for_no_gradient(contexts):
    """Where the peers' parts are to be known their lists are read, which is no meeting."""
    for counted, said, names in contexts.run(count_meetings, ranks=2):
        with_copies = "all_reduce after copies (grad: 1)"  # their gradient
        assert names == ["all_reduce", "all_reduce (x requires grad)", with_copies]
        assert counted == {name: ([0, 0], True) for name in CALLS}
        assert "rank 0 called all_reduce; rank 1 called all_reduce (x requires grad)" in said
