"""A check that ranks that own the same part of an operand have the same elements there.

Each rank reads its own copy of a replicated operand. Where the copies differ, the results differ by
rank, and nothing reports it. With SHARDMATH_CHECK=1 the ranks compare a digest of their copies in
each call on cores, which takes one exchange more.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import numpy as np

from shardmath.arrays.detect import library_of
from shardmath.context.agreement import agree
from shardmath.context.context import Context
from shardmath.errors import CollectiveMismatch
from shardmath.geometry import Layout
from shardmath.group.base import rank_names
from shardmath.program.performing import Arguments, Names


def require_equal_copies(
    context: Context, names: Names, arguments: Arguments, layouts: Mapping[str, Layout]
) -> None:
    """Raise CollectiveMismatch on all ranks if copies of an operand's part differ. Collective.

    Parts that overlap without being the same are not compared.
    """
    shared = {
        name: groups
        for name, layout in layouts.items()
        if (groups := [group for group in layout.groups or () if len(group) > 1])
    }
    if not shared:
        return
    operands = dict(zip(names.operands, arguments.operands, strict=True))

    def digests() -> list[bytes]:
        return [_digest(operands[name]) for name in shared]

    def compare(said: list[list[bytes]]) -> None:
        for number, (name, groups) in enumerate(shared.items()):
            for group in groups:
                ranks: dict[bytes, list[int]] = {}
                for rank in group:
                    ranks.setdefault(said[rank][number], []).append(rank)
                if len(ranks) > 1:
                    raise CollectiveMismatch(_different(names.operation, name, ranks))

    agree(context.board, f"{names.operation}: copies", digests, compare)


def _digest(x: Any) -> bytes:
    """A digest of the bits of all elements; the order in memory does not matter."""
    view = library_of(x).host_view(x)
    return blake2b(np.ascontiguousarray(view).view(np.uint8).data, digest_size=16).digest()


def _different(operation: str, name: str, ranks: Mapping[bytes, list[int]]) -> str:
    first, *others = [rank_names(some) for some in ranks.values()]
    return (
        f"{name} of {operation} is replicated, and its copies differ: that of {first} is not that "
        f"of {', nor that of '.join(others)}; make them equal, as broadcast does"
    )
