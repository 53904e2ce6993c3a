"""What stands before each message of an exchange: the name of the operation, the same on all ranks.

Ranks whose program has gone different ways find out here, before a message is read as another's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from shardmath.errors import CollectiveMismatch
from shardmath.group.base import rank_names

__all__ = ["NAME_BYTES", "bodies", "heading"]

NAME_BYTES = 64  # of a name; the rest of a longer one is not compared
_END = b"\0"


@lru_cache(maxsize=256)
def heading(operation: str) -> bytes:
    """What the messages of this operation begin with."""
    return operation.encode()[:NAME_BYTES] + _END


def bodies(texts: Sequence[bytes], operation: str) -> list[bytes]:
    """All ranks' messages, without the heading that each must have. Raises CollectiveMismatch."""
    head = heading(operation)
    for text in texts:
        if not text.startswith(head):
            raise CollectiveMismatch(f"the ranks called different operations: {_calls(texts)}")
    return [text[len(head) :] for text in texts]


def _calls(texts: Sequence[bytes]) -> str:
    """Who called what, those together that called the same."""
    callers: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        name = text.partition(_END)[0].decode(errors="replace")
        callers.setdefault(name, []).append(rank)
    return "; ".join(f"{rank_names(ranks)} called {name}" for name, ranks in callers.items())
