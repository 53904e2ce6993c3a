"""Agreement on a call that is made often: one small exchange once its plan is known.

The first call of a kind exchanges full specs and builds a plan from all of them. Later calls
exchange 16 bytes each, the digest of the own spec; the digests of all ranks together name the plan.
Every rank keeps and drops plans in the same order, since all take part in the same calls; a count
of the plans made travels along, so that ranks whose books differ (one was interrupted) notice it,
and start anew together.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeVar

from shardmath import wire

if TYPE_CHECKING:
    from shardmath.context import DistributedContext

__all__ = ["agree_plan"]

Plan = TypeVar("Plan")

_Key = tuple[str, tuple[bytes, ...]]  # operation, digests of all ranks' specs

_KEPT = 256  # plans per context
_HEAD = struct.Struct("<I16s")  # plans made, digest of the spec


def agree_plan(
    context: DistributedContext,
    operation: str,
    describe: Callable[[], tuple[Hashable, bytes]],
    build: Callable[[list[Any]], Plan],
) -> tuple[Plan, list[bytes]]:
    """The plan of a call, and what each rank said about this one execution of it. Collective.

    `describe()` returns (spec, note). The spec is plain hashable data (tuples, strings, numbers,
    None) of which equal values mean equal calls. The note is bytes that may differ from call to
    call, such as where operands lie. `build(specs)`, given every rank's spec in rank order, is
    pure: it returns the plan, or raises the same error on all ranks. It runs when these specs come
    together for the first time; the result is kept, and must not be changed.

    Raises on every rank what `describe` raised on the first rank where it did, what `build` raises,
    or CollectiveMismatch when the operations differ.
    """
    book: _Book = context.cache("plans", _Book)
    specs: list[Hashable] = []

    def described() -> bytes:
        spec, note = describe()
        specs.append(spec)
        return _HEAD.pack(book.made, book.digest(operation, spec)) + note

    messages = context.gather(operation, described)
    digests, made = _heads(messages)
    notes = [text[_HEAD.size :] for text in messages]
    if any(count != book.made for count in made):
        book.restart(max(made) + 1)
    key = (operation, tuple(digests))
    plan = book.find(key)
    if plan is None:
        texts = context.board.exchange(operation, wire.encode(specs[0]))
        plan = book.keep(key, (build([wire.decode(text) for text in texts]),))
    return plan[0], notes


def _heads(messages: Sequence[bytes]) -> tuple[list[bytes], list[int]]:
    digests, made = [], []
    for text in messages:
        count, digest = _HEAD.unpack_from(text)
        digests.append(digest)
        made.append(count)
    return digests, made


class _Book:
    """The plans that one context has agreed on, the least recently used first."""

    def __init__(self) -> None:
        self.made = 0  # equal on all ranks
        self._plans: OrderedDict[_Key, tuple[Any]] = OrderedDict()
        self._digests: OrderedDict[tuple[str, Hashable], bytes] = OrderedDict()  # this rank's own

    def digest(self, operation: str, spec: Hashable) -> bytes:
        """16 bytes that stand for `spec`. Raises TypeError when it is not plain hashable data."""
        digest = self._digests.get((operation, spec))
        if digest is None:
            digest = blake2b(wire.encode(spec), digest_size=16).digest()
            _keep(self._digests, (operation, spec), digest)
        return digest

    def find(self, key: _Key) -> tuple[Any] | None:
        plan = self._plans.get(key)
        if plan is not None:
            self._plans.move_to_end(key)
        return plan

    def keep(self, key: _Key, plan: tuple[Any]) -> tuple[Any]:
        _keep(self._plans, key, plan)
        self.made += 1
        return plan

    def restart(self, made: int) -> None:
        self._plans.clear()
        self.made = made


def _keep(shelf: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    shelf[key] = value
    if len(shelf) > _KEPT:
        shelf.popitem(last=False)
