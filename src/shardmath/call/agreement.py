"""Agreement on repeated calls: one small exchange once their plan is known.

The first call of a kind exchanges full specs and builds a plan from all of them. Later calls
exchange 16 bytes each, the digest of the own spec; the digests of all ranks together name the plan.
Every rank keeps and drops plans in the same order, since all take part in the same calls; a count
of the plans made travels along, so that ranks whose caches differ (one was interrupted) notice it,
and clear them together.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar

from shardmath.base import wire
from shardmath.base.lru_cache import LRUCache
from shardmath.context.agreement import beginning, checked, described, require_accepted

if TYPE_CHECKING:
    from shardmath.context.context import Context

Plan = TypeVar("Plan")
T = TypeVar("T")

_Key = tuple[str, tuple[bytes, ...]]  # operation, digests of all ranks' specs
_Texts = tuple[bytes, ...]  # of each rank, with the operation

_NAME = "plans"  # of what a context keeps of them
_KEPT = 256  # plans per context
_MADE = struct.Struct("<I")  # plans made, before the digest of the spec
_DIGEST_BYTES = 16
_HEADER_BYTES = _MADE.size + _DIGEST_BYTES


class HashedSpec:
    """A spec, which says what a call is: equal values mean equal calls. It is sent encoded, and
    once it is known by its digest.

    Raises TypeError when it is not plain data.
    """

    __slots__ = ("digest", "encoded", "spec")

    def __init__(self, spec: Any) -> None:
        self.spec = spec
        self.encoded = wire.encode(spec)
        self.digest = blake2b(self.encoded, digest_size=_DIGEST_BYTES).digest()


class Described(Protocol):
    """What one rank says of its call, with whatever else it has found out for itself.

    `note` is bytes that may differ from call to call, such as where operands lie; `payload`, bytes
    that mostly do. `last` is what was agreed on in the last such call, if any was.
    """

    spec: HashedSpec
    note: bytes
    payload: bytes
    last: Agreement[Any] | None


Own = TypeVar("Own", bound=Described)


class Agreement(Generic[Plan]):
    """The plan of a call, and the notes of all ranks on this one execution of it.

    It is the same object in calls in which every rank sends what it sent before, but for payloads,
    so that what a rank has prepared for such calls can be found by it.
    """

    __slots__ = ("key", "notes", "plan", "texts")

    def __init__(self, plan: Plan, notes: list[bytes], key: _Key, texts: _Texts) -> None:
        self.plan, self.notes, self.key, self.texts = plan, notes, key, texts


def agree(
    context: Context,
    operation: str,
    describe: Callable[..., Own],
    build: Callable[[list[Any]], Plan],
    *arguments: Any,
) -> tuple[Own, Agreement[Plan], Sequence[bytes]]:
    """This rank's `describe(*arguments)`; what all ranks have agreed on; payloads. Collective.

    `build(specs)`, given every rank's spec in rank order, is pure: it returns the plan, or raises
    the same error on all ranks. It runs when these specs come together for the first time; the
    result is kept, and must not be changed.

    Raises on every rank what `describe` raised on the first rank where it did, what `build` raises,
    or CollectiveMismatch when the operations differ.
    """
    if context.closed:
        context.require_open()
    board = context.board
    plans: Plans = context.caches.get(_NAME) or Plans.of(context)
    own = described(board, operation, describe, *arguments)
    text = beginning(operation) + plans.made + own.spec.digest + own.note
    known = own.last
    expected = None if known is None else known.texts
    texts, payloads = board.exchange_raw(operation, text, own.payload, expected)
    if known is None or texts is not known.texts:
        return own, concluded(context, operation, own.spec, texts, build), payloads
    if plans.find(known.key) is None:
        return own, _agreed(context, plans, operation, own.spec, texts, build), payloads
    return own, known, payloads


def concluded(
    context: Context,
    operation: str,
    spec: HashedSpec,
    texts: _Texts,
    build: Callable[[list[Any]], Plan],
) -> Agreement[Plan]:
    """The agreement of the ranks, given the texts that all have exchanged. Collective."""
    plans = Plans.of(context)
    known = plans.repeated.find(texts)
    if known is not None and plans.find(known.key) is not None:
        return known
    return _agreed(context, plans, operation, spec, texts, build)


def _agreed(
    context: Context,
    plans: Plans,
    operation: str,
    spec: HashedSpec,
    texts: _Texts,
    build: Callable[[list[Any]], Plan],
) -> Agreement[Plan]:
    """The agreement that texts make which have not come together before. Collective."""
    messages = require_accepted(context.board, operation, texts)
    plans.compare(messages)
    key = (operation, tuple([text[_MADE.size : _HEADER_BYTES] for text in messages]))
    notes = [text[_HEADER_BYTES:] for text in messages]
    plan = plans.find(key)
    if plan is None:
        specs = context.board.exchange(operation, spec.encoded)
        decoded = {spec: wire.decode(spec) for spec in set(specs)}
        built = checked(context.board, build, [decoded[spec] for spec in specs])
        plan = plans.keep(key, (built,))
        return Agreement(plan[0], notes, key, texts)
    return plans.repeated.keep(texts, Agreement(plan[0], notes, key, texts))


class Plans:
    """The plans that one context has agreed on; the same on all its ranks.

    `made` is how many there were, as messages have it. `repeated` has what was agreed on in calls
    since the last was made, by the messages of all ranks.
    """

    def __init__(self) -> None:
        self._count = 0
        self.made = _MADE.pack(0)
        self.all: LRUCache[_Key, tuple[Any]] = LRUCache(_KEPT)  # all ranks use them alike
        self.repeated: LRUCache[_Texts, Agreement[Any]] = LRUCache(_KEPT)
        self.find = self.all.find

    @classmethod
    def of(cls, context: Context) -> Plans:
        """The plans of a context."""
        return context.cache(_NAME, cls)

    def compare(self, messages: Sequence[bytes]) -> None:
        """Forget all plans where ranks have made different numbers of them."""
        if not all(text.startswith(self.made) for text in messages):
            self.restart(1 + max(_MADE.unpack_from(text)[0] for text in messages))

    def restart(self, count: int) -> None:
        """Forget all plans, as if so many had been made."""
        self.all.clear()
        self._set_count(count)

    def keep(self, key: _Key, plan: tuple[Any]) -> tuple[Any]:
        """Keep one that was made now."""
        self._set_count(self._count + 1)
        return self.all.keep(key, plan)

    def _set_count(self, count: int) -> None:
        self._count, self.made = count, _MADE.pack(count)
        self.repeated.clear()


def together(context: Context, operation: str, act: Callable[[], T]) -> T:
    """`act()` of this rank, once it has ended on all. Collective.

    Raises on every rank what it raised on the first rank where it did.
    """
    results: list[T] = []

    def describe() -> bytes:
        results.append(act())
        return b""

    context.gather(operation, describe)
    return results[0]


def raise_on_all_ranks(context: Context, operation: str, mistake: Exception) -> NoReturn:
    """Raise `mistake` on all ranks, which call `operation` or make the same mistake. Collective."""

    def describe() -> bytes:
        raise mistake

    context.gather(operation, describe)
    raise AssertionError("a mistake was sent")


def raising_on_all_ranks(context: Context, operation: str, compute: Callable[[], T]) -> T:
    """The result of `compute`, which looks at arguments. Collective where it raises TypeError or
    ValueError, as all ranks then do.
    """
    try:
        return compute()
    except (TypeError, ValueError) as mistake:
        raise_on_all_ranks(context, operation, mistake)
