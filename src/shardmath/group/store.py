"""The ranks that share a key-value store, such as torch.distributed's: start-up through it.

Bytes are all that goes through the store: a key per rank and round, written once.
"""

from __future__ import annotations

from typing import Any

from shardmath.base.caller import who
from shardmath.errors import BootstrapError
from shardmath.group.base import GatheringGroup


class StoreProcessGroup(GatheringGroup):
    """`size` ranks, which meet under `name` in a store with `set(key, bytes)` and `get(key)`.

    `get` waits for the key, for as long as the store is set to.
    """

    def __init__(self, store: Any, name: str, rank: int, size: int) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} of {size} in group {name!r}")
        super().__init__(rank, size)
        self._store = store
        self._name = name
        self._rounds = 0

    def allgather_bytes(self, data: bytes) -> list[bytes]:
        """The `data` of every rank, in the order of the ranks. Collective; sizes may differ.

        Raises BootstrapError when the store fails, or a rank does not come.
        """
        self._rounds += 1
        prefix = f"shardmath/{self._name}/{self._rounds}"
        gathered: list[bytes] = []
        try:
            self._store.set(f"{prefix}/{self._rank}", bytes(data))
            for rank in range(self._nranks):
                gathered.append(bytes(self._store.get(f"{prefix}/{rank}")))
        except Exception as error:
            raise BootstrapError(
                f"{who(self._rank)}: waited in the store for "
                f"rank {len(gathered)} of group {self._name!r}: {error}"
            ) from None
        return gathered
