"""Agreement on a call that is made often: one small exchange once its plan is known.

The first call of a kind exchanges full specs and builds a plan from all of them. Later calls
exchange 16 bytes each, the digest of the own spec; the digests of all ranks together name the plan.
Every rank keeps and drops plans in the same order, since all take part in the same calls; a count
of the plans made travels along, so that ranks whose books differ (one was interrupted) notice it,
and start anew together.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeVar

from shardmath import wire
from shardmath.lru_cache import LRUCache

if TYPE_CHECKING:
    from shardmath.context import Context

__all__ = ["Said", "agree_plan"]

Plan = TypeVar("Plan")

_Key = tuple[str, tuple[bytes, ...]]  # operation, digests of all ranks' specs
_Messages = tuple[str | bytes, ...]  # operation, and what each rank has said

_KEPT = 256  # plans per context
_MADE = struct.Struct("<I")  # plans made, before the digest of the spec
_DIGEST_BYTES = 16
_HEAD_BYTES = _MADE.size + _DIGEST_BYTES


class Said:
    """A spec that will be said again, `plain`, and the digest that stands for it.

    Raises TypeError when it is not plain data.
    """

    __slots__ = ("digest", "plain")

    def __init__(self, plain: Any) -> None:
        self.plain = plain
        self.digest = blake2b(wire.encode(plain), digest_size=_DIGEST_BYTES).digest()


def agree_plan(
    context: Context,
    operation: str,
    describe: Callable[[], tuple[Hashable | Said, bytes]],
    build: Callable[[list[Any]], Plan],
) -> tuple[Plan, list[bytes]]:
    """The plan of a call, and what each rank said about this one execution of it. Collective.

    `describe()` returns (spec, note). The spec is plain hashable data (tuples, strings, numbers,
    None) of which equal values mean equal calls, or such data as `Said`. The note is bytes that may
    differ from call to call, such as where operands lie. `build(specs)`, given every rank's spec in
    rank order, is pure: it returns the plan, or raises the same error on all ranks. It runs when
    these specs come together for the first time; the result is kept, and must not be changed.

    Raises on every rank what `describe` raised on the first rank where it did, what `build` raises,
    or CollectiveMismatch when the operations differ.
    """
    book: _Book = context.cache("plans", _Book)
    specs: list[Hashable | Said] = []

    def described() -> bytes:
        spec, note = describe()
        specs.append(spec)
        return book.head(operation, spec) + note

    messages = context.gather(operation, described)
    heard = book.recall(operation, messages)
    if heard is not None:
        return heard
    book.compare(messages)
    key = (operation, tuple([text[_MADE.size : _HEAD_BYTES] for text in messages]))
    notes = [text[_HEAD_BYTES:] for text in messages]
    plan = book.find(key)
    if plan is None:
        spec = specs[0]
        own = wire.encode(spec.plain if isinstance(spec, Said) else spec)
        texts = context.board.exchange(operation, own)
        plan = book.keep(key, (build([wire.decode(text) for text in texts]),))
    else:
        book.remember(operation, messages, key, notes)
    return plan[0], notes


class _Book:
    """The plans that one context has agreed on."""

    def __init__(self) -> None:
        self._made = 0  # equal on all ranks
        self._said = _MADE.pack(0)  # the same, as peers are told
        self._plans: LRUCache[_Key, tuple[Any]] = LRUCache(_KEPT)  # all ranks use them alike
        self._digests: LRUCache[tuple[str, Hashable], bytes] = LRUCache(_KEPT)  # this rank's own
        # What was said since the last plan was made: its key, and the notes.
        self._heard: LRUCache[_Messages, tuple[_Key, list[bytes]]] = LRUCache(_KEPT)

    def head(self, operation: str, spec: Hashable | Said) -> bytes:
        """How many plans were made, and 16 bytes that stand for `spec`.

        Raises TypeError when it is not plain hashable data.
        """
        if isinstance(spec, Said):
            return self._said + spec.digest
        digest = self._digests.find((operation, spec))
        if digest is None:
            digest = self._digests.keep((operation, spec), Said(spec).digest)
        return self._said + digest

    def compare(self, messages: Sequence[bytes]) -> None:
        """Start anew where ranks have made different numbers of plans, given all ranks' heads."""
        if not all(text.startswith(self._said) for text in messages):
            self.restart(1 + max(_MADE.unpack_from(text)[0] for text in messages))

    def restart(self, made: int) -> None:
        """Forget all plans, as if so many had been made."""
        self._plans.clear()
        self._count(made)

    def recall(self, operation: str, messages: Sequence[bytes]) -> tuple[Any, list[bytes]] | None:
        """The plan and the notes of a call in which all ranks say what they said before."""
        heard = self._heard.find((operation, *messages))
        plan = None if heard is None else self.find(heard[0])
        return None if heard is None or plan is None else (plan[0], heard[1])

    def remember(
        self, operation: str, messages: Sequence[bytes], key: _Key, notes: list[bytes]
    ) -> None:
        """Let `recall` find the plan of that key, and these notes."""
        self._heard.keep((operation, *messages), (key, notes))

    def find(self, key: _Key) -> tuple[Any] | None:
        return self._plans.find(key)

    def keep(self, key: _Key, plan: tuple[Any]) -> tuple[Any]:
        self._count(self._made + 1)
        return self._plans.keep(key, plan)

    def _count(self, made: int) -> None:
        self._made, self._said = made, _MADE.pack(made)
        self._heard.clear()
