"""What the ranks of a product on several hosts pack for each other, by the names of matrices: pure.

Of an operand every parcel has k slowest: an interval of k is one range of its bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from shardmath.geometry import Move, shared_part
from shardmath.operators.matmul.gpu.scale_moves import amax_transfer, scale_moves
from shardmath.operators.matmul.program import passed
from shardmath.operators.matmul.strategy import Strategy
from shardmath.program.steps import Combine
from shardmath.redistribution import TransferPlan
from shardmath.redistribution.parcels import (
    Fetch,
    Outbox,
    Parcel,
    fetches,
    parcel_of,
)

__all__ = ["Routes"]

_SLOWEST = {"a": (1, 0), "b": (0, 1)}


class Routes:
    """Where `rank` finds what the ranks pack, each on the host of that number.

    All is worked out when it is asked for.
    """

    def __init__(self, strategy: Strategy, rank: int, hosts: Sequence[int]) -> None:
        self._strategy = strategy
        self._rank = rank
        self._hosts = tuple(hosts)
        self._passed = passed(strategy)
        self._outboxes: dict[tuple[str, int, int], Outbox] = {}
        self._parcels: dict[tuple[str, int, int], Parcel] = {}
        self._transfers: dict[tuple[str, int], TransferPlan] = {}

    def outbox(self, name: str, src: int, itemsize: int) -> Outbox:
        """What `src` packs of its matrix, whose elements have so many bytes."""
        key = (name, src, itemsize)
        if key not in self._outboxes:
            axes, transfer = _SLOWEST.get(name, (0, 1)), self._transfer(name, itemsize)
            if transfer is not None:
                self._outboxes[key] = Outbox.of_transfer(transfer, src, axes)
            else:
                self._outboxes[key] = Outbox.of(self._added(name, src), itemsize, axes)
        return self._outboxes[key]

    def parcel(self, name: str, src: int, itemsize: int) -> Parcel:
        """What this rank takes of it."""
        key = (name, src, itemsize)
        if key not in self._parcels:
            axes, transfer = _SLOWEST.get(name, (0, 1)), self._transfer(name, itemsize)
            if transfer is not None:
                self._parcels[key] = parcel_of(transfer, src, self._rank, axes)
            else:
                self._parcels[key] = self.outbox(name, src, itemsize).parcels[self._rank]
        return self._parcels[key]

    def boxed(self, name: str, found: Iterable[Move], itemsize: int) -> tuple[Move, ...]:
        """Moves into this rank, those of peers out of what they have packed."""
        made: list[Move] = []
        for move in found:
            if move.src == self._rank:
                made.append(move)
            else:
                made += self.parcel(name, move.src, itemsize).boxed(move)
        return tuple(made)

    def fetches(self, name: str, boxed: Sequence[Move], itemsize: int) -> tuple[Fetch, ...]:
        """What moves read of outboxes on other hosts."""
        return fetches(
            boxed,
            lambda src: self.parcel(name, src, itemsize),
            lambda src: self._hosts[src] != self._hosts[self._rank],
        )

    def _transfer(self, name: str, itemsize: int) -> TransferPlan | None:
        """What moves of the matrices of that name; None where they are added up."""
        key = (name, itemsize)
        if isinstance(self._passed.get(name), Combine):
            return None
        if key not in self._transfers:
            self._transfers[key] = self._made_transfer(name, itemsize)
        return self._transfers[key]

    def _made_transfer(self, name: str, itemsize: int) -> TransferPlan:
        strategy, step = self._strategy, self._passed.get(name)
        if name == "amax":
            return amax_transfer(strategy.problem.size)
        if name.startswith("scales "):
            found = scale_moves(strategy, "ab".index(name[-1]))
            assert found is not None, "there are some"
            return found.transfer
        assert step is not None and not isinstance(step, Combine), name
        transfer = step.transfer
        assert isinstance(transfer, TransferPlan), "between layouts"
        return transfer if name in ("a", "b") else replace(transfer, itemsize=itemsize)

    def _added(self, name: str, src: int) -> list[Move]:
        """All moves out of a matrix of `src` that is added to others, to whomever needs it."""
        step = self._passed[name]
        assert isinstance(step, Combine), name
        ranks = () if step.alone else range(self._strategy.problem.size)
        return [
            move for dst in ranks for move in shared_part(step.held, step.needed, src=src, dst=dst)
        ]
