"""R5: generated differences between ranks in operation, shape, dtype and number of calls.

All ranks raise what the call documents; none returns, and none hangs until its time is up.
"""

import random
import time

import numpy as np
import pytest
import torch

from draws import seeds
from mortal import ENDLESS, Raised, run_job
from shardmath.context import startup
from shardmath.context.agreement import require_equal
from shardmath.handles.allocation import allocate_symmetric_memory as allocate
from shardmath.handles.allocation import free_symmetric_memory
from shardmath.handles.rendezvous import rendezvous

CASES = 60
ENDED = "finalize() has ended it", "is not initialized", "has left the context"


class Ranks:
    """What the calls below work on, on one rank."""

    def __init__(self, group):
        self.context = startup.initialize("cpu", group)
        self.array = allocate((3, 4), np)
        self.freed = allocate(2, np)
        free_symmetric_memory(self.freed)
        self.handle = rendezvous(self.array)
        self.part = self.context.subset(range(self.context.size)[::-1])


def agreed(values):
    return lambda ranks: ranks.context.agree(
        "agree", lambda: values, lambda specs: require_equal("the values", specs)
    )


# Calls that fit themselves: every rank may make the same one.
GOOD = {
    "allocate": lambda ranks: allocate((3, 4), np),
    "allocate F": lambda ranks: allocate((3, 4), torch, dtype="float64", axis_order="F"),
    "allocate padded": lambda ranks: allocate(3 + ranks.context.rank, np, make_symmetric=True),
    "rendezvous": lambda ranks: rendezvous(allocate(5, np, skip_symmetric_check=True)),
    "handle barrier": lambda ranks: ranks.handle.barrier(),
    "barrier": lambda ranks: ranks.context.barrier(),
    "split": lambda ranks: ranks.context.split(0),
    "agree": agreed((1, 2)),
    "phase": lambda ranks: ranks.context.board.barrier("phase"),
    "finalize": lambda ranks: startup.finalize(),
}
# Calls that do not fit some of the good ones, or are wrong by themselves.
BAD = {
    "allocate shape": ("allocate", lambda ranks: allocate((4, 4), np)),
    "allocate dtype": ("allocate", lambda ranks: allocate((3, 4), np, dtype=np.int32)),
    "allocate negative": ("allocate", lambda ranks: allocate((3, -4), np)),
    "allocate package": ("allocate", lambda ranks: allocate((3, 4), time)),
    "allocate order": ("allocate", lambda ranks: allocate((3, 4), np, axis_order="X")),
    "allocate flag": ("allocate", lambda ranks: allocate((3, 4), np, make_symmetric=True)),
    "allocate much": ("allocate padded", lambda ranks: allocate(1 << 60, np, make_symmetric=True)),
    "rendezvous list": ("rendezvous", lambda ranks: rendezvous([1.0])),
    "rendezvous ordinary": ("rendezvous", lambda ranks: rendezvous(np.zeros((3, 4)))),
    "rendezvous freed": ("rendezvous", lambda ranks: rendezvous(ranks.freed)),
    "agree values": ("agree", agreed((1, 3))),
    "agree length": ("agree", agreed((1, 2, 3))),
    "split color": ("split", lambda ranks: ranks.context.split("red")),
}
ALLOWED = {"CollectiveMismatch", "ValueError", "TypeError", "UseAfterFree", "HeapExhausted"}


def generated(seed):
    """(size, the rank that differs, what the others call, what it calls, a description)."""
    random_ = random.Random(seed)
    size = random_.choice((2, 3, 4))
    odd = random_.randrange(size)
    kind = ("operation", "arguments", "number of calls")[seed % 3]
    common = [random_.choice(sorted(set(GOOD) - {"finalize"})) for _ in range(3)]
    at = random_.randrange(3)
    odd_calls = [GOOD[name] for name in common]
    if kind == "arguments":
        name = random_.choice(sorted(BAD))
        common[at] = BAD[name][0]
        odd_calls = [GOOD[other] for other in common]
        odd_calls[at] = BAD[name][1]
    elif kind == "operation":
        # One family may fit: ranks may ask for the same bytes in another order. Two waits without
        # an exchange, on different words, are told apart by the deadline alone.
        family = common[at].partition(" ")[0]
        others = [n for n in GOOD if n.partition(" ")[0] != family]
        name = random_.choice(sorted(set(others) - {"handle barrier", "phase"}))
        odd_calls[at] = GOOD[name]
    else:
        name = "one fewer" if random_.random() < 0.5 else "one more"
        common = [*common[:2], "barrier", "allocate", "finalize"]
        odd_calls = [GOOD[other] for other in common]
        odd_calls = odd_calls[1:] if name == "one fewer" else [GOOD["barrier"], *odd_calls]
        if common[0] in ("handle barrier", "phase", "barrier"):
            common[0] = "agree"
            odd_calls = [GOOD[other] for other in common]
            odd_calls = odd_calls[1:] if name == "one fewer" else [GOOD["barrier"], *odd_calls]
    return size, odd, common, odd_calls, f"{kind}: {name}, among {common}"


@pytest.mark.parametrize("seed", seeds(CASES, 500))
def test_a_difference_is_an_error_on_all_ranks(seed):
    size, odd, common, odd_calls, what = generated(seed)

    def body(group):
        ranks = Ranks(group)
        ranks.context.barrier()
        for call in odd_calls if ranks.context.rank == odd else [GOOD[n] for n in common]:
            call(ranks)
        return "returned"

    outcomes = run_job(size, body, ENDLESS)
    for rank, outcome in enumerate(outcomes):
        if rank == odd and what.startswith("operation: finalize"):
            # It has ended its context, with its last call, or has called again after that.
            ended = outcome == "returned" or any(text in outcome.text for text in ENDED)
            assert ended, (what, rank, outcome)
            continue
        assert isinstance(outcome, Raised), (what, rank, outcomes)
        assert outcome.kind in ALLOWED, (what, rank, outcome)
        assert "rank" in outcome.text
    if what.startswith("arguments"):
        assert len({outcome.kind for outcome in outcomes}) == 1, (what, outcomes)


def test_a_rank_that_leaves_early_is_named():
    def body(group):
        ranks = Ranks(group)
        if ranks.context.rank == 1:
            ranks.context.close()
            return "left"
        ranks.context.barrier()
        return "returned"

    outcomes = run_job(3, body)
    assert outcomes[1] == "left"
    for outcome in (outcomes[0], outcomes[2]):
        assert (outcome.kind, outcome.ranks) == ("RankFailure", (1,)) and "left" in outcome.text
