"""The header of each message of an exchange: the name of the operation, the same on all ranks.

Ranks that have called different operations find out here, before a message is read as another's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from shardmath.errors import CollectiveMismatch
from shardmath.group.base import rank_names

__all__ = ["NAME_BYTES", "bodies", "different", "header"]

NAME_BYTES = 64  # of a name; the rest of a longer one is not compared
_END = b"\0"


@lru_cache(maxsize=256)
def header(operation: str) -> bytes:
    """The header of all messages of this operation."""
    return operation.encode()[:NAME_BYTES] + _END


def bodies(texts: Sequence[bytes], operation: str) -> list[bytes]:
    """All ranks' messages, without the header that each must have. Raises CollectiveMismatch."""
    prefix = header(operation)
    for text in texts:
        if not text.startswith(prefix):
            names = [text.partition(_END)[0].decode(errors="replace") for text in texts]
            raise CollectiveMismatch(different(names))
    return [text[len(prefix) :] for text in texts]


def different(names: Sequence[str]) -> str:
    """Who called which operation, by rank; those together that called the same."""
    callers: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        callers.setdefault(name, []).append(rank)
    calls = "; ".join(f"{rank_names(ranks)} called {name}" for name, ranks in callers.items())
    return f"the ranks called different operations: {calls}"
